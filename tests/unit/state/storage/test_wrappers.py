"""Counting, slow and failing stores."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Literal

import pytest

from arroyo_dagster.errors import ConflictError, StorageError
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.storage import Counting, MemoryStore, ObjectStore, WriteProtected
from tests.faulty_stores import Crash, FaultInjecting, Slow

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


@pytest.mark.parametrize(
    ("mode", "left"), [("before", ["a"]), ("after", ["a", "b"]), ("partial", ["a"])]
)
def test_the_kth_change_fails_and_the_next_one_works(
    mode: Literal["before", "after", "partial"], left: list[str]
) -> None:
    store = FaultInjecting(MemoryStore(), fail_at=2, mode=mode)
    store.put(P("a"), b"")
    with pytest.raises(StorageError) as caught:
        store.put(P("b"), b"")
    assert caught.value.retryable
    assert seen(store) == left
    assert store.create(P("c"), b"")
    assert store.changes == 3


def test_a_partial_delete_stops_half_way() -> None:
    inner = MemoryStore()
    for name in "abcd":
        inner.put(P(name), b"")
    store = FaultInjecting(inner, fail_at=1, mode="partial", crash=True)
    with pytest.raises(Crash):
        store.delete_many([P(name) for name in "abcd"])
    assert seen(inner) == ["c", "d"]


@pytest.mark.parametrize(("mode", "left"), [("before", []), ("after", ["a"])])
def test_after_a_crash_every_verb_crashes(
    mode: Literal["before", "after"], left: list[str]
) -> None:
    inner = MemoryStore()
    store = FaultInjecting(inner, fail_at=1, mode=mode, crash=True)
    with pytest.raises(Crash):
        store.put(P("a"), b"")
    verbs: list[Callable[[], object]] = [
        lambda: store.read(P("a")),
        lambda: store.head(P("a")),
        lambda: list(store.list()),
        lambda: store.list_dir(),
        lambda: store.put(P("b"), b""),
        lambda: store.delete_many([P("a")]),
        lambda: store.open_input(P("a")),
    ]
    for verb in verbs:
        with pytest.raises(Crash):
            verb()
    assert seen(inner) == left


def test_no_handler_of_exceptions_holds_a_crash_up() -> None:
    assert not issubclass(Crash, Exception)


def test_the_error_can_be_chosen_and_no_fault_only_counts() -> None:
    store = FaultInjecting(MemoryStore(), fail_at=1, error=ConflictError("lost"))
    with pytest.raises(ConflictError):
        store.put(P("a"), b"")
    counting = FaultInjecting(MemoryStore())
    for _ in range(5):
        counting.put(P("a"), b"")
    assert counting.changes == 5


def test_a_slow_store_waits_before_every_call() -> None:
    waits: list[float] = []
    store = Slow(MemoryStore(), 0.5, sleep=waits.append)
    store.put(P("a"), b"")
    store.read(P("a"))
    assert waits == [0.5, 0.5]


def test_wrappers_go_around_one_another_and_are_pickled() -> None:
    store = WriteProtected(Counting(FaultInjecting(MemoryStore("wrapped"))))
    assert isinstance(store, ObjectStore)
    twin = pickle.loads(pickle.dumps(store))
    assert twin.url == store.url == "memory://wrapped"
    assert repr(twin) == "WriteProtected(Counting(FaultInjecting(MemoryStore('wrapped'))))"
