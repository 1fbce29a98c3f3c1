"""Health checks: each finds its own condition, is silent below its threshold, and does not judge
without enough facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from arroyo_dagster import Checkpoint, Epoch, HealthLimits, JobId, TableConfig, TableName
from arroyo_dagster.state.model.catalog import EpochRow, FileRow
from arroyo_dagster.state.model.garbage import JobPins, Pin
from arroyo_dagster.state.model.job_facts import JobCondition
from arroyo_dagster.state.model.keys import MAX_ROUTING_KEY
from arroyo_dagster.state.model.tables import ExpiringTimeKeyFiles
from arroyo_dagster.state.planning.health_checks.facts import Found, HealthFacts, TableAtEpoch
from arroyo_dagster.state.planning.rules import (
    HEALTH_RULES,
    RULE_OF,
    fleet_verdict,
    judge_job,
)
from arroyo_dagster.state.planning.verify.findings import warning
from arroyo_dagster.state.planning.verify.fleet import JobAge
from tests.unit.state.planning import values

SECOND = 1_000_000
MINUTE = 60 * SECOND
DAY = 24 * 60 * MINUTE
MIB = 1 << 20
START = 20_000 * DAY
EPOCHS = 30
LIMITS = HealthLimits()
RULES = {rule.name: rule for rule in HEALTH_RULES}


def row(epoch: int, **changes: Any) -> EpochRow:
    finished = START + epoch * MINUTE
    given: dict[str, Any] = {
        "job": "orders",
        "epoch": epoch,
        "state": "ready",
        "finished_micros": finished,
        "duration_micros": SECOND,
        "watermark_micros": finished - MINUTE,
        "size_bytes": 100 * MIB,
        "new_size_bytes": MIB,
        "new_files": 4,
    }
    return EpochRow(**given | changes)


def file(at: int, **changes: Any) -> FileRow:
    """A file of subtask `at` of four, which holds a quarter of the keys."""
    width = (MAX_ROUTING_KEY + 1) // 4
    given: dict[str, Any] = {
        "job": "orders",
        "epoch": EPOCHS,
        "operator": "sum",
        "parallelism": 4,
        "table": "t",
        "table_kind": "expiring time-key",
        "place": at,
        "path": f"orders/{at}",
        "rows": 20_000,
        "size_bytes": 25 * MIB,
        "min_routing_key": at * width,
        "max_routing_key": (at + 1) * width - 1,
        "max_timestamp_micros": START + (EPOCHS - 1) * MINUTE,
        "columns": "k: int64",
    }
    return FileRow(**given | changes)


def table(epoch: int, **changes: Any) -> TableAtEpoch:
    given: dict[str, Any] = {
        "epoch": epoch,
        "operator": "sum",
        "table": "t",
        "files": 4,
        "size_bytes": 100 * MIB,
        "rows": 80_000,
    }
    return TableAtEpoch(**given | changes)


def checkpoint(files: list[FileRow], retention_micros: int = DAY) -> Checkpoint:
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
        min_watermark_micros=START + (EPOCHS - 1) * MINUTE,
        tables={name: listed},
        configs={name: TableConfig(config=values.expiring("t", retention_micros))},
    )
    return values.checkpoint(operator, job=JobId("orders"), epoch=Epoch(EPOCHS))


def healthy(**changes: Any) -> HealthFacts:
    files = changes.get("files") or [file(at) for at in range(4)]
    given: dict[str, Any] = {
        "age": JobAge(
            job="orders", epoch=EPOCHS, epochs=EPOCHS, finished_micros=START + EPOCHS * MINUTE
        ),
        "now_micros": START + EPOCHS * MINUTE + 30 * SECOND,
        "epochs": [row(epoch) for epoch in range(1, EPOCHS + 1)],
        "tables": [table(epoch) for epoch in range(1, EPOCHS + 1)],
        "files": files,
        "checkpoint": checkpoint(files),
        "stored_bytes": 200 * MIB,
    }
    return HealthFacts(**given | changes)


def with_last(count: int, **changes: Any) -> list[EpochRow]:
    rows = [row(epoch) for epoch in range(1, EPOCHS + 1)]
    return rows[:-count] + [replace(one, **changes) for one in rows[-count:]]


LATE = START + EPOCHS * MINUTE + 6 * MINUTE
WIDE = [replace(file(at), min_routing_key=0, max_routing_key=MAX_ROUTING_KEY) for at in range(4)]
EXPIRED = [file(at, max_timestamp_micros=START - 2 * DAY) for at in range(3)] + [file(3)]
OLD_PIN = Pin(epoch=Epoch(3), owner="ann", pinned_at_micros=START - 31 * DAY, reason="audit")
STALLED = [row(epoch, watermark_micros=START) for epoch in range(1, EPOCHS + 1)]
BEHIND = with_last(1, watermark_micros=START - 3 * 60 * MINUTE)
GAP = [one for one in healthy().epochs if one.epoch not in (7, 8)]
MANY = [file(at % 4, place=at, path=f"orders/{at}") for at in range(501)]
SMALL = [file(at % 4, place=at, path=f"orders/{at}", size_bytes=1000) for at in range(60)]
SICK = {
    "newest-epoch-unreadable": (
        "newest_epoch_readable",
        healthy(age=replace(healthy().age, problem="it does not decode")),
    ),
    "epoch-overdue": ("epochs_on_time", healthy(now_micros=LATE)),
    "watermark-stalled": ("watermark_advances", healthy(epochs=STALLED)),
    "watermark-behind": ("watermark_advances", healthy(epochs=BEHIND)),
    "epoch-gap": ("no_epoch_missing", healthy(epochs=GAP)),
    "checkpoint-slow": (
        "durations_usual",
        healthy(epochs=with_last(3, duration_micros=20 * SECOND)),
    ),
    "commit-overdue": (
        "commits_finish",
        healthy(epochs=with_last(1, state="committing"), now_micros=LATE + 5 * MINUTE),
    ),
    "table-grows": (
        "sizes_usual",
        healthy(tables=[*healthy().tables[:-1], table(EPOCHS, size_bytes=400 * MIB)]),
    ),
    "rows-dropped": (
        "row_counts_usual",
        healthy(tables=[*healthy().tables[:-1], table(EPOCHS, rows=20_000)]),
    ),
    "too-many-files": ("file_counts_low", healthy(files=MANY)),
    "small-files": ("file_sizes_useful", healthy(files=SMALL)),
    "routing-keys-skewed": (
        "routing_keys_balanced",
        healthy(files=[file(0, rows=200_000), file(1), file(2), file(3)]),
    ),
    "columns-changed": (
        "columns_unchanged",
        healthy(files=[file(0, columns="k: int32"), file(1)]),
    ),
    "rows-past-retention": ("retention_kept", healthy(files=EXPIRED)),
    "timestamps-in-future": (
        "timestamps_plausible",
        healthy(files=[file(0, max_timestamp_micros=START + 3 * DAY), file(1)]),
    ),
    "read-amplification": (
        "read_amplification_low",
        healthy(files=WIDE),
    ),
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
    assert found is not None
    assert [one.code for one in found] == [code]
    assert found[0].object == "orders"
    assert RULE_OF[code] is RULES[name]
    assert judge(name, healthy(), limits) == []


def test_every_check_is_tried() -> None:
    assert {name for name, _ in SICK.values()} == set(RULES)


def test_checks_do_not_judge_a_job_without_an_epoch() -> None:
    facts = HealthFacts(age=JobAge(job="new"), now_micros=START)
    unsure = {name for name in RULES if judge(name, facts) is None}
    assert unsure == set(RULES) - {"pins_small", "journal_complete"}
    for name in RULES:
        assert not fleet_verdict([RULES[name]], [judge_job(facts, LIMITS)]).offenders


@pytest.mark.parametrize("condition", [JobCondition.STOPPED, JobCondition.FINISHED])
def test_a_job_that_rests_is_neither_late_nor_stalled(condition: JobCondition) -> None:
    age = replace(healthy().age, condition=condition)
    facts = healthy(age=age, now_micros=LATE + DAY, epochs=STALLED)
    assert judge("epochs_on_time", facts) is None
    assert judge("watermark_advances", facts) is None


def test_a_gap_behind_a_pinned_epoch_is_explained() -> None:
    pin = replace(OLD_PIN, epoch=Epoch(6))
    facts = healthy(epochs=GAP, pins=JobPins(pins=(pin,)))
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
        found += judge(name, facts, limits) or []
    assert limits.read == set(RULES[name].limits)
    assert RULES[name].example in [one.evidence for one in found]
