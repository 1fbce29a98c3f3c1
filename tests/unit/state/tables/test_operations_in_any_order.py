"""Every order of six operations, against a plain list: in files, and in merged files."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster.state import (
    DataOperation,
    DeleteKey,
    DeleteTimeKey,
    DeleteTimeRange,
    DeleteValue,
    Epoch,
    ExpiringTimeKeyTable,
    Insert,
    MemoryStore,
    StatePath,
    range_for_server,
    timestamp_table_config,
)
from arroyo_dagster.state.codec.operations import encode_key
from arroyo_dagster.state.tables.messages import RecordBatch
from arroyo_dagster.state.tables.table import EpochFiles
from tests.fabricated import compact_rows
from tests.formats import TimeFile, encode_operation
from tests.jobs import as_multiset
from tests.keyed_subtasks import TIMED as SCHEMA
from tests.shares import some_of

ALL_KEYS = range_for_server(0, 1)
CONFIG = timestamp_table_config("t", retention_micros=10**9, schema=SCHEMA, keys=["k"])
Row = tuple[str | None, int, int]
_NAMES = itertools.count()
PARTS = 11
"""Every eleventh history is one part: the last operations of those beside each other are alike."""


@dataclass(frozen=True)
class Step:
    """One operation: the row that carries it, and what it does."""

    row: Row
    operation: DataOperation


def key_bytes(key: str | None) -> bytes:
    return encode_key([SCHEMA.field(0)], [key])


# The rows of a key are equal, differ in value, or in time; deletes by all four payloads.
SIX = (
    Step(("a", 1, 1000), Insert()),
    Step(("a", 2, 2000), Insert()),
    Step(("a", 0, 2000), DeleteTimeKey(2000, key_bytes("a"))),
    Step(("a", 0, 2000), DeleteKey(key_bytes("a"))),
    Step(("a", 1, 1000), DeleteValue(key_bytes("a"), 1000, b"")),
    Step(("a", 0, 2000), DeleteTimeRange(key_bytes("a"), 1000, 2000)),
)
START: tuple[Row, ...] = (("a", 1, 1000), ("a", 2, 2000), ("a", 1, 2000), (None, 1, 1000))


def apply_to_list(rows: list[Row], step: Step) -> list[Row]:
    operation, key = step.operation, step.row[0]
    if isinstance(operation, Insert):
        return [*rows, step.row]
    if isinstance(operation, DeleteKey):
        return [row for row in rows if row[0] != key]
    if isinstance(operation, DeleteTimeKey):
        return [row for row in rows if (row[0], row[2]) != (key, operation.timestamp_nanos)]
    if isinstance(operation, DeleteValue):
        return [row for row in rows if row != step.row]
    start, end = operation.start_nanos, operation.end_nanos
    return [row for row in rows if row[0] != key or not start <= row[2] < end]


def table(*rows: Row) -> pa.Table:
    columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], []]
    return pa.table(columns, schema=SCHEMA)


def name_file(suffix: str) -> StatePath:
    return StatePath(f"f{next(_NAMES)}{suffix}")


class Files:
    """The files of a table, one an epoch."""

    def __init__(self) -> None:
        self.table = ExpiringTimeKeyTable(CONFIG, MemoryStore())
        self.listed: tuple[TimeFile, ...] = ()
        self.epoch = 0
        self.pending: list[RecordBatch] = []

    def add(self, *rows: Row, operation: DataOperation) -> None:
        encoded = encode_operation(operation)
        self.pending.extend(RecordBatch(batch, encoded) for batch in table(*rows).to_batches())

    def barrier(self) -> None:
        self.epoch += 1
        files = EpochFiles(epoch=Epoch(self.epoch), keys=ALL_KEYS, name_file=name_file)
        checkpointer = self.table.checkpoint(files)
        for data in self.pending:
            checkpointer.apply(data)
        self.pending = []
        checkpointer.prepare(None)
        report, _ = checkpointer.finish(None, self.listed)
        self.listed = report.files if report else ()

    def merge(self, start: int, end: int) -> None:
        run = self.listed[start:end]
        if not run:
            return
        done = compact_rows(
            self.table, run, name_file, ALL_KEYS, cutoff_micros=0, from_oldest=start == 0
        )
        self.listed = (*self.listed[:start], *done.outputs, *self.listed[end:])

    def restored(self) -> Counter[Any]:
        return as_multiset(self.table.load(self.listed, ALL_KEYS, cutoff_micros=0))


def histories() -> Iterator[tuple[int, Sequence[Step]]]:
    """Every order of the six, each with another choice of where barriers come."""
    return enumerate(itertools.permutations(SIX))


@pytest.mark.parametrize("part", some_of(range(PARTS), PARTS))
def test_files_with_operations_in_any_order_come_to_what_a_plain_list_comes_to(part: int) -> None:
    """Also deletes that find nothing, which a view would not write; and any run of them merged."""
    runs = list(itertools.combinations(range(7), 2))
    for number, history in itertools.islice(histories(), part, None, PARTS):
        files, model = Files(), list(START)
        files.add(*START, operation=Insert())
        for at, step in enumerate(history):
            files.add(step.row, operation=step.operation)
            model = apply_to_list(model, step)
            if number >> at & 1:
                files.barrier()
        files.barrier()
        expected = as_multiset(table(*model))
        assert files.restored() == expected, history
        start, end = runs[number % len(runs)]
        files.merge(start, min(end, len(files.listed)))
        assert files.restored() == expected, (history, start, end)
        files.merge(0, len(files.listed))
        assert files.restored() == expected
        assert len(files.listed) <= 1
