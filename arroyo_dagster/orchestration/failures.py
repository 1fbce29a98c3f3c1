"""Show errors of this package in Dagster: what happened, to which object, and what to do next.

Only errors that may heal by themselves are retried. No step has a `RetryPolicy`: it would treat the
interrupt of "Terminate" and of `max_runtime` as a failure, and repeat the work.
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import dagster as dg

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.redaction import redact_causes, without_secrets

MAX_RETRIES = 2
RETRY_SECONDS = 25.0
"""The wait before the first retry. It doubles with each retry, plus or minus a tenth. Together the
waits are longer than a lease, so that the last retry does not meet that of a process that died."""

_DAGSTER_FIELDS: Mapping[str, str] = {
    "pass --arroyo-api, --arroyo-db or --assume JOB=stopped": (
        "set `arroyo_api_url` or `arroyo_database` (of the component, or of ArroyoStateStore)"
    ),
    "(--arroyo-api, --arroyo-db)": (
        "in `arroyo_api_url` or `arroyo_database` (of the component, or of ArroyoStateStore)"
    ),
    "--assume JOB=stopped": "`assume` of the resource arroyo_directory",
    "pass --arroyo-db with": "set `arroyo_database` to",
    "--assume JOB=gone": "`gone: true` in the run's configuration",
    "run it with --quarantine": "run it with `quarantine: true`",
    "check --url": "check `checkpoint_url`",
    "give --url": "set `checkpoint_url`",
    "(in a file of overrides:": "(as `overrides` of the run's configuration:",
    "with --start-empty OPERATOR": "as `start_empty` of `overrides`",
    "`arroyo-state evolve` if": "`evolve: true` if",
    "`gc plan expire --keep N`, without --keep-for,": "`keep_epochs`, without `keep_days`,",
}
"""Command line options that next steps name, and their names in Dagster."""


@contextmanager
def as_failure() -> Iterator[None]:
    """Let an error of this package fail a step with its description. Other errors and interrupts
    pass.

    Raises:
        dagster.RetryRequested: in a step, for an error that may heal by itself. After two retries
            the step fails with the description of the error.
        dagster.Failure: described by the error; never retried.
    """
    try:
        yield
    except ArroyoStateError as error:
        fail(error)


def fail(error: ArroyoStateError) -> NoReturn:
    """Raise what `as_failure` raises for an error."""
    failure = failure_of(error)
    retry = _retry_of(error)
    if retry is None:
        raise failure from error
    failure.__cause__ = error
    # Dagster shows the description of this cause once the retries are used up.
    raise retry from failure


def failure_of(error: ArroyoStateError, metadata: Mapping[str, Any] | None = None) -> dg.Failure:
    """Return the failure that describes `error`, with its facts as metadata and without secrets.

    Args:
        metadata: additional metadata.
    """
    redact_causes(error)
    error.message = name_dagster_fields(error.message)
    error.next_step = error.next_step and name_dagster_fields(error.next_step)
    facts = {f"arroyo/{name}": without_secrets(str(value)) for name, value in error.facts.items()}
    return dg.Failure(
        description=without_secrets(_describe(error)),
        metadata={"arroyo/error": type(error).__name__, **facts, **(metadata or {})},
        allow_retries=False,
    )


def _describe(error: ArroyoStateError) -> str:
    """Describe an error, the job and the object first: Dagster's pages show the beginning."""
    facts: dict[str, Any] = dict(error.facts)
    names = [_named_job(error, facts), _named_object(error, facts)]
    rest = ArroyoStateError(error.message, next_step=error.next_step, **facts)
    return ": ".join([*filter(None, names), str(rest)])


def _named_job(error: ArroyoStateError, facts: dict[str, object]) -> str | None:
    """The job to name, taken out of the facts; None if the message names it."""
    job = facts.get("job")
    if job is None or str(job) in error.message:
        return None
    facts.pop("job", None)
    return str(job)


def _named_object(error: ArroyoStateError, facts: dict[str, object]) -> str | None:
    """The path, or else the table, to name; taken out of the facts."""
    names = ["path"] if "path" in facts else ["operator", "table"]
    object_name = ".".join(str(facts[name]) for name in names if name in facts)
    if not object_name or object_name in error.message:
        return None
    for name in names:
        facts.pop(name, None)
    return object_name


def _step() -> dg.AssetExecutionContext | dg.OpExecutionContext | None:
    """The context of the running step; None outside of steps."""
    try:
        return dg.OpExecutionContext.get()
    except dg.DagsterInvariantViolationError:
        return None


def name_dagster_fields(text: str) -> str:
    """Replace command line options in a message by fields of the component."""
    for option, field in _DAGSTER_FIELDS.items():
        text = text.replace(option, field)
    return text


def _retry_of(error: ArroyoStateError) -> dg.RetryRequested | None:
    """The request to try the step again; None for what does not heal, and outside of steps."""
    if not error.retryable:
        return None
    context = _step()
    if context is None:
        return None  # sensors and schedules are evaluated again anyway
    seconds = RETRY_SECONDS * 2**context.retry_number * random.uniform(0.9, 1.1)
    return dg.RetryRequested(max_retries=MAX_RETRIES, seconds_to_wait=seconds)
