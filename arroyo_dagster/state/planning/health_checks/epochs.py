"""Health checks of a job's epochs in time: overdue, slow, missing, stalled, not committed.

Each function returns its findings, or None if the facts do not suffice for a judgement.
"""

from __future__ import annotations

from itertools import pairwise, takewhile

from arroyo_dagster.state.model.checkpoints import CheckpointState
from arroyo_dagster.state.model.health import HealthLimits
from arroyo_dagster.state.model.units import format_micros
from arroyo_dagster.state.planning.health_checks.facts import (
    LEAST_HISTORY,
    Found,
    HealthFacts,
    usual,
)
from arroyo_dagster.state.planning.verify.findings import error, warning

_HOUR = 3_600_000_000
_SLOW_EPOCHS = 3
_GAPS_NAMED = 3


def newest_epoch_readable(facts: HealthFacts, limits: HealthLimits) -> Found:
    """Find a job whose newest epoch cannot be read. Other checks do not judge it."""
    if facts.age.problem is None:
        return None if facts.age.epoch is None else []
    step = "verify the job: `arroyo-state verify` says what is damaged, and where to go back to"
    return [error("newest-epoch-unreadable", facts.job, facts.age.problem, step)]


def epochs_on_time(facts: HealthFacts, limits: HealthLimits) -> Found:
    """Find a job whose next epoch is overdue by its usual interval."""
    interval = facts.interval_micros
    if interval is None or not facts.running:
        return None
    age = facts.age.age_micros(facts.now_micros)
    allowed = max(limits.overdue_intervals * interval, limits.overdue_micros)
    if age is None or age <= allowed:
        return []
    evidence = (
        f"epoch {facts.age.epoch} is {format_micros(age)} old; usually there is one every "
        f"{format_micros(interval)}"
    )
    step = "read the job's logs; if it was stopped on purpose, name a source of its status"
    return [warning("epoch-overdue", facts.job, evidence, step)]


def watermark_advances(facts: HealthFacts, limits: HealthLimits) -> Found:
    """Find a watermark that stands still, or falls ever further behind."""
    rows = [
        (row.watermark_micros, row.finished_micros)
        for row in facts.readable
        if row.watermark_micros is not None and row.finished_micros is not None
    ]
    if len(rows) <= LEAST_HISTORY or not facts.running:
        return None
    watermark, finished = rows[-1]
    same = list(takewhile(lambda row: row[0] == watermark, reversed(rows)))
    span = finished - same[-1][1]
    if len(same) > LEAST_HISTORY and span >= limits.stalled_micros:
        evidence = f"its watermark has not moved for {len(same)} epochs, {format_micros(span)}"
        step = "look for an idle partition of a source, or a source without new events"
        return [warning("watermark-stalled", facts.job, evidence, step)]
    lags = [end - mark for mark, end in rows]
    before = usual(lags[:-1])
    if before is not None and lags[-1] > max(_HOUR, limits.unusual_factor * before):
        evidence = (
            f"its watermark is {format_micros(lags[-1])} behind; usually "
            f"{format_micros(max(0, before))}"
        )
        step = "look for backpressure and for a source that lags; raise the job's parallelism"
        return [warning("watermark-behind", facts.job, evidence, step)]
    return []


def no_epoch_missing(facts: HealthFacts, limits: HealthLimits) -> Found:
    """Find gaps between present epochs that no pin explains."""
    present = [row.epoch for row in facts.epochs if row.present]
    if len(present) < 2:
        return None
    pinned = facts.pins.ever_pinned
    gaps = [
        (one + 1, later - 1)
        for one, later in pairwise(present)
        if later > one + 1 and one not in pinned
    ]
    if not gaps:
        return []
    named = ", ".join(
        f"{one}" if one == last else f"{one} to {last}" for one, last in gaps[:_GAPS_NAMED]
    )
    evidence = f"missing between epochs that are present: {named}"
    step = (
        "`arroyo-state sql @fate` says what became of them; restore their records if they were lost"
    )
    return [warning("epoch-gap", facts.job, evidence, step)]


def durations_usual(facts: HealthFacts, limits: HealthLimits) -> Found:
    """Find a job whose latest checkpoints all take much longer than usual."""
    durations = [row.duration_micros for row in facts.readable if row.duration_micros is not None]
    latest, earlier = durations[-_SLOW_EPOCHS:], durations[:-_SLOW_EPOCHS]
    before = usual(earlier)
    if before is None:
        return None
    fastest = min(latest)
    if fastest <= max(limits.slow_micros, limits.unusual_factor * before):
        return []
    evidence = (
        f"each of its last {len(latest)} checkpoints took {format_micros(fastest)} or more; "
        f"usually {format_micros(before)}"
    )
    step = "look for backpressure, for a table that grows, and for errors of the store"
    return [warning("checkpoint-slow", facts.job, evidence, step)]


def commits_finish(facts: HealthFacts, limits: HealthLimits) -> Found:
    """Find an epoch whose commit is not finished although it should be."""
    newest = facts.newest
    if newest is None or newest.finished_micros is None:
        return None
    age = facts.now_micros - newest.finished_micros
    if newest.state != CheckpointState.COMMITTING.value or age <= limits.commit_micros:
        return []
    evidence = f"epoch {newest.epoch} has been committing for {format_micros(age)}"
    step = "start the job: it repeats the commit; its sinks' output is incomplete until then"
    return [warning("commit-overdue", facts.job, evidence, step)]
