"""TableManager: all tables of one subtask, loaded from a checkpoint and written at a barrier.

Source: crates/arroyo-state/src/tables/table_manager.rs.
Differs: the checkpoint runs in the caller's thread and is verified before it is reported.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from arroyo_dagster.errors import InputError, ProtocolError
from arroyo_dagster.state.model.checkpoints import (
    ExpiringTimeKeyReport,
    OperatorCheckpoint,
    SubtaskCheckpoint,
    TableReport,
)
from arroyo_dagster.state.model.clock import Clock, wall_clock
from arroyo_dagster.state.model.ids import Epoch, StatePath, TableName, WorkerGeneration
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyFiles,
    GlobalKeyedConfig,
    TableConfig,
    TimeFile,
)
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.expiring_time_key import ExpiringTimeKeyTable
from arroyo_dagster.state.tables.global_keyed import (
    GlobalKeyedTable,
    GlobalKeyedView,
    MigratableState,
    is_migratable,
)
from arroyo_dagster.state.tables.keyed_forms import OpenKeyedState
from arroyo_dagster.state.tables.messages import (
    CheckpointMessage,
    CommitData,
    Compaction,
    StateMessage,
    TableChange,
)
from arroyo_dagster.state.tables.open_views import AnyTable, LoadedState, OpenViews
from arroyo_dagster.state.tables.registration import as_stored, check_tables
from arroyo_dagster.state.tables.table import Checkpointer, EpochFiles, TaskInfo
from arroyo_dagster.state.tables.time_views import (
    ExpiringTimeKeyView,
    KeyTimeView,
    TimeView,
    UncachedKeyValueView,
)

_View = TypeVar("_View", bound=TimeView)
_Keyed = TypeVar("_Keyed", bound=OpenKeyedState)
WriteSubtaskMetadata = Callable[[OperatorCheckpoint, int], object]


class SubtaskBackend(Protocol):
    """The parts of a job's backend that a table manager needs."""

    @property
    def store(self) -> ObjectStore:
        """The store of the job's files."""

    @property
    def generation(self) -> WorkerGeneration | None:
        """The worker generation that writes; None in the legacy layout."""

    @property
    def write_operator_checkpoint_metadata(self) -> WriteSubtaskMetadata:
        """Writes the metadata of one subtask, and reads it back."""


class TableManager:
    """All tables of one subtask.

    Views change their rows in memory and send each change here. `checkpoint` writes the changes
    since the last barrier under names that no other attempt uses, and reports the files.

    Args:
        backend: the parts of the job's backend that the subtask needs.
        task: the subtask.
        configs: the tables that the operator registers.
        restored: the operator at the epoch to continue from; None to start empty.
        base_epoch: the epoch to continue, if `restored` is None because the operator is new.

    Raises:
        InputError: as `check_tables`, for the tables of the checkpoint.
    """

    def __init__(
        self,
        backend: SubtaskBackend,
        task: TaskInfo,
        configs: Mapping[TableName, TableConfig],
        restored: OperatorCheckpoint | None,
        *,
        base_epoch: Epoch | None = None,
        clock: Clock = wall_clock,
    ) -> None:
        if restored is not None:
            check_tables(configs, restored)
        self.task = task
        self.configs = as_stored(configs, restored)
        self.stopped = False
        self._backend = backend
        self._clock = clock
        self._tables = {
            name: _open_table(config, backend.store) for name, config in self.configs.items()
        }
        self._checkpointers: dict[TableName, Checkpointer] = {}
        self._time_files: dict[TableName, tuple[TimeFile, ...]] = {}
        self._reports: dict[Epoch, SubtaskCheckpoint] = {}
        self._loaded = LoadedState.of(restored, base_epoch, self.configs)
        self._views = OpenViews(self._tables, self.configs, self._loaded, task, self.send)
        self._following = Following(
            self._views, self._loaded, task, self._reports, self._time_files
        )

    @classmethod
    def load(
        cls,
        backend: SubtaskBackend,
        task: TaskInfo,
        configs: Mapping[TableName, TableConfig],
        restored: OperatorCheckpoint | None,
        *,
        base_epoch: Epoch | None = None,
    ) -> TableManager:
        """Open the tables of a subtask of a job that `backend` writes; see the class.

        Source: crates/arroyo-state/src/tables/table_manager.rs, `TableManager::load`.
        Differs: each table is read when it is first used; the restored watermark is
        `watermark_micros`.
        """
        return cls(backend, task, configs, restored, base_epoch=base_epoch)

    @property
    def epoch(self) -> Epoch:
        """The epoch of the tables."""
        return self._loaded.epoch

    @property
    def watermark_micros(self) -> int | None:
        """The event time reached at the tables' epoch; None = not all subtasks had one.

        For a restored epoch it is the smallest of its subtasks. Rows older than this minus a
        table's retention have expired.
        """
        return self._loaded.watermark_micros

    # ---- views -----------------------------------------------------------------------------------

    def get_global_keyed_state(
        self, name: str, key: Any = None, value: Any = None
    ) -> GlobalKeyedView[Any, Any]:
        """Return the view of a global keyed table, with all its entries.

        Args:
            name: as registered.
            key, value: Python types; without them, keys and values have the types of the stored
                type descriptions (dataclasses become dicts).

        Raises:
            InputError: no such table, no types known, or other types than the registered ones.
        """
        return self._views.global_keyed(name, key, value)

    def get_global_keyed_state_migratable(
        self, name: str, key: Any, value: type[MigratableState]
    ) -> GlobalKeyedView[Any, Any]:
        """Return the view as `get_global_keyed_state`; the value type must support migration."""
        if not is_migratable(value):
            raise InputError(
                f"{getattr(value, '__name__', value)} has no VERSION, PREVIOUS and migrate",
                table=name,
            )
        return self.get_global_keyed_state(name, key, value)

    def get_expiring_time_key_table(self, name: str) -> ExpiringTimeKeyView:
        """Return the view of an expiring table: the live rows of this subtask's key range.

        Raises:
            InputError: no such table.
        """
        return self._views.time_view(name, ExpiringTimeKeyView)

    def get_key_time_table(self, name: str) -> KeyTimeView:
        """Return the view as `get_expiring_time_key_table`, with lookups of rows by storage key."""
        return self._views.time_view(name, KeyTimeView)

    def get_uncached_key_value_view(self, name: str) -> UncachedKeyValueView:
        """Return a view of an expiring table that keeps nothing in memory.

        Raises:
            InputError: no such table, or it already has a view of another kind.
        """
        return self._views.uncached(name)

    def get_keyed_state(self, name: str, form: type[_Keyed]) -> _Keyed:
        """Return the view of a `keyed_state` or `keyed_timers` table, with this subtask's keys.

        Args:
            form: `ValueState`, `ListState`, `MapState` or `Timers`.

        Raises:
            InputError: no such table, or it has another form.
        """
        return self._views.keyed(name, form)

    # ---- messages --------------------------------------------------------------------------------

    def send(self, message: StateMessage) -> None:
        """Process a message from a view or the runtime.

        Raises:
            InputError: a change after the checkpoint with `then_stop`.
        """
        if isinstance(message, TableChange):
            self._change(message)
        elif isinstance(message, Compaction):
            self.load_compacted(message)
        elif isinstance(message, CheckpointMessage):
            self._checkpoint(message)

    def insert_committing_data(self, table: str, data: bytes) -> None:
        """Set the data for the second phase of this epoch's commit; once per epoch and table."""
        self.send(TableChange(TableName(table), CommitData(data)))

    def _change(self, message: TableChange) -> None:
        if self.stopped:
            raise InputError(
                "a table was changed after the last checkpoint",
                operator=self.task.operator,
                table=message.table,
            )
        self._checkpointer(message.table).apply(message.data)

    def _checkpointer(self, name: TableName) -> Checkpointer:
        if name not in self._checkpointers:
            epoch = Epoch(self.epoch + 1)
            files = EpochFiles(
                epoch=epoch,
                keys=self.task.key_range,
                name_file=_namer(self._backend, self.task, name, epoch),
            )
            self._checkpointers[name] = self._tables[name].checkpoint(files)
        return self._checkpointers[name]

    # ---- the barrier -----------------------------------------------------------------------------

    def begin_epoch(self, clock_micros: int) -> None:
        """Set the engine's clock for the next epoch, and remove keyed state that reached its ttl.

        Without this call, the clock is read at the barrier. It never goes back.
        """
        self._views.begin_epoch(clock_micros)

    def checkpoint(
        self, epoch: int, min_epoch: int, watermark: int | None, then_stop: bool
    ) -> SubtaskCheckpoint:
        """Write all changes since the last barrier.

        Serialises each table, writes its Parquet, gathers files, bytes and schemas into metadata,
        writes the metadata and reads it back. Then drops bookkeeping of epochs before `min_epoch`;
        never a row, never a reference to a file of an older epoch.

        Args:
            epoch: one more than the last.
            min_epoch: the oldest epoch still kept.
            watermark: event time reached in microseconds; None = none yet.
            then_stop: refuse all later changes.

        Raises:
            ProtocolError: `epoch` is not the next one.
            InputError: another subtask owns some of the rows; nothing was written.
        """
        self.send(
            CheckpointMessage(
                epoch=Epoch(epoch),
                min_epoch=Epoch(min_epoch),
                timestamp_micros=self._clock(),
                watermark_micros=watermark,
                then_stop=then_stop,
            )
        )
        return self._reports[Epoch(epoch)]

    def _checkpoint(self, barrier: CheckpointMessage) -> None:
        if barrier.epoch != self.epoch + 1:
            raise ProtocolError(
                f"a barrier for epoch {barrier.epoch} came after epoch {self.epoch}",
                operator=self.task.operator,
                subtask=self.task.task_index,
            )
        for name, changes in self._views.keyed_changes(barrier).items():
            self._checkpointers.pop(name, None)  # of the same barrier, when it failed
            for change in changes:
                self._checkpointer(name).apply(change)
        checkpointers = {name: self._checkpointer(name) for name in self.configs}
        for checkpointer in checkpointers.values():
            checkpointer.prepare(barrier.watermark_micros)
        # State changes only after all is written: the same barrier may come again.
        tables: dict[TableName, TableReport] = {}
        size = 0
        for name, checkpointer in checkpointers.items():
            report, written = checkpointer.finish(barrier.watermark_micros, self._listed(name))
            size += written
            if report is not None:
                tables[name] = report
        done = SubtaskCheckpoint(
            subtask_index=self.task.task_index,
            start_time_micros=barrier.timestamp_micros,
            finish_time_micros=self._clock(),
            watermark_micros=barrier.watermark_micros,
            size_bytes=size,
            tables=tables,
            configs={name: self.configs[name] for name in tables},
        )
        self._backend.write_operator_checkpoint_metadata(
            _as_operator(self.task, barrier.epoch, done), self.task.task_index
        )
        self._after(barrier, done)

    def _listed(self, name: TableName) -> tuple[TimeFile, ...]:
        if name in self._time_files:
            return self._time_files[name]
        stored = self._loaded.files(name)
        return stored.files if isinstance(stored, ExpiringTimeKeyFiles) else ()

    def _after(self, barrier: CheckpointMessage, done: SubtaskCheckpoint) -> None:
        self._loaded.epoch = barrier.epoch
        self._loaded.watermark_micros = barrier.watermark_micros
        self.stopped = barrier.then_stop
        self._checkpointers.clear()
        self._reports[barrier.epoch] = done
        for old in [epoch for epoch in self._reports if epoch < min(barrier.min_epoch, self.epoch)]:
            del self._reports[old]
        for name, table in self._tables.items():
            report = done.tables.get(name)
            self._loaded.read_files[name].update(report.paths if report else ())
            if isinstance(table, ExpiringTimeKeyTable):
                files = report.files if isinstance(report, ExpiringTimeKeyReport) else ()
                self._time_files[name] = files
        self._views.after_barrier(self._time_files, then_stop=self.stopped)

    # ---- following the job -----------------------------------------------------------------------

    def follow(self, published: OperatorCheckpoint) -> bool:
        """Advance to the state of `published`: the epoch this manager wrote, or a later one.

        Rows that other subtasks wrote, or other processes for this one, are read from the files
        listed since.

        Returns:
            False if that is impossible because another attempt at the epoch won. The manager is
            then unusable; load a new one.
        """
        return self._following.follow(published)

    def load_compacted(self, message: Compaction) -> None:
        """Record merges before an epoch lists their outputs; rows in memory need not be read again.

        Source: crates/arroyo-state/src/tables/table_manager.rs, `load_compacted`.
        Differs: the coordinator lists files; a subtask learns which files outputs replace.
        """
        self._following.load_compacted(message)


def _open_table(config: TableConfig, store: ObjectStore) -> AnyTable:
    if isinstance(config.config, GlobalKeyedConfig):
        return GlobalKeyedTable(config, store)
    return ExpiringTimeKeyTable(config, store)


def _as_operator(task: TaskInfo, epoch: Epoch, done: SubtaskCheckpoint) -> OperatorCheckpoint:
    """Return the metadata of one subtask, in the form of an operator's."""
    return OperatorCheckpoint(
        job=task.job,
        operator=task.operator,
        epoch=epoch,
        parallelism=task.parallelism,
        min_watermark_micros=done.watermark_micros,
        max_watermark_micros=done.watermark_micros,
        start_time_micros=done.start_time_micros,
        finish_time_micros=done.finish_time_micros,
        subtask=done,
    )


def _namer(
    backend: SubtaskBackend, task: TaskInfo, table: TableName, epoch: Epoch
) -> Callable[[str], StatePath]:
    """Return a function that names data files of a table, each time with a new attempt."""
    paths = JobPaths(task.job, task.pipeline)

    def name_file(suffix: str) -> StatePath:
        attempt = uuid.uuid4().hex[:16] + suffix
        return paths.data_file(
            task.operator, table, task.task_index, epoch, backend.generation, attempt=attempt
        )

    return name_file


# ---- advance the tables of one subtask to a later epoch of its job -------------------------------


class Following:
    """Advances the views of a subtask with its job.

    Args:
        reports: the subtask's checkpoints, by epoch.
        time_files: by expiring table, the files that the subtask carries over; kept up to date.
    """

    def __init__(
        self,
        views: OpenViews,
        loaded: LoadedState,
        task: TaskInfo,
        reports: Mapping[Epoch, SubtaskCheckpoint],
        time_files: dict[TableName, tuple[TimeFile, ...]],
    ) -> None:
        self._views = views
        self._loaded = loaded
        self._task = task
        self._reports = reports
        self._time_files = time_files

    def follow(self, published: OperatorCheckpoint) -> bool:
        """Advance as `TableManager.follow`."""
        if published.epoch < self._loaded.epoch or not self._confirmed_by(published):
            return False
        for name in self._views.tables:
            files = published.tables.get(name)
            if isinstance(self._views.tables[name], GlobalKeyedTable):
                self._follow_global(name, files.paths if files else ())
            else:
                listed = files.files if isinstance(files, ExpiringTimeKeyFiles) else ()
                self._follow_expiring(name, listed, published.min_watermark_micros)
        self._loaded.epoch = self._loaded.followed = published.epoch
        self._loaded.watermark_micros = published.min_watermark_micros
        self._loaded.restored = published
        return True

    def _confirmed_by(self, published: OperatorCheckpoint) -> bool:
        """Whether the published epoch is the one that this manager wrote last.

        Names are unique to an attempt: if the files are listed, the attempt won.
        """
        if self._loaded.followed == self._loaded.epoch:
            return True
        for name, report in self._reports[self._loaded.epoch].tables.items():
            files = published.tables.get(name)
            fresh = set(report.paths) & _written_in(report, self._loaded.epoch)
            if not fresh - self._loaded.merged[name] <= set(files.paths if files else ()):
                return False
        return True

    def _follow_global(self, name: TableName, listed: tuple[StatePath, ...]) -> None:
        view = self._views.global_views.get(name)
        read_files, merged = self._loaded.read_files[name], self._loaded.merged[name]
        if view is not None and not read_files - merged <= set(listed):
            # A file that should be in memory is no longer listed: its merge was not announced.
            view.reload(listed)
        elif view is not None:
            # From the first unknown file on, including own ones: if two subtasks wrote one key, the
            # later file in the list wins here as it does at a restore.
            fresh = (
                i for i, path in enumerate(listed) if path not in self._loaded.read_files[name]
            )
            view.follow(listed[next(fresh, len(listed)) :])
        self._loaded.read_files[name] = set(listed)
        self._loaded.merged[name].clear()

    def _follow_expiring(
        self, name: TableName, listed: tuple[TimeFile, ...], watermark_micros: int | None
    ) -> None:
        table = self._views.tables[name]
        assert isinstance(table, ExpiringTimeKeyTable)
        keys = self._task.key_range
        mine = [f for f in listed if keys.intersects(f.min_routing_key, f.max_routing_key)]
        fresh = [file for file in mine if file.path not in self._loaded.read_files[name]]
        view, cutoff = self._views.time_views.get(name), table.cutoff_micros(watermark_micros)
        keyed = self._views.keyed_views.get(name)
        if isinstance(view, UncachedKeyValueView):
            view.go_on_from(mine, cutoff)
        elif isinstance(view, ExpiringTimeKeyView):
            if any(file.compaction_generation for file in fresh):
                view.forget()  # some of its rows are in memory: read everything again
                fresh = mine
            view.replay(table.read(fresh, keys, cutoff_micros=cutoff))
            view.evict(cutoff)
        elif keyed is not None:
            if any(file.compaction_generation for file in fresh):
                keyed.forget()
                fresh = mine
            keyed.replay(table.stream(fresh, keys))
        self._time_files[name] = tuple(mine)
        self._loaded.read_files[name] = {file.path for file in listed}
        self._loaded.merged[name].clear()

    def load_compacted(self, message: Compaction) -> None:
        """Record merges as `TableManager.load_compacted`."""
        for name, merged in message.tables.items():
            read_files = self._loaded.read_files.get(name)
            view = self._views.global_views.get(name)
            inputs = set(message.inputs[name])
            # Rows in memory need not be read again. Inputs not read yet may be deleted before the
            # table is next used; then the table is read again.
            if (
                read_files is not None
                and inputs <= read_files
                and not (view and view.is_behind(inputs))
            ):
                read_files.update(merged.paths)
                self._loaded.merged[name].update(inputs)


def _written_in(report: TableReport, epoch: Epoch) -> set[StatePath]:
    if isinstance(report, ExpiringTimeKeyReport):
        return {file.path for file in report.files if file.epoch == epoch}
    return set(report.paths)
