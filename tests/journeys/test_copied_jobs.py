"""A job copied under another name: what is done with the copy changes nothing in the original."""

from __future__ import annotations

import time

import pytest

from arroyo_dagster.engine import Pipeline, run_pipeline
from arroyo_dagster.errors import InputError, ProtocolError
from arroyo_dagster.state import (
    Epoch,
    GcOptions,
    JobId,
    JobPaths,
    Layout,
    MemoryStore,
    PipelineId,
    StatePath,
    pin_epoch,
    run_gc,
)
from tests.gc_jobs import expiry
from tests.internals import purge, read_pins, run_undelete
from tests.jobs import word_job

DAY = 24 * 3_600_000_000


def copied_under(store: MemoryStore, old: JobPaths, new: JobPaths) -> None:
    for info in list(store.list(old.root)):
        path = StatePath(f"{new.root}{info.path.removeprefix(old.root)}")
        store.put(path, store.read(info.path))


def objects_below(store: MemoryStore, paths: JobPaths) -> dict[str, bytes]:
    return {info.path: store.read(info.path) for info in store.list(paths.root)}


def pipeline_of(store: MemoryStore, name: str, layout: Layout, rows: int) -> Pipeline:
    made = word_job(store, rows=rows, rows_per_epoch=2, parallelism=1, keep_epochs=2)
    made.layout, made.name = layout, name
    return made


@pytest.mark.parametrize("layout", Layout)
def test_a_run_on_a_copy_under_another_name_is_refused(layout: Layout) -> None:
    store = MemoryStore()
    original = pipeline_of(store, "words", layout, 24)
    run_pipeline(original, store)
    copy = pipeline_of(store, "words2", layout, 48)
    copied_under(store, original.paths, copy.paths)
    before = objects_below(store, original.paths)
    with pytest.raises((InputError, ProtocolError)):
        run_pipeline(copy, store)
    assert objects_below(store, original.paths) == before


def test_a_run_on_a_copy_claims_no_epoch_of_the_original() -> None:
    store = MemoryStore()
    original = pipeline_of(store, "words", Layout.PROTOCOL, 2)
    run_pipeline(original, store)
    copy = pipeline_of(store, "words", Layout.PROTOCOL, 48)
    copy.job = "main2"
    copied_under(store, original.paths, copy.paths)
    (record,) = [info.path for info in store.list(copy.paths.epochs)]
    store.delete_many([record])  # published, not yet visible: the next start claims it
    with pytest.raises((InputError, ProtocolError)):
        run_pipeline(copy, store)
    assert list(store.list(copy.paths.epochs)) == []


@pytest.mark.parametrize("verb", ["undelete", "purge"])
def test_the_quarantine_of_a_copy_under_another_name_is_refused(verb: str) -> None:
    now = time.time_ns() // 1000
    store = MemoryStore(clock=lambda: now)
    original = pipeline_of(store, "words", Layout.PROTOCOL, 24)
    original.keep_epochs = None
    run_pipeline(original, store)
    run_gc(store, original.paths, expiry(2), GcOptions(quarantine=True))
    copy = JobPaths(JobId(original.paths.job), PipelineId("words2"))
    copied_under(store, original.paths, copy)
    before = objects_below(store, original.paths)
    (name,) = read_pins(store, copy).quarantines
    now += 2 * DAY
    verbs = {
        "undelete": lambda: run_undelete(store, copy, name),
        "purge": lambda: purge(store, copy, older_than_micros=DAY, yes=True, clock=lambda: now),
    }
    with pytest.raises(ProtocolError, match="another job"):
        verbs[verb]()
    assert objects_below(store, original.paths) == before


@pytest.mark.parametrize("layout", Layout)
def test_a_pin_in_a_copy_that_would_hold_nothing_is_refused(layout: Layout) -> None:
    store = MemoryStore()
    original = pipeline_of(store, "words", layout, 24)
    run_pipeline(original, store)
    copy = pipeline_of(store, "words2", layout, 24).paths
    copied_under(store, original.paths, copy)
    before = objects_below(store, copy)
    newest = Epoch(12)
    with pytest.raises(ProtocolError, match=r"another job|out of its job"):
        pin_epoch(store, copy, newest)
    assert objects_below(store, copy) == before
    pin_epoch(store, original.paths, newest)
    assert read_pins(store, original.paths).pinned == {newest}
