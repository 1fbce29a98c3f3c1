"""A new epoch requests what has an automation condition, once and for its job only."""

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
