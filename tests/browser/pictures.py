"""What Dagster's pages show of the prepared instance, and the docs' pictures of them.

make pictures
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from tests.browser.chromium import Page, chromium, find_chromium
from tests.browser.prepared import BROKEN, LIVE, LOCATION, VANISHED, Failed, prepared

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
NAVIGATION = 240
"""The width of what is at the left of every page."""
_PARTITION = "/assets/arroyo/{}?view=partitions&partition={}"
_IMAGES = "[...document.images].filter(one => one.src.startsWith('data:') && one.width > 1).length"
_CHECK = "/assets/arroyo/{}?view=checks&checkDetail={}"


@dataclass(frozen=True, kw_only=True)
class Shot:
    """A page, and what a person sees there.

    Attributes:
        name: of the picture; None = it is only tested.
        texts: what the page shows.
        clicks: texts to click, one after the other, once the page shows `texts`; the last page
            shows `then`.
        images: how many pictures the page shows at least.
        left, right, top, bottom: what is left out of the picture.
        scale: of the picture.
    """

    path: str
    texts: tuple[str, ...]
    name: str | None = None
    clicks: tuple[str, ...] = ()
    then: tuple[str, ...] = ()
    width: int = 1400
    height: int = 900
    images: int = 0
    left: int = NAVIGATION
    right: int = 0
    top: int = 0
    bottom: int = 0
    scale: float = 1.0

    def show(self, page: Page, url: str) -> None:
        """Open the page, and wait until it shows its texts."""
        page.open(url + self.path, width=self.width, height=self.height)
        page.await_text(*self.texts)
        for text in self.clicks:
            page.click(text)
        page.await_text(*self.then)
        page.await_true(f"{_IMAGES} >= {self.images}")

    def take(self, page: Page, path: Path) -> None:
        """Take the picture."""
        area = (self.left, self.top, self.width - self.right, self.height - self.bottom)
        page.picture(path, area, scale=self.scale)


def shots(failed: Failed) -> Iterator[Shot]:
    """Yield the pages."""
    live, broken = quote(LIVE, safe=""), quote(BROKEN.root, safe="")
    yield Shot(
        name="asset-graph.png",
        path="/assets/arroyo/checkpoint?view=lineage&lineageScope=downstream&lineageDepth=5",
        texts=("epoch_catalog", "fleet", "health", "audit", "compacted_state", "gc_journal"),
        width=2400,
        height=1060,
        left=540,
        right=290,
        top=180,
        scale=0.8,
    )
    yield Shot(
        path="/assets/arroyo/checkpoint",
        texts=("Sensors", "arroyo_checkpoint_sensor", "arroyo-state show JOB --url URL"),
    )
    yield Shot(
        name="epoch-catalog.png",
        path=_PARTITION.format("epoch_catalog", live),
        texts=("newest epoch", "49, of worker generation 3", "12 kept, ", " in 36 files, "),
        images=3,
        top=110,
    )
    yield Shot(
        path=_PARTITION.format("checkpoint", broken),
        texts=("arroyo/epoch", "(4,216 bytes) in 8 files, 8 rows", "/pipelines/payments"),
    )
    yield Shot(
        name="compacted-state.png",
        path=_PARTITION.format("compacted_state", live),
        texts=("161 → 4", "files opened by a subtask", "forecast"),
        top=110,
    )
    yield Shot(
        path=_PARTITION.format("retained_epochs", live),
        texts=("deleted", "37 removed, 12 kept, from epoch 38 on"),
    )
    yield Shot(
        path=_PARTITION.format("gc_journal", live), texts=("deleted so far", " in 1 run", "expire")
    )
    yield Shot(
        name="fleet-checks.png",
        path=_CHECK.format("fleet", "every_job_restorable"),
        texts=("every_job_files_exist", f" of 11 jobs: {BROKEN.root}: ", VANISHED.root, "Failed"),
        width=1300,
        height=800,
        top=110,
    )
    yield Shot(
        path=_CHECK.format("health", "file_counts_low"),
        texts=("newest_epoch_readable", "Limits:", "Severity:", "Example:", "Runbook:"),
    )
    yield Shot(
        path=_CHECK.format("audit", "restore_dry_run"), texts=("files_unchanged", BROKEN.root)
    )
    yield Shot(
        name="fleet-overview.png",
        path="/assets/arroyo/fleet",
        texts=("arroyo/jobs_broken", "arroyo-state jobs --url URL", "vanished"),
        width=1800,
        top=100,
        height=1150,
        scale=0.8,
    )
    yield Shot(
        name="fleet-plots.png",
        path="/assets/arroyo/fleet",
        texts=("arroyo/jobs_broken",),
        clicks=("Plots",),
        then=("arroyo/bytes", "arroyo/max_files"),
        width=1300,
        height=900,
        top=480,
    )
    yield Shot(
        path="/assets/sdf/examples.words/state/count-words/word-stats",
        texts=("Source code", "longest-sentence", "first rows"),
    )
    for run, text in (
        (failed.broken, f"{BROKEN.root}: checks files_exist, restorable failed: {BROKEN.root}/"),
        (failed.vanished, f"{VANISHED.root}: there is no such job below the checkpoint URL"),
    ):
        yield Shot(
            name="failed-run.png" if run == failed.broken else None,
            path=f"/runs/{run}",
            texts=("RUN_FAILURE", f"Failure: {text}"),
            width=1300,
            height=760,
            bottom=130,  # the stack trace
        )
    # The last of these links leads to the first tick.
    yield Shot(
        path=f"/locations/{LOCATION}/sensors/arroyo_checkpoint_sensor",
        texts=("(11 partitions created)",),
        clicks=("0 runs requested",),
        then=("Skip reason: ", "new epochs of ", "; appeared: clicks/job_clicks, "),
    )


def main() -> int:
    """Take every picture. Returns the exit code."""
    if find_chromium() is None:
        print("Chromium is missing. Next: install it (Debian: apt-get install chromium)")
        return 1
    with (
        tempfile.TemporaryDirectory(prefix="arroyo-pictures-") as folder,
        prepared(Path(folder)) as dagster,
        chromium() as page,
    ):
        for shot in shots(dagster.go_through()):
            if shot.name is not None:
                shot.show(page, dagster.url)
                page.settle()
                shot.take(page, PICTURES / shot.name)
                print(f"took {PICTURES / shot.name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
