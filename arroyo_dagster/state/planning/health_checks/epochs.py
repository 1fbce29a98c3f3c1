"""Health checks of a job's epochs in time: overdue, slow, missing, stalled, not committed.

Each function returns its findings, or why the facts do not suffice for a judgement.
"""

from __future__ import annotations

from itertools import pairwise, takewhile
from statistics import median

from arroyo_dagster.state.model.checkpoints import CheckpointState
from arroyo_dagster.state.model.health import HealthLimits
from arroyo_dagster.state.model.job_facts import JobCondition
from arroyo_dagster.state.model.units import format_micros
from arroyo_dagster.state.planning.health_checks.facts import (
    NO_EPOCH,
    Found,
    HealthFacts,
    missing_evidence,
)
from arroyo_dagster.state.planning.verify.findings import error, warning
from arroyo_dagster.state.planning.verify.fleet import every_job_recent, failed_job

_HOUR = 3_600_000_000
_SLOW_EPOCHS = 3
_STALLED_EPOCHS = 10
_GAPS_NAMED = 3


def newest_epoch_readable(facts: HealthFacts, limits: HealthLimits) -> Found:
    """Find a job whose newest epoch cannot be read. Other checks do not judge it."""
    if facts.age.problem is None:
        return NO_EPOCH if facts.age.epoch is None else []
    step = "verify the job: `arroyo-state verify` says what is damaged, and where to go back to"
    return [error("newest-epoch-unreadable", facts.job, facts.age.problem, step)]


def epochs_on_time(facts: HealthFacts, limits: HealthLimits) -> Found:
    """Find a job that failed, or whose next epoch is overdue by its usual interval.

    A job that runs, as a source reports, is overdue after an hour, whatever is usual for it.
    """
    if facts.age.condition is JobCondition.FAILED:
        return [failed_job(facts.age)]
    if facts.idle is not None:
        return facts.idle
    if reason := missing_evidence(facts.epochs):
        if facts.age.condition is not JobCondition.RUNNING:
            return reason
        gaps = [
            later.finished_micros - epoch.finished_micros for epoch, later in pairwise(facts.epochs)
        ]
        limit = max(_HOUR, limits.overdue_intervals * max(gaps, default=0))
        verdict = every_job_recent([facts.age], now_micros=facts.now_micros, limit_micros=limit)
        return list(verdict.findings) or reason
    interval = facts.interval_micros
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
    if facts.idle is not None:
        return facts.idle
    marks = [
        (epoch, epoch.watermark_micros)
        for epoch in facts.epochs
        if epoch.watermark_micros is not None
    ]
    if not marks:
        return "no epoch has a watermark"
    newest, watermark = marks[-1]
    same = list(takewhile(lambda mark: mark[1] == watermark, reversed(marks)))
    span = newest.finished_micros - same[-1][0].finished_micros
    if len(same) > _STALLED_EPOCHS and span >= limits.stalled_micros:
        evidence = f"its watermark has not moved for {len(same)} epochs, {format_micros(span)}"
        step = "look for an idle partition of a source, or a source without new events"
        return [warning("watermark-stalled", facts.job, evidence, step)]
    if reason := missing_evidence([epoch for epoch, _ in marks[:-1]]):
        return reason
    lags = [epoch.finished_micros - mark for epoch, mark in marks]
    before = median(lags[:-1])
    if lags[-1] <= max(_HOUR, limits.unusual_factor * before):
        return []
    evidence = (
        f"its watermark is {format_micros(lags[-1])} behind; usually "
        f"{format_micros(max(0, before))}"
    )
    step = "look for backpressure and for a source that lags; raise the job's parallelism"
    return [warning("watermark-behind", facts.job, evidence, step)]


def no_epoch_missing(facts: HealthFacts, limits: HealthLimits) -> Found:
    """Find gaps between present epochs that no pin explains."""
    present = facts.present
    if len(present) < 2:
        return "the store has fewer than two epochs of the job"
    pinned = facts.pins.ever_pinned
    gaps = [
        (epoch + 1, later - 1)
        for epoch, later in pairwise(present)
        if later > epoch + 1 and epoch not in pinned
    ]
    if not gaps:
        return []
    named = ", ".join(
        f"{first}" if first == last else f"{first} to {last}" for first, last in gaps[:_GAPS_NAMED]
    )
    evidence = f"missing between epochs that are present: {named}"
    step = (
        "`arroyo-state sql @fate` says what became of them; restore their records if they were lost"
    )
    return [warning("epoch-gap", facts.job, evidence, step)]


def durations_usual(facts: HealthFacts, limits: HealthLimits) -> Found:
    """Find a job whose latest checkpoints all take much longer than usual."""
    timed = [
        (epoch, epoch.duration_micros)
        for epoch in facts.epochs
        if epoch.duration_micros is not None
    ]
    latest, earlier = timed[-_SLOW_EPOCHS:], timed[:-_SLOW_EPOCHS]
    if reason := missing_evidence([epoch for epoch, _ in earlier]):
        return reason
    before = median(duration for _, duration in earlier)
    fastest = min(duration for _, duration in latest)
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
    newest = facts.checkpoint
    if newest is None:
        return NO_EPOCH
    age = facts.now_micros - newest.finish_time_micros
    if newest.state is not CheckpointState.COMMITTING or age <= limits.commit_micros:
        return []
    evidence = f"epoch {newest.epoch} has been committing for {format_micros(age)}"
    step = "start the job: it repeats the commit; its sinks' output is incomplete until then"
    return [warning("commit-overdue", facts.job, evidence, step)]
