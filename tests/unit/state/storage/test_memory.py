"""The memory store where it differs from other stores."""

from __future__ import annotations

import gc
import os
import pickle

import pytest

from arroyo_dagster.errors import InputError, NotFoundError
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.storage import memory
from arroyo_dagster.state.storage.memory import MemoryStore

P = StatePath


def test_stores_of_one_name_share_their_objects() -> None:
    MemoryStore("shared-1").put(P("a"), b"1")
    assert MemoryStore("shared-1").read(P("a")) == b"1"
    with pytest.raises(NotFoundError):
        list(MemoryStore("shared-2").list())


def test_a_store_without_a_name_exists_alone() -> None:
    one, other = MemoryStore(), MemoryStore()
    one.put(P("a"), b"1")
    assert list(other.list()) == []
    assert pickle.loads(pickle.dumps(one)).read(P("a")) == b"1"


def test_a_store_without_a_name_is_forgotten_with_its_last_user() -> None:
    store = MemoryStore()
    name = store.url.removeprefix("memory://")
    assert name in memory._UNNAMED
    del store
    gc.collect()
    assert name not in memory._UNNAMED


def test_no_other_process_may_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pickled = pickle.dumps(MemoryStore("elsewhere"))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(InputError, match="another process"):
        pickle.loads(pickled)


def test_an_object_and_a_directory_may_share_a_name_as_on_s3() -> None:
    store = MemoryStore()
    for name in ("a", "a/b", "a/b/c", "a.b"):
        store.put(P(name), b"")
    assert [info.path for info in store.list()] == ["a", "a.b", "a/b", "a/b/c"]
    assert [info.path for info in store.list("a")] == ["a/b", "a/b/c"]
    level = store.list_dir("a")
    assert ([info.path for info in level.objects], level.prefixes) == (["a/b"], ("a/b",))


def test_the_given_clock_stamps_objects() -> None:
    store = MemoryStore(clock=lambda: 1_700_000_000_000_000)
    store.put(P("a"), b"")
    assert next(store.list()).modified_micros == 1_700_000_000_000_000


def test_a_name_that_no_url_can_hold_is_refused() -> None:
    with pytest.raises(InputError):
        MemoryStore("a/b")
