"""Findings about the files of checkpoints: missing or broken ones.

These are the quick checks, from listings and footers. The other modules of this package check what
`arroyo-state verify` reads in addition: every row, the records of an epoch, and earlier epochs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.compaction import CompactionPlan, Forecast, MergeOutcome
from arroyo_dagster.state.model.ids import OperatorId, StatePath, TableName
from arroyo_dagster.state.model.rewrite import RewritePlan
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    TableConfig,
    TimeFile,
)
from arroyo_dagster.state.planning.restore.reads import RestorePlan
from arroyo_dagster.state.planning.restore.schema_evolution import (
    FileReading,
    changed_in,
    how_to_read,
)
from arroyo_dagster.state.planning.verify.findings import (
    KEEP_AND_REPORT,
    RESTORE_OBJECT,
    Finding,
    Verdict,
    error,
    warning,
)

# ---- the files of a checkpoint -------------------------------------------------------------------


def files_exist(checkpoint: Checkpoint, present: Mapping[StatePath, int]) -> Verdict:
    """Check that every data file that an epoch lists exists and is not empty.

    Args:
        present: the existing files, with their sizes in bytes; may include files of other epochs.
    """
    findings: list[Finding] = []
    listed = _listed(checkpoint)
    for path, operator in listed.items():
        size = present.get(path)
        if size is None:
            evidence = f"listed by operator {operator} at epoch {checkpoint.epoch}, but missing"
            findings.append(error("file-missing", path, evidence, RESTORE_OBJECT))
        elif size == 0:
            findings.append(error("file-empty", path, "holds no bytes", RESTORE_OBJECT))
    return Verdict(findings=tuple(findings), inspected=len(listed))


def _listed(checkpoint: Checkpoint) -> dict[StatePath, OperatorId]:
    return {path: operator.operator for operator in checkpoint.operators for path in operator.paths}


@dataclass(frozen=True, slots=True)
class ArrowColumn:
    """A column of a data file; `type` is the name that Arrow uses."""

    name: str
    type: str
    nullable: bool = True

    def __str__(self) -> str:
        return f"{self.name}: {self.type}{'' if self.nullable else ' not null'}"


Columns = tuple[ArrowColumn, ...]
OperatorTable = tuple[OperatorId, TableName]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """The facts from the footer of a data file; its rows are not read.

    Attributes:
        problem: why the footer does not decode; the rest is then unknown. None if it decodes.
        min_routing_key, max_routing_key: bounds of `_key_hash`; None without statistics.
        max_timestamp_micros: the largest `_timestamp`, floored; None without statistics.
        schema_json: its schema in the JSON form of metadata; None for types that have no such form.
    """

    size_bytes: int
    rows: int = 0
    columns: Columns = ()
    min_routing_key: int | None = None
    max_routing_key: int | None = None
    max_timestamp_micros: int | None = None
    schema_json: str | None = None
    problem: str | None = None


def reading_of(
    config: TableConfig,
    forms: Sequence[Columns],
    columns: Columns,
    schema_json: str | None,
    listed: TimeFile | None,
) -> FileReading:
    """Decide how a data file is read as rows of its table: as it is, or with older columns.

    Args:
        forms: the columns that a file of the table may have, in one or several forms.
        columns, schema_json: of the file.
        listed: the file's entry in metadata; None for a global keyed table.
    """
    if columns in forms:
        return FileReading(tuple(range(len(columns))))
    expiring = config.config
    # Tables with changed columns compare types by the values they contain. Tables of Arroyo never
    # change, and there a name inside a list decides whether a restore works.
    if (
        isinstance(expiring, ExpiringTimeKeyConfig)
        and listed is not None
        and schema_json is not None
        and listed.epoch < changed_in(expiring.schema)
    ):
        return how_to_read(expiring, schema_json, listed.epoch)
    actual = ", ".join(map(str, columns))
    expected = " or ".join(", ".join(map(str, form)) for form in forms)
    return FileReading(problem=f"has the columns {actual}; expected {expected}")


def restorable(
    checkpoint: Checkpoint,
    plan: RestorePlan,
    files: Mapping[StatePath, StoredFile],
    expected: Mapping[OperatorTable, Sequence[Columns]],
) -> Verdict:
    """Check that a restore of this epoch finds every file it opens, in the expected form.

    The epoch is ready, or its commit is replayed first. Every file that a subtask opens exists, has
    a footer that decodes and the columns of its table, and has no row outside of the bounds by
    which readers skip files.

    Args:
        plan: what the restore opens.
        files: the facts of every existing file.
        expected: the columns that a file of a table may have, in one or several forms.
    """
    findings = list(_state_findings(checkpoint))
    opened = {(read.operator, read.table, path): None for read in plan.reads for path in read.files}
    configs = {
        (operator.operator, name): config
        for operator in checkpoint.operators
        for name, config in operator.configs.items()
    }
    bounds = _bounds(checkpoint)
    for operator, table, path in opened:
        stored = files.get(path)
        if stored is None:
            evidence = f"a restore of epoch {checkpoint.epoch} opens it for {operator}.{table}"
            findings.append(error("file-missing", path, f"{evidence}; missing", RESTORE_OBJECT))
            continue
        form = expected[operator, table]
        config = configs[operator, table]
        findings.extend(_file_findings(path, stored, config, form, bounds.get(path)))
    return Verdict(findings=tuple(findings), inspected=len(opened))


def _state_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    if not checkpoint.state.canonical:
        evidence = f"epoch {checkpoint.epoch} is {checkpoint.state.value}; expected ready"
        step = "restore the epoch before it; `arroyo-state epochs` lists them"
        yield error("not-restorable-state", checkpoint.ref, evidence, step)
    yield from config_findings(checkpoint)


def config_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Find tables without a configuration of their kind, and operators without a subtask."""
    for operator in checkpoint.operators:
        if operator.parallelism < 1:
            evidence = f"operator {operator.operator} has {operator.parallelism} subtasks"
            yield error("operator-without-subtasks", checkpoint.ref, evidence, KEEP_AND_REPORT)
        for name, files in operator.tables.items():
            config = operator.configs.get(name)
            if config is not None and config.kind is files.kind:
                continue
            has = "no configuration" if config is None else f"a configuration of {config.kind.name}"
            evidence = f"table {name} of operator {operator.operator} has {has}"
            yield error("table-configuration", checkpoint.ref, evidence, KEEP_AND_REPORT)


def _bounds(checkpoint: Checkpoint) -> dict[StatePath, TimeFile]:
    return {
        file.path: file
        for operator in checkpoint.operators
        for files in operator.tables.values()
        if isinstance(files, ExpiringTimeKeyFiles)
        for file in files.files
    }


def _file_findings(
    path: StatePath,
    stored: StoredFile,
    config: TableConfig,
    forms: Sequence[Columns],
    listed: TimeFile | None,
) -> Iterator[Finding]:
    if stored.problem is not None:
        yield error("file-broken", path, stored.problem, KEEP_AND_REPORT)
        return
    reading = reading_of(config, forms, stored.columns, stored.schema_json, listed)
    if reading.problem is not None:
        yield error("columns-differ", path, reading.problem, KEEP_AND_REPORT)
    elif listed is not None and stored.rows:
        yield from _bound_findings(path, stored, listed)


def _bound_findings(path: StatePath, stored: StoredFile, listed: TimeFile) -> Iterator[Finding]:
    low, high = stored.min_routing_key, stored.max_routing_key
    # Bounds that are too wide only cost time; bounds that are too narrow hide rows from a restore.
    below = low is not None and low < listed.min_routing_key
    if below or (high is not None and high > listed.max_routing_key):
        evidence = (
            f"has routing keys {low} to {high}, listed as {listed.min_routing_key} to "
            f"{listed.max_routing_key}: some subtasks would not open it"
        )
        yield error("routing-keys-outside", path, evidence, KEEP_AND_REPORT)
    newest = stored.max_timestamp_micros
    if newest is not None and newest > listed.max_timestamp_micros:
        evidence = (
            f"has rows up to {newest} µs, listed as up to {listed.max_timestamp_micros} µs: it "
            "would be dropped too early"
        )
        yield error("timestamps-outside", path, evidence, KEEP_AND_REPORT)


# ---- maintenance ---------------------------------------------------------------------------------


def effective(plan: CompactionPlan | RewritePlan, after: Forecast | None) -> Verdict:
    """Check that a compaction reached its forecast.

    Args:
        after: what a restore reads now; None if nothing was changed.
    """
    if after is None:
        return Verdict(findings=(), inspected=0)
    figures = {
        "files": (plan.before.files, plan.after.files, after.files),
        "files opened by a subtask": tuple(
            max(reads.opens, default=0) for reads in (plan.before, plan.after, after)
        ),
    }
    findings = [
        warning(
            "less-than-forecast",
            str(plan.ref),
            f"{before} {what} were forecast to become at most {forecast}, and became {actual}",
            "read the reasons in the plan; values of several state versions are not merged",
        )
        for what, (before, forecast, actual) in figures.items()
        if actual > forecast
    ]
    done = plan.tables if isinstance(plan, RewritePlan) else plan.merges
    return Verdict(findings=tuple(findings), inspected=len(done))


def row_parity(merges: Sequence[MergeOutcome]) -> Verdict:
    """Check that a restore loads the same rows from merged files as from their inputs.

    Row counts are not sufficient: the multisets of the loaded rows must be equal, and every row
    that is in no output must be accounted for.
    """
    findings = [
        error(
            "merge-differs",
            outcome.merged.input_paths[0],
            f"{len(outcome.merged.input_paths)} files of table {outcome.merged.table} of "
            f"operator {outcome.merged.operator} hold {outcome.rows_in} rows, of which a restore "
            f"loads {outcome.before.rows}; merged they hold {outcome.rows_out}, of which it "
            f"loads {outcome.after.rows} "
            f"({('other' if outcome.before != outcome.after else 'the same')} values); dropped: "
            f"{dict(outcome.dropped)}",
            "keep the files and report it; nothing was published",
        )
        for outcome in merges
        if not outcome.same
    ]
    return Verdict(findings=tuple(findings), inspected=len(merges))
