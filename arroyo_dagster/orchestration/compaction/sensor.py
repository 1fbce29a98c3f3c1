"""Compaction as soon as there is enough to do: a sensor that asks for batches."""

from typing import Any

import dagster as dg

from arroyo_dagster.orchestration.batch_requests import BatchRequests
from arroyo_dagster.orchestration.catalog.sensor import sensor_status
from arroyo_dagster.orchestration.resources import ArroyoStateStore

_INTERVAL_SECONDS = 60


def build_compaction_sensor(
    job: Any, requests: BatchRequests, *, running: bool = False
) -> dg.SensorDefinition:
    """The sensor that asks for the compaction of jobs with enough files that were never merged."""

    @dg.sensor(
        name="arroyo_compaction_sensor",
        job=job,
        minimum_interval_seconds=_INTERVAL_SECONDS,
        default_status=sensor_status(running),
        description="Asks for the compaction of jobs with many small files.",
    )
    def arroyo_compaction_sensor(
        context: dg.SensorEvaluationContext, arroyo_store: ArroyoStateStore
    ) -> dg.RunRequest | dg.SkipReason:
        return requests.ask(context, arroyo_store)

    return arroyo_compaction_sensor
