"""The files of the tables that a job takes from another one: copied or converted."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from arroyo_dagster.errors import NotFoundError, ProtocolError
from arroyo_dagster.state.codec.parquet import GLOBAL_KEY_VALUE_SCHEMA, encode_pairs
from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.ids import Epoch, StatePath, TableName
from arroyo_dagster.state.model.layout import JobPaths, rewritten_attempt
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyFiles,
    GlobalKeyedFiles,
    TableConfig,
    TableFiles,
    TimeFile,
)
from arroyo_dagster.state.operations.gc.copies import digest_stored
from arroyo_dagster.state.operations.surgery.conversion import RowConversion, convert_file
from arroyo_dagster.state.planning.compaction.rewrite import TableKey
from arroyo_dagster.state.storage.concurrency import concurrently, read_ahead
from arroyo_dagster.state.storage.store import CHUNK_BYTES, ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSource:
    """The job whose state is taken.

    Attributes:
        store: where it lies; may be the store of the other job.
        epoch: None = its newest visible epoch.
    """

    store: ObjectStore
    paths: JobPaths
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class CarriedTable:
    """A table of the job that takes the rows or entries of a table of the source.

    Attributes:
        config: of the table in the job's metadata.
        conversion: how its rows change; None = its files are copied byte for byte.
    """

    source: TableKey
    target: TableKey
    config: TableConfig
    conversion: RowConversion | None = None


@dataclass(frozen=True, slots=True)
class CarriedTables:
    """Tables that are carried, and the epoch of the source that has their files."""

    taken: Checkpoint
    tables: tuple[CarriedTable, ...]

    def files_of(self, table: CarriedTable) -> TableFiles:
        """Return the files of a table in the source."""
        operator = self.taken.operator(table.source[0])
        assert operator is not None
        return operator.tables[table.source[1]]


BYTES_AT_ONCE = 64 << 20
"""Files of about this many bytes are copied or converted at a time; a larger one alone."""

NewFile = StatePath | TimeFile | None
"""What became of a file of the source; None = no row of it is left."""


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """The new files, by the table that gets them and the file of the source."""

    files: Mapping[tuple[TableKey, StatePath], NewFile]

    @classmethod
    def of(
        cls, source: StateSource, held: ObjectStore, target: Checkpoint, tables: CarriedTables
    ) -> WrittenFiles:
        """Copy and convert the source's files under new names, and read each new one again.

        Args:
            target: the epoch of the stopped job that gets the files.

        Raises:
            NotFoundError: a file expired meanwhile.
            InputError: a column that may not be NULL is NULL in the source.
            ProtocolError: a new file is not what it should be.
        """
        planned = list(_planned(target, tables))
        sizes = concurrently(lambda file: file.size_bytes(source.store, held), planned)
        # Each is in memory once: the files of a large table would not fit together.
        written = read_ahead(
            lambda file: file.write(source.store, held),
            zip(planned, sizes, strict=True),
            BYTES_AT_ONCE,
        )
        keys = [(file.table.target, file.path) for file in planned]
        return cls(dict(zip(keys, written, strict=True)))

    def listed(self, target: TableKey, files: TableFiles, epoch: Epoch) -> TableFiles:
        """Return a table's list with the new files, in the order in which a restore reads them.

        Args:
            files: of the table in the source.
            epoch: of the operator of the stopped job.
        """
        new = {path: file for (table, path), file in self.files.items() if table == target}
        if isinstance(files, GlobalKeyedFiles):
            # Commit data stays with the sinks, whose tables are not carried.
            copies = [new[path] for path in files.files]
            return replace(files, files=tuple(path for path in copies if isinstance(path, str)))
        # A subtask takes a file of a later epoch than its own for one that it has just written.
        # Sorted by the source's epochs first, files of equal epochs keep their order.
        ordered = [new[file.path] for file in sorted(files.files, key=lambda file: file.epoch)]
        carried = [file for file in ordered if isinstance(file, TimeFile)]
        levels = {file.compaction_generation for file in carried}
        # With the order of epochs lost, a file beside a compacted one would look like its input.
        level = max(levels) if carried and carried[-1].epoch > epoch and len(levels) > 1 else None
        return replace(
            files,
            files=tuple(
                replace(
                    file,
                    epoch=Epoch(min(file.epoch, epoch)),
                    compaction_generation=file.compaction_generation if level is None else level,
                )
                for file in carried
            ),
        )


@dataclass(frozen=True, slots=True)
class _Planned:
    """A file of the source, and the name of what is made of it."""

    table: CarriedTable
    file: TimeFile | StatePath
    name: StatePath

    @property
    def path(self) -> StatePath:
        return self.file.path if isinstance(self.file, TimeFile) else self.file

    def size_bytes(self, source: ObjectStore, held: ObjectStore) -> int:
        """Return how much of the file is in memory while it is written.

        Raises:
            NotFoundError: it expired meanwhile.
        """
        info = source.head(self.path)
        if info is None:
            raise NotFoundError("a file of the source no longer exists", path=self.path)
        whole = self.table.conversion is not None or source.url != held.url
        return info.size_bytes if whole else min(info.size_bytes, CHUNK_BYTES)

    def write(self, source: ObjectStore, held: ObjectStore) -> NewFile:
        if isinstance(self.file, TimeFile) and self.table.conversion is not None:
            return convert_file(source, held, self.file, self.name, self.table.conversion)
        _copy(source, held, self.path, self.name)
        return replace(self.file, path=self.name) if isinstance(self.file, TimeFile) else self.name


def _planned(target: Checkpoint, tables: CarriedTables) -> Iterator[_Planned]:
    for table in tables.tables:
        files: Sequence[TimeFile | StatePath] = tables.files_of(table).files
        for index, file in enumerate(files):
            yield _Planned(table, file, _new_name(target, table.target, index))


def without_rows(
    held: ObjectStore,
    checkpoint: Checkpoint,
    operator: OperatorCheckpoint,
    names: Collection[TableName],
) -> OperatorCheckpoint:
    """Return an operator of a stopped job whose tables with these names are empty.

    A table of rows vanishes, as Arroyo leaves it out. A global keyed table keeps a file without
    entries: Arroyo writes one in every epoch.
    """
    tables = dict(operator.tables)
    for name in names:
        files = tables[name]
        if isinstance(files, GlobalKeyedFiles):
            path = _new_name(checkpoint, (operator.operator, name), 0)
            version = operator.configs[name].state_version
            held.put(path, encode_pairs([], [], GLOBAL_KEY_VALUE_SCHEMA, version=version))
            tables[name] = replace(files, files=(path,))
    gone = {name for name in names if isinstance(tables[name], ExpiringTimeKeyFiles)}
    return replace(
        operator,
        tables={name: files for name, files in tables.items() if name not in gone},
        configs={name: config for name, config in operator.configs.items() if name not in gone},
    )


def _new_name(target: Checkpoint, key: TableKey, at: int) -> StatePath:
    return JobPaths(target.job, target.pipeline).data_file(
        *key,
        at,
        target.epoch,
        target.worker_generation,
        attempt=rewritten_attempt(uuid.uuid4().hex),
    )


def _copy(source: ObjectStore, held: ObjectStore, path: StatePath, name: StatePath) -> None:
    if source.url == held.url:
        held.copy(path, name)
    else:
        held.put(name, source.read(path))
    if digest_stored(held, name) != digest_stored(source, path):
        raise ProtocolError(
            "a copy reads back different from its original; nothing was published",
            path=name,
            original=path,
        )
