"""The proof that a store refuses the second creation of an object, once per store and process.

Claims and leases are acquired by creating an object. If a server ignores `If-None-Match`, every
creator succeeds, so that two runs write one job. No version number identifies such a server, so the
behaviour is tested.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from arroyo_dagster.errors import InputError, NotFoundError, StorageError
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import probe_path
from arroyo_dagster.state.storage.store import ObjectStore

Create = Callable[[StatePath, bytes], bool]


class _Proofs:
    """The proofs of this process; they are about servers, so they remain valid after a fork."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.proven: set[object] = set()

    def after_fork(self) -> None:
        self.lock = threading.Lock()  # the parent may have held it


_PROOFS = _Proofs()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_PROOFS.after_fork)


def prove_once(
    store: ObjectStore,
    options: Mapping[str, Any],
    create: Create,
    beside: StatePath,
    deleting: ObjectStore,
) -> None:
    """Prove the conditional create of a store before its first use in this process.

    Args:
        options: the options of the store, which may select the server.
        create: the creation itself, without this proof.
        beside: the object that is to be created.
        deleting: deletes the probe; `store` itself, unless it may not delete.

    Raises:
        InputError, StorageError: as in `prove_conditional_create`; the next call tries again.
    """
    key = (type(store), store.url, hash(repr(sorted(options.items()))))
    if key in _PROOFS.proven:
        return
    with _PROOFS.lock:
        if key not in _PROOFS.proven:
            prove_conditional_create(store, create, beside, deleting)
            _PROOFS.proven.add(key)


def prove_conditional_create(
    store: ObjectStore, create: Create, beside: StatePath, deleting: ObjectStore | None = None
) -> None:
    """Create an object with a new name twice, and delete it; the second creation must fail.

    Args:
        beside: an object of the job in whose directory the probe is created; credentials may be
            limited to this directory.
        deleting: deletes the probe; None = `store`.

    Raises:
        InputError: the second creation succeeded.
        StorageError: the store failed, or it refused the first creation.
    """
    nonce = uuid.uuid4().hex
    probe, first = probe_path(beside, nonce), f"{nonce} 1".encode()
    created = create(probe, first)
    try:
        if created and create(probe, f"{nonce} 2".encode()):
            raise _ignores_conditions(store.url, probe)
        # The client may have repeated a creation whose answer was lost: a refusal is proof as well.
        if not created and _content(store, probe) != first:
            raise _refuses_all(store.url, probe)
    finally:
        with suppress(StorageError):
            (deleting or store).delete_many([probe])


def _content(store: ObjectStore, path: StatePath) -> bytes | None:
    try:
        return store.read(path)
    except NotFoundError:
        return None


def _ignores_conditions(url: str, probe: StatePath) -> InputError:
    return InputError(
        f"the store at {url} accepted two creations of one object: it ignores If-None-Match, so "
        "two runs could write one job",
        path=probe,
        next_step="nothing was written; use local disk, S3, R2, GCS, Azure, MinIO or versitygw, or "
        "a newer release of this server, and check it with `arroyo-state doctor`",
    )


def _refuses_all(url: str, probe: StatePath) -> StorageError:
    return StorageError(
        f"the store at {url} refused to create an object of a fresh name: it answered that the "
        "object exists",
        retryable=False,
        path=probe,
        next_step="check the server, and any proxy between it and this process",
    )
