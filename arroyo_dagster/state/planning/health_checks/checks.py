"""Health checks of a job: its epochs in time, what it stores, the tables of its newest epoch.

Each function returns its findings, or why the facts do not suffice for a judgement.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, takewhile
from statistics import median

from arroyo_dagster.state.model.checkpoints import CheckpointState
from arroyo_dagster.state.model.health import HealthLimits
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.job_facts import JobCondition
from arroyo_dagster.state.model.keys import server_for_hash
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, ExpiringTimeKeyFiles, TableKind
from arroyo_dagster.state.model.units import format_bytes, format_micros
from arroyo_dagster.state.planning.health_checks.facts import (
    NO_EPOCH,
    NO_FILES,
    FileAtEpoch,
    Found,
    HealthFacts,
    missing_evidence,
)
from arroyo_dagster.state.planning.restore.reads import plan_read, restore_plan
from arroyo_dagster.state.planning.verify.findings import error, note, warning
from arroyo_dagster.state.planning.verify.fleet import every_job_recent, failed_job

_HOUR = 3_600_000_000
_SLOW_EPOCHS = 3
_STALLED_EPOCHS = 10
_GAPS_NAMED = 3


# ---- epochs in time: overdue, slow, missing, stalled, not committed ------------------------------


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


# ---- bytes: read, written, stored and pinned -----------------------------------------------------


def journal_complete(facts: HealthFacts, limits: HealthLimits) -> Found:
    """Find runs of gc whose record is missing, was changed, or cannot be read."""
    return list(facts.journal)


def reads_once(facts: HealthFacts, limits: HealthLimits) -> Found:
    """Find expiring tables whose bytes are read by many subtasks in a restore."""
    if facts.checkpoint is None or not facts.files:
        return NO_FILES
    sizes = facts.sizes
    opened: dict[tuple[str, str], int] = {}
    listed: dict[tuple[str, str], set[StatePath]] = {}
    for read in restore_plan(facts.checkpoint, sizes=sizes).reads:
        if read.kind is TableKind.EXPIRING_TIME_KEY:
            key = (str(read.operator), str(read.table))
            opened[key] = opened.get(key, 0) + read.size_bytes
            listed.setdefault(key, set()).update(read.files)
    findings = []
    for (operator, table), size in opened.items():
        once = sum(sizes.get(path, 0) for path in listed[operator, table])
        if once >= limits.small_table_bytes and size > limits.read_amplification * once:
            evidence = (
                f"a restore reads {format_bytes(size)} of table {operator}.{table}, which has "
                f"{format_bytes(once)}: its files overlap the key ranges of many subtasks"
            )
            step = "compact the job: outputs do not cross the key ranges of its subtasks"
            findings.append(warning("read-amplification", facts.job, evidence, step))
    return findings


def writes_changes_only(facts: HealthFacts, limits: HealthLimits) -> Found:
    """Find a job that writes most of its state again with every epoch."""
    shares = [
        (epoch, epoch.new_size_bytes / epoch.size_bytes)
        for epoch in facts.epochs
        if epoch.new_size_bytes is not None and epoch.size_bytes
    ]
    if reason := missing_evidence([epoch for epoch, _ in shares]):
        return reason
    newest = facts.newest
    if newest is None or newest.size_bytes is None:
        return NO_EPOCH
    share = median(share for _, share in shares)
    if newest.size_bytes < limits.small_table_bytes or 100 * share <= limits.write_percent:
        return []
    evidence = (
        f"each epoch writes {share:.0%} of the state of {format_bytes(newest.size_bytes)} again"
    )
    step = "checkpoint less often, or keep less in global keyed tables: these are written in full"
    return [warning("write-amplification", facts.job, evidence, step)]


def stores_little_more(facts: HealthFacts, limits: HealthLimits) -> Found:
    """Find a job that stores many times the bytes of its newest epoch."""
    newest = facts.newest
    if newest is None or not newest.size_bytes:
        return NO_FILES
    if (
        facts.stored_bytes < limits.small_table_bytes
        or facts.stored_bytes <= limits.space_amplification * newest.size_bytes
    ):
        return []
    evidence = (
        f"its {len(facts.present)} epochs store {format_bytes(facts.stored_bytes)}; the newest one "
        f"lists {format_bytes(newest.size_bytes)}"
    )
    step = "keep fewer epochs: `arroyo-state gc plan expire` shows what would be freed"
    return [warning("space-amplification", facts.job, evidence, step)]


def epochs_expire(facts: HealthFacts, limits: HealthLimits) -> Found:
    """Find a job whose old epochs are never expired."""
    if not facts.age.epochs:
        return NO_EPOCH
    unpinned = facts.age.epochs - len(facts.pins.pinned)
    if unpinned <= limits.epochs:
        return []
    evidence = f"has {unpinned} unpinned epochs; expected at most {limits.epochs}"
    step = "turn on the schedule of gc with `delete: true`, or run `arroyo-state gc run expire`"
    return [warning("gc-behind", facts.job, evidence, step)]


def pins_small(facts: HealthFacts, limits: HealthLimits) -> Found:
    """Find pins that are old, and pins or quarantines that keep much that no other epoch needs."""
    findings = []
    if facts.quarantined_bytes > limits.pinned_bytes:
        evidence = f"{format_bytes(facts.quarantined_bytes)} are in quarantine"
        step = "nothing, if gc of orphans runs: it purges them after 7 days. Else purge what is no "
        step += "longer needed: `arroyo-state gc purge JOB --yes`"
        findings.append(warning("pins-large", facts.job, evidence, step))
    if facts.pinned_bytes > limits.pinned_bytes:
        evidence = f"{format_bytes(facts.pinned_bytes)} are listed by pinned epochs only"
        step = "unpin what is no longer needed: `arroyo-state sql @pins JOB` lists them"
        findings.append(warning("pins-large", facts.job, evidence, step))
    for pin in facts.pins.pins:
        age = facts.now_micros - pin.pinned_at_micros
        if not pin.released and age > limits.pin_micros:
            evidence = f"epoch {pin.epoch} was pinned {format_micros(age)} ago by {pin.owner}" + (
                f": {pin.reason}" if pin.reason else ""
            )
            step = f"unpin it if it is no longer needed: `arroyo-state unpin JOB {pin.epoch}`"
            findings.append(warning("pin-old", facts.job, evidence, step))
    return findings


# ---- the tables of the newest epoch --------------------------------------------------------------

_LEAST_FILES = 50


def sizes_usual(facts: HealthFacts, limits: HealthLimits) -> Found:
    """Find tables that are much larger than in any epoch before that is known."""
    history = list(facts.history_by_table())
    findings = []
    for name, last, earlier in history:
        before = max(epoch.size_bytes for epoch in earlier)
        if last.size_bytes > max(limits.small_table_bytes, limits.unusual_factor * before):
            evidence = (
                f"table {name} has {format_bytes(last.size_bytes)}; at the {len(earlier)} epochs "
                f"before at most {format_bytes(before)}"
            )
            step = "compare its keys with the epochs before; look for a key that never expires"
            findings.append(warning("table-grows", facts.job, evidence, step))
    return findings if history else _no_history(facts)


def row_counts_usual(facts: HealthFacts, limits: HealthLimits) -> Found:
    """Find tables with much fewer rows than in any epoch before that is known."""
    history = list(facts.history_by_table())
    findings = []
    for name, last, earlier in history:
        counts = [epoch.rows for epoch in earlier if epoch.rows is not None]
        if last.rows is None or not counts:
            continue
        before = min(counts)
        if before >= limits.small_table_rows and last.rows * limits.unusual_factor < before:
            evidence = (
                f"table {name} has {last.rows} rows; at the {len(earlier)} epochs before at "
                f"least {before}"
            )
            step = "find out what removed them before older epochs expire: pin one that has them"
            findings.append(warning("rows-dropped", facts.job, evidence, step))
    return findings if history else _no_history(facts)


def _no_history(facts: HealthFacts) -> str:
    earlier = [epoch for epoch in facts.epochs[:-1] if epoch.tables]
    return missing_evidence(earlier) or "each table of its newest epoch is new"


def file_counts_low(facts: HealthFacts, limits: HealthLimits) -> Found:
    """Find tables with too many files: each is opened by a restore."""
    if not facts.files:
        return NO_FILES
    return [
        warning(
            "too-many-files",
            facts.job,
            f"table {operator}.{table} has {len(files)} files; expected at most {limits.files}",
            "compact the job, or compact it more often",
        )
        for (operator, table), files in facts.files_by_table().items()
        if len(files) > limits.files
    ]


def file_sizes_useful(facts: HealthFacts, limits: HealthLimits) -> Found:
    """Find tables that consist of small files."""
    if not facts.files:
        return NO_FILES
    findings = []
    for (operator, table), files in facts.files_by_table().items():
        small = sum((row.size_bytes or 0) < limits.small_file_bytes for row in files)
        percent = 100 * small // len(files)
        if len(files) >= _LEAST_FILES and percent > limits.small_file_percent:
            evidence = (
                f"{small} of {len(files)} files of table {operator}.{table} are smaller than "
                f"{format_bytes(limits.small_file_bytes)}"
            )
            step = "compact the job, or compact it more often"
            findings.append(warning("small-files", facts.job, evidence, step))
    return findings


def routing_keys_balanced(facts: HealthFacts, limits: HealthLimits) -> Found:
    """Find tables of which one subtask holds far more rows than the others."""
    findings, judged = [], False
    for (operator, table), files in facts.files_by_table().items():
        rows = _rows_by_subtask(files)
        if len(rows) < 2 or sum(rows) < limits.small_table_rows * len(rows):
            continue
        judged = True
        largest = max(rows)
        others = (sum(rows) - largest) / (len(rows) - 1)
        if largest > limits.skew * others:
            evidence = (
                f"subtask {rows.index(largest)} of {operator} holds {largest:.0f} rows of table "
                f"{table}; the other {len(rows) - 1} hold {others:.0f} on average"
            )
            step = "choose a key with more values, or add a salt to the frequent ones"
            findings.append(warning("routing-keys-skewed", facts.job, evidence, step))
    return findings if judged else "no expiring table of several subtasks has enough rows"


def _rows_by_subtask(files: Sequence[FileAtEpoch]) -> list[float]:
    """Return the rows of an expiring table by subtask; a file of several counts evenly for each."""
    if not files or not files[0].expiring:
        return []
    parallelism = files[0].parallelism
    rows = [0.0] * parallelism
    for row in files:
        if row.rows is None or row.min_routing_key is None or row.max_routing_key is None:
            return []
        first = server_for_hash(row.min_routing_key, parallelism)
        last = server_for_hash(row.max_routing_key, parallelism)
        for subtask in range(first, last + 1):
            rows[subtask] += row.rows / (last - first + 1)
    return rows


def columns_unchanged(facts: HealthFacts, limits: HealthLimits) -> Found:
    """Find expiring tables whose files do not all have the same columns."""
    if not facts.files:
        return NO_FILES
    # A managed job may add columns on purpose; Arroyo never does.
    findings = []
    for (operator, table), files in facts.files_by_table().items():
        columns = list(dict.fromkeys(row.columns for row in files if row.columns is not None))
        if not files[0].expiring or len(columns) < 2:
            continue
        evidence = (
            f"files of table {operator}.{table} have {len(columns)} different lists of columns; "
            f"oldest: {columns[0]}; newest: {columns[-1]}"
        )
        step = "verify the job: `arroyo-state verify` says whether a restore reads all of them"
        if facts.managed:
            findings.append(note("columns-changed", facts.job, evidence, step))
        else:
            findings.append(warning("columns-changed", facts.job, evidence, step))
    return findings


def retention_kept(facts: HealthFacts, limits: HealthLimits) -> Found:
    """Find expiring tables most of whose bytes are past their retention: a restore drops them."""
    if facts.checkpoint is None or not facts.files:
        return NO_FILES
    sizes = facts.sizes
    findings = []
    for operator in facts.checkpoint.operators:
        for table, files in operator.tables.items():
            config = operator.configs.get(table)
            expiring = None if config is None else config.config
            if not isinstance(files, ExpiringTimeKeyFiles) or not isinstance(
                expiring, ExpiringTimeKeyConfig
            ):
                continue
            watermark = operator.min_watermark_micros
            kept = plan_read(expiring, files, watermark, managed=facts.managed).files
            total = sum(sizes.get(file.path, 0) for file in files.files)
            past = total - sum(sizes.get(file.path, 0) for file in kept)
            if total < limits.small_table_bytes or 100 * past <= limits.expired_percent * total:
                continue
            evidence = (
                f"{format_bytes(past)} of {format_bytes(total)} of table "
                f"{operator.operator}.{table} are past its retention of "
                f"{format_micros(expiring.retention_micros)}"
            )
            step = "restart the job: a restore no longer lists these files; then run gc"
            findings.append(warning("rows-past-retention", facts.job, evidence, step))
    return findings


def timestamps_plausible(facts: HealthFacts, limits: HealthLimits) -> Found:
    """Find expiring tables with event times in the future: such rows stay for a long time."""
    newest = facts.newest
    if newest is None or not facts.files:
        return NO_FILES
    latest = newest.finished_micros + limits.future_micros
    findings = []
    for (operator, table), files in facts.files_by_table().items():
        times = [row.max_timestamp_micros for row in files if row.max_timestamp_micros is not None]
        ahead = [time for time in times if time > latest]
        if ahead:
            evidence = (
                f"{len(ahead)} files of table {operator}.{table} have event times up to "
                f"{format_micros(max(ahead) - newest.finished_micros)} ahead of epoch "
                f"{newest.epoch}"
            )
            step = "check the unit of the source's timestamps, and drop events of the future"
            findings.append(warning("timestamps-in-future", facts.job, evidence, step))
    return findings
