"""Read a data file for `verify`: its footer, then its rows, a few thousand at a time; its keys.

Of the rows, only the facts in `planning.verify.files.RowScan` are kept.
"""

from __future__ import annotations

import io
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.errors import FormatError, InputError, NotFoundError
from arroyo_dagster.state.codec.bincode.codec import codec_for
from arroyo_dagster.state.codec.hashing.ahash import HashVariant
from arroyo_dagster.state.codec.hashing.routing import key_hashes, subtasks_for_hashes
from arroyo_dagster.state.codec.operations import INSERT, decode_operation
from arroyo_dagster.state.codec.parquet import decoding, open_pages, read_facts, rows_at_once
from arroyo_dagster.state.model.ids import OperatorId, StatePath, TableName
from arroyo_dagster.state.model.layout import parse_data_file
from arroyo_dagster.state.model.tables import (
    KEY_HASH_COLUMN,
    TIMESTAMP_COLUMN,
    ExpiringTimeKeyConfig,
    TableConfig,
)
from arroyo_dagster.state.model.types import Type
from arroyo_dagster.state.planning.verify.files import FileFacts, Footer, ListedFile, RowScan
from arroyo_dagster.state.planning.verify.restore import SharedKeys
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.data_files import WHOLE_BYTES
from arroyo_dagster.state.tables.forms import columns_of, stored_form
from arroyo_dagster.state.tables.global_keys import keys_of_several, open_keyed_files
from arroyo_dagster.state.tables.known.catalogue import Catalogue

_MOST_ROWS = 8192
_NANOS_PER_MICRO = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckDepth:
    """The depth of the checks of files.

    Attributes:
        level: 1 = footers, 2 = rows against statistics, 3 = values, 4 = owners.
        parallelism: of the restored job; None = each operator's own.
        variant: the hash that produced the job's routing keys.
    """

    level: int
    catalogue: Catalogue
    parallelism: int | None = None
    variant: HashVariant = HashVariant.FALLBACK


@dataclass(frozen=True, slots=True, kw_only=True)
class FileToRead:
    """A listed file, and which of its rows a restore keeps.

    Attributes:
        parallelism: subtasks of the restored operator.
        cutoff_micros: rows older than this are not kept; 0 = none.
    """

    listed: ListedFile
    parallelism: int
    cutoff_micros: int


def read_file_facts(store: ObjectStore, file: FileToRead, look: CheckDepth) -> FileFacts | None:
    """Read the facts of a data file that `look` requires; None if the file does not exist.

    Raises:
        StorageError: the store failed.
    """
    path = file.listed.path
    try:
        with store.open_input(path) as source:
            size = source.seek(0, io.SEEK_END)
            source.seek(0)
            if size == 0:
                return FileFacts(size_bytes=0)
            try:
                with decoding(path):
                    small = look.level > 1 and size <= WHOLE_BYTES
                    read = io.BytesIO(source.read()) if small else source
                return _facts(read, size, file, look)
            except FormatError as error:
                return FileFacts(size_bytes=size, problem=error.message)
    except NotFoundError:
        return None


def _facts(source: BinaryIO, size: int, file: FileToRead, look: CheckDepth) -> FileFacts:
    path = file.listed.path
    facts = read_facts(source, path, bounds=look.level > 1)
    keys, times = facts.bounds.get(KEY_HASH_COLUMN), facts.bounds.get(TIMESTAMP_COLUMN)
    footer = Footer(
        rows=facts.rows,
        row_groups=facts.row_groups,
        columns=columns_of(facts.schema),
        schema_json=stored_form(facts.schema),
        state_version=facts.version,
        min_routing_key=None if keys is None else keys[0],
        max_routing_key=None if keys is None else keys[1],
        max_timestamp_micros=None if times is None else times[1] // _NANOS_PER_MICRO,
    )
    sources = file.listed.reading(footer).sources
    rows = None
    if look.level > 1 and sources:
        rows = _scanned(source, file, look, sources, facts.version)
    return FileFacts(size_bytes=size, footer=footer, rows=rows)


# ---- rows ----------------------------------------------------------------------------------------


def _scanned(
    source: BinaryIO,
    file: FileToRead,
    look: CheckDepth,
    sources: Sequence[int | None],
    version: int,
) -> RowScan:
    config = file.listed.config.config
    scan: _RowsScan | _PairsScan
    if isinstance(config, ExpiringTimeKeyConfig):
        scan = _RowsScan(file, look, config, sources)
    else:
        scan = _PairsScan(file, look, version)
    with decoding(file.listed.path):
        source.seek(0)
        pages = open_pages(source)
        rows = rows_at_once(pages.metadata, _MOST_ROWS)
        for batch in pages.iter_batches(batch_size=rows, use_threads=False):
            scan.add(batch)
    return scan.result()


class _RowsScan:
    """Scans the rows of a file of an expiring table, batch by batch."""

    def __init__(
        self,
        file: FileToRead,
        look: CheckDepth,
        config: ExpiringTimeKeyConfig,
        sources: Sequence[int | None],
    ) -> None:
        self._look = look
        self._ours = file.listed.managed
        self._cutoff_nanos = file.cutoff_micros * _NANOS_PER_MICRO
        self._parallelism = file.parallelism
        self._time = sources[config.schema.timestamp_index]
        self._keys = [sources[index] for index in config.schema.hashed_indices]
        self._rows = self._strange_hashes = self._strange_operations = 0
        self._hashes: list[int] = []
        self._times: list[int] = []
        self._live = np.zeros(file.parallelism, np.int64)
        self._undecodable: str | None = None
        self._unhashed: str | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        """Scan a batch."""
        self._rows += batch.num_rows
        if not batch.num_rows:
            return
        hashes = batch.column(batch.num_columns - 2)
        times = batch.column(self._time).cast(pa.int64())
        self._hashes = _range([*self._hashes, *_bounds(hashes)])
        self._times = _range([*self._times, *_bounds(times)])
        if self._look.level > 2:
            self._add_values(batch)
        if self._look.level > 3:
            self._add_owners(batch, hashes, times)

    def _add_values(self, batch: pa.RecordBatch) -> None:
        try:
            batch.validate(full=True)
        except pa.ArrowInvalid as error:
            self._undecodable = self._undecodable or f"a value does not match its type ({error})"
        operations = batch.column(batch.num_columns - 1)
        if pc.all(pc.equal(operations, INSERT)).as_py():
            return
        for kind in pc.value_counts(operations).to_pylist():
            if kind["values"] != INSERT and not (self._ours and _is_operation(kind["values"])):
                self._strange_operations += kind["counts"]

    def _add_owners(self, batch: pa.RecordBatch, hashes: pa.Array, times: pa.Array) -> None:
        owners = subtasks_for_hashes(hashes, self._parallelism)
        fresh = pc.fill_null(pc.greater_equal(times, self._cutoff_nanos), True)
        kept = owners[fresh.to_numpy(zero_copy_only=False)]
        self._live += np.bincount(kept, minlength=self._parallelism)
        try:
            columns = [batch.column(index) for index in self._keys]
            recomputed = key_hashes(columns, batch.num_rows, variant=self._look.variant)
        except InputError as error:
            self._unhashed = f"routing keys were not recomputed: {error.message}"
            return
        self._strange_hashes += pc.sum(pc.not_equal(recomputed, hashes)).as_py()

    def result(self) -> RowScan:
        """Return the facts about all batches."""
        low, high = self._hashes or (None, None)
        first, last = self._times or (None, None)
        return RowScan(
            rows=self._rows,
            min_routing_key=low,
            max_routing_key=high,
            min_timestamp_micros=None if first is None else first // _NANOS_PER_MICRO,
            max_timestamp_micros=None if last is None else last // _NANOS_PER_MICRO,
            live=tuple(self._live.tolist()),
            strange_hashes=self._strange_hashes,
            strange_operations=self._strange_operations,
            undecodable=self._undecodable,
            unhashed=self._unhashed,
        )


def _bounds(values: pa.Array) -> Iterator[int]:
    bounds = pc.min_max(values).as_py()
    return (bounds[end] for end in ("min", "max") if bounds[end] is not None)


def _range(values: list[int]) -> list[int]:
    return [min(values), max(values)] if values else []


def _is_operation(data: bytes) -> bool:
    try:
        decode_operation(data)
    except FormatError:
        return False
    return True


# ---- pairs ---------------------------------------------------------------------------------------


class _PairsScan:
    """Scans the rows of a file of a global keyed table, batch by batch."""

    def __init__(self, file: FileToRead, look: CheckDepth, version: int) -> None:
        self._look = look
        self._listed = file.listed
        self._version = version
        self._rows = self._unordered = 0
        self._last: bytes | None = None
        self._undecodable: str | None = None
        self._unknown: str | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        """Scan a batch."""
        self._rows += batch.num_rows
        if self._look.level < 3 or not batch.num_rows:
            return
        keys = batch.column(0).to_pylist()
        earlier = [self._last, *keys[:-1]]
        self._unordered += sum(
            before is not None and key <= before for before, key in zip(earlier, keys, strict=True)
        )
        self._last = keys[-1]
        seconds = batch.column(1).to_pylist()
        if batch.schema.names[1] == "value":
            self._decode(keys, seconds)
        else:
            self._undecodable = self._undecodable or _removal_error(seconds)

    def _decode(self, keys: list[bytes], values: list[bytes]) -> None:
        config = self._listed.config
        if config.key_type is not None and config.value_type is not None:
            stored = self._version == config.state_version
            self._undecodable = self._undecodable or _typed_error(config, keys, values, stored)
            return
        tables = self._look.catalogue.find(self._listed.operator, config)
        problem = self._form_error(keys, values)
        # Entries of an unknown state version may have any form; known ones must decode.
        if any(table.has_version(self._version) for table in tables):
            self._undecodable = self._undecodable or problem
        else:
            self._unknown = self._unknown or problem

    def _form_error(self, keys: list[bytes], values: list[bytes]) -> str | None:
        versioned = {key: (self._version, value) for key, value in zip(keys, values, strict=True)}
        operator, config = self._listed.operator, self._listed.config
        return self._look.catalogue.form_of(operator, config, versioned).problem

    def result(self) -> RowScan:
        """Return the facts about all batches."""
        return RowScan(
            rows=self._rows,
            unordered=self._unordered,
            undecodable=self._undecodable,
            unknown=self._unknown,
        )


def _typed_error(
    config: TableConfig, keys: list[bytes], values: list[bytes], current: bool
) -> str | None:
    """Return why pairs do not decode by the types that the job stored; None if they do. Values of
    older versions have other types, which are not stored.
    """
    assert config.key_type is not None
    assert config.value_type is not None
    return _pairs_error(config.key_type, config.value_type, keys, values if current else [])


def _pairs_error(
    key_type: Type, value_type: Type, keys: list[bytes], values: list[bytes]
) -> str | None:
    for what, described, encoded in (("key", key_type, keys), ("value", value_type, values)):
        try:
            codec_for(described).decode_many(encoded)
        except FormatError as error:
            return f"a {what} does not match the table's types: {error.message}"
    return None


def _removal_error(operations: Iterable[bytes]) -> str | None:
    strange = next((raw for raw in set(operations) if not _is_operation(raw)), None)
    return None if strange is None else f"{strange.hex()} is not an operation on a key"


# ---- keys that several subtasks wrote, and the hash that routed the rows -------------------------

_SAMPLED_FILES = 8
_SAMPLED_ROWS = 256


# ---- keys written by several subtasks ------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedEpoch:
    """The files that several subtasks wrote in one epoch of a global keyed table.

    Attributes:
        directory: of the epoch and the operator.
        files: by subtask, ascending.
    """

    operator: OperatorId
    table: TableName
    directory: StatePath
    files: Mapping[int, Sequence[StatePath]]

    @property
    def paths(self) -> Iterator[StatePath]:
        """All files."""
        return itertools.chain.from_iterable(self.files.values())


def keyed_epochs(
    operator: OperatorId, config: TableConfig, files: Iterable[StatePath]
) -> list[KeyedEpoch]:
    """Return the epochs of a global keyed table in which several subtasks wrote.

    Args:
        files: the readable files of the table.
    """
    groups: dict[StatePath, dict[int, list[StatePath]]] = {}
    for path in files:
        subtask = parse_data_file(path, config.table)
        if subtask is not None and path.parent is not None:
            groups.setdefault(path.parent, {}).setdefault(subtask, []).append(path)
    return [
        KeyedEpoch(
            operator=operator,
            table=config.table,
            directory=directory,
            files={subtask: by_subtask[subtask] for subtask in sorted(by_subtask)},
        )
        for directory, by_subtask in groups.items()
        if len(by_subtask) > 1
    ]


def find_shared_keys(store: ObjectStore, epoch: KeyedEpoch) -> SharedKeys | None:
    """Find keys that several subtasks wrote in one epoch; None if there are none.

    The keys of the epoch are in memory.

    Raises:
        StorageError: the store failed.
    """
    subtasks = list(epoch.files)
    with ExitStack() as opened:
        try:
            groups = [list(open_keyed_files(store, epoch.files[subtask])) for subtask in subtasks]
            for file in itertools.chain(*groups):
                opened.enter_context(closing(file.data))
            shared = keys_of_several(groups)
        except (FormatError, NotFoundError):
            return None  # it was deleted or changed since it was checked
    if shared is None:
        return None
    return SharedKeys(
        operator=epoch.operator,
        table=epoch.table,
        directory=epoch.directory,
        keys=shared.keys,
        differ=shared.differ,
        subtasks=tuple(subtasks[place] for place in shared.groups),
    )


# ---- the hash ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Votes:
    """How many sampled rows agree with each variant of the hash."""

    rows: Counter[HashVariant] = field(default_factory=Counter)

    @property
    def winner(self) -> HashVariant | None:
        """The variant that most rows agree with; None in case of a tie."""
        best = self.rows.most_common(2)
        if not best or (len(best) > 1 and best[0][1] == best[1][1]):
            return None
        return best[0][0]


def find_variant(store: ObjectStore, files: Iterable[ListedFile]) -> HashVariant:
    """Find the hash that produced most routing keys of a few files; the official one in case of a
    tie.

    Unlike `find_hash_variant` it skips damaged files, because the result is used to judge them.

    Raises:
        StorageError: the store failed.
    """
    votes = _Votes()
    hashed = [file for file in files if _hashed_by(file)]
    for file in hashed[:_SAMPLED_FILES]:
        try:
            with store.open_input(file.path) as source, decoding(file.path):
                batch = next(open_pages(source).iter_batches(_SAMPLED_ROWS), None)
            if batch is not None and columns_of(batch.schema) in file.forms:
                indices = _hashed_by(file)
                stored = batch.column(batch.num_columns - 2)
                for variant in HashVariant:
                    columns = [batch.column(index) for index in indices]
                    hashes = key_hashes(columns, batch.num_rows, variant=variant)
                    votes.rows[variant] += pc.sum(pc.equal(hashes, stored)).as_py() or 0
        except (FormatError, NotFoundError, InputError):
            continue
        if votes.winner is not None:
            return votes.winner
    return HashVariant.FALLBACK


def _hashed_by(file: ListedFile) -> tuple[int, ...]:
    config = file.config.config
    return config.schema.hashed_indices if isinstance(config, ExpiringTimeKeyConfig) else ()
