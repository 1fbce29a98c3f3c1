"""Convert a service's records into keyed ones: converters, transforms, windows, assign-key.

In a service with windows, one subtask receives all records in the order of arrival, because this
order decides which records are late.

Source: sdf-states.md 3.1, 3.5, 6.1; errors E28, E29.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from arroyo_dagster.dataflow.definition.types import ScalarType
from arroyo_dagster.dataflow.definition.windows import Window
from arroyo_dagster.dataflow.errors import OperatorResultError
from arroyo_dagster.dataflow.runtime.columnar import column_result
from arroyo_dagster.dataflow.runtime.context import collected_later
from arroyo_dagster.dataflow.runtime.event_time import EventTime
from arroyo_dagster.dataflow.runtime.functions import Function
from arroyo_dagster.dataflow.runtime.operators import ServiceOperator, ServicePlan
from arroyo_dagster.dataflow.runtime.record_batches import (
    BOOL_KEY,
    INT_KEY,
    KIND,
    MARK,
    TEXT_KEY,
    Travel,
    check_travels,
    encode,
)
from arroyo_dagster.dataflow.runtime.records import OriginRows, Records, column
from arroyo_dagster.dataflow.runtime.service_source import CLOCK, IDLE, SOURCE, epoch_column
from arroyo_dagster.dataflow.runtime.source_decoding import SourceDecoder, by_source
from arroyo_dagster.dataflow.runtime.steps import FAILED, Step, Transform, call_each
from arroyo_dagster.dataflow.storage.columns import KEY, WINDOW_END, WINDOW_START
from arroyo_dagster.dataflow.storage.engine_tables import WATERMARK_CONFIG, WINDOWS_CONFIG
from arroyo_dagster.dataflow.storage.payloads import Groups
from arroyo_dagster.dataflow.storage.values import Key, check_of, key_for, key_text
from arroyo_dagster.engine.operators import Collector, OperatorContext
from arroyo_dagster.state.codec.hashing.routing import key_hashes, subtasks_for_hashes
from arroyo_dagster.state.model.tables import TableConfig
from arroyo_dagster.state.storage.concurrency import read_ahead
from arroyo_dagster.user_modules import begin_step

_PARSE_AHEAD_BYTES = 1 << 25


class RecordsOperator(ServiceOperator):
    """Runs all steps before the partition or, without one, before the sinks."""

    def __init__(self, plan: ServicePlan) -> None:
        super().__init__(plan)
        keyed = plan.partition is not None or plan.window is not None
        self.travel = Travel(
            plan.owners, keyed=keyed, windowed=plan.window is not None, raw=plan.letters
        )
        self.output_schema = self.travel.schema

    def tables(self) -> Sequence[TableConfig]:
        """Return the tables: metrics; with windows, also the watermark and the open windows."""
        windowed = (WATERMARK_CONFIG, WINDOWS_CONFIG) if self.plan.window is not None else ()
        return (*super().tables(), *windowed)

    def on_start(self, ctx: OperatorContext) -> None:
        """Load the functions."""
        super().on_start(ctx)
        plan = self.plan
        self._place = self.invocation()
        self._parallelism = ctx.task_info.parallelism
        self._source_steps = [
            self.steps(source.transforms, self._place, partial=False) for source in plan.sources
        ]
        self._steps = self.steps(plan.transforms, self._place, partial=plan.partial_after_sources)
        self._window_steps = self.steps(
            plan.window_transforms, self._place, partial=plan.partial_in_windows
        )
        self._has_steps = any((*self._source_steps, self._steps, self._window_steps))
        common = (self._place, self.failures, self.metrics)
        self._timestamp: AssignTimestamp | None = None
        if plan.assign_timestamp is not None:
            function = self.function(plan.assign_timestamp, self._place)
            self._timestamp = AssignTimestamp(function, *common, plan.partial_before_window)
        self._assign_key: AssignKey | None = None
        if plan.partition is not None:
            function = self.function(plan.partition.assign_key, self._place)
            self._assign_key = AssignKey(function, *common, plan.partial_before_key)
            self._assign_key.key_types = plan.key_types
        self._event_time = None if plan.window is None else EventTime(plan.window, ctx)
        self._decoders = [
            SourceDecoder(
                topic, self.failures, self.metrics, in_columns=self._takes_columns(source_steps)
            )
            for topic, source_steps in zip(plan.sources, self._source_steps, strict=True)
        ]

    def _takes_columns(self, source_steps: Sequence[Transform]) -> bool:
        """Return whether the first function that gets a source's records takes columns."""
        forms = [step.function.form for step in (*source_steps, *self._steps, *self._window_steps)]
        update = None if self.plan.partition is None else self.plan.partition.update_state
        if self._assign_key is not None:
            forms.append(self._assign_key.function.form)
        if update is not None:
            forms.append(update.form)
        return self._event_time is None and any(forms[:1])

    # ---- batches ---------------------------------------------------------------------------------

    def process_batches(
        self,
        index: int,
        batches: Sequence[pa.RecordBatch],
        ctx: OperatorContext,
        collector: Collector,
    ) -> None:
        """Process records of all sources, and clock rows; parse the next ones meanwhile."""
        weighed = ((batch, batch.nbytes) for batch in batches)
        for parts in read_ahead(self._parsed, weighed, _PARSE_AHEAD_BYTES):
            for source, rows, parsed in parts:
                self.see(rows, ctx)
                if source >= 0:
                    with self._place.entered(), collected_later():
                        self._take(source, rows, parsed, collector)
                elif self._event_time is not None:
                    self._event_time.tick(idle=source == IDLE)

    def _parsed(
        self, batch: pa.RecordBatch
    ) -> list[tuple[int, pa.RecordBatch, pl.DataFrame | None]]:
        """Return each source of a batch, its rows, and their values as columns if they are so."""
        return [
            (source, rows, self._decoders[source].parse(rows) if source >= 0 else None)
            for source, rows in by_source(batch)
        ]

    def handle_checkpoint(self, ctx: OperatorContext, collector: Collector) -> None:
        """Send the watermark and the closing windows to every subtask of the states."""
        if self._event_time is not None:
            mark = self._event_time.close()
            if mark is not None:
                keys = keys_of_every_subtask(ctx.task_info.parallelism)
                epochs = {owner: self.readers.epochs.get(owner) for owner in self.plan.owners}
                collector.collect(watermark_rows(self.travel, mark, keys, self.now_ms, epochs))
            self._event_time.write()
        self.finish_epoch(ctx)

    def _take(
        self,
        source: int,
        batch: pa.RecordBatch,
        parsed: pl.DataFrame | None,
        collector: Collector,
    ) -> None:
        records = self._decoders[source].records(OriginRows(batch, self.plan.topics), parsed)
        for step in (*self._source_steps[source], *self._steps):
            records = step.run(records)
        if self._event_time is not None:
            records = self._windowed(self._event_time, records)
        for step in self._window_steps:
            records = step.run(records)
        if len(records):
            self._put_out(records, collector)

    def _windowed(self, event_time: EventTime, records: Records) -> Records:
        """Return the records that a window accepts, with their windows; each record advances the
        watermark.
        """
        stored = column(records.origin.batch, "timestamp").cast(pa.int64()).to_pylist()
        times = [self.now_ms if stored[row] is None else stored[row] for row in records.rows]
        if self._timestamp is not None:
            times = self._timestamp.run(records, times)
        accepted = [() if time is FAILED else event_time.accept(time) for time in times]
        kept = [index for index, windows in enumerate(accepted) if windows]
        late = len(accepted) - len(kept) - times.count(FAILED)
        self.metrics.count("window", succeeded=len(kept), dropped_late=late)
        windowed = records.picked(kept)
        windowed.windows = [accepted[index] for index in kept]
        return windowed

    # ---- putting out -----------------------------------------------------------------------------

    def _put_out(self, records: Records, collector: Collector) -> None:
        records = self._that_travel(records)
        shared = self.plan.partial_before_key
        if not self.travel.keyed:
            collector.collect(self.travel.rows(records, shared=shared))
            return
        if self._assign_key is None:  # a window without a partition has one key
            rows = len(records)
            texts, kinds = pa.array([""] * rows, pa.string()), _kind(TEXT_KEY, rows)
        else:
            texts, kinds, records = self._assign_key.run(records)
        if not len(records):
            return
        records, repeated = _one_a_window(records)
        if repeated is not None:
            texts, kinds = texts.take(repeated), kinds.take(repeated)
        columns = {KEY: texts, KIND: kinds}
        if records.windows is not None:
            for name, part in ((WINDOW_START, 0), (WINDOW_END, 1)):
                columns[name] = pa.array([entry[0][part] for entry in records.windows], pa.int64())
        groups = self._subtasks_of(texts)
        collector.collect(self.travel.rows(records, columns, groups, shared=shared))

    def _subtasks_of(self, keys: pa.Array) -> Groups | None:
        """Return the subtask of the states that each key is routed to; None = there is one."""
        if self._parallelism == 1:
            return None
        hashes = key_hashes([keys], rows=len(keys))
        return subtasks_for_hashes(hashes, self._parallelism).astype(np.int64)

    def _that_travel(self, records: Records) -> Records:
        """Return the records that can be sent on; report the others as failures."""
        if (
            records.frame is not None
            or not self._has_steps
            or set(map(type, records.values)) <= {str}
        ):
            return records
        with contextlib.suppress(Exception):
            pickle.dumps(records.values, protocol=5)
            return records
        steps = [*self._window_steps, *self._steps]
        name = steps[-1].name if steps else "records"

        def fail(index: int, error: Exception) -> None:
            value, place = records.values[index], records.place(index)
            self.failures.note(name, error, value, place, partial=self.plan.partial_before_key)

        results, _ = call_each(check_travels, [records.values], fail)
        kept = [index for index, result in enumerate(results) if result is not FAILED]
        return records.picked(kept)


class AssignTimestamp(Step):
    """The event time of each record."""

    __slots__ = ()

    def run(self, records: Records, times: Sequence[int]) -> list[Any]:
        """Return the time of each record, or `FAILED`; `times`: those that they came with."""
        begin_step(self.name)
        keyed = self.function.takes_key
        assigned, failed = self.each(self._time_of, records, times, keyed=keyed)
        self.metrics.count(self.name, succeeded=len(records) - failed)
        return assigned

    def _time_of(self, *arguments: Any) -> int:
        time = self.function.body(*arguments)
        try:
            return _I64(time)  # type: ignore[no-any-return]
        except ValueError:
            raise OperatorResultError(
                f"assign-timestamp `{self.name}` returned {time!r:.80}; expected epoch "
                "milliseconds, a signed 64-bit int",
                number="E29",
                path=self.function.plan.path,
            ) from None


class AssignKey(Step):
    """The key of each record: what assign-key returns, as a key of the states.

    Attributes:
        key_types: the key types of the states.
    """

    key_types: tuple[ScalarType, ...] = ()

    def run(self, records: Records) -> tuple[pa.Array, pa.Array, Records]:
        """Return each record's key as text, its kind, and the records that have a key."""
        function = self.function
        begin_step(self.name)
        if function.form:
            keys: Any = self._columns(records)
        else:
            keys, _ = self.each(function.body, records, keyed=function.takes_key)
        if self.key_types in ((), (ScalarType.STRING,)):
            all_texts = _texts(keys)
            if all_texts is not None:
                self.metrics.count(self.name, succeeded=len(keys))
                return all_texts, _kind(TEXT_KEY, len(keys)), records
        texts: list[str] = []
        kinds: list[int] = []
        kept: list[int] = []
        for index, key in enumerate(keys):
            if key is FAILED:
                continue
            try:
                text, kind = _key_of(function, key, self.key_types)
            except Exception as error:
                self.fail(records, index, error)
                continue
            texts.append(text)
            kinds.append(kind)
            kept.append(index)
        self.metrics.count(self.name, succeeded=len(kept))
        assigned = records.chosen(kept)
        return pa.array(texts, pa.string()), pa.array(kinds, pa.int8()), assigned

    def _columns(self, records: Records) -> pl.Series | list[Any]:
        """Return the key of each record, or `FAILED`, of a columnar assign-key."""
        parts, failed = self.divided(records, column_result)
        if len(parts) == 1 and not failed:
            return parts[0][2]
        keys = [FAILED] * len(records)
        for start, stop, series in parts:
            keys[start:stop] = series.to_list()
        return keys


_I64 = check_of(ScalarType.I64)
_EVERY: dict[int, list[str]] = {}


def keys_of_every_subtask(parallelism: int) -> list[str]:
    """Return one key per subtask that is routed to it, so that a message reaches all of them."""
    keys = _EVERY.get(parallelism)
    if keys is None:
        key_of: dict[int, str] = {}
        tried = 0
        while len(key_of) < parallelism:
            names = [f"mark {number}" for number in range(tried, tried + 16 * parallelism)]
            tried += len(names)
            hashes = key_hashes([pa.array(names)], rows=len(names))
            subtasks = subtasks_for_hashes(hashes, parallelism)
            for name, subtask in zip(names, subtasks.tolist(), strict=True):
                key_of.setdefault(subtask, name)
        keys = _EVERY[parallelism] = [key_of[subtask] for subtask in range(parallelism)]
    return keys


def watermark_rows(
    travel: Travel,
    mark: tuple[int, tuple[Window, ...]],
    keys: Sequence[str],
    now_ms: int,
    epochs: Mapping[str, int | None],
) -> pa.RecordBatch:
    """Return one row per key with the watermark and the closing windows.

    Args:
        travel: the columns.
        mark: the watermark and the windows.
        keys: a key of each subtask of the states.
        now_ms: the engine's clock.
        epochs: the epochs of the owners.
    """
    rows = len(keys)
    columns = {
        KEY: pa.array(keys, pa.string()),
        KIND: pa.array([MARK] * rows, pa.int8()),
        **encode([mark] * rows, np.arange(rows)),
        "partition": pa.array([0] * rows, pa.int32()),
        "offset": pa.array([-1] * rows, pa.int64()),
        SOURCE: pa.array([IDLE] * rows, pa.int32()),
        CLOCK: pa.array([now_ms] * rows, pa.timestamp("ms")),
    }
    for owner, epoch in epochs.items():
        columns[epoch_column(owner)] = pa.array([epoch] * rows, pa.int64())
    return travel.batch(columns)


# ---- keys and records of a batch -----------------------------------------------------------------


def _key_of(function: Function, key: Any, key_types: Sequence[ScalarType]) -> tuple[str, int]:
    """Return the text and the kind of a key that assign-key returned.

    Raises:
        OperatorResultError: it is not a valid key (E28), or the key types of the service's states
            map it to different keys (E41).
        StateValueError: it does not fit a key type (E41).
    """
    if not isinstance(key, str | int):
        raise OperatorResultError(
            f"assign-key `{function.plan.name}` returned a {type(key).__name__}, which cannot be "
            "used as a key; expected text, an int or a bool",
            number="E28",
            path=function.plan.path,
        )
    keys: set[Key] = set()
    for declared in key_types:
        keys.add(key_text(key_for(declared, key, path=function.plan.path)))
    if len(keys) > 1:
        raise OperatorResultError(
            f"assign-key `{function.plan.name}` returned {key!r:.80}, which maps to different "
            "keys in the service's states",
            number="E41",
            path=function.plan.path,
            types=[scalar.value for scalar in key_types],
        )
    text = str(keys.pop()) if keys else key_text(key)
    text.encode()  # raises for a lone surrogate
    kind = BOOL_KEY if isinstance(key, bool) else INT_KEY if isinstance(key, int) else TEXT_KEY
    return text, kind


def _texts(keys: Sequence[Any] | pl.Series) -> pa.Array | None:
    """Return text keys as an array; None if one is not text, or not valid Unicode."""
    if isinstance(keys, pl.Series):
        return keys.to_arrow().cast(pa.string()) if keys.dtype == pl.String else None
    if set(map(type, keys)) != {str}:
        return None
    try:
        return pa.array(keys, pa.string())
    except UnicodeEncodeError:
        return None


def _kind(kind: int, rows: int) -> pa.Array:
    return pa.repeat(pa.scalar(kind, pa.int8()), rows)


def _one_a_window(records: Records) -> tuple[Records, pa.Array | None]:
    """Repeat each record for each of its windows.

    Returns:
        The records, and the index of each in the input; None = unchanged.
    """
    if records.windows is None:
        return records, None
    repeated = [index for index, windows in enumerate(records.windows) for _ in windows]
    repeated_records = Records(
        records.origin,
        [records.values[index] for index in repeated],
        [records.rows[index] for index in repeated],
        None,
        [(window,) for windows in records.windows for window in windows],
    )
    return repeated_records, pa.array(repeated, pa.int64())
