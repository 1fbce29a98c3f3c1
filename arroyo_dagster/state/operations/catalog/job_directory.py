"""`JobDirectory`: what is known of a job's pipeline and state, whoever knows it.

Facts only: whether they allow a deletion or a rewrite is decided in `planning`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from arroyo_dagster.errors import ArroyoStateError, InputError
from arroyo_dagster.state.model.ids import Epoch, JobId, PipelineId
from arroyo_dagster.state.model.job_facts import (
    Absence,
    JobAnswer,
    JobCondition,
    JobFacts,
    SourceAnswer,
    condition_of,
    merge_answers,
)
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.storage.arroyo.api import ArroyoApi
from arroyo_dagster.state.storage.arroyo.postgres import ArroyoPostgres, is_postgres
from arroyo_dagster.state.storage.arroyo.sqlite import ArroyoDatabase


class JobSource(Protocol):
    """Somebody who may know about jobs."""

    source: str
    """How this source is named in output."""

    def look_up(self, jobs: Sequence[JobPaths], *, checkpoints: bool = False) -> list[SourceAnswer]:
        """Give one word for each of `jobs`, in their order; asked anew every time."""


class JobDirectory:
    """Asks its sources about jobs, in their order: for each fact the first one that knows wins.

    Nothing is kept between two calls, so that a plan can be checked against fresh facts. List the
    jobs on the store first and ask then: a job that is created in between is known here, while
    one that is only found afterwards may look absent.
    """

    def __init__(self, sources: Sequence[JobSource] = ()) -> None:
        self.sources = tuple(sources)

    def look_up(self, jobs: Sequence[JobPaths], *, checkpoints: bool = False) -> list[JobAnswer]:
        """Answer for each of `jobs`, in their order; nothing that a source does is an error here.

        A source that cannot answer is a problem in the answers, a job that nobody knows has the
        condition UNKNOWN and the reason of each source.

        Args:
            checkpoints: ask for the epochs too, which may cost a request a job.
        """
        heard = [_answers(source, jobs, checkpoints) for source in self.sources]
        return [
            merge_answers(paths, [words[at] for words in heard]) for at, paths in enumerate(jobs)
        ]

    def find(self, job: JobPaths, *, checkpoints: bool = True) -> JobAnswer:
        """Answer for one job; one that nobody knows has the condition UNKNOWN.

        Raises:
            InputError, StorageError, FormatError, NotFoundError: nobody says what the job is
                doing, and this kept a source from answering.
        """
        answer = self.look_up([job], checkpoints=checkpoints)[0]
        if not answer.facts.knows_state and answer.problems:
            raise answer.problems[0]
        return answer


def _answers(source: JobSource, jobs: Sequence[JobPaths], checkpoints: bool) -> list[SourceAnswer]:
    try:
        return source.look_up(jobs, checkpoints=checkpoints)
    except ArroyoStateError as error:
        return [SourceAnswer(source=source.source, problem=error) for _ in jobs]


def open_directory(
    *,
    api: str | None = None,
    token: str | None = None,
    database: str | None = None,
    assumed: Mapping[str, object] | None = None,
    **limits: Any,
) -> JobDirectory:
    """A directory of the sources given: the REST API first, then the database, then the user.

    A running controller outranks its database, which may be an old copy, and both outrank what
    somebody remembers; where they differ the answers say so.

    Args:
        api: the address of Arroyo's REST API; token, limits: for it, as `JsonServer` takes them.
        database: a path or URL of `state.sqlite`, or `postgresql://…` of a Postgres.
        assumed: what the user says, as `AssumedJobs` takes it.

    Raises:
        InputError: one of them cannot be used; nothing was asked yet.
    """
    sources: list[JobSource] = []
    if api is not None:
        sources.append(ArroyoApi(api, token=token, **limits))
    if database is not None:
        postgres = is_postgres(database)
        sources.append(ArroyoPostgres(database) if postgres else ArroyoDatabase(database))
    if assumed:
        sources.append(AssumedJobs(assumed))
    return JobDirectory(sources)


# ---- the user's word -----------------------------------------------------------------------------

_CONDITIONS = {condition.value: condition for condition in JobCondition}


class AssumedJobs:
    """What the user says of jobs.

    Args:
        assumed: by `job` or `pipeline/job`: a condition (`stopped`…; Arroyo's words for states do
            too), or an object with any of `condition`, `name`, `run_id`, `epoch` (the newest ready
            one).
        source: how the user is named in answers.

    Raises:
        InputError: a condition or a fact that there is not.
    """

    def __init__(self, assumed: Mapping[str, object], *, source: str = "the user") -> None:
        self.source = source
        self._assumed = {
            name: _assumed_facts(name, words, source) for name, words in assumed.items()
        }

    def look_up(self, jobs: Sequence[JobPaths], *, checkpoints: bool = False) -> list[SourceAnswer]:
        """Repeat what was said of each of `jobs`; `pipeline/job` counts before `job`."""
        return [self._answer(paths) for paths in jobs]

    def _answer(self, paths: JobPaths) -> SourceAnswer:
        facts = self._assumed.get(str(paths.root)) or self._assumed.get(paths.job)
        if facts is None:
            return SourceAnswer(source=self.source, absence=Absence.UNSAID)
        return SourceAnswer(source=self.source, facts=facts)


def read_assumed(path: str | Path) -> dict[str, object]:
    """Read what the user says of jobs from a JSON file.

    Raises:
        InputError: there is no such file, or it is not one JSON object.
    """
    try:
        assumed = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"not a JSON file: {error}", path=str(path)) from error
    if not isinstance(assumed, dict):
        raise InputError(
            "the file contains no JSON object of jobs",
            path=str(path),
            next_step='write it as {"JOB": "stopped", "OTHER": {"name": "orders"}}',
        )
    return assumed


def _assumed_facts(name: str, words: object, source: str) -> JobFacts:
    given = words if isinstance(words, Mapping) else {"condition": words}
    unknown = [str(key) for key in given if key not in ("condition", "name", "run_id", "epoch")]
    if unknown:
        raise InputError(
            f"unknown fields of a job: {', '.join(unknown)}",
            job=name,
            next_step="use condition, name, run_id or epoch",
        )
    pipeline, _, job = name.rpartition("/")
    text = given.get("condition")
    title = given.get("name")
    epoch = _count(name, "epoch", given.get("epoch"))
    if not isinstance(title, str | None):
        raise InputError("the name of a pipeline is not a text", job=name, found=repr(title))
    return JobFacts(
        job=JobId(job),
        source=source,
        pipeline=PipelineId(pipeline) if pipeline else None,
        name=title,
        condition=JobCondition.UNKNOWN if text is None else _condition(name, text),
        run_id=_count(name, "run_id", given.get("run_id")),
        newest_ready_epoch=None if epoch is None else Epoch(epoch),
    )


def _condition(job: str, text: object) -> JobCondition:
    if isinstance(text, str):
        found = _CONDITIONS.get(text.lower(), condition_of(text))
        if found is not JobCondition.UNKNOWN or text.lower() == found.value:
            return found
    raise InputError(
        "the status of a job is unknown",
        job=job,
        condition=str(text),
        next_step=f"use one of {', '.join(_CONDITIONS)}",
    )


def _count(job: str, fact: str, value: object) -> int | None:
    if value is None or (type(value) is int and value >= 0):
        return value
    raise InputError(f"{fact} is a whole number from 0", job=job, found=repr(value))
