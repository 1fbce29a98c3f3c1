"""The records of this package below a job: what changes the job reads them all, or refuses.

A record whose form this release does not read may keep objects that nothing else names, or say that
a change is half done. Therefore none is skipped, of whatever kind.

Not read here are the parts of the journal's interrupted runs, which `operations.gc.journal` reads
before it finishes them, the clock of the leases, of which only the time counts, and the rows that a
job stages for itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from arroyo_dagster.errors import FormatError, NotFoundError
from arroyo_dagster.state.codec.gc import (
    decode_gc_plan,
    decode_moved,
    decode_pins,
    decode_quarantined,
)
from arroyo_dagster.state.codec.journal import RunHeader, decode_header, decode_records
from arroyo_dagster.state.codec.maintenance_records import (
    decode_change_record,
    decode_compaction_record,
    decode_window_record,
)
from arroyo_dagster.state.codec.records import (
    decode_commit_note,
    decode_copy_marker,
    decode_stop_request,
)
from arroyo_dagster.state.metadata.lease_records import CLOCK, NEWEST, decode_lease, decode_newest
from arroyo_dagster.state.model.garbage import JobPins, Quarantined
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import MAINTENANCE_NAMES, PROBE, JobPaths, index_batch
from arroyo_dagster.state.model.numbers import parse_numbered
from arroyo_dagster.state.storage.concurrency import ahead, concurrently
from arroyo_dagster.state.storage.store import ObjectStore

Decode = Callable[[bytes, str], object]

_NEXT_STEP = (
    "use the release that wrote it, or let that release finish, undo, unpin and purge what it "
    "wrote; if the object is damaged, keep a copy elsewhere and delete it; nothing was changed"
)


@dataclass(slots=True)
class OwnRecords:
    """The records of a job, as `read_records` found them.

    Attributes:
        decoded: each record that could be read.
        unreadable: why the others could not, also those that only `whole` reads.
        beside: those of them that only concern what deletes.
    """

    decoded: dict[StatePath, object] = field(default_factory=dict)
    unreadable: dict[StatePath, FormatError] = field(default_factory=dict)
    beside: set[StatePath] = field(default_factory=set)


def check_records(store: ObjectStore, paths: JobPaths, *, whole: bool = False) -> None:
    """Check that this release reads every record of a job. Writes nothing.

    Args:
        whole: as of `read_records`; for what deletes objects.

    Raises:
        FormatError: it does not read one; names the object.
    """
    for error in read_records(store, paths, whole=whole).unreadable.values():
        raise error


def read_records(store: ObjectStore, paths: JobPaths, *, whole: bool = False) -> OwnRecords:
    """Read the records of a job. Costs one LIST, one more for each directory of records that
    exists, and the reads of the records.

    Args:
        whole: also read the newest run of the journal, the parts of the indexes of quarantines,
            and the commit notes of all epochs; False = only the note of the newest. They are as
            many as the job has objects and epochs, and only what deletes depends on them.
    """
    records = OwnRecords()
    try:
        level = store.list_dir(paths.maintenance)
    except NotFoundError:
        return records  # nothing was ever written below the URL
    names = {path.name for path in level.prefixes}
    for path in (*(info.path for info in level.objects if info.addressable), *level.prefixes):
        if path.name not in MAINTENANCE_NAMES:
            message = f"the job contains data of a newer release: {path.name}"
            records.unreadable[path] = _refused(paths, path, message)
    listed_here = {info.path for info in level.objects}
    decoders = {path: decode for path, decode in _single(paths).items() if path in listed_here}
    directories = [paths.maintenance / name for name in sorted(names & _DIRECTORIES.keys())]
    for directory, listed in zip(
        directories, concurrently(store.list_dir, directories), strict=True
    ):
        by_path = _DIRECTORIES[directory.name]([info.path for info in listed.objects], whole)
        below = () if directory == paths.journal else listed.prefixes
        for path in (*(info.path for info in listed.objects if info.addressable), *below):
            if path not in by_path:
                message = "a name that this release does not know"
                records.unreadable[path] = _refused(paths, path, message)
        decoders |= {path: decode for path, decode in by_path.items() if decode is not None}
    _read(store, paths, records, decoders)
    pins = records.decoded.get(paths.job_pins)
    named = _named(paths, pins) if isinstance(pins, JobPins) else {}
    if paths.quarantine.name in names:
        level_below = store.list_dir(paths.quarantine)
        for info in level_below.objects:
            message = "a name that this release does not know"
            records.unreadable[info.path] = _refused(paths, info.path, message)
        named |= {
            paths.quarantine_index(path.name): functools.partial(decode_quarantined, name=path.name)
            for path in level_below.prefixes
        }
    _read(store, paths, records, {p: decode for p, decode in named.items() if p not in decoders})
    # Everything read so far concerns all that changes the job, but for the journal.
    records.beside = {path for path in records.unreadable if path.parent == paths.journal}
    if whole:
        indexes = [record for record in records.decoded.values() if isinstance(record, Quarantined)]
        before = set(records.unreadable)
        for index in indexes:
            parts = (index_batch(paths, index.name, number) for number in range(1, index.parts + 1))
            _read_batches(store, paths, records, parts)
        records.beside |= set(records.unreadable) - before
    return records


def _named(paths: JobPaths, pins: JobPins) -> dict[StatePath, Decode]:
    """Return the records that the pins name: an incomplete listing hides none of them."""
    named: dict[StatePath, Decode] = {
        paths.quarantine_index(name): functools.partial(decode_quarantined, name=name)
        for name in pins.quarantines
    }
    named |= {paths.changes / name: decode_change_record for name in pins.changes}
    return named | {paths.compactions / name: decode_compaction_record for name in pins.compactions}


def _read(
    store: ObjectStore, paths: JobPaths, found: OwnRecords, wanted: Mapping[StatePath, Decode]
) -> None:
    read = concurrently(lambda entry: _decoded(store, paths, *entry), wanted.items())
    for path, record in zip(wanted, read, strict=True):
        _note(found, path, record)


def _read_batches(
    store: ObjectStore, paths: JobPaths, found: OwnRecords, parts: Iterable[StatePath]
) -> None:
    """Read the parts of an index, a few ahead: all at once may be more than the memory holds."""
    read = ahead(lambda path: (path, _decoded(store, paths, path, decode_moved)), parts)
    for path, part in read:
        _note(found, path, part if isinstance(part, FormatError) else None)


def _note(found: OwnRecords, path: StatePath, record: object) -> None:
    if isinstance(record, FormatError):
        found.unreadable[path] = record
    elif record is not None:
        found.decoded[path] = record


def _decoded(store: ObjectStore, paths: JobPaths, path: StatePath, decode: Decode) -> object:
    """Return a record, or the error if it does not decode; None if it was deleted meanwhile."""
    try:
        return decode(store.read(path), path)
    except NotFoundError:
        return None
    except FormatError as error:
        return _refused(paths, path, error.message)


def _refused(paths: JobPaths, path: StatePath, message: str) -> FormatError:
    return FormatError(
        f"a record that this release does not read: {message}",
        job=paths.root,
        path=path,
        next_step=_NEXT_STEP,
    )


# ---- the kinds of records ------------------------------------------------------------------------

_Known = Mapping[StatePath, Decode | None]
"""The objects in a directory whose names are known; None: its content is not read."""


def _records(decode: Decode, listed: Iterable[StatePath], whole: bool) -> _Known:
    return {path: decode for path in listed if path.name.endswith(".json")}


def _notes(listed: Iterable[StatePath], whole: bool) -> _Known:
    paths = sorted(_records(decode_commit_note, listed, whole))
    return {path: decode_commit_note if whole or path == paths[-1] else None for path in paths}


def _runs(listed: Iterable[StatePath], whole: bool) -> _Known:
    """Of the journal only the newest run is read, by what writes the next one; as it also finishes
    interrupted runs, `operations.gc.journal` reads their parts.
    """
    paths = sorted(listed)
    return {path: _decode_run if whole and path == paths[-1] else None for path in paths}


def _decode_run(data: bytes, path: str) -> RunHeader:
    return decode_header(next(decode_records(data, path), b""), path)


def _leases(listed: Iterable[StatePath], whole: bool) -> _Known:
    """Older leases than the newest are not read: it has ended them, also if they are damaged."""
    numbers = {path: parse_numbered(path.name, 10) for path in listed}
    newest = max((number for number in numbers.values() if number is not None), default=None)
    return dict(_known_leases(numbers, newest))


def _known_leases(
    numbers: Mapping[StatePath, int | None], newest: int | None
) -> Iterator[tuple[StatePath, Decode | None]]:
    for path, number in numbers.items():
        if number is not None:
            yield path, decode_lease if number == newest else None
        elif path.name == NEWEST:
            yield path, decode_newest
        elif path.name == CLOCK or path.name.startswith(PROBE):
            yield path, None


def _single(paths: JobPaths) -> dict[StatePath, Decode]:
    return {
        paths.job_pins: decode_pins,
        paths.removal: decode_gc_plan,
        paths.window: decode_window_record,
        paths.stop_request: decode_stop_request,
        paths.copy_marker: decode_copy_marker,
    }


_DIRECTORIES: Mapping[str, Callable[[Iterable[StatePath], bool], _Known]] = {
    "compactions": functools.partial(_records, decode_compaction_record),
    "changes": functools.partial(_records, decode_change_record),
    "commits": _notes,
    "journal": _runs,
    "leases": _leases,
    "writers": _leases,
    "windows": _leases,
}
