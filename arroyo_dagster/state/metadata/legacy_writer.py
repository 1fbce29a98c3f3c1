"""The object that makes an epoch of the legacy layout visible, written."""

from __future__ import annotations

from dataclasses import replace

from arroyo_dagster.errors import (
    ArroyoStateError,
    ConflictError,
    FormatError,
    ProtocolError,
)
from arroyo_dagster.state.codec import metadata
from arroyo_dagster.state.metadata.reader import BackendReader
from arroyo_dagster.state.model.checkpoints import LegacyCheckpoint, OperatorCheckpoint
from arroyo_dagster.state.model.ids import OperatorId, StatePath
from arroyo_dagster.state.planning.restore.checkpoint import incomplete
from arroyo_dagster.state.storage.concurrency import concurrently


def write_legacy_checkpoint(reader: BackendReader, checkpoint: LegacyCheckpoint) -> StatePath:
    """Make an epoch of the legacy layout visible, after the metadata of its operators.

    An epoch that exists may be written again with another `min_epoch` only, as Arroyo does.

    Raises:
        ConflictError: another checkpoint owns the epoch.
        ProtocolError: an operator's metadata is missing or of another epoch.
    """
    _check_complete(reader, checkpoint)
    path = reader.paths.legacy_metadata(checkpoint.epoch)
    if not reader.store.create(path, metadata.encode_legacy_checkpoint(checkpoint)):
        stored = reader.objects.read(path, metadata.decode_legacy_checkpoint)
        if replace(stored, min_epoch=checkpoint.min_epoch) != checkpoint:
            raise ConflictError(
                f"epoch {checkpoint.epoch} belongs to another checkpoint",
                job=reader.paths.job,
                path=path,
                next_step="start the job again: it continues from the existing epoch",
            )
        if stored != checkpoint:
            reader.store.put(path, metadata.encode_legacy_checkpoint(checkpoint))
    return path


def _check_complete(reader: BackendReader, checkpoint: LegacyCheckpoint) -> None:
    names = checkpoint.operators

    def load(name: OperatorId) -> OperatorCheckpoint | ArroyoStateError | None:
        try:
            return reader.load_operator_metadata(name, checkpoint.epoch)
        except (FormatError, ProtocolError) as error:
            return error

    for name, operator in zip(names, concurrently(load, names), strict=True):
        if isinstance(operator, ArroyoStateError):
            problem: str | None = operator.message
        else:
            problem = incomplete(checkpoint, name, operator)
        if problem is not None:
            raise ProtocolError(
                f"the epoch would not be restorable: {problem}",
                job=reader.paths.job,
                epoch=checkpoint.epoch,
                operator=name,
                next_step="write the merged metadata of every operator first",
            )
