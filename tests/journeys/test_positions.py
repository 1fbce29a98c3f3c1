"""Positions of sources are compared from epoch to epoch, and `verify` says what it cannot see."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import cli
from tests.compat.arroyo import unpack

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
