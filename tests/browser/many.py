"""Pictures of many pipelines, one of them broken, and how long Dagster's pages of them take.

.venv/bin/python -m tests.browser.many build/many 3 40 300 1000
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from arroyo_dagster.state import ParquetBackend, open_store
from tests.browser.chromium import Page, chromium
from tests.browser.prepared import Prepared, job, location, pipeline
from tests.fleets import Written, protocol_job
from tests.loopback import Reply, serving

DEFINITIONS = """
from arroyo_dagster import *

defs = build_arroyo_definitions(
    ArroyoStateStore(checkpoint_url={url!r}, arroyo_api_url={arroyo!r}),
    mode="maintain",
    running=True,
    options=ArroyoOptions(
        runner=InProcessRunner(),
        sensor=SensorOptions(interval_seconds=1, events=2_000, budget_seconds=300),
        verify=VerifyOptions(audit_after=1e12),  # level 1: what the files hold is made up
    ),
)
"""
TEAMS = ("orders", "payments", "clicks", "returns", "stock")
_WIDTH, _HEIGHT = 1600, 1000
_VERIFIED = 100
"""At most so many pipelines are verified, the broken one first: no page shows more of them."""


def named(number: int) -> tuple[str, tuple[str, str]]:
    """The name of a pipeline, and the topics that it reads and writes: five of a team in a row."""
    team = TEAMS[number % len(TEAMS)]
    row, place = divmod(number // len(TEAMS), 5)
    source = team if place == 0 else f"{team}_{row}_{place - 1}"
    return f"{team}-{row}-{place}", (source, f"{team}_{row}_{place}")


@contextmanager
def many(folder: Path, count: int) -> Iterator[Prepared]:
    """Serve so many pipelines; the sensor has reported, and `arroyo_verify` has found one."""
    store = open_store(str(folder / "checkpoints"))
    names = dict(map(named, range(count)))
    jobs = [protocol_job(name, f"job_{name}") for name in names]
    begun = time.time_ns() // 1000
    for paths, (source, sink) in zip(jobs, names.values(), strict=True):
        ends = [f"source_{source}_0", f"sink_{sink}_9"]
        Written(store, paths, now=lambda: begun, ends=ends).epochs(1)

    def answer(path: str, query: dict[str, str]) -> Reply:
        if path.endswith("/jobs"):
            return Reply(body={"data": [job(paths.job, paths.pipeline) for paths in jobs]})
        found = [pipeline(name, topics) for name, topics in names.items()]
        return Reply(body={"data": found, "hasMore": False})

    with serving(answer) as arroyo:
        text = DEFINITIONS.format(url=str(folder / "checkpoints"), arroyo=arroyo.url)
        with location(folder, text) as (address, process):
            dagster = Prepared(address, process)
            dagster.tick()
            store.delete_many([ParquetBackend(store, jobs[count // 2]).load().paths[0]])
            near = [str(one.root) for one in jobs[count // 2 :][:_VERIFIED]]
            dagster.launch("arroyo_verify", arroyo_verify_op={"pipelines": near})
            dagster.launch("arroyo_fleet")
            yield dagster


NOTHING = "nothing"


@dataclass(frozen=True)
class Opened:
    """A page that was opened.

    Attributes:
        seconds: until it showed what it is for.
    """

    name: str
    seconds: float


def pages(count: int) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield the name, the path and the texts of each page; the first shows no pipelines."""
    name, (_, sink) = named(count // 2)
    key = f"arroyo/{name}/checkpoint"
    yield NOTHING, "/deployment/daemons", ("Daemons",)
    yield "catalogue", "/assets", ("arroyo / ", "Materialized")
    yield "lineage-of-one", f"/assets/{key}?view=lineage", ("checkpoint", sink)
    yield "page-of-one", f"/assets/{key}", ("arroyo/epoch", "Latest check results")
    yield "lineage-of-all", "/asset-groups", ("Materialize all", "arroyo_clicks")
    yield "fleet", "/assets/arroyo/fleet", ("arroyo/broken",)


def opened(page: Page, dagster: Prepared, count: int, pictures: Path | None) -> Iterator[Opened]:
    """Open each page, and take its picture."""
    for name, path, texts in pages(count):
        page.open("about:blank", width=_WIDTH, height=_HEIGHT)
        begun = time.monotonic()
        page.open(dagster.url + path, width=_WIDTH, height=_HEIGHT)
        page.await_text(*texts)
        yield Opened(name, time.monotonic() - begun)
        if pictures is not None and name != NOTHING:
            page.settle()
            page.picture(pictures / f"{count}-{name}.png", (0, 0, _WIDTH, _HEIGHT))


def main(folder: str, *counts: str) -> None:
    """Take the pictures, and print the seconds."""
    pictures = Path(folder)
    pictures.mkdir(parents=True, exist_ok=True)
    for count in map(int, counts):
        with (
            tempfile.TemporaryDirectory(prefix="arroyo-many-") as below,
            many(Path(below), count) as dagster,
            chromium() as page,
        ):
            for one in opened(page, dagster, count, pictures):
                print(f"{count} pipelines: {one.name} in {one.seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
