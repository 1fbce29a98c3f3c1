"""When a stopped Arroyo job is quiet: its controller cleans up for a while after the stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from arroyo_dagster.errors import ConflictError
from arroyo_dagster.state.model.clock import Clock
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.operations.compaction.rewrite_preconditions import (
    JobSnapshot,
    changed_objects,
    list_objects,
)
from arroyo_dagster.state.storage.store import ObjectStore

_LONG_AGO = 10
"""A job that stopped this many quiet periods ago is quiet, if its objects do not change."""


class QuietOptions(Protocol):
    """How long a job must be quiet, and how time goes by."""

    @property
    def quiet_seconds(self) -> float:
        """How long no object of the job may change."""

    @property
    def clock(self) -> Clock:
        """Microseconds since 1970 in UTC, by this machine."""

    @property
    def sleep(self) -> Callable[[float], None]:
        """Waits this many seconds."""


def wait_until_quiet(snapshot: JobSnapshot, began_micros: int, options: QuietOptions) -> None:
    """Wait until the objects of a job count as quiet, unless they change meanwhile.

    `check_quiet` then says whether they did.

    Args:
        began_micros: since when they are known not to have changed.
    """
    now, finished = options.clock(), snapshot.answer.facts.finish_time_micros
    if finished is not None and now - finished >= _LONG_AGO * options.quiet_seconds * 1e6:
        return
    left = options.quiet_seconds - (now - began_micros) / 1e6
    if left > 0:
        options.sleep(left)


def check_quiet(store: ObjectStore, paths: JobPaths, before: JobSnapshot) -> None:
    """Check that nothing but files of rewrites changed since the snapshot's listing.

    Raises:
        ConflictError: something did.
    """
    changed = changed_objects(paths, before.listing, list_objects(store, paths))
    if changed:
        raise ConflictError(
            f"{len(changed)} objects of the job changed meanwhile: another process still changes "
            "it",
            job=paths.root,
            path=changed[0],
            retryable=True,
            next_step="wait until the controller's cleanup is over, then run it again; nothing was "
            "published",
        )
