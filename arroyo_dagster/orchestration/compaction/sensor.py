"""The sensor that requests compaction batches when there is enough to do."""

from typing import Any

import dagster as dg

from arroyo_dagster.orchestration.batch_requests import BatchRequests
from arroyo_dagster.orchestration.catalog.sensor import sensor_status
from arroyo_dagster.orchestration.resources import ArroyoStateStore

_INTERVAL_SECONDS = 60


def build_compaction_sensor(
    job: Any, requests: BatchRequests, *, running: bool = False
) -> dg.SensorDefinition:
    """Build the sensor that requests the compaction of jobs with enough files that were never
    merged.
    """

    naming = requests.naming

    @dg.sensor(
        name=naming.name("arroyo_compaction_sensor"),
        job=job,
        minimum_interval_seconds=_INTERVAL_SECONDS,
        default_status=sensor_status(running),
        description="Request the compaction of jobs with many small files.",
    )
    @naming.bind
    def arroyo_compaction_sensor(
        context: dg.SensorEvaluationContext, arroyo_store: ArroyoStateStore
    ) -> dg.RunRequest | dg.SkipReason:
        return requests.ask(context, arroyo_store)

    return arroyo_compaction_sensor
