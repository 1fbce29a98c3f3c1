"""Garbage collection on real stores: their listings, their clocks, their bulk deletes, and
random names through each of them."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arroyo_dagster.state import (
    Epoch,
    GcOptions,
    ObjectStore,
    OperatorId,
    ParquetBackend,
    StatePath,
    TableName,
    WorkerGeneration,
    open_store,
    run_gc,
)
from arroyo_dagster.state.storage import encode_path
from tests.contract.conftest import NewStore
from tests.contract.test_object_store import assert_same_but_for_a_second
from tests.fleets import Written, protocol_job
from tests.formats import path_error
from tests.gc_jobs import expiry, orphans, whole, without_ours
from tests.internals import read_journal, run_undelete

PATHS = protocol_job("p")
STOPPED = {"p/main": "stopped"}
LOST = PATHS.data_file(
    OperatorId("SessionWindow<30s>"),
    TableName("s"),
    0,
    Epoch(1),
    WorkerGeneration(1),
    attempt="lost",
)


@pytest.mark.parametrize("new_store", ["local", "s3-obstore", "s3-fsspec"], indirect=True)
def test_what_goes_is_read_back_and_comes_back(new_store: Callable[[], ObjectStore]) -> None:
    store = new_store()
    Written(store, PATHS, start=time.time_ns() // 1000).epochs(4)
    before = without_ours(store)
    outcome = run_gc(store, PATHS, expiry(2, **STOPPED), GcOptions(quarantine=True))
    assert outcome.deleted == outcome.plan.objects
    assert outcome.size_bytes == sum(len(before[p]) for p in before.keys() - without_ours(store))
    assert {entry.outcome for entry in read_journal(store, PATHS)} == {"moved"}
    whole(store, PATHS, 3, 4)
    assert ParquetBackend(store, PATHS).epochs() == [3, 4]
    run_undelete(store, PATHS, str(outcome.quarantine))
    assert without_ours(store) == before
    store.put(LOST, b"x")
    young = run_gc(store, PATHS, orphans(**STOPPED))
    assert (young.done, young.plan.stays["young"]) == (False, (1, 1))


def test_empty_directories_go_with_what_was_in_them(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    Written(store, PATHS, start=time.time_ns() // 1000).epochs(6)
    store.put(LOST, b"x")
    lost = next(tmp_path.rglob("*-lost"))
    assert "%3C" in str(lost)
    os.utime(lost, (1_700_000_000, 1_700_000_000))
    run_gc(store, PATHS, expiry(2, **STOPPED))
    assert lost.exists()
    assert not (tmp_path / PATHS.checkpoint(Epoch(2), WorkerGeneration(1))).exists()
    run_gc(store, PATHS, orphans(**STOPPED))
    assert not lost.parent.parent.exists()
    assert not [path for path in tmp_path.rglob("*") if path.is_dir() and not any(path.iterdir())]
    whole(store, PATHS, 5, 6)


# The file system takes 255 bytes of a name that may become three times as long.
_SEGMENTS = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="/\\\0"), min_size=1, max_size=15),
    st.text("aB9-_.%~#<>[]{}^|*?\"` +&=:;@,$!'()", min_size=1, max_size=20),
)
_PATHS = st.lists(_SEGMENTS, min_size=1, max_size=4).map("/".join)
_NUMBERS = itertools.count()


@st.composite
def sets_of_paths(draw: st.DrawFn) -> list[StatePath]:
    found = draw(st.lists(_PATHS.filter(lambda path: not path_error(path)), min_size=1, max_size=4))
    # A disk takes no name for a file and a directory at once, and calls `name#5` its own leftover.
    return [
        StatePath(f"{number}/{path}")
        for number, path in enumerate(found)
        if not path.rpartition("#")[2].isdigit()
    ]


def test_any_name_is_written_listed_read_and_deleted(new_store: NewStore) -> None:
    store: ObjectStore = new_store()

    @given(sets_of_paths())
    @settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
    def check(found: list[StatePath]) -> None:
        run = f"run-{next(_NUMBERS)}"
        paths = [StatePath(f"{run}/{path}") for path in found]
        for path in paths:
            assert store.create(path, path.encode()) is True
            assert store.create(path, b"") is False
        listed = list(store.list(run)) if paths else []
        assert [info.path for info in listed] == sorted(paths, key=encode_path)
        for info in listed:
            assert info.addressable
            assert store.read(info.path) == info.path.encode()
            assert_same_but_for_a_second(store.head(info.path), info)
        assert store.delete_many(paths).failed == {}
        assert not paths or list(store.list(run)) == []

    store.put(StatePath("kept"), b"")
    check()
