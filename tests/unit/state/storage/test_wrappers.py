"""Counting, slow and failing stores."""

from __future__ import annotations

import pickle

import pytest

from arroyo_dagster.state import MemoryStore, ObjectStore, StatePath, WriteProtected
from arroyo_dagster.state.storage import Counting
from tests.faulty_stores import FaultInjecting

P = StatePath


def seen(store: ObjectStore) -> list[str]:
    return [info.path for info in store.list()]


def test_calls_and_bytes_are_counted_by_verb() -> None:
    store = Counting(MemoryStore())
    store.put(P("a"), b"12345")
    store.create(P("a"), b"123")
    store.create(P("b"), b"123")
    store.read(P("a"))
    store.read_range(P("a"), 1, 2)
    store.head(P("a"))
    assert seen(store) == ["a", "b"]
    store.open_input(P("a")).read()
    with pytest.raises(LookupError):
        store.read(P("missing"))
    assert store.calls == {
        "put": 1,
        "create": 2,
        "read": 2,
        "read_range": 2,
        "head": 2,
        "list": 1,
    }
    assert store.bytes_written == {"put": 5, "create": 3}
    assert store.bytes_read == {"read": 5, "read_range": 7}


def test_wrappers_go_around_one_another_and_are_pickled() -> None:
    store = WriteProtected(Counting(FaultInjecting(MemoryStore("wrapped"))))
    assert isinstance(store, ObjectStore)
    twin = pickle.loads(pickle.dumps(store))
    assert twin.url == store.url == "memory://wrapped"
    assert repr(twin) == "WriteProtected(Counting(FaultInjecting(MemoryStore('wrapped'))))"
