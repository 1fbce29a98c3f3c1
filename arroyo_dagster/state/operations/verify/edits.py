"""Read the records of edits, the digests of the metadata objects that they name, and the records
of rebuilds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from arroyo_dagster.errors import FormatError, NotFoundError
from arroyo_dagster.state.codec.maintenance_records import decode_change_record
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.changes import ChangeKind, ChangeRecord, is_change_of
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.planning.verify.edits import concerns, current_edits, is_unfinished
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore


@dataclass(frozen=True, slots=True)
class EditFacts:
    """The edits of some epochs of a job.

    Attributes:
        records: by path; None if a record does not decode.
        digests: SHA-256 of the metadata objects that they name, in hex.
        rebuilds: the paths of the records of all rebuilds of the job; see `read_rebuilds`.
    """

    records: Mapping[StatePath, ChangeRecord | None] = field(default_factory=dict)
    digests: Mapping[StatePath, str] = field(default_factory=dict)
    rebuilds: Sequence[StatePath] = ()

    @property
    def unfinished(self) -> dict[StatePath, ChangeRecord]:
        """The records of edits of which only some metadata objects were written."""
        return {
            path: record
            for path, record in current_edits(self.records).items()
            if is_unfinished(record, self.digests)
        }


def read_edits(store: ObjectStore, paths: JobPaths, history: Sequence[Checkpoint]) -> EditFacts:
    """Read the records of edits of these epochs; one LIST and one GET for a job never edited.

    Records that a listing lacks are found by their names, which the pins of an Arroyo job hold.

    Raises:
        StorageError: the store failed.
    """
    changes = [info.path for info in store.list_dir(paths.changes).objects]
    listed = {path for path in changes if is_change_of(paths, path, ChangeKind.EDIT)}
    rebuilds = [path for path in changes if is_change_of(paths, path, ChangeKind.REBUILD)]
    read = _read(store, listed | _named(store, paths))
    records = {
        path: record
        for path, record in read.items()
        if (path in listed if record is None else any(concerns(record, one) for one in history))
    }
    named = sorted({path for edit in records.values() if edit is not None for path in edit.objects})
    digests = concurrently(lambda path: _digest(store, path), named)
    pairs = zip(named, digests, strict=True)
    known = {path: digest for path, digest in pairs if digest is not None}
    return EditFacts(records, known, rebuilds)


def read_rebuilds(store: ObjectStore, edits: EditFacts) -> dict[StatePath, ChangeRecord | None]:
    """Read the records of rebuilds, by path; None if one does not decode."""
    return _read(store, edits.rebuilds)


def _named(store: ObjectStore, paths: JobPaths) -> set[StatePath]:
    """Return the records of edits that the pins name."""
    try:
        names = ParquetBackend(store, paths).job_pins().changes
    except FormatError:
        return set()  # `health` reports it, and no edit is published without pins
    records = (paths.changes / name for name in names)
    return {path for path in records if is_change_of(paths, path, ChangeKind.EDIT)}


def _read(store: ObjectStore, paths: Collection[StatePath]) -> dict[StatePath, ChangeRecord | None]:
    """Return records by path, in its order; None if one is missing or does not decode."""

    def record(path: StatePath) -> ChangeRecord | None:
        try:
            return decode_change_record(store.read(path), path)
        except (FormatError, NotFoundError):
            return None

    ordered = sorted(paths)
    return dict(zip(ordered, concurrently(record, ordered), strict=True))


def _digest(store: ObjectStore, path: StatePath) -> str | None:
    try:
        return hashlib.sha256(store.read(path)).hexdigest()
    except NotFoundError:
        return None
