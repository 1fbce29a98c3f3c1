"""Errors of ours as Dagster shows them: first what happened, to what, and what to do next."""

from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.redaction import redact_causes, without_secrets


@contextmanager
def as_failure() -> Iterator[None]:
    """Let an error of ours fail a step in Dagster's words; others pass through.

    Raises:
        dagster.Failure: described by the error; retried only if the error may heal by itself.
    """
    try:
        yield
    except ArroyoStateError as error:
        raise failure_of(error) from error


def failure_of(error: ArroyoStateError) -> dg.Failure:
    """The failure that shows `error`, with its facts as metadata; no secret, in causes neither."""
    redact_causes(error)
    facts = {f"arroyo/{name}": without_secrets(str(value)) for name, value in error.facts.items()}
    return dg.Failure(
        description=without_secrets(str(error)),
        metadata={"arroyo/error": type(error).__name__, **facts},
        allow_retries=error.retryable,
    )
