"""Facts gathered for the checks, on what jobs really write."""

from __future__ import annotations

import pytest

from arroyo_dagster import Checkpoint, MemoryStore, ObjectStore
from arroyo_dagster.errors import ConflictError
from arroyo_dagster.state.operations.catalog.footers import (
    check_files_exist,
    check_newest,
    check_restorable,
)
from arroyo_dagster.state.planning.verify.findings import Verdict, unreadable
from tests.fleets import Written, legacy_job, protocol_job
from tests.jobs import copied, run_word_job


@pytest.fixture(scope="module")
def written() -> MemoryStore:
    store = MemoryStore()
    run_word_job(store, sinks=0, keep_epochs=None, merge_files_after=512)
    return store


@pytest.fixture
def store(written: MemoryStore) -> MemoryStore:
    return copied(written)


def codes(verdict: Verdict) -> list[str]:
    return [finding.code for finding in verdict.findings]


# ---- the newest epoch ----------------------------------------------------------------------------


def test_a_job_without_an_epoch_or_none_at_all_was_not_looked_at() -> None:
    store = MemoryStore()
    young = check_newest(store, Written(store, protocol_job("p")).paths, check_files_exist)
    assert (codes(young), young.inspected, young.passed) == (["no-epoch"], 0, True)
    for paths in (protocol_job("q"), legacy_job("r")):
        none = check_newest(store, paths, check_restorable)
        assert (codes(none), none.inspected, none.passed) == (["job-missing"], 0, False)


def test_an_epoch_that_expires_while_it_is_looked_at_is_no_finding() -> None:
    store = MemoryStore()
    job = Written(store, protocol_job("p"))
    job.epochs(3)
    seen: list[int] = []

    def check(store: ObjectStore, checkpoint: Checkpoint) -> Verdict:
        seen.append(checkpoint.epoch)
        if len(seen) > 1:
            return Verdict(inspected=1)
        job.epochs(2)
        job.expire(range(1, 4))
        return unreadable("x", "gone")

    assert check_newest(store, job.paths, check).passed
    assert seen == [3, 5]

    def hopeless(store: ObjectStore, checkpoint: Checkpoint) -> Verdict:
        job.epochs(1)
        job.expire([checkpoint.epoch])
        return unreadable("x", "gone")

    with pytest.raises(ConflictError, match="faster than"):
        check_newest(store, job.paths, hopeless)
