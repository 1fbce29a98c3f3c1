"""The memory store where it differs from other stores."""

from __future__ import annotations

import os
import pickle

import pytest

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.storage.memory import MemoryStore

P = StatePath


def test_no_other_process_may_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pickled = pickle.dumps(MemoryStore("elsewhere"))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(InputError, match="another process"):
        pickle.loads(pickled)


def test_the_given_clock_stamps_objects() -> None:
    store = MemoryStore(clock=lambda: 1_700_000_000_000_000)
    store.put(P("a"), b"")
    assert next(store.list()).modified_micros == 1_700_000_000_000_000
