"""Health checks of the tables of a job's newest epoch.

Each function returns its findings, or why the facts do not suffice for a judgement.
"""

from __future__ import annotations

from collections.abc import Sequence

from arroyo_dagster.state.model.health import HealthLimits
from arroyo_dagster.state.model.keys import server_for_hash
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, ExpiringTimeKeyFiles
from arroyo_dagster.state.model.units import format_bytes, format_micros
from arroyo_dagster.state.planning.health_checks.facts import (
    NO_FILES,
    FileAtEpoch,
    Found,
    HealthFacts,
    missing_evidence,
)
from arroyo_dagster.state.planning.restore.reads import plan_read
from arroyo_dagster.state.planning.verify.findings import note, warning

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
