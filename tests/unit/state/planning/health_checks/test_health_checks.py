"""Health checks: each finds its own condition, is silent below its threshold, and does not judge
without enough facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from arroyo_dagster.state import (
    Checkpoint,
    CheckpointState,
    Epoch,
    HealthLimits,
    JobId,
    StatePath,
    TableConfig,
    TableName,
)
from arroyo_dagster.state.model.health import EpochFigures, TableFigures
from arroyo_dagster.state.planning.health_checks.facts import (
    FileAtEpoch,
    Found,
    HealthFacts,
    epoch_figures,
    epochs_to_read,
    missing_evidence,
)
from arroyo_dagster.state.planning.rules import HEALTH_RULES, RULE_OF, job_lines, judge_job
from arroyo_dagster.state.planning.verify.checks import StoredFile
from arroyo_dagster.state.planning.verify.findings import warning
from arroyo_dagster.state.planning.verify.fleet import JobAge
from tests.formats import MAX_ROUTING_KEY, ExpiringTimeKeyFiles, JobCondition, JobPins, Pin
from tests.unit.state.planning import values

SECOND = 1_000_000
MINUTE = 60 * SECOND
DAY = 24 * 60 * MINUTE
MIB = 1 << 20
START = 20_000 * DAY
EPOCHS = 30
INTERVAL = 4 * MINUTE
LIMITS = HealthLimits()
RULES = {rule.name: rule for rule in HEALTH_RULES}


def row(epoch: int, **changes: Any) -> EpochFigures:
    finished = START + epoch * INTERVAL
    given: dict[str, Any] = {
        "epoch": epoch,
        "started_micros": finished - SECOND,
        "finished_micros": finished,
        "watermark_micros": finished - MINUTE,
        "size_bytes": 100 * MIB,
        "new_size_bytes": MIB,
        "tables": (table(),),
    }
    return EpochFigures(**given | changes)


def table(**changes: Any) -> TableFigures:
    given: dict[str, Any] = {
        "operator": "sum",
        "table": "t",
        "files": 4,
        "size_bytes": 100 * MIB,
        "rows": 80_000,
    }
    return TableFigures(**given | changes)


def file(at: int, **changes: Any) -> FileAtEpoch:
    """A file of subtask `at` of four, which holds a quarter of the keys."""
    width = (MAX_ROUTING_KEY + 1) // 4
    given: dict[str, Any] = {
        "operator": "sum",
        "parallelism": 4,
        "table": "t",
        "expiring": True,
        "path": StatePath(f"orders/{at}"),
        "rows": 20_000,
        "size_bytes": 25 * MIB,
        "min_routing_key": at * width,
        "max_routing_key": (at + 1) * width - 1,
        "max_timestamp_micros": START + (EPOCHS - 1) * INTERVAL,
        "columns": "k: int64",
    }
    return FileAtEpoch(**given | changes)


def checkpoint(
    files: list[FileAtEpoch], state: CheckpointState = CheckpointState.READY
) -> Checkpoint:
    name = TableName("t")
    listed = ExpiringTimeKeyFiles(
        files=tuple(
            values.time_file(
                one.path,
                epoch=Epoch(EPOCHS),
                min_routing_key=one.min_routing_key or 0,
                max_routing_key=one.max_routing_key or 0,
                max_timestamp_micros=one.max_timestamp_micros or 0,
            )
            for one in files
        )
    )
    operator = values.operator(
        "sum",
        job=JobId("orders"),
        epoch=Epoch(EPOCHS),
        parallelism=4,
        min_watermark_micros=START + (EPOCHS - 1) * INTERVAL,
        tables={name: listed},
        configs={name: TableConfig(config=values.expiring("t", DAY))},
    )
    return values.checkpoint(
        operator,
        job=JobId("orders"),
        epoch=Epoch(EPOCHS),
        state=state,
        finish_time_micros=START + EPOCHS * INTERVAL,
    )


def healthy(**changes: Any) -> HealthFacts:
    files = changes.get("files") or [file(at) for at in range(4)]
    given: dict[str, Any] = {
        "age": JobAge(
            job="orders", epoch=EPOCHS, epochs=EPOCHS, finished_micros=START + EPOCHS * INTERVAL
        ),
        "now_micros": START + EPOCHS * INTERVAL + 30 * SECOND,
        "epochs": [row(epoch) for epoch in range(1, EPOCHS + 1)],
        "present": range(1, EPOCHS + 1),
        "files": files,
        "checkpoint": checkpoint(files),
        "stored_bytes": 200 * MIB,
    }
    return HealthFacts(**given | changes)


def with_last(count: int, **changes: Any) -> list[EpochFigures]:
    rows = [row(epoch) for epoch in range(1, EPOCHS + 1)]
    return rows[:-count] + [replace(one, **changes) for one in rows[-count:]]


LATE = START + (EPOCHS + 6) * INTERVAL
WIDE = [replace(file(at), min_routing_key=0, max_routing_key=MAX_ROUTING_KEY) for at in range(4)]
EXPIRED = [file(at, max_timestamp_micros=START - 2 * DAY) for at in range(3)] + [file(3)]
OLD_PIN = Pin(epoch=Epoch(3), owner="ann", pinned_at_micros=START - 31 * DAY, reason="audit")
STALLED = [row(epoch, watermark_micros=START) for epoch in range(1, EPOCHS + 1)]
BEHIND = with_last(1, watermark_micros=START - 3 * 60 * MINUTE)
GAP = [one for one in range(1, EPOCHS + 1) if one not in (7, 8)]
MANY = [file(at % 4, path=StatePath(f"orders/{at}")) for at in range(501)]
SMALL = [file(at % 4, path=StatePath(f"orders/{at}"), size_bytes=1000) for at in range(60)]


def slow(epoch: int) -> EpochFigures:
    return row(epoch, started_micros=START + epoch * INTERVAL - 20 * SECOND)


SICK = {
    "newest-epoch-unreadable": (
        "newest_epoch_readable",
        healthy(age=replace(healthy().age, problem="it does not decode")),
    ),
    "epoch-overdue": ("epochs_on_time", healthy(now_micros=LATE)),
    "job-failed": (
        "epochs_on_time",
        healthy(age=replace(healthy().age, condition=JobCondition.FAILED, source="api")),
    ),
    "job-stands-still": (
        "epochs_on_time",
        healthy(
            age=replace(healthy().age, condition=JobCondition.RUNNING, source="api"),
            epochs=[row(EPOCHS)],
            now_micros=LATE + DAY,
        ),
    ),
    "watermark-stalled": ("watermark_advances", healthy(epochs=STALLED)),
    "watermark-behind": ("watermark_advances", healthy(epochs=BEHIND)),
    "epoch-gap": ("no_epoch_missing", healthy(present=GAP)),
    "checkpoint-slow": (
        "durations_usual",
        healthy(epochs=[*healthy().epochs[:-3], *(slow(epoch) for epoch in (28, 29, 30))]),
    ),
    "commit-overdue": (
        "commits_finish",
        healthy(
            checkpoint=checkpoint([file(0)], CheckpointState.COMMITTING),
            now_micros=START + EPOCHS * INTERVAL + 11 * MINUTE,
        ),
    ),
    "table-grows": (
        "sizes_usual",
        healthy(epochs=with_last(1, tables=(table(size_bytes=400 * MIB),))),
    ),
    "rows-dropped": (
        "row_counts_usual",
        healthy(epochs=with_last(1, tables=(table(rows=20_000),))),
    ),
    "too-many-files": ("file_counts_low", healthy(files=MANY)),
    "small-files": ("file_sizes_useful", healthy(files=SMALL)),
    "routing-keys-skewed": (
        "routing_keys_balanced",
        healthy(files=[file(0, rows=200_000), file(1), file(2), file(3)]),
    ),
    "columns-changed": ("columns_unchanged", healthy(files=[file(0, columns="k: int32"), file(1)])),
    "rows-past-retention": ("retention_kept", healthy(files=EXPIRED)),
    "timestamps-in-future": (
        "timestamps_plausible",
        healthy(files=[file(0, max_timestamp_micros=START + EPOCHS * INTERVAL + 3 * DAY), file(1)]),
    ),
    "read-amplification": ("read_amplification_low", healthy(files=WIDE)),
    "write-amplification": (
        "write_amplification_low",
        healthy(epochs=[row(one, new_size_bytes=90 * MIB) for one in range(1, EPOCHS + 1)]),
    ),
    "space-amplification": ("space_amplification_low", healthy(stored_bytes=2000 * MIB)),
    "gc-behind": ("epochs_expire", healthy(age=replace(healthy().age, epochs=1001))),
    "pins-large": ("pins_small", healthy(pinned_bytes=11 * 1024 * MIB)),
    "pin-old": ("pins_small", healthy(pins=JobPins(pins=(OLD_PIN,)))),
    "journal-changed": (
        "journal_complete",
        healthy(
            journal=[
                warning(
                    "journal-changed",
                    "orders",
                    "this run is missing: 01764328872000000-5d41402abc4b follows it",
                    "restore it",
                )
            ]
        ),
    ),
}


def judge(name: str, facts: HealthFacts, limits: Any = LIMITS) -> Found:
    found = RULES[name].judge
    assert found is not None
    return found(facts, limits)


READ_BY_ALL = replace(LIMITS, read_amplification=3)


@pytest.mark.parametrize("code", SICK)
def test_a_check_finds_its_condition_and_nothing_else_on_a_healthy_job(code: str) -> None:
    name, facts = SICK[code]
    limits = READ_BY_ALL if code == "read-amplification" else LIMITS
    found = judge(name, facts, limits)
    assert not isinstance(found, str)
    assert [one.code for one in found] == [code]
    assert found[0].object == "orders"
    assert RULE_OF[code] is RULES[name]
    assert judge(name, healthy(), limits) == []


def test_every_check_is_tried() -> None:
    assert {name for name, _ in SICK.values()} == set(RULES)


def test_checks_do_not_judge_a_job_without_an_epoch() -> None:
    facts = HealthFacts(age=JobAge(job="new"), now_micros=START)
    unsure = {name for name in RULES if isinstance(judge(name, facts), str)}
    assert unsure == set(RULES) - {"pins_small", "journal_complete"}
    health = judge_job(facts, LIMITS)
    assert unsure <= health.not_judged.keys()
    assert not [line for line in job_lines(HEALTH_RULES, [health]) if line.findings]


@pytest.mark.parametrize("condition", [JobCondition.STOPPED, JobCondition.FINISHED])
def test_a_job_that_rests_is_neither_late_nor_stalled(condition: JobCondition) -> None:
    age = replace(healthy().age, condition=condition)
    facts = healthy(age=age, now_micros=LATE + DAY, epochs=STALLED)
    said = f"the job is {condition.value}"
    assert judge("epochs_on_time", facts) == judge("watermark_advances", facts) == said


def test_a_gap_behind_a_pinned_epoch_is_explained() -> None:
    pin = replace(OLD_PIN, epoch=Epoch(6))
    facts = healthy(present=GAP, pins=JobPins(pins=(pin,)))
    assert judge("no_epoch_missing", facts) == []


class Recording:
    """Limits that remember which of them were read."""

    def __init__(self) -> None:
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(READ_BY_ALL, name)


@pytest.mark.parametrize("name", RULES)
def test_a_check_shows_what_it_reports_and_the_limits_that_it_obeys(name: str) -> None:
    limits: Any = Recording()
    found = []
    for facts in [healthy(), *(facts for check, facts in SICK.values() if check == name)]:
        judged = judge(name, facts, limits)
        assert not isinstance(judged, str)
        found += judged
    assert limits.read == set(RULES[name].limits)
    assert RULES[name].example in [one.evidence for one in found]


@pytest.mark.parametrize(
    ("epochs", "minutes", "enough"), [(20, 60, True), (19, 600, False), (200, 59, False)]
)
def test_what_is_usual_needs_an_hour_and_20_epochs(epochs: int, minutes: int, enough: bool) -> None:
    step = minutes * MINUTE // (epochs - 1) + 1
    finished = [row(at, finished_micros=START + at * step) for at in range(epochs)]
    assert (missing_evidence(finished) is None) is enough


def test_a_rest_of_a_day_is_no_evidence() -> None:
    days = [START + at // 5 * DAY + at % 5 * 10 * SECOND for at in range(40)]
    finished = [row(at, finished_micros=micros) for at, micros in enumerate(days)]
    assert missing_evidence(finished) is not None


@pytest.mark.parametrize("count", [1, 199, 200, 201, 250, 1000, 12_345])
def test_the_epochs_that_are_read_are_few_and_spread_over_all(count: int) -> None:
    present = [Epoch(at) for at in range(1, count + 1)]
    chosen = epochs_to_read(present)
    assert len(chosen) <= 200
    assert chosen == sorted(set(chosen))
    assert chosen[-100:] == present[-100:]
    assert (chosen[0], chosen[-1]) == (present[0], present[-1])


NEED_EVIDENCE = {
    *("epochs_on_time", "watermark_advances", "durations_usual", "sizes_usual"),
    *("row_counts_usual", "write_amplification_low"),
}


def test_rules_of_what_is_usual_do_not_judge_a_few_epochs() -> None:
    facts = healthy(epochs=healthy().epochs[-15:])
    assert {name for name in RULES if "an hour" in str(judge(name, facts))} == NEED_EVIDENCE


def test_what_is_not_known_is_not_a_number() -> None:
    newest = checkpoint([file(0), file(1)])
    one = StoredFile(size_bytes=10, rows=1)
    found = epoch_figures(newest, None, {StatePath("orders/0"): one})
    assert (found.files, found.new_files, found.size_bytes, found.rows) == (2, None, None, None)
    stored = {StatePath("orders/0"): one, StatePath("orders/1"): replace(one, problem="broken")}
    found = epoch_figures(newest, {StatePath("orders/0")}, stored)
    assert (found.size_bytes, found.new_files, found.new_size_bytes, found.rows) == (
        20,
        1,
        10,
        None,
    )
