"""The journal of deletions: written before each batch, completed after it, kept for ever.

The next run completes the entries of an interrupted run from the objects in the store, so that
every entry gets an outcome. A run is a directory of small objects until it is archived: see
`journal_archive`. Each part holds the digest of the part before it: see `journal_chain`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from arroyo_dagster.errors import FormatError, InputError, NotFoundError
from arroyo_dagster.state.codec.journal_chain import (
    BatchSeal,
    Follows,
    Head,
    encode_batch,
    follows_to_json,
    link_after,
    seal_of,
    seals_to_json,
)
from arroyo_dagster.state.codec.records import OWN_VERSION, encode_json, known_fields
from arroyo_dagster.state.model.garbage import GcPlan, digest_of
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.objects import StoredObject
from arroyo_dagster.state.operations.gc.journal_chain import (
    END,
    PLAN,
    UNKNOWN,
    batch_name,
    batches_by_name,
    decode_batch,
    put_head,
    run_to_follow,
)
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

if TYPE_CHECKING:
    from arroyo_dagster.state.codec.journal import Line

ARCHIVE = ".parquet"
TIME_DIGITS = 17
"""Digits of the time in a run's name, in microseconds since 1970; enough until the year 5138."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """What is known of a run when it begins.

    Attributes:
        kind: the kind of plan, `purge` or `undelete`.
        plan: the digest of the plan, or the name of the quarantine.
        objects, size_bytes: what its plan takes.
        quarantine: the name of the quarantine it moves objects to; None if it deletes them.
        more: further fields of the run's record.
    """

    kind: str
    plan: str
    owner: str
    begun_at_micros: int
    objects: int
    size_bytes: int
    quarantine: str | None = None
    more: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of_plan(
        cls, plan: GcPlan, owner: str, now_micros: int, quarantine: str | None
    ) -> RunHeader:
        """Return the header of a run that executes a plan."""
        return cls(
            kind=plan.kind.value,
            plan=plan.digest,
            owner=owner,
            begun_at_micros=now_micros,
            objects=plan.objects,
            size_bytes=plan.size_bytes,
            quarantine=quarantine,
            more={
                "rule": dict(plan.rule),
                "referenced": plan.proof.digest,
                "roots": len(plan.proof.roots),
            },
        )

    def to_json(self) -> dict[str, object]:
        """Return the fields of the first object of the run."""
        return {
            "version": OWN_VERSION,
            "owner": self.owner,
            "begun_at_micros": self.begun_at_micros,
            "kind": self.kind,
            "plan": self.plan,
            "objects": self.objects,
            "size_bytes": self.size_bytes,
            "quarantine": self.quarantine,
            **self.more,
        }


class Journal:
    """Writes the journal of one run, which `begin` has begun.

    Args:
        name: the name of the run.
        link: the digest of its first object.
        begun_at_micros: when it began.
    """

    def __init__(
        self, store: ObjectStore, paths: JobPaths, name: str, link: str, begun_at_micros: int
    ) -> None:
        self.name = name
        self._store = store
        self._paths = paths
        self._begun = begun_at_micros - time.monotonic_ns() // 1000
        self._at = paths.journal / name
        self._link = link
        self._previous: dict[int, str] = {}
        self._seals: dict[int, BatchSeal] = {}

    @classmethod
    def begin(cls, store: ObjectStore, paths: JobPaths, header: RunHeader) -> Journal:
        """Write the first object of a run, and let the head of the chain name it."""
        now_micros = header.begun_at_micros
        follows = run_to_follow(store, paths)
        data = encode_json({**header.to_json(), **follows_to_json(follows)})
        name = _begun_name(store, paths, _time_after(follows, now_micros), header.plan[:12], data)
        journal = cls(store, paths, name, digest_of(data), now_micros)
        put_head(store, paths, Head(run=name, digest=journal._link, ended=False))
        return journal

    def write(
        self, batches: Sequence[tuple[int, Sequence[StoredObject]]], outcomes: Mapping[Any, str]
    ) -> None:
        """Write batches: without outcomes before they begin, with all outcomes afterwards.

        Args:
            batches: each with its number. Their first write, in this order, determines their places
                in the chain.
        """
        for number, objects in batches:
            if number not in self._previous:
                self._previous[number] = self._link
                lines = [[str(one.path), one.size_bytes, one.etag] for one in objects]
                self._link = link_after(self._link, lines)
        now = self._begun + time.monotonic_ns() // 1000
        seals = concurrently(lambda one: self._write(now, *one, outcomes), batches)
        self._seals |= {seal.number: seal for seal in seals}

    def _write(
        self, now: int, number: int, objects: Sequence[StoredObject], outcomes: Mapping[Any, str]
    ) -> BatchSeal:
        lines = [
            [str(one.path), one.size_bytes, one.etag, outcomes.get(one.path, UNKNOWN)]
            for one in objects
        ]
        data = encode_batch(now, lines, self._previous[number])
        self._store.put(self._at / batch_name(number), data)
        return seal_of(number, lines, data)

    def end(self, counts: Mapping[str, int]) -> None:
        """Write the end of the run, with what it did."""
        seals = (self._seals[number] for number in sorted(self._seals))
        data = encode_json({"version": OWN_VERSION, **counts, **seals_to_json(seals, self._link)})
        self._store.put(self._at / END, data)
        put_head(self._store, self._paths, Head(run=self.name, digest=digest_of(data), ended=True))


def _begun_name(store: ObjectStore, paths: JobPaths, micros: int, plan: str, data: bytes) -> str:
    """Create the directory of a run, under a unique name."""
    while True:
        name = f"{micros:0{TIME_DIGITS}}-{plan}"
        path = paths.journal / name / PLAN
        # False may be the answer to this request if it was sent twice.
        if store.create(path, data) or store.read(path) == data:
            return name
        micros += 1


def _time_after(follows: Follows | None, now_micros: int) -> int:
    """Return the time in a run's name: names ascend along the chain, whatever the clocks are."""
    time_of = "" if follows is None else follows.run.partition("-")[0]
    known = len(time_of) == TIME_DIGITS and time_of.isdecimal()
    return max(now_micros, int(time_of) + 1) if known else now_micros


def list_runs(store: ObjectStore, paths: JobPaths) -> list[JournalRun]:
    """Return the runs in the journal of a job, oldest first.

    Raises:
        FormatError: a run does not decode.
    """
    return [one.run for one in _found(store, paths)]


@dataclass(frozen=True, slots=True)
class _LocatedRun:
    """A run, and its place: a directory of its own, or an archive of several runs."""

    run: JournalRun
    archive: StatePath | None = None


def _found(store: ObjectStore, paths: JobPaths) -> list[_LocatedRun]:
    listed = store.list_dir(paths.journal)
    found: dict[str, _LocatedRun] = {}
    for path in archives_of(info.path for info in listed.objects):
        from arroyo_dagster.state.codec.journal import archived_runs

        for one in archived_runs(store.read(path), path):
            run = run_from_plan(one.name, one.plan.encode(), path, ended=True)
            found.setdefault(one.name, _LocatedRun(run, path))
    # The directory of an archived run may not have been deleted yet.
    own = [path for path in listed.prefixes if path.name not in found]
    others = concurrently(lambda path: read_run(store, path), own)
    found.update((run.name, _LocatedRun(run)) for run in others if run is not None)
    return [found[name] for name in sorted(found)]


def archives_of(objects: Iterable[StatePath]) -> list[StatePath]:
    """Return the archives among the objects of a journal, in order of their names."""
    return sorted(path for path in objects if path.name.endswith(ARCHIVE))


def read_run(store: ObjectStore, directory: StatePath) -> JournalRun | None:
    path = directory / PLAN
    try:
        data = store.read(path)
    except NotFoundError:
        return None
    ended = store.head(directory / END) is not None
    return run_from_plan(directory.name, data, path, ended=ended)


def run_from_plan(name: str, data: bytes, path: StatePath, *, ended: bool) -> JournalRun:
    with known_fields(data, path) as fields:
        return JournalRun(
            name=name,
            owner=fields.text("owner"),
            begun_at_micros=fields.number("begun_at_micros"),
            kind=fields.text("kind"),
            plan=fields.text("plan"),
            objects=fields.number("objects"),
            size_bytes=fields.number("size_bytes"),
            quarantine=fields.optional_text("quarantine"),
            ended=ended,
        )


def read_journal(
    store: ObjectStore, paths: JobPaths, run: str | None = None
) -> Iterator[JournalEntry]:
    """Yield the outcome for every object of each plan, run by run, oldest first.

    Args:
        run: only of this run; None = all.

    Raises:
        FormatError: a part of the journal does not decode.
    """
    wanted = [one for one in _found(store, paths) if run is None or one.run.name == run]
    for archive, runs in itertools.groupby(wanted, lambda one: one.archive):
        if archive is None:
            for one in runs:
                yield from _entries(one.run, _lines(store, paths.journal / one.run.name))
            continue
        names = {one.run.name: one.run for one in runs}
        from arroyo_dagster.state.codec.journal import archived_runs

        for archived in archived_runs(store.read(archive), archive):
            if archived.name in names:
                yield from _entries(names[archived.name], archived.lines)


def _entries(run: JournalRun, lines: Iterable[Line]) -> Iterator[JournalEntry]:
    return (entry_of(run, line) for line in lines)


def entry_of(run: JournalRun, line: Line) -> JournalEntry:
    """Return the entry for a line of a run.

    Raises:
        FormatError: the line contains no valid path.
    """
    at_micros, name, size, etag, outcome = line
    try:
        path = StatePath(name)
    except InputError as error:
        raise FormatError(
            f"a line of the journal contains no path: {error}", run=run.name
        ) from error
    return JournalEntry(
        run=run.name,
        owner=run.owner,
        at_micros=at_micros,
        kind=run.kind,
        plan=run.plan,
        path=path,
        size_bytes=size,
        etag=etag,
        outcome=str(outcome),
    )


def _lines(store: ObjectStore, directory: StatePath) -> Iterator[Line]:
    for number, data in batches_by_name(store, directory):
        at_micros, lines, _ = decode_batch(data, directory / batch_name(number))
        for name, size, etag, outcome in lines:
            yield at_micros, name, size, etag, outcome
