"""The coordinator of one run of a job: starts it, merges what subtasks report, publishes, commits.

Used by every runtime; it holds no rows. Source: crates/arroyo-worker/src/job_controller/.
"""

from __future__ import annotations

import contextlib
import json
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from arroyo_dagster.errors import (
    ArroyoStateError,
    ConflictError,
    FormatError,
    InputError,
    NotFoundError,
    ProtocolError,
    StorageError,
)
from arroyo_dagster.state.codec import records
from arroyo_dagster.state.metadata.backend import StateBackend
from arroyo_dagster.state.metadata.lease import lease, newest_token
from arroyo_dagster.state.metadata.reader import as_checkpoint, legacy_checkpoint
from arroyo_dagster.state.model.checkpoints import (
    Checkpoint,
    CheckpointState,
    LegacyCheckpoint,
    Manifest,
    OperatorCheckpoint,
    StreamProgress,
    SubtaskCheckpoint,
)
from arroyo_dagster.state.model.clock import Clock, wall_clock
from arroyo_dagster.state.model.compaction import Merged
from arroyo_dagster.state.model.ids import (
    Epoch,
    OperatorId,
    StatePath,
    TableName,
    WorkerGeneration,
)
from arroyo_dagster.state.model.layout import JobPaths, Layout, is_compacted
from arroyo_dagster.state.model.tables import GlobalKeyedFiles, TableConfig
from arroyo_dagster.state.model.types import U32, U64
from arroyo_dagster.state.planning.compaction.apply import Applied, apply_merges
from arroyo_dagster.state.planning.gc.retention import LEGACY_EPOCHS_BEFORE_NEWEST
from arroyo_dagster.state.planning.restore.batch_identity import BatchVerdict, batch_verdict
from arroyo_dagster.state.planning.restore.checkpoint import carry_operator, merge_operator
from arroyo_dagster.state.planning.restore.recovery import legacy_state
from arroyo_dagster.state.runtime.operators import Offset, registered
from arroyo_dagster.state.runtime.pipeline import Pipeline
from arroyo_dagster.state.runtime.task import EpochPlan
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.global_keyed import GlobalKeyedTable, global_table_config
from arroyo_dagster.state.tables.manager import TableManager
from arroyo_dagster.state.tables.messages import Compaction
from arroyo_dagster.state.tables.registration import check_tables
from arroyo_dagster.state.tables.table import TaskInfo

_LOG = logging.getLogger(__name__)

OFFSETS = "offsets"
WATERMARKS = "watermark"
CLEANUP_EVERY_EPOCHS = 4


@dataclass(frozen=True, slots=True)
class SourceWatermark:
    """The value of a source's table `watermark`, key 0."""

    watermark_micros: U64


def source_tables() -> dict[TableName, TableConfig]:
    """The tables every source of ours keeps: where it stands, and its watermark."""
    configs = (
        global_table_config(OFFSETS, "source offsets", key=str, value=str),
        global_table_config(WATERMARKS, "source watermark", key=U32, value=SourceWatermark),
    )
    return {config.table: config for config in configs}


@dataclass(frozen=True, slots=True)
class _TakenOver:
    """Operators once maintenance's merges are put in place, and the records they came from."""

    applied: Applied
    records: list[StatePath]


class JobRun:
    """One run of a job, from its start as a new worker generation to its last epoch.

    In the legacy layout (see `Pipeline`) it holds the lease of the job's only writer until `close`.

    Args:
        store: where the job's state lies.
        pipeline: what runs.
        accept: looks at the progress of the checkpoint to continue from, and raises to refuse it.

    Attributes:
        number: which run of the job it is: its worker generation, else its lease's number.
        retention_failures: how often in this run expired epochs could not be removed.
        overdue_epochs: how many of them the last failure left; 0 once retention has succeeded.

    Raises:
        InputError: the pipeline cannot run, its tables are not those of the checkpoint, or its
            state lies in the other layout.
        ConflictError: a newer run was started; in the legacy layout: another may be alive.
        FormatError: the checkpoint to continue from has missing or broken objects.
    """

    def __init__(
        self,
        store: ObjectStore,
        pipeline: Pipeline,
        *,
        clock: Clock = wall_clock,
        accept: Callable[[StreamProgress], None] = lambda progress: None,
    ) -> None:
        pipeline.check()
        self.store = store
        self.pipeline = pipeline
        self.clock = clock
        self.backend = StateBackend(store, pipeline.paths, clock=clock)
        self._sinks = pipeline.sinks()
        self._accept = accept
        self.retention_failures = 0
        self.overdue_epochs = 0
        self._failed_in_a_row = 0
        self._unfinished: Epoch | None = None
        self._held = contextlib.ExitStack()
        self._compacted: dict[OperatorId, tuple[Compaction, ...]] = {}
        newest = self._check_before_start()
        with self.closed_on_failure():
            self.number = self._take_lease()
            self._start(newest)

    def _take_lease(self) -> int:
        """In the legacy layout: be the only writer. Returns the lease's number, else 0."""
        if self.pipeline.layout is not Layout.LEGACY:
            return 0
        paths = self.pipeline.paths
        owner = f"run {uuid.uuid4().hex[:16]}"
        # Without the caller's clock: a lease is about real time.
        held = self._held.enter_context(lease(self.store, paths, owner, directory=paths.writers))
        self.backend.store = held
        return held.lease.token

    def _start(self, newest: Epoch | None) -> None:
        started = self.backend.start()
        self.generation: WorkerGeneration | None = started.worker_generation
        self.number = self.number or started.worker_generation or 0
        self.base: Checkpoint | None = started.restored
        with self.backend.unless_fenced():
            self._check_start(newest)
            if self.base is not None and started.replay_commit:
                self._commit(self.base)
            self._sources = self._open_sources()

    def close(self) -> None:
        """Let the next run start at once, where this one holds a lease."""
        self._held.close()

    @contextlib.contextmanager
    def closed_on_failure(self) -> Iterator[None]:
        """Close the run if what is done with it fails."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _check_before_start(self) -> Epoch | None:
        # Bad input is found before anything is written, the new generation included.
        self._check_layout()
        newest = self._newest_epoch()
        while newest is not None:
            try:
                self._check_restorable(newest)
                break
            except (NotFoundError, FormatError, ProtocolError) as error:
                before, newest = newest, self._newest_epoch()
                if newest == before:
                    raise self._damaged(error) from error
                # else a running job has let it expire while it was read
        return newest

    def _damaged(self, error: ArroyoStateError) -> ArroyoStateError:
        """The error of a newest epoch that cannot be restored, with the command that goes back."""
        command = f"arroyo-state rollback {self.pipeline.paths.root}"
        step = f"restore the object, or go back to an older epoch: `{command}` lists them"
        found = type(error)(error.message, next_step=step, retryable=error.retryable)
        found.facts = error.facts
        return found

    def _check_layout(self) -> None:
        other = self.pipeline.other_layout
        try:
            there = StateBackend(self.store, other).every_epoch()
        except NotFoundError:
            return
        if there:
            raise InputError(
                f"the job's state is stored in the {other.layout.value} layout, up to epoch "
                f"{there[-1]}: this run would start without it",
                job=other.root,
                next_step="give the pipeline that layout, or another name",
            )

    def _check_start(self, newest: Epoch | None) -> None:
        if newest is not None and (self.base is None or self.base.epoch < newest):
            raise ProtocolError(
                f"epoch {newest} exists, but no worker generation leads to it",
                job=self.pipeline.job,
                restored=self.base.epoch if self.base else None,
                next_step="check it with `arroyo-state epochs`; nothing was deleted",
            )
        self._check_own()
        if self.base is not None and self.base.epoch != newest:
            self._check_restorable(self.base.epoch)

    def _check_own(self) -> None:
        """A copy of a job under another name lists the original's files, and would expire them."""
        if self.base is not None and self.base.job != self.pipeline.paths.job:
            raise ProtocolError(
                f"epoch {self.base.epoch} belongs to job {self.base.job}: its files are listed "
                "below that job's name",
                job=self.pipeline.paths.root,
                path=self.base.ref,
                next_step="run the job under the name that its metadata contains; a copy keeps "
                "that name below a URL of its own. Nothing was published",
            )

    def _newest_epoch(self) -> Epoch | None:
        try:
            epochs = self.backend.every_epoch()
        except NotFoundError:
            return None  # nothing was ever written below the URL: this is its first job
        # A listing may go on showing an epoch that has expired.
        return next((epoch for epoch in reversed(epochs) if self.backend.exists(epoch)), None)

    def _check_restorable(self, epoch: Epoch) -> None:
        checkpoint = self.backend.prepare_checkpoint_load(epoch)
        if checkpoint.progress is None:
            raise FormatError(
                "the checkpoint contains no source offsets: another program wrote it, or it is "
                "truncated",
                job=checkpoint.job,
                epoch=epoch,
                path=checkpoint.ref,
                next_step="keep the object and report it; start this pipeline under another job",
            )
        self._accept(checkpoint.progress)
        for operator in checkpoint.operators:
            self._check_commit(checkpoint, operator)
            node = self.pipeline.operators.get(operator.operator)
            if node is not None:
                check_tables(registered(node.operator), operator)
            elif operator.operator in self.pipeline.sources:
                check_tables(source_tables(), operator)

    def _check_commit(self, checkpoint: Checkpoint, operator: OperatorCheckpoint) -> None:
        waits = any(any(data.values()) for data in operator.commit_data().values())
        if (
            checkpoint.state is not CheckpointState.READY
            and waits
            and operator.operator not in self._sinks
        ):
            raise InputError(
                "the checkpoint still has to commit the data of a sink that the pipeline no "
                "longer has",
                operator=operator.operator,
                epoch=checkpoint.epoch,
                next_step="run the pipeline once with the sink, then remove it",
            )

    # ---- sources ---------------------------------------------------------------------------------

    def _open_sources(self) -> dict[OperatorId, _SourceState]:
        return {
            name: _SourceState(self, name, self._operator(name)) for name in self.pipeline.sources
        }

    def _operator(self, name: OperatorId) -> OperatorCheckpoint | None:
        return self.base.operator(name) if self.base else None

    def offset(self, source: OperatorId) -> Offset | None:
        """Where a source stands behind the newest epoch; None = nothing recorded."""
        return self._sources[source].offset

    @property
    def watermarks_micros(self) -> dict[OperatorId, int | None]:
        """The watermark of each source behind the newest epoch."""
        return {name: state.watermark_micros for name, state in self._sources.items()}

    # ---- epochs ----------------------------------------------------------------------------------

    @property
    def next_epoch(self) -> Epoch:
        return Epoch(1 if self.base is None else self.base.epoch + 1)

    @property
    def min_epoch(self) -> Epoch:
        """The oldest epoch that is kept once the next one exists."""
        before = self.base.min_epoch if self.base else Epoch(1)
        if self.pipeline.keep_epochs is None:
            return before
        kept = self.pipeline.keep_epochs
        if self.pipeline.layout is Layout.LEGACY:
            kept = max(kept, LEGACY_EPOCHS_BEFORE_NEWEST + 1)
        return Epoch(max(before, self.next_epoch - kept + 1))

    def verdict(self, query_id: str, batch_id: int, offsets: str, *, adopt: bool) -> BatchVerdict:
        """Whether a micro-batch is the next one, or a repeat. Errors as `batch_verdict`."""
        progress = self.base.progress if self.base else None
        return batch_verdict(progress, query_id, batch_id, offsets, adopt=adopt)

    def plan(self, then_stop: bool) -> EpochPlan:
        """What the subtasks of the next epoch need to know.

        Raises:
            ProtocolError: an epoch of this run failed while it was published. It may exist, so that
                its rows must not come again: only a new run can tell.
        """
        if self._unfinished is not None:
            raise ProtocolError(
                f"epoch {self._unfinished} of this run failed while it was published",
                job=self.pipeline.job,
                next_step="start a new run: it continues from the newest epoch",
            )
        operators = self.base.operators if self.base else ()
        return EpochPlan(
            epoch=self.next_epoch,
            min_epoch=self.min_epoch,
            generation=self.generation,
            then_stop=then_stop,
            base_epoch=Epoch(self.next_epoch - 1),
            base={
                operator.operator: operator
                for operator in operators
                if operator.operator in self.pipeline.operators
            },
            watermarks_micros=self.watermarks_micros,
            compacted=self._compacted,
        )

    def finish(
        self,
        plan: EpochPlan,
        reports: Iterable[tuple[OperatorId, SubtaskCheckpoint]],
        offsets: Mapping[OperatorId, Offset],
        watermarks_micros: Mapping[OperatorId, int | None],
        progress: StreamProgress,
    ) -> Checkpoint:
        """Merge, publish and commit one epoch: from here on it exists.

        Args:
            offsets: where each source stands behind the epoch.
            marks_micros: the watermark of each source behind it.

        Raises:
            ConflictError: somebody else owns the epoch, or a newer run was started.
            ProtocolError: a subtask did not report.
        """
        self._unfinished = plan.epoch
        names = (*self.pipeline.sources, *self.pipeline.operators)
        by_operator: dict[OperatorId, list[SubtaskCheckpoint]] = {name: [] for name in names}
        for operator, report in reports:
            by_operator[operator].append(report)
        for name, source in self._sources.items():
            by_operator[name] = [
                source.checkpoint(plan, offsets[name], watermarks_micros.get(name))
            ]
        merged = [self._merged(plan, name, reports) for name, reports in by_operator.items()]
        gone = [o for o in (self.base.operators if self.base else ()) if o.operator not in names]
        merged += [carry_operator(operator, plan.epoch) for operator in gone]
        taken = self._take_over(merged)
        operators, compacted = self._merge_files(plan, taken)
        publish = self._publish_legacy if self.generation is None else self._publish
        self.base = publish(plan, operators, progress)
        self._compacted = compacted
        if self.base.needs_commit:
            self._commit(self.base)
        for name, kept in self._sources.items():
            kept.follow(self._operator(name), compacted.get(name, ()))
        self._forget_records(taken)
        self._clean_up(plan)
        self._unfinished = None
        return self.base

    def _merged(
        self, plan: EpochPlan, name: OperatorId, reports: Sequence[SubtaskCheckpoint]
    ) -> OperatorCheckpoint:
        expected = 1 if name in self.pipeline.sources else self.pipeline.parallelism
        if len(reports) != expected:
            raise ProtocolError(
                f"{len(reports)} of {expected} subtasks reported",
                operator=name,
                epoch=plan.epoch,
                next_step="start a new run; nothing was published",
            )
        before = self._operator(name)
        return merge_operator(self.pipeline.paths.job, name, plan.epoch, reports, before)

    def _publish(
        self, plan: EpochPlan, operators: Sequence[OperatorCheckpoint], progress: StreamProgress
    ) -> Checkpoint:
        manifest = self._manifest(plan, operators, progress)
        published = self.backend.publish(manifest)
        state = CheckpointState.COMMITTING if manifest.needs_commit else CheckpointState.READY
        return as_checkpoint(manifest, published.ref, state)

    def _publish_legacy(
        self, plan: EpochPlan, operators: Sequence[OperatorCheckpoint], progress: StreamProgress
    ) -> Checkpoint:
        """Write every operator's object, then the checkpoint's, which makes the epoch exist."""
        if self.backend.exists(plan.epoch):
            raise ConflictError(
                f"epoch {plan.epoch} already exists: another run wrote it",
                job=self.pipeline.paths.job,
                next_step="start the job again: it continues from that epoch; nothing was written",
            )
        for operator in operators:
            self.backend.write_operator_checkpoint_metadata(operator)
        head = LegacyCheckpoint(
            job=self.pipeline.paths.job,
            epoch=plan.epoch,
            min_epoch=plan.min_epoch,
            start_time_micros=min(operator.start_time_micros for operator in operators),
            finish_time_micros=self.clock(),
            operators=tuple(operator.operator for operator in operators),
            progress=progress,
        )
        path = self.backend.write_checkpoint_metadata(head)
        state = legacy_state(head, operators, committed=False)
        return legacy_checkpoint(head, operators, path, state)

    def _manifest(
        self, plan: EpochPlan, operators: Sequence[OperatorCheckpoint], progress: StreamProgress
    ) -> Manifest:
        paths = self.pipeline.paths
        assert paths.pipeline is not None
        assert self.generation is not None
        return Manifest(
            pipeline=paths.pipeline,
            job=paths.job,
            worker_generation=self.generation,
            epoch=plan.epoch,
            min_epoch=plan.min_epoch,
            start_time_micros=min(operator.start_time_micros for operator in operators),
            finish_time_micros=self.clock(),
            needs_commit=any(operator.needs_commit for operator in operators),
            operators=tuple(operators),
            parent_ref=self.base.ref if self.base else None,
            progress=progress,
        )

    def _commit(self, checkpoint: Checkpoint) -> None:
        """Finish the commit of a checkpoint that owns its epoch, then say so."""
        for operator in checkpoint.operators:
            sink = self._sinks.get(operator.operator)
            if sink is not None and operator.needs_commit:
                sink.commit(checkpoint.epoch, operator.commit_data())
        self.backend.mark_committed(checkpoint)
        self.base = replace(checkpoint, state=CheckpointState.READY)

    def _clean_up(self, plan: EpochPlan) -> None:
        # After a first failure at once; one that lasts must not cost every epoch a look at all.
        again = self._failed_in_a_row == 1
        due = plan.epoch % CLEANUP_EVERY_EPOCHS == 0 or plan.then_stop or again
        if self.pipeline.keep_epochs is None or not due or plan.min_epoch <= 1:
            return
        try:
            self.backend.cleanup_checkpoint(plan.min_epoch)
        except ConflictError:
            raise
        except ArroyoStateError as error:
            self._report_overdue(plan.min_epoch, error)
        else:
            self.overdue_epochs = self._failed_in_a_row = 0

    def _report_overdue(self, min_epoch: Epoch, error: ArroyoStateError) -> None:
        """Count and log what retention has left for the next time: the epoch itself exists."""
        self.retention_failures += 1
        self._failed_in_a_row += 1
        with contextlib.suppress(StorageError, NotFoundError):
            left = self.backend.every_epoch()
            self.overdue_epochs = sum(epoch < min_epoch for epoch in left)
        _LOG.warning(
            "retention of job %s failed; %d epochs before epoch %d stay until the next attempt: %s",
            self.pipeline.paths.root,
            self.overdue_epochs,
            min_epoch,
            error,
        )

    # ---- merged files ----------------------------------------------------------------------------

    def _take_over(self, operators: Sequence[OperatorCheckpoint]) -> _TakenOver:
        """Put what maintenance has merged in the place of its inputs."""
        found = self.backend.compaction_records()
        known = [merged for record in found.values() if record for merged in record.merged]
        outputs = list(dict.fromkeys(path for merged in known for path in merged.output_paths))
        there = concurrently(self.store.head, outputs)
        missing = {path for path, info in zip(outputs, there, strict=True) if info is None}
        whole = [merged for merged in known if not missing & set(merged.output_paths)]
        return _TakenOver(
            apply_merges(operators, whole), [path for path, record in found.items() if record]
        )

    def _forget_records(self, taken: _TakenOver) -> None:
        """Remove the records that were looked at: taken over, or void for ever."""
        # What stays behind is void at the next epoch; it must not stop a run whose epoch exists.
        with contextlib.suppress(StorageError):
            if taken.records:
                self.store.delete_many(taken.records)

    def _merge_files(
        self, plan: EpochPlan, taken: _TakenOver
    ) -> tuple[list[OperatorCheckpoint], dict[OperatorId, tuple[Compaction, ...]]]:
        """Merge what the epoch before listed, where a global table lists too many files."""
        announced: dict[OperatorId, list[Compaction]] = {}
        for merged in taken.applied.done:
            announced.setdefault(merged.operator, []).append(self._announcement(merged))
        result: list[OperatorCheckpoint] = []
        for operator in taken.applied.operators:
            tables = dict(operator.tables)
            done = announced.setdefault(operator.operator, [])
            for name, files in operator.tables.items():
                before = self._listed_before(operator.operator, name)
                fresh = sum(not is_compacted(path) for path in before)
                if fresh <= self.pipeline.merge_files_after or any(name in m.tables for m in done):
                    continue
                assert isinstance(files, GlobalKeyedFiles)
                table = GlobalKeyedTable(operator.configs[name], self.store)
                namer = self._namer(operator.operator, name, plan)
                whole = table.compact_data(before, namer).merged.output_metadata
                tables[name] = replace(files, files=(*whole.paths, *files.files[len(before) :]))
                done.append(Compaction(tables={name: whole}, inputs={name: before}))
            result.append(replace(operator, tables=tables))
        return result, {name: tuple(done) for name, done in announced.items() if done}

    def _announcement(self, merged: Merged) -> Compaction:
        # Inputs that have expired meanwhile are no longer known to the subtasks.
        operator = self._operator(merged.operator)
        listed = set(operator.paths) if operator else set()
        return Compaction(
            tables={merged.table: merged.output_metadata},
            inputs={merged.table: tuple(path for path in merged.input_paths if path in listed)},
        )

    def _listed_before(self, operator: OperatorId, table: TableName) -> tuple[StatePath, ...]:
        before = self._operator(operator)
        files = before.tables.get(table) if before else None
        return files.files if isinstance(files, GlobalKeyedFiles) else ()

    def _namer(
        self, operator: OperatorId, table: TableName, plan: EpochPlan
    ) -> Callable[[str], StatePath]:
        return lambda suffix: self.pipeline.paths.data_file(
            operator, table, 0, plan.epoch, plan.generation, attempt=uuid.uuid4().hex[:16] + suffix
        )

    # ---- stop requests ---------------------------------------------------------------------------

    def stop_requested(self) -> bool:
        """Whether somebody asked this very run to stop with a checkpoint."""
        return requested_stop(self.store, self.pipeline.paths) == self.number

    def stop_done(self) -> None:
        """Take the request back: the run has stopped."""
        if self.stop_requested():
            self.store.delete_many([self.pipeline.paths.stop_request])


def finished(store: ObjectStore, pipeline: Pipeline) -> Checkpoint | None:
    """The newest checkpoint of a job whose sources have all ended, if nothing is left to do.

    Then no run need be started: it would only take a worker generation. None = start one.
    """
    try:
        newest = StateBackend(store, pipeline.paths).load()
    except (NotFoundError, FormatError, ProtocolError):
        return None  # a start says what is wrong
    progress = newest.progress
    if newest.state is not CheckpointState.READY or progress is None or not progress.exhausted:
        return None
    offsets = json.loads(progress.offsets)
    ended = all(
        name in offsets and node.source.exhausted(offsets[name])
        for name, node in pipeline.sources.items()
    )
    return newest if ended else None


class _SourceState:
    """Where one source stands, kept in tables of its own like any operator's state."""

    def __init__(self, run: JobRun, name: OperatorId, restored: OperatorCheckpoint | None) -> None:
        paths = run.pipeline.paths
        self._manager = TableManager(
            task=TaskInfo(
                pipeline=paths.pipeline,
                job=paths.job,
                operator=name,
                task_index=0,
                parallelism=1,
            ),
            configs=source_tables(),
            store=run.store,
            generation=run.generation,
            restored=restored,
            write_metadata=run.backend.write_operator_checkpoint_metadata,
            base_epoch=Epoch(run.next_epoch - 1),
            clock=run.clock,
        )
        self._offsets = self._manager.get_global_keyed_state(OFFSETS, str, str)
        self._watermarks = self._manager.get_global_keyed_state(WATERMARKS, U32, SourceWatermark)

    @property
    def offset(self) -> Offset | None:
        stored = self._offsets.get_all()
        return {name: json.loads(value) for name, value in stored.items()} or None

    @property
    def watermark_micros(self) -> int | None:
        stored = self._watermarks.get(0)
        return None if stored is None else stored.watermark_micros

    def checkpoint(
        self, plan: EpochPlan, offset: Offset, watermark_micros: int | None
    ) -> SubtaskCheckpoint:
        known = self._offsets.get_all()
        now = {name: json.dumps(value, sort_keys=True) for name, value in offset.items()}
        self._offsets.remove_many([name for name in known if name not in now])
        self._offsets.insert_many(pair for pair in now.items() if known.get(pair[0]) != pair[1])
        if watermark_micros is not None and watermark_micros != self.watermark_micros:
            self._watermarks.insert(0, SourceWatermark(watermark_micros))
        return self._manager.checkpoint(
            plan.epoch, plan.min_epoch, watermark_micros, plan.then_stop
        )

    def follow(self, published: OperatorCheckpoint | None, compacted: Sequence[Compaction]) -> None:
        assert published is not None
        for message in compacted:
            self._manager.send(message)
        self._manager.follow(published)


def requested_stop(store: ObjectStore, paths: JobPaths) -> int | None:
    """The number of the run that somebody asked to stop; None without a request."""
    try:
        data = store.read(paths.stop_request)
    except NotFoundError:
        return None
    request = records.decode_json(data, paths.stop_request)
    return int(request.get("generation", 0))


def request_stop(store: ObjectStore, paths: JobPaths, now_micros: int) -> int:
    """Ask the newest run of a job to stop with a checkpoint. Returns the number of the run.

    Raises:
        NotFoundError: the job was never started.
    """
    number = _newest_run(store, paths)
    if not number:
        raise NotFoundError(
            "the job has never been started",
            job=paths.root,
            url=store.url,
            next_step="list jobs with `arroyo-state jobs`",
        )
    request = {"generation": number, "requested_at_micros": now_micros}
    store.put(paths.stop_request, records.encode_json(request))
    return number


def _newest_run(store: ObjectStore, paths: JobPaths) -> int:
    """The worker generation of the newest run, or the number of its lease; 0 = none."""
    if paths.layout is Layout.LEGACY:
        return newest_token(store, paths.writers)
    try:
        data = store.read(paths.current_generation)
    except NotFoundError:
        return 0
    return records.decode_current_generation(data, paths.current_generation).worker_generation
