"""Objects of one job's metadata tree, read and decoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from arroyo_dagster.errors import NotFoundError
from arroyo_dagster.state.codec import metadata, records
from arroyo_dagster.state.model.checkpoints import EpochRecord
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import CURRENT_GENERATION, JobPaths
from arroyo_dagster.state.planning.restore import recovery
from arroyo_dagster.state.storage.store import ObjectStore

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class MetadataReader:
    """Reads objects of one job, one at a time."""

    store: ObjectStore
    paths: JobPaths

    def read(
        self, path: StatePath, decode: Callable[[bytes, str], _T], missing: str | None = None
    ) -> _T:
        """Read an object that must be there.

        Args:
            missing: what the error says if it is not.

        Raises:
            NotFoundError: it is missing. FormatError: it does not decode.
        """
        try:
            data = self.store.read(path)
        except NotFoundError as error:
            raise NotFoundError(
                missing or "an object that the job's metadata refers to is missing",
                job=self.paths.job,
                path=path,
                url=self.store.url,
                next_step="list what there is with `arroyo-state epochs`",
            ) from error
        return decode(data, path)

    def optional(self, path: StatePath, decode: Callable[[bytes, str], _T]) -> _T | None:
        """Read an object; None if there is none."""
        try:
            data = self.store.read(path)
        except NotFoundError:
            return None
        return decode(data, path)

    def epoch_record(self, epoch: Epoch) -> EpochRecord:
        """Read which checkpoint owns an epoch.

        Raises:
            NotFoundError: no such epoch. FormatError: its record does not decode.
            ProtocolError: it refers to a checkpoint outside of the job.
        """
        path = self.paths.epoch_record(epoch)
        record = self.read(path, records.decode_epoch_record, missing_epoch(epoch))
        recovery.expect_manifest_path(self.paths, record.checkpoint_ref)
        return record

    def fact(self, path: StatePath) -> recovery.MetadataRecord | None:
        """Read a record that decides what a writer does; None if there is none.

        Raises:
            ProtocolError: a later release wrote it.
        """
        record = self.optional(path, decode_by_name)
        # Only writers ask for facts; readers take what a later release wrote, and report it.
        recovery.check_versions(path, record)
        return record


def missing_epoch(epoch: Epoch) -> str:
    """What an error says about an epoch that is not there."""
    return f"epoch {epoch} does not exist"


def decode_by_name(data: bytes, path: str) -> recovery.MetadataRecord:
    """Decode a record of the protocol layout by what its name says it is."""
    name = path.rpartition("/")[2]
    if name == "checkpoint-manifest.pb":
        return metadata.decode_manifest(data, path)
    if name == "committed.json":
        return records.decode_committed_marker(data, path)
    if name == "generation-manifest.json":
        return records.decode_generation_manifest(data, path)
    if name == CURRENT_GENERATION:
        return records.decode_current_generation(data, path)
    return records.decode_epoch_record(data, path)
