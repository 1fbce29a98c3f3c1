"""`JobDirectory`: facts about a job's pipeline and status, merged from all configured sources.

It reports facts only. Whether they allow a deletion or a rewrite is decided in `planning`.
"""

from __future__ import annotations

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
from arroyo_dagster.state.model.json_fields import parse_json
from arroyo_dagster.state.model.layout import JobPaths


class JobSource(Protocol):
    """A source of facts about jobs, for example Arroyo's REST API."""

    source: str
    """Name of this source in output."""

    def look_up(self, jobs: Sequence[JobPaths], *, checkpoints: bool = False) -> list[SourceAnswer]:
        """Return one answer for each of `jobs`, in their order; every call asks the source anew."""


class JobDirectory:
    """Asks its sources about jobs, in order: for each fact, the first source that knows it wins.

    It caches nothing between two calls, so a plan can be checked against fresh facts. List the jobs
    on the store first, then ask: a job created in between is known here, whereas a job listed only
    after the sources answered may look absent.
    """

    def __init__(self, sources: Sequence[JobSource] = ()) -> None:
        self.sources = tuple(sources)

    @property
    def from_anywhere(self) -> bool:
        """Whether other machines, to which this is pickled, get the same answers."""
        return all(getattr(source, "from_anywhere", False) for source in self.sources)

    def look_up(self, jobs: Sequence[JobPaths], *, checkpoints: bool = False) -> list[JobAnswer]:
        """Return one answer for each of `jobs`, in their order; a failing source raises no error
        here.

        The answers report a source that cannot answer as a problem. A job that no source knows has
        the condition UNKNOWN, with the reason of each source.

        Args:
            checkpoints: also ask for the epochs, which may cost one request per job.
        """
        heard = [_answers(source, jobs, checkpoints) for source in self.sources]
        return [
            merge_answers(paths, [words[at] for words in heard]) for at, paths in enumerate(jobs)
        ]

    def find(self, job: JobPaths, *, checkpoints: bool = True) -> JobAnswer:
        """Return the answer for one job; a job that no source knows has the condition UNKNOWN.

        Raises:
            InputError, StorageError, FormatError, NotFoundError: no source reports the job's
                status, and this error kept a source from answering.
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
    """Create a directory from the given sources: the REST API first, then the database, then the
    user.

    A running controller takes precedence over its database, which may be an old copy. Both take
    precedence over the user's assumptions. Where sources differ, the answers report it.

    Args:
        api: the address of Arroyo's REST API; token, limits: its settings, as `JsonServer` takes
            them.
        database: a path or URL of `state.sqlite`, or `postgresql://…` for Postgres.
        assumed: what the user assumes of jobs, as `AssumedJobs` takes it.

    Raises:
        InputError: an argument is invalid; no source was asked.
    """
    sources: list[JobSource] = []
    # Each source is loaded only where it is used: an HTTP client and SQLite take time to load.
    if api is not None:
        from arroyo_dagster.state.storage.arroyo.api import ArroyoApi

        sources.append(ArroyoApi(api, token=token, **limits))
    if database is not None:
        sources.append(_open_database(database))
    if assumed:
        sources.append(AssumedJobs(assumed))
    return JobDirectory(sources)


def _open_database(database: str) -> JobSource:
    from arroyo_dagster.state.storage.arroyo.postgres import ArroyoPostgres, is_postgres

    if is_postgres(database):
        return ArroyoPostgres(database)
    from arroyo_dagster.state.storage.arroyo.sqlite import ArroyoDatabase

    return ArroyoDatabase(database)


# ---- the user's assumptions ----------------------------------------------------------------------

_CONDITIONS = {condition.value: condition for condition in JobCondition}


class AssumedJobs:
    """Facts about jobs that the user states; the same everywhere.

    Args:
        assumed: by `job` or `pipeline/job`: a condition (`stopped`…; Arroyo's state names work
            too), or an object with any of `condition`, `name`, `run_id`, `epoch` (the newest ready
            epoch).

    Raises:
        InputError: a condition or field is unknown.
    """

    from_anywhere = True

    source = "the user"

    def __init__(self, assumed: Mapping[str, object]) -> None:
        self._assumed = {
            name: _assumed_facts(name, words, self.source) for name, words in assumed.items()
        }

    def look_up(self, jobs: Sequence[JobPaths], *, checkpoints: bool = False) -> list[SourceAnswer]:
        """Return what the user states of each of `jobs`; `pipeline/job` wins over `job`."""
        return [self._answer(paths) for paths in jobs]

    def _answer(self, paths: JobPaths) -> SourceAnswer:
        facts = self._assumed.get(str(paths.root)) or self._assumed.get(paths.job)
        if facts is None:
            return SourceAnswer(source=self.source, absence=Absence.UNSAID)
        return SourceAnswer(source=self.source, facts=facts)


def read_assumed(path: str | Path) -> dict[str, object]:
    """Read the user's assumptions about jobs from a JSON file.

    Raises:
        InputError: the file does not exist, or is not one JSON object.
    """
    from arroyo_dagster.state.storage.local_documents import read_document

    try:
        assumed = parse_json(read_document(path))
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(f"not a JSON file: {error}", path=str(path)) from error
    if not isinstance(assumed, dict):
        raise InputError(
            "the file contains no JSON object of jobs",
            path=str(path),
            next_step='write it as {"JOB": "stopped", "OTHER": {"name": "orders"}}',
        )
    return assumed


def _assumed_facts(name: str, words: object, source: str) -> JobFacts:
    fields = words if isinstance(words, Mapping) else {"condition": words}
    unknown = [str(key) for key in fields if key not in ("condition", "name", "run_id", "epoch")]
    if unknown:
        raise InputError(
            f"unknown fields of a job: {', '.join(unknown)}",
            job=name,
            next_step="use condition, name, run_id or epoch",
        )
    pipeline, _, job = name.rpartition("/")
    text = fields.get("condition")
    title = fields.get("name")
    epoch = _count(name, "epoch", fields.get("epoch"))
    if not isinstance(title, str | None):
        raise InputError("the name of a pipeline is not a text", job=name, found=repr(title))
    return JobFacts(
        job=JobId(job),
        source=source,
        pipeline=PipelineId(pipeline) if pipeline else None,
        name=title,
        condition=JobCondition.UNKNOWN if text is None else _condition(name, text),
        run_id=_count(name, "run_id", fields.get("run_id")),
        newest_ready_epoch=None if epoch is None else Epoch(epoch),
    )


def _condition(job: str, text: object) -> JobCondition:
    if isinstance(text, str):
        condition = _CONDITIONS.get(text.lower(), condition_of(text))
        if condition is not JobCondition.UNKNOWN or text.lower() == condition.value:
            return condition
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
