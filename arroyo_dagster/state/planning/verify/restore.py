"""A simulated restore: what each subtask opens, whether each row is loaded by its owner, and which
rows Arroyo would lose."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.ids import OperatorId, StatePath, TableName
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, TableKind
from arroyo_dagster.state.planning.restore.reads import RestorePlan, TableRead
from arroyo_dagster.state.planning.verify.files import REBUILD, FileFacts, Footer
from arroyo_dagster.state.planning.verify.findings import Finding, error, note, warning

Files = Mapping[StatePath, FileFacts]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubtaskRestore:
    """The cost of restoring one table for one subtask.

    Attributes:
        size_bytes: of the files opened.
        rows: the stored rows that it keeps: those in its key range that are not older than the
            cutoff; all rows of a global keyed table. None if one of the files could not be read.
        requests: the minimum number of reads of the store: the size and the footer of each file,
            and one read for each row group.
    """

    operator: OperatorId
    table: TableName
    kind: TableKind
    subtask: int
    files: tuple[StatePath, ...]
    size_bytes: int
    rows: int | None
    requests: int


def subtask_restores(plan: RestorePlan, files: Files) -> tuple[SubtaskRestore, ...]:
    """Compute what each subtask opens, reads and keeps, in the order of the plan."""
    return tuple(
        SubtaskRestore(
            operator=read.operator,
            table=read.table,
            kind=read.kind,
            subtask=read.subtask,
            files=read.files,
            size_bytes=sum(files[path].size_bytes for path in read.files if path in files),
            rows=_kept(read, files),
            requests=sum(_requests(files.get(path)) for path in read.files),
        )
        for read in plan.reads
    )


def _kept(read: TableRead, files: Files) -> int | None:
    total = 0
    for path in read.files:
        file = files.get(path)
        if file is None or file.footer is None or file.rows is None:
            return None
        whole = read.kind is TableKind.GLOBAL_KEYED
        total += file.rows.rows if whole else sum(file.rows.live[read.subtask : read.subtask + 1])
    return total


def _requests(found: FileFacts | None) -> int:
    footer = None if found is None else found.footer
    return 2 + (0 if footer is None else len(footer.row_groups))


def owner_findings(plan: RestorePlan, files: Files, reported: Collection[str]) -> Iterator[Finding]:
    """Find rows whose owning subtask would not open their file.

    Args:
        reported: the files that already have a finding.
    """
    opens = {(read.operator, read.table, read.subtask): set(read.files) for read in plan.reads}
    listed = {
        (read.operator, read.table, path): None
        for read in plan.reads
        if read.kind is TableKind.EXPIRING_TIME_KEY
        for path in read.files
    }
    for operator, table, path in listed:
        file = files.get(path)
        if path in reported or file is None or file.rows is None:
            continue
        for subtask, rows in enumerate(file.rows.live):
            if rows and path not in opens.get((operator, table, subtask), ()):
                evidence = f"{rows} rows belong to subtask {subtask}, which would not open it"
                yield error("rows-not-opened", path, evidence, REBUILD)


# ---- what Arroyo would lose ----------------------------------------------------------------------


def unkeyed_findings(checkpoint: Checkpoint, files: Files) -> Iterator[Finding]:
    """Find un-keyed updating aggregates of which Arroyo would restore only a part.

    Source: crates/arroyo-worker/src/arrow/incremental_aggregator.rs (arroyo-state.md 5.7): without
        a key it reads row 0 of each record batch only.
    """
    if checkpoint.progress is not None:
        return
    for operator in checkpoint.operators:
        for name, listed in operator.tables.items():
            config = operator.configs[name].config if name in operator.configs else None
            if not isinstance(config, ExpiringTimeKeyConfig) or not config.generational:
                continue
            footers = [file.footer for path in listed.paths if (file := files.get(path))]
            if not config.schema.hashed_indices and None not in footers:
                yield from _unkeyed(checkpoint, operator, name, [f for f in footers if f])


def _unkeyed(
    checkpoint: Checkpoint, operator: OperatorCheckpoint, name: TableName, footers: list[Footer]
) -> Iterator[Finding]:
    rows = sum(footer.rows for footer in footers)
    batches = sum(footer.batches for footer in footers)
    evidence = unkeyed_loss(operator.operator, name, rows, batches)
    if evidence is not None:
        step = (
            "before it is started again, rewrite the table's files: of `a` the one row with the "
            "largest _generation, of `b` the newest of each tuple, one row a row group"
        )
        yield warning("unkeyed-aggregate", checkpoint.ref, evidence, step)


def unkeyed_loss(operator: OperatorId, name: TableName, rows: int, batches: int) -> str | None:
    """Return what Arroyo's restart loses of a table of an aggregate without GROUP BY.

    Args:
        rows, batches: stored rows, and record batches in which a restore reads them.
    """
    if rows <= batches:
        return None
    return (
        f"un-keyed aggregate {operator}.{name} has {rows} rows in {batches} record batches; Arroyo "
        f"restores the first of each and loses {rows - batches}"
    )


# ---- tables --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedKeys:
    """Keys that several subtasks wrote in one epoch.

    Attributes:
        directory: the directory of the epoch's files.
        keys: the number of such keys.
        differ: the number of these keys that have different values.
    """

    operator: OperatorId
    table: TableName
    directory: StatePath
    keys: int
    differ: int
    subtasks: tuple[int, ...]


def shared_key_findings(shared: Collection[SharedKeys], *, managed: bool) -> Iterator[Finding]:
    """Find keys of global keyed tables that several subtasks wrote in one epoch.

    Some Arroyo connectors write one key from every subtask; in Arroyo jobs only different values
    are reported.
    """
    wins = "the later in the replay order wins" if managed else "which one wins is random"
    step = "key the operator's input so that one subtask owns each key, or prefix the keys"
    if not managed:
        step = "run the operator with parallelism 1, or expect the value of any of the subtasks"
    for item in shared:
        if not managed and not item.differ:
            continue
        evidence = (
            f"subtasks {', '.join(map(str, item.subtasks))} wrote {item.keys} keys of "
            f"{item.operator}.{item.table} in the same epoch, {item.differ} of them with other "
            f"values; {wins}"
        )
        yield warning("key-written-twice", item.directory, evidence, step)


def unknown_table_findings(
    unknown: Mapping[tuple[OperatorId, TableName], str],
) -> Iterator[Finding]:
    """Report each table whose values could not be decoded, once.

    Args:
        unknown: the reason by table, with how to register its types.
    """
    for (operator, table), why in unknown.items():
        yield note(
            "table-unknown", f"{operator}.{table}", why, "register its types to verify its values"
        )
