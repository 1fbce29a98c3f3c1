"""Scans of global keyed tables: entries of a key and a value, decoded where their types are known.

A restored scan returns the last write of each key. Its columns are `key` and `value`; where the
types of the entries are not known, both are bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state.codec.bincode.arrow_values import arrow_type, decode_to_arrow
from arroyo_dagster.state.codec.bincode.codec import codec_for
from arroyo_dagster.state.codec.operations import operation_names
from arroyo_dagster.state.model.checkpoints import OperatorCheckpoint
from arroyo_dagster.state.model.ids import StatePath, TableName
from arroyo_dagster.state.model.layout import written_epoch
from arroyo_dagster.state.model.tables import OPERATION_COLUMN, GlobalKeyedFiles
from arroyo_dagster.state.model.types import Type, without_classes
from arroyo_dagster.state.operations.query.scans import (
    FILE,
    STATE_VERSION,
    WRITTEN_EPOCH,
    ScanRequest,
)
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.comparisons import filter_rows
from arroyo_dagster.state.tables.global_keys import (
    KeyedFile,
    first_entries,
    open_keyed_files,
    stream_entries,
)
from arroyo_dagster.state.tables.known.catalogue import Catalogue, TableForm

KEY, VALUE = "key", "value"
_SAMPLE_ENTRIES = 1000
"""How many entries are read to distinguish the forms that releases of Arroyo gave a table."""


@dataclass(frozen=True)
class GlobalScan:
    """Scans a global keyed table; see `Scan`.

    Attributes:
        catalogue: decodes entries whose types the job did not store.
        raw: return every stored entry, with its file and operation.
    """

    store: ObjectStore
    operator: OperatorCheckpoint
    name: TableName
    catalogue: Catalogue
    raw: bool = False

    divisible_by_key = False

    @property
    def paths(self) -> tuple[StatePath, ...]:
        """See `Scan`."""
        files = self.operator.tables[self.name]
        assert isinstance(files, GlobalKeyedFiles)
        return files.files

    @property
    def divisible_by_file(self) -> bool:
        """See `Scan`."""
        return self.raw

    @cached_property
    def form(self) -> TableForm:
        """How entries are decoded; reads 1,000 of them if the job did not store their types."""
        config = self.operator.configs[self.name]
        if config.key_type is not None and config.value_type is not None:
            return self.catalogue.form_of(self.operator.operator, config, {})
        if not self.catalogue.find(self.operator.operator, config):
            return self.catalogue.form_of(self.operator.operator, config, {})
        entries = first_entries(self.store, self.paths, _SAMPLE_ENTRIES)
        return self.catalogue.form_of(self.operator.operator, config, entries.first)

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns `key` and `value`; a raw scan adds four."""
        fields = [
            pa.field(name, pa.binary() if kind is None else arrow_type(kind))
            for name, kind in ((KEY, self.form.key_type), (VALUE, self.form.value_type))
        ]
        if self.raw:
            fields.append(pa.field(OPERATION_COLUMN, pa.string(), nullable=False))
            fields.append(pa.field(FILE, pa.string(), nullable=False))
            fields.append(pa.field(WRITTEN_EPOCH, pa.int64()))
            fields.append(pa.field(STATE_VERSION, pa.int64(), nullable=False))
        return pa.schema(fields)

    def rows(self, request: ScanRequest) -> Iterator[pa.Table]:
        """See `Scan`."""
        for rows in self._stored() if self.raw else self._last():
            yield filter_rows(rows, request.filters).select(list(request.columns))

    def entry(self, key: object) -> pa.Table:
        """Return the entry of one key as a table of at most one row; values of others stay unread.

        Args:
            key: as the column `key` has it: a mapping for a struct; bytes if its type is unknown.

        Raises:
            InputError: it is no key of this table.
            FormatError, NotFoundError: as `rows`.
        """
        encoded = self._encoded(key)
        for file in reversed(list(open_keyed_files(self.store, self.paths))):
            with closing(file.data):
                row = pc.index(file.keys(), pa.scalar(encoded, pa.binary())).as_py()
                if row >= 0:
                    return self.schema.empty_table() if file.removes else self._row(file, row)
        return self.schema.empty_table()

    def _row(self, file: KeyedFile, row: int) -> pa.Table:
        before = 0
        for values in file.seconds():
            if row < before + len(values):
                columns = [file.keys().slice(row, 1), values.slice(row - before, 1)]
                return pa.Table.from_arrays(self._decoded(columns), schema=self.schema)
            before += len(values)
        raise FormatError("a data file has fewer values than keys", path=file.path)

    def _encoded(self, key: object) -> bytes:
        kind = self.form.key_type
        if kind is not None:
            return codec_for(without_classes(kind)).encode(key)
        if not isinstance(key, bytes):
            raise InputError(
                "the type of the keys is unknown, so that a key is bytes",
                operator=self.operator.operator,
                table=self.name,
                next_step="give bytes, or register the table",
            )
        return key

    def _last(self) -> Iterator[pa.Table]:
        for entries in stream_entries(self.store, self.paths):
            yield pa.Table.from_arrays(self._decoded(list(entries)), schema=self.schema)

    def _stored(self) -> Iterator[pa.Table]:
        for file in open_keyed_files(self.store, self.paths):
            with closing(file.data):
                for keys, seconds in file.entries():
                    if file.removes:
                        columns = [
                            self._decode(keys, self.form.key_type),
                            pa.nulls(len(keys), self.schema[1].type),
                        ]
                        operations = operation_names(seconds)
                    else:
                        columns = self._decoded([keys, seconds])
                        operations = pa.repeat("insert", len(keys))
                    values = (str(file.path), written_epoch(file.path), file.version)
                    columns += [operations]
                    columns += [
                        pa.repeat(pa.scalar(value, self.schema[index].type), len(keys))
                        for index, value in enumerate(values, 3)
                    ]
                    yield pa.Table.from_arrays(columns, schema=self.schema)

    def _decoded(self, columns: list[pa.Array | pa.ChunkedArray]) -> list[pa.ChunkedArray]:
        kinds = (self.form.key_type, self.form.value_type)
        return [self._decode(column, kind) for column, kind in zip(columns, kinds, strict=True)]

    def _decode(self, column: pa.Array | pa.ChunkedArray, kind: Type | None) -> pa.ChunkedArray:
        chunked = column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])
        if kind is None:
            return chunked.cast(pa.binary())
        try:
            return decode_to_arrow(chunked, kind)
        except FormatError as error:
            error.facts |= {"operator": self.operator.operator, "table": self.name}
            error.next_step = error.next_step or (
                "`arroyo-state rows` prints the damaged entries as bytes; `arroyo-state verify` "
                "names the file"
            )
            raise
