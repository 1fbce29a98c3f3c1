"""Legacy jobs started with `ignore_state`: the state that was given up is not reported as lost, and
no advice brings it back; what a run really loses is reported as before.
Positions are compared from epoch to epoch, and `verify` says what it cannot see."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import cli
from arroyo_dagster.errors import ProtocolError
from arroyo_dagster.state import (
    Epoch,
    Layout,
    OperatorId,
    ParquetBackend,
    StatePath,
    TableName,
    WriteProtected,
    verify_job,
)
from arroyo_dagster.state.model.verify import MAX_LEVEL
from arroyo_dagster.state.planning.verify.findings import Verdict
from tests.arroyo_jobs import EVENTS, SECOND, WINDOW, ArroyoJob, stopped, table_rows
from tests.compat.arroyo import unpack
from tests.formats import ExpiringTimeKeyFiles, KeyDeletion, metadata
from tests.internals import EditOptions, plan_rebuild, run_edit

JOIN = ("window_3", WINDOW)


def written(job: ArroyoJob, epochs: int) -> None:
    """Epochs with rows that are not expired yet when the last one is written."""
    for _ in range(epochs):
        times = [(30 + n) * SECOND * 1000 for n in range(4)]
        job.write({JOIN: table_rows(EVENTS, [[f"k{n}" for n in range(4)], [1] * 4, times])})


def ignoring(epochs: int = 1, *, before: int = 3) -> ArroyoJob:
    job = ArroyoJob(Layout.LEGACY, watermark_micros=40 * SECOND)
    written(job, before)
    job.start_empty()
    written(job, epochs)
    return job


def verified(job: ArroyoJob) -> Verdict:
    return verify_job(WriteProtected(job.store), job.paths, level=MAX_LEVEL).verdict


def lose_one(job: ArroyoJob) -> StatePath:
    """Take a file of the epoch before the newest from the newest one's list."""
    operator = ParquetBackend(job.store, job.paths).load().operator(JOIN[0])
    assert operator is not None
    table = TableName("t")
    listed = operator.tables[table]
    assert isinstance(listed, ExpiringTimeKeyFiles)
    gone = listed.files[0]
    left = replace(listed, files=listed.files[1:])
    path = job.paths.operator_metadata(operator.operator, operator.epoch)
    changed = replace(operator, tables={**operator.tables, table: left})
    job.store.put(path, metadata.encode_operator(changed))
    return gone.path


def lost(verdict: Verdict) -> list[tuple[str, str]]:
    return [(one.severity.value, one.object) for one in verdict.findings if one.code == "file-lost"]


def test_state_that_a_start_ignored_is_not_reported_as_lost() -> None:
    for epochs in (1, 2, 3):
        verdict = verified(ignoring(epochs))
        assert verdict.errors == ()
        assert lost(verdict) == []
        (told,) = (one for one in verdict.findings if one.code == "not-compared")
        assert told.severity.value == "note"
        assert "epoch 4" in told.evidence
        assert not any("list a copy" in one.next_step for one in verdict.findings)


def test_a_start_that_ignored_the_only_epoch_is_known_by_the_files_that_it_wrote_again() -> None:
    verdict = verified(ignoring(before=1))
    assert (verdict.errors, lost(verdict)) == ((), [])
    assert any(one.code == "not-compared" for one in verdict.findings)


def test_a_second_start_that_ignores_the_state_is_known_too() -> None:
    job = ignoring(3)
    job.start_empty()
    written(job, 1)
    verdict = verified(job)
    assert (verdict.errors, lost(verdict)) == ((), [])
    assert [one.code for one in verdict.findings].count("not-compared") == 2


def test_a_file_that_the_new_run_loses_is_an_error() -> None:
    for epochs in (2, 3):
        job = ignoring(epochs)
        assert verified(job).errors == ()
        gone = lose_one(job)
        assert lost(verified(job)) == [("error", gone)]


def test_a_file_that_a_start_from_the_epoch_before_loses_is_an_error() -> None:
    """The workers of such a start give their files the number of the epoch."""
    job = ignoring(2)
    job.start()
    written(job, 1)
    assert verified(job).errors == ()
    gone = lose_one(job)
    assert lost(verified(job)) == [("error", gone)]


def test_an_edit_of_the_first_epoch_after_it_leaves_it_known() -> None:
    job = ignoring(1)
    edit = KeyDeletion(values=("k1",))
    options = EditOptions(quiet_seconds=0.0)
    assert run_edit(job.store, job.paths, stopped(job.paths), edit, options).published
    verdict = verified(job)
    assert (verdict.errors, lost(verdict)) == ((), [])


@pytest.mark.parametrize("epochs", [1, 3])
def test_an_epoch_whose_files_such_a_run_may_have_written_again_is_not_rebuilt(epochs: int) -> None:
    job = ignoring(epochs)
    path = job.paths.operator_metadata(OperatorId(JOIN[0]), Epoch(3))
    job.store.delete_many([path])
    with pytest.raises(ProtocolError, match="epoch 4 is of a run that was started without state"):
        plan_rebuild(WriteProtected(job.store), job.paths, stopped(job.paths), 3)


JOBS = {
    "leader": ("pl_4BjSq2rVmU/job_U5O5jKZxJg", "generations/2/checkpoints/checkpoint-{:07}", 20),
    "legacy": ("job_mSLGII6lDN", "checkpoints/checkpoint-{:07}", 13),
}
FILE = "operator-source_impulse_0/table-i-001"


def verify(root: Path, archive: str, *more: str) -> Result:
    job, _, _ = JOBS[archive]
    words = ["verify", job, "--url", f"file://{root}", *more]
    return CliRunner().invoke(cli.main, words, catch_exceptions=False)


def findings(root: Path, archive: str, *more: str) -> dict[str, str]:
    found = json.loads(verify(root, archive, "--json", *more).stdout)["findings"]
    return {one["code"]: one["severity"] for one in found}


def change_counter(
    root: Path, archive: str, change: Callable[[int], int], earlier: int = 0
) -> None:
    """Change the number of records that one subtask of the impulse source counts."""
    job, directory, newest = JOBS[archive]
    path = root / job / directory.format(newest) / FILE
    table = pq.read_table(path)
    (value,) = table.column("value").to_pylist()
    # The state is (counter, start time): a varint of two bytes, 0xfb first.
    assert value[0] == 0xFB
    counter = change(int.from_bytes(value[1:3], "little"))
    state = b"\xfd" + counter.to_bytes(8, "little") + value[3:]
    column = pa.array([state], table.schema.field("value").type)
    at = table.schema.get_field_index("value")
    pq.write_table(table.set_column(at, table.schema.field(at), column), path)


@pytest.fixture(params=JOBS)
def job(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    unpack(request.param, tmp_path)
    return tmp_path, request.param


def test_positions_that_advance_are_no_finding(job: tuple[Path, str]) -> None:
    root, archive = job
    assert not [code for code in findings(root, archive) if code.startswith("position")]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda counter: counter // 2, ("position-backwards", "warning")),
        (lambda counter: counter + 2**50, ("position-absurd", "warning")),
        (lambda counter: counter + 2**63, ("position-absurd", "error")),
    ],
    ids=["backwards", "far-ahead", "out-of-range"],
)
def test_a_changed_position_is_a_finding(
    job: tuple[Path, str], change: Callable[[int], int], expected: tuple[str, str]
) -> None:
    root, archive = job
    before = findings(root, archive)
    change_counter(root, archive, change)
    assert dict([expected]).items() <= findings(root, archive).items()
    assert expected[0] not in findings(root, archive, "--level", "2")
    assert findings(root, archive).keys() - before.keys() == {expected[0]}


def test_an_edit_explains_a_position_that_goes_backwards(tmp_path: Path) -> None:
    unpack("legacy", tmp_path)
    job = JOBS["legacy"][0]
    stopped = ("--assume", f"{job}=stopped", "--quiet", "0", "--yes")
    words = ["edit", "offsets", job, "all=-100", *stopped]
    result = CliRunner().invoke(cli.main, [*words, "--url", f"file://{tmp_path}"])
    assert result.exit_code == 0, result.output
    assert not [code for code in findings(tmp_path, "legacy") if code.startswith("position")]


def test_verify_says_what_it_does_not_see(job: tuple[Path, str]) -> None:
    root, archive = job
    said = verify(root, archive, "--level", "1").stdout.splitlines()[-1]
    assert "not checked: statistics match the rows, every value decodes, simulated restore" in said
    assert "not checked" not in verify(root, archive).stdout
    text = " ".join(CliRunner().invoke(cli.main, ["verify", "--help"]).output.split())
    assert "cannot see" in text
