"""Which edits explain lists of files, and which are reported as unfinished."""

from __future__ import annotations

from dataclasses import replace

import pytest

from arroyo_dagster.state import Checkpoint, Epoch, JobId, StatePath, TableName
from arroyo_dagster.state.model.changes import ChangeKind, ChangeRecord, JobHead
from arroyo_dagster.state.planning.verify.edits import (
    concerns,
    edit_findings,
    explained_files,
    is_unfinished,
)
from tests.formats import GlobalKeyedFiles
from tests.unit.state.planning import values

ONE, TWO, LOST = StatePath("job/one"), StatePath("job/two"), StatePath("job/lost")
RECORD = ChangeRecord(
    kind=ChangeKind.EDIT,
    head=JobHead(epoch=Epoch(7)),
    operation="delete-key",
    digest="d",
    pipeline=None,
    job=JobId("job"),
    epoch=Epoch(7),
    worker_generation=None,
    finish_time_micros=99,
    token=1,
    created_at_micros=100,
    objects={ONE: ("a", "b"), TWO: ("c", "d")},
    unlisted=(LOST,),
)
EPOCH = values.checkpoint(
    job=JobId("job"), epoch=Epoch(7), start_time_micros=90, finish_time_micros=99
)
FIRST, SECOND = StatePath("changes/0000007-01.json"), StatePath("changes/0000007-02.json")


@pytest.mark.parametrize(
    ("one", "two", "unfinished", "explained"),
    [
        ("a", "c", False, False),
        ("b", "d", False, True),
        ("b", "c", True, True),
        ("a", "d", True, True),
        ("compacted", "d", False, True),
        ("compacted", "c", True, True),
    ],
)
def test_digests_show_applied_edits(one: str, two: str, unfinished: bool, explained: bool) -> None:
    digests = {ONE: one, TWO: two}
    assert is_unfinished(RECORD, digests) == unfinished
    found = list(edit_findings([EPOCH], {FIRST: RECORD}, digests))
    assert [one.code for one in found] == ["edit-unfinished"] * unfinished
    files = explained_files([EPOCH], [RECORD], digests)
    assert files == ({Epoch(7): frozenset({LOST})} if explained else {})


@pytest.mark.parametrize(
    "other",
    [{"finish_time_micros": 98}, {"epoch": Epoch(8)}, {"job": JobId("copy")}],
    ids=["another attempt", "another epoch", "another job"],
)
def test_a_record_of_another_epoch_explains_nothing(other: dict[str, object]) -> None:
    record = replace(RECORD, **other)  # type: ignore[arg-type]
    assert not concerns(record, EPOCH)
    assert explained_files([EPOCH], [record], {ONE: "b", TWO: "d"}) == {}
    assert not list(edit_findings([EPOCH], {FIRST: record}, {ONE: "b", TWO: "c"}))


def listing(epoch: int, *names: str) -> Checkpoint:
    """An epoch with an operator that lists these files."""
    paths = tuple(StatePath(f"job/operator-op/{name}") for name in names)
    operator = values.operator(
        job=JobId("job"), epoch=Epoch(epoch), tables={TableName("t"): GlobalKeyedFiles(files=paths)}
    )
    return replace(EPOCH, epoch=Epoch(epoch), operators=(operator,))


OLD, NEW, OWN = "table-t-000", f"table-t-000-ext-{'0' * 16}", "table-t-001"


@pytest.mark.parametrize(
    ("after", "explained"),
    [((OLD, OWN), False), ((OWN,), False), ((NEW, OWN), True)],
    ids=["goes on from the undone epoch", "has lost a file", "goes on from the edited epoch"],
)
def test_undo_after_a_start_explains_lost_files(after: tuple[str, ...], explained: bool) -> None:
    undone = {ONE: "a", TWO: "c"}
    files = explained_files([listing(7, OLD), listing(8, *after)], [RECORD], undone)
    assert files == ({Epoch(8): frozenset({LOST})} if explained else {})
    assert explained_files([listing(7, OLD), listing(9, NEW)], [RECORD], undone) == {}


def test_only_the_newest_edit_of_an_epoch_can_be_unfinished() -> None:
    newer = replace(RECORD, objects={ONE: ("b", "a")})
    digests = {ONE: "a", TWO: "d"}  # the newer edit restored what the older one had changed
    assert not list(edit_findings([EPOCH], {FIRST: RECORD, SECOND: newer}, digests))
    assert [one.code for one in edit_findings([EPOCH], {FIRST: RECORD}, digests)]


def test_an_older_epoch_that_is_a_mixture_is_a_warning() -> None:
    later = replace(EPOCH, epoch=Epoch(8))
    (found,) = edit_findings([EPOCH, later], {FIRST: RECORD}, {ONE: "b", TWO: "c"})
    assert found.severity.value == "warning"
    assert "arroyo-state undo job --yes" in found.next_step
