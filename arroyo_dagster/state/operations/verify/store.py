"""Checks of a store: whether it has the properties that jobs and maintenance rely on."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from arroyo_dagster.errors import InputError, StorageError
from arroyo_dagster.state.model.ids import OUR_DIRECTORY, StatePath
from arroyo_dagster.state.storage.conditional_create import prove_conditional_create
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.storage.urls import parse_url

CONDITIONAL_CREATE = "conditional create"


class CheckStatus(enum.Enum):
    """The result of one check."""

    OK = "ok"
    PROBLEM = "problem"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCheck:
    """One check of a store, and its result."""

    name: str
    status: CheckStatus
    detail: str
    next_step: str | None = None


def check_store(store: ObjectStore, *, read_only: bool = False) -> tuple[StoreCheck, ...]:
    """Check the properties that jobs and maintenance rely on.

    Args:
        read_only: write nothing; checks that need to write are reported as not checked.

    Raises:
        StorageError: the store did not answer; retrying may help.
        NotFoundError: the bucket, or the directory on local disk, does not exist.
    """
    if parse_url(store.url).backend == "file":
        store.list_dir()  # the check below would create the directory of a mistyped URL
    return (_conditional_create(store, read_only),)


def _conditional_create(store: ObjectStore, read_only: bool) -> StoreCheck:
    status, detail, step = CheckStatus.NOT_CHECKED, "it needs a write", None
    if not read_only:
        status, detail = CheckStatus.OK, "two attempts to create one name: the second was refused"
        try:
            prove_conditional_create(store, store.create, StatePath(OUR_DIRECTORY))
        except (InputError, StorageError) as error:
            if error.retryable:
                raise
            status, detail, step = CheckStatus.PROBLEM, error.message, error.next_step
    return StoreCheck(name=CONDITIONAL_CREATE, status=status, detail=detail, next_step=step)
