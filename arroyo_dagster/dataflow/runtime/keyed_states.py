"""The builder: applies the records of each key to its entries. Nothing else changes a state.

Source: sdf-states.md 1.5, 1.7, 3.1, 3.2, 3.5; errors E41 to E43, E50.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.dataflow.definition.names import SCHEMAS, WATERMARK
from arroyo_dagster.dataflow.definition.windows import GLOBAL_WINDOW, Window
from arroyo_dagster.dataflow.errors import OperatorResultError
from arroyo_dagster.dataflow.runtime.batch_states import ColumnSlot, ColumnUpdate
from arroyo_dagster.dataflow.runtime.context import collected_later
from arroyo_dagster.dataflow.runtime.functions import Function
from arroyo_dagster.dataflow.runtime.handles import Slot, slot_for
from arroyo_dagster.dataflow.runtime.operators import ServiceOperator, ServicePlan
from arroyo_dagster.dataflow.runtime.record_batches import (
    KIND,
    MARK,
    Travel,
    check_travels,
    decode,
    received,
    state_keys,
    windows_in,
)
from arroyo_dagster.dataflow.runtime.records import Place, Records, column
from arroyo_dagster.dataflow.runtime.service_source import CLOCK, SOURCE, epoch_column
from arroyo_dagster.dataflow.runtime.steps import Transform
from arroyo_dagster.dataflow.runtime.stores import open_store
from arroyo_dagster.dataflow.storage.columns import KEY
from arroyo_dagster.dataflow.storage.engine_tables import (
    SCHEMAS_CONFIG,
    WATERMARK_CONFIG,
    check_states,
    stored_schemas,
)
from arroyo_dagster.dataflow.storage.state_tables import state_config, watermark_micros
from arroyo_dagster.dataflow.storage.values import Key
from arroyo_dagster.engine.exchange import encode_table
from arroyo_dagster.engine.operators import Collector, OperatorContext
from arroyo_dagster.state.model.tables import TableConfig
from arroyo_dagster.state.model.types import I64, U32
from arroyo_dagster.user_modules import begin_step

_MAX_WAITING_BYTES = 1 << 27
_Keyed = tuple[int, str, Key, Any, Any]
"""Of a record: its index, the text of its key and the key, the key and value for update-state."""


def closed_schema(owners: Sequence[str]) -> pa.Schema:
    """Return the schema of the rows that the builder emits for a closed window.

    Each subtask emits one row without state and content, and one row per state with entries, with
    the content as an Arrow IPC stream. `owners`: the services with an epoch column.
    """
    return pa.schema(
        [
            pa.field("window_start", pa.int64(), nullable=False),
            pa.field("window_end", pa.int64(), nullable=False),
            pa.field("state", pa.string()),
            pa.field("content", pa.binary()),
            *(pa.field(epoch_column(owner), pa.int64()) for owner in owners),
            pa.field(CLOCK, pa.timestamp("ms"), nullable=False),
        ]
    )


class StatesOperator(ServiceOperator):
    """One subtask of the states of a service."""

    def __init__(self, plan: ServicePlan) -> None:
        super().__init__(plan)
        self._travel = Travel(plan.owners, raw=plan.letters)
        self._windowed = plan.window is not None
        self.output_schema = closed_schema(plan.owners) if self._windowed else self._travel.schema

    def tables(self) -> Sequence[TableConfig]:
        """Return the tables of the owned states, and those of the engine."""
        plan = self.plan
        states = [
            state_config(state, as_pairs=name in plan.as_pairs)
            for name, state in plan.owned.items()
        ]
        windowed = (WATERMARK_CONFIG,) if self._windowed else ()
        return (*super().tables(), SCHEMAS_CONFIG, *windowed, *states)

    def on_start(self, ctx: OperatorContext) -> None:
        """Restore the states from the restored epoch.

        Raises:
            StateSchemaError: a state was stored with another schema (E50).
        """
        super().on_start(ctx)
        plan = self.plan
        owned = self.plan.owned.values()
        view = ctx.table_manager.get_global_keyed_state(SCHEMAS, str, str)
        stored = view.get_all()
        check_states(stored, owned, migrate=self.plan.migrate, service=self.plan.name)
        now = stored_schemas(owned)
        self._new_schemas = {name: text for name, text in now.items() if stored.get(name) != text}
        self._slots = self._make_slots()
        self._watermark_rows = (
            ctx.table_manager.get_global_keyed_state(WATERMARK, U32, I64)
            if self._windowed
            else None
        )
        marks = self._watermark_rows.get_all() if self._watermark_rows is not None else {}
        self._watermark: int | None = max(marks.values(), default=None)
        self._stores = [
            open_store(slot, ctx, self._watermark, as_pairs=slot.state.name in plan.as_pairs)
            for slot in self._slots
        ]
        partition = plan.partition
        self._steps = self.steps(
            partition.transforms if partition else (),
            self._place,
            partial=plan.partial_before_key,
            keeps=bool(plan.owned),
        )
        update = partition.update_state if partition else None
        self._update = None if update is None else self.function(update, self._place)
        self._waiting: list[pa.RecordBatch] = []
        self._mark: tuple[int, tuple[Window, ...]] | None = None

    def _make_slots(self) -> list[Slot]:
        plan = self.plan
        update = None if plan.partition is None else plan.partition.update_state
        # Of windows, and in tables that every subtask reads, the entries are few.
        as_columns = update is not None and update.form != "" and not self._windowed
        slots = {
            name: ColumnSlot(state) if as_columns and name not in plan.as_pairs else slot_for(state)
            for name, state in plan.owned.items()
        }
        self._columns: ColumnUpdate | None = None
        if update is not None and update.form:
            self._columns = ColumnUpdate(
                slots, functools.partial(self.readers.tables_in, without=slots)
            )
            self._place = self.invocation(self._columns.accessors, self._columns.tables_in)
        else:
            self._place = self.invocation({name: slot.access for name, slot in slots.items()})
        for slot in slots.values():
            slot.place = self._place
        return list(slots.values())

    # ---- records ---------------------------------------------------------------------------------

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        """Apply records to the entries of their keys, in topic order."""
        if ctx.task_info.parallelism > 1:
            self._waiting.append(batch)  # from several subtasks: sorted at the barrier
        elif self._columns is not None:
            self._waiting.append(batch)  # one call of the function with all records costs less
            if sum(part.nbytes for part in self._waiting) > _MAX_WAITING_BYTES:
                self._take_waiting(ctx, collector)
        else:
            self._take(batch, ctx, collector)

    def _take_waiting(self, ctx: OperatorContext, collector: Collector) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            for batch in _in_order(waiting):
                self._take(batch, ctx, collector)

    def _take(self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector) -> None:
        self.see(batch, ctx)
        for slot in self._slots:
            slot.now_ms = self.now_ms
        batch = self._without_watermarks(batch)
        if not batch.num_rows:
            return
        for store in self._stores:
            store.prefetch(column(batch, KEY))
        records = received(batch, self.plan.topics)
        with self._place.entered(), collected_later():
            update = () if self._update is None else (self._update.plan.name,)
            begin_step(*(step.name for step in self._steps), *update)
            if self._columns is not None:
                self._apply(self._columns, records)
            else:
                self._fold(records, collector)
        self._place.key, self._place.window = None, GLOBAL_WINDOW

    def _without_watermarks(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if not self._windowed:
            return batch
        is_mark = pc.equal(column(batch, KIND), MARK)
        if pc.any(is_mark).as_py():
            marks = batch.filter(is_mark)
            self._mark = decode(marks)[0]
            batch = batch.filter(pc.invert(is_mark))
        return batch

    def _apply(self, columns: ColumnUpdate, records: Records) -> None:
        """Apply an update-state of whole batches: to each window, or to all records."""
        update = self._update
        assert update is not None
        by_window: dict[Window, list[int]] = {}
        for index, window in enumerate(windows_in(records.origin.batch) if self._windowed else ()):
            by_window.setdefault(window, []).append(index)
        parts = [records.chosen(indexes) for indexes in by_window.values()] or [records]
        failed = 0
        for window, part in zip(by_window or (GLOBAL_WINDOW,), parts, strict=True):

            def fail(index: int, error: Exception, part: Records = part) -> None:
                nonlocal failed
                failed += 1
                self._failed(update.plan.name, error, part.values[index], part.place(index))

            self._enter(window)
            columns.apply(update, part, fail)
        self.metrics.count(update.plan.name, succeeded=len(records) - failed)

    def _fold(self, records: Records, collector: Collector) -> None:
        """Apply the partition's transforms, then update-state, one record after the other.

        Each record goes through all steps before the next one does: a transform sees what
        update-state has written for the records before.
        """
        update = self._update
        batch, key_types = records.origin.batch, self.plan.key_types
        texts: list[str] = column(batch, KEY).to_pylist()
        natives = state_keys(batch, texts, key_types[0] if key_types else None)
        parts: Iterable[_Keyed]
        if self._windowed or self._steps:
            parts = self._stepped_records(records, texts, natives)
        else:
            parts = zip(itertools.count(), texts, natives, natives, records, strict=False)
        if update is not None:
            updated = self._update_each(update, parts, records)
            self.metrics.count(update.plan.name, succeeded=updated)
            return
        folded = [(index, key, value) for index, _, _, key, value in parts]
        if folded and not self._windowed:
            indexes, keys, values = map(list, zip(*folded, strict=True))
            new = Records(records.origin, values, indexes, keys)
            collector.collect(self._travel.rows(new, shared=True))

    def _update_each(self, update: Function, parts: Iterable[_Keyed], records: Records) -> int:
        """Call update-state with each record; return how often it succeeded."""
        place, body, takes_key, updated = self._place, update.body, update.takes_key, 0
        for index, text, native, key, value in parts:
            place.text = text
            place.key = native
            place.serial += 1
            try:
                result = body(key, value) if takes_key else body(value)
                if result is not None:
                    raise _not_none(update, result)
                updated += 1
            except Exception as error:
                self._failed(update.plan.name, error, value, records.place(index))
        return updated

    def _stepped_records(
        self, records: Records, texts: Sequence[str], natives: Sequence[Key]
    ) -> Iterator[_Keyed]:
        """Yield what the transforms make of each record, in its window."""
        place = self._place
        windows = windows_in(records.origin.batch) if self._windowed else None
        counts = dict.fromkeys((step.name for step in self._steps), 0)
        for index, (text, native, value) in enumerate(zip(texts, natives, records, strict=True)):
            place.text, place.key = text, native
            if windows is not None:
                self._enter(windows[index])
            pairs: Sequence[tuple[Any, Any]] = ((native, value),)
            for step in self._steps:
                pairs = self._stepped(step, pairs, records.place, index, counts)
            for key, item in pairs:
                yield index, text, native, key, item
        for name, count in counts.items():
            self.metrics.count(name, succeeded=count)

    def _enter(self, window: Window) -> None:
        if self._place.window != window:
            self._place.window = window
            for store in self._stores:
                store.enter(window)

    def _stepped(
        self,
        step: Transform,
        pairs: Sequence[tuple[Any, Any]],
        place: Callable[[int], Place],
        index: int,
        counts: dict[str, int],
    ) -> list[tuple[Any, Any]]:
        """Return the results of a transform for what the steps before made of a record."""
        new: list[tuple[Any, Any]] = []
        for key, value in pairs:
            self._place.serial += 1
            try:
                results = step.one(key, value)
                for _, item in results:
                    check_travels(item)
            except Exception as error:
                self._failed(step.name, error, value, place(index), partial=step.partial)
                continue
            counts[step.name] += 1
            new += results
        return new

    def _failed(
        self,
        name: str,
        error: Exception,
        value: Any,
        place: Place,
        *,
        partial: bool | None = None,
    ) -> None:
        for slot in self._slots:
            slot.discard()
        partial = self.plan.partial_before_update if partial is None else partial
        self.failures.note(name, error, value, place, partial=partial)

    # ---- the barrier -----------------------------------------------------------------------------

    def handle_checkpoint(self, ctx: OperatorContext, collector: Collector) -> None:
        """Close the windows that are due, and write the changes."""
        self._take_waiting(ctx, collector)
        if self._mark is not None and self._watermark_rows is not None:
            self._watermark, closed = self._mark
            self._mark = None
            self._watermark_rows.insert(ctx.task_info.task_index, self._watermark)
            self._close(closed, collector)
        for store in self._stores:
            with collected_later():
                expired = store.write(ctx.epoch)
            self.metrics.count(store.state.name, expired=expired)
        if self._new_schemas and ctx.task_info.task_index == 0:
            view = ctx.table_manager.get_global_keyed_state(SCHEMAS, str, str)
            view.insert_many(self._new_schemas.items())
        self._new_schemas = {}
        self.finish_epoch(ctx)

    def _close(self, closed: Sequence[Window], collector: Collector) -> None:
        rows: list[tuple[Window, str | None, bytes | None]] = []
        for window in closed:
            rows.append((window, None, None))
            for store in self._stores:
                content = store.close(window)
                if content.num_rows:
                    rows.append((window, store.state.name, encode_table(content)))
        self._place.window = GLOBAL_WINDOW
        if rows:
            epochs = self.readers.epochs
            constants = {epoch_column(owner): epochs.get(owner) for owner in self.plan.owners}
            assert self.output_schema is not None
            collector.collect(
                _closed_rows(rows, self.output_schema, {**constants, CLOCK: self.now_ms})
            )

    def tables_watermark(self, watermark_micros_of_sources: int | None) -> int | None:
        """Return the watermark that expires rows: for windowed states, that of the event times."""
        if not self._windowed:
            return watermark_micros_of_sources
        return watermark_micros(self._watermark)


def _not_none(update: Function, result: Any) -> OperatorResultError:
    return OperatorResultError(
        f"update-state `{update.plan.name}` returned {result!r:.80}; expected nothing",
        number="E42",
        path=update.plan.path,
    )


def _in_order(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """Sort records of several subtasks by source, partition and offset."""
    rows = pa.Table.from_batches(batches).combine_chunks()
    offsets, *others = (rows.column(name).to_numpy() for name in ("offset", "partition", SOURCE))
    one_topic = all((values == values[0]).all() for values in others)
    if not one_topic or (offsets[1:] < offsets[:-1]).any():
        rows = rows.take(pa.array(np.lexsort([offsets, *others])))
    ordered: list[pa.RecordBatch] = rows.combine_chunks().to_batches()
    return ordered


def _closed_rows(
    rows: Sequence[tuple[Window, str | None, bytes | None]],
    schema: pa.Schema,
    constants: Mapping[str, int | None],
) -> pa.RecordBatch:
    windows = [window for window, _, _ in rows]
    columns = {
        "window_start": [window.start_ms for window in windows],
        "window_end": [window.end_ms for window in windows],
        "state": [state for _, state, _ in rows],
        "content": [content for _, _, content in rows],
        **{name: [value] * len(rows) for name, value in constants.items()},
    }
    arrays = [pa.array(columns[field.name], field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
