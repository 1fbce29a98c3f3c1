"""Assets of exported tables: one for each export, one partition per job."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import dagster as dg

from arroyo_dagster.errors import ArroyoStateError, InputError, NotFoundError
from arroyo_dagster.orchestration import rendering as shown
from arroyo_dagster.orchestration.batch_requests import BatchConfig, BatchKind, BatchRequests
from arroyo_dagster.orchestration.batches import asset_events
from arroyo_dagster.orchestration.dataflow.graph import SdfGraph
from arroyo_dagster.orchestration.failures import as_failure
from arroyo_dagster.orchestration.partitions import job_of
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.secrets import resolve_variables
from arroyo_dagster.orchestration.translator import (
    CHECKPOINT,
    OPERATOR_METADATA,
    Naming,
    specified_assets,
)
from arroyo_dagster.state.model.ids import JobId
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.units import format_bytes
from arroyo_dagster.state.planning.exports import CHANGES, TableExport
from arroyo_dagster.state.planning.privacy import NOTHING_PRIVATE, PrivateColumns

if TYPE_CHECKING:
    from arroyo_dagster.state.operations.export.targets import ExportedEpoch
    from arroyo_dagster.state.operations.query.state import StateJob


def build_exported_state(
    naming: Naming,
    exports: Sequence[TableExport],
    graphs: Sequence[SdfGraph] = (),
    private: PrivateColumns = NOTHING_PRIVATE,
) -> dg.AssetsDefinition:
    """Build an asset for each export, made by one step.

    An asset is materialized if its target lacked an epoch. A job whose table is not exported, or
    whose epochs are all exported, has no event.

    Args:
        graphs: dataflows; the asset of an exported state is an upstream of the export.
        private: the columns whose values are masked in what is exported.

    Raises:
        InputError: two exports have the same name.
    """
    specs = [_spec(naming, one, graphs) for one in exports]
    by_key = {spec.key: one for spec, one in zip(specs, exports, strict=True)}
    if len(by_key) < len(exports):
        names = [one.name for one in exports]
        raise InputError("two exports have the same name", exports=sorted(names))

    @specified_assets(
        name=naming.name("arroyo_exported_state"),
        specs=specs,
        can_subset=True,
    )
    @naming.bind
    def arroyo_exported_state(  # type: ignore[no-untyped-def]
        context: dg.AssetExecutionContext, arroyo_store: ArroyoStateStore
    ):
        failed: list[ArroyoStateError] = []
        with as_failure():
            job = _opened(arroyo_store, job_of(context.partition_key), private)
            for key in sorted(context.selected_asset_keys):
                export = by_key[key]
                if not export.covers(job.paths):
                    context.log.info(f"{export.name}: it does not export tables of {job.name}")
                    continue
                try:
                    found = _exported(export, job)
                except ArroyoStateError as error:  # it does not stop the other exports
                    context.log.error(f"{export.name}: {error}")
                    failed.append(error)
                    continue
                if not any(one.new for one in found):
                    context.log.info(f"{export.name}: the target has every epoch of {job.name}")
                    continue
                yield _result(key, export, job, found)
            if failed:
                raise failed[0]

    return arroyo_exported_state


def _spec(naming: Naming, export: TableExport, graphs: Sequence[SdfGraph]) -> dg.AssetSpec:
    upstream = [naming.key(CHECKPOINT), naming.key(OPERATOR_METADATA)]
    return naming.export_spec(export, [*upstream, *_states(export, graphs)])


def _states(export: TableExport, graphs: Sequence[SdfGraph]) -> Iterator[dg.AssetKey]:
    """Yield the assets of the states that are exported."""
    for graph in graphs:
        for state in graph.owned:
            paths = JobPaths(JobId(state.owner), graph.dataflow.pipeline)
            if export.covers(paths) and export.table == state.name:
                yield graph.key_of(state)


def _opened(store: ArroyoStateStore, paths: JobPaths, private: PrivateColumns) -> "StateJob":
    from arroyo_dagster.state.operations.catalog.jobs import job_is_there
    from arroyo_dagster.state.operations.query.state import StateJob, open_state

    reading = store.reading()
    if not job_is_there(reading, paths):
        raise NotFoundError(
            "there is no such job below the checkpoint URL", job=paths.root, url=reading.url
        )
    return StateJob(open_state(reading, private=private), paths)


def _resolved(export: TableExport) -> TableExport:
    """Return the export with the values of the variables that its options name."""
    to, field = export.to, f"exports.{export.name}"
    return replace(
        export,
        to=replace(
            to,
            options=resolve_variables(f"{field}.options", to.options),
            catalog=resolve_variables(f"{field}.catalog", to.catalog),
        ),
    )


def _exported(export: TableExport, job: "StateJob") -> "list[ExportedEpoch]":
    from arroyo_dagster.state.operations.export.tables import run_export

    return list(run_export(_resolved(export), job))


def exports_due(
    exports: Sequence[TableExport], arroyo_store: ArroyoStateStore
) -> Mapping[str, int]:
    """Return for how many exports of each job the newest epoch is not exported.

    A job or target that cannot be read counts as due: the run says what is wrong.
    """
    from arroyo_dagster.state.operations.export.tables import export_is_due
    from arroyo_dagster.state.operations.query.state import StateJob, open_state
    from arroyo_dagster.state.storage.concurrency import concurrently

    state = open_state(arroyo_store.reading())

    def count(paths: JobPaths) -> int:
        job, found = StateJob(state, paths), 0
        for export in exports:
            if not export.covers(paths):
                continue
            try:
                found += export_is_due(_resolved(export), job)
            except ArroyoStateError:
                found += 1
        return found

    jobs = arroyo_store.jobs()
    return dict(zip((str(one.root) for one in jobs), concurrently(count, jobs), strict=True))


def _result(
    key: dg.AssetKey, export: TableExport, job: "StateJob", found: "Sequence[ExportedEpoch]"
) -> "dg.MaterializeResult[Any]":
    from arroyo_dagster.state.operations.query.diff import CHANGE

    newest, target = found[-1], export.target_of(job.paths)
    epoch = job.epoch(newest.epoch)
    new = [one for one in found if one.new]
    schema = epoch.table(export.operator, export.table).schema
    columns = [(field.name, str(field.type), field.nullable) for field in schema]
    if export.epochs == CHANGES:
        columns.append((CHANGE, "string", False))
    generation = epoch.checkpoint.worker_generation or 0
    return dg.MaterializeResult(
        asset_key=key,
        data_version=dg.DataVersion(f"g{generation}:e{newest.epoch}"),
        metadata=shown.known(
            {
                "newest epoch": int(newest.epoch),
                "finished at": shown.timestamp(epoch.checkpoint.finish_time_micros),
                "exported now": f"{shown.counted(len(new), 'epoch')}, "
                f"{shown.counted(sum(one.rows for one in new), 'row')}, "
                f"{format_bytes(sum(one.size_bytes for one in new))}",
                "rows by epoch": shown.sparkline([one.rows for one in found]),
                "epochs": shown.table(map(_line, reversed(found))),
                "dagster/partition_row_count": newest.rows,
                "dagster/column_schema": shown.column_schema(columns, {}),
                "dagster/table_name": target if export.to.format == "iceberg" else None,
                "dagster/uri": None if export.to.format == "iceberg" else target,
                "arroyo/exported_bytes": newest.size_bytes,
            }
        ),
    )


def _line(one: "ExportedEpoch") -> Mapping[str, Any]:
    return {
        "epoch": int(one.epoch),
        "rows": shown.number(one.rows),
        "files": shown.number(one.files),
        "size": format_bytes(one.size_bytes),
        "exported": "now" if one.new else "before",
    }


def build_export_requests(
    naming: Naming, exports: Sequence[TableExport], exported: dg.AssetsDefinition
) -> BatchRequests:
    """Build the requests of batches that export the jobs whose newest epoch is not exported."""
    kind = BatchKind(
        name=naming.name("arroyo_export_fleet"),
        description="Export the tables of jobs with new epochs.",
        config=BatchConfig,
        events=asset_events(exported),
        backlog=lambda store: exports_due(exports, store),
        single=naming.name("arroyo_export"),
        changes=False,
    )
    return BatchRequests(naming=naming, kind=kind)
