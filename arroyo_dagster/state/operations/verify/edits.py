"""Read the records of edits, the digests of the metadata objects that they name, and the records
of rebuilds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from arroyo_dagster.errors import FormatError, NotFoundError
from arroyo_dagster.state.codec.maintenance_records import (
    decode_edit_record,
    decode_rebuild_record,
)
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.surgery.plans import EditRecord
from arroyo_dagster.state.model.surgery.rebuild import RebuildRecord
from arroyo_dagster.state.planning.verify.edits import concerns, current_edits, is_unfinished
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore


@dataclass(frozen=True, slots=True)
class EditFacts:
    """The edits of some epochs of a job.

    Attributes:
        records: by path; None if a record does not decode.
        digests: SHA-256 of the metadata objects that they name, in hex.
    """

    records: Mapping[StatePath, EditRecord | None] = field(default_factory=dict)
    digests: Mapping[StatePath, str] = field(default_factory=dict)

    @property
    def unfinished(self) -> dict[StatePath, EditRecord]:
        """The records of edits of which only some metadata objects were written."""
        return {
            path: record
            for path, record in current_edits(self.records).items()
            if is_unfinished(record, self.digests)
        }


def read_edits(store: ObjectStore, paths: JobPaths, history: Sequence[Checkpoint]) -> EditFacts:
    """Read the records of edits of these epochs; one LIST and one GET for a job never edited.

    Records that a listing lacks are found by their names: the pins of an Arroyo job name the record
    that undoes each edit, and both have one name.

    Raises:
        StorageError: the store failed.
    """
    listed = {info.path for info in store.list_dir(paths.edits).objects}
    found = sorted(listed | _named(store, paths))
    read = dict(zip(found, concurrently(lambda path: _record(store, path), found), strict=True))
    records = {
        path: record
        for path, record in read.items()
        if (path in listed if record is None else any(concerns(record, one) for one in history))
    }
    named = sorted({path for edit in records.values() if edit is not None for path in edit.objects})
    digests = concurrently(lambda path: _digest(store, path), named)
    pairs = zip(named, digests, strict=True)
    return EditFacts(records, {path: digest for path, digest in pairs if digest is not None})


def _named(store: ObjectStore, paths: JobPaths) -> set[StatePath]:
    """Return where the record of each pinned rewrite is, if an edit made it."""
    try:
        return {paths.edits / name for name in ParquetBackend(store, paths).job_pins().rewrites}
    except FormatError:
        return set()  # `health` reports it, and no edit is published without pins


def read_rebuilds(store: ObjectStore, paths: JobPaths) -> dict[StatePath, RebuildRecord | None]:
    """Read the records of rebuilds, by path; None if one does not decode.

    Raises:
        StorageError: the store failed.
    """
    listed = sorted(info.path for info in store.list_dir(paths.rebuilds).objects)
    read = concurrently(lambda path: _rebuild_record(store, path), listed)
    return dict(zip(listed, read, strict=True))


def _rebuild_record(store: ObjectStore, path: StatePath) -> RebuildRecord | None:
    try:
        return decode_rebuild_record(store.read(path), path)
    except (FormatError, NotFoundError):
        return None


def _record(store: ObjectStore, path: StatePath) -> EditRecord | None:
    try:
        return decode_edit_record(store.read(path), path)
    except (FormatError, NotFoundError):
        return None


def _digest(store: ObjectStore, path: StatePath) -> str | None:
    try:
        return hashlib.sha256(store.read(path)).hexdigest()
    except NotFoundError:
        return None
