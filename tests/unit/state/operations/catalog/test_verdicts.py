"""Verdicts and known jobs in the catalogue: nobody's is lost, none of them is invented."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.journal import RunHeader
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.operations.catalog import known_jobs
from arroyo_dagster.state.operations.catalog.verdicts import (
    FINDINGS_KEPT,
    read_verdicts,
    verdict_path,
    write_verdict,
)
from arroyo_dagster.state.operations.gc.journal import Journal
from arroyo_dagster.state.planning.verify.findings import Severity, Verdict, error, warning
from arroyo_dagster.state.planning.verify.fleet import CheckedJob, every_job_checked
from arroyo_dagster.state.storage.memory import MemoryStore
from tests.fleets import Written, legacy_job, protocol_job

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


def test_a_verdict_is_read_as_it_was_written() -> None:
    catalogue = MemoryStore()
    verdict = Verdict(
        findings=(warning("w", "a", "b", "c"), error("e", "ü/x", "d", "e")), inspected=7
    )
    write(catalogue, BROKEN, verdict)
    (read,) = read_verdicts(catalogue, "restorable", JOBS).values()
    assert (read.epoch, read.at_micros, read.verdict.inspected) == (3, 1_700_000_000_000_000, 7)
    assert set(read.verdict.findings) == set(verdict.findings)
    assert read_verdicts(catalogue, "files_exist", JOBS) == {}


def test_of_many_findings_errors_are_kept_first() -> None:
    catalogue = MemoryStore()
    many = [warning("w", f"{at}", "", "") for at in range(100)] + [error("e", "x", "", "")]
    write(catalogue, BROKEN, Verdict(findings=tuple(many)))
    (read,) = read_verdicts(catalogue, "restorable", [BROKEN]).values()
    assert len(read.verdict.findings) == FINDINGS_KEPT
    assert read.verdict.findings[0].severity is Severity.ERROR


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


def test_jobs_of_both_layouts_are_known_by_name_and_only_those() -> None:
    catalogue = MemoryStore()
    assert known_jobs.known_jobs(catalogue) == set()
    jobs = {protocol_job("a.b", "c.d"), legacy_job("a.b"), legacy_job("ü x")}
    known_jobs.remember(catalogue, [(paths, 4) for paths in jobs], 7)
    catalogue.put(verdict_path("restorable", BROKEN), b"{}")
    assert known_jobs.known_jobs(catalogue) == jobs
    assert known_jobs.last_epoch(catalogue, legacy_job("a.b")) == 4
    assert known_jobs.last_epoch(catalogue, BROKEN) is None


def test_an_acknowledgement_is_dropped_when_the_job_is_back() -> None:
    catalogue = MemoryStore()
    known_jobs.remember(catalogue, [(BROKEN, 4)], 7)
    assert known_jobs.forget(catalogue, BROKEN, owner="me", now_micros=8) == 4
    assert known_jobs.forgotten(catalogue) == {BROKEN}
    known_jobs.take_back(catalogue, {BROKEN})
    assert known_jobs.forgotten(catalogue) == set()


def test_a_job_that_is_there_is_not_gone() -> None:
    store = MemoryStore()
    job = Written(store, BROKEN)
    job.epochs(1)
    with pytest.raises(InputError, match="the job exists"):
        known_jobs.check_gone(store, BROKEN)
    job.vanish()
    known_jobs.check_gone(store, BROKEN)  # so is the root


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
