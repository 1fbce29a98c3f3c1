"""Expiring time-key tables: rows in memory equal the rows a restore would load, always."""

from __future__ import annotations

import datetime as dt
import itertools
from collections import Counter
from typing import Any

import pendulum
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.errors import InputError
from arroyo_dagster.state import (
    Epoch,
    ExpiringTimeKeyTable,
    ExpiringTimeKeyView,
    KeyRange,
    MemoryStore,
    StatePath,
    TableConfig,
    range_for_server,
    timestamp_table_config,
)
from arroyo_dagster.state.planning.restore.checkpoint import cutoff_micros
from arroyo_dagster.state.tables.messages import RecordBatch, TableChange
from arroyo_dagster.state.tables.table import EpochFiles
from tests.formats import TimeFile
from tests.jobs import as_multiset
from tests.keyed_subtasks import TIMED as SCHEMA

ALL_KEYS = range_for_server(0, 1)
_NUMBERS = itertools.count()


def config(retention_micros: int = 10, schema: pa.Schema = SCHEMA, **options: Any) -> TableConfig:
    options.setdefault("keys", ["k"])
    return timestamp_table_config("t", retention_micros=retention_micros, schema=schema, **options)


def rows(*values: tuple[Any, Any, int], schema: pa.Schema = SCHEMA) -> pa.Table:
    """Rows (key, value, time in microseconds)."""
    keys, numbers, times = zip(*values, strict=True) if values else ((), (), ())
    return pa.table([keys, numbers, [time * 1000 for time in times]], schema=schema)


class Subtask:
    """A view with what it sends, its files, and a watermark."""

    def __init__(
        self,
        table_config: TableConfig | None = None,
        store: MemoryStore | None = None,
        keys: KeyRange = ALL_KEYS,
    ) -> None:
        self.store = store or MemoryStore()
        self.table = ExpiringTimeKeyTable(table_config or config(), self.store)
        self.keys = keys
        self.sent: list[RecordBatch] = []
        self.view = ExpiringTimeKeyView(self.table, self.take)
        self.files: tuple[TimeFile, ...] = ()
        self.epoch = 0
        self.watermark: int | None = None

    def take(self, message: TableChange) -> None:
        assert isinstance(message.data, RecordBatch)
        self.sent.append(message.data)

    @property
    def cutoff(self) -> int:
        return cutoff_micros(self.watermark, self.table.config.retention_micros)

    def checkpoint(self, watermark: int | None = None) -> TimeFile | None:
        self.epoch += 1
        self.watermark = watermark if watermark is not None else self.watermark
        checkpointer = self.table.checkpoint(
            EpochFiles(
                epoch=Epoch(self.epoch),
                keys=self.keys,
                name_file=lambda suffix: StatePath(f"f{next(_NUMBERS):06}{suffix}"),
            )
        )
        for data in self.sent:
            checkpointer.apply(data)
        self.sent = []
        checkpointer.prepare(self.watermark)
        report, _ = checkpointer.finish(self.watermark, self.files)
        written = [file for file in report.files if file not in self.files] if report else []
        self.files = report.files if report else ()
        self.view.evict(self.cutoff)
        return written[0] if written else None

    def restored(self) -> Counter[Any]:
        view = ExpiringTimeKeyView(self.table, lambda _: None)
        view.replay(self.table.read(self.files, self.keys))
        view.evict(self.cutoff)
        return as_multiset(view.rows())

    def held(self) -> Counter[Any]:
        return as_multiset(self.view.rows())


# ---- rows and time -------------------------------------------------------------------------------


def test_rows_between_includes_the_start_and_not_the_end() -> None:
    view = Subtask().view
    view.insert(rows(("a", 1, 4), ("b", 2, 5), ("c", 3, 6)))
    assert view.rows_between(4, 6).column("k").to_pylist() == ["a", "b"]


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        pa.table({"k": ["a"], "v": [1]}),
        pa.table({"v": [1], "k": ["a"], "_timestamp": pa.array([1], pa.timestamp("ns"))}),
        pa.table({"k": ["a"], "v": ["text"], "_timestamp": pa.array([1], pa.timestamp("ns"))}),
        pa.table({"k": ["a"], "v": [1], "_timestamp": pa.array([None], pa.timestamp("ns"))}),
        pa.table({"k": ["a"], "v": [1], "_timestamp": pa.array([-1], pa.timestamp("ns"))}),
    ],
    ids=["missing", "order", "type", "null-time", "before-1970"],
)
def test_rows_that_do_not_fit_their_table_change_nothing(wrong: pa.Table) -> None:
    subtask = Subtask()
    with pytest.raises(InputError):
        subtask.view.insert(wrong)
    assert len(subtask.view) == 0
    assert subtask.sent == []


# ---- random histories ----------------------------------------------------------------------------

_KEYS = st.sampled_from(["a", "b", None])
_TIMES = st.integers(0, 40)
_ROW = st.tuples(_KEYS, st.integers(0, 2), _TIMES)
_CHANGES = st.one_of(
    st.tuples(st.just("insert"), st.lists(_ROW, min_size=1, max_size=4)),
    st.tuples(st.just("key"), _KEYS),
    st.tuples(st.just("time"), _KEYS, _TIMES),
    st.tuples(st.just("range"), _KEYS, _TIMES, _TIMES),
    st.tuples(st.just("value"), _ROW),
    st.tuples(st.just("checkpoint"), st.none() | st.integers(0, 60)),
)


@given(history=st.lists(_CHANGES, max_size=20), retention=st.integers(0, 30))
def test_memory_model_and_restore_agree(history: list[Any], retention: int) -> None:
    subtask = Subtask(config(retention))
    model: list[tuple[Any, int, int]] = []
    watermark: int | None = None
    for kind, *given_values in [*history, ("checkpoint", None)]:
        if kind == "insert":
            (batch,) = given_values
            subtask.view.insert(rows(*batch))
            model.extend(batch)
        elif kind == "key":
            (key,) = given_values
            subtask.view.delete_key(key)
            model = [row for row in model if row[0] != key]
        elif kind == "time":
            key, time = given_values
            subtask.view.delete_time_key(time, key)
            model = [row for row in model if (row[0], row[2]) != (key, time)]
        elif kind == "range":
            key, start, end = given_values
            subtask.view.delete_time_range(start, end, key)
            model = [row for row in model if row[0] != key or not start <= row[2] < end]
        elif kind == "value":
            (row,) = given_values
            subtask.view.delete_value(rows(row))
            model = [other for other in model if other != row]
        else:
            (mark,) = given_values
            if mark is not None:
                watermark = max(mark, watermark or 0)  # a watermark never goes back
            subtask.checkpoint(watermark)
            model = [row for row in model if row[2] >= cutoff_micros(watermark, retention)]
            assert subtask.restored() == as_multiset(rows(*model))
        assert subtask.held() == as_multiset(rows(*model))


@pytest.mark.parametrize(
    "retention", [dt.timedelta(hours=1, microseconds=1), pendulum.duration(hours=1, microseconds=1)]
)
def test_a_table_is_configured_as_in_arroyo(retention: dt.timedelta) -> None:
    by_keyword = timestamp_table_config(
        "t", "rows", retention_micros=3_600_000_001, schema=SCHEMA, generational=True
    )
    assert timestamp_table_config("t", "rows", retention, True, SCHEMA) == by_keyword


@pytest.mark.parametrize(
    "given",
    [
        {"retention": dt.timedelta(1)},
        {"schema": SCHEMA},
        {"schema": SCHEMA, "retention": dt.timedelta(1), "retention_micros": 1},
        {"schema": SCHEMA, "retention": 5},
        {"schema": SCHEMA, "retention": dt.timedelta.max},
        {"schema": SCHEMA, "retention_micros": -1},
    ],
)
def test_a_table_with_another_retention_or_schema_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        timestamp_table_config("t", **given)
