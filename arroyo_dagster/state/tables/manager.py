"""TableManager: all tables of one subtask, loaded from a checkpoint and written at a barrier.

Source: crates/arroyo-state/src/tables/table_manager.rs.
Differs: the checkpoint is taken in the caller's thread and verified before it is reported.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, cast

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
    GlobalKeyedFiles,
    TableConfig,
    TimeFile,
)
from arroyo_dagster.state.model.types import describe, without_classes
from arroyo_dagster.state.planning.restore.checkpoint import files_to_carry
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.expiring_time_key import ExpiringTimeKeyTable
from arroyo_dagster.state.tables.global_keyed import (
    GlobalKeyedTable,
    GlobalKeyedView,
    MigratableState,
    is_migratable,
)
from arroyo_dagster.state.tables.messages import (
    CheckpointMessage,
    CommitData,
    Compaction,
    StateMessage,
    TableChange,
)
from arroyo_dagster.state.tables.registration import as_stored, check_tables
from arroyo_dagster.state.tables.table import Checkpointer, EpochFiles, TaskInfo
from arroyo_dagster.state.tables.time_views import (
    ExpiringTimeKeyView,
    KeyTimeView,
    TimeView,
    UncachedKeyValueView,
)

_View = TypeVar("_View", bound=TimeView)
WriteSubtaskMetadata = Callable[[OperatorCheckpoint, int], object]


class SubtaskBackend(Protocol):
    """What a table manager needs of the backend of its job."""

    @property
    def store(self) -> ObjectStore:
        """Where the job's files lie."""

    @property
    def generation(self) -> WorkerGeneration | None:
        """The worker generation that writes; None in the legacy layout."""

    @property
    def write_operator_checkpoint_metadata(self) -> WriteSubtaskMetadata:
        """Writes the metadata of one subtask, and reads it back."""


class TableManager:
    """All tables of one subtask.

    Views change what is in memory and send each change here; `checkpoint` writes what has come
    since the last barrier under names that no other attempt uses, and reports the files.

    Args:
        task: who this is.
        configs: the tables the operator registers.
        store: where the job's files lie.
        generation: the worker generation that writes; None in the legacy layout.
        restored: the operator at the epoch to continue from; None to start empty.
        write_metadata: writes the durable "this subtask is done" and reads it back.
        base_epoch: the epoch to continue, where `restored` is None because the operator is new.

    Raises:
        InputError: the checkpoint has a table the operator does not register, or one that has
            changed kind.
    """

    def __init__(
        self,
        *,
        task: TaskInfo,
        configs: Mapping[TableName, TableConfig],
        store: ObjectStore,
        generation: WorkerGeneration | None,
        restored: OperatorCheckpoint | None,
        write_metadata: WriteSubtaskMetadata,
        base_epoch: Epoch | None = None,
        clock: Clock = wall_clock,
    ) -> None:
        self.task = task
        if restored is not None:
            check_tables(configs, restored)
        self.configs = as_stored(configs, restored)
        self._store = store
        self._paths = JobPaths(task.job, task.pipeline)
        self._generation = generation
        self._write_metadata = write_metadata
        self._clock = clock
        self._tables = {name: _open_table(config, store) for name, config in self.configs.items()}
        self._global_views: dict[TableName, GlobalKeyedView[Any, Any]] = {}
        self._time_views: dict[TableName, TimeView] = {}
        self._checkpointers: dict[TableName, Checkpointer] = {}
        self._time_files: dict[TableName, tuple[TimeFile, ...]] = {}
        self._seen: dict[TableName, set[StatePath]] = {name: set() for name in configs}
        self._merged: dict[TableName, set[StatePath]] = {name: set() for name in configs}
        self._reports: dict[Epoch, SubtaskCheckpoint] = {}
        self._watermark_micros: int | None = None
        self.epoch = Epoch(base_epoch or 0)
        self._followed = self.epoch
        self.stopped = False
        if restored is not None:
            self.epoch = self._followed = restored.epoch
            self._watermark_micros = restored.min_watermark_micros
        self._restored = restored

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
        Differs: tables are read when they are first asked for; the restored watermark is
        `watermark_micros`.
        """
        return cls(
            task=task,
            configs=configs,
            store=backend.store,
            generation=backend.generation,
            restored=restored,
            write_metadata=backend.write_operator_checkpoint_metadata,
            base_epoch=base_epoch,
        )

    @property
    def watermark_micros(self) -> int | None:
        """The event time reached at the epoch the tables are of; None = not all subtasks had one.

        Of a restored epoch the smallest of its subtasks; rows older than this less a table's
        retention are gone.
        """
        return self._watermark_micros

    # ---- views -----------------------------------------------------------------------------------

    def get_global_keyed_state(
        self, name: str, key: Any = None, value: Any = None
    ) -> GlobalKeyedView[Any, Any]:
        """The view of a global keyed table, all its entries at hand.

        Args:
            name: as registered.
            key, value: Python types; without them keys and values are what the stored type
                descriptions give (dataclasses become dicts).

        Raises:
            InputError: no such table, no types known, or other types than the registered ones.
        """
        table = self._table(name, GlobalKeyedTable)
        known = self._global_views.get(TableName(name))
        if known is not None:
            return known
        key = self._typed(name, "key", key, table.config.key_type)
        value = self._typed(name, "value", value, table.config.value_type)
        if is_migratable(value) and table.config.state_version != value.VERSION:
            raise InputError(
                f"the value type is of version {value.VERSION}, the table is registered with "
                f"{table.config.state_version}",
                table=name,
                next_step="register it with global_table_config_with_version(…, VERSION)",
            )
        view: GlobalKeyedView[Any, Any] = GlobalKeyedView(table, key, value, self.send)
        self._global_views[TableName(name)] = view
        files = self._restored.tables.get(TableName(name)) if self._restored else None
        if isinstance(files, GlobalKeyedFiles):
            view.follow(files.files)
            self._seen[TableName(name)].update(files.files)
        return view

    def get_global_keyed_state_migratable(
        self, name: str, key: Any, value: type[MigratableState]
    ) -> GlobalKeyedView[Any, Any]:
        """As `get_global_keyed_state`, for a value type that must know how to migrate."""
        if not is_migratable(value):
            raise InputError(
                f"{getattr(value, '__name__', value)} has no VERSION, PREVIOUS and migrate",
                table=name,
            )
        return self.get_global_keyed_state(name, key, value)

    def get_expiring_time_key_table(self, name: str) -> ExpiringTimeKeyView:
        """The view of an expiring table: the live rows of this subtask's key range.

        Raises:
            InputError: no such table.
        """
        return self._time_view(name, ExpiringTimeKeyView)

    def get_key_time_table(self, name: str) -> KeyTimeView:
        """As `get_expiring_time_key_table`, with the rows looked up by their storage key."""
        return self._time_view(name, KeyTimeView)

    def get_uncached_key_value_view(self, name: str) -> UncachedKeyValueView:
        """A view of an expiring table that keeps nothing in memory.

        Raises:
            InputError: no such table, or it has a view of another kind already.
        """
        table = self._table(name, ExpiringTimeKeyTable)
        view = UncachedKeyValueView(table, self.send, self.task.key_range)
        known = self._time_views.setdefault(TableName(name), view)
        self._check_view(name, known, UncachedKeyValueView)
        if known is view:
            view.go_on_from(self._restore_from(name, table), self._cutoff(table))
        return cast(UncachedKeyValueView, known)

    def _time_view(self, name: str, kind: type[_View]) -> _View:
        table = self._table(name, ExpiringTimeKeyTable)
        known = self._time_views.get(TableName(name))
        if known is not None:
            self._check_view(name, known, kind)
            return cast(_View, known)
        view = kind(table, self.send)
        assert isinstance(view, ExpiringTimeKeyView)
        files, cutoff = self._restore_from(name, table), self._cutoff(table)
        view.replay(table.read(files, self.task.key_range, cutoff_micros=cutoff))
        view.evict(cutoff)
        self._time_views[TableName(name)] = view
        return view

    def _check_view(self, name: str, known: TimeView, kind: type[TimeView]) -> None:
        if type(known) is not kind:
            raise InputError(
                f"the table already has a view of type {type(known).__name__}, not {kind.__name__}",
                operator=self.task.operator,
                table=name,
                next_step="use one view per table",
            )

    def _cutoff(self, table: ExpiringTimeKeyTable) -> int:
        return table.cutoff_micros(self._watermark_micros)

    def _restore_from(self, name: str, table: ExpiringTimeKeyTable) -> tuple[TimeFile, ...]:
        """The files that this subtask opens of what the restored epoch lists."""
        stored = self._restored.tables.get(TableName(name)) if self._restored else None
        if not isinstance(stored, ExpiringTimeKeyFiles):
            return ()
        self._seen[TableName(name)].update(stored.paths)
        return files_to_carry(stored.files, self._cutoff(table), self.task.key_range)

    def _table(self, name: str, kind: type[Any]) -> Any:
        table = self._tables.get(TableName(name))
        if not isinstance(table, kind):
            raise InputError(
                f"the operator has no {'global keyed' if kind is GlobalKeyedTable else 'expiring'}"
                f" table {name!r}",
                operator=self.task.operator,
                tables={known: config.kind.label for known, config in self.configs.items()},
                next_step="return its configuration from tables()",
            )
        return table

    def _typed(self, name: str, part: str, given: Any, stored: Any) -> Any:
        if given is None and stored is None:
            raise InputError(
                f"the type of the {part}s is not known",
                table=name,
                next_step=f"pass {part}=… to global_table_config or to get_global_keyed_state",
            )
        if given is not None and stored is not None:
            described = without_classes(describe(given))
            if described != stored:
                raise InputError(
                    f"the type of the {part}s does not match the registered one",
                    table=name,
                    registered=stored,
                    given=described,
                )
        return stored if given is None else given

    # ---- messages --------------------------------------------------------------------------------

    def send(self, message: StateMessage) -> None:
        """Take a message of a view or of the runtime.

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
        """Leave what the second phase of this epoch's commit needs; once an epoch and table."""
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
                epoch=epoch, keys=self.task.key_range, name_file=self._namer(name, epoch)
            )
            self._checkpointers[name] = self._tables[name].checkpoint(files)
        return self._checkpointers[name]

    def _namer(self, table: TableName, epoch: Epoch) -> Callable[[str], StatePath]:
        def name_file(suffix: str) -> StatePath:
            return self._paths.data_file(
                self.task.operator,
                table,
                self.task.task_index,
                epoch,
                self._generation,
                attempt=uuid.uuid4().hex[:16] + suffix,
            )

        return name_file

    # ---- the barrier -----------------------------------------------------------------------------

    def checkpoint(
        self, epoch: int, min_epoch: int, watermark: int | None, then_stop: bool
    ) -> SubtaskCheckpoint:
        """Write everything since the last barrier, in five steps.

        1. Serialise each table. 2. Write its Parquet. 3. Collect files, bytes and schemas into
        metadata. 4. Write the metadata and read it back. 5. Drop bookkeeping of epochs before
        `min_epoch`; never a row, never a reference to a file of an older epoch.

        Args:
            epoch: one more than the last.
            min_epoch: the oldest epoch still kept.
            watermark: event time reached in microseconds; None = none yet.
            then_stop: refuse changes from here on.

        Raises:
            ProtocolError: `epoch` is not the next one.
            InputError: rows that another subtask owns; nothing was written.
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
        checkpointers = {name: self._checkpointer(name) for name in self.configs}
        for checkpointer in checkpointers.values():
            checkpointer.prepare(barrier.watermark_micros)
        # Nothing of this manager changes before all is written: the same barrier may come again.
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
        self._write_metadata(self._as_operator(barrier.epoch, done), self.task.task_index)
        self._after(barrier, done)

    def _listed(self, name: TableName) -> tuple[TimeFile, ...]:
        if name in self._time_files:
            return self._time_files[name]
        stored = self._restored.tables.get(name) if self._restored else None
        return stored.files if isinstance(stored, ExpiringTimeKeyFiles) else ()

    def _as_operator(self, epoch: Epoch, done: SubtaskCheckpoint) -> OperatorCheckpoint:
        return OperatorCheckpoint(
            job=self.task.job,
            operator=self.task.operator,
            epoch=epoch,
            parallelism=self.task.parallelism,
            min_watermark_micros=done.watermark_micros,
            max_watermark_micros=done.watermark_micros,
            start_time_micros=done.start_time_micros,
            finish_time_micros=done.finish_time_micros,
            subtask=done,
        )

    def _after(self, barrier: CheckpointMessage, done: SubtaskCheckpoint) -> None:
        self.epoch = barrier.epoch
        self.stopped = barrier.then_stop
        self._watermark_micros = barrier.watermark_micros
        self._checkpointers.clear()
        self._reports[barrier.epoch] = done
        for old in [epoch for epoch in self._reports if epoch < min(barrier.min_epoch, self.epoch)]:
            del self._reports[old]
        for name, table in self._tables.items():
            report = done.tables.get(name)
            self._seen[name].update(report.paths if report else ())
            if isinstance(table, ExpiringTimeKeyTable):
                files = report.files if isinstance(report, ExpiringTimeKeyReport) else ()
                self._time_files[name] = files
        for name, view in self._time_views.items():
            table = self._tables[name]
            assert isinstance(table, ExpiringTimeKeyTable)
            cutoff = table.cutoff_micros(barrier.watermark_micros)
            if isinstance(view, ExpiringTimeKeyView):
                view.evict(cutoff)
            elif isinstance(view, UncachedKeyValueView):
                view.go_on_from(self._time_files[name], cutoff)

    # ---- following the job -----------------------------------------------------------------------

    def follow(self, published: OperatorCheckpoint) -> bool:
        """Come to the state of `published`: the epoch this manager wrote, or a later one.

        What other subtasks wrote, or other processes for this one, is read from the files listed
        since.

        Returns:
            False if that is not possible: another attempt at the epoch won. The manager is then
            useless; load a new one.
        """
        if published.epoch < self.epoch or not self._confirmed_by(published):
            return False
        for name in self.configs:
            files = published.tables.get(name)
            if isinstance(self._tables[name], GlobalKeyedTable):
                self._follow_global(name, files.paths if files else ())
            else:
                listed = files.files if isinstance(files, ExpiringTimeKeyFiles) else ()
                self._follow_expiring(name, listed, published.min_watermark_micros)
        self.epoch = self._followed = published.epoch
        self._watermark_micros = published.min_watermark_micros
        self._restored = published
        return True

    def _confirmed_by(self, published: OperatorCheckpoint) -> bool:
        """Whether what this manager wrote last is what was published.

        Names are unique to an attempt: if the files are listed, the attempt won.
        """
        if self._followed == self.epoch:
            return True
        for name, report in self._reports[self.epoch].tables.items():
            files = published.tables.get(name)
            fresh = set(report.paths) & _written_in(report, self.epoch)
            if not fresh - self._merged[name] <= set(files.paths if files else ()):
                return False
        return True

    def _follow_global(self, name: TableName, listed: tuple[StatePath, ...]) -> None:
        view = self._global_views.get(name)
        if view is not None and not self._seen[name] - self._merged[name] <= set(listed):
            # A file that was to be in memory is listed no more: merged, and that was not said.
            view.reload(listed)
        elif view is not None:
            # From the first unknown file on, own ones included: of two subtasks that wrote one
            # key the later in the list wins here as it does at a restore.
            fresh = (at for at, path in enumerate(listed) if path not in self._seen[name])
            view.follow(listed[next(fresh, len(listed)) :])
        self._seen[name] = set(listed)
        self._merged[name].clear()

    def _follow_expiring(
        self, name: TableName, listed: tuple[TimeFile, ...], watermark_micros: int | None
    ) -> None:
        table = self._tables[name]
        assert isinstance(table, ExpiringTimeKeyTable)
        keys = self.task.key_range
        mine = [f for f in listed if keys.intersects(f.min_routing_key, f.max_routing_key)]
        fresh = [file for file in mine if file.path not in self._seen[name]]
        view, cutoff = self._time_views.get(name), table.cutoff_micros(watermark_micros)
        if isinstance(view, UncachedKeyValueView):
            view.go_on_from(mine, cutoff)
        elif isinstance(view, ExpiringTimeKeyView):
            if any(file.compaction_generation for file in fresh):
                view.forget()  # some of its rows are in memory: read everything anew
                fresh = mine
            view.replay(table.read(fresh, keys, cutoff_micros=cutoff))
            view.evict(cutoff)
        self._time_files[name] = tuple(mine)
        self._seen[name] = {file.path for file in listed}
        self._merged[name].clear()

    def load_compacted(self, message: Compaction) -> None:
        """Learn that files were merged, before an epoch lists the outputs in their place.

        Rows that are in memory need not be read again then.

        Source: crates/arroyo-state/src/tables/table_manager.rs, `load_compacted`.
        Differs: lists of files are the coordinator's; a subtask learns what outputs stand for.
        """
        for name, merged in message.tables.items():
            seen = self._seen.get(name)
            view = self._global_views.get(name)
            inputs = set(message.inputs[name])
            # What is in memory already need not be read again. Inputs that are not may be deleted
            # before the table is next asked: then it is read anew.
            if seen is not None and inputs <= seen and not (view and view.is_behind(inputs)):
                seen.update(merged.paths)
                self._merged[name].update(inputs)


def _written_in(report: TableReport, epoch: Epoch) -> set[StatePath]:
    if isinstance(report, ExpiringTimeKeyReport):
        return {file.path for file in report.files if file.epoch == epoch}
    return set(report.paths)


def _open_table(config: TableConfig, store: ObjectStore) -> GlobalKeyedTable | ExpiringTimeKeyTable:
    if isinstance(config.config, GlobalKeyedConfig):
        return GlobalKeyedTable(config, store)
    return ExpiringTimeKeyTable(config, store)
