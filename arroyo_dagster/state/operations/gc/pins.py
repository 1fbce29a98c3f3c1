"""What stays besides the newest epochs: those that are pinned, until they are unpinned, and what
undoes a rewrite. All that maintain a job honour it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from arroyo_dagster.errors import ConflictError, FormatError, NotFoundError, ProtocolError
from arroyo_dagster.state.codec.gc import encode_pins
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.expiry import delete_all
from arroyo_dagster.state.metadata.lease import IN_FLIGHT_GRACE_SECONDS, LeaseOptions, lease
from arroyo_dagster.state.model.clock import Clock, wall_clock
from arroyo_dagster.state.model.garbage import JobPins, Pin
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.operations.gc.roots import newest_root
from arroyo_dagster.state.planning.restore.copied_jobs import check_own
from arroyo_dagster.state.storage.store import ObjectStore

ANY = Epoch(0)
"""Any epoch."""


def read_pins(store: ObjectStore, paths: JobPaths) -> JobPins:
    """What stays of a job besides its newest epochs.

    Raises:
        FormatError: it does not decode, so that nothing may be collected.
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
    """Keep an epoch until it is unpinned, and prove that it is whole.

    One that a job of ours keeps no more may be going this very moment: then ten seconds pass, until
    what the job has sent to the store has arrived, and it is proven once more.

    Raises:
        NotFoundError: there is no such epoch. FormatError: it cannot be restored any more. It is
            not pinned in either case.
        ProtocolError: the epoch is of another job, from which this one was copied.
        ConflictError: somebody else maintains the job, or removed the epoch meanwhile.
    """
    backend = ParquetBackend(store, paths)
    # Nobody who maintains the original reads a pin of the copy: it would hold nothing.
    check_own(
        paths,
        f"epoch {epoch}",
        backend.load_checkpoint_metadata(epoch).paths,
        next_step="pin the epoch in the original job; nothing was pinned",
        epoch=epoch,
    )
    pin = Pin(epoch=epoch, owner=owner, pinned_at_micros=clock(), reason=reason)

    def add(found: JobPins) -> JobPins:
        others = (one for one in found.pins if one.epoch != epoch)
        return replace(found, pins=tuple(sorted((*others, pin), key=lambda one: one.epoch)))

    found = change_pins(store, paths, add, owner=owner, clock=clock)
    try:
        backend.prepare_checkpoint_load(epoch)
        if may_be_going(store, paths, epoch):
            sleep(IN_FLIGHT_GRACE_SECONDS)
            backend.prepare_checkpoint_load(epoch)
    except (NotFoundError, FormatError, ProtocolError):
        unpin_epochs(store, paths, [epoch], owner=owner, clock=clock)
        raise
    return found


def may_be_going(store: ObjectStore, paths: JobPaths, epoch: Epoch = ANY) -> bool:
    """Whether a job of ours may be removing an epoch, or its parent, without having seen that it
    stays now.

    Asked once that is written: a newest epoch that keeps both says that no cleanup which takes
    them has looked at what stays. If it may, let `IN_FLIGHT_GRACE_SECONDS` pass.
    """
    if paths.layout is Layout.PROTOCOL and store.head(paths.current_generation) is None:
        return False  # no run of the job has begun, or all of it was removed
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
    """Let epochs go with the others. The next expiry takes them if they are old enough.

    Raises:
        NotFoundError: one is not pinned; nothing was changed.
        ConflictError: somebody else maintains the job.
    """
    wanted = frozenset(epochs)

    def remove(found: JobPins) -> JobPins:
        unknown = sorted(wanted - found.pinned)
        if unknown:
            raise NotFoundError(
                "this epoch is not pinned",
                job=paths.root,
                epoch=unknown[0],
                next_step="list the pinned epochs with `arroyo-state pins`; nothing was changed",
            )
        return release(found, epochs=wanted)

    return change_pins(store, paths, remove, owner=owner, clock=clock)


def release(kept: JobPins, *, epochs: Collection[Epoch]) -> JobPins:
    """The pins with these lifted: they go on explaining the gap that their epochs leave."""
    pins = (replace(pin, released=True) if pin.epoch in epochs else pin for pin in kept.pins)
    return replace(kept, pins=tuple(pins))


def change_pins(
    store: ObjectStore,
    paths: JobPaths,
    change: Callable[[JobPins], JobPins],
    *,
    owner: str,
    clock: Clock = wall_clock,
) -> JobPins:
    """Change what stays, under the lease of the job: two changes never lose one another."""
    with lease(store, paths, owner, LeaseOptions(clock=clock)) as held:
        return put_pins(held, paths, change)


def put_pins(held: ObjectStore, paths: JobPaths, change: Callable[[JobPins], JobPins]) -> JobPins:
    """Change what stays; the caller holds the lease, and `held` is the store it gave."""
    found = change(read_pins(held, paths))
    held.put(paths.job_pins, encode_pins(found))
    if read_pins(held, paths) != found:
        raise ConflictError(
            "the pins read back different from what was written",
            job=paths.root,
            path=paths.job_pins,
            next_step="find out which other program writes there, then try again; nothing was "
            "deleted",
        )
    return found


def forget_released(
    held: ObjectStore, paths: JobPaths, before: Epoch, still_there: Collection[Epoch] = ()
) -> None:
    """Forget epochs that were unpinned and have gone: those before this one.

    Args:
        held: the store, under the lease.
        still_there: epochs before it that have not gone: the gap behind them must stay explained.
    """
    found = read_pins(held, paths)
    stays = tuple(
        one
        for one in found.pins
        if not one.released or one.epoch >= before or one.epoch in still_there
    )
    if stays != found.pins:
        put_pins(held, paths, lambda kept: replace(kept, pins=stays))


def keep_rewrite(held: ObjectStore, paths: JobPaths, name: str) -> None:
    """Keep what undoes a rewrite, once its record has been written.

    Args:
        held: the store, under the lease.
        name: of the record.
    """
    put_pins(held, paths, lambda kept: replace(kept, rewrites=(*kept.rewrites, name)))


def forget_rewrites(held: ObjectStore, paths: JobPaths, done: Callable[[str], bool]) -> None:
    """Forget records that undo nothing any more, then remove them.

    Args:
        held: the store, under the lease.
        done: whether the record of this name is one.
    """
    named = read_pins(held, paths).rewrites
    stays = tuple(name for name in named if not done(name))
    if stays != named:
        put_pins(held, paths, lambda kept: replace(kept, rewrites=stays))
    listed = [info.path.name for info in held.list_dir(paths.rewrites).objects]
    delete_all(held, [paths.rewrites / name for name in {*listed, *named} if done(name)])
