"""Runs that meet a lease: after their wait they end as skipped, with the holder, and never fail.

Dagster has no status for that. A skipped run succeeds, has the tag `arroyo/skipped`, and yields an
observation that names the holder in place of a materialization.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dagster as dg

from arroyo_dagster.errors import LeaseHeldError
from arroyo_dagster.orchestration.translator import at_source_of
from arroyo_dagster.redaction import without_secrets

SKIPPED_TAG = "arroyo/skipped"
"""The tag of a run that did nothing because another process maintained the job."""

_MOST_CHARACTERS = 200


class SkippedError(Exception):
    """Another process maintains the job of a step, which therefore ends as skipped.

    Attributes:
        error: names the holder.
    """

    def __init__(self, error: LeaseHeldError) -> None:
        super().__init__(without_secrets(f"skipped: {error.message}"))
        self.error = error


@contextmanager
def leases_skip() -> Iterator[None]:
    """Turn a lease that another process holds into a skip, also inside of `as_failure`.

    Raises:
        SkippedError: another process maintains the job.
    """
    try:
        yield
    except LeaseHeldError as error:
        raise SkippedError(error) from error


def lease_wait_seconds(context: Any, config: Any) -> float:
    """Return how long a step waits for a lease: as configured, unless its batch returns to it."""
    found = getattr(context, "lease_wait_seconds", None)
    return float(config.lease_wait_seconds if found is None else found)


def end_skipped_steps(key: dg.AssetKey) -> Callable[..., Any]:
    """Return a decorator of the step of an asset: a `SkippedError` ends it without a failure.

    Args:
        key: the asset that is observed as skipped.
    """

    def decorate(step: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        @functools.wraps(step)
        def ending(context: dg.AssetExecutionContext, *given: Any, **named: Any) -> Iterator[Any]:
            try:
                yield from step(context, *given, **named)
            except SkippedError as skipped:
                tag_skipped(context, skipped)
                partition = context.partition_key if context.has_partition_key else None
                yield observation(skipped, key, partition)

        return at_source_of(step, ending)

    return decorate


def tag_skipped(context: Any, skipped: SkippedError) -> None:
    """Report a skip in the log and in the tags of the run."""
    context.log.warning(str(skipped))
    text = str(skipped)[:_MOST_CHARACTERS]
    context.instance.add_run_tags(context.run.run_id, {SKIPPED_TAG: text})


def observation(
    skipped: SkippedError, key: dg.AssetKey, partition: str | None
) -> dg.AssetObservation:
    """Return what an asset shows of a skip: the holder, and until when its lease counts."""
    facts = skipped.error.facts
    metadata = {
        f"arroyo/lease_{name}": facts[name]
        for name in ("owner", "host", "pid", "until")
        if name in facts
    }
    return dg.AssetObservation(
        key,
        partition=partition,
        description=str(skipped),
        metadata={"arroyo/skipped": str(skipped), **metadata},  # type: ignore[dict-item]
    )
