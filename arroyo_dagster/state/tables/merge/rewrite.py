"""Rewrite one part of a table of an Arroyo job: read, select rows by the table's rule, write under
a new name, read back.

The same code runs in process and in Spark's workers. If a part cannot be rewritten, the reason is
returned: the table stays as it is, and the others are still rewritten.

Source: crates/arroyo-state/src/tables/expiring_time_key_map.rs and
crates/arroyo-worker/src/arrow/incremental_aggregator.rs (`arroyo-state.md` 5.4, 5.7, 9.8).
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.digest import digest_rows
from arroyo_dagster.state.codec.parquet import (
    BATCH_ROWS,
    encode_rows,
    encode_single_rows,
    read_facts,
)
from arroyo_dagster.state.codec.row_groups import DataFile
from arroyo_dagster.state.codec.schema import file_schema, memory_schema
from arroyo_dagster.state.model.compaction import LeftOut, MergedRows, RowsDigest
from arroyo_dagster.state.model.ids import Epoch, StatePath, WorkerGeneration
from arroyo_dagster.state.model.keys import KeyRange, server_for_hash
from arroyo_dagster.state.model.layout import JobPaths, rewritten_attempt
from arroyo_dagster.state.model.rewrite import RewriteRule, RewriteShard, TableRewrite
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, TimeFile
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.generational import (
    RowLayout,
    first_of_batches,
    newest,
    restored,
    role_of,
)
from arroyo_dagster.state.tables.grouping import group_codes
from arroyo_dagster.state.tables.live_rows import NANOS_PER_MICRO, StoredRows, not_older
from arroyo_dagster.state.tables.merge.conditions import RowCondition
from arroyo_dagster.state.tables.restoring import fresh_batches
from arroyo_dagster.state.tables.time_files import batch_numbers, in_range

MAX_UNKEYED_ROWS = 100_000
"""An aggregate without GROUP BY needs one row group per row, of 500 bytes in the footer. More rows
would make a footer of 50 MB or more, which every reader decodes as a whole.
"""

TOO_OLD = "rows older than the retention"
OLD_GENERATIONS = "rows that a newer generation hides"
GONE = "keys and tuples without any remaining rows"
REMOVED = "rows that the edit removes"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteTask:
    """A part of a table to rewrite, and all that is needed to do it in another process.

    Attributes:
        epoch, worker_generation: the checkpoint in whose directory the new file is written.
        keys: one of the table's parts.
        removes: rows that are left out on purpose; None = none.
    """

    paths: JobPaths
    epoch: Epoch
    worker_generation: WorkerGeneration | None
    config: ExpiringTimeKeyConfig
    table: TableRewrite
    keys: KeyRange
    removes: RowCondition | None = None

    @property
    def inputs(self) -> tuple[TimeFile, ...]:
        """The files that hold rows of this part, in the order in which a restore reads them."""
        files = (entry.file for entry in self.table.inputs)
        return tuple(f for f in files if self.keys.intersects(f.min_routing_key, f.max_routing_key))

    @property
    def size_bytes(self) -> int:
        """The total size of its inputs, which may also hold rows of other parts."""
        inside = {file.path for file in self.inputs}
        return sum(entry.size_bytes for entry in self.table.inputs if entry.file.path in inside)

    def output(self) -> StatePath:
        """Return a name that no other attempt and no object of Arroyo has."""
        return self.paths.data_file(
            self.table.operator,
            self.table.table,
            server_for_hash(self.keys.start, self.table.parallelism),
            self.epoch,
            self.worker_generation,
            attempt=rewritten_attempt(uuid.uuid4().hex),
        )


def unwritable(config: ExpiringTimeKeyConfig) -> str | None:
    """Return why the columns of a table would not read back exactly as they are; None = they do.

    Raises:
        FormatError: the stored schema is broken.
    """
    schema = file_schema(config)
    try:
        written = read_facts(encode_rows(schema.empty_table()), config.table).schema
    except (pa.ArrowException, OSError) as error:
        return f"its columns cannot be written here ({error})"
    if not written.equals(schema, check_metadata=True):
        wrong = [a.name for a, b in zip(schema, written, strict=True) if not a.equals(b, True)]
        return f"its columns cannot be written back exactly: {', '.join(wrong)}"
    return None


def rewrite_shard(store: ObjectStore, task: RewriteTask) -> RewriteShard | LeftOut:
    """Rewrite one part of a table and read it back.

    Returns:
        The part; or the reason why the table must stay as it is.

    Raises:
        FormatError: an input is broken.
        NotFoundError: an input no longer exists because the job has let it expire.
    """
    rows = _Rows(task)
    parts: list[StoredRows] = []
    for file in task.inputs:
        part = _read(store, file, rows.schema, task.keys)
        problem = part if isinstance(part, str) else _strange(part, file)
        if problem is not None:
            return _left_out(task, problem)
        assert isinstance(part, StoredRows)
        parts.append(part)
    if task.table.rule is RewriteRule.UNKEYED:
        kept = rows.kept(parts)
        if kept.num_rows > MAX_UNKEYED_ROWS:
            return _left_out(
                task,
                f"{kept.num_rows} tuples of an aggregate without GROUP BY would need a row group "
                f"each; {MAX_UNKEYED_ROWS} are the most",
            )
    return _written(store, task, rows, parts)


def _left_out(task: RewriteTask, reason: str) -> LeftOut:
    return LeftOut(operator=task.table.operator, table=task.table.table, reason=reason)


def _strange(part: StoredRows, file: TimeFile) -> str | None:
    if part.inserts_only:
        return None
    return f"{file.path} holds operations other than Insert, which no Arroyo writes or reads"


def _read(
    store: ObjectStore, file: TimeFile, schema: pa.Schema, keys: KeyRange
) -> StoredRows | str:
    """Read a file's rows in a key range, with all columns, and the record batch of each row."""
    covered = keys.covers(file.min_routing_key, file.max_routing_key)
    with store.open_input(file.path) as source:
        data = DataFile(source.read() if covered else source, file.path)
        if not data.schema.equals(schema, check_metadata=True):
            return f"{file.path} has other columns than its table: {data.schema.to_string()}"
        width, rows_of = len(schema), data.row_groups
        groups = list(range(len(rows_of)))
        if not covered:
            groups = data.groups_within(width - 2, keys.start, keys.end, groups)
        rows = data.read(range(width), groups)
        batches = batch_numbers([rows_of[group] for group in groups])
    if not covered:
        inside = in_range(rows.column(width - 2), keys)
        rows, batches = rows.filter(inside), batches[inside.to_numpy()]
    return StoredRows(rows, rows.column(width - 1), batches)


# ---- row selection -------------------------------------------------------------------------------


class _Rows:
    """The rule of a table, applied to rows as stored."""

    def __init__(self, task: RewriteTask) -> None:
        memory = memory_schema(task.config)
        self.rule = task.table.rule
        self.schema = file_schema(task.config)
        self.time_at = task.config.schema.timestamp_index
        self.cutoff_micros = task.table.cutoff_micros
        self.removes = task.removes
        self.role = role_of(task.config, managed=False)
        self.layout = RowLayout.of(task.config, memory, managed=False)

    def together(self, parts: Sequence[pa.Table]) -> pa.Table:
        """Concatenate rows of several files, in their order."""
        return pa.concat_tables([self.schema.empty_table(), *parts])

    def kept(self, parts: Sequence[StoredRows]) -> pa.Table:
        """Return the rows to keep, in their order: those that a restore loads from these files,
        without those that an edit removes.
        """
        return self.led(self._not_removed(self.loaded(parts)))

    def loaded(self, parts: Sequence[StoredRows]) -> pa.Table:
        """Return the rows that a restore loads from these files, in their order."""
        if self.rule is RewriteRule.BATCHES and self.cutoff_micros > 0:
            fresh = [
                fresh_batches(part, self.time_at, self.cutoff_micros)
                for part in parts
                if part.rows.num_rows
            ]
            return self.together(fresh)
        whole = self.together([part.rows for part in parts])
        if self.rule.aggregate:
            return restored(whole, self.layout, self.role)
        if self.cutoff_micros <= 0:
            return whole
        return whole.filter(not_older(whole.column(self.time_at), self.cutoff_micros))

    def to_write(self, parts: Sequence[StoredRows], kept: pa.Table) -> pa.Table:
        """Return the rows to write. If no row is kept, these are the rows that mark the keys as
        deleted: without them the table would stay as it was, and Arroyo, without GROUP BY, would
        find an older row. Without GROUP BY one such row suffices, because the others are not read.
        """
        if kept.num_rows or not self.rule.aggregate:
            return kept
        whole = self.together([part.rows for part in parts])
        removed = self._not_removed(newest(whole, self.layout))
        return removed.slice(0, 1) if self.rule is RewriteRule.UNKEYED else removed

    def visible(self, parts: Sequence[StoredRows]) -> pa.Table:
        """Return the rows that Arroyo finds: without GROUP BY the first of each record batch."""
        if self.rule is not RewriteRule.UNKEYED:
            return self.loaded(parts)
        first = [first_of_batches(part.rows, _numbers(part)) for part in parts]
        return restored(self.together(first), self.layout, self.role)

    def dropped(self, parts: Sequence[StoredRows], kept: pa.Table) -> dict[str, int]:
        """Return how many rows are not written, by reason."""
        rows = sum(part.rows.num_rows for part in parts)
        if self.rule.aggregate:
            all_newest = newest(self.together([part.rows for part in parts]), self.layout)
            others = self._not_removed(all_newest).num_rows
            counts = {
                OLD_GENERATIONS: rows - all_newest.num_rows,
                REMOVED: all_newest.num_rows - others,
                GONE: others - kept.num_rows,
            }
        else:
            loaded = self.loaded(parts)
            removed = loaded.num_rows - self._not_removed(loaded).num_rows
            counts = {TOO_OLD: rows - removed - kept.num_rows, REMOVED: removed}
        return {reason: count for reason, count in counts.items() if count}

    def arranged(self, kept: pa.Table) -> pa.Table:
        """Sort by event time, so that a restore splits the rows into few batches; for an updating
        join, with a row within the retention in each record batch.
        """
        times = kept.column(self.time_at)
        order = pc.sort_indices(times).to_numpy()  # stable, nulls last
        if self.rule is RewriteRule.BATCHES and self.cutoff_micros > 0:
            fresh = not_older(times, self.cutoff_micros).to_numpy()[order]
            order = _led(order, fresh)
        return kept if bool((order == np.arange(len(order))).all()) else kept.take(pa.array(order))

    def led(self, kept: pa.Table) -> pa.Table:
        """Return the rows that record batches can be made of, for an updating join.

        Each batch needs a row within the retention. If an edit removed such rows, the oldest of the
        rows that are too old may no longer have one, and a restore could not load them.
        """
        if self.removes is None or self.rule is not RewriteRule.BATCHES or self.cutoff_micros <= 0:
            return kept
        times = kept.column(self.time_at)
        fresh = not_older(times, self.cutoff_micros).to_numpy()
        old = np.flatnonzero(~fresh)
        most = int(fresh.sum()) * (BATCH_ROWS - 1)
        if len(old) <= most:
            return kept
        by_age = np.argsort(times.cast(pa.int64()).fill_null(0).to_numpy()[old], kind="stable")
        stays = np.sort(np.append(np.flatnonzero(fresh), old[by_age[len(old) - most :]]))
        return kept.take(pa.array(stays))

    def _not_removed(self, rows: pa.Table) -> pa.Table:
        if self.removes is None or not rows.num_rows:
            return rows
        return rows.filter(pc.invert(self.removes.mask(rows)))


def _numbers(part: StoredRows) -> npt.NDArray[np.int64]:
    assert part.batches is not None
    return part.batches


def _led(order: npt.NDArray[np.int64], fresh: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Put one of the `fresh` rows first in each record batch, unless all rows are fresh.

    There are enough: every other row comes from a batch that had a fresh one.
    """
    if fresh.all():
        return order
    batches = -(-len(order) // BATCH_ROWS)
    leaders = np.flatnonzero(fresh)[:batches]
    rest = np.delete(order, leaders)
    heads = np.arange(len(leaders)) * (BATCH_ROWS - 1)
    return np.insert(rest, heads, order[leaders])


# ---- writing -------------------------------------------------------------------------------------


def _written(
    store: ObjectStore, task: RewriteTask, rows: _Rows, found: Sequence[StoredRows]
) -> RewriteShard:
    kept = rows.kept(found)
    outputs: tuple[TimeFile, ...] = ()
    size = 0
    written = rows.to_write(found, kept)
    if written.num_rows:
        file, size = _write(store, task, rows, rows.arranged(written), found)
        outputs = (file,)
    read_back = [_read_back(store, file, rows.schema, task.keys) for file in outputs]
    return RewriteShard(
        merged=MergedRows(
            operator=task.table.operator,
            table=task.table.table,
            inputs=task.inputs,
            outputs=outputs,
        ),
        rows_in=sum(part.rows.num_rows for part in found),
        rows_out=sum(part.rows.num_rows for part in read_back),
        dropped=rows.dropped(found, written),
        size_bytes_in=task.size_bytes,
        size_bytes_out=size,
        before=digest_rows(kept),
        # Compares the rows that Arroyo will find, which proves more than that they are stored.
        after=digest_rows(rows.visible(read_back)) if read_back else RowsDigest(),
        repaired=_repaired(rows, found, kept),
    )


def _write(
    store: ObjectStore,
    task: RewriteTask,
    rows: _Rows,
    arranged: pa.Table,
    found: Sequence[StoredRows],
) -> tuple[TimeFile, int]:
    # Arroyo restores the first row of each record batch, and no batch spans two row groups: so rows
    # that count must not share one. (Copies of each row could fill the 1024 rows of today's batches
    # in one row group that compresses well, but a release with another batch size would lose rows.)
    one_by_one = rows.rule is RewriteRule.UNKEYED and arranged.num_rows > 1
    data = encode_single_rows(arranged) if one_by_one else encode_rows(arranged)
    path = task.output()
    hashes = pc.min_max(arranged.column(arranged.num_columns - 2))
    store.put(path, data)
    return TimeFile(
        # Of all parts: a newer file may belong to a part that leaves no row, and has no output.
        epoch=max(entry.file.epoch for entry in task.table.inputs),
        path=path,
        min_routing_key=hashes["min"].as_py(),
        max_routing_key=hashes["max"].as_py(),
        max_timestamp_micros=_newest_micros(task, rows, arranged, found),
        compaction_generation=task.table.compaction_generation,
    ), len(data)


def _newest_micros(
    task: RewriteTask, rows: _Rows, arranged: pa.Table, found: Sequence[StoredRows]
) -> int:
    """Return the largest event time, rounded down. A file whose metadata says less would expire too
    early.

    For an aggregate it is that of all rows read: the row that last changed a key may not be kept
    (its count decreased to 0), and the key lives on from its time.
    """
    times = arranged.column(rows.time_at)
    if times.null_count:
        return max(file.max_timestamp_micros for file in task.inputs)
    columns = [times]
    if rows.rule.aggregate:
        columns += [part.rows.column(rows.time_at) for part in found]
    newest_nanos = (pc.max(column).value for column in columns)
    return max(0, *(nanos or 0 for nanos in newest_nanos)) // NANOS_PER_MICRO


def _read_back(store: ObjectStore, file: TimeFile, schema: pa.Schema, keys: KeyRange) -> StoredRows:
    part = _read(store, file, schema, keys)
    if isinstance(part, str):
        raise InputError(
            f"a new file does not read back as it was written: {part}",
            path=file.path,
            next_step="report it; nothing was published",
        )
    return part


def _repaired(rows: _Rows, found: Sequence[StoredRows], kept: pa.Table) -> int:
    """Return how many of the kept rows Arroyo would not have found as they are."""
    if rows.rule is not RewriteRule.UNKEYED:
        return 0
    visible = rows.visible(found)
    combined = pa.concat_tables([visible, kept])
    codes = group_codes(combined.columns, combined.num_rows)
    return int((~np.isin(codes[visible.num_rows :], codes[: visible.num_rows])).sum())
