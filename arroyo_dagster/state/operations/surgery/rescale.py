"""A restart of a stopped Arroyo job at another parallelism: what its subtasks would load, and the
tables whose files are split for them.

Arroyo itself assigns the rows of a file by key range at a restore, and every subtask reads all
entries of a global keyed table. So the rows are the same; a file that several subtasks need is read
by each of them.

Source: arroyo-state.md 4.3, 5.4 and 9.8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from arroyo_dagster.errors import InputError, ProtocolError
from arroyo_dagster.state.codec.digest import digest_rows
from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.compaction import RowsDigest
from arroyo_dagster.state.model.ids import TableName
from arroyo_dagster.state.model.keys import KeyRange, range_for_server
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.rewrite import RewriteRule, TableRewrite
from arroyo_dagster.state.model.surgery.edits import Rescale
from arroyo_dagster.state.model.surgery.plans import EditPrecondition, TableAction, TableStep
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    GlobalKeyedFiles,
)
from arroyo_dagster.state.operations.catalog.footers import read_stored_file
from arroyo_dagster.state.operations.surgery.entries import read_global_tables
from arroyo_dagster.state.operations.surgery.rows import RewrittenRows, expiring_tables
from arroyo_dagster.state.planning.compaction.rewrite import (
    TableFacts,
    TableKey,
    rule_for,
    whole_table,
)
from arroyo_dagster.state.planning.restore.checkpoint import cutoff_micros
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.known.catalogue import default_catalogue
from arroyo_dagster.state.tables.live_rows import not_older
from arroyo_dagster.state.tables.restoring import restored_rows

_ONE_PARALLELISM = frozenset({"nexmark source state", "AsyncMapOperator state"})
"""Tables whose entries Arroyo restores wrongly, or not at all, at another parallelism."""
MAX_RESTORES = 64
"""How many restores of each table prove a rescale at most. Each may read all of its files."""
MAX_SUBTASKS = 1_000
"""The maximum parallelism of a rescale."""
_IMPULSE = "impulse source state"

LoadedRows = Mapping[TableKey, RowsDigest]
"""By expiring table, the rows that all subtasks together load."""


@dataclass(frozen=True, slots=True)
class Rescaled:
    """The tables of an epoch at another parallelism.

    Attributes:
        changed: the tables whose files are split.
        stays: why each other one stays.
        loaded: what all subtasks load, which is the same before and after.
        evidence: of that.
        duplicate_outputs, missing_outputs: as of `EditPlan`.
    """

    changed: tuple[RewrittenRows, ...]
    stays: Mapping[TableKey, str]
    loaded: LoadedRows
    evidence: EditPrecondition
    duplicate_outputs: tuple[str, ...] = ()
    missing_outputs: tuple[str, ...] = ()


def why_one_parallelism(
    operator: OperatorCheckpoint, name: TableName, parallelism: int
) -> str | None:
    """Return why a table cannot be restored at another parallelism; None = it can be."""
    if operator.parallelism == parallelism:
        return None
    if not isinstance(operator.tables[name], GlobalKeyedFiles):
        return None
    config = operator.configs.get(name)
    described = None if config is None else default_catalogue().describe(operator.operator, config)
    if config is not None and described and config.config.description not in _ONE_PARALLELISM:
        return None
    return (
        f"entries of this table cannot be restored at parallelism {parallelism}, only at "
        f"{operator.parallelism}"
    )


def rescaled(
    store: ObjectStore, edit: Rescale, checkpoint: Checkpoint, facts: TableFacts
) -> Rescaled:
    """Find the files that several of the new subtasks would read, and prove that the new subtasks
    load what the old ones load. Reads every row.

    Raises:
        InputError: the parallelism is out of range, or a table cannot be restored at it.
        ProtocolError: the new subtasks would load other rows than the old ones.
        FormatError, NotFoundError: a file is broken, or missing.
    """
    _check_parallelism(edit.parallelism)
    for operator in checkpoint.operators:
        for name in operator.tables:
            reason = why_one_parallelism(operator, name, edit.parallelism)
            if reason is not None:
                raise InputError(
                    reason,
                    operator=operator.operator,
                    table=name,
                    next_step=f"start the job at parallelism {operator.parallelism}; nothing was "
                    "changed",
                )
    before = loaded_rows(store, checkpoint, None)
    after = loaded_rows(store, checkpoint, edit.parallelism)
    _check_same(checkpoint, before, after)
    twice, never = _impulses(store, checkpoint, edit.parallelism)
    changed, stays = _splits(checkpoint, facts, edit.parallelism, after)
    return Rescaled(
        changed=changed,
        stays=stays,
        loaded=after,
        evidence=EditPrecondition(
            name=f"{edit.parallelism} subtasks load what the present ones load",
            met=True,
            evidence=_summary(after),
        ),
        duplicate_outputs=tuple(twice),
        missing_outputs=tuple(never),
    )


def _check_parallelism(parallelism: int) -> None:
    """Refuse a parallelism that Arroyo may not run, before anything is read."""
    if not 1 <= parallelism <= MAX_SUBTASKS:
        raise InputError(
            f"a job can be rescaled to 1 to {MAX_SUBTASKS} subtasks, and not to {parallelism}: "
            "Arroyo's data files have three digits for the subtask, so more were never seen, and "
            "each subtask gets a file of its own from every table",
            next_step="name the parallelism that the pipeline will have; Arroyo needs a task slot "
            "for each subtask",
        )


def check_rescaled(
    store: ObjectStore, checkpoint: Checkpoint, parallelism: int, loaded: LoadedRows
) -> str:
    """Check that the subtasks load the planned rows from new files, and return the evidence.

    Args:
        checkpoint: with the new lists.

    Raises:
        ProtocolError: they would load others; nothing was published.
    """
    reloaded = loaded_rows(store, checkpoint, parallelism)
    _check_same(checkpoint, loaded, reloaded)
    return f"{parallelism} subtasks load from the new files: {_summary(reloaded)}"


def loaded_rows(store: ObjectStore, checkpoint: Checkpoint, parallelism: int | None) -> LoadedRows:
    """Return what all subtasks together load of each expiring table.

    Of an updating join these are the rows within its retention: which older ones Arroyo keeps
    depends on how its record batches are filtered, and so on the parallelism.

    Args:
        parallelism: None = each operator's own.
    """
    digests = {}
    for table in expiring_tables(checkpoint):
        subtasks = parallelism or table.operator.parallelism
        most = MAX_RESTORES if _bounds_hold(store, table.files, subtasks) else subtasks
        digest = RowsDigest()
        for keys in _ranges(subtasks, most):
            rows = restored_rows(store, table.operator, table.name, managed=False, keys=keys).rows
            digest += digest_rows(_within_retention(rows, table.operator, table.config))
        digests[table.key] = digest
    return digests


def _bounds_hold(store: ObjectStore, files: ExpiringTimeKeyFiles, subtasks: int) -> bool:
    """Whether the bounds that are listed for each file are those of its rows, so that neighbours
    open together the files that each opens alone. Reads nothing where each is restored anyway.
    """
    if subtasks <= MAX_RESTORES:
        return True
    for file, stored in zip(
        files.files,
        concurrently(lambda file: read_stored_file(store, file.path), files.files),
        strict=True,
    ):
        if stored is None or stored.min_routing_key is None or stored.max_routing_key is None:
            return False
        if not (
            file.min_routing_key <= stored.min_routing_key
            and stored.max_routing_key <= file.max_routing_key
        ):
            return False
    return True


def _ranges(subtasks: int, most: int) -> Iterator[KeyRange]:
    """Yield the keys of each subtask, or of neighbours together, so that there are at most `most`.

    No rule of a restore compares keys of two subtasks.
    """
    step = -(-subtasks // most)
    for first in range(0, subtasks, step):
        last = min(first + step, subtasks) - 1
        start = range_for_server(first, subtasks).start
        yield KeyRange(start, range_for_server(last, subtasks).end)


def _within_retention(
    rows: pa.Table, operator: OperatorCheckpoint, config: ExpiringTimeKeyConfig
) -> pa.Table:
    if rule_for(config) is not RewriteRule.BATCHES:
        return rows
    cutoff = cutoff_micros(operator.min_watermark_micros, config.retention_micros)
    return rows.filter(not_older(rows.column(config.schema.timestamp_index), cutoff))


def _check_same(checkpoint: Checkpoint, before: LoadedRows, after: LoadedRows) -> None:
    for (operator, table), old in before.items():
        now = after.get((operator, table), RowsDigest())
        if now != old:
            raise ProtocolError(
                f"at the new parallelism {now.rows} rows would be loaded, of which not all are the "
                f"{old.rows} rows that are loaded now; nothing was published",
                job=JobPaths(checkpoint.job, checkpoint.pipeline).root,
                operator=operator,
                table=table,
                next_step="check the epoch with `arroyo-state verify`",
            )


def _summary(loaded: LoadedRows) -> str:
    total = sum(loaded.values(), RowsDigest())
    return f"{total.rows} rows in {len(loaded)} tables, digest {total.hash_sum:016x}"


# ---- files ---------------------------------------------------------------------------------------


def _splits(
    checkpoint: Checkpoint, facts: TableFacts, parallelism: int, loaded: LoadedRows
) -> tuple[tuple[RewrittenRows, ...], dict[TableKey, str]]:
    rewrites: dict[TableKey, TableRewrite] = {}
    stays: dict[TableKey, str] = {}
    shared = set()
    for table in expiring_tables(checkpoint):
        table_rewrite = whole_table(table.operator, table.name, facts, parallelism)
        if isinstance(table_rewrite, str):
            stays[table.key] = f"each subtask filters its files: {table_rewrite}"
            continue
        rewrites[table.key] = table_rewrite
        if any(len(file.owners(parallelism)) > 1 for file in table.files.files):
            shared.add(table.key)
    # Both tables of an aggregate are rewritten together, or neither is.
    aggregates = {key[0] for key in shared if rewrites[key].rule.aggregate}
    stuck = {key[0] for key in stays}
    changed = []
    for key, rewrite in rewrites.items():
        if rewrite.rule.aggregate and key[0] in aggregates & stuck:
            stays[key] = "each subtask filters its files: the other table of its aggregate stays"
        elif key in shared or (rewrite.rule.aggregate and key[0] in aggregates):
            changed.append(_split(rewrite, parallelism, loaded[key].rows))
        else:
            stays[key] = f"each of its files belongs to one of {parallelism} subtasks"
    return tuple(changed), stays


def _split(rewrite: TableRewrite, parallelism: int, rows: int) -> RewrittenRows:
    step = TableStep(
        operator=rewrite.operator,
        table=rewrite.table,
        action=TableAction.CHANGED,
        reason=f"{len(rewrite.inputs)} files become {len(rewrite.parts)} at most, each of one of "
        f"{parallelism} subtasks",
        rows=rows,
        files=rewrite.paths,
    )
    return RewrittenRows(rewrite, None, step)


# ---- sources -------------------------------------------------------------------------------------


def _impulses(
    store: ObjectStore, checkpoint: Checkpoint, parallelism: int
) -> tuple[list[str], list[str]]:
    """Return what the rows of impulse sources, which count by subtask, will show."""
    twice, never = [], []
    for table in read_global_tables(store, checkpoint, default_catalogue()):
        if table.config.config.description != _IMPULSE:
            continue
        operator = table.operator.operator
        subtasks = {key for _, key, _ in table.entries()}
        new = [subtask for subtask in range(parallelism) if subtask not in subtasks]
        gone = sorted(subtask for subtask in subtasks if subtask >= parallelism)
        if new:
            twice.append(f"{operator}: subtasks {_texts(new)} are new and count from 0")
        if gone:
            never.append(f"{operator}: subtasks {_texts(gone)} do not go on counting")
    return twice, never


def _texts(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def to_do(checkpoint: Checkpoint, parallelism: int) -> Iterator[str]:
    """Yield what is left to do before a start at another parallelism."""
    if any(operator.parallelism != parallelism for operator in checkpoint.operators):
        yield (
            f"before the job is started, set the parallelism of its pipeline to {parallelism} in "
            f'Arroyo: PATCH /api/v1/pipelines/ID {{"parallelism": {parallelism}}}'
        )


def not_tried(checkpoint: Checkpoint, parallelism: int) -> Iterator[str]:
    """Yield what is not known of a restart at another parallelism."""
    if any(operator.parallelism > parallelism for operator in checkpoint.operators):
        yield "a restart at a lower parallelism was not tried on a real Arroyo; at a higher one was"
