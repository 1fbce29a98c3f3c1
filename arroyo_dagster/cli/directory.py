"""Names and status of jobs, from Arroyo's API, its database or assumptions."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import click

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.state.model.job_facts import JobAnswer
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.operations.catalog.job_directory import (
    JobDirectory,
    open_directory,
    read_assumed,
)

API_VARIABLE = "ARROYO_API_URL"
TOKEN_VARIABLE = "ARROYO_API_TOKEN"

_F = TypeVar("_F", bound=Callable[..., Any])


def directory_options(command: _F) -> _F:
    """Add the options that configure the sources of job names and status.

    The command gets the `directory` of these sources.
    """

    @functools.wraps(command)
    def call(
        *args: Any, api: str | None, database: str | None, assume: Sequence[str], **options: Any
    ) -> Any:
        directory = directory_of_environment(api, database, assume)
        return command(*args, directory=directory, **options)

    return directory_flags(cast(_F, call))


def directory_flags(command: _F) -> _F:
    """Add the same options; the command gets their values as `api`, `database` and `assume`."""
    api = click.option(
        "--arroyo-api",
        "api",
        metavar="URL",
        envvar=API_VARIABLE,
        help="Arroyo's REST API, http://HOST:5115, as a source of job names and status. "
        f"Default: {API_VARIABLE}. The token, if one is needed, comes from {TOKEN_VARIABLE}.",
    )
    database = click.option(
        "--arroyo-db",
        "database",
        metavar="PATH",
        help="Arroyo's database as a source of job names and status: the path or URL of the "
        "controller's state.sqlite, of which only a copy is opened, or "
        "postgresql://USER@HOST/DATABASE, read in one read-only transaction.",
    )
    assume = click.option(
        "--assume",
        multiple=True,
        metavar="JOB=STATUS",
        help="Assume this status of a job, for example job_x=stopped, or read assumptions from "
        "@FILE.json. Other sources take precedence.",
    )
    return api(database(assume(command)))


def directory_of_environment(
    api: str | None, database: str | None, assume: Sequence[str]
) -> JobDirectory:
    """Return the directory of a command's options, with the API's token from the environment.

    Raises:
        InputError: an option's value cannot be used.
        click.UsageError: an assumption is not JOB=STATUS.
    """
    assumed: dict[str, object] = {}
    for text in assume:
        job, equals, condition = text.rpartition("=")
        if text.startswith("@"):
            assumed |= read_assumed(text[1:])
        elif job and equals:
            assumed[job] = condition
        else:
            raise click.UsageError(f"--assume {text}: expected JOB=STATUS or @FILE.json")
    return open_directory(
        api=api or None, token=token_of_environment(), database=database, assumed=assumed
    )


def token_of_environment() -> str | None:
    """Return the token of Arroyo's API, which no option takes; None if it needs none."""
    return os.environ.get(TOKEN_VARIABLE) or None


@dataclass(frozen=True, slots=True)
class JobAnswers:
    """The answers of a directory to the jobs of one command, in its order."""

    answers: tuple[JobAnswer, ...]
    anybody: bool

    @property
    def errors(self) -> list[ArroyoStateError]:
        """Return why sources could not answer, each error once."""
        problems: dict[str, ArroyoStateError] = {}
        for answer in self.answers:
            for problem in answer.problems:
                problems.setdefault(str(problem), problem)
        return list(problems.values())


def ask(
    directory: JobDirectory, jobs: Sequence[JobPaths], *, checkpoints: bool = False
) -> JobAnswers:
    """Ask about `jobs`. A source that does not answer becomes an error of `JobAnswers`."""
    answers = directory.look_up(jobs, checkpoints=checkpoints)
    return JobAnswers(tuple(answers), bool(directory.sources))


def answer_json(answer: JobAnswer, asked: JobAnswers) -> dict[str, Any]:
    """Return the keys that an answer adds to the JSON form of a job. `arroyo` is null if no source
    is configured.
    """
    facts = answer.facts
    return {
        "name": facts.name,
        "condition": facts.condition.value,
        "arroyo": {
            "source": facts.source,
            "pipeline": facts.pipeline,
            "state": facts.state,
            "run_id": facts.run_id,
            "newest_ready_epoch": facts.newest_ready_epoch,
            "action_in_progress": facts.action_in_progress,
            "failure": facts.failure,
            "reason": answer.reason,
            "disagreements": [str(disagreement) for disagreement in answer.disagreements],
        }
        if asked.anybody
        else None,
    }


def about(asked: JobAnswers) -> list[str]:
    """Yield a line for people about each job: its pipeline and its status. Yield nothing if no
    source is configured.
    """
    if not asked.anybody:
        return []
    return [_about(answer) for answer in asked.answers]


def _about(answer: JobAnswer) -> str:
    facts = answer.facts
    words = [f"pipeline {facts.name or facts.pipeline or 'unknown'}", facts.condition.value]
    if facts.run_id is not None:
        words.append(f"run {facts.run_id}")
    if facts.newest_ready_epoch is not None:
        words.append(f"newest ready epoch {facts.newest_ready_epoch}")
    words.append(f"source: {facts.source}" if answer.reason is None else answer.reason)
    return "  ".join(words)


def notes(asked: JobAnswers) -> list[str]:
    """Yield lines for people about what sources disagree on."""
    return [
        f"{answer.paths.root}: sources disagree on {disagreement}"
        for answer in asked.answers
        for disagreement in answer.disagreements
    ]
