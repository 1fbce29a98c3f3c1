"""The open views of one subtask's tables; each is opened when it is first used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.checkpoints import OperatorCheckpoint
from arroyo_dagster.state.model.ids import Epoch, StatePath, TableName
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyFiles,
    GlobalKeyedFiles,
    TableConfig,
    TableFiles,
    TimeFile,
)
from arroyo_dagster.state.model.types import describe, without_classes
from arroyo_dagster.state.planning.restore.checkpoint import files_to_carry
from arroyo_dagster.state.tables.expiring_time_key import ExpiringTimeKeyTable
from arroyo_dagster.state.tables.global_keyed import (
    GlobalKeyedTable,
    GlobalKeyedView,
    is_migratable,
)
from arroyo_dagster.state.tables.keyed_forms import KeyedForm, OpenKeyedState
from arroyo_dagster.state.tables.messages import CheckpointMessage, RecordBatch, TableChange
from arroyo_dagster.state.tables.table import TaskInfo
from arroyo_dagster.state.tables.time_views import (
    ExpiringTimeKeyView,
    TimeView,
    UncachedKeyValueView,
)

_View = TypeVar("_View", bound=TimeView)
_Keyed = TypeVar("_Keyed", bound=OpenKeyedState)
AnyTable = GlobalKeyedTable | ExpiringTimeKeyTable


class OpenViews:
    """The open views, one per table.

    Args:
        tables, configs: by their names.
        loaded: the files from which views are opened; files that are read are added to it.
        send: receives the changes that are made through views.
    """

    def __init__(
        self,
        tables: Mapping[TableName, AnyTable],
        configs: Mapping[TableName, TableConfig],
        loaded: LoadedState,
        task: TaskInfo,
        send: Callable[[TableChange], None],
    ) -> None:
        self.tables = tables
        self._configs = configs
        self._loaded = loaded
        self._task = task
        self._send = send
        self.global_views: dict[TableName, GlobalKeyedView[Any, Any]] = {}
        self.time_views: dict[TableName, TimeView] = {}
        self.keyed_views: dict[TableName, OpenKeyedState] = {}
        self._forms = {
            name: form
            for name, config in configs.items()
            if (form := KeyedForm.of(config)) is not None
        }

    def global_keyed(
        self, name: str, key: Any = None, value: Any = None
    ) -> GlobalKeyedView[Any, Any]:
        """Return the view as `TableManager.get_global_keyed_state`."""
        table = self._table(name, GlobalKeyedTable)
        opened = self.global_views.get(TableName(name))
        if opened is not None:
            return opened
        key = self._typed(name, "key", key, table.config.key_type)
        value = self._typed(name, "value", value, table.config.value_type)
        if is_migratable(value) and table.config.state_version != value.VERSION:
            raise InputError(
                f"the value type is of version {value.VERSION}, the table is registered with "
                f"{table.config.state_version}",
                table=name,
                next_step="register it with global_table_config_with_version(…, VERSION)",
            )
        view: GlobalKeyedView[Any, Any] = GlobalKeyedView(table, key, value, self._send)
        self.global_views[TableName(name)] = view
        files = self._loaded.files(TableName(name))
        if isinstance(files, GlobalKeyedFiles):
            view.follow(files.files)
            self._loaded.read_files[TableName(name)].update(files.files)
        return view

    def uncached(self, name: str) -> UncachedKeyValueView:
        """Return the view as `TableManager.get_uncached_key_value_view`."""
        table = self._rows_table(name)
        view = UncachedKeyValueView(table, self._send, self._task.key_range)
        registered = self.time_views.setdefault(TableName(name), view)
        self._check_view(name, registered, UncachedKeyValueView)
        if registered is view:
            view.go_on_from(self._restore_from(name, table), self._cutoff(table))
        return cast(UncachedKeyValueView, registered)

    def time_view(self, name: str, kind: type[_View]) -> _View:
        """Return the view of an expiring table that keeps its rows in memory.

        Raises:
            InputError: no such table, or it already has a view of another kind.
        """
        table = self._rows_table(name)
        opened = self.time_views.get(TableName(name))
        if opened is not None:
            self._check_view(name, opened, kind)
            return cast(_View, opened)
        view = kind(table, self._send)
        assert isinstance(view, ExpiringTimeKeyView)
        files, cutoff = self._restore_from(name, table), self._cutoff(table)
        view.replay(table.read(files, self._task.key_range, cutoff_micros=cutoff))
        view.evict(cutoff)
        self.time_views[TableName(name)] = view
        return view

    def keyed(self, name: str, kind: type[_Keyed]) -> _Keyed:
        """Return the view of a keyed table, with the rows of this subtask's keys.

        Raises:
            InputError: no such table, or it has another form.
        """
        if self._forms.get(TableName(name)) not in kind.forms:
            raise InputError(
                f"the operator has no table {name!r} of the form of {kind.__name__}",
                operator=self._task.operator,
                tables={other: form.value for other, form in self._forms.items()},
                next_step="return keyed_state(…) or keyed_timers(…) from tables()",
            )
        view = self.keyed_views.get(TableName(name))
        if view is None:
            table = self._table(name, ExpiringTimeKeyTable)
            view = kind(table)
            files = self._restore_from(name, table)
            view.replay(table.stream(files, self._task.key_range))
            view.begin_epoch(self._loaded.clock_micros)
            self.keyed_views[TableName(name)] = view
        return cast(_Keyed, view)

    def begin_epoch(self, clock_micros: int) -> None:
        """Tell keyed views what time it is, by the engine's clock."""
        self._loaded.clock_micros = max(self._loaded.clock_micros, clock_micros)
        for view in self.keyed_views.values():
            view.begin_epoch(self._loaded.clock_micros)

    def keyed_changes(self, barrier: CheckpointMessage) -> dict[TableName, list[RecordBatch]]:
        """Return the changes of keyed views since the last barrier; again the same."""
        if not self._loaded.clock_micros:
            self.begin_epoch(barrier.timestamp_micros)
        return {name: view.changes(barrier.epoch) for name, view in self.keyed_views.items()}

    def after_barrier(
        self, time_files: Mapping[TableName, tuple[TimeFile, ...]], *, then_stop: bool
    ) -> None:
        """Drop rows that have expired at the epoch just written.

        Args:
            time_files: by expiring table, the files that the subtask carries over.
            then_stop: whether no further checkpoint follows.
        """
        for name, view in self.time_views.items():
            table = self.tables[name]
            assert isinstance(table, ExpiringTimeKeyTable)
            if isinstance(view, ExpiringTimeKeyView):
                view.evict(self._cutoff(table))
            elif isinstance(view, UncachedKeyValueView):
                view.go_on_from(time_files[name], self._cutoff(table))
        for keyed in self.keyed_views.values():
            keyed.written(self._loaded.epoch, then_stop=then_stop)

    def _check_view(self, name: str, known: TimeView, kind: type[TimeView]) -> None:
        if type(known) is not kind:
            raise InputError(
                f"the table already has a view of type {type(known).__name__}, not {kind.__name__}",
                operator=self._task.operator,
                table=name,
                next_step="use one view per table",
            )

    def _cutoff(self, table: ExpiringTimeKeyTable) -> int:
        return table.cutoff_micros(self._loaded.watermark_micros)

    def _restore_from(self, name: str, table: ExpiringTimeKeyTable) -> tuple[TimeFile, ...]:
        """Return the files of the restored epoch that this subtask opens."""
        stored = self._loaded.files(TableName(name))
        if not isinstance(stored, ExpiringTimeKeyFiles):
            return ()
        self._loaded.read_files[TableName(name)].update(stored.paths)
        return files_to_carry(stored.files, self._cutoff(table), self._task.key_range)

    def _rows_table(self, name: str) -> ExpiringTimeKeyTable:
        if TableName(name) in self._forms:
            raise InputError(
                "the table holds keyed state",
                operator=self._task.operator,
                table=name,
                next_step="open it with value_state, list_state, map_state or timers",
            )
        table: ExpiringTimeKeyTable = self._table(name, ExpiringTimeKeyTable)
        return table

    def _table(self, name: str, kind: type[Any]) -> Any:
        table = self.tables.get(TableName(name))
        if not isinstance(table, kind):
            raise InputError(
                f"the operator has no {'global keyed' if kind is GlobalKeyedTable else 'expiring'}"
                f" table {name!r}",
                operator=self._task.operator,
                tables={other: config.kind.label for other, config in self._configs.items()},
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


# ---- the epoch from which a subtask's tables were loaded, and the files that it has read ---------


@dataclass(slots=True, kw_only=True)
class LoadedState:
    """The origin of the tables of one subtask, and what has changed since.

    Attributes:
        epoch: the epoch of the tables.
        followed: the last published epoch that the tables have reached: `epoch`, or the one before
            while `epoch` is not published.
        restored: the operator at that epoch; None if it started empty.
        watermark_micros: the event time reached at `epoch`; None = not all subtasks had one.
        read_files: by table, the files whose rows are, or were, in memory.
        merged: by table, those of them whose merge was announced.
        clock_micros: the engine's clock at the epoch being written; 0 = not known yet.
    """

    epoch: Epoch
    followed: Epoch
    restored: OperatorCheckpoint | None
    watermark_micros: int | None
    read_files: dict[TableName, set[StatePath]]
    merged: dict[TableName, set[StatePath]]
    clock_micros: int = 0

    @classmethod
    def of(
        cls,
        restored: OperatorCheckpoint | None,
        base_epoch: Epoch | None,
        tables: Iterable[TableName],
    ) -> LoadedState:
        """Return the state of a subtask before its first read; arguments as of `TableManager`."""
        names = list(tables)
        epoch = restored.epoch if restored else Epoch(base_epoch or 0)
        return cls(
            epoch=epoch,
            followed=epoch,
            restored=restored,
            watermark_micros=restored.min_watermark_micros if restored else None,
            read_files={name: set() for name in names},
            merged={name: set() for name in names},
        )

    def files(self, name: TableName) -> TableFiles | None:
        """Return the files that the restored epoch lists for a table; None if it lists none."""
        return self.restored.tables.get(name) if self.restored else None
