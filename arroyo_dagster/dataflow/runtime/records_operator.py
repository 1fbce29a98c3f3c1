"""Convert a service's records into keyed ones: converters, transforms, windows, assign-key.

In a service with windows, one subtask receives all records in the order of arrival, because this
order decides which records are late.

Source: sdf-states.md 3.1, 3.5, 6.1; errors E28, E29.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from arroyo_dagster.dataflow.definition.types import ScalarType
from arroyo_dagster.dataflow.definition.windows import Window
from arroyo_dagster.dataflow.errors import OperatorResultError
from arroyo_dagster.dataflow.runtime.columnar import call_divided, called, column_result
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
    column,
    encode,
    encode_keys,
    encode_rows,
    place_in,
)
from arroyo_dagster.dataflow.runtime.service_source import CLOCK, IDLE, SOURCE, epoch_column
from arroyo_dagster.dataflow.runtime.source_decoding import SourceDecoder, by_source
from arroyo_dagster.dataflow.runtime.steps import (
    Failures,
    Place,
    Records,
    Step,
    call_each,
    has_result,
    no_results,
    run_steps,
)
from arroyo_dagster.dataflow.storage.columns import KEY, WINDOW_END, WINDOW_START
from arroyo_dagster.dataflow.storage.engine_tables import WATERMARK_CONFIG, WINDOWS_CONFIG, Metrics
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
        timestamp, partition = plan.assign_timestamp, plan.partition
        self._timestamp = None if timestamp is None else self.function(timestamp, self._place)
        self._assign_key = (
            None if partition is None else self.function(partition.assign_key, self._place)
        )
        self._keys_of = (
            None
            if self._assign_key is None
            else KeyAssigner(self._assign_key, plan, self.failures, self.metrics, self._enter)
        )
        self._event_time = None if plan.window is None else EventTime(plan.window, ctx)
        self._decoders = [
            SourceDecoder(
                topic, self.failures, self.metrics, in_columns=self._takes_columns(source_steps)
            )
            for topic, source_steps in zip(plan.sources, self._source_steps, strict=True)
        ]

    def _takes_columns(self, source_steps: Sequence[Step]) -> bool:
        """Return whether the first function that gets a source's records takes columns."""
        forms = [step.function.form for step in (*source_steps, *self._steps, *self._window_steps)]
        update = None if self.plan.partition is None else self.plan.partition.update_state
        if self._assign_key is not None:
            forms.append(self._assign_key.form)
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
        def place(at: int) -> Place:
            return place_in(batch, self.plan.topics, at)

        records = self._decoders[source].records(batch, parsed, place)
        for steps in (self._source_steps[source], self._steps):
            records = run_steps(steps, records, self.failures, self.metrics, place)
        enter = None
        if self._event_time is not None:
            records = self._windowed(self._event_time, batch, records, place)
            enter = self._enter
        records = run_steps(self._window_steps, records, self.failures, self.metrics, place, enter)
        if len(records):
            self._put_out(batch, records, place, collector)

    def _enter(self, windows: tuple[Window, ...]) -> None:
        self._place.window = windows[0]

    # ---- windows ---------------------------------------------------------------------------------

    def _windowed(
        self,
        event_time: EventTime,
        batch: pa.RecordBatch,
        records: Records,
        place: Callable[[int], Place],
    ) -> Records:
        """Return the records that a window accepts, with their windows; each record advances the
        watermark.
        """
        kept: list[int] = []
        windows: list[tuple[Window, ...]] = []
        failed = 0
        if self._timestamp is not None:
            begin_step(self._timestamp.plan.name)
        for index, given_time in enumerate(self._given_times(batch, records)):
            try:
                time = self._event_time_of(records, index, given_time)
            except Exception as error:
                failed += 1
                assert self._timestamp is not None
                self.failures.note(
                    self._timestamp.plan.name,
                    error,
                    records.values[index],
                    place(records.at[index]),
                    partial=self.plan.partial_before_window,
                )
                continue
            accepted = event_time.accept(time)
            if accepted:
                kept.append(index)
                windows.append(accepted)
        if self._timestamp is not None:
            self.metrics.count(self._timestamp.plan.name, succeeded=len(records) - failed)
        late = len(records) - failed - len(kept)
        self.metrics.count("window", succeeded=len(kept), dropped_late=late)
        keys = None if records.keys is None else [records.keys[index] for index in kept]
        windowed = records.taken(kept, [records.values[index] for index in kept], keys)
        windowed.windows = windows
        return windowed

    def _given_times(self, batch: pa.RecordBatch, records: Records) -> list[int]:
        """Return the timestamp of each record; without one, the engine's clock."""
        times = column(batch, "timestamp").cast(pa.int64()).to_pylist()
        return [self.now_ms if times[index] is None else times[index] for index in records.at]

    def _event_time_of(self, records: Records, at: int, given: int) -> int:
        function, value = self._timestamp, records.values[at]
        assert function is not None
        key = None if records.keys is None else records.keys[at]
        time = (
            function.body(key, value, given)
            if function.takes_key
            else (function.body(value, given))
        )
        try:
            return _I64(time)  # type: ignore[no-any-return]
        except ValueError:
            raise OperatorResultError(
                f"assign-timestamp `{function.plan.name}` returned {time!r:.80}; expected epoch "
                "milliseconds, a signed 64-bit int",
                number="E29",
                path=function.plan.path,
            ) from None

    # ---- putting out -----------------------------------------------------------------------------

    def _put_out(
        self,
        batch: pa.RecordBatch,
        records: Records,
        place: Callable[[int], Place],
        collector: Collector,
    ) -> None:
        if not self.travel.keyed:
            records = self._that_travel(records, place)
            shared = self.plan.partial_before_key
            columns = {
                **self._encoded(records, None, shared=shared),
                **encode_keys(records.keys, len(records)),
            }
            collector.collect(self.travel.from_origin(batch, records.at, columns))
            return
        texts, kinds, records = self._keyed(records, place)
        if not len(records):
            return
        records, repeated = _one_a_window(records)
        if repeated is not None:
            texts, kinds = texts.take(repeated), kinds.take(repeated)
        groups = self._subtasks_of(texts)
        columns = self._encoded(records, groups, shared=self.plan.partial_before_key)
        columns[KEY], columns[KIND] = texts, kinds
        if records.windows is not None:
            for name, part in ((WINDOW_START, 0), (WINDOW_END, 1)):
                columns[name] = pa.array([entry[0][part] for entry in records.windows], pa.int64())
        collector.collect(self.travel.from_origin(batch, records.at, columns))

    @staticmethod
    def _encoded(records: Records, groups: Groups | None, *, shared: bool) -> dict[str, pa.Array]:
        if records.frame is not None and records.windows is None:
            return encode_rows(records.frame, groups)
        return encode(records.values, groups, shared=shared)

    def _subtasks_of(self, keys: pa.Array) -> Groups | None:
        """Return the subtask of the states that each key is routed to; None = there is one."""
        if self._parallelism == 1:
            return None
        hashes = key_hashes([keys], rows=len(keys))
        return subtasks_for_hashes(hashes, self._parallelism).astype(np.int64)

    def _that_travel(self, records: Records, place: Callable[[int], Place]) -> Records:
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
        kept: list[int] = []
        steps = [*self._window_steps, *self._steps]
        name = steps[-1].name if steps else "records"
        for index, value in enumerate(records.values):
            try:
                check_travels(value)
                kept.append(index)
            except OperatorResultError as error:
                partial = self.plan.partial_before_key
                self.failures.note(name, error, value, place(records.at[index]), partial=partial)
        if len(kept) == len(records):
            return records
        keys = None if records.keys is None else [records.keys[index] for index in kept]
        return records.taken(kept, [records.values[index] for index in kept], keys)

    def _keyed(
        self, records: Records, place: Callable[[int], Place]
    ) -> tuple[pa.Array, pa.Array, Records]:
        """Return each record's key as text, its kind, and the records that have a key."""
        records = self._that_travel(records, place)
        if self._assign_key is None:  # a window without a partition has one key
            rows = len(records)
            return pa.array([""] * rows, pa.string()), _kind(TEXT_KEY, rows), records
        assert self._keys_of is not None
        return self._keys_of.assign(records, place)


class KeyAssigner:
    """Calls assign-key with records, and converts what it returns to keys of the states.

    Args:
        function: assign-key.
        plan: the plan of the service.
        failures: receives the records without a key.
        metrics: counts the others.
        enter: called with the windows of each record before the function is.
    """

    def __init__(
        self,
        function: Function,
        plan: ServicePlan,
        failures: Failures,
        metrics: Metrics,
        enter: Callable[[tuple[Window, ...]], None],
    ) -> None:
        self._function = function
        self._key_types = plan.key_types
        self._partial = plan.partial_before_key
        self._failures = failures
        self._metrics = metrics
        self._enter = enter

    def assign(
        self, records: Records, place: Callable[[int], Place]
    ) -> tuple[pa.Array, pa.Array, Records]:
        """Return each record's key as text, its kind, and the records that have a key."""
        function = self._function
        begin_step(function.plan.name)
        if function.form:
            keys: Any = self._assigned_columns(records, place)
        else:
            keys = self._assigned(records, place)
        if isinstance(keys, pl.Series):
            if self._key_types in ((), (ScalarType.STRING,)) and keys.dtype == pl.String:
                self._metrics.count(function.plan.name, succeeded=len(keys))
                text = keys.to_arrow().cast(pa.string())
                return text, _kind(TEXT_KEY, len(keys)), records
            keys = keys.to_list()
        if self._key_types in ((), (ScalarType.STRING,)):
            all_texts = _texts(keys)
            if all_texts is not None:
                self._metrics.count(function.plan.name, succeeded=len(keys))
                return all_texts, _kind(TEXT_KEY, len(keys)), records
        texts: list[str] = []
        kinds: list[int] = []
        kept: list[int] = []
        for index, key in enumerate(keys):
            if not has_result(key):
                continue
            try:
                text, kind = _key_of(function, key, self._key_types)
            except Exception as error:
                self._no_key(error, records, index, place)
                continue
            texts.append(text)
            kinds.append(kind)
            kept.append(index)
        self._metrics.count(function.plan.name, succeeded=len(kept))
        assigned = records.chosen(kept)
        return pa.array(texts, pa.string()), pa.array(kinds, pa.int8()), assigned

    def _assigned(self, records: Records, place: Callable[[int], Place]) -> list[Any]:
        def fail(at: int, error: Exception) -> None:
            self._no_key(error, records, at, place)

        function = self._function
        if not function.takes_key and records.windows is None:
            return call_each(function.body, records.values, fail)[0]
        return call_each(lambda at: self._assign_one(records, at), range(len(records)), fail)[0]

    def _assigned_columns(
        self, records: Records, place: Callable[[int], Place]
    ) -> pl.Series | list[Any]:
        """Return the key of each record, or the marker of a failure, of a columnar assign-key."""

        def call(start: int, stop: int) -> pl.Series:
            result = called(self._function, records.columns(start, stop))
            return column_result(self._function, result, stop - start)

        def fail(at: int, error: Exception) -> None:
            self._no_key(error, records, at, place)

        results = call_divided(len(records), call, fail)
        if len(results) == 1 and results[0][:2] == (0, len(records)):
            return results[0][2]
        keys = no_results(len(records))
        for start, stop, series in results:
            keys[start:stop] = series.to_list()
        return keys

    def _no_key(
        self,
        error: Exception,
        records: Records,
        at: int,
        place: Callable[[int], Place],
    ) -> None:
        self._failures.note(
            self._function.plan.name,
            error,
            records.values[at],
            place(records.at[at]),
            partial=self._partial,
        )

    def _assign_one(self, records: Records, at: int) -> Any:
        function = self._function
        if records.windows is not None:
            self._enter(records.windows[at])
        if not function.takes_key:
            return function.body(records.values[at])
        key = None if records.keys is None else records.keys[at]
        return function.body(key, records.values[at])


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


def _texts(keys: Sequence[Any]) -> pa.Array | None:
    """Return text keys as an array; None if one is not text, or not valid Unicode."""
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
        [records.values[index] for index in repeated],
        [records.at[index] for index in repeated],
        None,
        [(window,) for windows in records.windows for window in windows],
    )
    return repeated_records, pa.array(repeated, pa.int64())
