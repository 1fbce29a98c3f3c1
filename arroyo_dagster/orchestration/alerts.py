"""Alerts on failed runs: a sensor for the jobs of a deployment, a hook for jobs of your own.

What is sent, and where to, is the caller's: no messaging service is known here.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import dagster as dg

from arroyo_dagster.orchestration.catalog.sensor import sensor_status
from arroyo_dagster.orchestration.partitions import jobs_partitions
from arroyo_dagster.orchestration.schedules import JOB_TAG
from arroyo_dagster.orchestration.translator import (
    ALL_TABLES,
    DagsterArroyoTranslator,
    Naming,
)
from arroyo_dagster.redaction import redact_text, without_secrets

_PARTITION_TAG = "dagster/partition"
_CLASS = re.compile(r"^(?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*: ")
_NEXT = ". Next: "


@dataclass(frozen=True, kw_only=True)
class MaintenanceFailure:
    """A failed run or step, without secrets.

    Attributes:
        title: one line: the Dagster job, the Arroyo job, what happened and to which object.
        description: the whole message, with the next step.
        dagster_job: the name of the job in Dagster.
        step: the failed step; None if the run failed outside of its steps.
        job: the Arroyo job, as a partition key; None if the run serves several, or none.
        path: the object concerned; None if the error names none.
    """

    title: str
    description: str
    dagster_job: str
    run_id: str
    step: str | None = None
    job: str | None = None
    path: str | None = None


Notify = Callable[[MaintenanceFailure], object]


def build_failure_sensor(
    notify: Notify,
    *,
    deployment: str | None = None,
    translator: DagsterArroyoTranslator | None = None,
    name: str | None = None,
    also: Collection[str] = (),
    running: bool = False,
) -> dg.SensorDefinition:
    """Build a sensor that calls `notify` for each failed run of a deployment.

    It works for runs whose process was killed, too. Without `deployment` it serves the runs of all
    deployments. An error of `notify` fails the tick.

    Args:
        deployment, translator: those given to `build_arroyo_definitions`.
        name: of the sensor; default: `arroyo_failure_sensor`, with the deployment in it.
        also: the names of further Dagster jobs.
        running: start as running.
    """
    naming = Naming(
        translator or DagsterArroyoTranslator(), jobs_partitions(deployment), deployment
    )
    prefix = naming.name("arroyo_")
    keys = {naming.key(table) for table in ALL_TABLES}

    def concerns(run: dg.DagsterRun) -> bool:
        # A run that was started on an asset's page has a job without a name of its own.
        selected = run.asset_selection or frozenset()
        return run.job_name.startswith(prefix) or run.job_name in also or bool(keys & selected)

    @dg.run_failure_sensor(
        name=name or naming.name("arroyo_failure_sensor"),
        default_status=sensor_status(running),
        description="Call a function for each failed run of maintenance or inspection.",
    )
    def arroyo_failure_sensor(context: dg.RunFailureSensorContext) -> dg.SkipReason | None:
        run = context.dagster_run
        if not concerns(run):
            return dg.SkipReason(f"{run.job_name} is no job of this deployment")
        notify(_of_run(context))
        return None

    return arroyo_failure_sensor


def build_failure_hook(notify: Notify, *, name: str = "arroyo_failure_hook") -> dg.HookDefinition:
    """Build a hook that calls `notify` for each failed step of a job or asset of your own.

    It runs in the step's process, so not if that process is killed: the sensor of
    `build_failure_sensor` serves that case.
    """

    @dg.failure_hook(name=name)
    def arroyo_failure_hook(context: dg.HookContext) -> None:
        run = context.instance.get_run_by_id(context.run_id)
        error = context.op_exception
        facts = {
            key: getattr(value, "value", value)
            for key, value in (getattr(error, "metadata", None) or {}).items()
        }
        text = getattr(error, "description", None) or f"{type(error).__name__}: {error}"
        tags = {} if run is None else run.tags
        origin = _Origin(context.job_name, context.run_id, context.step_key, tags)
        notify(_described(origin, text, facts))

    return arroyo_failure_hook


# ---- what failed ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Origin:
    dagster_job: str
    run_id: str
    step: str | None
    tags: Mapping[str, str]


def _of_run(context: dg.RunFailureSensorContext) -> MaintenanceFailure:
    run = context.dagster_run
    for event in context.get_step_failure_events():
        data = event.step_failure_data
        facts: dict[str, Any] = {}
        text = None if data.error is None else _cause(data.error)
        if data.user_failure_data is not None:
            facts = {key: one.value for key, one in data.user_failure_data.metadata.items()}
            text = data.user_failure_data.description or text
        origin = _Origin(run.job_name, run.run_id, event.step_key, run.tags)
        return _described(origin, text or "the step failed", facts)
    text = context.failure_event.message or "the run failed"
    return _described(_Origin(run.job_name, run.run_id, None, run.tags), text, {})


def _cause(error: Any) -> str:
    """Return the message of the innermost cause: Dagster wraps it, and retries wrap it again."""
    while error.cause is not None:
        error = error.cause
    text = str(error.message).strip()
    return text.removeprefix("dagster._core.definitions.events.Failure: ") or error.cls_name


def _described(origin: _Origin, text: str, facts: Mapping[str, Any]) -> MaintenanceFailure:
    text = without_secrets(redact_text(_CLASS.sub("", text.strip())))
    partition = origin.tags.get(_PARTITION_TAG) or origin.tags.get(JOB_TAG)
    job = partition or _text(facts.get("arroyo/job"))
    path = _text(facts.get("arroyo/path"))
    line = text.splitlines()[0].partition(_NEXT)[0] if text else "failed"
    # The error's own line names both already, in most cases.
    named = [one for one in (job, path) if one and one not in line]
    return MaintenanceFailure(
        title=": ".join([f"{origin.dagster_job} failed", *named, line]),
        description=text,
        dagster_job=origin.dagster_job,
        run_id=origin.run_id,
        step=origin.step,
        job=job,
        path=path,
    )


def _text(value: Any) -> str | None:
    return None if value is None else without_secrets(str(value))
