"""Revision: publish the newest epoch of a job at rest once more, with other tables or offsets.

The epoch before is pinned: its files are the backup of what the revision removes or converts. It
can be restored until the job runs again, and read as long as it is pinned.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from arroyo_dagster.errors import ConflictError, InputError, ProtocolError, StorageError
from arroyo_dagster.state.codec.parquet import GLOBAL_KEY_VALUE_SCHEMA, encode_pairs
from arroyo_dagster.state.metadata.backend import ParquetBackend, writer_lease
from arroyo_dagster.state.metadata.lease import LeaseOptions, lease
from arroyo_dagster.state.model.checkpoints import (
    Checkpoint,
    CheckpointState,
    OperatorCheckpoint,
    RunProgress,
)
from arroyo_dagster.state.model.clock import Clock, wall_clock
from arroyo_dagster.state.model.garbage import Pin
from arroyo_dagster.state.model.ids import Epoch, OperatorId, StatePath, TableName
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.operations.gc.pins import put_pins, release
from arroyo_dagster.state.storage.store import ObjectStore

BEFORE_EDIT = "before edit "
BEFORE_CLEAN = "before sdf clean"
BEFORE_MIGRATION = "before the definition changed (sdf run --migrate)"
_BEFORE_UNDO = "before the revision of epoch "
OTHER_REVISIONS = (BEFORE_CLEAN, BEFORE_MIGRATION, _BEFORE_UNDO)
PINS_OF_REVISIONS = (BEFORE_EDIT, *OTHER_REVISIONS)
"""How the reason of a pin begins that a revision has set; people's pins have others."""


@dataclass(frozen=True, slots=True)
class RevisedContent:
    """What the revision publishes.

    Attributes:
        operators: all operators of the epoch.
        offsets: the offsets of the sources, as in `RunProgress`; None = those of the epoch before.
    """

    operators: tuple[OperatorCheckpoint, ...]
    offsets: str | None = None


@dataclass(frozen=True, slots=True)
class RevisionWriter:
    """Writes data files of the epoch that a revision publishes.

    Attributes:
        finish_time_micros: of this epoch; it tells it from any other attempt at its number.
    """

    backend: ParquetBackend
    epoch: Epoch
    finish_time_micros: int

    @property
    def store(self) -> ObjectStore:
        """The store of the job, under its lease."""
        return self.backend.store

    def name_file(self, operator: OperatorId, table: TableName, suffix: str = "") -> StatePath:
        """Return the path of a new data file, which no other attempt uses."""
        attempt = uuid.uuid4().hex[:16] + suffix
        return self.backend.paths.data_file(
            operator, table, 0, self.epoch, self.backend.generation, attempt=attempt
        )

    def put_pairs(
        self,
        operator: OperatorId,
        table: TableName,
        pairs: Mapping[bytes, bytes],
        *,
        version: int = 0,
    ) -> StatePath:
        """Write encoded pairs of a global keyed table as one file, and return its path."""
        path = self.name_file(operator, table)
        data = encode_pairs(pairs, pairs.values(), GLOBAL_KEY_VALUE_SCHEMA, version=version)
        self.store.put(path, data)
        return path


Revise = Callable[[Checkpoint, RevisionWriter], RevisedContent]


def publish_revision(
    store: ObjectStore,
    paths: JobPaths,
    base: Checkpoint,
    revise: Revise,
    *,
    reason: str,
    owner: str,
    clock: Clock = wall_clock,
) -> Epoch:
    """Publish `base`, the newest epoch of a job, with other content, as the next epoch.

    A run that is still alive is fenced. If it fails or is killed at any point, the job is unchanged
    or revised.

    Args:
        revise: makes the new content; it may write files.
        reason: of the pin that keeps `base`.

    Returns:
        The epoch that was published.

    Raises:
        ConflictError: the job has a newer epoch than `base`, or is leased by another process; in
            the legacy layout, also by a run that is alive.
        ProtocolError: a later epoch exists, and its commit is not finished.
        StorageError: the store failed; it is unknown whether the epoch was published.
    """
    with writer_lease(store, paths, owner, clock) as leased:
        backend = ParquetBackend(leased, paths, clock=clock)
        _check_newest(backend, base)
        with _pinned(leased, paths, base.epoch, owner, reason, clock):
            backend.prepare_checkpoint_load(base.epoch)
            started = backend.start()
            if started.restored is None or started.restored.ref != base.ref:
                raise _changed(paths, base.epoch)
            writer = RevisionWriter(backend, Epoch(base.epoch + 1), clock())
            content = revise(base, writer)
            backend.publish_carried(
                base,
                content.operators,
                epoch=writer.epoch,
                progress=_progress(base, content),
                min_epoch=base.min_epoch,
                now_micros=writer.finish_time_micros,
            )
    return writer.epoch


def restore_revised(
    store: ObjectStore,
    paths: JobPaths,
    newest: Checkpoint,
    *,
    owner: str,
    clock: Clock = wall_clock,
) -> Epoch:
    """Publish the content that a job had before its newest epoch, a revision, as the next epoch.

    The pin of the epoch before is released, if the revision has set it.

    Raises:
        InputError: the newest epoch is no revision: the job has run since, or nothing was revised.
        NotFoundError, FormatError: the epoch before cannot be read.
        ConflictError, ProtocolError, StorageError: as `publish_revision`.
    """
    backend = ParquetBackend(store, paths)
    before = None if newest.progress is None else newest.progress.revises
    if before is None or before not in backend.job_pins().pinned:
        raise InputError(
            "nothing to undo: the newest epoch is no revision, because the job has run since or "
            "nothing was revised",
            job=paths.root,
            epoch=newest.epoch,
            next_step="older epochs that are kept: `arroyo-state sql @pins JOB`; their rows: "
            "`arroyo-state rows JOB@N …`",
        )
    previous = backend.prepare_checkpoint_load(before)
    assert previous.progress is not None
    offsets = previous.progress.offsets
    restored = publish_revision(
        store,
        paths,
        newest,
        lambda base, writer: RevisedContent(previous.operators, offsets),
        reason=f"{_BEFORE_UNDO}{before} was undone",
        owner=owner,
        clock=clock,
    )
    with lease(store, paths, owner, LeaseOptions(clock=clock)) as leased:
        done = {before, newest.epoch}
        put_pins(leased, paths, lambda kept: release(kept, epochs=done, reasons=PINS_OF_REVISIONS))
    return restored


def _check_newest(backend: ParquetBackend, base: Checkpoint) -> None:
    epochs = backend.epochs()
    newest = epochs[-1] if epochs else None
    if newest == base.epoch and base.state is CheckpointState.READY:
        return
    if newest is not None and newest > base.epoch:
        later = backend.load_checkpoint_metadata(newest)
        if later.state is CheckpointState.COMMITTING:
            raise ProtocolError(
                f"the commit of epoch {newest} is not finished",
                job=backend.paths.root,
                epoch=newest,
                next_step="run the job once as it was: that finishes the commit; nothing was "
                "changed",
            )
    raise _changed(backend.paths, base.epoch)


def _changed(paths: JobPaths, epoch: Epoch) -> ConflictError:
    return ConflictError(
        f"the job has been started, or has written an epoch after {epoch}, since the plan was made",
        job=paths.root,
        epoch=epoch,
        retryable=True,
        next_step=f"stop it with `arroyo-state stop {paths.root}` if it runs, then plan again",
    )


@contextlib.contextmanager
def _pinned(
    held: ObjectStore, paths: JobPaths, epoch: Epoch, owner: str, reason: str, clock: Clock
) -> Iterator[None]:
    """Pin an epoch from now on; only if the block fails, release the pin again.

    It is the newest one, so nothing is about to delete it.
    """
    before = ParquetBackend(held, paths).job_pins()
    if epoch not in before.pinned:
        pin = Pin(epoch=epoch, owner=owner, pinned_at_micros=clock(), reason=reason)
        put_pins(held, paths, lambda kept: kept.with_pin(pin))
    try:
        yield
    except StorageError:
        raise  # the epoch may exist: its predecessor stays pinned
    except BaseException:
        if epoch not in before.pinned:
            with contextlib.suppress(ConflictError, StorageError):
                put_pins(held, paths, lambda kept: release(kept, epochs={epoch}))
        raise


def _progress(base: Checkpoint, content: RevisedContent) -> RunProgress:
    assert base.progress is not None
    offsets = base.progress.offsets if content.offsets is None else content.offsets
    return replace(
        base.progress,
        offsets=offsets,
        final=True,
        exhausted=base.progress.exhausted and offsets == base.progress.offsets,
        rolled_back_to=None,
        revises=base.epoch,
    )
