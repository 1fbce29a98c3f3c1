"""Lists and maps by key: what one key owns is all of it, in order, whatever was changed."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.parquet import read_facts
from arroyo_dagster.state.tables.keyed.definition import keyed_state
from arroyo_dagster.state.tables.keyed.states import ListState, MapState
from tests.keyed_subtasks import Subtasks


def test_items_come_in_the_order_in_which_they_were_appended() -> None:
    tasks = Subtasks(keyed_state("t", str, list[str]))
    manager = tasks.open()
    state = manager.get_keyed_state("t", ListState)
    state.append_many(["a", "b", "a"], ["1", "2", "3"])
    state.append("a", "4")
    tasks.write(manager)
    state.append_many(["a"] * 2, ["5", "x" * 40])
    tasks.write(manager)
    for one in (state, tasks.open().get_keyed_state("t", ListState)):
        assert one.get("a") == ["1", "3", "4", "5", "x" * 40]
        assert one.get_many(["b", "none", "a"]).to_pylist()[:2] == [["2"], []]
        assert len(one) == 2
        one.append("a", "6")
        assert one.get("a")[-1] == "6"


def test_an_item_costs_one_row_however_long_the_list_is() -> None:
    tasks = Subtasks(keyed_state("t", str, list[int]))
    manager = tasks.open()
    state = manager.get_keyed_state("t", ListState)
    state.append_many(["a"] * 20_000, list(range(20_000)))
    tasks.write(manager)
    state.append("a", 1)
    tasks.write(manager)
    first, second = (
        read_facts(tasks.store.read(file.path), file.path).rows for file in tasks.files("t")
    )
    assert (first > 1, second) == (True, 1)
    assert len(tasks.open().get_keyed_state("t", ListState).get("a")) == 20_001


def test_a_list_that_was_removed_begins_anew() -> None:
    tasks = Subtasks(keyed_state("t", str, list[int]))
    manager = tasks.open()
    state = manager.get_keyed_state("t", ListState)
    state.append_many(["a"] * 3, [1, 2, 3])
    tasks.write(manager)
    state.remove("a")
    assert state.get("a") == []
    state.append("a", 9)
    tasks.write(manager)
    state.put_many(["b", "c"], pa.array([[7, 8], []], pa.list_(pa.int64())))
    state.put("c", [5])
    tasks.write(manager)
    for one in (state, tasks.open().get_keyed_state("t", ListState)):
        assert one.get_many(["a", "b", "c"]).to_pylist() == [[9], [7, 8], [5]]


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


def test_an_empty_table_gives_typed_nothing() -> None:
    manager = Subtasks(
        keyed_state("l", str, list[int]), keyed_state("m", str, dict[str, int])
    ).open()
    lists, maps = manager.get_keyed_state("l", ListState), manager.get_keyed_state("m", MapState)
    assert lists.get_many(["a"]).type == pa.list_(pa.int64())
    assert lists.get_many(pa.array([], pa.string())).to_pylist() == []
    assert maps.get_many(["a"]).to_pylist() == [[]]
    assert maps.get_entries(["a"], ["b"]).equals(pa.nulls(1, pa.int64()))
    lists.put_many(["a"], pa.array([[]], pa.list_(pa.int64())))
    maps.remove_many(["a"])
    assert not len(lists)


@pytest.mark.parametrize("long", [3, 60])
def test_random_changes_are_those_of_dicts(long: int) -> None:
    """Chains of up to `long` entries, from which neighbours are removed at once."""
    chance = random.Random(long)
    tasks = Subtasks(keyed_state("t", int, dict[int, int]))
    manager, model = tasks.open(), dict[int, dict[int, int]]()
    for step in range(200):
        state = manager.get_keyed_state("t", MapState)
        pairs = [(chance.randint(0, 5), chance.randint(0, long)) for _ in range(20)]
        keys, names = map(list, zip(*pairs, strict=True))
        verb = chance.random()
        if verb < 0.5:
            values = [chance.randint(0, 99) for _ in pairs]
            state.put_many(keys, names, values)
            for (key, name), value in zip(pairs, values, strict=True):
                model.setdefault(key, {})[name] = value
        elif verb < 0.9:
            state.remove_entries(keys, names)
            for key, name in pairs:
                model.get(key, {}).pop(name, None)
        else:
            state.remove_many(keys[:2])
            for key in keys[:2]:
                model.pop(key, None)
        if step % 9 == 0:
            tasks.write(manager)
        if step % 36 == 0:
            manager = tasks.open()
            state = manager.get_keyed_state("t", MapState)
        wanted = list(range(7))
        found = [dict(entries) for entries in state.get_many(wanted).to_pylist()]
        assert found == [dict(sorted(model.get(key, {}).items())) for key in wanted]
        assert len(state) == sum(bool(entries) for entries in model.values())


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


def test_numbers_of_map_keys_and_values_match() -> None:
    state = Subtasks(keyed_state("t", str, dict[str, int])).open().get_keyed_state("t", MapState)
    for given in ((["a"], ["b", "c"], [1]), (["a"], ["b"], [1, 2])):
        with pytest.raises(InputError, match="keys were given"):
            state.put_many(*given)
