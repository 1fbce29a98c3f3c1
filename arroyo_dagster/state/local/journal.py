"""The journal of what was deleted: written before each batch, completed after it, kept for ever.

What a run that died left open is looked up in the store by the next one, so that no entry stays
without an outcome. A run is a directory of small objects until it is archived: see
`journal_archive`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arroyo_dagster.errors import NotFoundError
from arroyo_dagster.state.codec.collecting import VERSION, known_fields, number_of
from arroyo_dagster.state.codec.journal import ArchivedRun, Line, decode_archive
from arroyo_dagster.state.codec.records import encode_json
from arroyo_dagster.state.model.collecting import GcPlan
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.numbers import parse_numbered
from arroyo_dagster.state.model.objects import Stored
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

PLAN, END, ARCHIVE = "plan.json", "end.json", ".parquet"
UNKNOWN = "unknown"
GONE = "gone"
RUNS_LOOKED_AT = 16
"""So many runs, the newest, may have died and wait for their outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What became of one object.

    Attributes:
        run: the run's name, which begins with its time.
        kind, plan: which of the three plans, and its digest.
        outcome: `deleted`, `moved` aside, `gone` before, `there` still with the reason, or
            `unknown`: a run died while it was at it.
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
class Run:
    """One run of a collection.

    Attributes:
        ended: whether it came to its end.
        objects, size_bytes: what its plan took.
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
    """Writes the journal of one run.

    Args:
        kind: which of the three plans, `purge` or `undelete`.
        plan: the digest of what is to be done.
        more: what else is known of it.
    """

    def __init__(
        self,
        store: ObjectStore,
        paths: JobPaths,
        *,
        kind: str,
        plan: str,
        owner: str,
        now_micros: int,
        objects: int,
        size_bytes: int,
        quarantine: str | None = None,
        more: Mapping[str, object] | None = None,
    ) -> None:
        self._store = store
        self.name = f"{now_micros:017}-{plan[:12]}"
        self._at = paths.journal / self.name
        self._begun = now_micros - time.monotonic_ns() // 1000
        fields = {
            "version": VERSION,
            "owner": owner,
            "begun_at_micros": now_micros,
            "kind": kind,
            "plan": plan,
            "objects": objects,
            "size_bytes": size_bytes,
            "quarantine": quarantine,
            **(more or {}),
        }
        store.put(self._at / PLAN, encode_json(fields))

    @classmethod
    def of_plan(
        cls, store: ObjectStore, plan: GcPlan, owner: str, now_micros: int, quarantine: str | None
    ) -> Journal:
        """The journal of a plan that is being carried out."""
        return cls(
            store,
            plan.paths,
            kind=plan.kind.value,
            plan=plan.digest,
            owner=owner,
            now_micros=now_micros,
            objects=plan.objects,
            size_bytes=plan.size_bytes,
            quarantine=quarantine,
            more={
                "rule": dict(plan.rule),
                "referenced": plan.proof.digest,
                "roots": len(plan.proof.roots),
            },
        )

    def write(self, number: int, objects: Sequence[Stored], outcomes: Mapping[Any, str]) -> None:
        """Write one batch: with no outcomes before it is begun, with all of them afterwards."""
        lines = [
            [str(one.path), one.size_bytes, one.etag, outcomes.get(one.path, UNKNOWN)]
            for one in objects
        ]
        now = self._begun + time.monotonic_ns() // 1000
        _write_batch(self._store, self._at / batch_name(number), now, lines)

    def end(self, counts: Mapping[str, int]) -> None:
        """Say that the run came to its end, with what it did."""
        self._store.put(self._at / END, encode_json({"version": VERSION, **counts}))


def batch_name(number: int) -> str:
    """What the object of a batch is called; they are numbered from 1, without a gap."""
    return f"{number:06}.json"


def _write_batch(
    store: ObjectStore, path: StatePath, now_micros: int, lines: Sequence[Sequence[object]]
) -> None:
    fields = {"version": VERSION, "at_micros": now_micros, "objects": lines}
    store.put(path, encode_json(fields))


def list_runs(store: ObjectStore, paths: JobPaths) -> list[Run]:
    """The runs that the journal of a job knows, oldest first.

    Raises:
        FormatError: one does not decode.
    """
    return [one.run for one in _found(store, paths)]


@dataclass(frozen=True, slots=True)
class _Found:
    """A run, and where it lies: in a directory of its own, or with others in an archive."""

    run: Run
    archived: ArchivedRun | None = None


def _found(store: ObjectStore, paths: JobPaths) -> list[_Found]:
    listed = store.list_dir(paths.journal)
    archives = read_archives(store, [info.path for info in listed.objects])
    found = {
        one.name: _Found(_run_of(one.name, one.plan.encode(), path, ended=True), one)
        for path, runs in archives.items()
        for one in runs
    }
    # Of one that was archived the directory may not have gone yet.
    own = [path for path in listed.prefixes if path.name not in found]
    others = concurrently(lambda path: _run(store, path), own)
    found.update((run.name, _Found(run)) for run in others if run is not None)
    return [found[name] for name in sorted(found)]


def read_archives(
    store: ObjectStore, objects: Iterable[StatePath]
) -> dict[StatePath, list[ArchivedRun]]:
    """The archives among the objects of a journal, in order of their names, and what they hold."""
    paths = sorted(path for path in objects if path.name.endswith(ARCHIVE))
    runs = concurrently(lambda path: decode_archive(store.read(path), path), paths)
    return dict(zip(paths, runs, strict=True))


def _run(store: ObjectStore, directory: StatePath) -> Run | None:
    path = directory / PLAN
    try:
        data = store.read(path)
    except NotFoundError:
        return None
    ended = store.head(directory / END) is not None
    return _run_of(directory.name, data, path, ended=ended)


def _run_of(name: str, data: bytes, path: StatePath, *, ended: bool) -> Run:
    with known_fields(data, path) as fields:
        return Run(
            name=name,
            owner=str(fields["owner"]),
            begun_at_micros=number_of(fields["begun_at_micros"]),
            kind=str(fields["kind"]),
            plan=str(fields["plan"]),
            objects=number_of(fields["objects"]),
            size_bytes=number_of(fields["size_bytes"]),
            quarantine=None if fields["quarantine"] is None else str(fields["quarantine"]),
            ended=ended,
        )


def read_journal(store: ObjectStore, paths: JobPaths, run: str | None = None) -> Iterator[Entry]:
    """What became of every object that was to go, run by run, oldest first.

    Args:
        run: of this run only.

    Raises:
        FormatError: a part of the journal does not decode.
    """
    for one in _found(store, paths):
        if run is None or one.run.name == run:
            yield from _entries(store, paths.journal, one)


def _entries(store: ObjectStore, journal: StatePath, found: _Found) -> Iterator[Entry]:
    run = found.run
    with known_fields(b'{"version":1}', journal / run.name):
        for at_micros, name, size, etag, outcome in _lines(store, journal, found):
            yield Entry(
                run=run.name,
                owner=run.owner,
                at_micros=at_micros,
                kind=run.kind,
                plan=run.plan,
                path=StatePath(name),
                size_bytes=size,
                etag=etag,
                outcome=str(outcome),
            )


def _lines(store: ObjectStore, journal: StatePath, found: _Found) -> Iterator[Line]:
    if found.archived is not None:
        yield from found.archived.lines
        return
    for _, at_micros, lines in batches_of(store, journal / found.run.name):
        for name, size, etag, outcome in lines:
            yield at_micros, name, size, etag, outcome


def batches_of(
    store: ObjectStore, directory: StatePath
) -> Iterator[tuple[StatePath, int, list[list[Any]]]]:
    """The batches of a run that has a directory of its own: each with its time and its lines."""
    for info in store.list_dir(directory).objects:
        if parse_numbered(info.path.name, 6) is None:
            continue
        with known_fields(store.read(info.path), info.path) as fields:
            found = number_of(fields["at_micros"]), list(fields["objects"])
        yield (info.path, *found)


def finish_open_runs(store: ObjectStore, directories: Iterable[StatePath]) -> int:
    """Look up what runs that died left open, and complete their entries.

    Args:
        directories: of the runs.

    Returns:
        How many objects had no outcome.
    """
    looked_up = 0
    newest = sorted(directories)[-RUNS_LOOKED_AT:]
    for directory in newest:
        if store.head(directory / END) is not None:
            continue
        for path, at_micros, lines in batches_of(store, directory):
            looked_up += _complete(store, path, at_micros, lines)
        store.put(directory / END, encode_json({"version": VERSION, "died": 1}))
    return looked_up


def _complete(store: ObjectStore, path: StatePath, at_micros: int, lines: list[list[Any]]) -> int:
    unknown = [line for line in lines if line[3] == UNKNOWN]
    if not unknown:
        return 0
    found = concurrently(lambda line: store.head(StatePath(line[0])), unknown)
    for line, info in zip(unknown, found, strict=True):
        line[3] = GONE if info is None else "there: the run died before"
    _write_batch(store, path, at_micros, lines)
    return len(unknown)
