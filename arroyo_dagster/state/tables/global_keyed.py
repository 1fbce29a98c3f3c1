"""Global keyed tables: typed keys and values in bincode, read in full by every subtask.

In managed jobs each epoch writes only the changes. Removed keys are written to a file of their own,
without the column `value`, so that an Arroyo job that loads it fails instead of restoring the keys.

Source: crates/arroyo-state/src/tables/global_keyed_map.rs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast, runtime_checkable

import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.errors import InputError, ProtocolError
from arroyo_dagster.state.codec.bincode.codec import Codec, codec_for
from arroyo_dagster.state.codec.operations import DeleteKey, encode_operation
from arroyo_dagster.state.codec.parquet import GLOBAL_KEY_VALUE_SCHEMA, REMOVAL_SCHEMA, encode_pairs
from arroyo_dagster.state.model.checkpoints import GlobalKeyedReport
from arroyo_dagster.state.model.compaction import MergeOutcome, PairsMerge
from arroyo_dagster.state.model.ids import OperatorId, StatePath, TableName
from arroyo_dagster.state.model.layout import REMOVED
from arroyo_dagster.state.model.tables import GlobalKeyedConfig, TableConfig, TimeFile
from arroyo_dagster.state.model.types import Type, describe, without_classes
from arroyo_dagster.state.storage.store import ObjectStore, read_many
from arroyo_dagster.state.tables.aggregates import Aggregate, AnyArray, aggregated, combine
from arroyo_dagster.state.tables.last_writes import REMOVED as REMOVED_VERSION
from arroyo_dagster.state.tables.last_writes import decode_pair_columns, last_writes
from arroyo_dagster.state.tables.merge.pairs import merge_pairs
from arroyo_dagster.state.tables.messages import CommitData, KeyedData, TableChange, TableData
from arroyo_dagster.state.tables.table import EpochFiles

K = TypeVar("K")
V = TypeVar("V")


@runtime_checkable
class MigratableState(Protocol):
    """A value type that can be migrated from its older versions.

    `VERSION` increases by one with every incompatible change. `PREVIOUS` is the class of the
    version before (None at version 0). It may be migratable itself: any older version is migrated
    step by step.

    Differs: Arroyo takes one step.
    """

    VERSION: ClassVar[int]
    PREVIOUS: ClassVar[type[Any] | None]

    @classmethod
    def migrate(cls, previous: Any) -> Any:
        """Return the value in this version's form."""


@dataclass(frozen=True, slots=True)
class GlobalKeyedFile:
    """One decoded file: pairs, or the keys it removes."""

    path: StatePath
    keys: Sequence[bytes]
    values: Sequence[bytes] | None
    version: int


def decode_global_keyed_file(data: bytes, path: StatePath) -> GlobalKeyedFile:
    """Decode as `decode_pair_columns`, into Python values."""
    file = decode_pair_columns(data, path)
    values = None if file.removals else file.seconds.to_pylist()
    return GlobalKeyedFile(path, file.keys.to_pylist(), values, file.version)


class GlobalKeyedTable:
    """The stored side of one global keyed table: reads files, merges them, opens checkpointers."""

    def __init__(self, config: TableConfig, store: ObjectStore) -> None:
        if not isinstance(config.config, GlobalKeyedConfig):
            raise InputError("not the configuration of a global keyed table", table=config.table)
        self.config = config
        self._store = store

    def read(self, files: Sequence[StatePath]) -> Iterator[GlobalKeyedFile]:
        """Decode `files` in the order given, which is the replay order."""
        for path, data in read_many(self._store, files).items():
            yield decode_global_keyed_file(data, path)

    def load(self, files: Sequence[StatePath]) -> dict[bytes, bytes]:
        """Read all pairs: a later file wins over an earlier one, removals are applied."""
        return {key: value for key, (_, value) in self.load_with_version(files).items()}

    def load_with_version(self, files: Sequence[StatePath]) -> dict[bytes, tuple[int, bytes]]:
        """Read as `load`, each value with the state version of its file."""
        return {key: last for key, last in self.last_writes(files).items() if last is not None}

    def last_writes(self, files: Sequence[StatePath]) -> dict[bytes, tuple[int, bytes] | None]:
        """Return each key's last write in `files`: version and value, or None for a removal."""
        writes: dict[bytes, tuple[int, bytes] | None] = {}
        for file in self.read(files):
            writes.update(_writes_of(file))
        return writes

    def last_columns(self, files: Sequence[StatePath]) -> tuple[pa.Array, pa.Array]:
        """Return the last writes as unordered columns: keys, and values, which are null for
        removals.

        Tens of times faster than `last_writes`; state versions are left out.
        """
        keys, values, versions = last_writes(self._store, [(path, 0) for path in files]).columns()
        removed = pa.array(versions == REMOVED_VERSION)
        return keys, pc.if_else(removed, pa.scalar(None, values.type), values)

    def checkpoint(self, files: EpochFiles) -> GlobalKeyedTableCheckpointer:
        """Open a checkpointer for the changes until the next barrier."""
        return GlobalKeyedTableCheckpointer(self, self._store, files)

    def compact_data(
        self,
        files: Sequence[StatePath],
        name_file: Callable[[str], StatePath],
        *,
        from_oldest: bool = True,
    ) -> MergeOutcome:
        """Merge `files`, neighbours in the replay order, into new ones: the last write of a key
        wins.

        Writes one file per state version, and one of removals unless `from_oldest`: without an
        older file, no removed key can reappear.

        Raises:
            FormatError: a file is broken.
            ProtocolError: the new files, read back, do not hold the same entries as `files`.
        """
        merge = PairsMerge(
            operator=OperatorId(""),
            table=self.config.table,
            inputs=tuple(files),
            size_bytes=0,
            from_oldest=from_oldest,
        )
        outcome = merge_pairs(self.config, self._store, merge, name_file)
        if not outcome.same:
            raise ProtocolError(
                f"merged files, read back, hold {outcome.after.rows} rows with other values than "
                f"the {outcome.before.rows} rows that a restore loads from their inputs",
                table=self.config.table,
                path=outcome.merged.output_paths[0],
                next_step="keep the files and report it; they are not listed",
            )
        return outcome

    def encode_removals(self, keys: Collection[bytes]) -> bytes:
        """Return the content of the file that removes `keys`."""
        operations = (encode_operation(DeleteKey(key)) for key in keys)
        return encode_pairs(keys, operations, REMOVAL_SCHEMA, version=self.config.state_version)


def _writes_of(file: GlobalKeyedFile) -> Iterator[tuple[bytes, tuple[int, bytes] | None]]:
    if file.values is None:
        return ((key, None) for key in file.keys)
    version = file.version
    return ((key, (version, value)) for key, value in zip(file.keys, file.values, strict=True))


class GlobalKeyedTableCheckpointer:
    """Collects the changes between two barriers, then writes them."""

    def __init__(self, table: GlobalKeyedTable, store: ObjectStore, files: EpochFiles) -> None:
        self._table = table
        self._store = store
        self._files = files
        self._pending: dict[bytes, bytes | None] = {}
        self._commit_data: bytes | None = None

    def apply(self, data: TableData) -> None:
        """Keep a change until `finish`.

        Raises:
            InputError: rows, or commit data twice in one epoch or for a table without two-phase
                commit.
        """
        if isinstance(data, KeyedData):
            self._pending.update(data.pairs)
            return
        if not isinstance(data, CommitData):
            raise InputError("rows for a global keyed table", table=self._table.config.table)
        if not self._table.config.uses_two_phase_commit:
            raise InputError(
                "commit data for a table that does not commit in two phases",
                table=self._table.config.table,
                next_step="pass two_phase_commit=True to global_table_config",
            )
        if self._commit_data is not None:
            raise InputError("commit data set twice in one epoch", table=self._table.config.table)
        self._commit_data = data.data

    def prepare(self, watermark_micros: int | None) -> None:
        """Do nothing: views have already encoded, and thereby checked, keys and values."""

    def finish(
        self, watermark_micros: int | None, listed: Sequence[TimeFile]
    ) -> tuple[GlobalKeyedReport, int]:
        """Write the changes; no file if there are none. A report is always returned."""
        removed, inserted = _split_removals(self._pending)
        size, file, removals = 0, None, None
        version = self._table.config.state_version
        if removed:
            data = self._table.encode_removals(removed)
            removals = self._put(REMOVED, data)
            size += len(data)
        if inserted:
            data = encode_pairs(
                inserted, inserted.values(), GLOBAL_KEY_VALUE_SCHEMA, version=version
            )
            file = self._put("", data)
            size += len(data)
        return GlobalKeyedReport(file=file, removals=removals, commit_data=self._commit_data), size

    def _put(self, suffix: str, data: bytes) -> StatePath:
        path = self._files.name_file(suffix)
        self._store.put(path, data)
        return path


def _split_removals(
    pending: dict[bytes, bytes | None],
) -> tuple[list[bytes], dict[bytes, bytes]]:
    """Return the removed keys, and the inserted pairs."""
    if None not in pending.values():
        return [], cast(dict[bytes, bytes], pending)
    removed = [key for key, value in pending.items() if value is None]
    return removed, {key: value for key, value in pending.items() if value is not None}


@dataclass(slots=True)
class _Entries(Generic[V]):
    """Values by encoded key. Each key is in exactly one of the two: decoded, or still encoded."""

    decoded: dict[bytes, V] = field(default_factory=dict)
    encoded: dict[bytes, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """The state versions of a table's values.

    Attributes:
        version: the version that the operator reads and writes.
        stored: the versions of the files that were read, ascending; older values were migrated.
    """

    version: int
    stored: tuple[int, ...]


class GlobalKeyedView(Generic[K, V]):
    """All entries of a global keyed table in memory, changed by this subtask.

    A change is visible at once to this subtask. It is written at the next barrier, and visible to
    the other subtasks from the epoch after. Mutating a value in place does not change the stored
    value: call `insert`.
    """

    def __init__(
        self,
        table: GlobalKeyedTable,
        key: Any,
        value: Any,
        send: Callable[[TableChange], None],
    ) -> None:
        self._table = table
        self._name = TableName(table.config.table)
        self._keys: Codec[K] = codec_for(key)
        self._values: Codec[V] = codec_for(value)
        self._value_class = value
        self._send = send
        self._entries: _Entries[V] = _Entries()
        self._behind: list[StatePath] = []
        self._stored_versions: set[int] = set()

    # ---- reading ---------------------------------------------------------------------------------

    def get(self, key: K, default: V | None = None) -> V | None:
        """Return the value of `key`, or `default`."""
        return self._get(self._keys.encode(key), default)

    def get_many(self, keys: Iterable[K]) -> list[V | None]:
        """Return the values of `keys` in their order, None where there is none."""
        return [self._get(key, None) for key in self._keys.encode_many(list(keys))]

    def get_all(self) -> dict[K, V]:
        """Return every entry, by decoded key. Raises an InputError if keys are not hashable."""
        self._catch_up()
        entries = self._entries
        waiting = list(entries.encoded)
        values = self._values.decode_many([entries.encoded[key] for key in waiting])
        entries.decoded.update(zip(waiting, values, strict=True))
        entries.encoded.clear()
        keys = self._keys.decode_many(list(entries.decoded))
        try:
            return dict(zip(keys, entries.decoded.values(), strict=True))
        except TypeError as error:
            raise InputError(
                "keys of this type cannot be the keys of a dict; use get", table=self._name
            ) from error

    def version_info(self) -> VersionInfo:
        """Return the state version of the table, and those of the files it was read from.

        Source: crates/arroyo-state/src/tables/global_keyed_map.rs, `version_info`.
        """
        self._catch_up()
        version = self._table.config.state_version
        return VersionInfo(version, tuple(sorted(self._stored_versions)))

    def __contains__(self, key: K) -> bool:
        self._catch_up()
        encoded = self._keys.encode(key)
        return encoded in self._entries.decoded or encoded in self._entries.encoded

    def __len__(self) -> int:
        self._catch_up()
        return len(self._entries.decoded) + len(self._entries.encoded)

    def _get(self, key: bytes, default: V | None) -> V | None:
        self._catch_up()
        entries = self._entries
        if key in entries.decoded:
            return entries.decoded[key]
        stored = entries.encoded.pop(key, None)
        if stored is None:
            return default
        value = self._values.decode(stored)
        entries.decoded[key] = value
        return value

    # ---- writing ---------------------------------------------------------------------------------

    def insert(self, key: K, value: V) -> None:
        """Set the value of `key`.

        Raises:
            InputError: key or value is not of the table's type; nothing changed.
        """
        self.insert_many([(key, value)])

    def insert_many(self, pairs: Iterable[tuple[K, V]]) -> None:
        """Set many values; the last value of a key wins. Errors as `insert`."""
        listed = list(pairs)
        self.insert_columns([key for key, _ in listed], [value for _, value in listed])

    def insert_columns(self, keys: Sequence[K], values: Sequence[V]) -> None:
        """Set values as `insert_many`, given as keys and as many values."""
        if not keys:
            return
        encoded = self._keys.encode_many(keys)
        pairs = zip(encoded, self._values.encode_many(values), strict=True)
        self._catch_up()
        self._send(TableChange(self._name, KeyedData(pairs)))
        entries = self._entries
        if entries.encoded:
            for key in encoded:
                entries.encoded.pop(key, None)
        entries.decoded.update(zip(encoded, values, strict=True))

    def merge(self, keys: AnyArray, values: AnyArray | None, how: Aggregate) -> dict[K, V]:
        """Combine a batch of rows with the values of their keys; return the values that changed.

        Arrow combines the rows of each key first. So Python handles each key once, however many
        rows it has. A key without a value gets that of the batch.

        Args:
            keys: the key of each row, none of which is null.
            values: the value of each row; nulls are ignored. None for "count".
            how: "sum", "min", "max", or "count", which adds the number of rows.

        Raises:
            InputError: keys or values are not of the table's types, or cannot be combined; nothing
                changed.
        """
        merged_keys, merged = aggregated(keys, values, how, self._name)
        names: list[Any] = merged_keys.to_pylist()
        combined = combine(how)
        changed: dict[K, V] = {}
        for key, old, new in zip(names, self.get_many(names), merged, strict=True):
            value = new if old is None else combined(old, new)
            if old is None or value != old:
                changed[key] = value
        self.insert_columns(list(changed), list(changed.values()))
        return changed

    def remove(self, key: K) -> bool:
        """Remove `key`; return whether it existed."""
        return self.remove_many([key]) == 1

    def remove_many(self, keys: Iterable[K]) -> int:
        """Remove many keys; return how many existed."""
        self._catch_up()
        entries = self._entries
        removed = [
            key
            for key in dict.fromkeys(self._keys.encode_many(list(keys)))
            if key in entries.decoded or key in entries.encoded
        ]
        if removed:
            self._send(TableChange(self._name, KeyedData([(key, None) for key in removed])))
        for key in removed:
            entries.decoded.pop(key, None)
            entries.encoded.pop(key, None)
        return len(removed)

    def take(self, key: K) -> V | None:
        """Remove `key` and return its value; None if it did not exist."""
        value = self.get(key)
        self.remove(key)
        return value

    def set_commit_data(self, data: bytes) -> None:
        """Set the data for the second phase of this epoch's commit; once per epoch."""
        self._send(TableChange(self._name, CommitData(data)))

    # ---- following the files ---------------------------------------------------------------------

    def follow(self, files: Sequence[StatePath]) -> None:
        """Apply files to the present entries, in order, when the table is next used."""
        self._behind.extend(files)

    def is_behind(self, files: Collection[StatePath]) -> bool:
        """Whether any of `files` is still to be read."""
        return any(path in files for path in self._behind)

    def reload(self, files: Sequence[StatePath]) -> None:
        """Drop every entry, and read `files`, all of the table's, when it is next used."""
        self._entries = _Entries()
        self._stored_versions.clear()
        self._behind = list(files)

    def _catch_up(self) -> None:
        if not self._behind:
            return
        # Cleared only after all files are applied: a store failure halfway must not hide entries.
        for file in self._table.read(self._behind):
            for key in file.keys:
                self._entries.decoded.pop(key, None)
            if file.values is None:
                for key in file.keys:
                    self._entries.encoded.pop(key, None)
                continue
            values = self._migrated(file)
            self._stored_versions.add(file.version)
            self._entries.encoded.update(zip(file.keys, values, strict=True))
        self._behind = []

    def _migrated(self, file: GlobalKeyedFile) -> Sequence[bytes]:
        assert file.values is not None
        version = self._table.config.state_version
        if file.version == version or not file.values:
            return file.values
        if not is_migratable(self._value_class):
            if version == 0:
                return file.values  # a plain view ignores the version, as Arroyo's does
            raise _unsupported(file, version, self._name)
        steps = _steps(self._value_class, file, self._name)
        values: list[Any] = codec_for(steps[0]).decode_many(list(file.values))
        for step in steps[1:]:
            values = [step.migrate(value) for value in values]
        return self._values.encode_many(values)


def is_migratable(value: Any) -> bool:
    """Whether a value type can be migrated from its older versions."""
    return isinstance(value, type) and isinstance(value, MigratableState)


def _steps(newest: Any, file: GlobalKeyedFile, table: TableName) -> list[Any]:
    """Return the classes from the file's version up to the newest, oldest first."""
    steps = [newest]
    while file.version != steps[0].VERSION:
        previous = steps[0].PREVIOUS
        if previous is None or file.version > steps[0].VERSION:
            raise _unsupported(file, newest.VERSION, table)
        if not is_migratable(previous):
            if file.version != steps[0].VERSION - 1:
                raise _unsupported(file, newest.VERSION, table)
            return [previous, *steps]
        steps.insert(0, previous)
    return steps


def _unsupported(file: GlobalKeyedFile, wanted: int, table: TableName) -> InputError:
    return InputError(
        f"values are of state version {file.version}, the operator reads {wanted} and has no "
        "migration between them",
        table=table,
        path=file.path,
        next_step="give the value type PREVIOUS and migrate() for every version in between",
    )


def global_table_config(
    name: str,
    description: str = "",
    *,
    two_phase_commit: bool = False,
    key: Any = None,
    value: Any = None,
) -> TableConfig:
    """Configure a global keyed table.

    Args:
        key, value: Python types (or type descriptions); stored, so that any reader can decode them.

    Source: crates/arroyo-state/src/lib.rs, `global_table_config`.
    """
    return global_table_config_with_version(
        name, description, 0, two_phase_commit=two_phase_commit, key=key, value=value
    )


def global_table_config_with_version(
    name: str,
    description: str,
    version: int,
    *,
    two_phase_commit: bool = False,
    key: Any = None,
    value: Any = None,
) -> TableConfig:
    """Configure as `global_table_config`, for values of a state version other than 0."""
    return TableConfig(
        config=GlobalKeyedConfig(
            table=TableName(name),
            description=description,
            uses_two_phase_commit=two_phase_commit,
        ),
        state_version=version,
        key_type=_described(key),
        value_type=_described(value),
    )


def _described(python_type: Any) -> Type | None:
    # Without classes: a configuration read back must equal the one that was written.
    return None if python_type is None else without_classes(describe(python_type))
