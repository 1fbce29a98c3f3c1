"""Rows of the database of Arroyo's controller, SQLite or Postgres, to facts about its jobs.

Source: crates/arroyo-api/migrations and crates/arroyo-controller/queries/controller_queries.sql
(arroyo-state.md 10.4).
"""

from __future__ import annotations

import datetime as dt
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from arroyo_dagster.errors import FormatError
from arroyo_dagster.state.model.ids import Epoch, JobId, PipelineId
from arroyo_dagster.state.model.job_facts import (
    Absence,
    CheckpointFacts,
    JobFacts,
    SourceAnswer,
    condition_of,
    newest_ready,
)
from arroyo_dagster.state.model.layout import JobPaths

# What later releases added is read as unknown where it is missing.
TABLES: Mapping[str, tuple[str, ...]] = {
    "job_configs": (
        *("id", "pipeline_name", "pipeline_id", "stop", "checkpoint_interval_micros"),
        *("ttl_micros", "ignore_state_before_epoch"),
    ),
    "job_statuses": ("id", "state", "run_id", "start_time", "finish_time", "failure_message"),
    "pipelines": ("id", "pub_id", "name", "state_url"),
    "checkpoints": (
        *("job_id", "epoch", "min_epoch", "state", "is_stopping", "start_time", "finish_time"),
    ),
}
NEEDED = {"job_configs": {"id"}, "job_statuses": {"id", "state"}}
_NOT_ARROYO = "check that this is the database of Arroyo's controller"
_GONE = ("compacted", "failed")
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)?")
_UNIX = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)

DatabaseRow = Mapping[str, Any]
JobsAndPipelines = tuple[dict[JobId, JobFacts], set[PipelineId]]
"""What a database knows: its jobs by id, and the public ids of its pipelines."""

_T = TypeVar("_T")


def facts_of(rows: Mapping[str, Sequence[DatabaseRow]], source: str) -> JobsAndPipelines:
    """What the rows of the tables in `TABLES` say.

    Args:
        rows: by table; each with all columns of `TABLES`, those the database lacks None.
        source: how the database is named where its words are shown.

    Raises:
        FormatError: a value is of another type than Arroyo writes.
    """
    try:
        return _facts(rows, source), {_pub_id(one) for one in rows["pipelines"]}
    except FormatError as error:
        error.facts["path"] = source
        raise


def answers_of(
    found: JobsAndPipelines, jobs: Sequence[JobPaths], source: str
) -> list[SourceAnswer]:
    """What a database says of each of `jobs`, in their order."""
    known, pipelines = found
    answers = []
    for paths in jobs:
        facts = known.get(paths.job)
        if facts is not None and facts.concerns(paths):
            answers.append(SourceAnswer(source=source, facts=facts))
        else:
            lost = paths.pipeline is not None and paths.pipeline not in pipelines
            absence = Absence.NO_PIPELINE if lost else Absence.NO_JOB
            answers.append(SourceAnswer(source=source, absence=absence))
    return answers


# ---- rows to facts -------------------------------------------------------------------------------


def _facts(rows: Mapping[str, Sequence[DatabaseRow]], source: str) -> dict[JobId, JobFacts]:
    pipelines = {one["id"]: one for one in rows["pipelines"]}
    statuses = {one["id"]: one for one in rows["job_statuses"]}
    epochs = defaultdict(list)
    for one in rows["checkpoints"]:
        if one["state"] not in _GONE:
            epochs[one["job_id"]].append(_checkpoint(one))
    found = (
        _job(
            config,
            statuses.get(config["id"], {}),
            pipelines.get(config["pipeline_id"], {}),
            tuple(sorted(epochs[config["id"]], key=lambda one: one.epoch)),
            source,
        )
        for config in rows["job_configs"]
    )
    return {facts.job: facts for facts in found}


def _job(
    config: DatabaseRow,
    status: DatabaseRow,
    pipeline: DatabaseRow,
    checkpoints: tuple[CheckpointFacts, ...],
    source: str,
) -> JobFacts:
    state = _value(status, "state", str)
    before = _value(config, "ignore_state_before_epoch", int)
    return JobFacts(
        job=JobId(_needed(config, "id", str)),
        source=source,
        pipeline=_pub_id(pipeline) if pipeline else None,
        name=_value(pipeline, "name", str) or _value(config, "pipeline_name", str),
        condition=condition_of(state),
        state=state,
        run_id=_value(status, "run_id", int),
        newest_ready_epoch=newest_ready(checkpoints),
        checkpoints=checkpoints,
        stop_requested=_value(config, "stop", str),
        failure=_value(status, "failure_message", str),
        start_time_micros=_micros(status.get("start_time")),
        finish_time_micros=_micros(status.get("finish_time")),
        checkpoint_interval_micros=_value(config, "checkpoint_interval_micros", int),
        preview=None if "ttl_micros" not in config else config["ttl_micros"] is not None,
        state_url=_value(pipeline, "state_url", str),
        ignore_state_before_epoch=None if before is None else Epoch(before),
    )


def _checkpoint(one: DatabaseRow) -> CheckpointFacts:
    min_epoch = _value(one, "min_epoch", int)
    stopping = _value(one, "is_stopping", int)
    state = _value(one, "state", str)
    return CheckpointFacts(
        epoch=Epoch(_needed(one, "epoch", int)),
        ready=state == "ready",
        state=state,
        final=None if stopping is None else bool(stopping),
        min_epoch=None if min_epoch is None else Epoch(min_epoch),
        start_time_micros=_micros(one["start_time"]),
        finish_time_micros=_micros(one["finish_time"]),
    )


def _pub_id(pipeline: DatabaseRow) -> PipelineId:
    return PipelineId(_needed(pipeline, "pub_id", str))


def _needed(row: DatabaseRow, name: str, kind: Callable[..., _T]) -> _T:
    value = _value(row, name, kind)
    if value is None:
        raise FormatError(f"a row of Arroyo's database has no {name}", next_step=_NOT_ARROYO)
    return value


def _value(row: DatabaseRow, name: str, kind: Callable[..., _T]) -> _T | None:
    value = row.get(name)
    # Columns of SQLite hold values of any type, whatever they were declared as.
    if value is not None and type(value) is not kind:
        raise FormatError(
            f"a row of Arroyo's database has another shape: {name} is no {kind.__name__}",
            found=repr(value)[:100],
            next_step=_NOT_ARROYO,
        )
    return value


def _micros(text: object) -> int | None:
    """Microseconds since 1970 of a time as text, nanoseconds cut; None if it is in another form."""
    found = _TIME.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return None
    day, clock, part, zone = found.groups()
    try:
        moment = dt.datetime.fromisoformat(f"{day}T{clock}{(zone or '+00:00')}")
    except ValueError:
        return None
    seconds = (moment - _UNIX) // dt.timedelta(seconds=1)
    return seconds * 1_000_000 + int(f"{part or '0':0<6.6}")
