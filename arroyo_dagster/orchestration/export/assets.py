"""Assets of exported tables: one for each export and pipeline."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import dagster as dg

from arroyo_dagster.errors import ArroyoStateError, InputError, NotFoundError
from arroyo_dagster.orchestration import rendering as shown
from arroyo_dagster.orchestration.dataflow.graph import SdfGraph
from arroyo_dagster.orchestration.pipelines.model import Pipeline
from arroyo_dagster.orchestration.requests import BACKGROUND_TAGS, due_schedule
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.secrets import resolve_variables
from arroyo_dagster.orchestration.serving import BoundsConfig, Tools, Turn, serve
from arroyo_dagster.orchestration.translator import (
    CHECKPOINT,
    EXPORTED_STATE,
    Names,
    in_layers,
)
from arroyo_dagster.state.model.ids import JobId
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.units import format_bytes
from arroyo_dagster.state.planning.exports import CHANGES, TableExport
from arroyo_dagster.state.planning.privacy import NOTHING_PRIVATE, PrivateColumns

if TYPE_CHECKING:
    from arroyo_dagster.state.operations.export.targets import ExportedEpoch
    from arroyo_dagster.state.operations.query.state import StateJob


def build_exports(
    names: Names,
    exports: Sequence[TableExport],
    graphs: Sequence[SdfGraph] = (),
    private: PrivateColumns = NOTHING_PRIVATE,
    *,
    cron: str,
    timezone: str = "UTC",
    running: bool = False,
) -> dg.Definitions:
    """Build the asset of each export below each pipeline that it covers, their job and schedule.

    An asset is materialized if its target lacked an epoch.

    Args:
        graphs: dataflows; the asset of an exported state is an upstream of the export.
        private: the columns whose values are masked in what is exported.

    Raises:
        InputError: two exports have the same name.
    """
    if len({one.name for one in exports}) < len(exports):
        names_of = sorted(one.name for one in exports)
        raise InputError("two exports have the same name", exports=names_of)
    covered = [
        (pipeline, export)
        for pipeline in names.pipelines.pipelines
        for export in exports
        if export.covers(pipeline.paths)
    ]
    specs = [(pipeline, _spec(names, pipeline, one, graphs)) for pipeline, one in covered]
    by_key = {spec.key: one for (_, spec), one in zip(specs, covered, strict=True)}
    assets = in_layers(
        names.name("arroyo_exported_state"),
        specs,
        lambda op, layer: _assets(names, op, [spec for _, spec in layer], by_key, private),
    )
    if not assets:
        return dg.Definitions()
    job: Any = dg.define_asset_job(
        names.name("arroyo_export"),
        selection=dg.AssetSelection.assets(*assets),
        description="Export the tables of pipelines with new epochs.",
        executor_def=dg.in_process_executor,
        run_tags=BACKGROUND_TAGS,
    )
    pipelines = list(dict.fromkeys(pipeline for pipeline, _ in covered))

    def due(tools: Tools, instance: dg.DagsterInstance) -> list[Pipeline]:
        return exports_due(pipelines, exports, tools)

    def request(due: Sequence[Pipeline]) -> dg.RunRequest:
        return dg.RunRequest(asset_selection=[k for k, (one, _) in by_key.items() if one in due])

    schedule = due_schedule(
        names, job, cron, due=due, request=request, timezone=timezone, running=running
    )
    return dg.Definitions(assets=assets, jobs=[job], schedules=[schedule])


def _assets(
    names: Names,
    op: str,
    specs: Sequence[dg.AssetSpec],
    by_key: Mapping[dg.AssetKey, tuple[Pipeline, TableExport]],
    private: PrivateColumns,
) -> dg.AssetsDefinition:
    @dg.multi_asset(name=op, specs=specs, can_subset=True, required_resource_keys=names.resources)
    def exported_state(context: dg.AssetExecutionContext, config: BoundsConfig) -> Any:
        wanted: dict[Pipeline, list[dg.AssetKey]] = {}
        for key in sorted(context.selected_asset_keys):
            wanted.setdefault(by_key[key][0], []).append(key)

        def work(turn: Turn) -> Iterator[Any]:
            job = _opened(turn.tools.store, turn.pipeline.paths, private)
            failed: list[ArroyoStateError] = []
            for key in wanted[turn.pipeline]:
                export = by_key[key][1]
                try:
                    epochs = _exported(export, job)
                except ArroyoStateError as error:  # it does not stop the other exports
                    turn.log.error(f"{export.name}: {error}")
                    failed.append(error)
                    continue
                if any(one.new for one in epochs):
                    yield _result(key, export, job, epochs)
                else:
                    turn.log.info(f"{export.name}: the target has every epoch of {job.name}")
            if failed:
                raise failed[0]

        yield from serve(context, list(wanted), work, config, names.tools(context))

    return exported_state


def _spec(
    names: Names, pipeline: Pipeline, export: TableExport, graphs: Sequence[SdfGraph]
) -> dg.AssetSpec:
    deps = [names.key(CHECKPOINT, pipeline), *_states(pipeline, export, graphs)]
    spec = names.spec(EXPORTED_STATE, pipeline, deps=deps, export=export)
    return spec.replace_attributes(skippable=True)


def _states(
    pipeline: Pipeline, export: TableExport, graphs: Sequence[SdfGraph]
) -> Iterator[dg.AssetKey]:
    """Yield the assets of the states that are exported."""
    for graph in graphs:
        for state in graph.owned:
            paths = JobPaths(JobId(state.owner), graph.dataflow.pipeline)
            if paths == pipeline.paths and export.table == state.name:
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
    pipelines: Sequence[Pipeline], exports: Sequence[TableExport], tools: Tools
) -> list[Pipeline]:
    """Return the pipelines of which the newest epoch is not exported everywhere.

    A pipeline or target that cannot be read counts as due: the run says what is wrong.
    """
    from arroyo_dagster.state.operations.export.tables import export_is_due
    from arroyo_dagster.state.operations.query.state import StateJob, open_state
    from arroyo_dagster.state.storage.concurrency import concurrently

    state = open_state(tools.store.reading())

    def is_due(pipeline: Pipeline) -> bool:
        job = StateJob(state, pipeline.paths)
        try:
            return any(
                export_is_due(_resolved(export), job)
                for export in exports
                if export.covers(pipeline.paths)
            )
        except ArroyoStateError:
            return True

    due = concurrently(is_due, pipelines)
    return [pipeline for pipeline, needed in zip(pipelines, due, strict=True) if needed]


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
                "dagster/row_count": newest.rows,
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
