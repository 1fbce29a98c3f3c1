"""The net below changes of the core: operations publish, delete and leave for a restore what the
table of digests says.

The jobs are those of a real Arroyo and random ones by seed, of both layouts, managed and Arroyo's.
Everything goes through the command line. `python -m tests.compat.test_digests` writes the table
anew: only after a change that is meant to change what is written.
"""

from __future__ import annotations

import functools
import gzip
import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pytest

from arroyo_dagster.engine import run_pipeline
from arroyo_dagster.state import JobPaths, Layout, MemoryStore, ParquetBackend, StatePath, list_jobs
from tests.compat.arroyo import ARCHIVES, members
from tests.compat.digests import (
    BEGAN,
    CLOCK,
    DAY,
    Case,
    Objects,
    Result,
    Words,
    as_rows,
    filled,
    held,
    results_of,
    still_time,
)
from tests.evolved_jobs import SHIFTED, SUM, SUMS, Sql, renamed, sql_job
from tests.formats import ExpiringTimeKeyConfig, GlobalKeyedFiles
from tests.internals import restored_rows
from tests.jobs import word_job

TABLE = Path(__file__).parent / "data" / "digests.json.gz"

STOPPED = ("--assume", "JOB=stopped")
QUIET = (*STOPPED, "--quiet", "0")
COMPACT, UNDO = ("compact", "run", "JOB", *QUIET), ("undo", "JOB", *STOPPED)
LATER = ("later",)
EXPIRE = ("gc", "run", "expire", "JOB", "--keep", "2", *STOPPED)
ORPHANS = ("gc", "run", "orphans", "JOB", "--older-than", "1h", *STOPPED)
COLLECTIONS = (EXPIRE, LATER, ORPHANS, ("gc", "undelete", "JOB"), (*ORPHANS, "--delete"))


def edit(*words: str, managed: bool = False) -> Words:
    return ("edit", words[0], "JOB", *words[1:], *(STOPPED if managed else QUIET))


def iso(micros: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(micros // 1_000_000))


def a_key(store: MemoryStore, paths: JobPaths) -> Words | None:
    """The key of the first row of the first table with keys of plain columns."""
    newest = ParquetBackend(store, paths).load()
    for operator in newest.operators:
        for name, files in operator.tables.items():
            config = operator.configs[name].config
            if isinstance(files, GlobalKeyedFiles) or not isinstance(config, ExpiringTimeKeyConfig):
                continue
            managed = newest.progress is not None
            rows = restored_rows(store, operator, name, managed=managed).rows
            columns = [rows.column(at) for at in config.schema.hashed_indices]
            if rows.num_rows and columns and not any(pa.types.is_nested(c.type) for c in columns):
                key = min(as_rows(pa.table(columns, list("abcdefgh"[: len(columns)]))), key=repr)
                return tuple("null" if one is None else str(one) for one in key)
    return None


def edits_of(objects: Objects, paths: JobPaths) -> list[Words]:
    store = filled("digests", objects)
    newest = ParquetBackend(store, paths).load()
    marks = [o.min_watermark_micros for o in newest.operators if o.min_watermark_micros]
    key = a_key(store, paths)
    found = [edit("offsets", "all=+3"), edit("rescale", "3"), edit("rescale", "1")]
    if marks:
        found.append(edit("watermark", iso(max(marks) - 1_000_000)))
        found.append(edit("retain", iso(max(marks) - 5_000_000)))
    return found if key is None else [*found, edit("delete-key", *key)]


def arroyo_cases(name: str, objects: Objects, paths: JobPaths) -> Iterator[Case]:
    """What is done to a stopped job of Arroyo's."""
    changes = [one for step in edits_of(objects, paths) for one in (step, UNDO)]
    kept = [step for step in changes[:4] if step != UNDO]
    yield Case(name, objects, paths, [COMPACT, UNDO, *changes, COMPACT, *kept, UNDO])
    yield Case(f"{name}, collected", objects, paths, [COMPACT, *COLLECTIONS])
    epochs = ParquetBackend(filled("digests", objects), paths).epochs()
    back = [("rollback", "JOB", str(epoch), *QUIET) for epoch in (epochs[-2], epochs[0])]
    yield Case(f"{name}, back", objects, paths, [*back, UNDO, COMPACT, UNDO, UNDO])
    heads = [p for p in objects if p.endswith(("/metadata", "/checkpoint-manifest.pb"))]
    newest = max(path.split("/operator-")[0].split("/checkpoint-m")[0] for path in heads)
    lost = [path for path in sorted(heads) if path.startswith(newest)]
    rebuild = ("rebuild", "JOB", *QUIET)
    yield Case(
        f"{name}, lost", objects, paths, [rebuild, UNDO, rebuild, COMPACT], lost[2:3] or lost
    )


@functools.cache
def fixtures() -> list[tuple[str, Objects, JobPaths]]:
    """The jobs of a real Arroyo."""
    found = []
    for archive in ARCHIVES:
        objects = {
            StatePath(unquote(one.name.removeprefix("./"))): (one.data, int(one.mtime * 1_000_000))
            for one in members(archive)
            if one.data is not None
        }
        for paths in list_jobs(filled("digests", objects)):
            its = {path: one for path, one in objects.items() if paths.contains(path)}
            found.append((f"{archive} {paths.root}", its, paths))
    return found


def fixture_cases(number: int) -> Iterator[Case]:
    name, objects, paths = fixtures()[number]
    yield from arroyo_cases(name, objects, paths)
    fork = ("fork", f"{paths.root}", "JOB", "--from-url", "memory://source", *QUIET)
    steps = (edit("offsets", "all=+3"), fork, UNDO)
    yield Case(f"{name}, forked", objects, paths, steps, source=objects)


def random_arroyo_cases(seed: int) -> Iterator[Case]:
    """A job by seed, and one of other SQL that takes its state over."""
    chance = random.Random(f"digests {seed}")
    layout = chance.choice((Layout.LEGACY, Layout.PROTOCOL))
    sql = Sql(distinct=chance.choice(((1,), (1, 2))), sign=chance.choice((0, 128)))

    def job(name: str, of: Sql, base: int) -> tuple[Objects, JobPaths]:
        size = {"epochs": chance.randint(2, 5), "parallelism": chance.randint(1, 3)}
        made = sql_job(layout, name, of, base=base, store=filled("made", {}), **size)
        return held(made.store), made.paths

    with still_time():
        CLOCK.micros = BEGAN - DAY
        source, from_paths = job("job_a", sql, chance.randint(0, 9))
        twin, paths = job("job_b", sql, chance.randint(10, 19))
        other = replace(sql, window=(*sql.window, SUMS), totals=(*sql.totals, SUM))
        evolved, evolved_paths = job("job_c", renamed(other, **SHIFTED), chance.randint(20, 29))
    name = f"random {seed} {layout.value}"
    yield from arroyo_cases(name, source, from_paths)
    words = (str(from_paths.root), "JOB", "--from-url", "memory://source", *QUIET)
    steps = [("fork", *words), COMPACT, UNDO, UNDO]
    yield Case(f"{name}, forked", twin, paths, steps, source=source)
    pairs = [(old, SHIFTED[key]) for key, old in sql.ids.items() if old != SHIFTED[key]]
    mapped = [one for pair in pairs for one in ("--map", "=".join(pair))]
    steps = [("evolve", *words, *mapped), UNDO]
    yield Case(f"{name}, evolved", evolved, evolved_paths, steps, source=source)


def managed_case(seed: int) -> Case:
    """A managed job by seed: compacted, edited, rolled back and collected; between, it runs on."""
    chance = random.Random(f"digests {seed}")
    layout = chance.choice((Layout.LEGACY, Layout.PROTOCOL, Layout.PROTOCOL))
    size = {
        "rows": chance.randint(20, 60),
        "rows_per_epoch": chance.randint(2, 5),
        "parallelism": chance.randint(1, 3),
        "letters": "abcdefg"[: chance.randint(2, 7)],
        "merge_files_after": 99,
        "keep_epochs": None,
    }

    def run(store: MemoryStore, epochs: int) -> Any:
        pipeline = word_job(store, sinks=0, **size)
        pipeline.layout = layout
        run_pipeline(pipeline, store, max_epochs=epochs)
        return pipeline

    with still_time():
        CLOCK.micros = BEGAN - DAY
        store = filled("made", {})
        paths = run(store, chance.randint(3, 6)).paths
    resume = ("resume",)
    changes = [
        edit("offsets", "all=-1", managed=True),
        edit("delete-key", "a", managed=True),
        edit("set", "count", "counts", '"a"', "4", managed=True),
    ]
    chance.shuffle(changes)
    first, second, third = changes
    compact = ("compact", "run", "JOB")
    steps = [compact, resume, first, UNDO, second, resume, third, compact, resume, LATER]
    steps += [("rollback", "JOB", "2"), resume, UNDO, *COLLECTIONS, resume]
    name = f"managed {seed} {layout.value}"
    return Case(name, held(store), paths, steps, resume=lambda store: void(run(store, 2)))


def void(_: object) -> None:
    return None


KINDS = {
    "fixture": (fixture_cases, 15, (3, 4, 10)),
    "random Arroyo job": (random_arroyo_cases, 12, (0, 6)),
    "random managed job": (lambda seed: [managed_case(seed)], 24, range(0, 24, 3)),
}
"""How many cases there are of each kind, and which of them are run outside of soaks."""

SOAK = pytest.mark.soak
CASES = [
    pytest.param(kind, number, id=f"{kind} {number}", marks=[] if number in often else [SOAK])
    for kind, (_, count, often) in KINDS.items()
    for number in range(count)
]


@functools.cache
def table() -> dict[str, Result]:
    found: dict[str, Result] = json.loads(gzip.decompress(TABLE.read_bytes()))
    return found


@pytest.mark.parametrize(("kind", "number"), CASES)
def test_operations_write_delete_and_load_what_the_table_says(kind: str, number: int) -> None:
    for case in KINDS[kind][0](number):
        before: dict[str, list[str]] = {}
        for step, result, rows in results_of(case):
            differences = list(differing(table()[step], result))
            if differences:
                moved = list(moved_rows(before, rows))
                pytest.fail("\n  ".join([f"{step}: differs from the table", *differences, *moved]))
            before = rows


def differing(expected: Any, now: Any, place: str = "") -> Iterator[str]:
    """Tell what differs between two results: an object, a table of rows, the order of writes."""
    if isinstance(expected, dict) and isinstance(now, dict):
        for key in sorted({*expected, *now}):
            yield from differing(expected.get(key), now.get(key), f"{place}{key}: ")
    elif isinstance(expected, list) and isinstance(now, list) and set(expected) != set(now):
        yield from (f"{place}no longer {one}" for one in expected if one not in now)
        yield from (f"{place}now also {one}" for one in now if one not in expected)
    elif expected != now:
        yield f"{place}expected {expected}, found {now}"


def moved_rows(before: dict[str, list[str]], after: dict[str, list[str]]) -> Iterator[str]:
    """Tell which rows this step added to what a restore loads, and removed: at most ten each."""
    for name in sorted({*before, *after} if before else ()):
        old, new = before.get(name, []), after.get(name, [])
        yield from (f"this step removed from {name}: {row}" for row in _without(old, new))
        yield from (f"this step added to {name}: {row}" for row in _without(new, old))


def _without(rows: list[str], others: list[str]) -> list[str]:
    known = set(others)
    return [row for row in rows if row not in known][:10]


def main() -> None:
    found = {
        step: result
        for make, count, _ in KINDS.values()
        for number in range(count)
        for case in make(number)
        for step, result, _ in results_of(case)
    }
    text = json.dumps(found, indent=0, ensure_ascii=False)
    TABLE.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{len(found)} digests in {TABLE}")


if __name__ == "__main__":
    main()
