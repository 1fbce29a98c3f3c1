"""Lists and maps by key: what one key owns is all of it, in order, whatever was changed."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster.engine import ListState, MapState, keyed_state
from arroyo_dagster.errors import InputError
from tests.keyed_subtasks import Subtasks


def test_entries_come_by_their_keys() -> None:
    item = pa.struct([("n", pa.int64()), ("s", pa.string())])
    tasks = Subtasks(keyed_state("t", int, pa.map_(pa.string(), item)))
    manager = tasks.open()
    state = manager.get_keyed_state("t", MapState)
    values = pa.array([{"n": 1, "s": "x"}, {"n": 2, "s": None}, {"n": 3, "s": "y"}], item)
    state.put_many([1, 1, 2], ["b", "a", "b"], values)
    tasks.write(manager)
    state.put_entry(1, "c", (4, "z"))
    state.remove_entries([1, 2], ["b", "none"])
    tasks.write(manager)
    for one in (state, tasks.open().get_keyed_state("t", MapState)):
        assert one.get(1) == {"a": {"n": 2, "s": None}, "c": {"n": 4, "s": "z"}}
        assert one.get_many([3, 2]).to_pylist() == [[], [("b", {"n": 3, "s": "y"})]]
        assert one.get_entries([1, 1], ["a", "b"]).to_pylist() == [{"n": 2, "s": None}, None]
        assert one.get_entry(1, "b", "?") == "?"
        one.put(2, {})
        assert len(one) == 1


@pytest.mark.parametrize(
    ("call", "given"),
    [
        ("append_many", (["a", "b"], [1])),
        ("append_many", (["a"], ["x"])),
        ("append_many", (["a"], [None])),
        ("get_many", ([1],)),
        ("put_many", (["a"], pa.array([[1], [2]]))),
        ("put_many", (["a"], pa.array([["x"]]))),
        ("put_many", (["a", "a"], pa.array([[1], [2]]))),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_changes(call: str, given: Any) -> None:
    state = Subtasks(keyed_state("t", str, list[int])).open().get_keyed_state("t", ListState)
    state.append("a", 1)
    with pytest.raises(InputError):
        getattr(state, call)(*given)
    assert state.get("a") == [1]
