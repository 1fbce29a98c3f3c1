"""Pins: epochs that are kept until they are unpinned, and records that undo a rewrite. Every
maintenance operation respects them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from arroyo_dagster.errors import (
    ConflictError,
    FormatError,
    NotFoundError,
    ProtocolError,
    StorageError,
)
from arroyo_dagster.state.codec.derived import encode
from arroyo_dagster.state.codec.maintenance_records import decode_change_record
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.lease import IN_FLIGHT_GRACE_SECONDS, LeaseOptions, lease
from arroyo_dagster.state.model.changes import ChangeKind, is_change_of
from arroyo_dagster.state.model.clock import Clock, wall_clock
from arroyo_dagster.state.model.garbage import JobPins, Pin
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.operations.gc.roots import newest_root
from arroyo_dagster.state.planning.restore.lost_metadata import check_own
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.failures import delete_all
from arroyo_dagster.state.storage.store import ObjectStore, read_optional

ANY = Epoch(0)
"""Any epoch."""


def read_pins(store: ObjectStore, paths: JobPaths) -> JobPins:
    """Read the pins of a job.

    Raises:
        FormatError: they do not decode, so nothing may be deleted.
    """
    return ParquetBackend(store, paths).job_pins()


def pin_epoch(
    store: ObjectStore,
    paths: JobPaths,
    epoch: Epoch,
    *,
    reason: str = "",
    owner: str = "arroyo-state pin",
    clock: Clock = wall_clock,
    sleep: Callable[[float], None] = time.sleep,
) -> JobPins:
    """Keep an epoch until it is unpinned, and prove that it is complete.

    If that fails, it stays pinned only if it was pinned before: what is left of it may be needed.

    If the epoch is already outside the retention of a managed job, an expiry may be deleting it.
    Then this call waits ten seconds, until requests sent before have arrived, and proves the epoch
    once more.

    Raises:
        NotFoundError: there is no such epoch; it is not pinned.
        FormatError: the epoch can no longer be restored.
        ProtocolError: the epoch belongs to another job, of which this one is a copy.
        ConflictError: the job is leased by another process, or the epoch was deleted meanwhile.
    """
    backend = ParquetBackend(store, paths)
    # A pin on a copy has no effect: maintenance of the original job does not read it.
    check_own(
        paths,
        f"epoch {epoch}",
        backend.load_checkpoint_metadata(epoch).paths,
        next_step="pin the epoch in the original job; nothing was pinned",
        epoch=epoch,
    )
    pin = Pin(epoch=epoch, owner=owner, pinned_at_micros=clock(), reason=reason)
    before = read_pins(store, paths).pinned
    pins = change_pins(store, paths, lambda kept: kept.with_pin(pin), owner=owner, clock=clock)
    try:
        backend.prepare_checkpoint_load(epoch)
        if may_be_going(store, paths, epoch):
            sleep(IN_FLIGHT_GRACE_SECONDS)
            backend.prepare_checkpoint_load(epoch)
    except (NotFoundError, FormatError, ProtocolError):
        if epoch not in before:
            unpin_epochs(store, paths, [epoch], owner=owner, clock=clock)
        raise
    return pins


def may_be_going(store: ObjectStore, paths: JobPaths, epoch: Epoch = ANY) -> bool:
    """Whether a managed job may be deleting an epoch, or its parent, without having read the new
    pins.

    Call it after the pins are written: if the newest epoch still keeps both, no cleanup that would
    delete them has begun before. If True, wait `IN_FLIGHT_GRACE_SECONDS`.
    """
    if paths.layout is Layout.PROTOCOL and store.head(paths.current_generation) is None:
        return False  # no run of the job has begun, or the job was deleted
    try:
        newest = newest_root(store, paths)
    except (NotFoundError, FormatError, ProtocolError):
        return True
    if newest is None:
        return False
    return newest.managed and 1 < newest.min_epoch and epoch <= newest.min_epoch


def unpin_epochs(
    store: ObjectStore,
    paths: JobPaths,
    epochs: Iterable[Epoch],
    *,
    owner: str = "arroyo-state unpin",
    clock: Clock = wall_clock,
) -> JobPins:
    """Release the pins of epochs. The next expiry deletes the epochs that are old enough.

    Raises:
        NotFoundError: an epoch is not pinned; nothing was changed.
        ConflictError: the job is leased by another process.
    """
    numbers = frozenset(epochs)

    def remove(found: JobPins) -> JobPins:
        unknown = sorted(numbers - found.pinned)
        if unknown:
            raise NotFoundError(
                "this epoch is not pinned",
                job=paths.root,
                epoch=unknown[0],
                next_step="list the pinned epochs with `arroyo-state sql @pins JOB`; nothing was "
                "changed",
            )
        return release(found, epochs=numbers)

    return change_pins(store, paths, remove, owner=owner, clock=clock)


def release(
    kept: JobPins, *, epochs: Collection[Epoch], reasons: tuple[str, ...] = ("",)
) -> JobPins:
    """Mark the pins of these epochs as released: they still explain the gap that these leave.

    Args:
        reasons: only pins whose reason begins with one of these.
    """
    pins = (
        replace(pin, released=True)
        if pin.epoch in epochs and pin.reason.startswith(reasons)
        else pin
        for pin in kept.pins
    )
    return replace(kept, pins=tuple(pins))


def change_pins(
    store: ObjectStore,
    paths: JobPaths,
    change: Callable[[JobPins], JobPins],
    *,
    owner: str,
    clock: Clock = wall_clock,
) -> JobPins:
    """Change the pins under the job's lease, so that concurrent changes are not lost."""
    with lease(store, paths, owner, LeaseOptions(clock=clock)) as held:
        return put_pins(held, paths, change)


def put_pins(held: ObjectStore, paths: JobPaths, change: Callable[[JobPins], JobPins]) -> JobPins:
    """Change the pins; the caller holds the lease, and `held` is the leased store."""
    pins = change(read_pins(held, paths))
    held.put(paths.job_pins, encode(pins))
    if read_pins(held, paths) != pins:
        raise ConflictError(
            "the pins read back different from what was written",
            job=paths.root,
            path=paths.job_pins,
            next_step="find out which other program writes there, then try again; nothing was "
            "deleted",
        )
    return pins


@contextlib.contextmanager
def pinned_while(
    held: ObjectStore,
    paths: JobPaths,
    epochs: Sequence[Epoch],
    reason: str,
    owner: str,
    clock: Clock,
    sleep: Callable[[float], None],
) -> Iterator[None]:
    """Pin epochs for the duration of the context, unless they are pinned anyway.

    At its end the pins of this reason are released: under the lease no other operation has any.

    Args:
        held: the store, under the lease.
        epochs: ascending.
    """

    def pinned(kept: JobPins) -> JobPins:
        for epoch in epochs:
            if epoch not in kept.pinned:
                pin = Pin(epoch=epoch, owner=owner, pinned_at_micros=clock(), reason=reason)
                kept = kept.with_pin(pin)
        return kept

    def released(kept: JobPins) -> JobPins:
        mine = {pin.epoch for pin in kept.pins if pin.reason == reason}
        return release(kept, epochs=mine, reasons=(reason,))

    if not read_pins(held, paths).pinned.issuperset(epochs):
        put_pins(held, paths, pinned)
        if may_be_going(held, paths, epochs[0]):
            sleep(IN_FLIGHT_GRACE_SECONDS)
    try:
        yield
    finally:
        with contextlib.suppress(ConflictError, StorageError):
            put_pins(held, paths, released)


def note_expired(held: ObjectStore, paths: JobPaths, below: Epoch) -> None:
    """Note that epochs below this one need not exist; before the first of them is deleted."""
    if read_pins(held, paths).expired_below < below:
        put_pins(held, paths, lambda kept: replace(kept, expired_below=below))


def forget_released(
    held: ObjectStore, paths: JobPaths, before: Epoch, still_there: Collection[Epoch] = ()
) -> None:
    """Delete the released pins of epochs before this one that no longer exist.

    Args:
        held: the store, under the lease.
        still_there: earlier epochs that still exist: their pins must still explain the gaps.
    """
    current = read_pins(held, paths)
    stays = tuple(
        pin
        for pin in current.pins
        if not pin.released or pin.epoch >= before or pin.epoch in still_there
    )
    if stays != current.pins:
        put_pins(held, paths, lambda kept: replace(kept, pins=stays))


def keep_compaction(held: ObjectStore, paths: JobPaths, name: str) -> None:
    """Name a compaction record before it is written, so that no incomplete listing hides it. Forget
    the names of records that the job's writer has adopted.

    Args:
        held: the store, under the lease.
        name: of the record.
    """

    def add(kept: JobPins) -> JobPins:
        infos = concurrently(held.head, [paths.compactions / record for record in kept.compactions])
        pairs = zip(kept.compactions, infos, strict=True)
        waiting = (record for record, info in pairs if info is not None)
        return replace(kept, compactions=(*waiting, name))

    put_pins(held, paths, add)


def keep_change(held: ObjectStore, paths: JobPaths, name: str) -> None:
    """Pin the record that undoes a change in place, after it has been written.

    Args:
        held: the store, under the lease.
        name: of the record.
    """
    put_pins(held, paths, lambda kept: replace(kept, changes=(*kept.changes, name)))


def forget_changes(held: ObjectStore, paths: JobPaths, done: Callable[[str], bool]) -> None:
    """Unpin compactions and edits that cannot be undone any more. Their records are deleted; those
    of edits stay without the bytes from before, as they explain the history of the job.

    Args:
        held: the store, under the lease.
        done: whether the change with a record of this name cannot be undone any more.
    """
    named = unpin_changes(held, paths, done)
    listed = [info.path for info in held.list_dir(paths.changes).objects]
    paths_done = [path for path in {*listed, *named} if done(path.name)]
    compactions = [p for p in paths_done if is_change_of(paths, p, ChangeKind.COMPACTION)]
    delete_all(held, compactions)
    edits = [path for path in paths_done if is_change_of(paths, path, ChangeKind.EDIT)]
    contents = concurrently(lambda path: read_optional(held, path), edits)
    for path, data in zip(edits, contents, strict=True):
        record = None if data is None else decode_change_record(data, path)
        if record is not None and record.before:
            held.put(path, encode(replace(record, before={}, inputs=())))


def unpin_changes(
    held: ObjectStore, paths: JobPaths, done: Callable[[str], bool]
) -> list[StatePath]:
    """Unpin the changes of these names, and return the records of all that were pinned."""
    named = read_pins(held, paths).changes
    stays = tuple(name for name in named if not done(name))
    if stays != named:
        put_pins(held, paths, lambda kept: replace(kept, changes=stays))
    return [paths.changes / name for name in named]


# ---- the backlog of the expiry of old epochs by their number -------------------------------------


def expiry_backlog(store: ObjectStore, paths: JobPaths, keep_epochs: int) -> int:
    """Return how many unpinned epochs are older than the newest `keep_epochs`; Arroyo jobs: 0."""
    backend = ParquetBackend(store, paths)
    epochs = backend.epochs()
    if len(epochs) <= keep_epochs:
        return 0
    newest = backend.load_checkpoint_metadata(epochs[-1])
    if newest.progress is None:
        return 0
    pinned = backend.job_pins().pinned
    return sum(epoch not in pinned for epoch in epochs[: len(epochs) - keep_epochs])
