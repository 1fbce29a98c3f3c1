"""Fate of an object: whether it exists and why, or which run deleted or moved it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from arroyo_dagster.errors import ArroyoStateError, FormatError, InputError, StorageError
from arroyo_dagster.state.codec.derived import encode_json
from arroyo_dagster.state.codec.journal import decode_batch, decode_records
from arroyo_dagster.state.model.garbage import Moved, Quarantined
from arroyo_dagster.state.model.ids import JobId, PipelineId, StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.operations.catalog.jobs import list_jobs
from arroyo_dagster.state.operations.gc.explain import Explained, explain_object, job_of_path
from arroyo_dagster.state.operations.gc.journal import (
    GONE,
    UNKNOWN,
    JournalEntry,
    StoredRun,
    entry_of,
    load_runs,
    stored_runs,
)
from arroyo_dagster.state.operations.gc.plan import GcRequest
from arroyo_dagster.state.operations.gc.quarantine import find_copy
from arroyo_dagster.state.operations.gc.root_reader import Reader
from arroyo_dagster.state.storage.names import decode_path
from arroyo_dagster.state.storage.store import ObjectInfo, ObjectStore

MOVED, BACK, DELETED = "moved", "back", "deleted"


class FateState(Enum):
    """The fate of an object; the value describes it."""

    PRESENT = "it is there"
    UNDELETED = "it is there: it was brought back from quarantine"
    DELETED = "it was deleted"
    QUARANTINED = "it is in quarantine"
    PURGED = "it was moved to quarantine, and purged from there"
    IN_PROGRESS = "a run that has not ended was to delete it"
    LOST = "it is not there, and the journal does not say who deleted it"
    NEVER_LISTED = "it is not there, and no run of gc has listed it"


@dataclass(frozen=True, slots=True, kw_only=True)
class FateEvent:
    """The action of one run on the object.

    Attributes:
        quarantine: the quarantine to which the run moved objects, or from which it restored them.
    """

    entry: JournalEntry
    quarantine: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """The fate of one object.

    Attributes:
        events: the actions of runs on it, oldest first.
        info: the object in the store; None if it does not exist.
        explained: why it is kept or may be deleted; None if it does not exist or `unexplained` is
            set.
        unexplained: why that could not be determined.
        quarantine, copy: from which it can be restored.
        purged: the journal entry of one copy in the run that purged the quarantine.
        unreadable: parts of the journal that do not decode; the answer may lack their entries.
    """

    path: StatePath
    paths: JobPaths
    state: FateState
    events: tuple[FateEvent, ...]
    info: ObjectInfo | None = None
    explained: Explained | None = None
    unexplained: str | None = None
    quarantine: Quarantined | None = None
    copy: Moved | None = None
    purged: JournalEntry | None = None
    unreadable: tuple[StatePath, ...] = ()


@dataclass(slots=True, kw_only=True)
class FateCount:
    """How many objects below a directory had the same outcome.

    Attributes:
        first_micros, last_micros: the times of the first and the last of them.
    """

    objects: int = 0
    size_bytes: int = 0
    first_micros: int | None = None
    last_micros: int | None = None

    def add(self, entry: JournalEntry) -> None:
        self.objects += 1
        self.size_bytes += entry.size_bytes or 0
        self.first_micros = min(self.first_micros or entry.at_micros, entry.at_micros)
        self.last_micros = max(self.last_micros or entry.at_micros, entry.at_micros)


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryFate:
    """The fates of the objects below a directory.

    Attributes:
        counts: by outcome (its first word) and kind of run. An object counts once for each run.
        present, present_bytes: the objects that exist now.
        unreadable: as in `Fate`.
    """

    prefix: str
    paths: JobPaths
    counts: dict[tuple[str, str], FateCount]
    present: int
    present_bytes: int
    unreadable: tuple[StatePath, ...] = ()


def job_of_object(store: ObjectStore, path: str) -> JobPaths:
    """Return the job that contains a path; also a deleted job of which the journal still exists.

    Raises:
        InputError: no job contains it.
    """
    first, _, rest = path.partition("/")
    second = rest.partition("/")[0]
    candidates = [JobPaths(JobId(first))] if first else []
    if second:
        candidates.append(JobPaths(JobId(second), PipelineId(first)))
    for paths in candidates:
        if store.list_dir(paths.maintenance).prefixes:
            return paths
    return job_of_path(list_jobs(store), path)


def fate_of_object(store: ObjectStore, paths: JobPaths, name: str, asked: GcRequest) -> Fate:
    """Determine the fate of one object of a job. Writes nothing.

    Args:
        name: its path, as metadata or the store spells it.
        asked: for `explain_object`, if the object exists.

    Raises:
        InputError: the name is not a path.
        FormatError, ProtocolError: the index of a quarantine is missing or does not decode.
    """
    names = [StatePath(name)]
    decoded = decode_path(name)
    names += [decoded] if decoded not in (None, names[0]) else []
    search = _Search.of_paths(names)
    events = sorted(_events(store, paths, search), key=lambda event: event.entry.run)
    heads = ((path, store.head(path)) for path in names)
    path, info = next(((p, i) for p, i in heads if i is not None), (names[0], None))
    if info is None and events:
        path = events[-1].entry.path
    fate = _known(store, paths, path, tuple(events), tuple(search.unreadable))
    if info is None:
        return fate
    back = bool(events) and events[-1].entry.outcome == BACK
    explained, unexplained = _explained(store, paths, path, asked)
    return Fate(
        path=path,
        paths=paths,
        state=FateState.UNDELETED if back else FateState.PRESENT,
        events=fate.events,
        info=info,
        explained=explained,
        unexplained=unexplained,
        unreadable=fate.unreadable,
    )


def _explained(
    store: ObjectStore, paths: JobPaths, path: StatePath, asked: GcRequest
) -> tuple[Explained | None, str | None]:
    try:
        return explain_object(store, paths, path, asked), None
    except StorageError:
        raise
    except ArroyoStateError as error:
        return None, error.message


def _known(
    store: ObjectStore,
    paths: JobPaths,
    path: StatePath,
    events: tuple[FateEvent, ...],
    unreadable: tuple[StatePath, ...],
) -> Fate:
    """Return what the journal and the quarantine record about an object that does not exist."""
    state, last = FateState.NEVER_LISTED, events[-1] if events else None
    quarantine, copy, purged = None, None, None
    if last is not None:
        outcome = last.entry.outcome
        if last.quarantine is not None and outcome in (MOVED, GONE, UNKNOWN):
            _, kept = Reader(store, paths).pins_in_full()
            quarantine = next((item for item in kept if item.name == last.quarantine), None)
            copy = None if quarantine is None else find_copy(store, paths, quarantine, path)
        if copy is not None:
            state = FateState.QUARANTINED
        elif outcome == MOVED:
            purged = _purge_of(store, paths, last.quarantine)
            state = FateState.LOST if purged is None else FateState.PURGED
        elif outcome in (DELETED, GONE):
            state = FateState.DELETED
        else:
            state = FateState.IN_PROGRESS if outcome == UNKNOWN else FateState.LOST
    return Fate(
        path=path,
        paths=paths,
        state=state,
        events=events,
        quarantine=quarantine if copy is not None else None,
        copy=copy,
        purged=purged,
        unreadable=unreadable,
    )


def _purge_of(store: ObjectStore, paths: JobPaths, quarantine: str | None) -> JournalEntry | None:
    """Return the purge's journal entry of the first copy in a quarantine."""
    if quarantine is None:
        return None
    copies = _Search.below(StatePath(paths.quarantine / quarantine))
    return next(
        (item.entry for item in _events(store, paths, copies) if item.entry.kind == "purge"), None
    )


def fate_of_directory(store: ObjectStore, paths: JobPaths, prefix: str) -> DirectoryFate:
    """Count the fates of the objects below a directory of a job.

    Args:
        prefix: whole segments; the job's root for all objects.
    """
    below = StatePath(prefix.rstrip("/"))
    search = _Search.below(below)
    counts: dict[tuple[str, str], FateCount] = {}
    for event in _events(store, paths, search):
        key = event.entry.outcome.partition(":")[0], event.entry.kind
        counts.setdefault(key, FateCount()).add(event.entry)
    present, size = 0, 0
    for info in store.list(below):
        present, size = present + 1, size + info.size_bytes
    return DirectoryFate(
        prefix=f"{below}/",
        paths=paths,
        counts=dict(sorted(counts.items())),
        present=present,
        present_bytes=size,
        unreadable=tuple(search.unreadable),
    )


# ---- the journal ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """The paths to search for in the journal.

    Attributes:
        needles: a batch that contains none of these bytes contains no wanted path.
        unreadable: records that do not decode.
    """

    wants: Callable[[str], bool]
    needles: tuple[bytes, ...]
    unreadable: list[StatePath] = field(default_factory=list)

    @classmethod
    def of_paths(cls, paths: list[StatePath]) -> _Search:
        texts = [str(path) for path in paths]
        needles = tuple(encode_json(text) for text in texts)
        return cls(wants=frozenset(texts).__contains__, needles=needles)

    @classmethod
    def below(cls, directory: StatePath) -> _Search:
        prefix = f"{directory}/"
        return cls(wants=lambda path: path.startswith(prefix), needles=(encode_json(prefix)[:-1],))


def _events(store: ObjectStore, paths: JobPaths, search: _Search) -> Iterator[FateEvent]:
    runs = stored_runs(store, paths)
    search.unreadable.extend(runs.unknown)
    for run in load_runs(store, paths, runs.names):
        yield from _events_of_run(run, search)


def _events_of_run(run: StoredRun, search: _Search) -> Iterator[FateEvent]:
    try:
        facts = run.facts()
    except FormatError:
        search.unreadable.append(run.objects[0][0])
        return
    for path, data in run.objects:
        try:
            for text in decode_records(data, path):
                if not any(needle in text for needle in search.needles):
                    continue
                for line in decode_batch(text, path):
                    if search.wants(line[1]):
                        yield FateEvent(entry=entry_of(facts, line), quarantine=facts.quarantine)
        except FormatError:
            search.unreadable.append(path)


def path_of_object(name: str, url: str, job: JobPaths | None) -> str:
    """Return the path below the store's URL, given a full URL, a path below it, or one relative to
    the job.

    Raises:
        InputError: the path is empty.
    """
    path = name.removeprefix(f"{url.rstrip('/')}/")
    if job is not None and not f"{path}/".startswith(f"{job.root}/"):
        path = f"{job.root}/{path}"
    if not path.strip("/"):
        raise InputError("give the path of an object", path=name)
    return path
