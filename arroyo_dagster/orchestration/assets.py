"""What is seen, as assets: checkpoints that jobs wrote, the catalogue of them, the fleet."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.orchestration import shown
from arroyo_dagster.orchestration.checks import check_result, epoch_check_specs, epoch_verdict
from arroyo_dagster.orchestration.failures import as_failure
from arroyo_dagster.orchestration.partitions import job_of
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.translator import (
    CHECKPOINT,
    EPOCH_CATALOG,
    FLEET,
    OPERATOR_METADATA,
    Naming,
)
from arroyo_dagster.state.model.layout import JobPaths

if TYPE_CHECKING:
    from arroyo_dagster.state.local.history import EpochRow, FileRow, Refreshed
    from arroyo_dagster.state.planning.health import JobAge

EPOCHS_SHOWN = 25
CURVE_EPOCHS = 120
JOBS_PER_RUN = 50


class CatalogConfig(dg.Config):
    """How much of a job is catalogued in one run."""

    max_epochs: int = Field(
        default=1000, ge=1, description="Read at most so many epochs of a job, the newest first."
    )


def checkpoint_spec(naming: Naming) -> dg.AssetSpec:
    """The external asset: epochs that jobs wrote themselves."""
    return naming.spec(CHECKPOINT)


# ---- the catalogue -------------------------------------------------------------------------------


def build_catalogue(naming: Naming) -> dg.AssetsDefinition:
    """Two assets made by one step, with the two blocking checks of the newest epoch."""
    keys = {naming.key(name): name for name in (EPOCH_CATALOG, OPERATOR_METADATA)}
    operator_metadata = naming.key(OPERATOR_METADATA)

    @dg.multi_asset(
        name="arroyo_catalog",
        specs=[naming.spec(name, deps=[CHECKPOINT]) for name in keys.values()],
        can_subset=True,
        backfill_policy=dg.BackfillPolicy.multi_run(JOBS_PER_RUN),
        check_specs=epoch_check_specs(operator_metadata),
    )
    def arroyo_catalog(  # type: ignore[no-untyped-def]
        context: dg.AssetExecutionContext, config: CatalogConfig, arroyo_store: ArroyoStateStore
    ):
        with as_failure():
            jobs = _jobs_of(context, arroyo_store)
            if context.selected_asset_keys:
                done = _refresh_all(context, arroyo_store, jobs, config)
                for key in sorted(context.selected_asset_keys):
                    yield _catalogued(context, arroyo_store, key, keys[key], done)
            for check in sorted(context.selected_asset_check_keys, key=lambda one: one.name):
                verdict = epoch_verdict(check.name, arroyo_store.reading(), jobs)
                yield check_result(verdict, check.name, check.asset_key)

    return arroyo_catalog


def new_epochs(arroyo_store: ArroyoStateStore) -> Mapping[str, int]:
    """How many epochs of each job are not catalogued yet: what the schedule asks."""
    from arroyo_dagster.state.local.history import not_catalogued

    return not_catalogued(arroyo_store.reading(), arroyo_store.catalogue(), arroyo_store.jobs())


def _jobs_of(context: dg.AssetExecutionContext, arroyo_store: ArroyoStateStore) -> list[JobPaths]:
    """The jobs of the run's partitions; all there are where only checks are run."""
    if context.has_partition_key or context.has_partition_key_range:
        return [job_of(key) for key in context.partition_keys]
    return arroyo_store.jobs()


def _refresh_all(
    context: dg.AssetExecutionContext,
    arroyo_store: ArroyoStateStore,
    jobs: Sequence[JobPaths],
    config: CatalogConfig,
) -> "list[Refreshed]":
    """Catalogue every job; one that fails is told once the others are done."""
    from arroyo_dagster.state.local.history import refresh

    done: list[Refreshed] = []
    failed: list[ArroyoStateError] = []
    store, catalogue = arroyo_store.reading(), arroyo_store.catalogue()
    options: Any = {"max_new_epochs": config.max_epochs, "earlier": arroyo_store.earlier()}
    for paths in jobs:
        try:
            done.append(refresh(store, catalogue, paths, **options))
        except ArroyoStateError as error:
            context.log.error(f"{paths.root}: {error}")
            failed.append(error)
        else:
            for problem in done[-1].problems:
                context.log.warning(f"{paths.root}: {problem}")
    if failed:
        raise failed[0] if len(jobs) == 1 else _some_failed(failed, len(jobs))
    return done


def _some_failed(failed: Sequence[ArroyoStateError], jobs: int) -> ArroyoStateError:
    first = failed[0]
    return ArroyoStateError(
        f"{len(failed)} of {jobs} jobs were not catalogued, the others were; the first: "
        f"{first.message}",
        next_step=first.next_step,
        retryable=any(error.retryable for error in failed),
        **first.facts,
    )


def _catalogued(
    context: dg.AssetExecutionContext,
    arroyo_store: ArroyoStateStore,
    key: dg.AssetKey,
    table: str,
    done: "Sequence[Refreshed]",
) -> "dg.MaterializeResult[Any]":
    shown_of = {EPOCH_CATALOG: _epochs_shown, OPERATOR_METADATA: _operators_shown}[table]
    for one in done if len(done) > 1 else []:
        context.add_asset_metadata(
            metadata=shown_of(one), asset_key=key, partition_key=one.history.paths.root
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
        metadata={**whole, **shown_of(done[0])},
        data_version=None
        if newest is None
        else dg.DataVersion(f"g{newest.worker_generation or 0}:e{newest.epoch}"),
    )


def _columns(table: str) -> Any:
    from arroyo_dagster.state.local import history

    schema = history.EPOCH_SCHEMA if table == EPOCH_CATALOG else history.FILE_SCHEMA
    columns = [(field.name, str(field.type), field.nullable) for field in schema]
    return shown.column_schema(columns, history.DESCRIPTIONS)


def _epochs_shown(one: "Refreshed") -> dict[str, Any]:
    history = one.history
    recent = [row for row in history.epochs if row.problem is None][-CURVE_EPOCHS:]
    newest = history.newest
    latest = (
        {}
        if newest is None
        else {
            "arroyo/newest_epoch": newest.epoch,
            "arroyo/bytes": newest.size_bytes,
            "arroyo/files": newest.files,
            "arroyo/rows": newest.rows,
            "arroyo/finished_at": shown.timestamp(newest.finished_micros),
            "arroyo/watermark": shown.timestamp(newest.watermark_micros),
        }
    )
    return shown.known(
        {
            "dagster/partition_row_count": len(history.epochs),
            "arroyo/epochs": len(history.present),
            "arroyo/added_epochs": one.added,
            "arroyo/expired_epochs": one.expired,
            "arroyo/left_epochs": one.left or None,
            "arroyo/unreadable_epochs": sum(row.problem is not None for row in history.present),
            **latest,
            "bytes by epoch": shown.sparkline([row.size_bytes for row in recent]),
            "files by epoch": shown.sparkline([row.files for row in recent]),
            "seconds by epoch": shown.sparkline(
                [shown.seconds(row.duration_micros) for row in recent]
            ),
            "newest epochs": shown.table(
                map(_epoch_line, history.epochs[: -EPOCHS_SHOWN - 1 : -1])
            ),
        }
    )


def _epoch_line(row: "EpochRow") -> Mapping[str, Any]:
    return {
        "epoch": row.epoch,
        "generation": row.worker_generation,
        "state": row.state if row.present else f"{row.state}, expired",
        "seconds": shown.seconds(row.duration_micros),
        "files": row.files,
        "new files": row.new_files,
        "bytes": row.size_bytes,
        "new bytes": row.new_size_bytes,
        "rows": row.rows,
    }


def _operators_shown(one: "Refreshed") -> dict[str, Any]:
    history = one.history
    newest = history.newest
    files = () if newest is None else history.files_of(newest.epoch)
    return shown.known(
        {
            "dagster/partition_row_count": len(history.files),
            "arroyo/newest_epoch": None if newest is None else newest.epoch,
            "arroyo/operators": None if newest is None else newest.operators,
            "arroyo/tables": len({(row.operator, row.table) for row in files}),
            "arroyo/files": len(files),
            "arroyo/bytes": sum(row.size_bytes or 0 for row in files),
            "arroyo/rows": sum(row.rows or 0 for row in files),
            "arroyo/problems": sum(row.problem is not None for row in files),
            "tables of the newest epoch": shown.table(_table_lines(files)),
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
            "files": len(rows),
            "bytes": sum(row.size_bytes or 0 for row in rows),
            "rows": sum(row.rows or 0 for row in rows),
            "largest file": max(row.size_bytes or 0 for row in rows),
            "compacted": sum(bool(row.compaction_generation) for row in rows),
            "columns": rows[-1].columns,
        }


# ---- the fleet -----------------------------------------------------------------------------------


def build_fleet(naming: Naming) -> dg.AssetsDefinition:
    """All jobs at a glance. Not partitioned, so that its numbers are plotted over time."""

    @dg.multi_asset(
        name="arroyo_fleet_overview",
        specs=[naming.spec(FLEET, deps=[CHECKPOINT], partitioned=False)],
    )
    def arroyo_fleet_overview(arroyo_store: ArroyoStateStore):  # type: ignore[no-untyped-def]
        from arroyo_dagster.state.local.health import survey
        from arroyo_dagster.state.local.history import newest_rows

        with as_failure():
            jobs = arroyo_store.jobs()
            ages = survey(arroyo_store.reading(), jobs)
            newest = newest_rows(arroyo_store.catalogue(), jobs)
        return dg.MaterializeResult(metadata=_fleet_shown(ages, newest))

    return arroyo_fleet_overview


def _fleet_shown(ages: "Sequence[JobAge]", newest: "Mapping[str, EpochRow]") -> dict[str, Any]:
    now = time.time_ns() // 1000
    lines = [_job_line(age, newest.get(age.job), now) for age in ages]
    moving = [line["seconds since"] for line in lines if line["seconds since"] is not None]
    sizes = [line["bytes"] for line in lines if line["bytes"] is not None]
    worst = sorted(
        lines, key=lambda line: (line["state"] == "at rest", -(line["seconds since"] or 0))
    )
    return shown.known(
        {
            "arroyo/jobs": len(lines),
            "arroyo/jobs_at_rest": sum(line["state"] == "at rest" for line in lines),
            "arroyo/jobs_unreadable": sum(line["state"] == "unreadable" for line in lines),
            "arroyo/files": sum(line["files"] or 0 for line in lines),
            "arroyo/bytes": sum(sizes) if sizes else None,
            "arroyo/max_files": max((line["files"] or 0 for line in lines), default=0),
            "arroyo/max_seconds_since_epoch": max(moving, default=None),
            "jobs": shown.table(worst),
        }
    )


def _job_line(age: "JobAge", newest: "EpochRow | None", now_micros: int) -> dict[str, Any]:
    state = "at rest" if age.at_rest else "no epoch" if age.epoch is None else "ready"
    return {
        "job": age.job,
        "state": "unreadable" if age.problem else state,
        "epoch": age.epoch,
        "seconds since": shown.seconds(age.age_micros(now_micros)),
        "files": age.files,
        "bytes": None if newest is None else newest.size_bytes,
        "epochs kept": age.epochs,
    }
