"""Schedules gone through: nothing that must stay is taken away; and what is broken is found."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.explorer import ours
from tests.explorer.features import FEATURES, SURGERY, features_of
from tests.explorer.mutants import FOUND_WITH, MUTANTS
from tests.explorer.schedules import bases_of, explore, explore_many
from tests.explorer.soak import new_seed, show
from tests.explorer.world import Violation
from tests.shares import all_but

SCHEDULES = [range(300), pytest.param(range(300, 1000), marks=pytest.mark.soak)]
FEW_OR_MANY = [32, pytest.param(75, marks=pytest.mark.soak)]


@pytest.fixture(autouse=True)
def _machinery() -> Iterator[None]:
    gc.disable()  # a quarter of the time: see `soak.go_through`
    with ours.replaced_machinery():
        yield
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.mark.parametrize("seeds", SCHEDULES, ids=str)
def test_what_was_not_expired_on_purpose_stays_restorable(seeds: range) -> None:
    _has_seen(explore_many(seeds.start, len(seeds)))


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("schedules", FEW_OR_MANY)
def test_state_stays_restorable_in_deployments_with(feature: str, schedules: int) -> None:
    endings = explore_many(0, schedules, features=(feature,))
    assert endings[f"with {feature}"] > 0
    if feature == "rescales":
        assert endings["rescaling: rescaled"] > schedules // 12
    if feature == "lost metadata":
        assert endings["rebuilding: rebuilt"] > schedules // 12
    if feature == "forks":
        assert endings["forking: forked"] > schedules // 8
    if feature == "rollbacks":
        assert endings["taking: taken back"] > schedules // 8
    if feature == "edits":
        assert endings["editing: edited"] > schedules // 12
        assert endings["undoing: undone"] + endings["putting: put back"] > schedules // 40
    # Clocks that disagree, a store that ignores conditions, and a collector that meets an edit, are
    # refused more often than not.
    collected = endings["expiry: collected"] + endings["orphans: collected"]
    refused = ("no conditional create", "lost metadata", "cut metadata")
    assert feature in refused or collected > schedules // (
        40 if "clocks" in feature or feature in SURGERY else 25
    )


def test_every_feature_occurs() -> None:
    assert {name for seed in range(2000) for name in features_of(seed)} == FEATURES.keys()


def test_a_seed_decides_everything(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for _ in range(2):
        for name in FEATURES:
            show(7, (name,))
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]


def test_a_run_prints_its_seed_and_how_to_repeat_what_it_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EXPLORER_SEED", "4242")
    command = [sys.executable, "-m", "tests.explorer.soak", "--schedules", "8"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "EXPLORER_SEED=4242 make soak SCHEDULES=8" in done.stdout
    assert "8 schedules from seed 4242 on: 0 violations" in done.stdout
    monkeypatch.delenv("EXPLORER_SEED")
    assert new_seed() != new_seed()


def _has_seen(endings: Counter[str]) -> None:
    """Nothing is proven by schedules in which nothing happens."""
    schedules = endings["finished"] * 16
    for what in ("expiry: collected", "orphans: collected", "writer: done", "Arroyo: done"):
        assert endings[what] > schedules / 40, what
    for what in ("pin: pinned", "undelete: back", "expiry: crashed", "orphans: crashed"):
        assert endings[what] > schedules / 200, what
    for what in ("rewriting: rewritten", "putting: put back", "rollback: rolled back"):
        assert endings[what] > schedules / 400, what


QUICKLY = {
    "pins are ignored": 100,
    "the parent of the newest epoch is skipped": 100,
    "the parents of pinned epochs are skipped": 200,
    "there is no grace period": 200,
    "the lease is not checked again": 400,
    "the ten epochs that Arroyo's cleanup needs go": 100,
    "files shared with epochs that stay go": 100,
    "what epochs in quarantine need is ignored": 200,
    "what puts a rewrite back is ignored": 1200,
    "newer epochs go before older ones": 100,
    "metadata goes before data": 100,
    "a stored plan is carried out as it is": 200,
    "pins of a job that is gone are ignored": 200,
    "a job that is gone may have been written to just now": 600,
    "names of any spelling are parsed": 200,
    "epochs are as old as their writers say": 600,
    "a store is not asked to prove its conditional create": 100,
    "a lease runs out by its holder's clock": 200,
    "an undo releases people's pins": 3000,
    "an edit is published whatever the job does": 300,
    "merges of older epochs are applied after an edit": 400,
    "relative positions are applied twice": 600,
    "a rebuild leaves out a file of the epoch": 100,
    "a rescale loses rows": 200,
    "a fork leaves the watermarks": 100,
    "a rollback lists files of the older epoch": 1000,
}
"""Within so many schedules."""

SELDOM = (
    "what puts a rewrite back is ignored",
    "the lease is not checked again",
    "epochs are as old as their writers say",
    "an undo releases people's pins",
    "a rollback lists files of the older epoch",
    "relative positions are applied twice",
    "merges of older epochs are applied after an edit",
)
"""Of these, what takes a hundred schedules or more."""

SLOWLY = (
    "a listing that is cut short is trusted",
    "what a running job may write is not asked",
    "a rewrite goes on whatever the job does",
    "half of a rescale is taken for an edit",
)
"""What is found more seldom still has tests of its own: see `test_every_step` here, and
`test_gc_refused` and `test_rewriting` among the journeys."""


@pytest.mark.parametrize("name", all_but(QUICKLY, SELDOM))
def test_a_collector_that_is_broken_is_found_quickly(name: str) -> None:
    assert _found_at(name, QUICKLY[name]) is not None


@pytest.mark.soak
@pytest.mark.parametrize("name", SLOWLY)
def test_a_collector_that_is_broken_in_a_corner_is_found_in_the_end(name: str) -> None:
    assert _found_at(name, 20_000) is not None


def _found_at(name: str, schedules: int) -> int | None:
    features = FOUND_WITH.get(name, ())
    for seed in range(schedules):
        # The past is that of a collector which is not broken.
        bases_of(random.Random(seed), 0, features)
        try:
            with MUTANTS[name]():
                explore(seed, features=features)
        except Violation:
            return seed
    return None
