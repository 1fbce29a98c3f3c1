"""Steps: each takes the records of a batch and gives those for the next step.

A function of one record is called in a loop, a function of whole batches with the batch. A function
that fails skips the record; the run continues unless failures are fatal.

Source: sdf-states.md 3.1, 3.2 (f), 8.2, 9; errors E42 and what functions raise.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from arroyo_dagster.dataflow.definition.windows import GLOBAL_WINDOW
from arroyo_dagster.dataflow.errors import OperatorResultError
from arroyo_dagster.dataflow.runtime.columnar import (
    call_divided,
    called,
    joined,
    mask_result,
    rows_result,
)
from arroyo_dagster.dataflow.runtime.context import Invocation
from arroyo_dagster.dataflow.runtime.failures import Failures, short_text
from arroyo_dagster.dataflow.runtime.functions import Function
from arroyo_dagster.dataflow.runtime.record import as_record
from arroyo_dagster.dataflow.runtime.records import Records
from arroyo_dagster.dataflow.storage.engine_tables import Metrics
from arroyo_dagster.dataflow.storage.payloads import records_of
from arroyo_dagster.user_modules import begin_step

T = TypeVar("T")
FAILED: Any = object()
"""Stands for the result of a call that raised."""


@dataclass(slots=True)
class Step:
    """A loaded function that is called with the records of a batch.

    Attributes:
        function: the function.
        place: the context of its calls; gets the window of each record.
        failures, metrics: where its failures and successes are counted.
        partial: whether records may reach it in parts; see `Letter`.
    """

    function: Function
    place: Invocation
    failures: Failures
    metrics: Metrics
    partial: bool = False

    @property
    def name(self) -> str:
        return self.function.plan.name

    def fail(self, records: Records, index: int, error: Exception) -> None:
        """Note that the step failed on a record."""
        value, place = records.values[index], records.place(index)
        self.failures.note(self.name, error, value, place, partial=self.partial)

    def each(
        self, call: Callable[..., Any], records: Records, *columns: Sequence[Any], keyed: bool
    ) -> tuple[list[Any], int]:
        """Call with each record, in its window, exactly once, since it may have side effects.

        Args:
            call: is given the key if it is `keyed`, the value, and an item of each column.
            records: the records.
            columns: further arguments, one per record.
            keyed: whether the first argument is the key; None = the record has none.

        Returns:
            The results, `FAILED` for each failed call, and the number of these.
        """
        arguments: list[Any] = [records.values, *columns]
        if keyed:
            arguments.insert(0, itertools.repeat(None) if records.keys is None else records.keys)
        if records.windows is None:
            return call_each(call, arguments, functools.partial(self.fail, records))

        def in_window(windows: Any, *more: Any) -> Any:
            self.place.window = windows[0]
            return call(*more)

        arguments.insert(0, records.windows)
        results = call_each(in_window, arguments, functools.partial(self.fail, records))
        self.place.window = GLOBAL_WINDOW
        return results

    def divided(
        self, records: Records, check: Callable[[Function, Any, int], T]
    ) -> tuple[list[tuple[int, int, T]], int]:
        """Call with the batch; where that raises, with its halves.

        Args:
            records: the records.
            check: is given the function, its result and the number of records.

        Returns:
            The ranges of records that succeeded, with their results, and the number of failures.
        """
        failed: list[int] = []

        def call(start: int, stop: int) -> T:
            result = called(self.function, records.columns(start, stop))
            return check(self.function, result, stop - start)

        def fail(index: int, error: Exception) -> None:
            failed.append(index)
            self.fail(records, index, error)

        return call_divided(len(records), call, fail), len(failed)


def call_each(
    call: Callable[..., Any], columns: Sequence[Any], fail: Callable[[int, Exception], None]
) -> tuple[list[Any], int]:
    """Call with an item of each column at a time; `fail` is given the index of a failed call.

    Returns:
        The results, `FAILED` for each failed call, and the number of these.
    """
    results: list[Any] = []
    append = results.append
    one, *more = columns
    rest = zip(*columns, strict=False) if more else iter(one)
    failed = 0
    while True:
        try:
            if more:
                for arguments in rest:
                    append(call(*arguments))
            else:
                for argument in rest:
                    append(call(argument))
            return results, failed
        except Exception as error:
            fail(len(results), error)
            append(FAILED)
            failed += 1


# ---- transforms ----------------------------------------------------------------------------------


def _wrong(function: Function, expected: str, found: Any) -> OperatorResultError:
    return OperatorResultError(
        f"{function.plan.operator} `{function.plan.name}` returned {short_text(found)}; "
        f"expected {expected}",
        number="E42",
        path=function.plan.path,
    )


def _pair(function: Function, result: Any) -> tuple[Any, Any]:
    if isinstance(result, tuple) and len(result) == 2:
        return result
    raise _wrong(function, "a pair of key and value", result)


def _mapped(function: Function, value: Any, result: Any) -> Sequence[Any]:
    if result is None:
        raise _wrong(function, "a record", result)
    return (result,)


def _filtered(function: Function, value: Any, result: Any) -> Sequence[Any]:
    if result is True:
        return (value,)
    if result is False:
        return ()
    raise _wrong(function, "True or False", result)


def _flat_mapped(function: Function, value: Any, result: Any) -> Sequence[Any]:
    if isinstance(result, str | bytes | dict) or not hasattr(result, "__iter__"):
        raise _wrong(function, "a list of records", result)
    results = list(result)
    if any(item is None for item in results):
        raise _wrong(function, "records", None)
    return results


OUTCOMES: dict[str, Callable[[Function, Any, Any], Sequence[Any]]] = {
    "map": _mapped,
    "filter": _filtered,
    "filter-map": lambda function, value, result: () if result is None else (result,),
    "flat-map": _flat_mapped,
}
"""For each operator, a function from a record's value and the function's result to new values."""


class Transform(Step):
    """A map, filter, filter-map or flat-map."""

    __slots__ = ()

    def one(self, key: Any, value: Any) -> Sequence[tuple[Any, Any]]:
        """Return the results for one record, as pairs of key and value."""
        function = self.function
        body, operator = function.body, function.plan.operator
        result = body(key, value) if function.takes_key else body(value)
        results = OUTCOMES[operator](function, value, result)
        if operator == "filter":
            return ((key, value),) if results else ()
        # Converted here, once, so that the next step gets what it would get from a topic.
        if not function.gives_pair:
            return [(key, as_record(item)) for item in results]
        pairs = [_pair(function, item) for item in results]
        return [(new_key, as_record(new_value)) for new_key, new_value in pairs]

    def run(self, records: Records) -> Records:
        """Return the results of records."""
        begin_step(self.name)
        if not self.function.form:
            new, failed = self._run_each(records)
        elif self.function.plan.operator == "filter":
            masks, failed = self.divided(records, mask_result)
            kept = [
                start + row for start, _, mask in masks for row in np.flatnonzero(mask).tolist()
            ]
            new = records.chosen(kept)
        else:
            new, failed = self._run_columns(records)
        self.metrics.count(self.name, succeeded=len(records) - failed)
        return new

    def _run_each(self, records: Records) -> tuple[Records, int]:
        function = self.function
        if function.plan.operator in ("map", "filter") and not (
            function.takes_key or function.gives_pair
        ):
            return self._run_plain(records)
        results, failed = self.each(self.one, records, keyed=True)
        kept: list[int] = []
        keys: list[Any] = []
        values: list[Any] = []
        for index, pairs in enumerate(results):
            for key, value in () if pairs is FAILED else pairs:
                kept.append(index)
                keys.append(key)
                values.append(value)
        has_keys = any(key is not None for key in keys)
        return records.taken(kept, values, keys if has_keys else None), failed

    def _run_plain(self, records: Records) -> tuple[Records, int]:
        """Run a function from a value to a value, or to whether to keep it, without pairs."""
        results, failed = self.each(self.function.body, records, keyed=False)
        filters = self.function.plan.operator == "filter"
        kept: list[int] = []
        values: list[Any] = []
        for index, (value, result) in enumerate(zip(records.values, results, strict=True)):
            if result is FAILED or (filters and result is False):
                continue
            if (result is not True) if filters else (result is None):
                expected = "True or False" if filters else "a record"
                self.fail(records, index, _wrong(self.function, expected, result))
                failed += 1
                continue
            kept.append(index)
            values.append(value if filters else as_record(result))
        keys = None if records.keys is None else [records.keys[index] for index in kept]
        return records.taken(kept, values, keys), failed

    def _run_columns(self, records: Records) -> tuple[Records, int]:
        parts, failed = self.divided(records, rows_result)
        kept = [index for start, stop, _ in parts for index in range(start, stop)]
        frames = [frame for _, _, frame in parts]
        whole = joined(frames) if frames else None
        if whole is not None:
            return records.chosen(kept, whole), failed
        keys = None if records.keys is None else [records.keys[index] for index in kept]
        values = [value for frame in frames for value in records_of(frame)]
        return records.taken(kept, values, keys), failed
