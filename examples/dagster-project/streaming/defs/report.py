"""An asset of your own over all pipelines, and an alert on each failed run."""

import dagster as dg

from arroyo_dagster import ArroyoStateStore, as_failure, list_epochs


@dg.asset(
    deps=[dg.AssetKey(["arroyo", "fleet"])],
    automation_condition=dg.AutomationCondition.on_cron("@hourly"),
)
def state_report(arroyo_store: ArroyoStateStore) -> dg.MaterializeResult:
    """Report how much state all jobs keep."""
    with as_failure():
        store = arroyo_store.reading()
        epochs = [epoch for job in arroyo_store.jobs() for epoch in list_epochs(store, job)]
    size_bytes = sum(epoch.new_size_bytes or 0 for epoch in epochs)
    return dg.MaterializeResult(metadata={"epochs": len(epochs), "bytes": size_bytes})


@dg.run_failure_sensor
def failure_sensor(context: dg.RunFailureSensorContext) -> None:
    """Call your pager here."""
    print(f"{context.dagster_run.job_name} failed: {context.failure_event.message}")
