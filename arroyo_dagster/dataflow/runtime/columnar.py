"""Functions of whole batches: which form a body has, how it is called, and what it returns.

A body that is annotated with a frame, or is a query, gets the records of a batch as columns. If it
raises, the batch is divided until the records are found on which it fails.

Source: an extension of this project; the decision `sdf-columnar.md`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from arroyo_dagster.dataflow.errors import OperatorResultError
from arroyo_dagster.dataflow.runtime.context import current
from arroyo_dagster.dataflow.storage.payloads import SCALAR, arrow_of
from arroyo_dagster.dataflow.views.sql import StateTable
from arroyo_dagster.errors import StorageError

if TYPE_CHECKING:
    from arroyo_dagster.dataflow.runtime.functions import Function

POLARS, ARROW, SQL = "polars", "arrow", "sql"
COLUMNAR = ("map", "filter", "assign-key", "update-state")
"""The operators that have a columnar form."""

BATCH, ROW = "batch", "_row"
"""The table of a query's records, and its column that keeps their order."""

_FRAME = re.compile(r"(?:\w+\.)*DataFrame\Z")
_TABLE = re.compile(r"(?:pa|pyarrow)\.Table\Z")
T = TypeVar("T")


def form_of(body: Callable[..., Any], parameter: str) -> str:
    """Return the form of a body by the annotation of its last parameter; "" = a call per record."""
    annotation = getattr(body, "__annotations__", {}).get(parameter)
    if annotation is pl.DataFrame or (isinstance(annotation, str) and _FRAME.match(annotation)):
        return POLARS
    if annotation is pa.Table or (isinstance(annotation, str) and _TABLE.match(annotation)):
        return ARROW
    return ""


class SqlBody:
    """A query as a body: `batch` are the records, with their order in `_row`.

    Args:
        text: the query. It sees the states that the service owns or refers to; in update-state,
            of owned states the rows of the batch's keys.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._words = {word.lower() for word in re.findall(r"\w+", text)}

    def __call__(self, batch: pl.DataFrame) -> pl.DataFrame:
        numbered = batch.with_row_index(ROW)
        tables = current().tables(self._words).with_table(StateTable(BATCH, numbered))
        answer = tables.sql(self._text)
        return answer.sort(ROW).drop(ROW) if ROW in answer.columns else answer


def call_divided(
    rows: int, call: Callable[[int, int], T], fail: Callable[[int, Exception], None]
) -> list[tuple[int, int, T]]:
    """Call a function with a range of rows; where it raises, with each half of it.

    Args:
        rows: the number of rows.
        call: is given the first row and the row after the last; must have no effect if it raises.
        fail: is given each single row on which `call` raises.

    Returns:
        The ranges that succeeded, in order, with their results.

    Raises:
        StorageError: the store failed, which no division would help.
    """
    waiting = [(0, rows)] if rows else []
    results: list[tuple[int, int, T]] = []
    while waiting:
        start, stop = waiting.pop()
        try:
            results.append((start, stop, call(start, stop)))
        except StorageError:
            raise
        except Exception as error:
            if stop - start == 1:
                fail(start, error)
                continue
            middle = (start + stop) // 2
            waiting += [(middle, stop), (start, middle)]
    return results


def called(function: Function, frame: pl.DataFrame) -> Any:
    """Call a columnar body with a frame in its form."""
    return function.body(arrow_of(frame) if function.form == ARROW else frame)


# ---- results -------------------------------------------------------------------------------------


def _wrong(function: Function, expected: str, found: str) -> OperatorResultError:
    return OperatorResultError(
        f"{function.plan.operator} `{function.plan.name}` returned {found}; expected {expected}",
        number="E42",
        path=function.plan.path,
    )


def frame_result(function: Function, result: Any) -> pl.DataFrame:
    """Return a result as a frame; a single column of records that are not objects is `_value`.

    Raises:
        OperatorResultError: it is something else (E42).
    """
    if isinstance(result, pa.Table | pa.RecordBatch | pa.Array | pa.ChunkedArray):
        result = pl.from_arrow(result)
    if isinstance(result, pl.Series):
        return result.alias(SCALAR).to_frame()
    if not isinstance(result, pl.DataFrame):
        raise _wrong(function, "a frame, a series, or an Arrow table", type(result).__name__)
    return result


def rows_result(function: Function, result: Any, rows: int) -> pl.DataFrame:
    """Return a result with one row per record. Errors as in `frame_result`."""
    frame = frame_result(function, result)
    if frame.height != rows:
        raise _wrong(function, f"one row per record, {rows}", f"{frame.height} rows")
    return frame


def column_result(function: Function, result: Any, rows: int) -> pl.Series:
    """Return a result of one column, one value per record. Errors as in `frame_result`."""
    frame = rows_result(function, result, rows)
    if frame.width != 1:
        raise _wrong(function, "one column", f"{frame.width} columns")
    column = frame.to_series()
    if column.null_count():
        raise _wrong(function, "no nulls", "a null")
    return column


def mask_result(function: Function, result: Any, rows: int) -> npt.NDArray[np.bool_]:
    """Return the result of a filter: whether to keep each record. Errors as in `frame_result`."""
    column = column_result(function, result, rows)
    if column.dtype != pl.Boolean:
        raise _wrong(function, "True or False for each record", str(column.dtype))
    return column.to_numpy()


def joined(frames: Sequence[pl.DataFrame]) -> pl.DataFrame | None:
    """Return the rows of frames as one; None if they have different columns."""
    if len(frames) == 1:
        return frames[0]
    if len({tuple(frame.schema.items()) for frame in frames}) != 1:
        return None
    return pl.concat(frames)
