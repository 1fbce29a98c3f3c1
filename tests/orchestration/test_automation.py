"""A new epoch requests what has an automation condition, once and for its pipeline only."""

from typing import Any

import dagster as dg

from arroyo_dagster import ArroyoStateStore, find_job, list_epochs
from tests.fleets import Written, protocol_job

ONE, TWO = protocol_job("orders"), protocol_job("payments")
REPORT = dg.AssetKey(["report"])


@dg.asset(
    deps=[dg.AssetKey(["arroyo", "payments", "main", "checkpoint"])],
    automation_condition=dg.AutomationCondition.eager(),
)
def report(arroyo_store: ArroyoStateStore) -> dg.MaterializeResult[Any]:
    epochs = list_epochs(arroyo_store.reading(), find_job(arroyo_store.reading(), TWO.root))
    return dg.MaterializeResult(metadata={"epochs": len(epochs)})


def test_a_new_epoch_requests_what_hangs_below_its_pipeline(deployed: Any) -> None:
    first, second = Written(deployed.store, ONE), Written(deployed.store, TWO)
    first.epochs(1)
    second.epochs(1)
    deployed.tick()
    defs = dg.Definitions.merge(deployed.defs, dg.Definitions(assets=[report]))
    result = dg.evaluate_automation_conditions(defs, deployed.instance)
    second.epochs(1)
    deployed.tick()
    result = dg.evaluate_automation_conditions(defs, deployed.instance, cursor=result.cursor)
    requested = {one.key for one in result.results if one.true_subset.size}
    assert requested == {REPORT}
    result = dg.evaluate_automation_conditions(defs, deployed.instance, cursor=result.cursor)
    assert not {one.key for one in result.results if one.true_subset.size}
