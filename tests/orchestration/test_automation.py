"""Automation the Dagster way: conditions, targets of the sensor, assets and selections of users."""

from typing import Any

import dagster as dg
import pytest

from arroyo_dagster import (
    ArroyoStateStore,
    ArroyoTableProps,
    DagsterArroyoTranslator,
    build_arroyo_definitions,
    find_job,
    list_epochs,
)
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


@dg.asset(
    deps=[CHECKPOINT],
    partitions_def=dg.DynamicPartitionsDefinition(name="arroyo_jobs"),
    automation_condition=dg.AutomationCondition.eager(),
)
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


# ---- assets of users -----------------------------------------------------------------------------


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
