"""Read and decode objects of one job's metadata tree."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from arroyo_dagster.errors import (
    ArroyoStateError,
    FormatError,
    NotFoundError,
    ProtocolError,
    StorageError,
)
from arroyo_dagster.state.codec import records
from arroyo_dagster.state.model.checkpoints import EpochRecord
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import (
    CHECKPOINT_MANIFEST,
    COMMITTED_MARKER,
    CURRENT_GENERATION,
    GENERATION_MANIFEST,
    JobPaths,
)
from arroyo_dagster.state.planning.restore import recovery
from arroyo_dagster.state.planning.restore.lost_metadata import identity_mismatch, is_of_another_job
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore, read_optional

if TYPE_CHECKING:
    from arroyo_dagster.state.model.garbage import JobPins, Quarantined

_T = TypeVar("_T")


class MetadataReader:
    """Reads and decodes objects of one job."""

    def __init__(self, store: ObjectStore, paths: JobPaths) -> None:
        self.store = store
        self.paths = paths

    def bytes_of(self, path: StatePath) -> bytes | None:
        """Read an object's bytes; None if it does not exist."""
        return read_optional(self.store, path)

    def optional(self, path: StatePath, decode: Callable[[bytes, str], _T]) -> _T | None:
        """Read an object; None if it does not exist.

        Raises:
            FormatError: it does not decode, or its ids are not those of its path.
            ProtocolError: it belongs to another job, from which this one was copied.
        """
        data = self.bytes_of(path)
        if data is None:
            return None
        value = decode(data, path)
        self._check_identity(path, value)
        self._remember(path, data, value)
        return value

    def read(
        self, path: StatePath, decode: Callable[[bytes, str], _T], missing: str | None = None
    ) -> _T:
        """Read an object that must exist.

        Args:
            missing: the error message if it does not exist.

        Raises:
            NotFoundError: it is missing. FormatError: it does not decode.
        """
        value = self.optional(path, decode)
        if value is None:
            raise self._absent(path, missing)
        return value

    def read_or_error(
        self, path: StatePath, decode: Callable[[bytes, str], _T]
    ) -> _T | ArroyoStateError | None:
        """Read an object, or return the error if it does not decode; None if it does not exist.

        Raises:
            StorageError: the store failed.
        """
        try:
            return self.optional(path, decode)
        except StorageError:
            raise
        except ArroyoStateError as error:
            return error

    def _check_identity(self, path: StatePath, value: object) -> None:
        problem = identity_mismatch(self.paths, path, value)
        if problem is None:
            return
        if is_of_another_job(self.paths, value):
            raise ProtocolError(
                "the metadata names another job, from which this one was copied",
                job=self.paths.root,
                path=path,
                found=str(getattr(value, "job", "")),
                next_step="use the copy below a URL of its own, under the job's own name",
            )
        raise FormatError(
            f"the object {problem}",
            job=self.paths.root,
            path=path,
            next_step="keep the object and report it, or restore the right one from a copy",
        )

    def _remember(self, path: StatePath, data: bytes, value: object) -> None:
        """Hook that is called with each decoded object."""

    def _absent(self, path: StatePath, missing: str | None) -> ArroyoStateError:
        return NotFoundError(
            missing or "an object that the job's metadata refers to is missing",
            job=self.paths.job,
            path=path,
            url=self.store.url,
            next_step="list the epochs with `arroyo-state epochs`",
        )

    def job_pins(self) -> JobPins:
        """Read what is kept besides the newest epochs: pins and quarantines.

        Raises:
            FormatError: the pins do not decode; then nothing may be deleted.
        """
        from arroyo_dagster.state.codec.gc import decode_pins
        from arroyo_dagster.state.model.garbage import JobPins

        return self.optional(self.paths.job_pins, decode_pins) or JobPins()

    def pins_in_full(self) -> tuple[JobPins, tuple[Quarantined, ...]]:
        """Read the pins, and what each quarantine's epochs need. Errors as `job_pins`, `read`."""
        pins = self.job_pins()
        while True:
            try:
                return pins, tuple(concurrently(self._quarantined, pins.quarantines))
            except NotFoundError:
                before, pins = pins, self.job_pins()
                if pins == before:
                    raise  # else another process has purged a quarantine meanwhile

    def _quarantined(self, name: str) -> Quarantined:
        from arroyo_dagster.state.codec.gc import decode_quarantined

        path = self.paths.quarantine_index(name)
        return self.read(path, functools.partial(decode_quarantined, name=name))

    def epoch_record(self, epoch: Epoch) -> EpochRecord:
        """Read which checkpoint owns an epoch.

        Raises:
            NotFoundError: no such epoch. FormatError: its record does not decode.
            ProtocolError: the record refers to a checkpoint outside the job.
        """
        path = self.paths.epoch_record(epoch)
        record = self.read(path, records.decode_epoch_record, missing_epoch(epoch))
        recovery.expect_manifest_path(self.paths, record.checkpoint_ref)
        return record

    def fact(self, path: StatePath) -> recovery.MetadataRecord | None:
        """Read a record that a writer's decisions depend on; None if it does not exist.

        Raises:
            ProtocolError: a later release wrote it.
        """
        record = self.optional(path, decode_by_name)
        # Only writers read facts; readers accept records of later releases, and report them.
        recovery.check_versions(path, record)
        return record

    def answer(self, question: Callable[[recovery.Facts], _T | recovery.Need]) -> _T:
        """Answer a question of the recovery rules: read the records that it needs."""
        return recovery.answer_with(question, self.fact, {})


def missing_epoch(epoch: Epoch) -> str:
    """Return the error message for an epoch that does not exist."""
    return f"epoch {epoch} does not exist"


def decode_by_name(data: bytes, path: str) -> recovery.MetadataRecord:
    """Decode a record of the protocol layout by its file name."""
    from arroyo_dagster.state.codec import metadata  # loads protobuf

    name = path.rpartition("/")[2]
    if name == CHECKPOINT_MANIFEST:
        return metadata.decode_manifest(data, path)
    if name == COMMITTED_MARKER:
        return records.decode_committed_marker(data, path)
    if name == GENERATION_MANIFEST:
        return records.decode_generation_manifest(data, path)
    if name == CURRENT_GENERATION:
        return records.decode_current_generation(data, path)
    return records.decode_epoch_record(data, path)
