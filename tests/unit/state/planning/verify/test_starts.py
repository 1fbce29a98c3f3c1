"""From which epoch an epoch goes on: what its metadata proves, and where it does not tell."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from arroyo_dagster.state import Checkpoint, JobPaths, PipelineId, StatePath, WorkerGeneration
from arroyo_dagster.state.model.changes import ChangeKind, ChangeRecord, JobHead
from arroyo_dagster.state.model.layout import rewritten_attempt
from arroyo_dagster.state.planning.verify.edits import undone_files
from arroyo_dagster.state.planning.verify.epochs import across_findings
from arroyo_dagster.state.planning.verify.starts import Origin, origin_of
from tests.formats import GlobalKeyedFiles, RunProgress, TimeFile
from tests.unit.state.planning.verify.test_verify import OPERATOR, checkpoint, entry, expiring

REWRITTEN = rewritten_attempt("0" * 16)


def path(directory: int, name: str = "table-rows-000") -> StatePath:
    return JobPaths(checkpoint().job).operator(OPERATOR, directory) / name  # type: ignore[arg-type]


def file(directory: int, **changes: Any) -> TimeFile:
    found = {"epoch": directory, "max_timestamp_micros": 9_000, **changes}
    return entry(found.pop("path", path(directory)), **found)


def pairs(*directories: int) -> GlobalKeyedFiles:
    return GlobalKeyedFiles(files=tuple(path(at, "table-pairs-000") for at in directories))


OF_AN_EPOCH = ("pipeline", "job", "epoch", "worker_generation", "finish_time_micros")
BEFORE = checkpoint(4, rows=expiring(file(2), file(4)), pairs=pairs(4))


def test_a_worker_without_state_counts_its_directories_from_one() -> None:
    assert origin_of(BEFORE, checkpoint(5, rows=expiring(file(1)), pairs=pairs(1))) is Origin.EMPTY
    assert origin_of(BEFORE, checkpoint(5, pairs=pairs(1))) is Origin.EMPTY
    assert origin_of(BEFORE, checkpoint(5, pairs=pairs(5))) is Origin.BEFORE
    assert origin_of(checkpoint(4), checkpoint(5, pairs=pairs(5))) is Origin.BEFORE
    other = file(4, path=path(4, "table-rows-001"))
    assert origin_of(BEFORE, checkpoint(5, rows=expiring(other))) is Origin.BEFORE
    # The second epoch of a run without state goes on from its first one.
    second = checkpoint(5, rows=expiring(file(1)), pairs=pairs(2))
    first = checkpoint(4, rows=expiring(file(1)), pairs=pairs(1))
    assert origin_of(first, second) is Origin.BEFORE
    # An older run that still wrote has put its own lists into the place of the first one.
    assert origin_of(BEFORE, second) is Origin.UNKNOWN
    assert origin_of(BEFORE, checkpoint(5, rows=expiring(file(2)), pairs=pairs(1))) is Origin.BEFORE


def test_a_name_that_is_used_again_has_other_bounds() -> None:
    """Without a global keyed table no epoch has to have a file of its own."""
    first = checkpoint(4, rows=expiring(file(1), file(2)))
    again = file(1, max_routing_key=8)
    assert origin_of(first, checkpoint(5, rows=expiring(again))) is Origin.EMPTY
    assert origin_of(first, checkpoint(5, rows=expiring(file(1)))) is Origin.UNKNOWN
    assert origin_of(first, checkpoint(5, rows=expiring(file(2)))) is Origin.BEFORE
    assert origin_of(first, checkpoint(5)) is Origin.UNKNOWN
    assert origin_of(first, checkpoint(5, pairs=GlobalKeyedFiles())) is Origin.UNKNOWN


def test_files_of_an_edit_prove_nothing_and_those_that_it_took_do() -> None:
    edited = file(5, path=path(5, f"table-rows-000-{REWRITTEN}"))
    now = checkpoint(5, rows=expiring(edited), pairs=pairs(1))
    assert origin_of(BEFORE, now) is Origin.EMPTY
    assert origin_of(BEFORE, now, [path(1)]) is Origin.EMPTY
    assert origin_of(BEFORE, now, [path(2)]) is Origin.BEFORE
    carried = checkpoint(4, rows=expiring(edited), pairs=pairs(4))
    assert origin_of(carried, now) is Origin.BEFORE


def test_the_protocol_layout_names_the_epoch() -> None:
    def of(parent: StatePath | None) -> Origin:
        shared: dict[str, Any] = {
            "pipeline": PipelineId("p"),
            "worker_generation": WorkerGeneration(1),
        }
        now = checkpoint(5, pairs=pairs(1))
        return origin_of(replace(BEFORE, **shared), replace(now, parent_ref=parent, **shared))

    assert of(BEFORE.ref) is Origin.BEFORE
    # What is wrong with the parent is reported as a finding of its own.
    assert of(StatePath("p/j/another")) is Origin.UNKNOWN
    assert of(None) is Origin.UNKNOWN


def test_an_epoch_that_was_written_earlier_may_go_on_from_another_attempt() -> None:
    now = checkpoint(5, pairs=pairs(5))
    began = now.start_time_micros
    assert origin_of(replace(BEFORE, finish_time_micros=began), now) is Origin.BEFORE
    assert origin_of(replace(BEFORE, finish_time_micros=began + 1), now) is Origin.UNKNOWN


def test_a_managed_job_always_goes_on() -> None:
    progress = RunProgress(offsets="{}")
    now = replace(checkpoint(5, pairs=pairs(1)), progress=progress)
    assert origin_of(replace(BEFORE, progress=progress), now) is Origin.BEFORE


def found(now: Checkpoint) -> list[tuple[str, str]]:
    return [(one.severity.value, one.code) for one in across_findings([BEFORE, now])]


def test_only_where_it_is_known_is_a_loss_an_error_with_the_advice_to_list_files_again() -> None:
    lost, doubtful = checkpoint(5, pairs=pairs(5)), checkpoint(5)
    assert found(lost) == [("error", "file-lost")] * 2
    assert {"list a copy" in one.next_step for one in across_findings([BEFORE, lost])} == {True}
    assert found(doubtful) == [("warning", "file-lost")] * 3
    for one in across_findings([BEFORE, doubtful]):
        assert "list a copy" not in one.next_step
        assert "does not tell" in one.evidence
    assert found(checkpoint(5, pairs=pairs(1))) == [("note", "not-compared")]


@pytest.mark.parametrize(
    ("after", "severities"), [((5,), ["warning", "warning"]), ((2, 5), ["error"])], ids=str
)
def test_files_that_an_undone_edit_took_are_doubtful_if_none_of_them_is_left(
    after: tuple[int, ...], severities: list[str]
) -> None:
    """The undo of an edit that only took files away met a start from the edited lists."""
    now = checkpoint(5, rows=expiring(*map(file, after)), pairs=pairs(5))
    record = ChangeRecord(
        kind=ChangeKind.EDIT,
        head=JobHead(epoch=BEFORE.epoch),
        operation="delete-key",
        digest="d",
        token=1,
        created_at_micros=1,
        objects={},
        unlisted=(path(2), path(4)),
        **{name: getattr(BEFORE, name) for name in OF_AN_EPOCH},
    )
    lost = across_findings([BEFORE, now], {}, undone_files([BEFORE, now], [record]))
    assert [(one.code, one.severity.value) for one in lost] == [
        ("file-lost", severity) for severity in severities
    ]


def test_an_operator_of_the_state_that_was_ignored_has_not_vanished() -> None:
    other = replace(BEFORE.operators[0], operator=OPERATOR + "_2")
    before = replace(BEFORE, operators=(*BEFORE.operators, other))
    codes = [one.code for one in across_findings([before, checkpoint(5, pairs=pairs(1))])]
    assert codes == ["not-compared"]
