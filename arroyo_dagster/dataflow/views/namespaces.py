"""The states of a dataflow by namespace, including the engine's own, as `show state` prints them.

| namespace | content | type |
|---|---|---|
| `service/state/state` | a state; with windows, the open ones and the last closed one | `u32` |
| `service/function/metrics` | records that a step processed, and those it failed on | `table` |
| `service/topic/metrics` | records that were decoded, and those that were not | `table` |
| `service/topic/topic.offset` | the next position in each partition of a source | `offset` |
| `service/state/watermark` | the watermark | `timestamp` |

All namespaces of a service are read at one epoch, its newest ready one.

Source: sdf-states.md 4.3 to 4.5; error E47.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from arroyo_dagster.dataflow.definition.definition import (
    Dataflow,
    ServiceDef,
    StateDef,
    StateForm,
    ValueKind,
)
from arroyo_dagster.dataflow.definition.names import METRICS, WATERMARK
from arroyo_dagster.dataflow.definition.types import ScalarType
from arroyo_dagster.dataflow.definition.windows import GLOBAL_WINDOW, Window
from arroyo_dagster.dataflow.storage.columns import KEY, UPDATED_AT, WINDOW_END, WINDOW_START
from arroyo_dagster.dataflow.storage.engine_tables import (
    WINDOWS,
    Metric,
    MetricKey,
    WindowBounds,
    total,
)
from arroyo_dagster.dataflow.storage.state_tables import VALUE
from arroyo_dagster.dataflow.views.rendering import cell_text, watermark_text, window_text
from arroyo_dagster.dataflow.views.snapshots import FLUSH, SnapshotReader
from arroyo_dagster.dataflow.views.view import (
    OwnerJob,
    mask_frame,
    mask_of,
    private_columns,
    service_paths,
)
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.bincode.codec import codec_for
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.clock import Clock, wall_clock_ms
from arroyo_dagster.state.model.ids import Epoch, TableName
from arroyo_dagster.state.model.tables import GlobalKeyedFiles
from arroyo_dagster.state.model.types import I64, U32
from arroyo_dagster.state.planning.privacy import NOTHING_PRIVATE, PRIVATE, PrivateColumns
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.global_keyed import GlobalKeyedTable

SOURCES, OFFSETS = "topics", "offsets"
"""The operator of a service that has its offsets, and the table of the offsets."""

RECORDS = "records"
"""The operator of a service that has its watermark."""

K = TypeVar("K")
V = TypeVar("V")


class CliError(InputError):
    """E47: an unknown namespace or command, or an invalid pattern."""


@dataclass(frozen=True, slots=True)
class StateRow:
    """A row of a state: its key, its window, and a value for each column."""

    key: str
    window: Window
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """One state of one service at one epoch.

    Attributes:
        name: `service/…`.
        type: its type in the list of `show state`.
        epoch: the epoch of the service; None = it has none yet.
        columns: the columns, each with its name and type; None = values are printed with `str`.
        rows: sorted by window start, then key.
    """

    name: str
    type: str
    epoch: Epoch | None
    columns: tuple[tuple[str, ScalarType | None], ...]
    rows: tuple[StateRow, ...]

    @property
    def header(self) -> list[str]:
        """The header of the printed table."""
        return ["Key", "Window", *self.names]

    @property
    def names(self) -> list[str]:
        """The names of the value columns."""
        return [name for name, _ in self.columns]

    def select(self, key: str | None = None, pattern: str | None = None) -> list[StateRow]:
        """Return some of the rows.

        Args:
            key: only this key; None = all.
            pattern: only keys that contain a match of this regular expression; None = all.

        Raises:
            CliError: the pattern is not a regular expression.
        """
        matches = _matching(pattern)
        return [row for row in self.rows if key in (None, row.key) and matches(row.key)]

    def lines(self, key: str | None = None, pattern: str | None = None) -> list[list[str]]:
        """Return some of the rows as text; arguments and errors as in `select`."""
        return [
            [row.key, window_text(row.window), *self._texts(row)]
            for row in self.select(key, pattern)
        ]

    def _texts(self, row: StateRow) -> Iterator[str]:
        for (_, scalar), value in zip(self.columns, row.values, strict=True):
            yield str(value) if scalar is None or value == PRIVATE else cell_text(value, scalar)


class Namespaces:
    """The namespaces of a dataflow, each service at its newest ready epoch.

    Args:
        store: the object store of the states.
        dataflow: the definition.
        clock: the clock that expires rows, in epoch milliseconds.
        private: the columns of states that are masked.

    Raises:
        CheckpointError: the newest epoch of a service cannot be read (E51).
    """

    def __init__(
        self,
        store: ObjectStore,
        dataflow: Dataflow,
        *,
        clock: Clock = wall_clock_ms,
        private: PrivateColumns = NOTHING_PRIVATE,
    ) -> None:
        self._store = store
        self._dataflow = dataflow
        self._clock = clock
        self._private = private
        self._heads = {
            service: OwnerJob(store, service_paths(dataflow, service)).newest()
            for service in sorted(dataflow.services)
        }

    def all(self, pattern: str | None = None) -> list[Namespace]:
        """Return every namespace, sorted by name.

        Args:
            pattern: only names that contain a match of this regular expression; None = all.

        Raises:
            CliError: the pattern is not a regular expression.
        """
        matches = _matching(pattern)
        names = {name: service for name, service in self._names().items() if matches(name)}
        return [self._read(name, service) for name, service in sorted(names.items())]

    def get(self, name: str) -> Namespace:
        """Return one namespace. `service/state` is short for `service/state/state`.

        Raises:
            CliError: there is no namespace of this name; the error lists similar names.
        """
        names = self._names()
        full = name if name in names else f"{name}/state"
        if full not in names:
            near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
            raise CliError(
                f"there is no namespace `{name}`",
                number="E47",
                dataflow=self._dataflow.name,
                nearest=", ".join(near) or None,
                next_step="`show state` without a name lists all of them",
            )
        return self._read(full, names[full])

    def metrics(self) -> list[Namespace]:
        """Return the metrics of every step, topic and state of every service."""
        return self.all("/metrics$")

    # ---- names -----------------------------------------------------------------------------------

    def _names(self) -> dict[str, ServiceDef]:
        names: dict[str, ServiceDef] = {}
        for service in self._dataflow.services.values():
            for state in _owned(service):
                names[f"{service.name}/{state.name}/state"] = service
            metrics = self._metrics(service.name)
            steps = [step.name for step in service.steps]
            for name in list(dict.fromkeys([*_topics(service), *steps, *metrics])):
                names[f"{service.name}/{name}/metrics"] = service
            for topic in self._offsets(service.name):
                names[f"{service.name}/{topic}/topic.offset"] = service
            if service.windowed is not None:
                first = min((state.name for state in _owned(service)), default=service.name)
                names[f"{service.name}/{first}/watermark"] = service
        return names

    def _read(self, name: str, service: ServiceDef) -> Namespace:
        middle, _, kind = name.removeprefix(f"{service.name}/").rpartition("/")
        head = self._heads[service.name]
        columns, rows = {
            "state": self._state,
            "metrics": self._metric,
            "topic.offset": self._offset,
            "watermark": self._watermark,
        }[kind](service, middle)
        return Namespace(
            name=name,
            type=_TYPES[kind],
            epoch=None if head is None else head.epoch,
            columns=tuple(columns),
            rows=tuple(rows),
        )

    # ---- states ----------------------------------------------------------------------------------

    def _state(self, service: ServiceDef, name: str) -> tuple[_Columns, list[StateRow]]:
        state, head = service.states[name], self._heads[service.name]
        closed = GLOBAL_WINDOW
        if state.window is not None:
            windows = self._pairs(head, FLUSH, WINDOWS, str, WindowBounds).values()
            closed = next((bounds.window for bounds in windows), GLOBAL_WINDOW)
        rows = self._rows(state, head, closed, live=False)
        if state.window is not None:
            rows += self._rows(state, head, closed, live=True)
        rows.sort(key=lambda row: (row.window.start_ms, row.key))
        if state.value_kind is not ValueKind.ROW:
            return [("Value", state.scalar_type)], rows
        return [(column.name, column.type) for column in state.columns], rows

    def _rows(
        self, state: StateDef, head: Checkpoint | None, closed: Window, *, live: bool
    ) -> list[StateRow]:
        frame = SnapshotReader(self._store, state, live=live).at(head)
        mask = mask_of(self._private, self._dataflow, state)
        hidden = private_columns(frame, mask)
        frame = mask_frame(frame, mask)
        is_row = state.value_kind is ValueKind.ROW
        names = [column.name for column in state.columns] if is_row else [VALUE]
        rows = []
        for row in frame.iter_rows(named=True):
            is_timed = state.ttl_ms is not None and UPDATED_AT in row
            if is_timed and self._expired(state, row[UPDATED_AT]):
                continue
            window = closed
            if WINDOW_START in row:
                window = Window(row[WINDOW_START], row[WINDOW_END])
            values = (PRIVATE if name in hidden else row[name] for name in names)
            rows.append(StateRow(row[KEY], window, tuple(values)))
        return rows

    def _expired(self, state: StateDef, updated_at: Any) -> bool:
        assert state.ttl_ms is not None
        age_ms: int = self._clock() - round(updated_at.timestamp() * 1000)
        return age_ms >= state.ttl_ms

    # ---- the engine's ----------------------------------------------------------------------------

    def _metrics(self, service: str) -> dict[str, Metric]:
        """Return the metrics by step, topic or state, summed over all operators and subtasks."""
        head = self._heads[service]
        metrics_of: dict[str, list[Metric]] = {}
        for operator in head.operators if head is not None else ():
            counted = self._pairs(head, operator.operator, METRICS, MetricKey, Metric)
            for key, value in counted.items():
                metrics_of.setdefault(key.name, []).append(value)
        return {name: total(metrics) for name, metrics in metrics_of.items()}

    def _metric(self, service: ServiceDef, name: str) -> tuple[_Columns, list[StateRow]]:
        metric = self._metrics(service.name).get(name, Metric())
        stats: dict[str, Any] = {"failed": metric.failed, "succeeded": metric.succeeded}
        if name in _topics(service):
            stats["last_error_offset"] = max(metric.last_error_offset, -1)
        for more in ("dropped_late", "expired"):
            if getattr(metric, more):
                stats[more] = getattr(metric, more)
        columns: _Columns = [(key, None) for key in sorted(stats)]
        return columns, [StateRow("stats", GLOBAL_WINDOW, tuple(stats[key] for key, _ in columns))]

    def _offsets(self, service: str) -> Mapping[str, Mapping[str, Any]]:
        head = self._heads[service]
        return {} if head is None else stored_offsets(self._store, head)

    def _offset(self, service: ServiceDef, topic: str) -> tuple[_Columns, list[StateRow]]:
        offsets = self._offsets(service.name)[topic]
        rows = [
            StateRow(
                name.removeprefix("file:").removeprefix("from:"), GLOBAL_WINDOW, (_next(value),)
            )
            for name, value in offsets.items()
        ]
        return [("Value", None)], sorted(rows, key=lambda row: row.key)

    def _watermark(self, service: ServiceDef, name: str) -> tuple[_Columns, list[StateRow]]:
        marks = self._pairs(self._heads[service.name], RECORDS, WATERMARK, U32, I64).values()
        rows = [StateRow("default", GLOBAL_WINDOW, (watermark_text(max(marks)),))] if marks else []
        return [("Value", None)], rows

    def _pairs(
        self, head: Checkpoint | None, operator: str, table: str, key: type[K], value: type[V]
    ) -> dict[K, V]:
        return stored_pairs(self._store, head, operator, table, key, value)


def stored_offsets(store: ObjectStore, head: Checkpoint) -> dict[str, dict[str, Any]]:
    """Return the offset of each topic after an epoch of a service."""
    stored = stored_pairs(store, head, SOURCES, OFFSETS, str, str).get("topics")
    return {} if stored is None else json.loads(stored)


def stored_pairs(
    store: ObjectStore,
    head: Checkpoint | None,
    operator: str,
    table: str,
    key: type[K],
    value: type[V],
) -> dict[K, V]:
    """Return the entries of a global keyed table; empty if the table does not exist."""
    checkpoint = None if head is None else head.operator(operator)
    files = None if checkpoint is None else checkpoint.tables.get(TableName(table))
    if checkpoint is None or not isinstance(files, GlobalKeyedFiles):
        return {}
    stored = GlobalKeyedTable(checkpoint.configs[TableName(table)], store).load(files.files)
    keys = codec_for(key).decode_many(list(stored))
    values = codec_for(value).decode_many(list(stored.values()))
    return dict(zip(keys, values, strict=True))


_Columns = list[tuple[str, ScalarType | None]]
_TYPES = {
    "state": "u32",  # SDF prints this for every keyed state
    "metrics": "table",
    "topic.offset": "offset",
    "watermark": "timestamp",
}


def _owned(service: ServiceDef) -> list[StateDef]:
    return [state for state in service.states.values() if state.form is StateForm.TYPED]


def _topics(service: ServiceDef) -> list[str]:
    return [source.id for source in service.sources if source.id is not None]


def _next(value: Any) -> Any:
    """Return the offset to print: a file's read position, or the last epoch read of a service."""
    if isinstance(value, dict) and "read" in value:
        return max([int(value["epoch"]), *(int(name.partition("-")[0]) for name in value["read"])])
    return value[0] if isinstance(value, list) and value else value


def _matching(pattern: str | None) -> Any:
    if pattern is None:
        return lambda text: True
    try:
        return re.compile(pattern).search
    except re.error as error:
        raise CliError(
            f"`{pattern}` is not a regular expression ({error})",
            number="E47",
            next_step="quote characters that have a meaning for the shell or in the expression",
        ) from error
