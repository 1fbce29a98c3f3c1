"""A writer's own cleaning up where a listing is cut short: it does what it would have done."""

from __future__ import annotations

import functools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from arroyo_dagster.errors import NotFoundError
from arroyo_dagster.state import Epoch, JobPaths, Layout, MemoryStore, ParquetBackend, StatePath
from arroyo_dagster.state.codec.derived import encode
from arroyo_dagster.state.storage.wrappers import Counting
from tests.fleets import Written, legacy_job, protocol_job
from tests.formats import JobPins, Pin
from tests.gc_jobs import hiding, whole, without_ours
from tests.jobs import copied
from tests.stores import Wrapper

NEWEST = 15
EPOCHS = range(1, NEWEST + 1)
KEPT = 12
JOBS = {Layout.PROTOCOL: protocol_job("p"), Layout.LEGACY: legacy_job("j")}
OLDEST = {Layout.PROTOCOL: KEPT, Layout.LEGACY: NEWEST - 10}
LAYOUTS = pytest.mark.parametrize("layout", Layout)


@functools.cache
def _written(layout: Layout) -> MemoryStore:
    store = MemoryStore()
    Written(store, JOBS[layout], keep=3).epochs(NEWEST)
    return store


def _pinned(store: MemoryStore, paths: JobPaths, pins: frozenset[int]) -> None:
    kept = tuple(Pin(epoch=Epoch(n), owner="me", pinned_at_micros=1) for n in sorted(pins))
    store.put(paths.job_pins, encode(JobPins(pins=kept)))


@LAYOUTS
@given(
    hidden=st.frozensets(st.sampled_from(EPOCHS)),
    pins=st.frozensets(st.sampled_from(EPOCHS), max_size=2),
)
@example(hidden=frozenset({13, 14}), pins=frozenset())
@example(hidden=frozenset({3}), pins=frozenset({3}))
@example(hidden=frozenset(range(2, 10)), pins=frozenset())
@example(hidden=frozenset(EPOCHS), pins=frozenset())
def test_what_a_listing_hides_neither_goes_too_early_nor_stays_behind(
    layout: Layout, hidden: frozenset[int], pins: frozenset[int]
) -> None:
    paths = JOBS[layout]
    store, other = copied(_written(layout)), copied(_written(layout))
    for one in (store, other):
        _pinned(one, paths, pins)
    ParquetBackend(hiding(store, paths, hidden), paths).cleanup_checkpoint(Epoch(KEPT))
    ParquetBackend(other, paths).cleanup_checkpoint(Epoch(KEPT))
    whole(store, paths, *range(OLDEST[layout], NEWEST + 1), *pins)
    assert without_ours(store) == without_ours(other)


@LAYOUTS
def test_a_healthy_job_s_cleaning_up_looks_for_nothing_but_what_may_come(layout: Layout) -> None:
    paths, counted = JOBS[layout], Counting(copied(_written(layout)))
    assert ParquetBackend(counted, paths).every_epoch() == list(EPOCHS)
    listed = NEWEST if layout is Layout.LEGACY else 0
    assert counted.calls == {"list_dir": 1, "head": listed + 8 + 1}


class _Purged(Wrapper):
    """A store in which a quarantine is purged just before its index is read."""

    def __init__(self, store: MemoryStore, paths: JobPaths) -> None:
        super().__init__(store)
        self._paths = paths

    def read(self, path: StatePath) -> bytes:
        if path.name == "index.json":
            self.inner.put(self._paths.job_pins, encode(JobPins()))
        return self.inner.read(path)


def test_a_quarantine_that_is_purged_meanwhile_stops_no_cleaning_up() -> None:
    paths, store = JOBS[Layout.PROTOCOL], copied(_written(Layout.PROTOCOL))
    store.put(paths.job_pins, encode(JobPins(quarantines=("01-a",))))
    with pytest.raises(NotFoundError, match="refers to is missing"):
        ParquetBackend(store, paths).cleanup_checkpoint(Epoch(KEPT))
    assert ParquetBackend(store, paths).epochs() == list(EPOCHS)
    ParquetBackend(_Purged(store, paths), paths).cleanup_checkpoint(Epoch(KEPT))
    assert ParquetBackend(store, paths).epochs() == list(range(KEPT, NEWEST + 1))
