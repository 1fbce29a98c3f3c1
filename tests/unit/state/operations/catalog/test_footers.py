"""Facts gathered for the checks, on what jobs really write."""

from __future__ import annotations

import pytest

from arroyo_dagster.errors import ConflictError, StorageError
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.tables import ExpiringTimeKeyFiles
from arroyo_dagster.state.operations.catalog.footers import (
    Footers,
    check_files_exist,
    check_newest,
    check_restorable,
    job_ages,
    read_stored_file,
)
from arroyo_dagster.state.operations.catalog.jobs import list_jobs
from arroyo_dagster.state.planning.verify.checks import Verdict, unreadable
from arroyo_dagster.state.storage import Counting, MemoryStore, WriteProtected, open_store
from arroyo_dagster.state.storage.store import ObjectStore
from tests.compat.arroyo import ARCHIVES, unpack
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


def newest(store: ObjectStore) -> Checkpoint:
    return ParquetBackend(store, list_jobs(store)[0]).load()


def codes(verdict: Verdict) -> list[str]:
    return [finding.code for finding in verdict.findings]


def test_a_job_of_ours_passes_both_checks(store: MemoryStore) -> None:
    protected, checkpoint = WriteProtected(store), newest(store)
    for check in (check_files_exist, check_restorable):
        verdict = check(protected, checkpoint)
        assert verdict.findings == ()
        assert verdict.inspected > 0


@pytest.mark.parametrize("archive", ARCHIVES)
def test_jobs_of_a_real_arroyo_pass_both_checks(archive: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    store = WriteProtected(open_store(unpack(archive, tmp_path)))
    for paths in list_jobs(store):
        for check in (check_files_exist, check_restorable):
            verdict = check_newest(store, paths, check)
            assert verdict.findings == ()
            assert verdict.inspected > 0


def test_the_bounds_in_a_footer_are_those_metadata_lists(store: MemoryStore) -> None:
    seen = 0
    for operator in newest(store).operators:
        for files in operator.tables.values():
            for file in files.files if isinstance(files, ExpiringTimeKeyFiles) else ():
                stored = read_stored_file(store, file.path)
                assert stored is not None
                assert stored.min_routing_key == file.min_routing_key
                assert stored.max_routing_key == file.max_routing_key
                assert stored.max_timestamp_micros == file.max_timestamp_micros
                seen += file.max_routing_key > 2**63
    assert seen  # unsigned numbers are taken for unsigned


def test_a_file_that_is_gone_and_one_that_is_broken_are_found(store: MemoryStore) -> None:
    checkpoint = newest(store)
    first, second = checkpoint.paths[:2]
    store.delete_many([first])
    store.put(second, b"PAR1 and nothing else")
    assert codes(check_files_exist(store, checkpoint)) == ["file-missing"]
    assert codes(check_restorable(store, checkpoint)) == ["file-missing", "file-broken"]


def test_a_file_of_another_table_is_found_by_its_columns(store: MemoryStore) -> None:
    checkpoint = newest(store)
    tables = {
        isinstance(files, ExpiringTimeKeyFiles): files.paths[0]
        for operator in checkpoint.operators
        for files in operator.tables.values()
    }
    store.put(tables[True], store.read(tables[False]))
    assert codes(check_restorable(store, checkpoint)) == ["columns-differ"]


# ---- the newest epoch ----------------------------------------------------------------------------


def test_an_unreadable_newest_epoch_is_a_finding(store: MemoryStore) -> None:
    checkpoint = newest(store)
    store.put(checkpoint.ref, b"\xff\xff")
    verdict = check_newest(store, list_jobs(store)[0], check_restorable)
    assert codes(verdict) == ["metadata-unreadable"]


def test_a_job_without_an_epoch_or_none_at_all_was_not_looked_at() -> None:
    store = MemoryStore()
    young = check_newest(store, Written(store, protocol_job("p")).paths, check_files_exist)
    assert (codes(young), young.inspected, young.passed) == (["no-epoch"], 0, True)
    for paths in (protocol_job("q"), legacy_job("r")):
        none = check_newest(store, paths, check_restorable)
        assert (codes(none), none.inspected, none.passed) == (["job-missing"], 0, False)


def test_an_epoch_without_files_was_looked_at() -> None:
    store = MemoryStore()
    job = Written(store, protocol_job("p"), keep=0)
    job.epochs(1)
    verdict = check_newest(store, job.paths, lambda *_: Verdict())
    assert (verdict.findings, verdict.inspected) == ((), 1)


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


def test_a_store_that_fails_is_no_finding_about_the_job() -> None:
    store = MemoryStore()
    job = Written(store, protocol_job("p"))
    job.epochs(1)

    def check(store: ObjectStore, checkpoint: Checkpoint) -> Verdict:
        raise StorageError("down")

    with pytest.raises(StorageError):
        check_newest(store, job.paths, check)


# ---- footers -------------------------------------------------------------------------------------


def test_no_footer_is_read_twice(store: MemoryStore) -> None:
    counting, footers, paths = Counting(store), Footers(), newest(store).paths
    first = footers.read(counting, paths)
    counting.calls.clear()
    assert footers.read(counting, [*paths, *paths]) == first
    assert not counting.calls


def test_footers_that_are_too_many_are_forgotten_and_what_is_missing_is_left_out() -> None:
    store = MemoryStore()
    job = Written(store, legacy_job("j"), keep=5)
    job.epochs(5)
    paths = ParquetBackend(store, job.paths).load().paths
    footers = Footers(remembered=2)
    assert len(footers.read(store, paths)) == 5
    store.delete_many(paths)
    assert len(footers.read(store, paths)) == 2
    assert footers.read(store, [StatePath("never/there")]) == {}


def test_nothing_is_read_after_the_deadline(store: MemoryStore) -> None:
    counting = Counting(store)
    assert Footers().read(counting, newest(store).paths, deadline=0.0, clock=lambda: 1.0) == {}
    assert not counting.calls


# ---- all jobs ------------------------------------------------------------------------------------


def test_a_survey_tells_each_job_by_its_newest_epoch(store: MemoryStore) -> None:
    broken = Written(store, protocol_job("broken"))
    broken.epochs(2)
    broken.damage(2)
    Written(store, protocol_job("empty"))
    Written(store, legacy_job("old")).epochs(4)
    ages = {age.job: age for age in job_ages(WriteProtected(store), list_jobs(store))}
    assert ages["words/main"].at_rest
    assert ages["broken/main"].problem is not None
    assert ages["empty/main"].epoch is None
    assert (ages["old"].epoch, ages["old"].epochs, ages["old"].files) == (4, 4, 3)
    assert not ages["old"].at_rest
