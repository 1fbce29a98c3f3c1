"""Audits: each finding appears under its condition, and not on a whole job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from arroyo_dagster.state import (
    AuditSettings,
    Checkpoint,
    Epoch,
    JobId,
    JobPaths,
    PipelineId,
    StatePath,
    TableName,
    WorkerGeneration,
)
from arroyo_dagster.state.planning.verify.audit import (
    AuditFacts,
    KeyCounts,
    ListedObject,
    audit_findings,
    hot_key_finding,
)
from tests.formats import GlobalKeyedFiles
from tests.unit.state.planning import values

PATHS = JobPaths(JobId("main"), PipelineId("orders"))
MINUTE = 60_000_000
DAY = 24 * 60 * MINUTE
NOW = 20_000 * DAY
FILES = 12
SETTINGS = AuditSettings(orphan_bytes=1000, abandoned_attempts=2)


def data_file(epoch: int, name: str) -> StatePath:
    directory = PATHS.checkpoint(Epoch(epoch), WorkerGeneration(1))
    return StatePath(f"{directory}/operator-sum/table-t-{name}")


def manifest(epoch: int, generation: int = 1) -> StatePath:
    return PATHS.manifest(WorkerGeneration(generation), Epoch(epoch))


def checkpoint(epoch: int, paths: list[StatePath]) -> Checkpoint:
    listed = {TableName("t"): GlobalKeyedFiles(files=tuple(paths))}
    operator = values.operator("sum", job=PATHS.job, epoch=Epoch(epoch), tables=listed)
    found = values.checkpoint(operator, job=PATHS.job, epoch=Epoch(epoch))
    return replace(found, ref=manifest(epoch))


def whole() -> AuditFacts:
    """A job with two epochs, which list the same files."""
    old = ListedObject(100, NOW - 3 * DAY)
    paths = [data_file(0, f"{at:03}") for at in range(FILES)]
    listing = dict.fromkeys(paths, old)
    for epoch in (1, 2):
        listing |= {PATHS.epoch_record(Epoch(epoch)): old, manifest(epoch): old}
    listing[PATHS.current_generation] = old
    return AuditFacts(
        paths=PATHS,
        epochs=[checkpoint(epoch, paths) for epoch in (1, 2)],
        complete=True,
        listing=listing,
        now_micros=NOW,
    )


def listed(facts: AuditFacts, **changes: Any) -> AuditFacts:
    return replace(facts, listing={**facts.listing, **changes})


def found(facts: AuditFacts) -> list[tuple[str, str]]:
    return [(one.code, one.severity.value) for one in audit_findings(facts, SETTINGS)]


FIRST = data_file(0, "000")


def test_a_lost_file_is_reported_for_the_older_epoch_only() -> None:
    facts = whole()
    lost = replace(facts, listing={k: v for k, v in facts.listing.items() if k != FIRST})
    assert found(lost) == [("older-epoch-incomplete", "warning")]
    assert found(replace(lost, pinned=frozenset({Epoch(1)}))) == [
        ("older-epoch-incomplete", "error")
    ]


def test_an_epoch_that_expired_meanwhile_is_no_finding() -> None:
    facts, record = whole(), PATHS.epoch_record(Epoch(1))
    gone = {k: v for k, v in facts.listing.items() if k not in (FIRST, record)}
    assert found(replace(facts, listing=gone)) == []


def test_a_replaced_generation_that_writes_is_reported() -> None:
    late = ListedObject(10, NOW - DAY)
    facts = listed(whole(), **{manifest(3): late, manifest(3, 2): late})
    assert found(facts) == [("fenced-generation-writes", "warning")]


def test_many_attempts_of_no_epoch_are_reported() -> None:
    old = ListedObject(10, NOW - 3 * DAY)
    some = {manifest(epoch): old for epoch in (5, 6)}
    assert found(listed(whole(), **some)) == []
    assert found(listed(whole(), **some, **{manifest(7): old})) == [
        ("attempts-abandoned", "warning")
    ]


def test_old_files_of_no_epoch_are_reported() -> None:
    large = data_file(0, "999")
    facts = listed(whole(), **{large: ListedObject(1001, NOW - 2 * DAY)})
    assert found(facts) == [("orphans-large", "warning")]
    assert found(replace(facts, complete=False)) == []
    assert found(listed(whole(), **{large: ListedObject(1001, NOW - MINUTE)})) == []


def test_a_key_is_hot_by_its_share_and_beside_the_others() -> None:
    def code(rows: int, counts: list[int]) -> str | None:
        finding = hot_key_finding(
            "orders",
            "sum.t",
            KeyCounts(rows=rows, keys=len(counts), most=max(counts, default=0)),
            AuditSettings(),
        )
        return None if finding is None else finding.code

    assert code(200_000, [120_000, *[8_000] * 10]) == "hot-key"
    assert code(200_000, [50_000] * 4) is None, "each key has the same share"
    assert code(200_000, [30_000, *[1_000] * 170]) is None, "15 percent"
    assert code(50_000, [49_000, *[10] * 100]) is None, "a small table"
