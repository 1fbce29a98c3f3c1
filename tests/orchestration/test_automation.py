"""Automation the Dagster way: conditions, targets of the sensor, assets and selections of users."""

from collections.abc import Iterator
from typing import Any

import dagster as dg
import pytest

from arroyo_dagster import (
    ArroyoStateStore,
    ArroyoTableProps,
    DagsterArroyoTranslator,
    arroyo_assets,
    build_arroyo_asset_selection,
    build_arroyo_definitions,
    find_job,
    list_epochs,
)
from arroyo_dagster.errors import InputError, NotFoundError
from arroyo_dagster.orchestration.directory import ArroyoDirectory
from arroyo_dagster.orchestration.translator import TABLES
from tests.documentation import PROJECT
from tests.fleets import Written, protocol_job

ONE, TWO = protocol_job("orders"), protocol_job("payments")
CHECKPOINT = dg.AssetKey(["arroyo", "checkpoint"])
REPORT = dg.AssetKey(["report"])


class Eager(DagsterArroyoTranslator):
    """Catalogues each new epoch, and compacts by the clock."""

    def get_asset_spec(self, props: ArroyoTableProps) -> dg.AssetSpec:
        spec = super().get_asset_spec(props)
        conditions = {
            "epoch_catalog": dg.AutomationCondition.eager(),
            "compacted_state": dg.AutomationCondition.on_cron("17 * * * *"),
        }
        condition = conditions.get(props.table)
        return spec.replace_attributes(automation_condition=condition) if condition else spec


@arroyo_assets([dg.AssetSpec(REPORT, automation_condition=dg.AutomationCondition.eager())])
def report(
    context: dg.AssetExecutionContext, arroyo_store: ArroyoStateStore
) -> dg.MaterializeResult[Any]:
    store = arroyo_store.reading()
    epochs = list_epochs(store, find_job(store, context.partition_key))
    return dg.MaterializeResult(metadata={"epochs": len(epochs)})


def _told(deployed: Any, defs: dg.Definitions) -> None:
    """One tick of the sensor over a fleet of two jobs, stored as the daemon stores it."""
    deployed.defs = defs
    deployed.tick()


# ---- conditions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [REPORT, dg.AssetKey(["arroyo", "epoch_catalog"])], ids=str)
def test_a_new_epoch_requests_the_partition_of_its_job(deployed: Any, key: dg.AssetKey) -> None:
    first, second = Written(deployed.store, ONE), Written(deployed.store, TWO)
    defs = dg.Definitions.merge(
        build_arroyo_definitions(deployed.resource, translator=Eager()),
        dg.Definitions(assets=[report]),
    )
    first.epochs(1)
    second.epochs(1)
    _told(deployed, defs)
    result = dg.evaluate_automation_conditions(defs, deployed.instance)
    assert result.get_requested_partitions(key) == set()  # history requests nothing
    second.epochs(1)
    _told(deployed, defs)
    result = dg.evaluate_automation_conditions(defs, deployed.instance, cursor=result.cursor)
    assert result.get_requested_partitions(key) == {TWO.root}
    result = dg.evaluate_automation_conditions(defs, deployed.instance, cursor=result.cursor)
    assert result.get_requested_partitions(key) == set()


def test_a_condition_of_the_translator_reaches_every_table() -> None:
    class Every(DagsterArroyoTranslator):
        def get_asset_spec(self, props: ArroyoTableProps) -> dg.AssetSpec:
            spec = super().get_asset_spec(props)
            condition = dg.AutomationCondition.on_cron("@daily")
            return spec.replace_attributes(automation_condition=condition)

    graph = build_arroyo_definitions("memory://every", translator=Every()).resolve_asset_graph()
    keys = {dg.AssetKey(["arroyo", table]) for table in TABLES}
    assert keys == {node.key for node in graph.asset_nodes if node.automation_condition is not None}


# ---- targets -------------------------------------------------------------------------------------


def test_the_lineage_shows_the_sensor_on_what_it_reports() -> None:
    defs = build_arroyo_definitions(
        "memory://targets", dataflows=[PROJECT / "examples" / "sdf" / "words" / "dataflow.yaml"]
    )
    repository = defs.get_repository_def()
    sensor = repository.get_sensor_def("arroyo_checkpoint_sensor")
    assert sensor.asset_selection is not None
    keys = sensor.asset_selection.resolve(repository.asset_graph)
    assert CHECKPOINT in keys
    assert {key.path[0] for key in keys - {CHECKPOINT}} == {"sdf"}
    assert len(keys) > 2
    dg.Definitions.validate_loadable(defs)


# ---- assets and selections of users --------------------------------------------------------------


def test_an_asset_of_a_user_is_partitioned_by_the_jobs_and_reads_their_state(deployed: Any) -> None:
    Written(deployed.store, ONE).epochs(3)
    defs = dg.Definitions.merge(
        build_arroyo_definitions(deployed.resource), dg.Definitions(assets=[report])
    )
    _told(deployed, defs)
    graph = defs.resolve_asset_graph()
    assert graph.get(REPORT).parent_keys == {CHECKPOINT}
    assert graph.get(REPORT).partitions_def == graph.get(CHECKPOINT).partitions_def
    selection = dg.AssetSelection.assets(REPORT)
    job = dg.define_asset_job("reports", selection=selection)
    found = dg.Definitions.merge(defs, dg.Definitions(jobs=[job])).resolve_job_def("reports")
    run = found.execute_in_process(instance=deployed.instance, partition_key=ONE.root)
    (event,) = run.asset_materializations_for_node("report")
    assert (event.partition, event.metadata["epochs"].value) == (ONE.root, 3)


@pytest.mark.parametrize("generator", [False, True])
def test_an_error_in_an_asset_of_a_user_is_a_failure_with_its_next_step(
    deployed: Any, generator: bool
) -> None:
    def work(arroyo_blue_store: object) -> None:
        raise NotFoundError("no such table", table="t", next_step="list the tables")

    def plain(arroyo_store: ArroyoStateStore) -> None:
        work(arroyo_store)

    def yields(arroyo_store: ArroyoStateStore) -> Iterator[Any]:
        work(arroyo_store)
        yield dg.MaterializeResult()

    made = arroyo_assets([dg.AssetSpec("own")], reads=["fleet"], deployment="blue", name="mine")
    asset = made(yields if generator else plain)
    assert asset.partitions_def is not None
    assert str(asset.partitions_def.name) == "arroyo_blue_jobs"  # type: ignore[attr-defined]
    assert asset.asset_deps[dg.AssetKey("own")] == {dg.AssetKey(["arroyo", "blue", "fleet"])}
    deployed.instance.add_dynamic_partitions("arroyo_blue_jobs", ["a"])
    result = dg.materialize(
        [asset],
        instance=deployed.instance,
        partition_key="a",
        resources={"arroyo_blue_store": deployed.resource},
        raise_on_error=False,
    )
    (failure,) = [event for event in result.all_events if event.is_step_failure]
    data = failure.step_failure_data.user_failure_data
    assert data is not None
    assert data.description == "no such table [table=t]. Next: list the tables"


HINTS: dict[str, str] = {
    "none": "def count(context, arroyo_store, arroyo_directory): {body}",
    "some": "def count(context: dg.AssetExecutionContext, arroyo_store): {body}",
    "texts": "from __future__ import annotations\n"
    "def count(context: dg.AssetExecutionContext, arroyo_store: ArroyoStateStore): {body}",
}


@pytest.mark.parametrize("deployment", [None, "blue"])
@pytest.mark.parametrize("hints", HINTS)
def test_resources_are_known_by_their_names_whatever_the_hints(
    deployed: Any, hints: str, deployment: str | None
) -> None:
    Written(deployed.store, ONE).epochs(3)
    body = "return dg.MaterializeResult(metadata={'jobs': len(arroyo_store.jobs())})"
    names: dict[str, Any] = {"dg": dg, "ArroyoStateStore": ArroyoStateStore, "__name__": "mine"}
    exec(compile(HINTS[hints].format(body=body), "mine.py", "exec", dont_inherit=True), names)
    asset = arroyo_assets([dg.AssetSpec("own")], deployment=deployment)(names["count"])
    jobs = "arroyo_jobs" if deployment is None else "arroyo_blue_jobs"
    deployed.instance.add_dynamic_partitions(jobs, [ONE.root])
    middle = "" if deployment is None else f"{deployment}_"
    resources = {
        f"arroyo_{middle}store": deployed.resource,
        f"arroyo_{middle}directory": ArroyoDirectory(),
    }
    result = dg.materialize(
        [asset], instance=deployed.instance, partition_key=ONE.root, resources=resources
    )
    (event,) = result.asset_materializations_for_node("count")
    assert event.metadata["jobs"].value == 1


def test_a_selection_names_all_tables_or_some_of_a_deployment() -> None:
    defs = build_arroyo_definitions("memory://selected", deployment="blue")
    graph = defs.resolve_asset_graph()
    every = build_arroyo_asset_selection(deployment="blue").resolve(graph)
    assert every == {dg.AssetKey(["arroyo", "blue", table]) for table in TABLES}
    some = build_arroyo_asset_selection("epoch_catalog", deployment="blue")
    assert some.resolve(graph) == {dg.AssetKey(["arroyo", "blue", "epoch_catalog"])}
    below = build_arroyo_asset_selection("checkpoint", deployment="blue").downstream()
    assert dg.AssetKey(["arroyo", "blue", "epoch_catalog"]) in below.resolve(graph)


def test_wrong_names_are_refused() -> None:
    with pytest.raises(InputError, match="no such asset"):
        build_arroyo_asset_selection("epochs")
    with pytest.raises(InputError, match="no such asset"):
        arroyo_assets([dg.AssetSpec("own")], reads=["epochs"])
    with pytest.raises(InputError, match="no assets"):
        arroyo_assets([])
