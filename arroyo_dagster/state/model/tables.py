"""Tables of an operator: their kinds, their configuration, and the files they have at one epoch."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from arroyo_dagster.state.model.ids import Epoch, StatePath, TableName
from arroyo_dagster.state.model.keys import server_for_hash
from arroyo_dagster.state.model.types import Type

TIMESTAMP_COLUMN = "_timestamp"
GENERATION_COLUMN = "_generation"
KEY_HASH_COLUMN = "_key_hash"
OPERATION_COLUMN = "_operation"

NOTE_PREFIX = "arroyo_dagster."
"""Prefix of this package's notes in the metadata of a stored schema."""
CHANGED_IN = f"{NOTE_PREFIX}changed_in"
"""Of a schema: the epoch since which the table has these columns (`schema_evolution`)."""
ADDED_IN = f"{NOTE_PREFIX}added_in"
"""Of a column: the epoch in which it was added, unless the table was created with it."""


class TableKind(enum.IntEnum):
    """The two kinds of table, by their number in metadata.

    Source: crates/arroyo-rpc/proto/rpc.proto, `TableEnum`.
    """

    GLOBAL_KEYED = 1
    EXPIRING_TIME_KEY = 2

    @property
    def label(self) -> str:
        """The name of the kind for display."""
        return _LABELS[self]


_LABELS = {
    TableKind.GLOBAL_KEYED: "global keyed",
    TableKind.EXPIRING_TIME_KEY: "expiring time-key",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSchema:
    """The memory schema of an expiring table as metadata holds it: Arrow JSON and column indices.

    `key_indices` and `routing_key_indices` are None if metadata says that there are none. An empty
    tuple differs: keyed by the empty set.

    Source: crates/arroyo-rpc/src/df.rs, `ArroyoSchema`.
    """

    arrow_schema: str
    timestamp_index: int
    key_indices: tuple[int, ...] | None = None
    routing_key_indices: tuple[int, ...] | None = None
    unknown: bytes = b""

    @property
    def hashed_indices(self) -> tuple[int, ...]:
        """The input columns of `_key_hash`: routing keys, else storage keys, else none."""
        if self.routing_key_indices is not None:
            return self.routing_key_indices
        return self.key_indices or ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalKeyedConfig:
    """A table of bincode keys and values that every subtask reads in full."""

    table: TableName
    description: str = ""
    uses_two_phase_commit: bool = False
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpiringTimeKeyConfig:
    """A table of Arrow rows that are kept for `retention_micros` of event time."""

    table: TableName
    description: str = ""
    retention_micros: int
    generational: bool = False
    schema: StoredSchema
    unknown: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableConfig:
    """The configuration of one table of an operator.

    Attributes:
        config: its type decides the kind of the table.
        state_version: version of the value format of a global keyed table.
        key_type, value_type: how keys and values are encoded; None if the job did not record it.
            Managed jobs do.
    """

    config: GlobalKeyedConfig | ExpiringTimeKeyConfig
    state_version: int = 0
    key_type: Type | None = None
    value_type: Type | None = None
    unknown: bytes = b""
    types_unknown: bytes = b""

    @property
    def table(self) -> TableName:
        """The name of the table."""
        return self.config.table

    @property
    def kind(self) -> TableKind:
        """Which of the two kinds."""
        if isinstance(self.config, GlobalKeyedConfig):
            return TableKind.GLOBAL_KEYED
        return TableKind.EXPIRING_TIME_KEY

    @property
    def uses_two_phase_commit(self) -> bool:
        """Whether its contents are committed in two phases."""
        return isinstance(self.config, GlobalKeyedConfig) and self.config.uses_two_phase_commit


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeFile:
    """One data file of an expiring table, with the bounds that let readers skip it.

    Attributes:
        epoch: the flusher's epoch that wrote it; of a compacted file the largest of its inputs.
        min_routing_key, max_routing_key: bounds of `_key_hash`, both ends included.
        max_timestamp_micros: the largest `_timestamp`, floored to microseconds.
        compaction_generation: 0 if a subtask wrote it, 1 or more if a merge wrote it.

    Source: crates/arroyo-rpc/proto/rpc.proto, `ParquetTimeFile`.
    """

    epoch: Epoch
    path: StatePath
    min_routing_key: int
    max_routing_key: int
    max_timestamp_micros: int
    compaction_generation: int = 0
    unknown: bytes = b""

    def owners(self, parallelism: int) -> range:
        """Return the subtasks whose key ranges it overlaps.

        Raises:
            InputError: as in `server_for_hash`.
        """
        first = server_for_hash(self.min_routing_key, parallelism)
        return range(first, server_for_hash(self.max_routing_key, parallelism) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalKeyedFiles:
    """The files of a global keyed table at one epoch, in replay order: later ones win.

    `commit_data_by_subtask` keeps entries of zero length.
    """

    files: tuple[StatePath, ...] = ()
    commit_data_by_subtask: Mapping[int, bytes] = field(default_factory=dict)
    unknown: bytes = b""
    table_unknown: bytes = b""

    kind = TableKind.GLOBAL_KEYED

    @property
    def paths(self) -> tuple[StatePath, ...]:
        """The files, in replay order."""
        return self.files


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpiringTimeKeyFiles:
    """The files of an expiring table at one epoch, in replay order."""

    files: tuple[TimeFile, ...] = ()
    unknown: bytes = b""
    table_unknown: bytes = b""

    kind = TableKind.EXPIRING_TIME_KEY

    @property
    def paths(self) -> tuple[StatePath, ...]:
        """The paths of the files, in replay order."""
        return tuple(file.path for file in self.files)


TableFiles = GlobalKeyedFiles | ExpiringTimeKeyFiles
