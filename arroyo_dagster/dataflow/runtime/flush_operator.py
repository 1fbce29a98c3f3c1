"""Flush: runs in one subtask, once for every closed window, over all keys of the window.

The content of the last window is kept in separate tables, for readers. A window whose flush fails
is kept, too, and flushed again: in the first epoch of the next run, and whenever another window
closes. It is flushed with the clock and the states of other services of the epoch that closed it.

Source: sdf-states.md 3.2, 3.5 (W5, W9 to W11).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import polars as pl
import pyarrow as pa

from arroyo_dagster.dataflow.definition.definition import StateDef, ValueKind
from arroyo_dagster.dataflow.definition.windows import GLOBAL_WINDOW, Window
from arroyo_dagster.dataflow.errors import OperatorResultError
from arroyo_dagster.dataflow.runtime.failures import StepCounts
from arroyo_dagster.dataflow.runtime.keyed_states import closed_schema
from arroyo_dagster.dataflow.runtime.operators import ServiceOperator, ServicePlan
from arroyo_dagster.dataflow.runtime.record import as_record
from arroyo_dagster.dataflow.runtime.record_batches import (
    Travel,
    check_travels,
    encode,
    encode_keys,
)
from arroyo_dagster.dataflow.runtime.service_source import CLOCK, SOURCE, TICK, epoch_column
from arroyo_dagster.dataflow.storage.columns import KEY
from arroyo_dagster.dataflow.storage.engine_tables import (
    LAST_WINDOW_CONFIG,
    UNFLUSHED,
    UNFLUSHED_CONFIG,
    WINDOWS,
    UnflushedKey,
    WindowBounds,
)
from arroyo_dagster.dataflow.storage.state_tables import (
    FLUSHED,
    GENERATION,
    VALUE,
    flushed_config,
    row_schema,
)
from arroyo_dagster.dataflow.storage.values import bincode_type
from arroyo_dagster.dataflow.views.frames import Frame, Pairs
from arroyo_dagster.dataflow.views.snapshots import frame_of_rows
from arroyo_dagster.dataflow.views.sql import StateTable, Tables
from arroyo_dagster.engine.exchange import decode_table, encode_table
from arroyo_dagster.engine.operators import Collector, OperatorContext
from arroyo_dagster.state.model.tables import TableConfig
from arroyo_dagster.user_modules import begin_step

LAST = "last"


class FlushOperator(ServiceOperator):
    """Calls flush, and keeps the content of the last window."""

    def __init__(self, plan: ServicePlan) -> None:
        super().__init__(plan)
        self._travel = Travel(plan.owners, raw=plan.letters)
        self.output_schema = self._travel.schema

    def tables(self) -> Sequence[TableConfig]:
        """Return the tables: each state's last window, the bounds of that window, and metrics."""
        states = [flushed_config(state) for state in self.plan.owned.values()]
        return (*super().tables(), LAST_WINDOW_CONFIG, UNFLUSHED_CONFIG, *states)

    def on_start(self, ctx: OperatorContext) -> None:
        """Load the function, and read the last window."""
        super().on_start(ctx)
        self._flushes = ctx.task_info.task_index == 0
        self._content: dict[str, pa.Table] = {}
        self._tables: Tables | None = None
        owned = self.plan.owned
        place = self.invocation({name: self._closing(name) for name in owned})
        place._tables = self._in_scope
        self._place = place
        flush = self.plan.flush
        self._flush = None if flush is None else self.function(flush, place)
        self._last_view = ctx.table_manager.get_global_keyed_state(WINDOWS, str, WindowBounds)
        last = self._last_view.get(LAST)
        self._last: Window | None = None if last is None else last.window
        self._parts: dict[Window, dict[str, list[pa.Table]]] = {}
        self._unflushed_view = ctx.table_manager.get_global_keyed_state(
            UNFLUSHED, UnflushedKey, bytes
        )
        self._unflushed: set[Window] = set()
        if self._flushes:
            self._unflushed = {key.window for key in self._unflushed_view.get_all()}
        self._is_first_epoch = True

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        """Collect the contents of each closed window from all subtasks."""
        assert batch.schema.equals(closed_schema(self.plan.owners))
        self.see(batch, ctx)
        for row in batch.to_pylist():
            parts = self._parts.setdefault(Window(row["window_start"], row["window_end"]), {})
            if row["state"] is not None:
                parts.setdefault(row["state"], []).append(decode_table(row["content"]))

    def handle_checkpoint(self, ctx: OperatorContext, collector: Collector) -> None:
        """Flush every closed window in closing order, and keep the content of the last."""
        parts, self._parts = self._parts, {}
        closing = {"clock_ms": self.now_ms, "epochs": dict(self.readers.epochs)}
        again = bool(self._unflushed) and (self._is_first_epoch or bool(parts))
        results = self._flush_again(always=self._is_first_epoch) if again else []
        self._is_first_epoch = False
        if parts:
            self._pin(closing)  # else results keep the clock and the epochs of their window
        order = sorted(parts, key=_closing_order)
        for window in order:
            self._content = {
                name: _whole(state, parts[window].get(name, ()))
                for name, state in self.plan.owned.items()
            }
            self._tables = None
            flushed = self._flushed(window)
            if flushed is None:
                self._keep_unflushed(window, closing)
            else:
                results.extend(flushed)
        if order:
            self._keep(order[-1], ctx)
        if results:
            collector.collect(self._rows(results))
        self.finish_epoch(ctx)

    def epoch_report(self) -> StepCounts:
        """Return nothing: a flush that fails consumes no record, as its window is kept."""
        return {}

    # ---- windows whose flush failed --------------------------------------------------------------

    def _flush_again(self, *, always: bool) -> list[tuple[Window, Any]]:
        """Flush the windows whose flush failed; `always`: each of them, else until one fails."""
        results: list[tuple[Window, Any]] = []
        for window in sorted(self._unflushed, key=_closing_order):
            self._load_unflushed(window)
            flushed = self._flushed(window)
            if flushed is not None:
                results.extend(flushed)
                self._unflushed.discard(window)
                keys = [UnflushedKey(*window, name) for name in ("", *self.plan.owned)]
                stored = self._unflushed_view.get_all()
                self._unflushed_view.remove_many(key for key in keys if key in stored)
            elif not always:
                break
        return results

    def _keep_unflushed(self, window: Window, closing: Mapping[str, Any]) -> None:
        self._unflushed.add(window)
        self._unflushed_view.insert(UnflushedKey(*window, ""), json.dumps(closing).encode())
        self._unflushed_view.insert_many(
            (UnflushedKey(*window, name), encode_table(content))
            for name, content in self._content.items()
            if content.num_rows
        )

    def _load_unflushed(self, window: Window) -> None:
        stored = self._unflushed_view.get_all()
        self._content = {}
        for name, state in self.plan.owned.items():
            content = stored.get(UnflushedKey(*window, name))
            parts = () if content is None else (_as_defined(state, decode_table(content)),)
            self._content[name] = _whole(state, parts)
        self._pin(json.loads(stored[UnflushedKey(*window, "")]))

    def _pin(self, closing: Mapping[str, Any]) -> None:
        self.now_ms = closing["clock_ms"]
        self.readers.pin(closing["epochs"], self.now_ms)
        self._tables = None

    # ---- the function ----------------------------------------------------------------------------

    def _closing(self, name: str) -> Any:
        state = self.plan.owned[name]

        def access() -> Any:
            content = self._content[name]
            if state.value_kind is not ValueKind.ROW:
                return Pairs(cast(pl.DataFrame, pl.from_arrow(content.select([KEY, VALUE]))))
            table = self._table(state)
            return Frame(table.plain, self._in_scope(), table.name)

        return access

    def _in_scope(self) -> Tables:
        """Return the tables for `sql`: the closing window's content for owned states, else as
        published.
        """
        if self._tables is None:
            tables = self.readers.tables()
            for state in self.plan.owned.values():
                if state.value_kind is ValueKind.ROW:
                    tables = tables.with_table(self._table(state))
            self._tables = tables
        return self._tables

    def _table(self, state: StateDef) -> StateTable:
        from arroyo_dagster.dataflow.storage.columns import WINDOW_END, WINDOW_START

        frame = frame_of_rows(state, self._content[state.name]).drop(WINDOW_START, WINDOW_END)
        return StateTable(state.table, frame, (*state.aliases, state.name))

    def _flushed(self, window: Window) -> list[tuple[Window, Any]] | None:
        """Call flush; None = it failed, and the window must be kept."""
        function = self._flush
        if function is None:
            return []
        self._place.window = window
        name = function.plan.name
        try:
            with self._place.entered():
                begin_step(name)
                result = function.body()
            if result is None:
                raise OperatorResultError(
                    f"flush `{name}` returned nothing; expected a value",
                    number="E42",
                    path=function.plan.path,
                )
            check_travels(result)
        except Exception as error:
            self.failures.note(name, error, f"window {tuple(window)}", None)
            return None
        finally:
            self._place.window = GLOBAL_WINDOW
        self.metrics.count(name, succeeded=1)
        return [(window, as_record(result))]

    def _rows(self, results: Sequence[tuple[Window, Any]]) -> pa.RecordBatch:
        count = len(results)
        times = [window.end_ms - 1 for window, _ in results]
        epochs = self.readers.epochs
        columns = {
            **encode([value for _, value in results], shared=True),
            **encode_keys(None, count),
            "partition": pa.array([0] * count, pa.int32()),
            "offset": pa.array([-1] * count, pa.int64()),
            "timestamp": pa.array(times, pa.timestamp("ms")),
            SOURCE: pa.array([TICK] * count, pa.int32()),
            CLOCK: pa.array([self.now_ms] * count, pa.timestamp("ms")),
        }
        for owner in self.plan.owners:
            columns[epoch_column(owner)] = pa.array([epochs.get(owner)] * count, pa.int64())
        return self._travel.batch(columns)

    # ---- the last window -------------------------------------------------------------------------

    def _keep(self, window: Window, ctx: OperatorContext) -> None:
        self._last = window
        self._last_view.insert(LAST, WindowBounds(*window))
        for name, state in self.plan.owned.items():
            content = self._content[name]
            if state.value_kind is ValueKind.ROW:
                # The rows of the previous window expire: see `tables_watermark`.
                view = ctx.table_manager.get_uncached_key_value_view(f"{name}{FLUSHED}")
                index = content.schema.get_field_index(GENERATION)
                generations = pa.repeat(pa.scalar(ctx.epoch, pa.uint64()), content.num_rows)
                view.insert(content.set_column(index, content.schema.field(index), generations))
            else:
                self._keep_cells(state, content, ctx)

    def _keep_cells(self, state: StateDef, content: pa.Table, ctx: OperatorContext) -> None:
        assert state.scalar_type is not None
        view = ctx.table_manager.get_global_keyed_state(
            f"{state.name}{FLUSHED}", str, bincode_type(state.scalar_type)
        )
        now = dict(zip(content[KEY].to_pylist(), content[VALUE].to_pylist(), strict=True))
        before = view.get_all()
        view.remove_many([key for key in before if key not in now])
        view.insert_many([pair for pair in now.items() if before.get(pair[0]) != pair[1]])

    def tables_watermark(self, watermark_micros: int | None) -> int | None:
        """Return a watermark that expires the rows of all flushed windows but the last; None = no
        window was flushed yet.

        Subtasks that do not flush return the maximum, since they have no rows.
        """
        if not self._flushes:
            return _MOST_MICROS
        if self._last is None:
            return None
        micros = self._last.end_ms * 1000 - 1
        return min(max(micros, 0), _MOST_MICROS)


_MOST_MICROS = (2**63 - 1) // 1000


def _closing_order(window: Window) -> tuple[int, int]:
    return window.end_ms, window.start_ms


def _as_defined(state: StateDef, content: pa.Table) -> pa.Table:
    """Return the content of a window with the columns that the state has now."""
    if state.value_kind is not ValueKind.ROW:
        return content
    schema = row_schema(state).append(pa.field(GENERATION, pa.uint64(), nullable=False))
    names = content.column_names
    columns = [
        content.column(field.name) if field.name in names else pa.nulls(len(content), field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _whole(state: StateDef, parts: Sequence[pa.Table]) -> pa.Table:
    """Combine the contents of all subtasks, sorted by key."""
    if parts:
        whole = pa.concat_tables(parts)
        return whole if len(parts) == 1 else whole.sort_by(KEY)
    if state.value_kind is ValueKind.ROW:
        generation = pa.field(GENERATION, pa.uint64(), nullable=False)
        return row_schema(state).append(generation).empty_table()
    from arroyo_dagster.dataflow.storage.values import arrow_type

    assert state.scalar_type is not None
    return pa.table(
        {KEY: pa.array([], pa.string()), VALUE: pa.array([], arrow_type(state.scalar_type))}
    )
