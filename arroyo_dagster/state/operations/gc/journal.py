"""The journal of deletions: each batch is written before it begins and completed after it.

While a run goes on, its parts are objects of a directory. When it ends they become one object,
which holds the digest of the run before. The next run completes the entries of an interrupted run
from the objects in the store, so that every entry gets an outcome.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from arroyo_dagster.errors import FormatError, StorageError
from arroyo_dagster.state.codec.journal import (
    Line,
    Previous,
    RunHeader,
    decode_batch,
    decode_header,
    decode_records,
    encode_batch,
    encode_end,
    encode_header,
)
from arroyo_dagster.state.model.garbage import digest_of
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.numbers import parse_numbered
from arroyo_dagster.state.model.objects import StoredObject
from arroyo_dagster.state.storage.concurrency import ahead, concurrently
from arroyo_dagster.state.storage.failures import delete_all
from arroyo_dagster.state.storage.store import ObjectStore, read_optional

UNKNOWN = "unknown"
GONE = "gone"
DIED = "there: the run died before"
_SUFFIX = ".json.gz"
_TIME_DIGITS = 17
"""Digits of the time in a run's name, in microseconds since 1970; enough until the year 5138."""

_NAME = re.compile(rf"\d{{{_TIME_DIGITS}}}-[^/]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """The outcome for one object.

    Attributes:
        run: the run's name, which begins with its time.
        kind, plan: the kind of plan, and its digest.
        outcome: `deleted`; `moved` to quarantine; `gone` before; `there` with the reason, if it
            still exists; or `unknown`, if the run was interrupted.
    """

    run: str
    owner: str
    at_micros: int
    kind: str
    plan: str
    path: StatePath
    size_bytes: int | None
    etag: str | None
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRun:
    """One run of gc.

    Attributes:
        ended: whether it was completed.
        objects, size_bytes: of its plan.
        quarantine: the name of the quarantine it moved objects to; None if it deleted them.
    """

    name: str
    owner: str
    begun_at_micros: int
    kind: str
    plan: str
    objects: int
    size_bytes: int
    quarantine: str | None
    ended: bool


class Journal:
    """Writes the journal of one run, which `begin` has begun.

    Args:
        name: the name of the run.
        header: its first part.
        begun_at_micros: when it began.
    """

    def __init__(
        self, store: ObjectStore, paths: JobPaths, name: str, header: bytes, begun_at_micros: int
    ) -> None:
        self.name = name
        self._store = store
        self._paths = paths
        self._begun = begun_at_micros - time.monotonic_ns() // 1000
        self._directory = paths.journal / name
        self._records = {0: header}

    @classmethod
    def begin(
        cls,
        store: ObjectStore,
        paths: JobPaths,
        header: RunHeader,
        *,
        keep_micros: int | None = None,
    ) -> Journal:
        """Write the first part of a run.

        Args:
            keep_micros: delete the records of runs that began longer ago; None = keep all.

        Raises:
            FormatError: a record of the journal is not of the form that this release writes.
        """
        runs = _known_runs(store, paths)
        header = _following(store, paths, runs, header)
        old: list[str] = []
        if keep_micros is not None:
            oldest = f"{max(0, header.begun_at_micros - keep_micros):0{_TIME_DIGITS}}"
            old = [name for name in sorted(runs.ended)[:-1] if name < oldest]
        if old:
            # Before they are deleted: what is missing must not look lost.
            header = replace(header, expired=old[-1])
        data = encode_header(header)
        name = _begun_name(store, paths, header, data)
        for run in old:
            _delete_records(store, paths.journal / run)
        delete_all(store, [run_path(paths, run) for run in old])
        return cls(store, paths, name, data, header.begun_at_micros)

    def write(
        self, batches: Sequence[tuple[int, Sequence[StoredObject]]], outcomes: Mapping[Any, str]
    ) -> None:
        """Write batches: without outcomes before they begin, with all outcomes afterwards.

        Args:
            batches: each with its number, from 1.
        """
        now = self._begun + time.monotonic_ns() // 1000
        written = concurrently(lambda batch: self._write(now, *batch, outcomes), batches)
        self._records |= {number: data for (number, _), data in zip(batches, written, strict=True)}

    def _write(
        self, now: int, number: int, objects: Sequence[StoredObject], outcomes: Mapping[Any, str]
    ) -> bytes:
        lines = [
            (str(file.path), file.size_bytes, file.etag, outcomes.get(file.path, UNKNOWN))
            for file in objects
        ]
        data = encode_batch(now, lines)
        self._store.put(self._directory / record_name(number), data)
        return data

    def end(self, counts: Mapping[str, int]) -> None:
        """Write the run as one object, with what it did, and delete its parts."""
        _end(self._store, self._paths, self.name, self._records, counts)


def record_name(number: int) -> str:
    """Return the name of a part: 0 is the header, batches are numbered from 1, without a gap."""
    return f"{number:06}{_SUFFIX}"


def run_path(paths: JobPaths, name: str) -> StatePath:
    """Return the path of the object of a run that has ended."""
    return paths.journal / f"{name}{_SUFFIX}"


def _following(
    store: ObjectStore, paths: JobPaths, runs: StoredRuns, header: RunHeader
) -> RunHeader:
    """Return a header that names the newest run; names ascend, whatever the clocks are."""
    if not runs.ended:
        return header
    newest = max(runs.ended)
    data = store.read(run_path(paths, newest))
    text = next(decode_records(data, run_path(paths, newest)), b"")
    before = decode_header(text, run_path(paths, newest))
    return replace(
        header, previous=Previous(run=newest, digest=digest_of(data)), expired=before.expired
    )


def _begun_name(store: ObjectStore, paths: JobPaths, header: RunHeader, data: bytes) -> str:
    """Create the directory of a run, under a unique name that is greater than the one before."""
    micros = header.begun_at_micros
    if header.previous is not None:
        micros = max(micros, int(header.previous.run[:_TIME_DIGITS]) + 1)
    while True:
        name = f"{micros:0{_TIME_DIGITS}}-{header.plan[:12]}"
        path = paths.journal / name / record_name(0)
        # False may be the answer to this request if it was sent twice.
        if store.create(path, data) or store.read(path) == data:
            return name
        micros += 1


def _end(
    store: ObjectStore,
    paths: JobPaths,
    name: str,
    records: Mapping[int, bytes],
    counts: Mapping[str, int],
) -> None:
    numbers = sorted(records)
    whole = b"".join((*(records[number] for number in numbers), encode_end(counts)))
    store.put(run_path(paths, name), whole)
    with contextlib.suppress(StorageError):  # The next run deletes what stays.
        delete_all(store, [paths.journal / name / record_name(number) for number in numbers])


# ---- interrupted runs ----------------------------------------------------------------------------


def finish_open_runs(store: ObjectStore, paths: JobPaths) -> int:
    """Complete the entries of interrupted runs from the objects in the store, and end them.

    Returns:
        How many objects had no outcome.

    Raises:
        FormatError: a record is not of the form that this release writes; it is unchanged.
    """
    directories = sorted(_known_runs(store, paths).directories)
    return sum(_finish(store, paths, name) for name in directories)


def _finish(store: ObjectStore, paths: JobPaths, name: str) -> int:
    directory = paths.journal / name
    parts = dict(records_of(store, directory))
    whole = read_optional(store, run_path(paths, name))
    if whole is not None:
        # What arrived later stays: `check_journal` reports it.
        within = [number for number, data in parts.items() if data in whole]
        delete_all(store, [directory / record_name(number) for number in within])
        return 0
    if not parts:
        return 0
    if 0 not in parts:
        raise FormatError(
            "the first part of a run of the journal is missing",
            path=directory / record_name(0),
            next_step=f"keep {directory} and report it, move it out of the journal, then run this "
            "again",
        )
    lines: dict[int, list[Line]] = {}
    for number, data in parts.items():
        path = directory / record_name(number)
        for text in decode_records(data, path):
            if number:
                lines[number] = decode_batch(text, path)
            else:
                decode_header(text, path)
    completed = 0
    for number, batch in lines.items():
        unknown = [line[1] for line in batch if line[4] == UNKNOWN]
        if not unknown:
            continue
        infos = concurrently(store.head, unknown)
        outcomes = {
            path: GONE if info is None else DIED for path, info in zip(unknown, infos, strict=True)
        }
        completed += len(unknown)
        parts[number] = encode_batch(
            batch[0][0],
            [
                (path, size, etag, outcomes.get(path, outcome) if outcome == UNKNOWN else outcome)
                for _, path, size, etag, outcome in batch
            ],
        )
        store.put(directory / record_name(number), parts[number])
    _end(store, paths, name, parts, {"died": 1})
    return completed


def _delete_records(store: ObjectStore, directory: StatePath) -> None:
    delete_all(
        store, [directory / record_name(number) for number, _ in records_of(store, directory)]
    )


# ---- stored runs ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRuns:
    """The runs of a journal by name, as a listing shows them.

    Attributes:
        ended: those that are one object.
        directories: those with a directory; it is left over if the run has ended.
        unknown: objects and directories that are no runs.
    """

    ended: frozenset[str]
    directories: frozenset[str]
    unknown: tuple[StatePath, ...]

    @property
    def names(self) -> list[str]:
        """Every run, oldest first."""
        return sorted(self.ended | self.directories)


def stored_runs(store: ObjectStore, paths: JobPaths) -> StoredRuns:
    """List the runs of a journal."""
    listed = store.list_dir(paths.journal)
    within = concurrently(store.list_dir, listed.prefixes)
    ended = {info.path: info.path.name.removesuffix(_SUFFIX) for info in listed.objects}
    unknown = [path for path, name in ended.items() if path != run_path(paths, name)]
    unknown += [path for path, name in ended.items() if not _NAME.fullmatch(name)]
    for path, level in zip(listed.prefixes, within, strict=True):
        parts = [info.path for info in level.objects]
        unknown += [] if _NAME.fullmatch(path.name) else [path]
        unknown += [path for path in parts if parse_numbered(path.name, 6, _SUFFIX) is None]
        unknown += level.prefixes
    return StoredRuns(
        ended=frozenset(name for path, name in ended.items() if path not in unknown),
        directories=frozenset(
            path.name
            for path, level in zip(listed.prefixes, within, strict=True)
            if level.objects and path not in unknown  # On local disk it may be empty.
        ),
        unknown=tuple(dict.fromkeys(unknown)),
    )


def _known_runs(store: ObjectStore, paths: JobPaths) -> StoredRuns:
    """List the runs of a journal; refuse one that this release cannot read."""
    runs = stored_runs(store, paths)
    for path in runs.unknown:
        raise FormatError(
            "this is no record of a journal that this release knows",
            path=path,
            next_step="use the release that wrote it, or move it out of the journal; nothing was "
            "deleted",
        )
    return runs


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """One run as it is stored.

    Attributes:
        objects: its object, or those of its parts in order; none if there is no such run.
    """

    name: str
    ended: bool
    objects: tuple[tuple[StatePath, bytes], ...]

    def texts(self) -> Iterator[tuple[StatePath, bytes]]:
        """Yield the JSON of each part with the object that holds it, the header first.

        Raises:
            FormatError: an object is damaged.
        """
        return ((path, text) for path, data in self.objects for text in decode_records(data, path))

    def header(self) -> RunHeader:
        """Decode its header. Errors as in `texts`."""
        path, text = next(self.texts())
        return decode_header(text, path)

    def facts(self) -> JournalRun:
        """Return what is known of it. Errors as in `texts`."""
        header = self.header()
        return JournalRun(
            name=self.name,
            owner=header.owner,
            begun_at_micros=header.begun_at_micros,
            kind=header.kind,
            plan=header.plan,
            objects=header.objects,
            size_bytes=header.size_bytes,
            quarantine=header.quarantine,
            ended=self.ended,
        )


def load_run(store: ObjectStore, paths: JobPaths, name: str) -> StoredRun:
    """Read a run completely."""
    path, directory = run_path(paths, name), paths.journal / name
    data = read_optional(store, path)
    parts: list[tuple[int, bytes]] = []
    if data is None:
        parts = list(records_of(store, directory))
        data = read_optional(store, path)  # It may have ended meanwhile.
    objects = [(directory / record_name(number), part) for number, part in parts]
    if data is not None:
        objects = [(path, data)]
    return StoredRun(name=name, ended=data is not None, objects=tuple(objects))


def load_runs(store: ObjectStore, paths: JobPaths, names: Sequence[str]) -> Iterator[StoredRun]:
    """Read runs one after the other, a few ahead; those that do not exist are left out."""
    runs = ahead(lambda name: load_run(store, paths, name), names)
    return (run for run in runs if run.objects)


def records_of(store: ObjectStore, directory: StatePath) -> Iterator[tuple[int, bytes]]:
    """Yield the parts of a run in order: those that a listing shows, and those it may have missed.

    Missing numbers are left out.
    """
    listed = (info.path.name for info in store.list_dir(directory).objects)
    numbers = [parse_numbered(name, 6, _SUFFIX) for name in listed]
    number = 1 + max((n for n in numbers if n is not None), default=-1)
    read = ahead(lambda n: read_optional(store, directory / record_name(n)), range(number))
    yield from ((n, data) for n, data in enumerate(read) if data is not None)
    while (data := read_optional(store, directory / record_name(number))) is not None:
        yield number, data
        number += 1


# ---- reading -------------------------------------------------------------------------------------


def list_runs(store: ObjectStore, paths: JobPaths) -> list[JournalRun]:
    """Return the runs in the journal of a job, oldest first.

    Raises:
        FormatError: a run does not decode.
    """
    names = _known_runs(store, paths).names
    return [run.facts() for run in load_runs(store, paths, names)]


def read_journal(
    store: ObjectStore, paths: JobPaths, run: str | None = None
) -> Iterator[JournalEntry]:
    """Yield the outcome for every object of each plan, run by run, oldest first.

    Args:
        run: only of this run; None = all.

    Raises:
        FormatError: a part of the journal does not decode.
    """
    names = _known_runs(store, paths).names if run is None else [run]
    for stored in load_runs(store, paths, names):
        facts = stored.facts()
        for path, text in stored.texts():
            yield from (entry_of(facts, line) for line in decode_batch(text, path))


def entry_of(run: JournalRun, line: Line) -> JournalEntry:
    """Return the entry for a line of a run."""
    at_micros, path, size_bytes, etag, outcome = line
    return JournalEntry(
        run=run.name,
        owner=run.owner,
        at_micros=at_micros,
        kind=run.kind,
        plan=run.plan,
        path=path,
        size_bytes=size_bytes,
        etag=etag,
        outcome=outcome,
    )
