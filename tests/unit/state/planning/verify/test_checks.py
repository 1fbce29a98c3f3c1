"""Findings about checkpoints and jobs, from facts given as values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from arroyo_dagster.state.model.checkpoints import Checkpoint, CheckpointState, OperatorCheckpoint
from arroyo_dagster.state.model.ids import Epoch, JobId, OperatorId, StatePath, TableName
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    GlobalKeyedConfig,
    GlobalKeyedFiles,
    StoredSchema,
    TableConfig,
    TimeFile,
)
from arroyo_dagster.state.planning.restore.reads import restore_plan
from arroyo_dagster.state.planning.verify.checks import (
    ArrowColumn,
    JobAge,
    Severity,
    StoredFile,
    Verdict,
    every_job_recent,
    figures,
    files_exist,
    merged,
    restorable,
    unreadable,
)

SECOND = 1_000_000
GLOBAL, TIMED = StatePath("j/global"), StatePath("j/timed")
PAIR = (ArrowColumn("key", "binary", False), ArrowColumn("value", "binary", False))
ROW = (ArrowColumn("word", "string"), ArrowColumn("_timestamp", "timestamp[ns]", False))
OPERATOR, COUNTS, ROWS = OperatorId("op"), TableName("counts"), TableName("rows")
EXPECTED = {(OPERATOR, COUNTS): (PAIR,), (OPERATOR, ROWS): (ROW,)}
LISTED = TimeFile(
    epoch=Epoch(3), path=TIMED, min_routing_key=10, max_routing_key=20, max_timestamp_micros=50
)


def checkpoint(state: CheckpointState = CheckpointState.READY, **changes: Any) -> Checkpoint:
    configs = {
        COUNTS: TableConfig(config=GlobalKeyedConfig(table=COUNTS)),
        ROWS: TableConfig(
            config=ExpiringTimeKeyConfig(
                table=ROWS,
                retention_micros=SECOND,
                schema=StoredSchema(arrow_schema="{}", timestamp_index=0),
            )
        ),
    }
    operator = OperatorCheckpoint(
        job=JobId("j"),
        operator=OPERATOR,
        epoch=Epoch(3),
        parallelism=2,
        tables={
            COUNTS: GlobalKeyedFiles(files=(GLOBAL,)),
            ROWS: ExpiringTimeKeyFiles(files=(LISTED,)),
        },
        configs=configs,
    )
    return Checkpoint(
        pipeline=None,
        job=JobId("j"),
        worker_generation=None,
        epoch=Epoch(3),
        min_epoch=Epoch(1),
        start_time_micros=0,
        finish_time_micros=1,
        state=state,
        operators=(replace(operator, **changes),),
        ref=StatePath("j/checkpoints/checkpoint-0000003/metadata"),
    )


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


def test_all_files_there_is_a_pass_that_says_how_many() -> None:
    assert files_exist(checkpoint(), {GLOBAL: 1, TIMED: 1}) == Verdict(inspected=2)


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


def test_what_fits_is_restorable() -> None:
    assert verdict_on(stored()) == (True, [])


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


def test_a_table_without_its_configuration_is_an_error() -> None:
    configs = {COUNTS: TableConfig(config=GlobalKeyedConfig(table=COUNTS))}
    at = checkpoint(configs=configs)
    assert verdict_on(stored(), at) == (False, ["table-configuration"])
    wrong = {**configs, ROWS: TableConfig(config=GlobalKeyedConfig(table=ROWS))}
    at = checkpoint(configs=wrong)
    assert verdict_on(stored(), at) == (False, ["table-configuration"])


# ---- verdicts ------------------------------------------------------------------------------------


def test_verdicts_add_up_and_one_error_fails_them_all() -> None:
    good = files_exist(checkpoint(), {GLOBAL: 1, TIMED: 1})
    bad = unreadable("j", "broken")
    assert merged([good, good]).passed
    assert merged([good, bad, good]).inspected == 5
    assert not merged([good, bad]).passed
    assert merged([]) == Verdict()


# ---- figures -------------------------------------------------------------------------------------


def test_figures_count_what_is_listed_and_what_is_new() -> None:
    found = figures(checkpoint(), {GLOBAL}, stored())
    assert (found.files, found.size_bytes, found.rows) == (2, 110, 6)
    assert (found.new_files, found.new_size_bytes) == (1, 100)


def test_what_is_not_known_is_not_a_number() -> None:
    found = figures(checkpoint(), None, {GLOBAL: StoredFile(size_bytes=10, rows=1)})
    assert (found.files, found.new_files, found.size_bytes, found.rows) == (2, None, None, None)
    broken = figures(checkpoint(), None, stored(problem="broken"))
    assert (broken.size_bytes, broken.rows) == (110, None)


def test_everything_in_the_first_epoch_is_new() -> None:
    first = replace(checkpoint(), epoch=Epoch(1))
    assert figures(first, None, stored()).new_files == 2


# ---- every_job_recent ----------------------------------------------------------------------------


def recent(*jobs: JobAge) -> list[tuple[str, Severity]]:
    verdict = every_job_recent(jobs, now_micros=100 * SECOND, limit_micros=10 * SECOND)
    assert verdict.inspected == len(jobs)
    return [(finding.code, finding.severity) for finding in verdict.findings]


def test_a_job_that_stands_still_is_told_unless_it_is_at_rest() -> None:
    old = JobAge(job="old", epoch=4, finished_micros=89 * SECOND)
    assert recent(old) == [("job-stands-still", Severity.WARNING)]
    assert recent(replace(old, at_rest=True)) == []
    assert recent(replace(old, finished_micros=90 * SECOND)) == []
    assert recent(replace(old, finished_micros=1000 * SECOND)) == []  # clocks differ


def test_a_job_without_an_epoch_and_an_unreadable_one_are_told() -> None:
    assert recent(JobAge(job="new")) == [("no-epoch", Severity.WARNING)]
    broken = JobAge(job="broken", epoch=4, problem="does not decode")
    assert recent(broken) == [("newest-epoch-unreadable", Severity.ERROR)]
