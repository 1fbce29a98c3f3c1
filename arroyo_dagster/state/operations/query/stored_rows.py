"""The files of an expiring table at an epoch: those that a request needs, and their stored rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.state.codec.hashing.routing import HashVariant, key_hashes
from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.ids import StatePath, TableName
from arroyo_dagster.state.model.keys import KeyRange
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    TimeFile,
)
from arroyo_dagster.state.operations.catalog.hash_variant import find_hash_variant
from arroyo_dagster.state.operations.query.scans import ScanRequest
from arroyo_dagster.state.planning.restore.reads import ALL_KEYS, ReadPlan, plan_read
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.comparisons import ColumnFilter, Relation
from arroyo_dagster.state.tables.data_files import FooterCache
from arroyo_dagster.state.tables.expiring_time_key import ExpiringTimeKeyTable
from arroyo_dagster.state.tables.key_index import Hashes, hashes_of
from arroyo_dagster.state.tables.live_rows import NANOS_PER_MICRO, StoredRows, nanos
from arroyo_dagster.state.tables.time_files import ReadRequest, TimeFileReader, ValueBounds

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
        pa.array([value.as_py() for value in column], kind)
        for (_, kind), column in zip(routing, zip(*keys, strict=True), strict=True)
    ]
    by_variant = [key_hashes(columns, variant=variant).to_pylist() for variant in variants()]
    return [key for hashes in by_variant for key in hashes] if by_variant else None
