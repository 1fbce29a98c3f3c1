"""What Dagster's pages show of the prepared instance, and the docs' pictures of them.

make pictures
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.browser.chromium import Page, chromium, find_chromium
from tests.browser.prepared import BROKEN, LIVE, VANISHED, Runs, prepared

CHECKPOINT = "checkpoint"
PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
NAVIGATION = 240
"""The width of what is at the left of every page."""
_IMAGES = "[...document.images].filter(one => one.src.startsWith('data:') && one.width > 1).length"
_CHECK = "/assets/{}?view=checks&checkDetail={}"


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


def shots(runs: Runs) -> Iterator[Shot]:
    """Yield the pages."""
    live, broken = f"arroyo/{LIVE}", f"arroyo/{BROKEN.pipeline}"
    yield Shot(
        name="lineage.png",
        path="/asset-groups",
        texts=("arroyo_fleet",),
        width=2200,
        height=1360,
        left=540,
        top=110,
        scale=0.75,
    )
    yield Shot(
        name="checkpoint.png",
        path=f"/assets/{live}/{CHECKPOINT}",
        texts=("arroyo/epoch", "Latest check results", f"arroyo-state show {LIVE}"),
        width=1800,
        height=1150,
        top=100,
        scale=0.8,
    )
    yield Shot(
        path=f"/assets/{live}/{CHECKPOINT}",
        texts=("arroyo/epoch",),
        clicks=("Plots",),
        then=("arroyo/bytes", "arroyo/files"),
        width=1300,
        height=900,
        top=480,
    )
    yield Shot(
        name="broken-check.png",
        path=_CHECK.format(f"{broken}/{CHECKPOINT}", "restorable"),
        texts=("restorable", "Failed", "file-missing", "Runbook:"),
        width=2000,
        height=1200,
        top=110,
        scale=0.75,
    )
    yield Shot(
        name="compacted-state.png",
        path=f"/assets/{live}/compacted_state",
        texts=(" → ", "files opened by a subtask", "forecast"),
        top=110,
    )
    yield Shot(
        path=f"/assets/{live}/retained_epochs", texts=("deleted", " removed, 12 kept, from epoch ")
    )
    yield Shot(path=_CHECK.format(f"{live}/{CHECKPOINT}", "healthy"), texts=("late", "Runbook:"))
    yield Shot(
        path=_CHECK.format("arroyo/fleet", "every_pipeline_known"),
        texts=("Failed", BROKEN.root, VANISHED.root, "Runbook:"),
    )
    yield Shot(
        name="fleet-overview.png",
        path="/assets/arroyo/fleet",
        texts=("arroyo/broken", "arroyo-state jobs --url URL", "vanished"),
        width=2500,
        top=100,
        height=1300,
        scale=0.7,
    )
    yield Shot(
        path="/assets/arroyo/fleet",
        texts=("arroyo/broken",),
        clicks=("Plots",),
        then=("arroyo/bytes", "arroyo/files"),
        width=1300,
        height=900,
        top=480,
    )
    yield Shot(
        path="/assets/sdf/examples.words/state/count-words/word-stats",
        texts=("Source code", "longest-sentence", "first rows"),
    )
    yield Shot(
        name="failed-run.png",
        path=f"/runs/{runs.failed}",
        texts=("RUN_FAILURE", " pipelines failed: ", BROKEN.root, VANISHED.root),
        width=1300,
        height=760,
        bottom=130,  # the stack trace
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
