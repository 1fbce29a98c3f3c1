"""One merge of an expiring table, within the memory limit of the merge.

Rows without effect on others are streamed from the inputs, batch by batch, to the files of their
key range. If rows affect each other, or must be sorted, a key range is processed in parts that fit;
the inputs are read again for each part.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.errors import FormatError
from arroyo_dagster.state.codec.digest import digest_rows
from arroyo_dagster.state.codec.operations import INSERT
from arroyo_dagster.state.codec.sequence_digest import SequenceDigest
from arroyo_dagster.state.model.compaction import (
    Generations,
    MergedRows,
    MergeOutcome,
    RowsDigest,
    RowsMerge,
    SortOrder,
)
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.keys import KeyRange
from arroyo_dagster.state.model.tables import TimeFile
from arroyo_dagster.state.planning.compaction.policies import subranges
from arroyo_dagster.state.storage.concurrency import in_background, read_ahead
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.expiring_time_key import ExpiringTimeKeyTable
from arroyo_dagster.state.tables.generational import RowLayout, newest_at_any_cutoff
from arroyo_dagster.state.tables.live_rows import LiveRows, StoredRows, not_older
from arroyo_dagster.state.tables.merge.conditions import RowCondition, removed_rows
from arroyo_dagster.state.tables.merge.range_files import RangeFiles, routes
from arroyo_dagster.state.tables.time_files import TimeFileReader

BATCH_ROWS = 1 << 16
_WHOLE_BYTES = 1 << 24
"""Files up to this size are fetched as a whole, in advance."""
_AHEAD_BYTES = 3 << 24
_UNKNOWN_BYTES = 1 << 20
_LITTLE_BYTES = 1 << 18
_UNPACKED = 3
"""First estimate of the bytes of rows in memory per byte of a file."""

_MAX_RANGES = 16
"""At most this many parts at first; parts that turn out too large are split further."""

OnBytes = Callable[[int], None]
_Decode = Callable[[TimeFile, "bytes | BinaryIO", int], Iterator[pa.Table]]
_Chunks = Generator[tuple[TimeFile, pa.Table], None, None]


class _ActOnEachOther(Exception):  # not an error: the merge is restarted by ranges
    """A row that is not an insert was found."""


@dataclass(frozen=True, slots=True)
class _TooMuch:
    """A key range has more rows than fit; these ranges together are equal to it."""

    ranges: Sequence[KeyRange]


@dataclass(slots=True)
class _Tally:
    """Counts of the rows read and dropped, and the digest of those kept."""

    read: dict[StatePath, int] = field(default_factory=dict)
    rows_in: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    before: RowsDigest = field(default_factory=RowsDigest)

    def drop(self, reason: str, rows: int) -> None:
        if rows:
            self.dropped[reason] += rows


def merge_rows(
    table: ExpiringTimeKeyTable,
    store: ObjectStore,
    merge: RowsMerge,
    name: Callable[[KeyRange, str], StatePath],
    on_bytes: OnBytes = lambda count: None,
    removes: RowCondition | None = None,
) -> MergeOutcome:
    """Execute one merge, or one shard of it, and read its outputs back.

    Args:
        name: returns a new path for a file of a key range; its second argument is the suffix.
        on_bytes: called for every input with its size once it was read; again if it is read again.
        removes: rows that are left out on purpose, in a merge that keeps all others in their order:
            of a key with its deletes, of a time without them.

    Raises:
        FormatError: an input is broken, or has other columns than its table; or an output does not
            read back as written.
        NotFoundError: an input no longer exists.
    """
    return _RowsMerging(table, store, merge, name, on_bytes, removes).run()


class _RowsMerging:
    def __init__(
        self,
        table: ExpiringTimeKeyTable,
        store: ObjectStore,
        merge: RowsMerge,
        name: Callable[[KeyRange, str], StatePath],
        on_bytes: OnBytes,
        removes: RowCondition | None,
    ) -> None:
        self._removes = removes
        self._table = table
        self._store = store
        self._merge = merge
        self._on_bytes = on_bytes
        self._reader = TimeFileReader(table.config, store)
        self._files = RangeFiles(store, merge, table.file_schema, table.timestamp_index, name)
        self._tally = _Tally()
        self._texts: Collection[int] | None = None
        self._in_order: dict[int, SequenceDigest] = {}

    def run(self) -> MergeOutcome:
        merge = self._merge
        at_once = merge.generations is Generations.ALL and merge.form.sort is SortOrder.REPLAY
        if at_once:
            try:
                self._stream()
            except _ActOnEachOther:
                self._files.abandon()
                self._tally = _Tally()
                self._in_order.clear()
                at_once = False
        if not at_once:
            count = 1
            if self._table.is_divisible:
                bytes_of_range = self._merge.size_bytes * _UNPACKED // len(self._merge.ranges)
                count = min(_MAX_RANGES, 1 + bytes_of_range // self._merge.form.memory_bytes)
            for index, keys in enumerate(self._merge.ranges):
                left = list(reversed(subranges(keys, count)))
                while left:
                    piece = left.pop()
                    loaded = self._hold(piece)
                    if isinstance(loaded, _TooMuch):
                        left.extend(reversed(loaded.ranges))
                        continue
                    self._files.add(index, self._merged(loaded))
                    if left and self._merge.form.sort is SortOrder.TIME:
                        self._files.close_files()  # every file is sorted by time
        written = self._files.close()
        after = self._read_back(written)
        outputs = tuple(file for files in written.values() for file in files)
        tally = self._tally
        return MergeOutcome(
            merged=MergedRows(
                operator=merge.operator, table=merge.table, inputs=merge.inputs, outputs=outputs
            ),
            rows_in=tally.rows_in,
            rows_out=after.rows,
            dropped=dict(tally.dropped),
            size_bytes_in=merge.size_bytes,
            size_bytes_out=self._files.size_bytes,
            before=tally.before,
            after=after,
            input_rows=tally.read,
        )

    # ---- reading ---------------------------------------------------------------------------------

    def _chunks(self, ranges: Sequence[KeyRange], decode: _Decode) -> _Chunks:
        """Yield the rows of the inputs that may have keys of `ranges`, in replay order."""
        inputs = self._merge.inputs
        sizes = self._merge.sizes or (_UNKNOWN_BYTES,) * len(inputs)
        sized = [
            (file, size)
            for file, size in zip(inputs, sizes, strict=True)
            if any(keys.intersects(file.min_routing_key, file.max_routing_key) for keys in ranges)
        ]
        decoded = self._decoded(sized, decode, self._on_bytes)
        return self._beside(decoded, self._merge.size_bytes)

    def _beside(self, decoded: _Chunks, size_bytes: int) -> _Chunks:
        """Decode in a thread while rows are merged and written, unless the input is small."""
        return decoded if size_bytes < _LITTLE_BYTES else in_background(decoded)

    def _decoded(
        self,
        files: Sequence[tuple[TimeFile, int]],
        decode: _Decode,
        on_bytes: OnBytes = lambda count: None,
    ) -> _Chunks:
        def fetched(item: tuple[TimeFile, int]) -> bytes | None:
            file, size = item
            return self._store.read(file.path) if size <= _WHOLE_BYTES else None

        weighed = ((item, item[1] if item[1] <= _WHOLE_BYTES else 0) for item in files)
        sources = read_ahead(fetched, weighed, _AHEAD_BYTES)
        for (file, size), data in zip(files, sources, strict=True):
            with ExitStack() as opened:
                source: bytes | BinaryIO = (
                    opened.enter_context(self._store.open_input(file.path))
                    if data is None
                    else data
                )
                for rows in decode(file, source, BATCH_ROWS):
                    yield file, rows
            on_bytes(size)

    # ---- streaming -------------------------------------------------------------------------------

    def _stream(self) -> None:
        merge, tally = self._merge, self._tally
        with closing(self._chunks(merge.ranges, self._with_texts)) as chunks:
            for file, chunk in chunks:
                tally.read[file.path] = tally.read.get(file.path, 0) + chunk.num_rows
                for index, rows in routes(chunk, merge.ranges):
                    if merge.from_oldest and not _inserts_only(rows):
                        raise _ActOnEachOther
                    tally.rows_in += rows.num_rows
                    kept = self._not_removed(self._not_expired(rows))
                    if index not in self._in_order:
                        self._in_order[index] = SequenceDigest(index, _dictionaries(kept.schema))
                    self._in_order[index].add(kept)
                    self._files.add(index, kept)
        tally.before = sum((digest.finish() for digest in self._in_order.values()), RowsDigest())

    def _with_texts(
        self, file: TimeFile, source: bytes | BinaryIO, batch_rows: int
    ) -> Iterator[pa.Table]:
        """Decode texts that repeat as dictionaries: those that repeat in the first input."""
        for rows in self._reader.stream_file(file, source, batch_rows, self._texts):
            self._texts = _dictionaries(rows.schema)
            yield rows

    def _not_expired(self, rows: pa.Table) -> pa.Table:
        if self._merge.cutoff_micros <= 0:
            return rows
        fresh = not_older(rows.column(self._table.timestamp_index), self._merge.cutoff_micros)
        kept = rows.filter(fresh)
        self._tally.drop("rows older than the retention", rows.num_rows - kept.num_rows)
        return kept

    def _not_removed(self, rows: pa.Table) -> pa.Table:
        if self._removes is None:
            return rows
        kept = rows.filter(pc.invert(removed_rows(self._removes, rows, rows.column(-1))))
        self._tally.drop("rows that the edit removes", rows.num_rows - kept.num_rows)
        return kept

    # ---- by key ranges ---------------------------------------------------------------------------

    def _hold(self, piece: KeyRange) -> list[StoredRows] | _TooMuch:
        """Return all rows of a key range; or narrower ranges, if it is divisible and too large."""
        loaded: list[StoredRows] = []
        size = 0
        read: Counter[StatePath] = Counter()
        divisible = self._table.is_divisible and piece.end > piece.start
        with closing(self._chunks([piece], self._reader.stream_file)) as chunks:
            for file, chunk in chunks:
                read[file.path] += chunk.num_rows
                for _, rows in routes(chunk, [piece]):
                    loaded.append(StoredRows(rows, rows.column(rows.num_columns - 1)))
                    size += rows.nbytes
                if divisible and size > self._merge.form.memory_bytes:
                    return _TooMuch(_split_range(piece, loaded))
        self._tally.read.update(read)
        self._tally.rows_in += sum(part.rows.num_rows for part in loaded)
        return loaded

    def _merged(self, held: list[StoredRows]) -> pa.Table:
        """Return the rows of a key range that are kept, in the requested order."""
        merge, tally = self._merge, self._tally
        live = LiveRows(self._table.form.as_stored(self._table.file_schema))
        deletes = sum(part.deletes for part in held)
        rows_in = sum(part.rows.num_rows for part in held)
        act = deletes > 0 and not merge.from_oldest
        if merge.from_oldest:
            live.replay(held)
            tally.drop("delete operations, applied", deletes)
            tally.drop("rows deleted", rows_in - deletes - len(live))
        else:
            live.append(*(part.rows for part in held))
        rows = self._not_expired(live.rows())
        if not act:  # the rows that a delete leaves depend on older files
            kept = self._deduplicated(rows)
            tally.drop("rows hidden by a newer generation", rows.num_rows - kept.num_rows)
            rows = kept
        tally.before += digest_rows(rows)
        sort = self._merge.form.sort
        # A delete affects earlier rows: the order of its key's rows must stay.
        movable = not act or (sort is SortOrder.KEY and self._table.is_divisible)
        if sort is SortOrder.REPLAY or not movable:
            return rows
        index = rows.num_columns - 2 if sort is SortOrder.KEY else self._table.timestamp_index
        return rows.take(pc.sort_indices(rows.column(index)))  # stable

    def _deduplicated(self, rows: pa.Table) -> pa.Table:
        if self._merge.generations is Generations.ALL:
            return rows
        layout = RowLayout.of(self._table.config, self._table.memory_schema, managed=True)
        return newest_at_any_cutoff(rows, layout)

    # ---- reading back ----------------------------------------------------------------------------

    def _read_back(self, written: Mapping[int, Sequence[TimeFile]]) -> RowsDigest:
        """Return the digest of the rows in the new files: in their order, if it was kept."""
        if self._in_order:
            return sum(
                (self._read_in_order(i, files) for i, files in written.items()), RowsDigest()
            )
        total = RowsDigest()
        for files in written.values():
            for rows in self._written_rows(files, self._reader.read_back):
                total += digest_rows(rows)
        return total

    def _read_in_order(self, at: int, files: Sequence[TimeFile]) -> RowsDigest:
        expected = self._in_order[at]

        def decode(file: TimeFile, source: bytes | BinaryIO, batch_rows: int) -> Iterator[pa.Table]:
            return self._reader.read_back(file, source, batch_rows, expected.texts)

        digest = SequenceDigest(at, expected.texts, expected.chunk_rows)
        for rows in self._written_rows(files, decode):
            digest.add(rows)
        return digest.finish()

    def _written_rows(self, files: Sequence[TimeFile], decode: _Decode) -> Iterator[pa.Table]:
        sizes = self._files.sizes
        decoded = self._decoded([(file, sizes[file.path]) for file in files], decode)
        total = sum(sizes[file.path] for file in files)
        with closing(self._beside(decoded, total)) as chunks:
            for file, rows in chunks:
                self._check_bounds(file, rows)
                yield rows

    def _check_bounds(self, file: TimeFile, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        hashes = rows.column(rows.num_columns - 2).to_numpy()
        low, high = int(hashes.min()), int(hashes.max())
        if not file.min_routing_key <= low <= high <= file.max_routing_key:
            raise FormatError(
                "a merged file, read back, holds keys outside of its bounds",
                path=file.path,
                next_step="keep the file and report it; nothing was published",
            )


def _dictionaries(schema: pa.Schema) -> frozenset[int]:
    """Return the columns of text that are dictionaries in these rows."""
    return frozenset(i for i, field in enumerate(schema) if pa.types.is_dictionary(field.type))


def _inserts_only(rows: pa.Table) -> bool:
    operations = rows.column(rows.num_columns - 1)
    if pa.types.is_dictionary(operations.type):
        if all(_inserts(chunk.dictionary) for chunk in operations.chunks):
            return True
        operations = operations.cast(operations.type.value_type)
    return _inserts(operations)


def _inserts(operations: pa.Array | pa.ChunkedArray) -> bool:
    return not pc.any(pc.not_equal(operations, INSERT), min_count=0).as_py()


def _split_range(piece: KeyRange, held: Sequence[StoredRows]) -> list[KeyRange]:
    """Return two ranges of about as many rows, or three around a key that has most of them."""
    hash_at = held[0].rows.num_columns - 2
    hashes = np.concatenate([part.rows.column(hash_at).to_numpy() for part in held])
    middle = int(np.partition(hashes, len(hashes) // 2)[len(hashes) // 2])
    edges = sorted({piece.start, middle, middle + 1, piece.end + 1})
    if np.count_nonzero(hashes == middle) * 2 < len(hashes):
        edges = sorted({piece.start, max(middle, piece.start + 1), piece.end + 1})
    return [KeyRange(start, end - 1) for start, end in itertools.pairwise(edges)]
