"""Assets for checkpoints that jobs wrote, for their catalogue and for the fleet."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from arroyo_dagster.errors import ArroyoStateError, NotFoundError
from arroyo_dagster.orchestration import rendering as shown
from arroyo_dagster.orchestration.catalog.checks import (
    EVERY_JOB_CHECKS,
    RECENT,
    check_result,
    epoch_check_specs,
    kept_verdict,
    no_job,
    not_checked,
)
from arroyo_dagster.orchestration.catalog.fleet_checks import Fleet, FleetFacts, fleet_check_specs
from arroyo_dagster.orchestration.catalog.table_curves import table_curves
from arroyo_dagster.orchestration.directory import ArroyoDirectory
from arroyo_dagster.orchestration.failures import as_failure, fail, name_failed_checks
from arroyo_dagster.orchestration.launchpad import LaunchpadConfig
from arroyo_dagster.orchestration.partitions import job_of
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.translator import (
    CHECKPOINT,
    EPOCH_CATALOG,
    FLEET,
    OPERATOR_METADATA,
    Naming,
    specified_assets,
)
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.job_facts import JobCondition
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.progress import progress_logger
from arroyo_dagster.state.model.units import format_bytes
from arroyo_dagster.state.planning.verify.findings import Verdict, merged
from arroyo_dagster.state.planning.verify.fleet import GoneJob

if TYPE_CHECKING:
    from arroyo_dagster.state.model.catalog import EpochRow, FileRow
    from arroyo_dagster.state.operations.catalog.epochs import Refreshed
    from arroyo_dagster.state.planning.verify.fleet import JobAge

EPOCHS_LISTED = 25
CURVE_EPOCHS = 120
JOBS_PER_RUN = 50


class CatalogConfig(LaunchpadConfig):
    """How much of a job one run catalogues."""

    max_epochs: int = Field(
        default=1000, ge=1, description="Read at most this many epochs of a job, newest first."
    )


def checkpoint_spec(naming: Naming) -> dg.AssetSpec:
    """Return the external asset of the epochs that jobs write."""
    return naming.spec(CHECKPOINT)


# ---- the catalogue -------------------------------------------------------------------------------


def build_catalogue(naming: Naming) -> dg.AssetsDefinition:
    """Build the two catalogue assets, made by one step, with the two blocking checks of the newest
    epoch.
    """
    keys = {naming.key(name): name for name in (EPOCH_CATALOG, OPERATOR_METADATA)}

    @specified_assets(
        name=naming.name("arroyo_catalog"),
        specs=[naming.spec(name, deps=[CHECKPOINT]) for name in keys.values()],
        can_subset=True,
        backfill_policy=dg.BackfillPolicy.multi_run(JOBS_PER_RUN),
        check_specs=epoch_check_specs(naming, OPERATOR_METADATA),
    )
    @naming.bind
    @name_failed_checks
    def arroyo_catalog(  # type: ignore[no-untyped-def]
        context: dg.AssetExecutionContext,
        config: CatalogConfig,
        arroyo_store: ArroyoStateStore,
        arroyo_directory: ArroyoDirectory,
    ):
        with as_failure():
            jobs, unreadable = _jobs_of(context, arroyo_store)
            checks = sorted(context.selected_asset_check_keys, key=lambda one: one.name)
            run = _Refresh(context, arroyo_store, naming)
            run.failed |= unreadable
            if context.selected_asset_keys:
                run.catalogue(jobs, config.max_epochs)
            verdicts = [(check, run.verdict(check.name, jobs)) for check in checks]
            if not run.failed:
                for key in sorted(context.selected_asset_keys):
                    yield _catalogued(context, arroyo_store, key, keys[key], run.done)
            for check, verdict in verdicts:
                yield check_result(verdict, check.name, check.asset_key)
            # In a batch once, behind its last job.
            if not getattr(context, "more_jobs_follow", False):
                fleet = Fleet(naming, context.instance, arroyo_store, arroyo_directory)
                fleet.report(EVERY_JOB_CHECKS)
            run.raise_failures(len(jobs) + len(unreadable))

    return arroyo_catalog


def new_epochs(arroyo_store: ArroyoStateStore) -> Mapping[str, int]:
    """Return how many epochs of each job are not catalogued yet, which the schedule asks for."""
    from arroyo_dagster.state.operations.catalog.epochs import not_catalogued

    return not_catalogued(arroyo_store.reading(), arroyo_store.catalogue(), arroyo_store.jobs())


def _jobs_of(
    context: dg.AssetExecutionContext, arroyo_store: ArroyoStateStore
) -> tuple[Sequence[JobPaths], Mapping[JobPaths, ArroyoStateError]]:
    """The jobs of the run's partitions; all there are where only checks are run, and those that
    cannot be listed.
    """
    from arroyo_dagster.state.operations.catalog.jobs import unreadable_jobs

    if context.has_partition_key or context.has_partition_key_range:
        return [job_of(key) for key in context.partition_keys], {}
    listing = arroyo_store.listing()
    hidden = {one.paths: one.problem for one in unreadable_jobs(listing) if one.problem}
    return listing.jobs, hidden


class _Refresh:
    """Refreshes jobs one by one, and raises failures after the last one."""

    def __init__(
        self, context: dg.AssetExecutionContext, store: ArroyoStateStore, naming: Naming
    ) -> None:
        self._context = context
        self._store = store
        self._forget_job = naming.name("arroyo_forget_job")
        self.done: list[Refreshed] = []
        self.failed: dict[JobPaths, ArroyoStateError] = {}

    def catalogue(self, jobs: Sequence[JobPaths], max_epochs: int) -> None:
        """Catalogue every job. A missing job fails."""
        from arroyo_dagster.state.operations.catalog.epochs import RefreshOptions, refresh

        store, catalogue = self._store.reading(), self._store.catalogue()
        options = RefreshOptions(
            max_new_epochs=max_epochs,
            earlier=self._store.earlier(),
            on_progress=progress_logger(self._context.log.info),
        )
        for paths in jobs:
            try:
                found = refresh(store, catalogue, paths, options)
                self._check_there(found)
            except ArroyoStateError as error:
                self._fail(paths, error)
                continue
            self.done.append(found)
            for problem in found.problems:
                self._context.log.warning(f"{paths.root}: {problem}")

    def _check_there(self, found: "Refreshed") -> None:
        """Refuse a job of which nothing is left."""
        from arroyo_dagster.state.operations.catalog.jobs import job_is_there

        paths, store = found.history.paths, self._store.reading()
        if found.history.present or job_is_there(store, paths):
            return
        last = max((row.epoch for row in found.history.epochs), default=None)
        raise NotFoundError(
            "there is no such job below the checkpoint URL; nothing was catalogued",
            job=paths.root,
            url=store.url,
            last_epoch=last,
            next_step="restore its objects; if it was deleted on purpose, acknowledge that with "
            f"the job {self._forget_job}",
        )

    def verdict(self, name: str, jobs: Sequence[JobPaths]) -> Verdict:
        """Return the verdict of a check over all jobs; the catalogue keeps those on each job."""
        found: list[Verdict] = []
        for paths in jobs:
            try:
                found.append(kept_verdict(name, self._store, paths))
            except ArroyoStateError as error:
                self._fail(paths, error)
                found.append(not_checked(paths, error))
        return merged(found) if found else no_job(self._store.reading().url)

    def _fail(self, paths: JobPaths, error: ArroyoStateError) -> None:
        self._context.log.error(f"{paths.root}: {error}")
        self.failed.setdefault(paths, error)

    def raise_failures(self, jobs: int) -> None:
        """Raise the first failure, if there is one."""
        if self.failed:
            first = next(iter(self.failed.values()))
            raise first if jobs == 1 else _some_failed(self.failed, jobs)


def _some_failed(failed: Mapping[JobPaths, ArroyoStateError], jobs: int) -> ArroyoStateError:
    paths, first = next(iter(failed.items()))
    return ArroyoStateError(
        f"{first.message}; {len(failed)} of {jobs} jobs were not catalogued, the others were",
        next_step=first.next_step,
        retryable=any(error.retryable for error in failed.values()),
        **{**first.facts, "job": paths.root},
    )


def _catalogued(
    context: dg.AssetExecutionContext,
    arroyo_store: ArroyoStateStore,
    key: dg.AssetKey,
    table: str,
    done: "Sequence[Refreshed]",
) -> "dg.MaterializeResult[Any]":
    shown_of = {EPOCH_CATALOG: _epochs_metadata, OPERATOR_METADATA: _operators_metadata}[table]

    def metadata_of(one: "Refreshed") -> dict[str, Any]:
        page = arroyo_store.arroyo_page(one.history.paths)
        return {**shown_of(one), **({} if page is None else {"Arroyo": page})}

    for one in done if len(done) > 1 else []:
        context.add_asset_metadata(
            metadata=metadata_of(one), asset_key=key, partition_key=one.history.paths.root
        )
    whole = {
        "dagster/table_name": f"arroyo.{table}",
        "dagster/uri": f"{arroyo_store.catalogue().url}/{table}",
        "dagster/column_schema": _columns(table),
    }
    if len(done) != 1:
        return dg.MaterializeResult(asset_key=key, metadata=whole)
    newest = done[0].history.newest
    return dg.MaterializeResult(
        asset_key=key,
        metadata={**metadata_of(done[0]), **whole},
        data_version=None
        if newest is None
        else dg.DataVersion(f"g{newest.worker_generation or 0}:e{newest.epoch}"),
    )


def _columns(table: str) -> Any:
    from arroyo_dagster.state.operations.catalog import epochs as history

    schema = history.EPOCH_SCHEMA if table == EPOCH_CATALOG else history.FILE_SCHEMA
    columns = [(field.name, str(field.type), field.nullable) for field in schema]
    return shown.column_schema(columns, history.DESCRIPTIONS)


def _epochs_metadata(one: "Refreshed") -> dict[str, Any]:
    history = one.history
    recent = [row for row in history.epochs if row.problem is None][-CURVE_EPOCHS:]
    newest = history.newest
    latest = (
        {}
        if newest is None
        else {
            "newest epoch": _format_epoch(newest),
            "size": shown.content(newest.size_bytes, newest.files, newest.rows),
            "finished at": shown.timestamp(newest.finished_micros),
            "watermark": shown.timestamp(newest.watermark_micros),
        }
    )
    return shown.known(
        {
            **latest,
            "epochs": _format_epochs(one),
            "size by epoch": shown.sparkline([row.size_bytes for row in recent], _format_size),
            "files by epoch": shown.sparkline([row.files for row in recent]),
            "duration by epoch": shown.sparkline(
                [row.duration_micros for row in recent], lambda micros: str(shown.duration(micros))
            ),
            "watermark lag by epoch": shown.sparkline(
                [_watermark_lag(row) for row in recent], lambda micros: str(shown.duration(micros))
            ),
            "newest epochs": shown.table(
                map(_epoch_line, history.epochs[: -EPOCHS_LISTED - 1 : -1])
            ),
            "dagster/partition_row_count": len(history.epochs),
        }
    )


def _watermark_lag(row: "EpochRow") -> int | None:
    """Return how far event time was behind the end of an epoch, in microseconds."""
    if row.watermark_micros is None or row.finished_micros is None:
        return None
    return row.finished_micros - row.watermark_micros


def _format_epoch(row: "EpochRow") -> str:
    generation = row.worker_generation
    return (
        str(row.epoch) if generation is None else f"{row.epoch}, of worker generation {generation}"
    )


def _format_epochs(one: "Refreshed") -> str:
    present = one.history.present
    counts = {
        "kept": len(present),
        "new in the catalogue": one.added,
        "expired since the last refresh": one.expired,
        "left for the next run": one.left,
        "unreadable": sum(row.problem is not None for row in present),
    }
    told = [f"{count:,} {what}" for what, count in counts.items() if count or what == "kept"]
    return ", ".join(told)


def _format_size(count: float) -> str:
    return format_bytes(int(count))


def _epoch_line(row: "EpochRow") -> Mapping[str, Any]:
    return {
        "epoch": row.epoch,
        "generation": row.worker_generation,
        "state": row.state if row.present else f"{row.state}, expired",
        "duration": shown.duration(row.duration_micros),
        "files": shown.number(row.files),
        "new files": shown.number(row.new_files),
        "size": format_bytes(row.size_bytes),
        "new": format_bytes(row.new_size_bytes),
        "rows": shown.number(row.rows),
    }


def _operators_metadata(one: "Refreshed") -> dict[str, Any]:
    history = one.history
    newest = history.newest
    files = () if newest is None else history.files_of(newest.epoch)
    size_bytes, rows = (
        sum(row.size_bytes or 0 for row in files),
        sum(row.rows or 0 for row in files),
    )
    tables = len({(row.operator, row.table) for row in files})
    unreadable = sum(row.problem is not None for row in files)
    return shown.known(
        {
            "newest epoch": None if newest is None else _format_epoch(newest),
            "size": shown.content(size_bytes, len(files), rows),
            "tables": None
            if newest is None
            else f"{shown.counted(tables, 'table')} with files, of "
            f"{shown.counted(newest.operators or 0, 'operator')}",
            "unreadable files": shown.number(unreadable) if unreadable else None,
            **({} if newest is None else table_curves(history, newest)),
            "tables of the newest epoch": shown.table(_table_lines(files)),
            "dagster/partition_row_count": len(history.files),
        }
    )


def _table_lines(files: "Sequence[FileRow]") -> Iterator[Mapping[str, Any]]:
    tables: dict[tuple[str, str], list[FileRow]] = {}
    for row in files:
        tables.setdefault((row.operator, row.table), []).append(row)
    for (operator, table), rows in tables.items():
        yield {
            "operator": operator,
            "table": table,
            "kind": rows[0].table_kind,
            "files": shown.number(len(rows)),
            "size": format_bytes(sum(row.size_bytes or 0 for row in rows)),
            "rows": shown.number(sum(row.rows or 0 for row in rows)),
            "largest file": format_bytes(max(row.size_bytes or 0 for row in rows)),
            "compacted": shown.number(sum(bool(row.compaction_generation) for row in rows)),
            "columns": rows[-1].columns,
        }


# ---- the fleet -----------------------------------------------------------------------------------


def build_fleet(naming: Naming, *, recent: timedelta = RECENT) -> dg.AssetsDefinition:
    """Build the overview of all jobs and the checks over them, made by one step.

    It is not partitioned, so that Dagster plots its numbers over time. The checks are evaluated
    even if the overview fails.

    Args:
        recent: the maximum age of the newest epoch of a job that is not at rest.
    """

    @specified_assets(
        name=naming.name("arroyo_fleet_overview"),
        specs=[naming.spec(FLEET, deps=[CHECKPOINT], partitioned=False)],
        check_specs=fleet_check_specs(naming, recent),
        can_subset=True,
    )
    @naming.bind
    def arroyo_fleet_overview(  # type: ignore[no-untyped-def]
        context: dg.AssetExecutionContext,
        arroyo_store: ArroyoStateStore,
        arroyo_directory: ArroyoDirectory,
    ):
        names = sorted(key.name for key in context.selected_asset_check_keys)
        fleet = Fleet(naming, context.instance, arroyo_store, arroyo_directory, recent)
        problem: ArroyoStateError | None = None
        with as_failure():
            facts = fleet.facts()
            results = list(fleet.results(names, facts))
        if context.selected_asset_keys:
            try:
                lines = _fleet_lines(fleet, arroyo_store, facts)
                metadata = _fleet_metadata(lines)
            except ArroyoStateError as error:
                problem = error
            else:
                # Before the checks: what a refresh reports meanwhile is of this one, too.
                key = naming.key(FLEET)
                yield dg.MaterializeResult(asset_key=key, metadata=metadata)
        yield from results
        if problem is not None:
            fail(problem)

    return arroyo_fleet_overview


def _fleet_lines(fleet: Fleet, store: ArroyoStateStore, facts: FleetFacts) -> list[dict[str, Any]]:
    from arroyo_dagster.state.operations.catalog.epochs import newest_rows

    jobs = store.jobs()
    broken = fleet.broken(jobs)
    newest = newest_rows(store.catalogue(), jobs)
    ages, now = [*fleet.ages(jobs), *facts.unreadable], wall_clock()
    lines = [_job_line(age, newest.get(age.job), age.job in broken, now) for age in ages]
    return lines + [_gone_line(one) for one in facts.gone]


_WORST_FIRST = ("broken", "vanished", "unreadable", "failed")


def _fleet_metadata(lines: "Sequence[Mapping[str, Any]]") -> dict[str, Any]:
    there = [line for line in lines if line["state"] != "vanished"]
    moving = [line for line in there if line["seconds since"] is not None and not line["rests"]]
    sizes = [line["bytes"] for line in there if line["bytes"] is not None]
    worst = sorted(lines, key=_urgency)
    return shown.known(
        {
            "arroyo/jobs_broken": sum(line["state"] == "broken" for line in there),
            "arroyo/jobs_vanished": len(lines) - len(there),
            "arroyo/jobs_unreadable": sum(line["state"] == "unreadable" for line in there),
            "arroyo/max_seconds_since_epoch": max(
                (line["seconds since"] for line in moving), default=None
            ),
            "size": format_bytes(sum(sizes)) if sizes else None,
            "jobs": shown.table(map(_render_line, worst)),
            "arroyo/jobs": len(there),
            "arroyo/jobs_at_rest": sum(line["rests"] for line in there),
            "arroyo/files": sum(line["files"] or 0 for line in there),
            "arroyo/max_files": max((line["files"] or 0 for line in there), default=0),
            "arroyo/bytes": sum(sizes) if sizes else None,
        }
    )


def _render_line(line: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "job": line["job"],
        "state": line["state"],
        "epoch": line["epoch"],
        "seconds since": shown.number(line["seconds since"]),
        "files": shown.number(line["files"]),
        "size": format_bytes(line["bytes"]),
        "epochs kept": shown.number(line["epochs kept"]),
    }


def _urgency(line: Mapping[str, Any]) -> tuple[int, bool, float, str]:
    state = line["state"]
    rank = _WORST_FIRST.index(state) if state in _WORST_FIRST else len(_WORST_FIRST)
    return rank, line["rests"], -(line["seconds since"] or 0), line["job"]


def _job_line(
    age: "JobAge", newest: "EpochRow | None", broken: bool, now_micros: int
) -> dict[str, Any]:
    state = "no epoch" if age.epoch is None else age.resting or "ready"
    if age.condition is JobCondition.FAILED:
        state = "failed"
    if age.problem:
        state = "unreadable"
    since = age.age_micros(now_micros)
    return {
        "job": age.job,
        "state": "broken" if broken and not age.problem else state,
        "epoch": age.epoch,
        "seconds since": None if since is None else round(since / 1e6, 1),
        "files": age.files,
        "bytes": None if newest is None else newest.size_bytes,
        "epochs kept": age.epochs,
        "rests": age.resting is not None,
    }


def _gone_line(gone: GoneJob) -> dict[str, Any]:
    unknown = dict.fromkeys(("seconds since", "files", "bytes", "epochs kept"))
    return {"job": gone.job, "state": "vanished", "epoch": gone.epoch, **unknown, "rests": False}
