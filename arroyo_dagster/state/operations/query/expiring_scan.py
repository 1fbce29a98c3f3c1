"""Scans of expiring tables.

Filters on key columns are applied before removals and row generations, others after: whether a row
is current depends on all rows of its key.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.state.codec.hashing.ahash import HashVariant
from arroyo_dagster.state.codec.hashing.routing import key_hashes
from arroyo_dagster.state.codec.operations import operation_names
from arroyo_dagster.state.codec.plain import unique_names
from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.ids import StatePath, TableName
from arroyo_dagster.state.model.keys import KeyRange
from arroyo_dagster.state.model.tables import (
    OPERATION_COLUMN,
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    TimeFile,
)
from arroyo_dagster.state.operations.catalog.hash_variant import find_hash_variant
from arroyo_dagster.state.operations.query.scans import (
    COMPACTION_GENERATION,
    FILE,
    WRITTEN_EPOCH,
    ScanRequest,
    conform,
    value_type,
)
from arroyo_dagster.state.planning.restore.reads import ALL_KEYS, ReadPlan, plan_read
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.comparisons import ColumnFilter, Relation, filter_rows
from arroyo_dagster.state.tables.data_files import FooterCache
from arroyo_dagster.state.tables.expiring_time_key import ExpiringTimeKeyTable
from arroyo_dagster.state.tables.generational import (
    Role,
    RowLayout,
    newest_of,
    restored,
    role_of,
    tuples,
)
from arroyo_dagster.state.tables.key_index import Hashes, can_index, hashes_of
from arroyo_dagster.state.tables.live_rows import NANOS_PER_MICRO, LiveRows, StoredRows, nanos
from arroyo_dagster.state.tables.restoring import accumulator_tables, fresh_rows
from arroyo_dagster.state.tables.time_files import ReadRequest, TimeFileReader, ValueBounds

# ---- stored rows ---------------------------------------------------------------------------------
# The files of an expiring table at an epoch: those that a request needs, and their stored rows.

_MOST_KEYS = 1000
"""How many keys are hashed to choose files and row groups by their routing keys."""


@dataclass(frozen=True)
class StoredTable:
    """The stored rows of an expiring table.

    Attributes:
        checkpoint: the epoch, with only the operator of the table.
        raw: every row is wanted, whatever a restore would do with it.
    """

    store: ObjectStore
    checkpoint: Checkpoint
    name: TableName
    raw: bool = False

    @property
    def operator(self) -> OperatorCheckpoint:
        """The operator at the epoch."""
        return self.checkpoint.operators[0]

    @property
    def managed(self) -> bool:
        """Whether a managed job wrote the table. Arroyo treats every row as an insert."""
        return self.checkpoint.progress is not None

    @cached_property
    def _table(self) -> ExpiringTimeKeyTable:
        return ExpiringTimeKeyTable(self.operator.configs[self.name], self.store)

    @property
    def _config(self) -> ExpiringTimeKeyConfig:
        return self._table.config

    @cached_property
    def _reader(self) -> TimeFileReader:
        return TimeFileReader(self._config, self.store, FooterCache(self.store))

    @cached_property
    def _plan(self) -> ReadPlan:
        listed = self.operator.tables[self.name]
        assert isinstance(listed, ExpiringTimeKeyFiles)
        if self.raw:
            return ReadPlan(listed.files, ALL_KEYS, 0)
        watermark = self.operator.min_watermark_micros
        return plan_read(self._config, listed, watermark, managed=self.managed)

    @property
    def paths(self) -> tuple[StatePath, ...]:
        """See `Scan`."""
        return tuple(file.path for file in self._plan.files)

    @property
    def key_columns(self) -> tuple[int, ...]:
        """The columns of the storage key: rows that affect each other are equal in them."""
        return self._table.key_indices

    @property
    def routing_columns(self) -> tuple[int, ...]:
        """The columns that are hashed to the routing key."""
        return self._config.schema.hashed_indices

    @property
    def variant(self) -> HashVariant:
        """The build that hashed the keys; if several are possible, the first of them."""
        return next(iter(self._variants), HashVariant.FALLBACK)

    @property
    def cutoff_micros(self) -> int:
        """The event time before which rows have expired; 0 = none has."""
        return self._plan.cutoff_micros

    def _of_keys(self, request: ScanRequest) -> ScanRequest:
        """Leave out what the routing keys of the filters exclude."""
        fields = [(at, self._table.memory_schema.field(at).type) for at in self.routing_columns]
        hashes = _wanted_hashes(request.filters, fields, lambda: self._variants)
        if hashes is None:
            return request
        within = [key for key in hashes if request.keys.contains(key)]
        if not within:
            return replace(request, files=frozenset())
        files = [
            file.path
            for file in self._files(request, ())
            if any(file.min_routing_key <= key <= file.max_routing_key for key in within)
        ]
        request = replace(request, files=frozenset(files))
        if self._plan.whole_batches:
            return request  # whether a row is kept depends on the rows of other keys beside it
        return replace(request, keys=KeyRange(min(within), max(within)))

    @cached_property
    def _variants(self) -> tuple[HashVariant, ...]:
        """The builds that may have hashed the keys; empty = none that is known."""
        if self.managed:
            return (HashVariant.FALLBACK,)
        return find_hash_variant(self.store, self.checkpoint).possible

    def key_hashes_in(
        self, files: Collection[StatePath], before_micros: int | None = None
    ) -> Iterator[Hashes]:
        """Yield hashes, for a `KeySet`, of the keys of the stored rows in some files.

        Args:
            before_micros: only of rows with an event time before it; None = all.
        """
        time_index = self._table.timestamp_index
        columns = sorted({*self.key_columns, time_index})
        request = ReadRequest(keys=ALL_KEYS, columns=tuple(columns))
        planned = [file for file in self._plan.files if file.path in files]
        for part in self._reader.chunks(planned, request):
            rows = part.rows
            if before_micros is not None:
                limit = nanos(before_micros * NANOS_PER_MICRO)
                rows = rows.filter(pc.less(rows.column(columns.index(time_index)), limit))
            if rows.num_rows:
                yield hashes_of([rows.column(columns.index(key)) for key in self.key_columns])

    def _parts(
        self, request: ScanRequest, columns: Sequence[int], filters: Sequence[ColumnFilter]
    ) -> Iterator[StoredRows]:
        """Yield stored rows, without row groups that cannot match the filters."""
        width = len(self._table.file_schema)
        bounds = [
            ValueBounds(term.place, *limits)
            for term in filters
            if term.place < width - 1 and (limits := term.bounds()) is not None
        ]
        read = ReadRequest(
            keys=request.keys,
            columns=tuple(columns),
            cutoff_micros=self._plan.cutoff_micros,
            batches=self._plan.whole_batches,
            bounds=tuple(bounds),
        )
        return self._reader.chunks(self._files(request, filters), read)

    def _files(self, request: ScanRequest, filters: Sequence[ColumnFilter]) -> list[TimeFile]:
        """Return the files that may hold rows that match filters.

        Only filters that are applied before removals and row generations: a file without a row that
        matches another one may still hold what hides a row of another file.
        """
        files = self._plan.files
        if request.files is not None:
            files = tuple(file for file in files if file.path in request.files)
        times = [term for term in filters if term.place == self._table.timestamp_index]
        latest = [limits[0] for term in times if (limits := term.bounds()) is not None]
        oldest = max((bound for bound in latest if isinstance(bound, int)), default=None)
        return [
            file for file in files if oldest is None or file.max_timestamp_micros >= oldest // 1000
        ]


def _wanted_hashes(
    given: Sequence[ColumnFilter],
    routing: Sequence[tuple[int, pa.DataType]],
    variants: Callable[[], Sequence[HashVariant]],
) -> list[int] | None:
    """Return the routing keys that rows which match can have; None = any.

    Args:
        routing: the columns that are hashed, and their types.
        variants: returns the builds that may have hashed them.
    """
    exact = (Relation.EQUAL, Relation.IN)
    filters = {term.place: term for term in given if term.relation in exact}
    values = [filters[place].values for place, _ in routing if place in filters]
    if not values or len(values) < len(routing) or math.prod(map(len, values)) > _MOST_KEYS:
        return None
    keys = list(itertools.product(*values))
    if not keys:
        return []
    columns = [
        pa.array(column, kind)
        for (_, kind), column in zip(routing, zip(*keys, strict=True), strict=True)
    ]
    by_variant = [key_hashes(columns, variant=variant).to_pylist() for variant in variants()]
    return [key for hashes in by_variant for key in hashes] if by_variant else None


# ---- expiring scan -------------------------------------------------------------------------------

_FIRST_DELETE = b"\x00\x00"
"""The smallest bytes after those of an insert; every other operation is at or above it."""


@dataclass(frozen=True)
class ExpiringScan(StoredTable):
    """Scans an expiring table; see `Scan`."""

    # ---- facts -----------------------------------------------------------------------------------

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns that the operator sees; a raw scan adds those of files and five more."""
        stored = self._table.file_schema if self.raw else self._table.memory_schema
        fields = [
            pa.field(name, value_type(field.type), field.nullable)
            for name, field in zip(unique_names(stored.names), stored, strict=True)
        ]
        if self.raw:
            fields[-1] = pa.field(OPERATION_COLUMN, pa.string(), nullable=False)
            fields.append(pa.field(FILE, pa.string(), nullable=False))
            fields.append(pa.field(WRITTEN_EPOCH, pa.int64(), nullable=False))
            fields.append(pa.field(COMPACTION_GENERATION, pa.int64(), nullable=False))
        return pa.schema(fields)

    @property
    def is_generational(self) -> bool:
        """Whether each key has one current row, the newest."""
        return self._config.generational and not self.raw

    @property
    def timestamp_name(self) -> str:
        """The column of event time."""
        return str(self.schema.field(self._table.timestamp_index).name)

    @property
    def divisible_by_file(self) -> bool:
        """See `Scan`."""
        return self.raw or not (self._config.generational or self._has_deletes)

    @property
    def divisible_by_key(self) -> bool:
        """See `Scan`."""
        if not self.routing_columns or self._plan.whole_batches:
            return False
        return self.divisible_by_file or self._table.is_divisible

    @property
    def divisible_by_key_set(self) -> bool:
        """Whether the rows of some keys can be scanned on their own."""
        columns = [self._table.memory_schema.field(index).type for index in self.key_columns]
        of_other_tables = self.is_generational and self._role is Role.TUPLES
        return not (self.raw or self._plan.whole_batches or of_other_tables) and can_index(columns)

    @property
    def _role(self) -> Role:
        return role_of(self._config, managed=self.managed)

    @cached_property
    def _has_deletes(self) -> bool:
        if not self.managed:
            return False
        operation = len(self._table.file_schema) - 1
        bounds = (ValueBounds(operation, _FIRST_DELETE, None),)
        request = ReadRequest(keys=ALL_KEYS, columns=(), bounds=bounds)
        return any(part.deletes for part in self._reader.stream(self._plan.files, request))

    # ---- rows ------------------------------------------------------------------------------------

    def rows(self, request: ScanRequest) -> Iterator[pa.Table]:
        """See `Scan`."""
        request = self._of_keys(request)
        if self.raw:
            yield from self._raw_rows(request)
        elif self._has_deletes:
            yield self._finish(self._replayed(request), range(len(self.schema)), request)
        elif self._config.generational:
            yield from self._current(request)
        else:
            keys = set() if request.key_set is None else {*self.key_columns}
            needed = self._needed(request, self._time_columns | keys)
            for part in self._parts(request, needed, request.filters):
                selected = self._of_set(part, request, needed)
                yield self._finish(self._fresh(selected, needed), needed, request)

    @property
    def _time_columns(self) -> set[int]:
        return {self._table.timestamp_index} if self._plan.cutoff_micros > 0 else set()

    def _needed(self, request: ScanRequest, more: set[int]) -> tuple[int, ...]:
        compared = {term.place for term in request.filters}
        return tuple(sorted({*request.columns, *compared, *more}))

    def _fresh(self, part: StoredRows, columns: Sequence[int]) -> pa.Table:
        """Return the rows that are within the retention."""
        index = self._table.timestamp_index
        return fresh_rows(part, self._plan, columns.index(index) if index in columns else index)

    def _finish(self, rows: pa.Table, columns: Sequence[int], request: ScanRequest) -> pa.Table:
        """Filter rows that have some of the columns, and return those that are asked for."""
        places = list(columns)
        rows = conform(rows, pa.schema([self.schema.field(place) for place in places]))
        rows = filter_rows(rows, [_at(term, places) for term in request.filters])
        return rows.select([places.index(column) for column in request.columns])

    def _key_filters(self, request: ScanRequest) -> list[ColumnFilter]:
        return [term for term in request.filters if term.place in self.key_columns]

    def _replayed(self, request: ScanRequest) -> pa.Table:
        """Return the rows that are left after removals and, of generational tables, row
        generations.
        """
        filters = self._key_filters(request)
        columns = range(len(self._table.memory_schema))
        parts = self._parts(request, columns, filters)
        live = LiveRows(self._table.form)
        live.replay([_filtered(self._of_set(part, request, columns), filters) for part in parts])
        live.evict(self._plan.cutoff_micros)
        rows = live.rows()
        if not self._config.generational:
            return rows
        layout = RowLayout.of(self._config, self._table.memory_schema, managed=self.managed)
        return restored(newest_of([rows], layout), layout, Role.ROWS)

    def _current(self, request: ScanRequest) -> Iterator[pa.Table]:
        """Yield the current rows of a generational table without removals."""
        role = self._role
        layout = RowLayout.of(self._config, self._table.memory_schema, managed=self.managed)
        ruling = {*layout.keys, *layout.routing, layout.timestamp, layout.generation}
        ruling |= set() if layout.count is None else {layout.count}
        needed = self._needed(request, ruling)
        # The layout of rows that have only some of the columns.
        place = list(needed).index
        projected = RowLayout(
            keys=tuple(map(place, layout.keys)),
            routing=tuple(map(place, layout.routing)),
            timestamp=place(layout.timestamp),
            generation=place(layout.generation),
            count=None if layout.count is None else place(layout.count),
        )
        kept = newest_of(self._chunks(request, needed), projected)
        if role is Role.TUPLES and self.routing_columns:
            groups = self._group_keys(request)
            kept = kept.slice(0, 0) if groups is None else tuples(kept, projected, groups)
        else:
            kept = restored(kept, projected, role)
        yield self._finish(kept, needed, request)

    def _chunks(self, request: ScanRequest, needed: Sequence[int]) -> Iterator[pa.Table]:
        filters = self._key_filters(request)
        yield pa.schema([self._table.memory_schema.field(place) for place in needed]).empty_table()
        places = list(needed)
        for part in self._parts(request, needed, filters):
            rows = self._of_set(part, request, needed)
            yield filter_rows(self._fresh(rows, needed), [_at(term, places) for term in filters])

    def _of_set(self, part: StoredRows, request: ScanRequest, columns: Sequence[int]) -> StoredRows:
        """Return the rows whose keys are in the set that is asked for."""
        if request.key_set is None or not part.rows.num_rows:
            return part
        keys = [part.rows.column(list(columns).index(column)) for column in self.key_columns]
        mask = pa.array(request.key_set.contains(keys))
        return StoredRows(part.rows.filter(mask), part.operations.filter(mask))

    def _group_keys(self, request: ScanRequest) -> list[pa.ChunkedArray] | None:
        """Return the keys of the aggregate that this table `b` belongs to; None = it has no
        table `a`, so that a restore keeps no row of `b`.
        """
        tables = accumulator_tables(self.operator, managed=self.managed)
        if len(tables) != 1:
            return None
        groups = replace(self, name=tables[0])
        group_request = ScanRequest(columns=groups.key_columns, keys=request.keys)
        rows = pa.concat_tables(groups.rows(group_request))
        return [rows.column(index) for index in range(rows.num_columns)]

    # ---- stored rows -----------------------------------------------------------------------------

    def _raw_rows(self, request: ScanRequest) -> Iterator[pa.Table]:
        stored = len(self._table.file_schema)
        needed = self._needed(request, set())
        of_file = tuple(place for place in needed if place < stored)
        for file in self._files(request, request.filters):
            file_request = replace(request, files=frozenset([file.path]))
            for part in self._parts(file_request, of_file, request.filters):
                columns = dict(zip(of_file, part.rows.columns, strict=True))
                # The columns that a raw scan adds for a file.
                fields = list(self.schema)[stored:]
                values = (str(file.path), file.epoch, file.compaction_generation)
                file_columns = [
                    pa.repeat(pa.scalar(value, field.type), part.rows.num_rows)
                    for value, field in zip(values, fields, strict=True)
                ]
                columns |= dict(enumerate(file_columns, stored))
                if stored - 1 in needed:
                    columns[stored - 1] = operation_names(part.operations)
                rows = pa.Table.from_arrays(
                    [columns[place] for place in needed],
                    names=[self.schema.field(place).name for place in needed],
                )
                yield self._finish(rows, needed, request)


def _at(one: ColumnFilter, places: Sequence[int]) -> ColumnFilter:
    return replace(one, place=places.index(one.place))


def _filtered(part: StoredRows, filters: Sequence[ColumnFilter]) -> StoredRows:
    rows, operations = part.rows, part.operations
    for term in filters if rows.num_rows else ():
        mask = term.mask(rows)
        rows, operations = rows.filter(mask), operations.filter(mask)
    return StoredRows(rows, operations)
