"""A record of this package whose form this release does not read is never skipped: whatever deletes
or changes the job refuses before anything is changed, and names the object; `verify` names it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from arroyo_dagster.engine import Pipeline, request_stop, run_pipeline
from arroyo_dagster.errors import ArroyoStateError, FormatError
from arroyo_dagster.state import (
    ArroyoControl,
    CompactionPolicy,
    CompactionSettings,
    Epoch,
    GcOptions,
    JobPaths,
    Layout,
    MemoryStore,
    ObjectStore,
    OperatorId,
    RewriteOptions,
    StatePath,
    TableName,
    WindowOptions,
    pin_epoch,
    plan_rollback,
    run_compaction,
    run_gc,
    run_rewrite,
    run_rollback,
    run_undo,
    run_window,
    unpin_epochs,
    verify_job,
)
from arroyo_dagster.state.model.layout import MAINTENANCE_NAMES
from arroyo_dagster.state.operations.surgery.copy_job import CopyOptions, run_copy
from arroyo_dagster.state.planning.verify.findings import Severity
from tests.arroyo_jobs import SECOND, stopped
from tests.arroyo_server import ModelArroyo, arroyo
from tests.faulty_stores import Crash
from tests.formats import KeyDeletion, SetEntry, SetWatermark
from tests.gc_jobs import DAY, Clock, dead, directory, expiry, orphans
from tests.internals import (
    EditOptions,
    StateSource,
    UndeleteOptions,
    purge,
    read_pins,
    run_edit,
    run_fork,
    run_managed_edit,
    run_managed_undo,
    run_rebuild,
    run_undelete,
)
from tests.jobs import copied, word_job, written_by_word_job
from tests.stores import MUTATING, Wrapper
from tests.surgery_jobs import WATERMARK, SurgeryJob, surgery_job

pytestmark = pytest.mark.usefixtures("one_at_a_time")

T = TypeVar("T")
FULL = CompactionSettings(policy=CompactionPolicy.FULL)
AT_ONCE = EditOptions(quiet_seconds=0, sleep=lambda _: None)
KINDS = {
    "pins": r"retained\.json",
    "removal of a dead job": r"removal\.json",
    "window": r"window\.json",
    "stop request": r"stop-request\.json",
    "copy": r"copy\.json",
    "lease": r"leases/\d+\.json",
    "newest lease": r"leases/newest\.json",
    "lease of a writer": r"writers/\d+\.json",
    "newest lease of a writer": r"writers/newest\.json",
    "lease of a window": r"windows/\d+\.json",
    "newest lease of a window": r"windows/newest\.json",
    "compaction": r"compactions/.*",
    "rewrite": r"changes/.*-compaction\.json",
    "edit": r"changes/.*-edit\.json",
    "rebuild": r"changes/.*-rebuild\.json",
    "commit note": r"commits/.*",
    "quarantine": r"quarantine/[^/]+/index\.json",
    "part of a quarantine": r"quarantine/[^/]+/part-.*",
    "journal": r"journal/[^/]+\.gz",
}
"""Every kind of record, with the pattern of its place below the job's own records."""

STAGED = {"topics", "stdin", "landed", "spark", "spark-sinks"}
"""Directories of rows that a job stages for itself: no records."""

NEW = {
    "object of a later release": "snapshots.json",
    "directory of a later release": "snapshots/0000001.json",
    "name of a later release": "changes/0000001.parquet",
}
DAMAGES: Mapping[str, Callable[[bytes], bytes]] = {
    "version": lambda data: json.dumps({**json.loads(data), "version": 99}).encode(),
    "no JSON": lambda data: b"\x00\xffPAR1",
    "empty": lambda data: b"",
    "another kind": lambda data: b'{"version":1,"snapshots":[]}',
}
ONLY_DELETES = ("part of a quarantine", "journal")
"""Kinds of which a job has as many as objects or runs: only what deletes, and writes the journal,
uses and reads them."""

DELETES = {"expire", "orphans", "undelete", "purge"}


class Killed(Wrapper):
    """A store whose process is killed right behind the first change of such a path."""

    def __init__(self, store: ObjectStore, pattern: str) -> None:
        super().__init__(store)
        self.pattern = pattern
        self.dead = False

    def _call(self, verb: str, path: str, action: Callable[[], T], data: bytes = b"") -> T:
        if self.dead:
            raise Crash(path)
        done = action()
        if verb in MUTATING and re.search(f"_arroyo_dagster/{self.pattern}$", path):
            self.dead = True
            raise Crash(path)
        return done


def job(store: ObjectStore, layout: Layout) -> Pipeline:
    made = word_job(store, **JOB)
    made.layout = layout
    return made


JOB: dict[str, Any] = {
    "rows": 40,
    "rows_per_epoch": 2,
    "keep_epochs": None,
    "merge_files_after": 99,
}
KEY = KeyDeletion(values=("g",))
ENTRY = SetEntry(operator=OperatorId("count"), table=TableName("counts"), key='"b"', value="9")


@dataclass(frozen=True)
class Managed:
    """A managed job with records of its own, and what changes it."""

    layout: Layout

    @functools.cached_property
    def paths(self) -> JobPaths:
        return job(MemoryStore(), self.layout).paths

    @functools.cached_property
    def store(self) -> MemoryStore:
        options = {**JOB, "max_epochs": 16, "layout": self.layout}
        clock = Clock()
        clock.days(-40)
        store = copied(written_by_word_job(**options), clock=clock)
        pin_epoch(store, self.paths, Epoch(14), clock=clock, sleep=lambda _: None)
        run_gc(store, self.paths, expiry(4), GcOptions(quarantine=True, clock=clock))
        run_managed_edit(store, self.paths, directory(), ENTRY, AT_ONCE)
        request_stop(store, self.paths, clock())
        return copied(store)

    @property
    def actions(self) -> dict[str, Callable[[ObjectStore], object]]:
        paths = self.paths
        found: dict[str, Callable[[ObjectStore], object]] = {
            "expire": lambda store: run_gc(store, paths, expiry(2)),
            "orphans": lambda store: run_gc(store, paths, orphans()),
            "undelete": lambda store: run_undelete(
                store, paths, *read_pins(self.store, paths).quarantines, options=UndeleteOptions()
            ),
            "purge": lambda store: purge(store, paths, older_than_micros=DAY, yes=True),
            "edit": lambda store: run_managed_edit(store, paths, directory(), KEY, AT_ONCE),
            "rollback": lambda store: run_rollback(store, plan_rollback(store, paths, 15)),
            "undo": lambda store: run_managed_undo(store, paths, directory(), AT_ONCE),
            "run": lambda store: run_pipeline(job(store, self.layout), store, max_epochs=1),
            "pin": lambda store: pin_epoch(store, paths, Epoch(15), sleep=lambda _: None),
            "unpin": lambda store: unpin_epochs(store, paths, [Epoch(14)]),
            "copy": lambda store: run_copy(store, paths, elsewhere(), None, QUICK_COPY),
        }
        if self.layout is Layout.PROTOCOL:
            found["compact"] = lambda store: run_compaction(store, paths, FULL)
        return found


QUICK_COPY = CopyOptions(sleep=lambda _: None)
_NAMES = itertools.count()


def elsewhere() -> MemoryStore:
    """A store with a URL of its own."""
    return MemoryStore(f"unknown-records-{next(_NAMES)}")


@dataclass(frozen=True)
class OfArroyo:
    """A stopped Arroyo job that was edited, and what changes it."""

    layout: Layout

    @functools.cached_property
    def _job(self) -> SurgeryJob:
        return surgery_job(self.layout, epochs=4)

    @functools.cached_property
    def _source(self) -> StateSource:
        other = surgery_job(self.layout, epochs=2, name="job_other")
        return StateSource(store=other.store, paths=other.paths, epoch=None)

    @property
    def paths(self) -> JobPaths:
        return self._job.paths

    @functools.cached_property
    def store(self) -> MemoryStore:
        earlier = SetWatermark(at_micros=WATERMARK - SECOND)
        run_edit(self._job.store, self.paths, stopped(self.paths), earlier, AT_ONCE)
        return self._job.store

    @property
    def actions(self) -> dict[str, Callable[[ObjectStore], object]]:
        paths, known = self.paths, stopped(self.paths)
        said = {str(paths.root): "stopped"}
        edit = KeyDeletion(values=("k2",))
        at_once = RewriteOptions(quiet_seconds=0)
        return {
            "expire": lambda store: run_gc(store, paths, expiry(2, **said)),
            "orphans": lambda store: run_gc(store, paths, orphans(**said)),
            "compact": lambda store: run_rewrite(store, paths, known, FULL, at_once),
            "edit": lambda store: run_edit(store, paths, known, edit, AT_ONCE),
            "fork": lambda store: run_fork(self._source, store, paths, known, AT_ONCE),
            "undo": lambda store: run_undo(store, paths, known),
        }


@dataclass(frozen=True)
class Damaged:
    """A stopped Arroyo job of which metadata is missing."""

    layout: Layout

    @functools.cached_property
    def _job(self) -> SurgeryJob:
        return surgery_job(self.layout, epochs=3, sink_files=2)

    @property
    def paths(self) -> JobPaths:
        return self._job.paths

    @functools.cached_property
    def store(self) -> MemoryStore:
        missing = self.paths.operator_metadata(OperatorId("window_3"), Epoch(3))
        self._job.store.delete_many([missing])
        return self._job.store

    @property
    def actions(self) -> dict[str, Callable[[ObjectStore], object]]:
        paths, known = self.paths, stopped(self.paths)
        return {"rebuild": lambda store: run_rebuild(store, paths, known, options=AT_ONCE)}


JOBS: Mapping[str, Managed | OfArroyo | Damaged] = {
    "managed": Managed(Layout.PROTOCOL),
    "managed-legacy": Managed(Layout.LEGACY),
    "arroyo": OfArroyo(Layout.PROTOCOL),
    "arroyo-legacy": OfArroyo(Layout.LEGACY),
    "arroyo-damaged": Damaged(Layout.LEGACY),
}
EACH_JOB = pytest.mark.parametrize("target", JOBS)
EACH_KIND = pytest.mark.parametrize("kind", [*KINDS, *NEW])


def own(store: ObjectStore, paths: JobPaths) -> Iterator[tuple[str, bytes]]:
    """The records of a job, by their place below it."""
    for info in store.list(paths.maintenance):
        yield info.path.removeprefix(f"{paths.maintenance}/"), store.read(info.path)


@functools.cache
def written() -> dict[str, dict[str, bytes]]:
    """Records of every kind, by kind and place, as the product writes them."""
    found: dict[str, bytes] = {}
    for one in JOBS.values():
        found.update(own(one.store, one.paths))
    for kind, act in {
        "compaction": _compacted,
        "copy": _half_copied,
        "rewrite": _rewritten,
        "rebuild": _rebuilt,
        "window": _window,
        "removal of a dead job": _half_removed,
    }.items():
        store, paths = act(KINDS[kind])
        found.update(own(store, paths))
    kinds = {
        kind: {place: data for place, data in found.items() if re.fullmatch(pattern, place)}
        for kind, pattern in KINDS.items()
    }
    assert [kind for kind, places in kinds.items() if not places] == []
    return kinds


def _compacted(pattern: str) -> tuple[ObjectStore, JobPaths]:
    store = copied(written_by_word_job(max_epochs=8, killed=True, **JOB))
    run_compaction(store, JOBS["managed"].paths, FULL)
    return store, JOBS["managed"].paths


def _half_copied(pattern: str) -> tuple[ObjectStore, JobPaths]:
    target, copy = JOBS["managed"], elsewhere()
    with contextlib.suppress(Crash):
        run_copy(copied(target.store), target.paths, Killed(copy, pattern), None, QUICK_COPY)
    return copy, target.paths


def _rewritten(pattern: str) -> tuple[ObjectStore, JobPaths]:
    made = surgery_job(Layout.LEGACY, epochs=4)
    run_rewrite(made.store, made.paths, stopped(made.paths), FULL, RewriteOptions(quiet_seconds=0))
    return made.store, made.paths


def _rebuilt(pattern: str) -> tuple[ObjectStore, JobPaths]:
    target = JOBS["arroyo-damaged"]
    store = copied(target.store)
    target.actions["rebuild"](store)
    return store, target.paths


def _window(pattern: str) -> tuple[ObjectStore, JobPaths]:

    model = ModelArroyo(surgery_job(Layout.LEGACY, epochs=4))
    chosen = WindowOptions(settings=FULL, clock=lambda: model.now_micros, sleep=model.sleep)
    with arroyo(model) as server, contextlib.suppress(Crash):
        control = ArroyoControl(server.url)
        run_window(Killed(model.job.store, pattern), model.job.paths, control, chosen)
    return model.job.store, model.job.paths


def _half_removed(pattern: str) -> tuple[ObjectStore, JobPaths]:
    target = JOBS["managed"]
    clock = Clock()
    store = copied(target.store, clock=clock)
    unpin_epochs(store, target.paths, [Epoch(14), Epoch(16)], clock=clock)
    clock.days(400)
    with contextlib.suppress(Crash):
        run_gc(
            Killed(store, pattern),
            target.paths,
            dead(**{str(target.paths.root): "gone"}),
            GcOptions(clock=clock),
        )
    return store, target.paths


def place(store: ObjectStore, paths: JobPaths, kind: str, damage: str) -> StatePath:
    """Put a record of a form that no release has written where the job has one."""
    if kind in NEW:
        path = paths.maintenance / NEW[kind]
        store.put(path, b'{"version":1}')
        return path.parent if "directory" in kind and path.parent else path
    here = [name for name, _ in own(store, paths) if re.fullmatch(KINDS[kind], name)]
    name, data = sorted(written()[kind].items())[-1]
    name = max(here, default=name)
    path = paths.maintenance / name
    if kind == "part of a quarantine" and not here:  # its index says that it exists
        index = f"{name.rpartition('/')[0]}/index.json"
        store.put(paths.maintenance / index, written()["quarantine"][index])
    store.put(path, DAMAGES[damage](data) if kind != "journal" else b"no gzip")
    return path


def objects(store: ObjectStore) -> dict[StatePath, bytes]:
    """All objects but leases, which a refused action takes and gives back."""
    return {
        info.path: store.read(info.path)
        for info in store.list()
        if not re.search(r"_arroyo_dagster/(leases|writers|windows)/", info.path)
    }


def acted(target: str, action: str, store: ObjectStore) -> ArroyoStateError | None:
    """Do it, and return the error."""
    try:
        JOBS[target].actions[action](store)
    except ArroyoStateError as error:
        return error
    return None


ACTIONS = [(target, action) for target, one in JOBS.items() for action in one.actions]


def test_the_table_names_every_name_that_this_package_writes() -> None:
    heads = {re.split(r"[/\\]", pattern.replace(r"\.", "."))[0] for pattern in KINDS.values()}
    assert heads | STAGED == MAINTENANCE_NAMES
    assert all(written().values())


@pytest.mark.parametrize(("target", "action"), ACTIONS)
def test_each_action_is_possible_while_the_records_are_known(target: str, action: str) -> None:
    error = acted(target, action, copied(JOBS[target].store))
    assert not isinstance(error, FormatError), error
    assert error is None


def depends(action: str, kind: str) -> bool:
    """Whether an action may depend on records of a kind, so that it has to refuse."""
    return action in DELETES or kind not in ONLY_DELETES


@EACH_KIND
@EACH_JOB
def test_what_changes_the_job_refuses_and_names_the_record(target: str, kind: str) -> None:
    paths = JOBS[target].paths
    store = copied(JOBS[target].store)
    path = place(store, paths, kind, "version")
    before = objects(store)
    for action in JOBS[target].actions:
        if depends(action, kind):
            error = acted(target, action, store)
            assert isinstance(error, FormatError), (action, error)
            assert str(path) in str(error), action
            assert error.next_step
            assert objects(store) == before, action


@pytest.mark.parametrize("kind", ONLY_DELETES)
def test_what_deletes_nothing_leaves_alone_what_it_does_not_depend_on(kind: str) -> None:
    paths = JOBS["managed"].paths
    for action in JOBS["managed"].actions:
        if not depends(action, kind):
            store = copied(JOBS["managed"].store)
            path = place(store, paths, kind, "version")
            was = store.read(path)
            assert acted("managed", action, store) is None
            assert store.read(path) == was


@EACH_KIND
@pytest.mark.parametrize("damage", list(DAMAGES)[1:])
def test_a_record_of_another_form_is_refused_as_well(kind: str, damage: str) -> None:
    store, paths = copied(JOBS["managed"].store), JOBS["managed"].paths
    path = place(store, paths, kind, damage)
    before = objects(store)
    error = acted("managed", "expire", store)
    assert isinstance(error, FormatError)
    assert str(path) in str(error)
    assert objects(store) == before


@EACH_KIND
@pytest.mark.parametrize("target", [name for name in JOBS if name != "arroyo-damaged"])
def test_verify_names_the_record(target: str, kind: str) -> None:
    store, paths = copied(JOBS[target].store), JOBS[target].paths
    assert verify_job(store, paths).passed
    path = place(store, paths, kind, "version")
    named = [one for one in verify_job(store, paths).verdict.findings if one.object == path]
    blocks = target.startswith("managed") and kind not in ONLY_DELETES
    assert (Severity.ERROR in {one.severity for one in named}) == blocks
    assert named
    assert all(one.next_step for one in named)
