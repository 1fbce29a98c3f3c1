"""An expiry at a tenth of the size it was made for, or less: what it reads is counted."""

from __future__ import annotations

from typing import Any

import pytest

from arroyo_dagster import GcRequest, PlanKind, Retention, plan_gc
from tests.epochs import PATHS, MadeUpJob

EPOCHS = pytest.mark.parametrize("epochs", [250, pytest.param(1000, marks=pytest.mark.soak)])


@EPOCHS
def test_an_expiry_of_many_epochs_lists_nothing_and_reads_every_object_once(epochs: int) -> None:
    store: Any = MadeUpJob(epochs)
    asked = GcRequest(kind=PlanKind.EXPIRE, retention=Retention(keep_epochs=10))
    plan = plan_gc(store, PATHS, asked, now_micros=10**14, with_sizes=False)
    assert plan.epochs == tuple(range(1, epochs - 9))
    assert (
        len(plan.data) == (epochs - 11) * 200
    )  # an expiring table lists files of two epochs before
    assert set(store.calls) == {"read"}
    assert {path for path, count in store.reads.items() if count > 1} <= {PATHS.current_generation}
    assert store.calls["read"] == 2 * epochs + 6


@EPOCHS
def test_an_expiry_by_age_of_many_epochs_costs_one_listing_more(epochs: int) -> None:
    store: Any = MadeUpJob(epochs)
    asked = GcRequest(kind=PlanKind.EXPIRE, retention=Retention(keep_micros=9_500_000))
    plan = plan_gc(store, PATHS, asked, now_micros=epochs * 1_000_000, with_sizes=False)
    assert plan.epochs == tuple(range(1, epochs - 9))
    assert store.calls["read"] == 2 * epochs + 6
    assert store.calls["list_dir"] == 1
    assert store.calls["list"] == 0
    assert store.calls["head"] == 1  # the manifest of the newest epoch
