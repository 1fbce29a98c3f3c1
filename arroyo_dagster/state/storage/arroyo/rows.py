"""Conversion of rows from the database of Arroyo's controller, SQLite or Postgres, to job facts.

Source: crates/arroyo-api/migrations and crates/arroyo-controller/queries/controller_queries.sql
(arroyo-state.md 10.4).
"""

from __future__ import annotations

import datetime as dt
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from arroyo_dagster.state.model.ids import Epoch, JobId, PipelineId
from arroyo_dagster.state.model.job_facts import (
    Absence,
    CheckpointFacts,
    JobFacts,
    SourceAnswer,
    condition_of,
    newest_ready,
)
from arroyo_dagster.state.model.json_fields import Fields
from arroyo_dagster.state.model.layout import JobPaths

# Columns that only later releases have are unknown if they are missing.
TABLES: Mapping[str, tuple[str, ...]] = {
    "job_configs": (*("id", "pipeline_name", "pipeline_id", "stop", "ignore_state_before_epoch"),),
    "job_statuses": ("id", "state", "run_id", "start_time", "finish_time", "failure_message"),
    "pipelines": ("id", "pub_id", "name", "textual_repr"),
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
"""The content of a database: its jobs by id, and the public ids of its pipelines."""


def facts_of(rows: Mapping[str, Sequence[DatabaseRow]], source: str) -> JobsAndPipelines:
    """Convert the rows of the tables in `TABLES` to facts.

    Args:
        rows: by table; each with all columns of `TABLES`, and None for those the database lacks.
        source: the name of the database in its answers.

    Raises:
        FormatError: a value is of another type than Arroyo writes.
    """
    # SQLite columns may contain values of any type, whatever their declared type.
    fields = {
        table: [Fields(row, next_step=_NOT_ARROYO, path=source) for row in table_rows]
        for table, table_rows in rows.items()
    }
    return _facts(fields, source), {_pub_id(row) for row in fields["pipelines"]}


def answers_of(
    found: JobsAndPipelines, jobs: Sequence[JobPaths], source: str
) -> list[SourceAnswer]:
    """Return the database's answer about each of `jobs`, in their order."""
    facts_of_jobs, pipelines = found
    answers = []
    for paths in jobs:
        facts = facts_of_jobs.get(paths.job)
        if facts is not None and facts.concerns(paths):
            answers.append(SourceAnswer(source=source, facts=facts))
        else:
            lost = paths.pipeline is not None and paths.pipeline not in pipelines
            absence = Absence.NO_PIPELINE if lost else Absence.NO_JOB
            answers.append(SourceAnswer(source=source, absence=absence))
    return answers


# ---- rows to facts -------------------------------------------------------------------------------


def _facts(rows: Mapping[str, Sequence[Fields]], source: str) -> dict[JobId, JobFacts]:
    pipelines = {row.value("id"): row for row in rows["pipelines"]}
    statuses = {row.value("id"): row for row in rows["job_statuses"]}
    epochs = defaultdict(list)
    for row in rows["checkpoints"]:
        if row.value("state") not in _GONE:
            epochs[row.value("job_id")].append(_checkpoint(row))
    jobs = (
        _job(
            config,
            statuses.get(config.value("id"), Fields({})),
            pipelines.get(config.value("pipeline_id")),
            tuple(sorted(epochs[config.value("id")], key=lambda epoch: epoch.epoch)),
            source,
        )
        for config in rows["job_configs"]
    )
    return {facts.job: facts for facts in jobs}


def _job(
    config: Fields,
    status: Fields,
    pipeline: Fields | None,
    checkpoints: tuple[CheckpointFacts, ...],
    source: str,
) -> JobFacts:
    state = status.optional_text("state")
    name = pipeline.optional_text("name") if pipeline else None
    before = config.optional_number("ignore_state_before_epoch")
    return JobFacts(
        job=JobId(config.text("id")),
        source=source,
        pipeline=_pub_id(pipeline) if pipeline else None,
        name=name or config.optional_text("pipeline_name"),
        sql=pipeline.optional_text("textual_repr") if pipeline else None,
        condition=condition_of(state),
        state=state,
        run_id=status.optional_number("run_id"),
        newest_ready_epoch=newest_ready(checkpoints),
        checkpoints=checkpoints,
        stop_requested=config.optional_text("stop"),
        failure=status.optional_text("failure_message"),
        start_time_micros=_micros(status.value("start_time")),
        finish_time_micros=_micros(status.value("finish_time")),
        ignore_state_before_epoch=None if before is None else Epoch(before),
    )


def _checkpoint(one: Fields) -> CheckpointFacts:
    min_epoch = one.optional_number("min_epoch")
    stopping = one.optional_number("is_stopping")
    state = one.optional_text("state")
    return CheckpointFacts(
        epoch=Epoch(one.number("epoch")),
        ready=state == "ready",
        state=state,
        final=None if stopping is None else bool(stopping),
        min_epoch=None if min_epoch is None else Epoch(min_epoch),
        start_time_micros=_micros(one.value("start_time")),
        finish_time_micros=_micros(one.value("finish_time")),
    )


def _pub_id(pipeline: Fields) -> PipelineId:
    return PipelineId(pipeline.text("pub_id"))


def _micros(text: object) -> int | None:
    """Convert a text to microseconds since 1970, truncating; None if it has another form."""
    match = _TIME.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return None
    day, clock, part, zone = match.groups()
    try:
        moment = dt.datetime.fromisoformat(f"{day}T{clock}{(zone or '+00:00')}")
    except ValueError:
        return None
    seconds = (moment - _UNIX) // dt.timedelta(seconds=1)
    return seconds * 1_000_000 + int(f"{part or '0':0<6.6}")
