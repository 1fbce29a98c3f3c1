"""Findings of `verify` that no real checkpoint shows, from facts given as values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from arroyo_dagster.state import (
    Checkpoint,
    Epoch,
    JobId,
    JobPaths,
    OperatorId,
    PipelineId,
    StatePath,
    TableConfig,
    TableName,
    WorkerGeneration,
)
from arroyo_dagster.state.model.tables import StoredSchema
from arroyo_dagster.state.planning.restore.recovery import CannotStart
from arroyo_dagster.state.planning.verify.checks import ArrowColumn
from arroyo_dagster.state.planning.verify.epochs import across_findings
from arroyo_dagster.state.planning.verify.files import (
    FileFacts,
    Footer,
    ListedFile,
    RowScan,
    file_findings,
)
from arroyo_dagster.state.planning.verify.findings import Finding
from arroyo_dagster.state.planning.verify.protocol import ProtocolFacts, protocol_findings
from arroyo_dagster.state.planning.verify.restore import owner_findings
from tests.formats import (
    CurrentGeneration,
    EpochRecord,
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    GlobalKeyedConfig,
    GlobalKeyedFiles,
    Manifest,
    RunProgress,
    TimeFile,
)
from tests.internals import Restore, StartEmpty, restore_plan
from tests.unit.state.planning import values

HALF = 2**63
ROW = (ArrowColumn("word", "string"), ArrowColumn("_timestamp", "timestamp[ns]", False))
PATH = StatePath("j/t")
OPERATOR, TABLE = OperatorId("op"), TableName("rows")
TIMED = TableConfig(
    config=ExpiringTimeKeyConfig(
        table=TABLE,
        retention_micros=100,
        schema=StoredSchema(arrow_schema="{}", timestamp_index=1, key_indices=(0,)),
    )
)
PAIRS = TableConfig(config=GlobalKeyedConfig(table=TABLE), state_version=3)


def entry(path: str = PATH, **changes: Any) -> TimeFile:
    file = TimeFile(
        epoch=Epoch(3),
        path=StatePath(path),
        min_routing_key=0,
        max_routing_key=9,
        max_timestamp_micros=50,
    )
    return replace(file, **changes)


def listed(config: TableConfig = TIMED, **changes: Any) -> ListedFile:
    file = ListedFile(
        path=PATH,
        operator=OPERATOR,
        config=config,
        forms=(ROW,),
        bounds=entry() if config is TIMED else None,
        opened=True,
        managed=False,
    )
    return replace(file, **changes)


def facts(footer: dict[str, Any] | None = None, **rows: Any) -> FileFacts:
    said: dict[str, Any] = {"rows": 5, "row_groups": (5,), "columns": ROW, **(footer or {})}
    scan = RowScan(
        **{
            "rows": 5,
            "min_routing_key": 0,
            "max_routing_key": 9,
            "min_timestamp_micros": 1,
            "max_timestamp_micros": 50,
            **rows,
        }
    )
    return FileFacts(size_bytes=100, footer=Footer(**said), rows=scan)


def codes(found: Iterable[Finding]) -> list[str]:
    return [f"{one.severity.value} {one.code}" for one in found]


# ---- files ---------------------------------------------------------------------------------------


def test_row_counts_that_contradict_each_other_are_one_error() -> None:
    for found in (facts({"rows": 6}), facts({"row_groups": (2, 2)}), facts(rows=4)):
        assert codes(file_findings(listed(), found)) == ["error rows-differ"]


def test_statistics_in_the_footer_may_be_wide_but_not_narrow() -> None:
    exact = {"min_routing_key": 0, "max_routing_key": 9, "max_timestamp_micros": 50}
    wide = {"min_routing_key": 0, "max_routing_key": 10, "max_timestamp_micros": 51}
    for said in (exact, wide):
        assert codes(file_findings(listed(), facts(said))) == []
    for said in ({"min_routing_key": 1}, {"max_routing_key": 8}, {"max_timestamp_micros": 49}):
        found = list(file_findings(listed(), facts({**exact, **said})))
        assert codes(found) == ["error footer-statistics"]


def test_one_cause_is_told_once() -> None:
    changed = {"max_routing_key": 20, "max_timestamp_micros": 70}
    footer = {"max_routing_key": 9, "max_timestamp_micros": 50}
    assert codes(file_findings(listed(), facts(footer, **changed))) == [
        "error routing-keys-outside",
        "error timestamps-outside",
    ]
    assert codes(file_findings(listed(), facts(footer, **changed, strange_hashes=1))) == [
        "error routing-key-wrong"
    ]
    undecodable = facts(footer, **changed, strange_hashes=1, undecodable="no UTF-8")
    assert codes(file_findings(listed(), undecodable)) == ["error value-undecodable"]


def test_rows_from_before_1970_are_a_warning() -> None:
    found = facts(min_timestamp_micros=-5)
    assert codes(file_findings(listed(), found)) == ["warning time-before-1970"]


def test_a_file_that_no_restore_opens_may_be_gone() -> None:
    assert codes(file_findings(listed(), None)) == ["error file-missing"]
    assert codes(file_findings(listed(opened=False), None)) == ["warning file-missing"]


def test_arroyo_migrates_one_step_and_we_any_number() -> None:
    def of(version: int, *, managed: bool) -> list[str]:
        found = facts({"state_version": version})
        return codes(file_findings(listed(PAIRS, managed=managed), found))

    assert [of(version, managed=False) for version in (1, 2, 3, 4)] == [
        ["error state-version"],
        [],
        [],
        ["error state-version"],
    ]
    assert [of(version, managed=True) for version in (0, 3, 4)] == [[], [], ["error state-version"]]


# ---- a restore -----------------------------------------------------------------------------------


def checkpoint(epoch: int = 3, managed: bool = False, **files: Any) -> Checkpoint:
    """An epoch with one operator and the tables given, by name."""
    tables = {TableName(name): value for name, value in files.items()}
    configs = {
        name: TIMED
        if isinstance(value, ExpiringTimeKeyFiles)
        else TableConfig(config=GlobalKeyedConfig(table=name))
        for name, value in tables.items()
    }
    operator = values.operator(
        OPERATOR,
        epoch=Epoch(epoch),
        parallelism=2,
        min_watermark_micros=epoch * 100,
        max_watermark_micros=epoch * 100,
        tables=tables,
        configs=configs,
    )
    return values.checkpoint(
        operator,
        epoch=Epoch(epoch),
        start_time_micros=epoch * 10,
        finish_time_micros=epoch * 10 + 1,
        ref=StatePath(f"j/checkpoints/checkpoint-{epoch:07}/metadata"),
        progress=RunProgress(offsets="{}") if managed else None,
    )


def expiring(*files: TimeFile) -> ExpiringTimeKeyFiles:
    return ExpiringTimeKeyFiles(files=files)


def test_a_subtask_that_would_not_open_the_file_of_its_rows_is_found() -> None:
    file = entry(max_timestamp_micros=900, max_routing_key=HALF - 1)
    at = checkpoint(rows=expiring(file))
    plan = restore_plan(at, 2)
    found = {PATH: facts(live=(5, 0))}
    assert codes(owner_findings(plan, found, ())) == []
    found = {PATH: facts(live=(3, 2))}
    (finding,) = owner_findings(plan, found, ())
    assert (finding.code, finding.object) == ("rows-not-opened", PATH)
    assert "2 rows belong to subtask 1" in finding.evidence
    assert codes(owner_findings(plan, found, {PATH})) == []


# ---- epoch after epoch ---------------------------------------------------------------------------


def lost(before: Checkpoint, now: Checkpoint) -> list[tuple[str, str]]:
    return [(one.code, one.object) for one in across_findings([before, now])]


def test_a_file_may_leave_the_list_when_it_expired_or_was_merged() -> None:
    old, new = entry("j/old", max_timestamp_micros=199), entry("j/new", max_timestamp_micros=900)
    before = checkpoint(2, rows=expiring(old, new))
    assert lost(before, checkpoint(3, rows=expiring(new))) == []
    kept = replace(old, max_timestamp_micros=200)
    before = checkpoint(2, rows=expiring(kept, new))
    assert lost(before, checkpoint(3, rows=expiring(new))) == [("file-lost", "j/old")]
    merged = replace(kept, path=StatePath("j/merged"), compaction_generation=1)
    assert lost(before, checkpoint(3, rows=expiring(new, merged))) == [("file-doubled", "j/new")]
    assert lost(before, checkpoint(3, rows=expiring(merged))) == []


def test_the_same_entry_under_another_name_is_not_lost() -> None:
    file = entry("j/a", max_timestamp_micros=900)
    again = replace(file, path=StatePath("j/b"))
    assert lost(checkpoint(2, rows=expiring(file)), checkpoint(3, rows=expiring(again))) == []


def test_a_file_that_the_retention_of_the_running_program_drops_is_not_lost() -> None:
    """A fork has carried it with the longer retention of its source."""
    file, new = entry("j/a", max_timestamp_micros=199), entry("j/new", max_timestamp_micros=900)
    config = replace(TIMED, config=replace(TIMED.config, retention_micros=1000))
    before = checkpoint(2, rows=expiring(file))
    operator = replace(before.operators[0], configs={TableName("rows"): config})
    forked = replace(before, operators=(operator,))
    assert lost(forked, checkpoint(3, rows=expiring(new))) == []
    nothing = checkpoint(3, pairs=GlobalKeyedFiles(files=(StatePath("j/p"),)))
    assert lost(forked, nothing) == [("file-lost", "j/a")]


def test_what_was_lost_long_ago_and_has_expired_since_is_not_told() -> None:
    file = entry("j/a", max_timestamp_micros=250)
    later = [checkpoint(at, pairs=GlobalKeyedFiles(files=(StatePath("j/p"),))) for at in (3, 4)]
    history = [checkpoint(2, rows=expiring(file)), *later]
    assert codes(across_findings(history[:2])) == ["error file-lost"]
    assert codes(across_findings(history)) == []


def test_a_job_of_ours_carries_files_on_and_arroyo_writes_them_anew() -> None:
    pairs = GlobalKeyedFiles(files=(StatePath("j/p1"), StatePath("j/p2")))
    fewer = GlobalKeyedFiles(files=(StatePath("j/p2"),))
    merged = GlobalKeyedFiles(files=(StatePath("j/p-compacted"),))
    for now, expected in ((fewer, [("file-lost", "j/p1")]), (merged, []), (pairs, [])):
        before = checkpoint(2, managed=True, pairs=pairs)
        assert lost(before, checkpoint(3, managed=True, pairs=now)) == expected
        assert lost(checkpoint(2, pairs=pairs), checkpoint(3, pairs=now)) == []
    gone = across_findings([checkpoint(2, pairs=pairs), checkpoint(3)])
    assert {one.object for one in gone} == {checkpoint(3).ref}


def test_names_that_a_run_uses_again_are_told_before_a_cleanup_deletes_them() -> None:
    """After a restart that ignored the state (arroyo-state.md 9.6)."""
    a, b = entry("j/a", max_timestamp_micros=9_000), entry("j/b", max_timestamp_micros=9_000)
    history = [
        checkpoint(8, rows=expiring(a, b)),
        checkpoint(9, rows=expiring(a)),
        checkpoint(10, rows=expiring(a, b)),
    ]
    reused = [one for one in across_findings(history) if one.code == "name-reused"]
    assert [(one.severity.value, one.object) for one in reused] == [("warning", "j/b")]
    assert "epoch 8" in reused[0].next_step


# ---- the next start ------------------------------------------------------------------------------

PATHS = JobPaths(JobId("j"), PipelineId("p"))
ONE = WorkerGeneration(1)


def protocol(**changes: Any) -> ProtocolFacts:
    """Two epochs of one generation, all as it should be but for the generation manifest."""
    objects: dict[StatePath, Any] = {}
    parent = None
    for number in (1, 2):
        epoch, ref = Epoch(number), PATHS.manifest(ONE, Epoch(number))
        whose: dict[str, Any] = {
            "pipeline": PipelineId("p"),
            "job": JobId("j"),
            "worker_generation": ONE,
            "epoch": epoch,
            "parent_ref": parent,
        }
        objects[PATHS.epoch_record(epoch)] = EpochRecord(
            checkpoint_ref=ref, created_at_micros=0, **whose
        )
        objects[ref] = Manifest(
            min_epoch=Epoch(1),
            start_time_micros=0,
            finish_time_micros=0,
            needs_commit=False,
            operators=(),
            **whose,
        )
        parent = ref
    objects[PATHS.current_generation] = CurrentGeneration(
        pipeline=PipelineId("p"),
        job=JobId("j"),
        worker_generation=ONE,
        generation_manifest_ref=PATHS.generation_manifest(ONE),
        updated_at_micros=0,
    )
    found = ProtocolFacts(
        paths=PATHS,
        epoch=Epoch(2),
        newest=True,
        epochs=(Epoch(1), Epoch(2)),
        objects=objects,
        managed=False,
        generations=(),
    )
    return replace(found, **changes)


def edited(path: StatePath, **changes: Any) -> ProtocolFacts:
    found = protocol()
    objects = {**found.objects, path: replace(found.objects[path], **changes)}  # type: ignore[type-var]
    return replace(found, objects=objects)


def test_an_orphaned_parent_is_an_error() -> None:
    other = PATHS.manifest(WorkerGeneration(9), Epoch(1))
    found = edited(PATHS.epoch_record(Epoch(1)), checkpoint_ref=other)
    assert "error parent-orphaned" in codes(protocol_findings(found))


def test_a_chain_that_ends_too_early_is_a_warning() -> None:
    found = edited(PATHS.manifest(ONE, Epoch(2)), parent_ref=None)
    path = PATHS.epoch_record(Epoch(2))
    record = replace(found.objects[path], parent_ref=None)  # type: ignore[type-var]
    found = replace(found, objects={**found.objects, path: record})
    assert codes(protocol_findings(found)) == ["warning chain-broken"]


def test_a_record_of_another_version_is_a_warning() -> None:
    found = edited(PATHS.epoch_record(Epoch(2)), version=7)
    assert codes(protocol_findings(found)) == ["warning record-version"]


def test_a_start_that_would_fail_or_lose_all_is_an_error() -> None:
    manifest = PATHS.generation_manifest(ONE)
    for start in (StartEmpty(), CannotStart("it is so", PATHS.manifest(ONE, Epoch(1)))):
        (finding,) = protocol_findings(protocol(next_start=start))
        assert (finding.code, finding.object) == ("generation-manifest-missing", manifest)
    (finding,) = protocol_findings(protocol(next_start="record and manifest disagree"))
    assert finding.code == "start-contradicted"


def test_an_epoch_published_during_verification_is_no_error() -> None:
    newest = PATHS.manifest(ONE, Epoch(2))
    known = protocol().objects[newest]
    assert isinstance(known, Manifest)
    ref = PATHS.manifest(ONE, Epoch(3))
    newer = replace(known, epoch=Epoch(3), parent_ref=newest)
    (finding,) = protocol_findings(protocol(next_start=Restore(ref, newer, replay_commit=False)))
    assert (finding.code, finding.severity.value) == ("epoch-published", "note")
    older = replace(known, epoch=Epoch(1), parent_ref=None)
    older_ref = PATHS.manifest(ONE, Epoch(1))
    start = Restore(older_ref, older, replay_commit=False)
    (finding,) = protocol_findings(protocol(next_start=start))
    assert finding.severity.value == "error"


def test_an_error_told_hides_what_follows_from_it() -> None:
    found = edited(PATHS.epoch_record(Epoch(2)), job=JobId("other"))
    found = replace(found, next_start=StartEmpty())
    assert codes(protocol_findings(found)) == ["error metadata-of-another"]
