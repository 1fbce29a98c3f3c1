"""The product's own programs, made to run in a `World`: writer, compaction, collectors, pins.

The code is the product's. What is replaced: threads (calls that it makes at once come one after the
other, in an order that the seed chooses), time, random names, and the content of data files, which
nobody reads here.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import types
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pyarrow as pa

from arroyo_dagster.engine import Pipeline
from arroyo_dagster.engine.start_checks import StartChecks
from arroyo_dagster.errors import ArroyoStateError, FormatError, NotFoundError
from arroyo_dagster.state import (
    Checkpoint,
    CompactionOptions,
    CompactionPolicy,
    CompactionSettings,
    Epoch,
    GcOptions,
    GcRequest,
    JobPaths,
    Layout,
    OperatorCheckpoint,
    OperatorId,
    PlanKind,
    Retention,
    RewriteOptions,
    StatePath,
    UndoOptions,
    global_table_config,
    list_jobs,
    pin_epoch,
    plan_gc,
    plan_rollback,
    run_compaction,
    run_gc,
    run_rewrite,
    run_rollback,
    run_undo,
    timestamp_table_config,
    unpin_epochs,
)
from arroyo_dagster.state.metadata import expiry as expiry_module
from arroyo_dagster.state.metadata import lease as lease_module
from arroyo_dagster.state.metadata import restorable as restorable_module
from arroyo_dagster.state.model import clock as clock_module
from arroyo_dagster.state.model.checkpoints import ExpiringTimeKeyReport, GlobalKeyedReport
from arroyo_dagster.state.model.compaction import PairsMerge
from arroyo_dagster.state.operations.compaction import publish as publish_module
from arroyo_dagster.state.operations.gc import quarantine as quarantine_module
from arroyo_dagster.state.operations.restore import revision as revision_module
from arroyo_dagster.state.operations.restore import rollback as rollback_module
from arroyo_dagster.state.operations.surgery import carried_files as carried_module
from arroyo_dagster.state.operations.surgery.rebuild import execute as rebuild_module
from arroyo_dagster.state.operations.surgery.rebuild.protocol import ReadableObjects
from arroyo_dagster.state.planning.restore import partially_collected as collected_module
from arroyo_dagster.state.planning.restore.checkpoint import cutoff_micros
from arroyo_dagster.state.storage import concurrency, conditional_create
from arroyo_dagster.state.tables.merge import rewrite as rewriting_module
from arroyo_dagster.state.tables.merge import task as merging_module
from tests.explorer.oracle import LEGACY_HEAD, RECORD, Watch
from tests.explorer.remembering import remembering
from tests.explorer.rows import (
    KEYS,
    encoded,
    is_old,
    key_of,
    keys_of,
    replaced_rows,
    rewritten,
    row,
)
from tests.explorer.rows import merged as merged_rows
from tests.explorer.truth import Edited, Row
from tests.explorer.world import HOUR, SECOND, Hands, Process, Violation, World, refused
from tests.faulty_stores import Crash
from tests.formats import (
    GRACE_FLOOR_MICROS,
    MAX_ROUTING_KEY,
    Absence,
    Edit,
    ExpiringTimeKeyFiles,
    KeyDeletion,
    MergedPairs,
    MergedRows,
    MergeOutcome,
    NewPosition,
    RetainRows,
    RunProgress,
    SetEntry,
    SetOffsets,
    SourceAnswer,
    SubtaskCheckpoint,
    TimeFile,
)
from tests.internals import (
    AssumedJobs,
    EditOptions,
    JobDirectory,
    JobRun,
    Pace,
    StateSource,
    UndeleteOptions,
    plan_fork,
    plan_job_rollback,
    plan_managed_undo,
    purge,
    read_pins,
    run_edit,
    run_fork,
    run_job_rollback,
    run_managed_edit,
    run_managed_undo,
    run_rebuild,
    run_undelete,
)

SOURCE, OPERATOR = OperatorId("src"), OperatorId("op")
STEP, RETENTION = 10, 25
ROWS = pa.schema([("key", pa.string()), pa.field("_timestamp", pa.timestamp("ns"), nullable=False)])
QUICK = CompactionSettings(policy=CompactionPolicy.FULL, min_files=2)


# ---- the machinery of the process, replaced ------------------------------------------------------


class _Pool:
    """Calls made at once come one after the other, in any order."""

    world: World | None = None

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def map(self, call: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        order = list(range(len(items)))
        assert self.world is not None
        if len(items) < 12:
            self.world.chance.shuffle(order)
        found: dict[int, Any] = {}
        failed: dict[int, BaseException] = {}
        for at in order:
            try:
                found[at] = call(items[at])
            except Exception as error:
                failed[at] = error
        if failed:
            raise failed[min(failed)]
        return [found[at] for at in range(len(items))]

    def submit(self, call: Callable[..., Any], *given: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(call(*given))
        except Exception as error:
            done.set_exception(error)
        return done


class _Event:
    def __init__(self) -> None:
        self.rounds = 0
        _Thread.newest = self

    def wait(self, seconds: float | None = None) -> bool:
        self.rounds -= 1
        return self.rounds < 0

    def set(self) -> None:
        pass


class _Thread:
    """A lease's renewals: they come when the world lets time go by, or not at all."""

    newest: _Event

    def __init__(self, target: Callable[[], None], **_: Any) -> None:
        assert _Pool.world is not None
        self._process = _Pool.world.current
        self._target, self._event = target, self.newest

    def _renew(self) -> None:
        self._event.rounds = 1
        self._target()

    def start(self) -> None:
        if self._process is not None:
            self._process.renewals.append(self._renew)

    def join(self) -> None:
        if self._process is not None:
            self._process.renewals.remove(self._renew)


def _uuid() -> uuid.UUID:
    assert _Pool.world is not None
    return uuid.UUID(int=_Pool.world.chance.getrandbits(128))


def _clock_of(world: World, process: Process) -> Callable[[], int]:
    """The clock of a host, for who maintains a job: the product's own, where it has one by which
    alone it tells that it may count time by a clock that nobody sets."""
    return getattr(lease_module, "wall_clock", world.clock_of(process))


def _time_here(*, monotonic: bool = False) -> int:
    return _Pool.world.time_here(monotonic=monotonic) if _Pool.world else 0


def _process() -> str:
    """All processes of a world run in one: none of them is this one."""
    return "of nobody"


def _problem(store: Any, *listed: Any) -> NotFoundError | None:
    """Whether a data file is there: what it holds is nothing."""
    path = listed[-1]
    there = store.head(path) is not None
    return None if there else NotFoundError("a data file is missing", path=path)


@contextlib.contextmanager
def replaced_machinery() -> Iterator[None]:
    """While it lasts, threads, time and random names of the product are the world's."""
    names = types.SimpleNamespace(uuid4=_uuid)
    clock = types.SimpleNamespace(
        time_ns=lambda: _time_here() * 1000,
        time=lambda: _time_here() / SECOND,
        monotonic_ns=lambda: _time_here(monotonic=True) * 1000,
        monotonic=lambda: _time_here(monotonic=True) / SECOND,
    )
    threads = types.SimpleNamespace(Event=_Event, Thread=_Thread)
    with (
        mock.patch.object(concurrency, "ThreadPoolExecutor", _Pool),
        mock.patch.object(lease_module, "threading", threads),
        mock.patch.object(lease_module, "time", clock),
        mock.patch.object(clock_module, "time", clock),
        mock.patch.object(lease_module, "process_here", _process),
        mock.patch.object(lease_module, "uuid", names),
        mock.patch.object(conditional_create, "uuid", names),
        mock.patch.object(publish_module, "uuid", names),
        mock.patch.object(merging_module, "uuid", names),
        mock.patch.object(quarantine_module, "uuid", names),
        mock.patch.object(revision_module, "uuid", names),
        mock.patch.object(rewriting_module, "uuid", names),
        mock.patch.object(carried_module, "uuid", names),
        mock.patch.object(restorable_module, "file_error", _problem),
        mock.patch.object(rollback_module, "MAX_FOOTERS", -1),
        mock.patch.object(rebuild_module, "_VERIFY_LEVEL", 0),
        remembering(),
        replaced_rows(),
        contextlib.ExitStack() as stack,
    ):
        keeps = mock.patch.object(collected_module, "ARROYO_KEEPS_PROTOCOL", 3)
        stack.enter_context(keeps)  # as the model's Arroyo
        for one in vars(ReadableObjects).values():
            # One process must not wait for another one that holds the baton no more.
            if isinstance(one, functools.cached_property) and hasattr(one, "lock"):
                stack.enter_context(mock.patch.object(one, "lock", contextlib.nullcontext()))
        for module in (lease_module, expiry_module):
            ticks = functools.partial(_time_here, monotonic=True)
            stack.enter_context(mock.patch.object(module, "own_clock", ticks))
        yield


def inhabit(world: World) -> None:
    """Let the product's threads and names be those of this world."""
    _Pool.world = world


# ---- the job -------------------------------------------------------------------------------------


_KEYED = global_table_config("g", key=str, value=int)
_ROWS = timestamp_table_config("t", retention_micros=RETENTION, schema=ROWS, keys=["key"])
_COMMITS = global_table_config("s", key=str, value=int, two_phase_commit=True)
CONFIGS = {False: (_KEYED, _ROWS), True: (_KEYED, _ROWS, _COMMITS)}


@dataclass(frozen=True, slots=True)
class Job:
    """A job of ours: its paths, and how its runs are.

    Attributes:
        known: whether its metadata knows it by this name: else a start may be refused.
    """

    paths: JobPaths
    two_phase: bool = False
    keep_epochs: int | None = None
    known: bool = True

    def pipeline(self) -> Pipeline:
        legacy = self.paths.layout is Layout.LEGACY
        pipeline = Pipeline(
            self.paths.job if legacy else self.paths.pipeline or "",
            job="main" if legacy else self.paths.job,
            keep_epochs=self.keep_epochs,
            merge_files_after=10_000,
            layout=self.paths.layout,
        )
        # Only what the coordinator looks at: nothing runs, so nothing is planned.
        opaque = types.SimpleNamespace(check=lambda: None)
        pipeline.sources[SOURCE] = types.SimpleNamespace(source=opaque)  # type: ignore[assignment]
        nothing = types.SimpleNamespace(operator=types.SimpleNamespace(tables=tuple))
        pipeline.operators[OPERATOR] = nothing  # type: ignore[assignment]
        return pipeline


class OpaqueChecks(StartChecks):
    """The product's checks of a start, for data files that hold nothing."""

    def check_restorable(self, epoch: Epoch) -> None:
        self.backend.prepare_checkpoint_load(epoch)

    def settled(self, checkpoint: Checkpoint) -> Checkpoint:
        return checkpoint


class OpaqueRun(JobRun):
    """The product's coordinator, for data files that hold nothing."""

    start_checks = OpaqueChecks

    def _open_sources(self) -> dict[Any, Any]:
        return {}


def write_epochs(
    world: World, process: Process, job: Job, chance: random.Random, epochs: int
) -> str:
    """Start a run and write so many epochs."""
    hands = Hands(world, process)
    run: OpaqueRun | None = None
    surprising = process.fault_at is None and job.known
    try:
        run = OpaqueRun.start(hands, job.pipeline(), clock=world.clock_of(process))
        for left in reversed(range(epochs)):
            _write_epoch(hands, run, job, chance, last=not left)
    except ArroyoStateError as error:
        if isinstance(error, NotFoundError | FormatError) and surprising:
            raise Violation(f"{process.name}: {error}") from error
        return refused(error)
    finally:
        if run is not None:
            with contextlib.suppress(Crash, ArroyoStateError):
                run.close()
    return "done"


def _write_epoch(
    hands: Hands, run: OpaqueRun, job: Job, chance: random.Random, *, last: bool
) -> None:
    plan = run.plan(False)
    reports = [
        (SOURCE, _report(hands, run, job, SOURCE, 0, chance)),
        (OPERATOR, _report(hands, run, job, OPERATOR, 0, chance)),
    ]
    if chance.random() < 0.3:
        _, report = reports[1]
        mine = OperatorCheckpoint(
            job=job.paths.job,
            operator=OPERATOR,
            epoch=plan.epoch,
            parallelism=1,
            subtask=report,
            configs=report.configs,
        )
        run.backend.write_operator_checkpoint_metadata(mine, 0)
    progress = RunProgress(offsets="{}", final=last and chance.random() < 0.7)
    run.finish(plan, reports, {}, {}, progress)


def _report(
    hands: Hands, run: OpaqueRun, job: Job, name: OperatorId, subtask: int, chance: random.Random
) -> SubtaskCheckpoint:
    epoch, generation = run.next_epoch, run.generation
    configs = CONFIGS[job.two_phase] if name == OPERATOR else CONFIGS[False][:1]
    watermark = epoch * STEP

    def written(table: Any) -> StatePath:
        attempt = f"{chance.getrandbits(32):08x}"
        path = job.paths.data_file(name, table, subtask, epoch, generation, attempt=attempt)
        number = chance.getrandbits(32)
        key = keys_of(configs[[one.table for one in configs].index(table)])
        hands.put(path, encoded([row(key[number // 2 % len(key)], number)]))
        return path

    tables: dict[Any, Any] = {}
    for config in configs:
        if config.table == "t":
            before = run.base.operator(name) if run.base else None
            earlier = before.tables.get(config.table) if before else None
            files = earlier.files if isinstance(earlier, ExpiringTimeKeyFiles) else ()
            cutoff = cutoff_micros(watermark, RETENTION)
            kept = [file for file in files if file.max_timestamp_micros >= cutoff]
            if chance.random() < 0.8:
                kept.append(
                    TimeFile(
                        epoch=epoch,
                        path=written(config.table),
                        min_routing_key=0,
                        max_routing_key=MAX_ROUTING_KEY,
                        max_timestamp_micros=watermark,
                    )
                )
            tables[config.table] = ExpiringTimeKeyReport(
                watermark_micros=watermark, files=tuple(kept)
            )
        else:
            file = written(config.table) if chance.random() < 0.7 else None
            tables[config.table] = GlobalKeyedReport(file=file)
    return SubtaskCheckpoint(
        subtask_index=subtask,
        start_time_micros=run.backend.clock(),
        finish_time_micros=run.backend.clock(),
        watermark_micros=watermark,
        size_bytes=0,
        tables=tables,
        configs={config.table: config for config in configs},
    )


# ---- who maintains it ----------------------------------------------------------------------------


def compact(world: World, process: Process, job: Job) -> str:
    """The product's compaction."""

    def merge(store: Any, tasks: Sequence[Any], *_: Any) -> Iterable[MergeOutcome]:
        for task in tasks:
            names = task.namer(0)
            one = task.merge
            if isinstance(one, PairsMerge):
                path = names("-compacted")
                store.put(path, encoded(merged_rows(store, one.inputs)))
                merged: Any = MergedPairs(
                    operator=one.operator, table=one.table, inputs=one.inputs, outputs=(path,)
                )
            else:
                outputs = []
                for keys in one.ranges:
                    path = names("-compacted")
                    store.put(path, encoded(merged_rows(store, one.inputs)))
                    outputs.append(
                        TimeFile(
                            epoch=max(file.epoch for file in one.inputs),
                            path=path,
                            min_routing_key=keys.start,
                            max_routing_key=keys.end,
                            max_timestamp_micros=max(f.max_timestamp_micros for f in one.inputs),
                            compaction_generation=1,
                        )
                    )
                merged = MergedRows(
                    operator=one.operator,
                    table=one.table,
                    inputs=one.inputs,
                    outputs=tuple(outputs),
                )
            yield MergeOutcome(merged=merged, rows_in=1, rows_out=1)

    try:
        done = run_compaction(
            Hands(world, process),  # type: ignore[arg-type]
            job.paths,
            QUICK,
            CompactionOptions(run=merge, owner=process.name, clock=_clock_of(world, process)),
        )
    except ArroyoStateError as error:
        return refused(error)
    return done.published or "nothing"


def roll_back(world: World, process: Process, paths: JobPaths, epoch: int) -> str:
    """The product's rollback; rows are not counted, as data files hold nothing."""
    hands: Any = Hands(world, process)
    try:
        plan = plan_rollback(hands, paths, epoch)
        run_rollback(
            hands,
            plan,
            owner=process.name,
            clock=_clock_of(world, process),
            sleep=lambda seconds: world.wait(process, seconds),
        )
    except ArroyoStateError as error:
        world.note(f"{process.name}: {error}")
        return refused(error)
    return "rolled back"


def rewrite(world: World, process: Process, paths: JobPaths, controller: Any) -> str:
    """The product's rewrite of a stopped job of Arroyo's."""
    try:
        done = run_rewrite(
            Hands(world, process),  # type: ignore[arg-type]
            paths,
            directory(controller),
            QUICK,
            RewriteOptions(
                run=rewritten,
                owner=process.name,
                quiet_seconds=0,
                verify_level=0,
                clock=_clock_of(world, process),
            ),
        )
    except ArroyoStateError as error:
        world.note(f"{process.name}: {error}")
        return refused(error)
    return "rewritten" if done.published else "nothing"


def put_back(world: World, process: Process, paths: JobPaths, controller: Any) -> str:
    """The last rewrite undone."""
    hands: Any = Hands(world, process)
    try:
        done = run_undo(
            hands,
            paths,
            directory(controller),
            UndoOptions(owner=process.name, clock=_clock_of(world, process)),
        )
    except ArroyoStateError as error:
        world.note(f"{process.name}: {error}")
        return refused(error)
    return "put back" if done.done else "nothing"


@dataclass(frozen=True, slots=True)
class Editing:
    """An edit, and what the oracle knows of it.

    Attributes:
        assumed: whether somebody says that the job is stopped, true or not.
        truth: the rows that it removes and adds.
    """

    edit: Edit
    assumed: bool
    truth: Edited


def draw_edit(chance: random.Random, *, managed: bool) -> Editing:
    """An edit that removes a key or old rows, or sets an entry of a managed job."""
    assumed = chance.random() < 0.75
    kinds = ("key", "key", "old", "set", "moved", "moved")
    kind = chance.choice(kinds if managed else kinds[:3])
    if kind == "moved":
        moved = NewPosition(partition="a", position="+1000", relative=True)
        offsets = SetOffsets(positions=(moved,), operator=OPERATOR)
        return Editing(offsets, assumed, Edited(request=offsets.request))
    if kind == "set":
        number = chance.getrandbits(32)
        entry = SetEntry(operator=OPERATOR, table=_KEYED.table, key='"a"', value=str(number))
        return Editing(entry, assumed, Edited(adds=((OPERATOR, "g", row("a", number)),)))
    if kind == "old":
        return Editing(RetainRows(since_micros=1), assumed, Edited(removes=_old))
    key = chance.choice(KEYS)
    removes = functools.partial(_of_key, "gt" if managed else "t", key)
    return Editing(KeyDeletion(values=(key,)), assumed, Edited(removes=removes))


def _old(one: Row) -> bool:
    return one[1] == "t" and is_old(one[2])


def _of_key(tables: str, key: str, one: Row) -> bool:
    return one[1] in tables and key_of(one[2]) == key


def edit(
    world: World, process: Process, paths: JobPaths, watch: Watch, controller: Any, what: Editing
) -> str:
    """The product's edit of a job at rest, or of one that somebody takes for such."""
    hands: Any = Hands(world, process)
    assert watch.truth is not None
    watch.truth.edits[process.name] = what.truth
    since = len(watch.lifted)
    run = run_managed_edit if controller is None else run_edit
    try:
        done = run(
            hands,
            paths,
            _evidence(paths, controller, what.assumed),
            what.edit,
            EditOptions(
                owner=process.name,
                quiet_seconds=0,
                verify_level=0,
                run=rewritten,
                clock=_clock_of(world, process),
                sleep=lambda seconds: world.wait(process, seconds),
            ),
        )
    except ArroyoStateError as error:
        world.note(f"{process.name}: {error}")
        return refused(error)
    if not done.published:
        return "nothing"
    if controller is not None:
        watch.truth.was_edited(process)
        return "edited"
    base = done.plan.epoch
    watch.truth.bases.add(base)
    if base not in watch.lifted[since:]:
        if base not in watch.pinned:
            watch.truth.of_edits.add(base)
        watch.pin(watch.pinned | {base})
    return "edited"


def fork(world: World, process: Process, target: Any, source: Any, epoch: int | None) -> str:
    """The product's fork of a job of Arroyo's into another one at rest; somebody reads the plan."""
    hands: Any = Hands(world, process)
    target.watch.truth.edits[process.name] = Edited(source=source.watch.truth)
    taken = StateSource(store=hands, paths=source.paths, epoch=epoch)
    told = directory(target.controller)
    done = _approved(
        world,
        process,
        lambda: plan_fork(taken, hands, target.paths, told),
        lambda options: run_fork(taken, hands, target.paths, told, options),
    )
    return "forked" if done == "published" else done


def take_back(world: World, process: Process, setting: Any, epoch: int) -> str:
    """The product's rollback of a job of Arroyo's at rest; somebody reads the plan."""
    hands: Any = Hands(world, process)
    truth = setting.watch.truth
    truth.edits[process.name] = Edited(source=truth, epoch=epoch)
    told = directory(setting.controller)
    done = _approved(
        world,
        process,
        lambda: plan_job_rollback(hands, setting.paths, told, epoch),
        lambda options: run_job_rollback(hands, setting.paths, told, epoch, options),
    )
    return "taken back" if done == "published" else done


def _approved(
    world: World,
    process: Process,
    plan: Callable[[], Any],
    run: Callable[[EditOptions], Any],
) -> str:
    """Carry out a plan, unless it says that files were written again."""
    try:
        planned = plan()
        if any("written after its metadata" in one for one in planned.unknown):
            return "not approved"
        done = run(
            EditOptions(
                owner=process.name,
                quiet_seconds=0,
                verify_level=0,
                clock=_clock_of(world, process),
                sleep=lambda seconds: world.wait(process, seconds),
                approved=planned.digest,
            )
        )
    except ArroyoStateError as error:
        world.note(f"{process.name}: {error}")
        return refused(error)
    return "published" if done.published else "nothing"


def rebuild(world: World, process: Process, setting: Any, epoch: int, *, undo: bool) -> str:
    """The product's rebuild of lost metadata of a job of Arroyo's at rest, or the undo of that."""
    hands: Any = Hands(world, process)
    options = EditOptions(
        owner=process.name,
        quiet_seconds=0,
        verify_level=0,
        clock=_clock_of(world, process),
        sleep=lambda seconds: world.wait(process, seconds),
    )
    known = directory(setting.controller)
    try:
        if undo:
            said = UndoOptions(owner=process.name, clock=_clock_of(world, process))
            return "undone" if run_undo(hands, setting.paths, known, said).done else "nothing"
        run_rebuild(hands, setting.paths, known, epoch, options)
    except ArroyoStateError as error:
        world.note(f"{process.name}: {error}")
        return refused(error)
    return "rebuilt"


def undo_edit(world: World, process: Process, paths: JobPaths, watch: Watch, assumed: bool) -> str:
    """The newest edit of a managed job undone; only the pin that it has set is released."""
    hands: Any = Hands(world, process)
    assert watch.truth is not None
    evidence = _evidence(paths, None, assumed)
    try:
        if plan_managed_undo(hands, paths, evidence) is None:
            return "nothing"
        # Another edit may come first; then that one is undone.
        mine = watch.truth.of_edits & watch.pinned
        for base in mine:
            watch.lift(base)
        since = len(watch.lifted)
        done = run_managed_undo(
            hands,
            paths,
            evidence,
            EditOptions(
                owner=process.name,
                clock=_clock_of(world, process),
                sleep=lambda seconds: world.wait(process, seconds),
            ),
        )
    except ArroyoStateError as error:
        world.note(f"{process.name}: {error}")
        return refused(error)
    stays = mine - {None if done is None else done.rollback.epoch}
    watch.pin(watch.pinned | stays.difference(watch.lifted[since:]))
    return "nothing" if done is None else "undone"


def _evidence(paths: JobPaths, controller: Any, assumed: bool) -> JobDirectory:
    if controller is None and assumed:
        return JobDirectory([AssumedJobs({str(paths.root): "stopped"})])
    return directory(controller)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """What a collector is asked to do.

    Attributes:
        keep, keep_for: what the oracle knows of that: how many epochs stay, or for how long.
        early: whether the plan is made first and carried out later.
    """

    asked: GcRequest
    keep: int | None = None
    keep_for: int | None = None
    aside: bool = False
    early: bool = False
    in_flight: int = 8


def gather(world: World, process: Process, paths: JobPaths, watch: Watch, what: Collection) -> str:
    """The product's collector."""
    hands: Any = Hands(world, process)
    if what.keep is not None or what.keep_for is not None:
        asked = what.asked.retention
        by_age = asked is not None and asked.keep_epochs is None
        watch.expires(what.keep, what.keep_for, by_age=by_age)
    plan = None
    try:
        if what.early:
            plan = plan_gc(hands, paths, what.asked, now_micros=world.clock_of(process)())
        done = run_gc(
            hands,
            paths,
            what.asked,
            GcOptions(
                quarantine=what.aside,
                pace=Pace(
                    in_flight=what.in_flight,
                    tries=2,
                    sleep=lambda seconds: world.wait(process, seconds),
                ),
                owner=process.name,
                clock=_clock_of(world, process),
            ),
            plan=plan,
        )
    except ArroyoStateError as error:
        world.note(f"{process.name}: {error}")
        return refused(error)
    if not done.done:
        return "nothing"
    moved = what.aside and what.asked.kind is PlanKind.DEAD_JOB
    return "moved" if moved else "collected"


@dataclass(frozen=True, slots=True)
class _Server:
    """A server of Arroyo's, which knows its own jobs and says that there are no others."""

    controllers: dict[str, Any]
    source: str = "the server"

    def look_up(self, jobs: Sequence[JobPaths], *, checkpoints: bool = False) -> list[SourceAnswer]:
        return [self._word(paths, checkpoints) for paths in jobs]

    def _word(self, paths: JobPaths, checkpoints: bool) -> SourceAnswer:
        controller = self.controllers.get(str(paths.root))
        if controller is None:
            return SourceAnswer(source=self.source, absence=Absence.NO_JOB)
        (word,) = controller.look_up([paths], checkpoints=checkpoints)
        return replace(word, source=self.source)


def sweep(
    world: World, known: Callable[[], Mapping[str, Any]], kind: str, chance: random.Random
) -> Callable[[Process], str]:
    """The product's collector for every job that is found below a URL, one after the other.

    Args:
        known: the settings of the jobs that somebody knows of then, by root.
    """

    def work(process: Process) -> str:
        try:
            jobs = list_jobs(Hands(world, process))
        except ArroyoStateError as error:
            return refused(error)
        results = [gather(world, process, *one) for one in asked(process, jobs)]
        return "collected" if "collected" in results else "nothing"

    def asked(process: Process, jobs: Sequence[JobPaths]) -> Iterator[Any]:
        server = _Server({root: one.controller for root, one in known().items() if one.controller})
        for paths in jobs:
            setting = known().get(str(paths.root))
            process.root = process.url + paths.root
            ownerless = Watch(world.objects, str(paths.root), paths.pipeline is not None, False)
            watch = ownerless if setting is None else setting.watch
            keep = 2 if kind == "expiry" else None
            if keep is not None and watch.protocol is False:
                watch.trap = 10
            request = GcRequest(
                kind={
                    "expiry": PlanKind.EXPIRE,
                    "orphans": PlanKind.ORPHANS,
                    "removal": PlanKind.DEAD_JOB,
                }[kind],
                retention=None if keep is None else Retention(keep_epochs=keep),
                grace_micros=GRACE_FLOOR_MICROS,
                directory=JobDirectory([server]),
            )
            yield paths, watch, Collection(asked=request, keep=keep, aside=chance.random() < 0.2)

    return work


def pin(world: World, process: Process, paths: JobPaths, watch: Watch, epoch: int) -> str:
    """Pin an epoch; once that is done it stays, unless somebody has lifted it meanwhile."""
    since = len(watch.lifted)
    try:
        pin_epoch(
            Hands(world, process),  # type: ignore[arg-type]
            paths,
            Epoch(epoch),
            owner=process.name,
            clock=_clock_of(world, process),
            sleep=lambda seconds: world.wait(process, seconds),
        )
    except ArroyoStateError as error:
        return refused(error)
    if epoch in watch.lifted[since:]:
        return "lifted"
    watch.pin(watch.pinned | {epoch})
    return "pinned"


def unpin(world: World, process: Process, paths: JobPaths, watch: Watch) -> str:
    """Take a pin back."""
    hands: Any = Hands(world, process)
    try:
        found = read_pins(hands, paths).pinned
        if not found:
            return "nothing"
        watch.lift(min(found))
        unpin_epochs(
            hands, paths, [min(found)], owner=process.name, clock=_clock_of(world, process)
        )
        watch.lift(min(found))  # somebody may have pinned it before, and have said so since
    except ArroyoStateError as error:
        return refused(error)
    return "unpinned"


def bring_back(world: World, process: Process, paths: JobPaths, watch: Watch) -> str:
    """Undelete what lies in the newest quarantine."""
    hands: Any = Hands(world, process)
    names: tuple[str, ...] = ()
    since = len(watch.lifted)
    try:
        names = read_pins(hands, paths).quarantines
        if not names:
            return "nothing"
        moved = run_undelete(
            hands,
            paths,
            names[-1],
            UndeleteOptions(
                owner=process.name,
                clock=_clock_of(world, process),
                sleep=lambda seconds: world.wait(process, seconds),
            ),
        )
    except ArroyoStateError as error:
        kept = json.loads(watch.objects[paths.job_pins][0]) if names else {}
        lost = isinstance(error, FormatError | NotFoundError)
        if lost and watch.ours and names[-1] in kept["quarantines"]:
            raise Violation(f"{process.name}: {error}") from error
        return refused(error)
    heads = (RECORD.fullmatch(one.path) or LEGACY_HEAD.fullmatch(one.path) for one in moved)
    back = {int(found[2]) for found in heads if found}
    watch.pin(watch.pinned | back.difference(watch.lifted[since:]))
    return "back"


def purge_old(world: World, process: Process, paths: JobPaths) -> str:
    """Purge what lies in quarantine."""
    try:
        gone = purge(
            Hands(world, process),  # type: ignore[arg-type]
            paths,
            older_than_micros=HOUR,
            yes=True,
            owner=process.name,
            clock=_clock_of(world, process),
        )
    except ArroyoStateError as error:
        return refused(error)
    return "purged" if gone else "nothing"


def directory(controller: Any | None) -> JobDirectory:
    """Who knows what a job is doing: the model's controller, for a job of Arroyo's."""
    return JobDirectory([] if controller is None else [controller])
