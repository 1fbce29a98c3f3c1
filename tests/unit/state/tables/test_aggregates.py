"""`merge` of global keyed tables: what a loop over the rows yields, and nothing lost in between."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.errors import InputError
from arroyo_dagster.state import MemoryStore, global_table_config
from arroyo_dagster.state.tables.aggregates import Aggregate
from tests.unit.state.tables.test_global_keyed import Subtask

KEYS = st.sampled_from(["", "a", "b", "ä", "a\0"])
NUMBERS = st.integers(-(2**40), 2**40) | st.none()
BATCHES = st.lists(st.lists(st.tuples(KEYS, NUMBERS), max_size=12), max_size=5)
HOW = st.sampled_from(["sum", "min", "max", "count"])


def by_loop(model: dict[str, int], how: Aggregate, rows: list[tuple[str, int | None]]) -> None:
    steps: Any = {"sum": lambda a, b: a + b, "min": min, "max": max}
    for key, value in rows:
        if how == "count":
            model[key] = model.get(key, 0) + 1
        elif value is not None:
            model[key] = steps[how](model[key], value) if key in model else value


@given(HOW, BATCHES, st.booleans())
def test_batches_are_merged_as_by_a_loop_across_restarts(
    how: Aggregate, batches: list[list[tuple[str, int | None]]], chunked: bool
) -> None:
    store = MemoryStore()
    task = Subtask(store)
    model: dict[str, int] = {}
    for rows in batches:
        before = dict(model)
        by_loop(model, how, rows)
        keys: Any = pa.array([key for key, _ in rows], pa.string())
        values: Any = pa.array([value for _, value in rows], pa.int64())
        if chunked:
            keys = pa.chunked_array([keys[:2], keys[2:]])
        changed = task.view.merge(keys, None if how == "count" else values, how)
        assert changed == {key: value for key, value in model.items() if before.get(key) != value}
        assert task.view.get_all() == model
        task = restored(task, store)
    assert task.view.get_all() == model


def restored(task: Subtask, store: MemoryStore) -> Subtask:
    """A subtask that reads what the barriers of another one wrote."""
    task.write()
    found = Subtask(store)
    found.files = task.files
    found.view.follow(task.files)
    return found


def test_a_sum_beyond_64_bits_is_refused_and_not_wrapped() -> None:
    task = Subtask(MemoryStore())
    most = 2**63 - 1
    with pytest.raises(InputError):
        task.view.merge(pa.array(["a", "a"]), pa.array([most, most]), "sum")
    assert task.view.get_all() == {}
    task.view.merge(pa.array(["a", "a", "a"]), pa.array([most, most, -most]), "sum")
    assert task.view.get("a") == most
    with pytest.raises(InputError):
        task.view.merge(pa.array(["a"]), pa.array([1]), "sum")
    assert task.view.get("a") == most


def test_nan_gives_way_to_a_number() -> None:
    task = Subtask(MemoryStore(), global_table_config("g", key=str, value=float), value=float)
    task.view.merge(pa.array(["a"]), pa.array([math.nan]), "max")
    assert task.view.merge(pa.array(["a", "a"]), pa.array([math.nan, 1.5]), "max") == {"a": 1.5}
    assert task.view.merge(pa.array(["a"]), pa.array([math.nan]), "max") == {}
    assert task.view.get("a") == 1.5


@pytest.mark.parametrize(
    ("keys", "values", "how"),
    [
        (["a", None], [1, 2], "sum"),
        (["a"], [1, 2], "sum"),
        (["a"], [1], "count"),
        (["a"], None, "sum"),
        (["a"], [1], "median"),
        (["a"], ["x"], "sum"),
        ([1], [1], "sum"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(keys: Any, values: Any, how: Any) -> None:
    task = Subtask(MemoryStore())
    with pytest.raises(InputError):
        task.view.merge(pa.array(keys), None if values is None else pa.array(values), how)
    assert task.view.get_all() == {}
