"""What maintenance and reads cost beside the size of a job: files, epochs and rows.

`make bench-scale` runs this and draws docs/pictures/scale.svg. Each operation runs at growing
sizes, until the next size would take longer than the limit, as the last one lets expect; what is
larger is reported as not reached. Metadata is that of `tests.epochs.MadeUpJob`, made up as it is
read; files and rows lie in the folder for temporary files. Figures are processor time of one
process: machines are shared, and one operation would wait for others.
"""

from __future__ import annotations

import argparse
import csv
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from arroyo_dagster.state import (
    CompactionPolicy,
    CompactionSettings,
    GcRequest,
    ObjectStore,
    ParquetBackend,
    PlanKind,
    Retention,
    list_jobs,
    open_state,
    open_store,
    plan_gc,
    run_compaction,
    timestamp_table_config,
    verify_job,
)
from tests import epochs
from tests.fabricated import OPERATOR, PATHS, publish, stored_rows, time_files
from tests.formats import ExpiringTimeKeyFiles

ROUNDS = 3
FILES_PER_EPOCH = 20
LOOK_UPS = 20
BATCHES = 20
_NOW_MICROS = 10**14
_MOST_ROWS_IN_MEMORY = 10**6

SCHEMA = pa.schema(
    [
        ("key", pa.int64()),
        ("cents", pa.int64()),
        ("x", pa.float64()),
        pa.field("_timestamp", pa.timestamp("ns"), nullable=False),
    ]
)
CONFIG = timestamp_table_config("t", retention_micros=10**15, schema=SCHEMA, keys=["key"])


@dataclass(frozen=True, slots=True)
class Measured:
    """One operation at one size; without seconds it was not reached."""

    axis: str
    operation: str
    size: int
    seconds: tuple[float, ...] = ()

    def row(self) -> list[str]:
        if not self.seconds:
            return [self.axis, self.operation, str(self.size), "", "", ""]
        found = (statistics.median(self.seconds), min(self.seconds), max(self.seconds))
        return [self.axis, self.operation, str(self.size), *(f"{one:.3g}" for one in found)]


Prepared = dict[str, Callable[[], object]]
"""The operations on one prepared job, by name."""


# ---- files: a job of 20 operators' tables, with one orphan for ten files -------------------------


@contextmanager
def files_of(size: int) -> Iterator[Prepared]:
    """Prepare a job with so many data files that metadata names."""
    store: Any = epochs.MadeUpJob(max(1, size // FILES_PER_EPOCH), operators=10, tables=2)

    def orphans() -> object:
        request = GcRequest(kind=PlanKind.ORPHANS)
        return plan_gc(store, epochs.PATHS, request, now_micros=_NOW_MICROS)

    yield {"orphans plan": orphans}


@contextmanager
def stored_files_of(size: int) -> Iterator[Prepared]:
    """Prepare one epoch that lists so many files on disk, of ten rows each."""
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        batches = (stored_rows(CONFIG, _rows(number, 10, size)) for number in range(size))
        files = time_files(store, CONFIG, batches, 1)
        publish(store, [(CONFIG, ExpiringTimeKeyFiles(files=files))], parallelism=1)
        table = open_state(folder).job(PATHS.root).epoch().table(OPERATOR, "t")
        table.lookup(1)  # reads the footers

        yield {
            "verify metadata and existence": lambda: _passed(verify_job(store, PATHS, level=0)),
            "verify footers": lambda: _passed(verify_job(store, PATHS, level=1)),
            "look-up of a key": lambda: table.lookup(4),
        }


# ---- epochs: the same job, by epochs -------------------------------------------------------------


@contextmanager
def epochs_of(size: int) -> Iterator[Prepared]:
    """Prepare a job with so many epochs, of 20 files each."""
    store: Any = epochs.MadeUpJob(size, operators=10, tables=2)

    def expiry() -> object:
        keep = Retention(keep_epochs=10)
        request = GcRequest(kind=PlanKind.EXPIRE, retention=keep)
        return plan_gc(store, epochs.PATHS, request, now_micros=_NOW_MICROS, with_sizes=False)

    yield {"expiry plan": expiry}


@contextmanager
def written_epochs_of(size: int) -> Iterator[Prepared]:
    """Prepare a job on disk with so many epochs and no data."""
    from tests.fleets import Written, protocol_job

    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        Written(store, protocol_job("written"), files=False).epochs(size)

        def listed() -> None:
            (paths,) = list_jobs(store)
            assert len(ParquetBackend(store, paths).epochs()) == size

        def newest() -> None:
            (paths,) = list_jobs(store)
            found = ParquetBackend(store, paths).load()
            assert found.epoch == size

        yield {"list jobs and epochs": listed, "load the newest epoch": newest}


# ---- rows: one expiring table in 20 epochs -------------------------------------------------------


def _rows(seed: int, count: int, keys: int) -> pa.Table:
    chance = np.random.default_rng(seed)
    return pa.table(
        [
            pa.array(chance.integers(0, keys, count)),
            pa.array(chance.integers(0, 10_000, count)),
            pa.array(chance.normal(size=count)),
            pa.array(np.arange(count) * 10**6 + seed * 10**12, pa.timestamp("ns")),
        ],
        schema=SCHEMA,
    )


@contextmanager
def rows_of(size: int) -> Iterator[Prepared]:
    """Prepare a table of so many rows in files of 20 epochs, or of more if they are large."""
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        count = min(size // BATCHES, _MOST_ROWS_IN_MEMORY)
        batches = (
            stored_rows(CONFIG, _rows(seed, count, size // 10)) for seed in range(size // count)
        )
        files = time_files(store, CONFIG, batches, 2)
        publish(store, [(CONFIG, ExpiringTimeKeyFiles(files=files))])
        table = open_state(folder).job(PATHS.root).epoch().table(OPERATOR, "t")
        table.lookup(1)  # reads the footers
        settings = CompactionSettings(policy=CompactionPolicy.FULL)
        yield {
            "verify every row": lambda: _passed(verify_job(store, PATHS)),
            "look-up of a key": lambda: table.lookup(4711),
            # The last: it changes the job.
            "full compaction": lambda: _compacted(store, settings),
        }


def _passed(verdict: Any) -> None:
    assert verdict.passed, verdict


def _compacted(store: ObjectStore, settings: CompactionSettings) -> None:
    assert run_compaction(store, PATHS, settings).merges


AXES: tuple[tuple[str, Callable[[int], Any], tuple[int, ...]], ...] = (
    ("files", files_of, (10**2, 10**3, 10**4, 10**5, 10**6)),
    ("files", stored_files_of, (10**2, 10**3, 10**4, 10**5, 10**6)),
    ("epochs", epochs_of, (10**2, 10**3, 10**4)),
    ("epochs", written_epochs_of, (10**2, 10**3, 10**4)),
    ("rows", rows_of, (10**5, 10**6, 10**7, 10**8)),
)


def measured(limit_seconds: float) -> Iterator[Measured]:
    """Measure every operation at every size within the limit."""
    for axis, prepare, sizes in AXES:
        with prepare(sizes[0]) as operations:  # what the first use loads
            names = list(operations)
            for call in operations.values():
                call()
        used = 0.0
        for place, size in enumerate(sizes):
            growth = size / sizes[place - 1] if place else 1
            if used * growth > limit_seconds:
                yield from (Measured(axis, name, size) for name in names)
                continue
            begun = time.process_time()
            with prepare(size) as operations:
                for name, call in operations.items():
                    yield Measured(axis, name, size, _seconds(call, once=name == "full compaction"))
            used = time.process_time() - begun


def _seconds(call: Callable[[], object], *, once: bool) -> tuple[float, ...]:
    found: list[float] = []
    while len(found) < (1 if once else ROUNDS):
        gc.collect()
        begun = time.process_time()
        call()
        found.append(time.process_time() - begun)
    return tuple(found)


def main() -> None:
    """Write the figures as CSV, and each as it is measured to standard error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="the CSV file to write")
    parser.add_argument(
        "--limit", type=float, default=600, help="processor seconds for one size of one kind of job"
    )
    given = parser.parse_args()
    rows = [["axis", "operation", "size", "seconds", "low", "high"]]
    for one in measured(given.limit):
        rows.append(one.row())
        print(*rows[-1], sep=",", file=sys.stderr, flush=True)
    with given.output.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main()
