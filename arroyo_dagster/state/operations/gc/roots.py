"""Read all objects of a job that refer to data files, completely, or fail with the reason.

Epochs are found by following references and numbers, never by a listing alone: a store may return
an incomplete listing, but never hides an existing object from a read.
"""

from __future__ import annotations

from collections.abc import Callable

from arroyo_dagster.errors import ConflictError, ProtocolError
from arroyo_dagster.state.codec import records
from arroyo_dagster.state.model.garbage import EpochRoot, Roots
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.model.progress import OnProgress, no_progress
from arroyo_dagster.state.operations.gc.root_reader import Reader
from arroyo_dagster.state.operations.gc.roots_legacy import (
    legacy_epoch,
    legacy_roots,
    newest_legacy,
)
from arroyo_dagster.state.operations.gc.roots_protocol import newest_head, protocol_roots
from arroyo_dagster.state.planning.gc.reachability import check_roots
from arroyo_dagster.state.storage.store import ObjectStore

_TRIES = 3


def read_roots(store: ObjectStore, paths: JobPaths, on_progress: OnProgress = no_progress) -> Roots:
    """Read every object of a job that refers to data files, each once.

    In the protocol layout nothing is listed: the fence leads to the newest epoch, and that to its
    ancestors. Objects that belong to no epoch, and compactions that the job has not adopted yet,
    are only found by a listing: see `state.operations.gc.inventory`.

    Raises:
        ProtocolError: the roots are inconsistent, so nothing may be deleted.
        FormatError: an object does not decode. NotFoundError: an object is missing.
        ConflictError: the job changes faster than it can be read.
    """
    return settled(paths, lambda: read_roots_once(store, paths, on_progress))


def read_roots_once(
    store: ObjectStore, paths: JobPaths, on_progress: OnProgress = no_progress
) -> Roots | None:
    """Read as `read_roots`, without checks; None if the job changed meanwhile."""
    read = legacy_roots if paths.layout is Layout.LEGACY else protocol_roots
    return read(Reader(store, paths), on_progress)


def settled(paths: JobPaths, look: Callable[[], Roots | None]) -> Roots:
    """Read until the job does not change meanwhile; refuse only an inconsistency that persists.

    Args:
        look: reads once; None if the job changed meanwhile.

    Raises:
        ProtocolError: the roots are inconsistent.
        ConflictError: the job changes faster than it can be read.
    """
    wrong: ProtocolError | None = None
    for _ in range(_TRIES):
        try:
            roots = look()
            if roots is not None:
                check_roots(roots)
                return roots
        except ProtocolError as error:
            wrong = error
    if wrong is not None:
        raise wrong
    raise ConflictError(
        "the job's epochs changed faster than they could be read",
        job=paths.root,
        retryable=True,
        next_step="try again, or let the job keep more epochs; nothing was deleted",
    )


def newest_root(store: ObjectStore, paths: JobPaths) -> EpochRoot | None:
    """Return the epoch that a start would restore; None for a job that has none.

    Raises:
        ProtocolError, FormatError, NotFoundError: as `read_roots`.
    """
    reader = Reader(store, paths)
    if paths.layout is Layout.LEGACY:
        _, newest = newest_legacy(reader)
        return None if newest is None else legacy_epoch(reader, newest)
    fence = reader.read(paths.current_generation, records.decode_current_generation)
    head = newest_head(reader, fence)
    return None if head is None else head[0]
