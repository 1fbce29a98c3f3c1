"""Show a fork, an evolve and a bootstrap, with what a restore loads before and after.

Needs no Arroyo: the state is of fixtures and of jobs made of given rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from arroyo_dagster.cli.rendering import print_table
from arroyo_dagster.cli.surgery.rendering import print_plan
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.model.surgery.plans import EditPlan
from arroyo_dagster.state.operations.catalog.jobs import find_job
from arroyo_dagster.state.operations.compaction.rewrite_undo import run_undo
from arroyo_dagster.state.operations.surgery.carried_files import StateSource
from arroyo_dagster.state.operations.surgery.evolve import run_evolve
from arroyo_dagster.state.operations.surgery.execute import EditOptions, run_edit
from arroyo_dagster.state.operations.surgery.fork import run_fork
from arroyo_dagster.state.operations.verify.job import verify_job
from arroyo_dagster.state.storage import ObjectStore, open_store
from arroyo_dagster.state.storage.wrappers import WriteProtected
from tests.arroyo_jobs import stopped
from tests.compat.arroyo import unpack
from tests.compat.test_surgery import FORWARD, with_other_outputs
from tests.evolved_jobs import COUNT, LEAST, MOST, SHIFTED, SUM, SUMS, Rows, Sql, loaded, sql_job
from tests.journeys.test_bootstrap import bootstrap

NOW = EditOptions(quiet_seconds=0)
ROWS_PRINTED = 4


class DemoError(Exception):
    """The demo did not come out as it must."""


def main() -> None:
    """Run the three operations, and undo each."""
    with tempfile.TemporaryDirectory() as folder:
        _fork(Path(folder))
    _evolve()
    _bootstrap()
    click.secho("\nEach job verified, and each operation was undone to the last row.", bold=True)


def _fork(folder: Path) -> None:
    _title("1. Fork: hourly departures, which a real Arroyo counted, beside production")
    store = open_store(unpack("flights", folder))
    paths = find_job(store, "hourly_departures")
    twin = with_other_outputs(store, paths)
    run_edit(twin, paths, stopped(paths), FORWARD, NOW)
    before = loaded(twin, paths)
    source = StateSource(store=WriteProtected(store), paths=paths)
    plan = run_fork(source, twin, paths, stopped(paths), NOW).plan
    key = "tumbling_4", "t"
    _show(plan, [("the source", loaded(store, paths)[key]), ("after", loaded(twin, paths)[key])])
    _check(loaded(twin, paths) == loaded(store, paths), "the fork has other rows than its source")
    _undo(twin, paths, 1)
    _check(loaded(twin, paths) == before, "the undo left other rows")


def _evolve() -> None:
    _title("2. Evolve: statements reordered, min(v) and sum(v) added, count(distinct) moved")
    source = sql_job(Layout.PROTOCOL, "job_a")
    now = Sql(
        ids=SHIFTED,
        window=(COUNT, LEAST, SUM),
        totals=(SUM, SUMS, COUNT, MOST),
        distinct=(2,),
    )
    job = sql_job(Layout.PROTOCOL, "job_b", now, base=7, epochs=2)
    before = loaded(job.store, job.paths)
    taken = StateSource(store=WriteProtected(source.store), paths=source.paths)
    plan = run_evolve(taken, job.store, job.paths, stopped(job.paths), None, NOW).plan
    was, after = loaded(source.store, source.paths), loaded(job.store, job.paths)
    for old, new in (
        (("tumbling_4", "t"), ("tumbling_17", "t")),
        (("updating_aggregate_7", "a"), ("updating_aggregate_9", "a")),
    ):
        _check(len(was[old]) == len(after[new]), "rows were lost")
        _show(plan if new[1] == "t" else None, [
            (f"{old[0]} of the source", was[old]), (f"{new[0]}, before", before[new]),
            (f"{new[0]}, after", after[new])])  # fmt: skip
    _undo(job.store, job.paths, 1)
    _check(loaded(job.store, job.paths) == before, "the undo left other rows")


def _bootstrap() -> None:
    _title("3. Bootstrap: windows and totals computed from events, sources set to the cut")
    job = sql_job(Layout.LEGACY, "job_c")
    before = loaded(job.store, job.paths)
    plan = bootstrap(job).run(job.store, NOW).plan
    after = loaded(job.store, job.paths)
    key = "tumbling_4", "t"
    _show(plan, [("before", before[key]), ("after", after[key])])
    _undo(job.store, job.paths, 1)
    _check(loaded(job.store, job.paths) == before, "the undo left other rows")


def _title(text: str) -> None:
    click.secho(f"\n{text}\n", bold=True)


def _show(plan: EditPlan | None, parts: Sequence[tuple[str, Rows]]) -> None:
    if plan is not None:
        print_plan(plan, in_full=False)
    for name, rows in parts:
        click.echo(f"\n{name}: a restore loads {len(rows)} rows")
        if rows:
            shown = [[str(value) for value in row.values()] for row in rows[:ROWS_PRINTED]]
            print_table(list(rows[0]), shown)


def _undo(store: ObjectStore, paths: JobPaths, level: int) -> None:
    verdict = verify_job(WriteProtected(store), paths, level=level).verdict
    _check(verdict.passed, f"the job does not pass verification: {verdict.errors[:1]}")
    run_undo(store, paths, stopped(paths))


def _check(held: bool, message: str) -> None:
    if not held:
        raise DemoError(message)


if __name__ == "__main__":
    main()
