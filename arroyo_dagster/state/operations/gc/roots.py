"""Everything of a job that refers to data files, read in full, or an error that says what is not.

Epochs are found by following references and numbers, never by a listing alone: a store may answer
a listing with less than there is, but not a read of an object that is there.
"""

from __future__ import annotations

from collections.abc import Callable

from arroyo_dagster.errors import ConflictError, ProtocolError
from arroyo_dagster.state.codec import records
from arroyo_dagster.state.metadata.backend import ParquetBackend
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

    In the protocol layout nothing is listed: from the fence to the newest epoch and down its
    parents. What owns no epoch, and compactions that wait, only a listing shows: see
    `state.operations.gc.inventory`.

    Raises:
        ProtocolError: what was read does not add up, so that nothing may be collected.
        FormatError: an object does not decode. NotFoundError: one is missing.
        ConflictError: the job goes on faster than it can be read.
    """
    return settled(paths, lambda: read_roots_once(store, paths, on_progress))


def read_roots_once(
    store: ObjectStore, paths: JobPaths, on_progress: OnProgress = no_progress
) -> Roots | None:
    """As `read_roots`, unchecked; None if the job changed while it was read."""
    read = legacy_roots if paths.layout is Layout.LEGACY else protocol_roots
    return read(Reader(store, paths), on_progress)


def settled(paths: JobPaths, look: Callable[[], Roots | None]) -> Roots:
    """Read until nothing has changed meanwhile; refuse only what is wrong every time.

    Args:
        look: reads once; None if the job changed while it was read.

    Raises:
        ProtocolError: what was read does not add up.
        ConflictError: the job goes on faster than it can be read.
    """
    wrong: ProtocolError | None = None
    for _ in range(_TRIES):
        try:
            found = look()
            if found is not None:
                check_roots(found)
                return found
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
    """The epoch that a start would go on from; None for a job that has none.

    Raises:
        ProtocolError, FormatError, NotFoundError: as `read_roots`.
    """
    reader = Reader(store, paths)
    if paths.layout is Layout.LEGACY:
        numbers = sorted(ParquetBackend(store, paths).checkpoint_dirs(), reverse=True)
        newest = newest_legacy(reader, numbers)
        return None if newest is None else legacy_epoch(reader, newest)
    fence = reader.read(paths.current_generation, records.decode_current_generation)
    head = newest_head(reader, fence)
    return None if head is None else head[0]
