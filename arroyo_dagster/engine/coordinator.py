"""The coordinator of one run of a job: starts it, merges the subtasks' reports, publishes, commits.

Used by every runtime; it holds no rows. Source: crates/arroyo-worker/src/job_controller/.
"""

from __future__ import annotations

import contextlib
import json
import logging
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

from arroyo_dagster.engine.merged_files import MergedFiles
from arroyo_dagster.engine.operators import Offset, registered
from arroyo_dagster.engine.pipeline import Pipeline
from arroyo_dagster.engine.source_state import SourceBackend, SourceState, source_tables
from arroyo_dagster.engine.start_checks import StartChecks
from arroyo_dagster.engine.stop_requests import requested_stop
from arroyo_dagster.engine.task import EpochPlan
from arroyo_dagster.errors import (
    ArroyoStateError,
    ConflictError,
    FormatError,
    InputError,
    NotFoundError,
    ProtocolError,
    StorageError,
)
from arroyo_dagster.state.metadata.backend import StateBackend
from arroyo_dagster.state.metadata.backing_store import NextEpoch, Started
from arroyo_dagster.state.metadata.lease import LeaseOptions, lease
from arroyo_dagster.state.model.checkpoints import (
    Checkpoint,
    CheckpointState,
    OperatorCheckpoint,
    RunProgress,
    SubtaskCheckpoint,
)
from arroyo_dagster.state.model.clock import Clock, wall_clock
from arroyo_dagster.state.model.ids import Epoch, OperatorId
from arroyo_dagster.state.model.layout import Layout
from arroyo_dagster.state.model.tables import ExpiringTimeKeyFiles
from arroyo_dagster.state.planning.restore.checkpoint import carry_operator, merge_operator
from arroyo_dagster.state.planning.restore.partially_collected import LEGACY_EPOCHS_BEFORE_NEWEST
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.keyed_forms import KeyedForm
from arroyo_dagster.state.tables.manager import TableManager
from arroyo_dagster.state.tables.messages import Compaction
from arroyo_dagster.state.tables.table import TaskInfo


class JobRun:
    """One run of a job, from its start as a new worker generation to its last epoch.

    `start` creates one. In the legacy layout (see `Pipeline`) it holds the lease of the job's only
    writer until `close`.

    Attributes:
        number: the number of the run: its worker generation, or the token of its lease.
        generation: its worker generation; None in the legacy layout.
        base: the newest epoch, from which the next one continues; None before the first.
        retention: deletes the run's expired epochs.
    """

    start_checks: ClassVar[type[StartChecks]] = StartChecks

    def __init__(
        self,
        store: ObjectStore,
        pipeline: Pipeline,
        backend: StateBackend,
        started: Started,
        number: int,
    ) -> None:
        self.store = store
        self.pipeline = pipeline
        self.backend = backend
        self.generation = started.worker_generation
        self.number = number
        self.base = started.restored
        self.retention = RunRetention(pipeline, backend)
        self._sinks = pipeline.sinks()
        since = self.base.epoch if self.base else Epoch(0)
        self._files = MergedFiles(store, pipeline, backend, since)
        self._sources: Mapping[OperatorId, SourceState] = {}
        self._compacted: dict[OperatorId, tuple[Compaction, ...]] = {}
        self._unfinished: Epoch | None = None
        self._clock_micros = _keyed_clock_micros(self.base)
        self._next_alarm_micros = 0 if _may_have_alarms(pipeline, self.base) else None
        self._check = None if pipeline.epoch_check is None else pipeline.epoch_check()
        self._held = contextlib.ExitStack()

    @classmethod
    def start(
        cls,
        store: ObjectStore,
        pipeline: Pipeline,
        *,
        allow_dropped: Collection[str] = (),
        clock: Clock = wall_clock,
    ) -> Self:
        """Start the next run of a job: take the next worker generation, or the lease of its writer.

        Args:
            store: contains the job's state.
            pipeline: the pipeline to run.
            allow_dropped: operators of the checkpoint, and tables as `operator/table`, that the
                pipeline no longer has: their state stays in the older epochs.

        Raises:
            InputError: the pipeline cannot run, its tables are not those of the checkpoint, its
                state is in the other layout, or the checkpoint has state that nothing claims.
            ConflictError: a newer run was started; in the legacy layout: another run may be alive.
            FormatError: the checkpoint to continue from has missing or broken objects.
        """
        pipeline.check()
        pipeline.check_connectors()
        backend = StateBackend(store, pipeline.paths, clock=clock)
        checks = cls.start_checks(store, pipeline, backend, allow_dropped)
        newest = checks.before_start()
        with contextlib.ExitStack() as held:
            token = _take_lease(held, backend)
            started = backend.start()
            with backend.unless_fenced():
                started = replace(started, restored=checks.checked_base(started.restored, newest))
            run = cls(store, pipeline, backend, started, token or started.worker_generation or 0)
            with backend.unless_fenced():
                if run.base is not None and started.replay_commit:
                    run._commit(run.base)
                run._sources = run._open_sources()
            run._held = held.pop_all()
        return run

    def close(self) -> None:
        """Release the lease, if the run holds one, so that the next run can start at once."""
        self._held.close()

    @contextlib.contextmanager
    def closed_on_failure(self) -> Iterator[None]:
        """Close the run if the block fails."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    # ---- sources ---------------------------------------------------------------------------------

    def _open_sources(self) -> dict[OperatorId, SourceState]:
        return {name: self._open_source(name) for name in self.pipeline.sources}

    def _open_source(self, name: OperatorId) -> SourceState:
        paths = self.pipeline.paths
        task = TaskInfo(
            pipeline=paths.pipeline, job=paths.job, operator=name, task_index=0, parallelism=1
        )
        manager = TableManager(
            SourceBackend(
                self.store, self.generation, self.backend.write_operator_checkpoint_metadata
            ),
            task,
            source_tables(),
            self._operator(name),
            base_epoch=Epoch(self.next_epoch - 1),
            clock=self.backend.clock,
        )
        return SourceState(manager)

    def _operator(self, name: OperatorId) -> OperatorCheckpoint | None:
        return self.base.operator(name) if self.base else None

    def offset(self, source: OperatorId) -> Offset | None:
        """Return a source's offset after the newest epoch; None = none is recorded."""
        return self._sources[source].offset

    def offsets(self) -> dict[OperatorId, Offset]:
        """Return the offset from which each source continues."""
        return {
            name: self.offset(name) or node.source.initial_offset()
            for name, node in self.pipeline.sources.items()
        }

    @property
    def watermarks_micros(self) -> dict[OperatorId, int | None]:
        """The watermark of each source after the newest epoch."""
        return {name: state.watermark_micros for name, state in self._sources.items()}

    # ---- epochs ----------------------------------------------------------------------------------

    @property
    def alarm_due(self) -> bool:
        """Whether an epoch is due for a timer by the engine's clock, even without new rows.

        True before the first epoch of a run that may have restored one.
        """
        alarm = self._next_alarm_micros
        return alarm is not None and alarm <= self.backend.clock()

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

    def plan(self, then_stop: bool) -> EpochPlan:
        """Return the facts that the subtasks of the next epoch need.

        Raises:
            ProtocolError: publishing an epoch of this run failed. The epoch may exist, so its rows
                must not be written again; only a new run can determine that.
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
            clock_micros=max(
                self.backend.clock(),
                self._clock_micros,
                self.base.finish_time_micros if self.base else 0,
            ),
        )

    def finish(
        self,
        plan: EpochPlan,
        reports: Iterable[tuple[OperatorId, SubtaskCheckpoint]],
        offsets: Mapping[OperatorId, Offset],
        watermarks_micros: Mapping[OperatorId, int | None],
        progress: RunProgress,
    ) -> Checkpoint:
        """Merge, publish and commit one epoch: from now on it exists.

        Args:
            offsets: the offset of each source after the epoch.
            watermarks_micros: the watermark of each source after it.

        Raises:
            ConflictError: another run owns the epoch, or a newer run was started.
            ProtocolError: a subtask did not report.
            ArroyoStateError: the pipeline's check refused the epoch; nothing was published.
        """
        self._unfinished = plan.epoch
        self._clock_micros = plan.clock_micros
        reports = list(reports)
        self._check_epoch(plan, reports)
        alarms = [report.next_alarm_micros for _, report in reports]
        taken = self._files.take_over(self._operators(plan, reports, offsets, watermarks_micros))
        operators, compacted = self._files.merge(plan, taken, self.base)
        new = _next_epoch(plan, operators, self.base, progress, self.backend.clock())
        self.base = self.backend.publish_next(new)
        self._compacted = compacted
        if self.base.needs_commit:
            self._commit(self.base)
        for name, kept in self._sources.items():
            kept.follow(self._operator(name), compacted.get(name, ()))
        self._files.forget_records(taken)
        self.retention.expire(plan)
        self._next_alarm_micros = min((time for time in alarms if time is not None), default=None)
        self._unfinished = None
        return self.base

    def _check_epoch(
        self, plan: EpochPlan, reports: Sequence[tuple[OperatorId, SubtaskCheckpoint]]
    ) -> None:
        if self._check is None:
            return
        by_operator: dict[OperatorId, list[Any]] = {}
        for operator, report in reports:
            if report.epoch_report is not None:
                by_operator.setdefault(operator, []).append(report.epoch_report)
        self._check(plan.then_stop, by_operator)

    def _operators(
        self,
        plan: EpochPlan,
        reports: Iterable[tuple[OperatorId, SubtaskCheckpoint]],
        offsets: Mapping[OperatorId, Offset],
        watermarks_micros: Mapping[OperatorId, int | None],
    ) -> list[OperatorCheckpoint]:
        names = (*self.pipeline.sources, *self.pipeline.operators)
        by_operator: dict[OperatorId, list[SubtaskCheckpoint]] = {name: [] for name in names}
        for operator, report in reports:
            by_operator[operator].append(report)
        for name, source in self._sources.items():
            by_operator[name] = [
                source.checkpoint(plan, offsets[name], watermarks_micros.get(name))
            ]
        merged = [self._merged(plan, name, reports) for name, reports in by_operator.items()]
        ended = [o for o in (self.base.operators if self.base else ()) if o.operator not in names]
        return merged + [carry_operator(operator, plan.epoch) for operator in ended]

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

    def _commit(self, checkpoint: Checkpoint) -> None:
        """Commit a checkpoint that owns its epoch, then mark it as committed."""
        for operator in checkpoint.operators:
            sink = self._sinks.get(operator.operator)
            if sink is not None and operator.needs_commit:
                sink.commit(checkpoint.epoch, operator.commit_data())
        self.backend.mark_committed(checkpoint)
        self.base = replace(checkpoint, state=CheckpointState.READY)

    # ---- stop requests ---------------------------------------------------------------------------

    def stop_requested(self) -> bool:
        """Whether this run was requested to stop with a checkpoint."""
        return requested_stop(self.store, self.pipeline.paths) == self.number

    def stop_done(self) -> None:
        """Delete the stop request: the run has stopped."""
        if self.stop_requested():
            self.store.delete_many([self.pipeline.paths.stop_request])


def _take_lease(held: contextlib.ExitStack, backend: StateBackend) -> int:
    """Become the only writer in the legacy layout; return the lease's token, else 0."""
    paths = backend.paths
    if paths.layout is not Layout.LEGACY:
        return 0
    owner = f"run {uuid.uuid4().hex[:16]}"
    # Without the caller's clock, because a lease depends on real time.
    leased = held.enter_context(
        lease(backend.store, paths, owner, LeaseOptions(directory=paths.writers))
    )
    backend.store = leased
    return leased.lease.token


def _keyed_clock_micros(base: Checkpoint | None) -> int:
    """Return the engine's clock of the newest row by key: no later epoch may have an earlier one.

    A publisher whose clock is behind finishes an epoch before the clock of its rows by key, which
    a later delete must not precede.
    """
    keyed = (
        file.max_timestamp_micros
        for operator in (base.operators if base else ())
        for name, files in operator.tables.items()
        if isinstance(files, ExpiringTimeKeyFiles)
        and name in operator.configs
        and KeyedForm.of(operator.configs[name]) is not None
        for file in files.files
    )
    return max(keyed, default=0)


def _may_have_alarms(pipeline: Pipeline, base: Checkpoint | None) -> bool:
    """Whether the checkpoint lists timers of the engine's clock."""
    listed = (
        {(operator.operator, name) for operator in base.operators for name in operator.tables}
        if base
        else set()
    )
    return any(
        (operator, name) in listed and KeyedForm.of(config) is KeyedForm.PROCESSING_TIMERS
        for operator, node in pipeline.operators.items()
        for name, config in registered(node.operator).items()
    )


def finished(store: ObjectStore, pipeline: Pipeline) -> Checkpoint | None:
    """Return the newest checkpoint of a job if all its sources have ended and nothing is left to
    do.

    Then no run is needed: it would only take a worker generation. None = start a run.
    """
    try:
        newest = StateBackend(store, pipeline.paths).load()
    except (NotFoundError, FormatError, ProtocolError):
        return None  # the start reports the error
    progress = newest.progress
    if newest.state is not CheckpointState.READY or progress is None or not progress.exhausted:
        return None
    checks = StartChecks(store, pipeline, StateBackend(store, pipeline.paths))
    try:
        checks.settled(newest)
    except InputError:
        return None  # likewise
    checks.check_sources(newest)
    offsets = json.loads(progress.offsets)
    ended = all(
        name in offsets and node.source.exhausted(offsets[name])
        for name, node in pipeline.sources.items()
    )
    return newest if ended else None


def _next_epoch(
    plan: EpochPlan,
    operators: Sequence[OperatorCheckpoint],
    base: Checkpoint | None,
    progress: RunProgress,
    now_micros: int,
) -> NextEpoch:
    return NextEpoch(
        epoch=plan.epoch,
        min_epoch=plan.min_epoch,
        parent_ref=base.ref if base else None,
        operators=tuple(operators),
        progress=progress,
        start_time_micros=min(operator.start_time_micros for operator in operators),
        finish_time_micros=now_micros,
        needs_commit=any(operator.needs_commit for operator in operators),
    )


# ---- deletion of expired epochs by the run that writes new ones ----------------------------------

_LOG = logging.getLogger(__name__)
CLEANUP_EVERY_EPOCHS = 4


class RunRetention:
    """The retention of one run. A failure of the store does not stop the run.

    Attributes:
        failures: how often expired epochs could not be deleted.
        overdue_epochs: how many of them the last failure left; 0 once retention has succeeded.
    """

    def __init__(self, pipeline: Pipeline, backend: StateBackend) -> None:
        self._pipeline = pipeline
        self._backend = backend
        self.failures = 0
        self.overdue_epochs = 0
        self._failed_in_a_row = 0

    def expire(self, plan: EpochPlan) -> None:
        """Delete the epochs before the oldest one to keep, if a cleanup is due.

        Raises:
            ConflictError: a newer run was started.
        """
        # Retry at once only after the first failure: a lasting one must not slow every epoch.
        retries = self._failed_in_a_row == 1
        due = plan.epoch % CLEANUP_EVERY_EPOCHS == 0 or plan.then_stop or retries
        if self._pipeline.keep_epochs is None or not due or plan.min_epoch <= 1:
            return
        try:
            self._backend.cleanup_checkpoint(plan.min_epoch)
        except ConflictError:
            raise
        except ArroyoStateError as error:
            self._report_overdue(plan.min_epoch, error)
        else:
            self.overdue_epochs = self._failed_in_a_row = 0

    def _report_overdue(self, min_epoch: Epoch, error: ArroyoStateError) -> None:
        """Count and log the epochs left for the next attempt; the epoch just written exists."""
        self.failures += 1
        self._failed_in_a_row += 1
        with contextlib.suppress(StorageError, NotFoundError):
            left = self._backend.every_epoch()
            self.overdue_epochs = sum(epoch < min_epoch for epoch in left)
        _LOG.warning(
            "retention of job %s failed; %d epochs before epoch %d stay until the next attempt: %s",
            self._pipeline.paths.root,
            self.overdue_epochs,
            min_epoch,
            error,
        )
