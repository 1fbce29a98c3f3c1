"""Assets of exported tables: one for each export and pipeline."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import dagster as dg

from arroyo_dagster.errors import ArroyoStateError, InputError, NotFoundError
from arroyo_dagster.orchestration import rendering as shown
from arroyo_dagster.orchestration.dataflow.graph import SdfGraph
from arroyo_dagster.orchestration.pipelines.model import ListedPipeline
from arroyo_dagster.orchestration.requests import BACKGROUND_TAGS, asset_job, due_schedule
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.runners import Tools
from arroyo_dagster.orchestration.secrets import resolve_variables
from arroyo_dagster.orchestration.serving import BoundsConfig, Turn, serve
from arroyo_dagster.orchestration.translator import CHECKPOINT, EXPORTED_STATE, Names, in_layers
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
    if len({export.name for export in exports}) < len(exports):
        export_names = sorted(export.name for export in exports)
        raise InputError("two exports have the same name", exports=export_names)
    having = [(export, names.pipelines.exported_by(export)) for export in exports]
    covered = {
        pipeline: [export for export, roots in having if pipeline.root in roots]
        for pipeline in names.pipelines.pipelines
    }
    covered = {pipeline: own for pipeline, own in covered.items() if own}
    specs, by_key = list[tuple[ListedPipeline, dg.AssetSpec]](), dict[dg.AssetKey, TableExport]()
    for pipeline, own in covered.items():
        for export in own:
            deps = [names.key(CHECKPOINT, pipeline), *_states(pipeline, export, graphs)]
            spec = names.spec(EXPORTED_STATE, pipeline, deps=deps, export=export)
            specs.append((pipeline, spec.replace_attributes(skippable=True)))
            by_key[spec.key] = export
    assets = in_layers(
        names.name("arroyo_exported_state"),
        specs,
        lambda op, layer: _assets(names, op, layer, by_key, private),
    )
    if not assets:
        return dg.Definitions()
    text = "Export the tables of pipelines with new epochs."
    job = asset_job(names, "arroyo_export", assets, text, tags=BACKGROUND_TAGS)
    schedule = due_schedule(
        names,
        job,
        cron,
        due=lambda tools, instance: _due(covered, tools),
        request=lambda due: dg.RunRequest(
            asset_selection=[spec.key for pipeline, spec in specs if pipeline in due]
        ),
        timezone=timezone,
        running=running,
    )
    return dg.Definitions(assets=assets, jobs=[job], schedules=[schedule])


def _states(
    pipeline: ListedPipeline, export: TableExport, graphs: Sequence[SdfGraph]
) -> Iterator[dg.AssetKey]:
    """Yield the assets of the states that are exported."""
    for graph in graphs:
        for state in graph.owned:
            paths = JobPaths(JobId(state.owner), graph.dataflow.pipeline)
            if paths == pipeline.paths and export.table == state.name:
                yield graph.key_of(state)


def _assets(
    names: Names,
    op: str,
    layer: Sequence[tuple[ListedPipeline, dg.AssetSpec]],
    by_key: Mapping[dg.AssetKey, TableExport],
    private: PrivateColumns,
) -> dg.AssetsDefinition:
    @dg.multi_asset(
        name=op,
        specs=[spec for _, spec in layer],
        can_subset=True,
        required_resource_keys=names.resources,
    )
    def exported_state(context: dg.AssetExecutionContext, config: BoundsConfig) -> Any:
        selected: dict[ListedPipeline, list[dg.AssetKey]] = {}
        for pipeline, spec in layer:
            if spec.key in context.selected_asset_keys:
                selected.setdefault(pipeline, []).append(spec.key)

        def work(turn: Turn) -> Iterator[Any]:
            from arroyo_dagster.state.operations.export.tables import run_export

            job = _open(turn.tools.store, turn.pipeline.paths, private)
            failed: list[ArroyoStateError] = []
            for key in selected[turn.pipeline]:
                export = by_key[key]
                try:
                    epochs = list(run_export(_resolved(export), job))
                except ArroyoStateError as error:  # it does not stop the other exports
                    turn.log.error(f"{export.name}: {error}")
                    failed.append(error)
                    continue
                if any(epoch.new for epoch in epochs):
                    yield _result(key, export, job, epochs)
                else:
                    turn.log.info(f"{export.name}: the target has every epoch of {job.name}")
            if failed:
                raise failed[0]

        yield from serve(context, list(selected), work, config, names.tools(context))

    return exported_state


def _open(store: ArroyoStateStore, paths: JobPaths, private: PrivateColumns) -> "StateJob":
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
    options = resolve_variables(f"{field}.options", to.options)
    catalog = resolve_variables(f"{field}.catalog", to.catalog)
    return replace(export, to=replace(to, options=options, catalog=catalog))


def _due(
    covered: Mapping[ListedPipeline, Sequence[TableExport]], tools: Tools
) -> list[ListedPipeline]:
    """Return the pipelines of which the newest epoch is not exported everywhere.

    A pipeline or target that cannot be read counts as due: the run says what is wrong.
    """
    from arroyo_dagster.state.operations.export.tables import export_is_due
    from arroyo_dagster.state.operations.query.state import StateJob, open_state
    from arroyo_dagster.state.storage.concurrency import concurrently

    state = open_state(tools.store.reading())

    def is_due(pipeline: ListedPipeline) -> bool:
        job = StateJob(state, pipeline.paths)
        try:
            return any(export_is_due(_resolved(export), job) for export in covered[pipeline])
        except ArroyoStateError:
            return True

    due = concurrently(is_due, list(covered))
    return [pipeline for pipeline, needed in zip(covered, due, strict=True) if needed]


def _result(
    key: dg.AssetKey, export: TableExport, job: "StateJob", found: "Sequence[ExportedEpoch]"
) -> "dg.MaterializeResult[Any]":
    from arroyo_dagster.state.operations.query.diff import CHANGE

    newest, target = found[-1], export.target_of(job.paths)
    epoch, is_table = job.epoch(newest.epoch), export.to.format == "iceberg"
    new = [entry for entry in found if entry.new]
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
                f"{shown.counted(sum(entry.rows for entry in new), 'row')}, "
                f"{format_bytes(sum(entry.size_bytes for entry in new))}",
                "epochs": shown.table(map(_line, reversed(found))),
                "dagster/row_count": newest.rows,
                "dagster/column_schema": shown.column_schema(columns, {}),
                "dagster/table_name": target if is_table else None,
                "dagster/uri": None if is_table else target,
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
