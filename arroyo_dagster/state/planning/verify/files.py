"""Findings about one data file: missing, unreadable, of another table, or with wrong statistics.

One cause yields one finding: consequences of a reported cause are not reported.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import OperatorId, StatePath
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyFiles,
    GlobalKeyedConfig,
    TableConfig,
    TimeFile,
)
from arroyo_dagster.state.planning.restore.schema_evolution import FileReading
from arroyo_dagster.state.planning.verify.checks import Columns, reading_of
from arroyo_dagster.state.planning.verify.findings import (
    KEEP_AND_REPORT,
    RESTORE_OBJECT,
    Finding,
    either,
    error,
    note,
    warning,
)

REBUILD = "rewrite the metadata with bounds recomputed from the rows, or restore another epoch"
_BATCH_ROWS = 1024
"""How many rows Arroyo reads at a time; a batch never spans row groups."""


# ---- facts ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """The facts from the footer of a data file.

    Attributes:
        row_groups: the number of rows in each row group.
        schema_json: its schema in the JSON form of metadata; None for types that have no such form.
        state_version: of a global keyed table's values; 0 if the footer has none.
        min_routing_key, max_routing_key, max_timestamp_micros: its statistics; None without.
    """

    rows: int
    row_groups: tuple[int, ...]
    columns: Columns
    schema_json: str | None = None
    state_version: int = 0
    min_routing_key: int | None = None
    max_routing_key: int | None = None
    max_timestamp_micros: int | None = None

    @property
    def batches(self) -> int:
        """The number of record batches in which Arroyo reads the file."""
        return sum(-(-rows // _BATCH_ROWS) for rows in self.row_groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScan:
    """The facts from all rows of a data file; None or 0 for what the level does not check.

    Attributes:
        min_timestamp_micros, max_timestamp_micros: of the rows that have a time; floored.
        live: for each subtask the number of rows it owns, by `_key_hash`, that are not older than
            the cutoff.
        strange_hashes: rows whose `_key_hash` is not the hash of their key columns.
        strange_operations: rows with an `_operation` that the readers of the job do not know.
        unordered: keys of a global keyed table that are not greater than the one before.
        undecodable: why a value does not decode, for the first such value.
        unknown: why values were not decoded, if they should have been.
        unhashed: why routing keys were not recomputed.
    """

    rows: int = 0
    min_routing_key: int | None = None
    max_routing_key: int | None = None
    min_timestamp_micros: int | None = None
    max_timestamp_micros: int | None = None
    live: tuple[int, ...] = ()
    strange_hashes: int = 0
    strange_operations: int = 0
    unordered: int = 0
    undecodable: str | None = None
    unknown: str | None = None
    unhashed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """The facts of an existing data file, as far as the level reads it.

    Attributes:
        problem: why it does not decode; the rest is then unknown.
        rows: None also if the columns are not those of the table.
    """

    size_bytes: int
    footer: Footer | None = None
    rows: RowScan | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedFile:
    """A data file that a table lists.

    Attributes:
        forms: the columns that it may have, in one or several forms.
        bounds: the metadata entry of a file of an expiring table; None in other tables.
        opened: whether a restore opens it; an expired file is not opened.
    """

    path: StatePath
    operator: OperatorId
    config: TableConfig
    forms: Sequence[Columns]
    bounds: TimeFile | None
    opened: bool
    managed: bool

    def reading(self, footer: Footer) -> FileReading:
        """Decide how the file is read as rows of its table."""
        return reading_of(self.config, self.forms, footer.columns, footer.schema_json, self.bounds)


# ---- the lists -----------------------------------------------------------------------------------


def list_findings(
    checkpoint: Checkpoint, job_root: StatePath, present: Container[StatePath]
) -> Iterator[Finding]:
    """Find files that an epoch lists twice, and files that lie outside of their job.

    Args:
        present: the existing files; missing ones are reported by another check.
    """
    seen: dict[StatePath, str] = {}
    for operator in checkpoint.operators:
        for name, files in operator.tables.items():
            table = f"{operator.operator}.{name}"
            for path in files.paths:
                before = seen.setdefault(path, "")
                if before:
                    yield _twice(path, before, table, isinstance(files, ExpiringTimeKeyFiles))
                elif path in present and not path.startswith(f"{job_root}/"):
                    evidence = f"listed by {table}, but outside of the job's directory {job_root}"
                    step = "check which job owns it: that job may delete it"
                    yield warning("file-elsewhere", path, evidence, step)
                seen[path] = table


def _twice(path: StatePath, before: str, now: str, expiring: bool) -> Finding:
    where = f"twice by {now}" if before == now else f"by {before} and by {now}"
    harm = "its rows would be loaded twice" if expiring else "the second read changes nothing"
    is_error = expiring or before != now
    return either(is_error, "file-listed-twice", path, f"listed {where}: {harm}", KEEP_AND_REPORT)


# ---- one file ------------------------------------------------------------------------------------


def file_findings(listed: ListedFile, found: FileFacts | None) -> Iterator[Finding]:
    """Find what is wrong with one data file, as far as its facts show.

    Args:
        found: its facts; None if it is missing.
    """
    if found is None:
        evidence = f"listed by {listed.operator}.{listed.config.table}, but missing"
        if not listed.opened:
            evidence += "; it has expired, so no restore opens it"
        yield either(listed.opened, "file-missing", listed.path, evidence, RESTORE_OBJECT)
    elif found.size_bytes == 0:
        yield error("file-empty", listed.path, "holds no bytes", RESTORE_OBJECT)
    elif found.problem is not None:
        yield error("file-broken", listed.path, found.problem, KEEP_AND_REPORT)
    elif found.footer is not None:
        yield from _of_footer(listed, found.footer, found.rows)


def _of_footer(listed: ListedFile, footer: Footer, rows: RowScan | None) -> Iterator[Finding]:
    problem = listed.reading(footer).problem
    if problem is not None:
        yield error("columns-differ", listed.path, problem, KEEP_AND_REPORT)
        return
    counts = [footer.rows, sum(footer.row_groups), footer.rows if rows is None else rows.rows]
    if len(set(counts)) > 1:
        evidence = f"its footer says {counts[0]} rows, its row groups {counts[1]}, read {counts[2]}"
        yield error("rows-differ", listed.path, evidence, KEEP_AND_REPORT)
        return
    yield from _version_findings(listed, footer)
    if rows is not None:
        yield from _of_rows(listed, footer, rows)


def _version_findings(listed: ListedFile, footer: Footer) -> Iterator[Finding]:
    expected, actual = listed.config.state_version, footer.state_version
    if not isinstance(listed.config.config, GlobalKeyedConfig) or expected == 0:
        return  # a table without a state version ignores the version of its files
    # Arroyo migrates by one version, managed jobs by any number; neither migrates backwards.
    oldest = 0 if listed.managed else expected - 1
    if footer.rows and not oldest <= actual <= expected:
        evidence = f"its values are of state version {actual}; the operator reads {expected}"
        step = "run the release that wrote it once, or restore an epoch before the change"
        yield error("state-version", listed.path, evidence, step)


def _of_rows(listed: ListedFile, footer: Footer, rows: RowScan) -> Iterator[Finding]:
    if rows.undecodable is not None:
        yield error("value-undecodable", listed.path, rows.undecodable, KEEP_AND_REPORT)
    elif rows.strange_hashes:
        evidence = (
            f"{rows.strange_hashes} of {rows.rows} rows have a routing key that is not the hash of "
            "their key columns: other subtasks than those that get their events would own them"
        )
        yield error("routing-key-wrong", listed.path, evidence, KEEP_AND_REPORT)
    else:
        wrong = list(_bound_findings(listed, rows))
        # Rows outside of the listed bounds would contradict the footer as well: one finding.
        yield from wrong or _statistics(listed.path, footer, rows)
    yield from _value_findings(listed, rows)


def _bound_findings(listed: ListedFile, rows: RowScan) -> Iterator[Finding]:
    if listed.bounds is not None:
        yield from _key_bounds(listed.path, listed.bounds, rows)
        path = listed.path
        newest, bound = rows.max_timestamp_micros, listed.bounds.max_timestamp_micros
        if rows.min_timestamp_micros is not None and rows.min_timestamp_micros < 0:
            evidence = f"has rows from {rows.min_timestamp_micros} µs, before 1970"
            step = "Arroyo cannot keep such rows; give them another event time"
            yield warning("time-before-1970", path, evidence, step)
        elif newest is not None and newest > bound:
            evidence = f"has rows up to {newest} µs, listed as up to {bound} µs: dropped too early"
            yield error("timestamps-outside", path, evidence, REBUILD)
        elif newest is not None and newest < bound:
            evidence = f"has rows up to {newest} µs, listed as up to {bound} µs: kept for too long"
            yield note("bounds-too-wide", path, evidence, "nothing is lost")


def _key_bounds(path: StatePath, listed: TimeFile, rows: RowScan) -> Iterator[Finding]:
    low, high = rows.min_routing_key, rows.max_routing_key
    if low is None or high is None:
        return
    bounds = (listed.min_routing_key, listed.max_routing_key)
    evidence = f"has routing keys {low} to {high}, listed as {bounds[0]} to {bounds[1]}"
    # Bounds that are too wide only cost time; bounds that are too narrow hide rows from a restore.
    if low < bounds[0] or high > bounds[1]:
        evidence += ": some subtasks would not open it"
        yield error("routing-keys-outside", path, evidence, REBUILD)
    elif (low, high) != bounds:
        yield note("bounds-too-wide", path, f"{evidence}: opened without need", "nothing is lost")


def _statistics(path: StatePath, footer: Footer, rows: RowScan) -> Iterator[Finding]:
    """Find bounds in the footer that exclude rows: readers skip row groups by them."""
    pairs = (
        ("routing keys from", footer.min_routing_key, rows.min_routing_key, -1),
        ("routing keys up to", footer.max_routing_key, rows.max_routing_key, 1),
        ("rows up to µs", footer.max_timestamp_micros, rows.max_timestamp_micros, 1),
    )
    wrong = [
        f"{what} {stated}, has {actual}"
        for what, stated, actual, sign in pairs
        if stated is not None and actual is not None and sign * actual > sign * stated
    ]
    if wrong:
        evidence = f"its footer says {'; '.join(wrong)}"
        yield error("footer-statistics", path, evidence, KEEP_AND_REPORT)


def _value_findings(listed: ListedFile, rows: RowScan) -> Iterator[Finding]:
    if rows.strange_operations:
        evidence = (
            f"{rows.strange_operations} rows have an operation that their readers do not know"
        )
        if not listed.managed:
            evidence += ": Arroyo would treat them as inserts"
        yield error("operation-unknown", listed.path, evidence, KEEP_AND_REPORT)
    if rows.unordered:
        evidence = f"{rows.unordered} keys are not greater than the one before; the last one wins"
        yield note("keys-unordered", listed.path, evidence, "nothing is lost")
    if rows.unhashed is not None:
        yield note("hash-not-checked", listed.path, rows.unhashed, "compare with the live job")
