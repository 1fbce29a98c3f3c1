"""Verdicts and known jobs in the catalogue: nobody's is lost, none of them is invented."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster import Epoch, JobPaths, MemoryStore
from arroyo_dagster.state.codec.journal import RunHeader
from arroyo_dagster.state.operations.catalog import known_jobs
from arroyo_dagster.state.operations.catalog.verdicts import (
    read_verdicts,
    verdict_path,
    write_verdict,
)
from arroyo_dagster.state.operations.gc.journal import Journal
from arroyo_dagster.state.planning.verify.findings import Verdict, error
from arroyo_dagster.state.planning.verify.fleet import CheckedJob, every_job_checked
from tests.fleets import legacy_job, protocol_job

JOBS = [*(protocol_job(f"p{at}") for at in range(48)), legacy_job("broken"), legacy_job("old")]
BROKEN = JOBS[48]
NONE = Verdict(inspected=1)
RED = Verdict(findings=(error("file-missing", "broken/x", "not there", "bring it back"),))


def write(catalogue: MemoryStore, paths: JobPaths, verdict: Verdict = NONE) -> None:
    checked = CheckedJob(
        job=paths.root, at_micros=1_700_000_000_000_000, epoch=Epoch(3), verdict=verdict
    )
    write_verdict(catalogue, "restorable", paths, checked)


# ---- verdicts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b'{"version":2}', b'{"version":1,"epoch":"x"}']
)
def test_a_verdict_that_cannot_be_read_counts_as_none(data: bytes) -> None:
    catalogue = MemoryStore()
    catalogue.put(verdict_path("restorable", BROKEN), data)
    assert read_verdicts(catalogue, "restorable", [BROKEN]) == {}


@given(order=st.permutations(JOBS), again=st.lists(st.sampled_from(JOBS[:48]), max_size=30))
def test_a_broken_job_stays_red_however_healthy_ones_are_refreshed(
    order: Sequence[JobPaths], again: list[JobPaths]
) -> None:
    catalogue = MemoryStore()
    for paths in order:
        write(catalogue, paths, RED if paths == BROKEN else NONE)
    with ThreadPoolExecutor(4) as pool:  # several runs at once
        list(pool.map(lambda paths: write(catalogue, paths), again))
    checked = {one.job: one for one in read_verdicts(catalogue, "restorable", JOBS).values()}
    fleet = every_job_checked([str(paths.root) for paths in JOBS], checked, (), root=None)
    assert [line.job for line in fleet.offenders] == ["broken"]
    assert fleet.lines[0].job == "broken"
    assert len(fleet.lines) == 50


# ---- known jobs ----------------------------------------------------------------------------------


def test_a_removal_on_purpose_is_known_by_its_journal() -> None:
    store = MemoryStore()

    def journal(paths: JobPaths, kind: str) -> Journal:
        return Journal.begin(
            *(store, paths),
            RunHeader(
                kind=kind, plan="0" * 64, owner="test", begun_at_micros=7, objects=1, size_bytes=1
            ),
        )

    removed, begun, expired = protocol_job("removed"), protocol_job("begun"), protocol_job("expire")
    for paths in (removed, expired):
        journal(paths, "expire").end({})
    journal(removed, "dead-job").end({})
    journal(begun, "dead-job")
    gone = {removed, begun, expired, BROKEN}
    assert known_jobs.removed_on_purpose(store, gone) == {removed}
