"""Findings about checkpoints and jobs, from facts given as values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from arroyo_dagster.state import (
    Checkpoint,
    CheckpointState,
    Epoch,
    OperatorId,
    StatePath,
    TableConfig,
    TableName,
)
from arroyo_dagster.state.planning.verify.checks import (
    ArrowColumn,
    StoredFile,
    files_exist,
    restorable,
)
from arroyo_dagster.state.planning.verify.findings import Severity
from arroyo_dagster.state.planning.verify.fleet import JobAge, every_job_recent
from tests.formats import ExpiringTimeKeyFiles, GlobalKeyedFiles
from tests.internals import restore_plan
from tests.unit.state.planning import values

SECOND = 1_000_000
GLOBAL, TIMED = StatePath("j/global"), StatePath("j/timed")
PAIR = (ArrowColumn("key", "binary", False), ArrowColumn("value", "binary", False))
ROW = (ArrowColumn("word", "string"), ArrowColumn("_timestamp", "timestamp[ns]", False))
OPERATOR, COUNTS, ROWS = OperatorId("op"), TableName("counts"), TableName("rows")
EXPECTED = {(OPERATOR, COUNTS): (PAIR,), (OPERATOR, ROWS): (ROW,)}
LISTED = values.time_file(
    TIMED, epoch=Epoch(3), min_routing_key=10, max_routing_key=20, max_timestamp_micros=50
)


def checkpoint(state: CheckpointState = CheckpointState.READY, **changes: Any) -> Checkpoint:
    operator = values.operator(
        epoch=Epoch(3),
        parallelism=2,
        tables={
            COUNTS: GlobalKeyedFiles(files=(GLOBAL,)),
            ROWS: ExpiringTimeKeyFiles(files=(LISTED,)),
        },
        configs={
            COUNTS: values.pairs("counts"),
            ROWS: TableConfig(config=values.expiring("rows", SECOND)),
        },
    )
    return values.checkpoint(replace(operator, **changes), epoch=Epoch(3), state=state)


def stored(**changes: Any) -> dict[StatePath, StoredFile]:
    """The facts of both files, those of the expiring one changed."""
    timed = StoredFile(
        size_bytes=100,
        rows=5,
        columns=ROW,
        min_routing_key=10,
        max_routing_key=20,
        max_timestamp_micros=50,
    )
    return {
        GLOBAL: StoredFile(size_bytes=10, rows=1, columns=PAIR),
        TIMED: replace(timed, **changes),
    }


def verdict_on(
    files: dict[StatePath, StoredFile], at: Checkpoint | None = None
) -> tuple[bool, list[str]]:
    at = at or checkpoint()
    verdict = restorable(at, restore_plan(at), files, EXPECTED)
    return verdict.passed, [finding.code for finding in verdict.findings]


# ---- files_exist ---------------------------------------------------------------------------------


def test_a_missing_file_and_an_empty_one_are_errors_that_name_them() -> None:
    verdict = files_exist(checkpoint(), {TIMED: 0})
    assert not verdict.passed
    assert [(one.code, one.object) for one in verdict.findings] == [
        ("file-missing", GLOBAL),
        ("file-empty", TIMED),
    ]
    assert "operator op at epoch 3" in verdict.findings[0].evidence
    assert str(verdict.findings[0]).endswith(verdict.findings[0].next_step)


# ---- restorable ----------------------------------------------------------------------------------


def test_an_epoch_that_is_committing_is_restorable_and_an_orphaned_one_is_not() -> None:
    assert verdict_on(stored(), checkpoint(CheckpointState.COMMITTING)) == (True, [])
    for state in ("INVISIBLE", "UNCLAIMED", "ORPHANED"):
        at = checkpoint(CheckpointState[state])
        assert verdict_on(stored(), at) == (False, ["not-restorable-state"])


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"problem": "a footer that does not decode"}, "file-broken"),
        ({"columns": PAIR}, "columns-differ"),
        ({"columns": ROW[::-1]}, "columns-differ"),
        ({"columns": (replace(ROW[0], nullable=False), ROW[1])}, "columns-differ"),
        ({"min_routing_key": 9}, "routing-keys-outside"),
        ({"max_routing_key": 21}, "routing-keys-outside"),
        ({"max_timestamp_micros": 51}, "timestamps-outside"),
    ],
)
def test_what_does_not_fit_is_an_error(changes: dict[str, Any], code: str) -> None:
    assert verdict_on(stored(**changes)) == (False, [code])


def test_bounds_wider_than_the_rows_and_missing_statistics_are_fine() -> None:
    narrow = {"min_routing_key": 12, "max_routing_key": 12, "max_timestamp_micros": 1}
    assert verdict_on(stored(**narrow)) == (True, [])
    assert verdict_on(stored(**dict.fromkeys(narrow))) == (True, [])
    assert verdict_on(stored(rows=0, min_routing_key=0)) == (True, [])


def test_a_file_that_a_restore_opens_must_be_there_and_others_need_not() -> None:
    files = stored()
    del files[GLOBAL]
    assert verdict_on(files) == (False, ["file-missing"])
    # By this watermark the retention is over: no subtask opens it.
    late = checkpoint(min_watermark_micros=100 * SECOND)
    files = stored()
    del files[TIMED]
    assert verdict_on(files, late) == (True, [])


# ---- every_job_recent ----------------------------------------------------------------------------


def recent(*jobs: JobAge) -> list[tuple[str, Severity]]:
    verdict = every_job_recent(jobs, now_micros=100 * SECOND, limit_micros=10 * SECOND)
    assert verdict.inspected == len(jobs)
    return [(finding.code, finding.severity) for finding in verdict.findings]


def test_a_job_without_an_epoch_and_an_unreadable_one_are_told() -> None:
    assert recent(JobAge(job="new")) == [("no-epoch", Severity.WARNING)]
    broken = JobAge(job="broken", epoch=4, problem="does not decode")
    assert recent(broken) == [("newest-epoch-unreadable", Severity.ERROR)]
