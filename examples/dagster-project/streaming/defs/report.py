"""An asset of your own, one partition per job, and an alert on each failed run."""

import dagster as dg

from arroyo_dagster import (
    ArroyoStateStore,
    as_failure,
    find_job,
    list_epochs,
)


@dg.asset(
    deps=[dg.AssetKey(["arroyo", "checkpoint"])],
    partitions_def=dg.DynamicPartitionsDefinition(name="arroyo_jobs"),
    automation_condition=dg.AutomationCondition.on_cron("@hourly"),
)
def state_report(
    context: dg.AssetExecutionContext, arroyo_store: ArroyoStateStore
) -> dg.MaterializeResult:
    """Report how much state a job keeps."""
    with as_failure():
        store = arroyo_store.reading()
        epochs = list_epochs(store, find_job(store, context.partition_key))
    return dg.MaterializeResult(
        metadata={"epochs": len(epochs), "bytes": sum(one.new_size_bytes or 0 for one in epochs)}
    )


@dg.run_failure_sensor
def failure_sensor(context: dg.RunFailureSensorContext) -> None:
    """Call your pager here."""
    print(f"{context.dagster_run.job_name} failed: {context.failure_event.message}")
