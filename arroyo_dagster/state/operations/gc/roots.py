"""Read all objects of a job that refer to data files, completely, or fail with the reason.

Epochs are found by following references and numbers, never by a listing alone: a store may return
an incomplete listing, but never hides an existing object from a read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from arroyo_dagster.errors import ArroyoStateError, ConflictError, FormatError, ProtocolError
from arroyo_dagster.state.codec import metadata, records
from arroyo_dagster.state.codec.references import operator_references
from arroyo_dagster.state.metadata.tree import PROBE_COUNT, LegacyTree
from arroyo_dagster.state.model.garbage import EpochRoot, Roots
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.model.objects import StoredObject
from arroyo_dagster.state.model.progress import OnProgress, Progress, ProgressUnit, no_progress
from arroyo_dagster.state.operations.gc.root_reader import AT_ONCE, NO_EPOCH, Reader
from arroyo_dagster.state.operations.gc.roots_protocol import (
    known_roots,
    newest_head,
    protocol_roots,
)
from arroyo_dagster.state.planning.gc.epoch_roots import (
    damaged_legacy_root,
    legacy_root,
    rolled_back_root,
)
from arroyo_dagster.state.planning.gc.reachability import check_roots, refuse
from arroyo_dagster.state.planning.restore.partially_collected import rolled_back
from arroyo_dagster.state.storage.concurrency import concurrently
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


# ---- read the roots of a job of the legacy layout: list one level, and probe unlisted numbers ----

BESIDE_A_GAP = 500
"""How many numbers at either end of a gap are probed. If an Arroyo run ignored the state, the gap
is as long as its epochs.
"""


def legacy_roots(reader: Reader, on_progress: OnProgress) -> Roots | None:
    """Read the roots of a legacy-layout job; None if the job changed meanwhile: read again."""
    job_pins, aside = reader.pins_in_full()
    numbers, newest = newest_legacy(reader)
    if newest is None:
        raise refuse(NO_EPOCH, reader.paths)
    epochs = [n for n in numbers if n <= newest]
    _check_unlisted(reader, epochs)
    roots: list[EpochRoot] = []
    damaged: dict[Epoch, ArroyoStateError] = {}
    for start in range(0, len(epochs), AT_ONCE):
        numbers_now = epochs[start : start + AT_ONCE]
        some = concurrently(lambda n: _legacy_epoch_or_error(reader, n), numbers_now)
        roots += [root for root in some if isinstance(root, EpochRoot)]
        damaged.update(
            (number, error)
            for number, error in zip(numbers_now, some, strict=True)
            if isinstance(error, ArroyoStateError)
        )
        done = min(len(epochs), start + AT_ONCE)
        on_progress(
            Progress(step="read epochs", done=done, total=len(epochs), unit=ProgressUnit.EPOCHS)
        )
    roots = _with_rolled_back(reader, newest, roots, damaged)
    if reader.store.head(reader.paths.legacy_metadata(newest)) is None:
        return None
    return Roots(
        paths=reader.paths,
        worker_generation=None,
        epochs=tuple(roots),
        job_pins=job_pins,
        quarantined=aside,
        more=tuple(reader.roots.values()),
    )


def _legacy_epoch_or_error(reader: Reader, epoch: Epoch) -> EpochRoot | ArroyoStateError | None:
    try:
        return legacy_epoch(reader, epoch)
    except (FormatError, ProtocolError) as error:
        return error


def _with_rolled_back(
    reader: Reader,
    newest: Epoch,
    found: Sequence[EpochRoot],
    damaged: Mapping[Epoch, ArroyoStateError],
) -> list[EpochRoot]:
    """Mark the epochs that a rollback has abandoned; only these may be damaged.

    Raises:
        FormatError, ProtocolError: another epoch is damaged.
    """
    restored = {root.epoch: to for root in found if (to := root.rolled_back_to) is not None}
    left = rolled_back(newest, (*(root.epoch for root in found), *damaged), restored)
    for number in sorted(damaged.keys() - left):
        raise damaged[number]
    if not found:
        return []  # all of them have expired meanwhile
    head = found[0]
    paths = reader.paths
    marked = [rolled_back_root(paths, root, head) if root.epoch in left else root for root in found]
    for number, error in damaged.items():
        root = damaged_legacy_root(paths, number, error.message, head)
        marked.append(replace(root, roots=known_roots(reader, root.by_name)))
    return sorted(marked, key=lambda root: -root.epoch)


def newest_legacy(reader: Reader) -> tuple[list[Epoch], Epoch | None]:
    """Return the listed numbers, newest first, and the newest epoch; refuse a listing that probes
    prove incomplete.

    If a second listing shows what the probes found, then the job has published since the first
    one, or the first one ended too early: these epochs count in either case.
    """
    paths, store = reader.paths, reader.store
    tree = LegacyTree(store, paths)

    def newest_of(numbers: Sequence[Epoch]) -> Epoch | None:
        return next((n for n in numbers if store.head(paths.legacy_metadata(n)) is not None), None)

    numbers = sorted(tree.checkpoint_dirs(), reverse=True)
    newest = newest_of(numbers)
    unseen = tree.unlisted_behind(newest or Epoch(0), numbers)
    if unseen:
        fresh = {*tree.checkpoint_dirs()}
        _refuse_hidden(paths, [number for number in unseen if number not in fresh])
        numbers = sorted(fresh.union(numbers), reverse=True)
        newest = newest_of(numbers)
    return numbers, newest


def _refuse_hidden(paths: JobPaths, hidden: Sequence[Epoch]) -> None:
    if hidden:
        raise refuse(
            f"the listing is incomplete: epoch {hidden[-1]} exists but was not listed",
            paths,
            path=paths.legacy_metadata(hidden[-1]),
            next_step="check the store and any proxy in front of it, then try again",
        )


def _check_unlisted(reader: Reader, numbers: Sequence[Epoch]) -> None:
    """Refuse a listing if probes find unlisted epochs: between those it shows, or below the oldest.

    Args:
        numbers: those it shows, newest first.
    """
    gaps = [range(below + 1, above) for above, below in itertools.pairwise(numbers)]
    gaps.append(range(max(0, numbers[-1] - PROBE_COUNT), numbers[-1]))
    inspected = {n for gap in gaps for n in (*gap[:BESIDE_A_GAP], *gap[-BESIDE_A_GAP:])}
    missing = [Epoch(n) for n in sorted(inspected)]
    heads = concurrently(lambda n: reader.store.head(reader.paths.legacy_metadata(n)), missing)
    pairs = zip(missing, heads, strict=True)
    _refuse_hidden(reader.paths, [n for n, head in pairs if head is not None])


def legacy_epoch(reader: Reader, epoch: Epoch) -> EpochRoot | None:
    paths = reader.paths
    ref = paths.legacy_metadata(epoch)
    head = reader.optional(ref, metadata.decode_legacy_checkpoint)
    if head is None:
        return None
    names = {name: paths.operator_metadata(name, epoch) for name in head.operators}
    operators = {name: reader.optional(path, operator_references) for name, path in names.items()}
    return replace(legacy_root(paths, head, operators), roots=reader.taken((ref, *names.values())))


# ---- when epochs were written, by the store's clock; ages depend on it ---------------------------


def with_store_times(
    store: ObjectStore, roots: Roots, listed: Iterable[StoredObject] | None = None
) -> Roots:
    """Return the same roots, each epoch with the time of the object that makes it exist.

    Objects that the listing does not contain are read by name: a listing may be incomplete.

    Args:
        listed: the objects of the job's metadata, as listed; None = list one level here, or nothing
            in the legacy layout, where each epoch has its own directory.
    """
    paths, head = roots.paths, roots.head
    names = {epoch.epoch: _existence(paths, epoch) for epoch in roots.epochs}
    of_head = {names[head.epoch], *(root.path for root in head.roots)}
    all_paths = {*names.values(), *of_head}
    times = _listed(store, paths, all_paths) if listed is None else _times(listed, all_paths)
    missing = [path for path in all_paths if path not in times]
    for path, info in zip(missing, concurrently(store.head, missing), strict=True):
        times[path] = None if info is None else info.modified_micros
    head_times = [times[path] for path in of_head]
    oldest = min((micros for micros in head_times if micros), default=None)
    epochs = [replace(epoch, written_at_micros=times[names[epoch.epoch]]) for epoch in roots.epochs]
    epochs[0] = replace(epochs[0], oldest_object_micros=oldest)
    return replace(roots, epochs=tuple(epochs))


def _existence(paths: JobPaths, one: EpochRoot) -> StatePath:
    """Return the object that makes an epoch exist, while it is present."""
    if paths.layout is Layout.LEGACY:
        return one.ref
    # Created once and never overwritten, unlike the manifest, which a rewrite replaces.
    record = paths.epoch_record(one.epoch)
    return one.ref if record in one.gone else record


def _listed(
    store: ObjectStore, paths: JobPaths, wanted: set[StatePath]
) -> dict[StatePath, int | None]:
    if paths.layout is Layout.LEGACY:
        return {}
    objects = store.list_dir(paths.epochs).objects
    return {info.path: info.modified_micros for info in objects if info.path in wanted}


def _times(listed: Iterable[StoredObject], wanted: set[StatePath]) -> dict[StatePath, int | None]:
    return {file.path: file.modified_micros for file in listed if file.path in wanted}
