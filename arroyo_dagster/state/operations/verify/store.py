"""Checks of a store: whether it has the properties that jobs and maintenance rely on."""

from __future__ import annotations

import enum
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from arroyo_dagster.errors import ArroyoStateError, InputError, NotFoundError, StorageError
from arroyo_dagster.state.model.clock import Clock, wall_clock
from arroyo_dagster.state.model.garbage import SKEW_MICROS
from arroyo_dagster.state.model.ids import OUR_DIRECTORY, StatePath
from arroyo_dagster.state.model.layout import probe_path
from arroyo_dagster.state.operations.catalog.jobs import list_jobs
from arroyo_dagster.state.storage.conditional_create import prove_conditional_create
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.storage.urls import parse_url

CONDITIONAL_CREATE = "conditional create"
_READ_ONLY = "inspect with these credentials; maintenance and managed jobs need others"


class CheckStatus(enum.Enum):
    """The result of one check."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCheck:
    """One check of a store or of this machine, and its result."""

    name: str
    status: CheckStatus
    detail: str
    next_step: str | None = None


def check_store(
    store: ObjectStore, *, read_only: bool = False, clock: Clock = wall_clock
) -> tuple[StoreCheck, ...]:
    """Check the properties that jobs and maintenance rely on, and what the credentials may do.

    Args:
        read_only: write nothing; checks that need to write are reported as not checked.
        clock: of this machine.

    Raises:
        StorageError: the store did not answer; retrying may help.
        NotFoundError: the bucket, or the directory on local disk, does not exist.
    """
    listed = _permission("list", store.list_dir) if _has_root(store) else None
    # Read-only credentials are known by a plain write before a conditional one is judged.
    writes = [] if read_only else list(_writes(store, clock))
    refused = any(check.name == "create" and check.status is not CheckStatus.OK for check in writes)
    return (
        _conditional_create(store, skipped="it needs a write" if read_only or refused else None),
        listed or StoreCheck(name="list", status=CheckStatus.OK, detail="permitted"),
        _permission("read", lambda: _read_missing(store)),
        *(writes or map(_needs_a_write, ("create", "delete", "clocks"))),
        *_layout(store),
    )


def _has_root(store: ObjectStore) -> bool:
    # In memory the root exists from the first object on. On local disk, a write would create the
    # directory of a mistyped URL.
    return parse_url(store.url).backend != "memory"


def _permission(name: str, request: Callable[[], object], step: str | None = None) -> StoreCheck:
    """Check whether a request is permitted; a refusal is a verdict."""
    try:
        request()
    except NotFoundError:
        raise
    except (StorageError, InputError) as error:
        if error.retryable:
            raise
        status = CheckStatus.ERROR if step is None else CheckStatus.WARNING
        step = step or "allow it for these credentials: every command needs it"
        return StoreCheck(name=name, status=status, detail=error.message, next_step=step)
    return StoreCheck(name=name, status=CheckStatus.OK, detail="permitted")


def _read_missing(store: ObjectStore) -> None:
    """Read a name that does not exist: a store that permits reads answers so."""
    with suppress(NotFoundError):
        store.read(StatePath(OUR_DIRECTORY) / f"doctor-{uuid.uuid4().hex}")


def _writes(store: ObjectStore, clock: Clock) -> Iterator[StoreCheck]:
    """Create a probe, compare the clocks by its time, and delete it."""
    probe = probe_path(StatePath(OUR_DIRECTORY), uuid.uuid4().hex)
    before = clock()
    created = _permission("create", lambda: store.put(probe, b""), _READ_ONLY)
    yield created
    if created.status is not CheckStatus.OK:
        yield _not_checked("delete", "it needs an object")
        yield _not_checked("clocks", "they need an object")
        return
    local_micros = (before + clock()) // 2
    info = store.head(probe)
    yield _permission(
        "delete", lambda: _delete(store, probe), f"allow it, and delete {probe}: gc needs it"
    )
    yield _clocks(None if info is None else info.modified_micros, local_micros)


def _delete(store: ObjectStore, probe: StatePath) -> None:
    outcome = store.delete_many([probe])
    if outcome.failed:
        raise StorageError("the probe was not deleted", path=probe, retryable=False)


def _clocks(store_micros: int | None, here_micros: int) -> StoreCheck:
    if store_micros is None:
        return _not_checked("clocks", "the store reports no time of an object")
    seconds = (store_micros - here_micros) / 1e6
    detail = f"the store's clock is {abs(seconds):.1f} s {'ahead' if seconds > 0 else 'behind'}"
    if abs(store_micros - here_micros) <= SKEW_MICROS:
        return StoreCheck(name="clocks", status=CheckStatus.OK, detail=detail)
    step = "synchronise the clock of this machine, or of the store, with NTP"
    return StoreCheck(name="clocks", status=CheckStatus.ERROR, detail=detail, next_step=step)


def _layout(store: ObjectStore) -> Iterator[StoreCheck]:
    try:
        counts = Counter(paths.layout.value for paths in list_jobs(store))
    except ArroyoStateError as error:
        if error.retryable:
            raise
        step = error.next_step or "check the URL: it is that of the checkpoints, without a job"
        yield StoreCheck(
            name="layout", status=CheckStatus.WARNING, detail=error.message, next_step=step
        )
        return
    jobs = ", ".join(f"{count} jobs in the {layout} layout" for layout, count in counts.items())
    yield StoreCheck(name="layout", status=CheckStatus.OK, detail=jobs or "no jobs yet")


def _not_checked(name: str, why: str) -> StoreCheck:
    return StoreCheck(name=name, status=CheckStatus.NOT_CHECKED, detail=why)


def _needs_a_write(name: str) -> StoreCheck:
    return _not_checked(name, "it needs a write")


def _conditional_create(store: ObjectStore, skipped: str | None) -> StoreCheck:
    if skipped is not None:
        return _not_checked(CONDITIONAL_CREATE, skipped)
    status, step = CheckStatus.OK, None
    detail = "two attempts to create one name: the second was refused"
    try:
        prove_conditional_create(store, store.create, StatePath(OUR_DIRECTORY))
    except (InputError, StorageError) as error:
        if error.retryable:
            raise
        status, detail, step = CheckStatus.ERROR, error.message, error.next_step
    return StoreCheck(name=CONDITIONAL_CREATE, status=status, detail=detail, next_step=step)
