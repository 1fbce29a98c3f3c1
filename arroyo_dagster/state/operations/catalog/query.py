"""The content of one epoch, and the rows of its tables as a restore would load them.

This module writes nothing; it reads many objects concurrently.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from arroyo_dagster.errors import FormatError, NotFoundError
from arroyo_dagster.state.metadata.tree import CheckpointTree
from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.ids import Epoch, OperatorId, StatePath, TableName
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.progress import OnProgress, no_progress
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyConfig,
    GlobalKeyedFiles,
    TableConfig,
    TableFiles,
    TableKind,
)
from arroyo_dagster.state.model.types import Primitive
from arroyo_dagster.state.operations.catalog.metadata_only import metadata_only_epochs, no_rows_left
from arroyo_dagster.state.operations.progress import CountedReads
from arroyo_dagster.state.planning.privacy import (
    NOTHING_PRIVATE,
    UNKNOWN_BYTES,
    PrivateColumns,
    TableMask,
)
from arroyo_dagster.state.planning.restore.reads import find_table, ordered_operators
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

if TYPE_CHECKING:
    import pyarrow as pa

    from arroyo_dagster.state.tables.known.catalogue import Catalogue, TableForm
    from arroyo_dagster.state.tables.known.tables import KnownTable

_T = TypeVar("_T")


# ---- one epoch -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSummary:
    """A table at one epoch: its files, their stored rows and their bytes.

    `owner` says what keeps the table, as the catalogue of known tables names it; None = not known
    there.
    """

    table: TableName
    kind: TableKind
    description: str
    owner: str | None
    files: int
    rows: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSummary:
    """An operator at one epoch. The watermark is its subtasks' smallest; None = not all have it."""

    operator: OperatorId
    parallelism: int
    watermark_micros: int | None
    tables: tuple[TableSummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochDescription:
    """The content of one epoch."""

    checkpoint: Checkpoint
    operators: tuple[OperatorSummary, ...]


def load_epoch(store: ObjectStore, paths: JobPaths, epoch: int | None = None) -> Checkpoint:
    """Read the metadata of an epoch; None = the newest visible epoch.

    Raises:
        NotFoundError: no such epoch, or none at all; lists the existing epochs. Or only its
            metadata is left.
        FormatError: an object of the epoch is missing or does not decode.
    """
    epochs = CheckpointTree(store, paths).epochs()
    number = chosen_epoch(store, paths, epochs, epoch)
    checkpoint = read_epoch(store, paths, number)
    if number != epochs[-1] and (needed_by := metadata_only_epochs(store, paths, {number})):
        raise no_rows_left(paths, number, needed_by)
    return checkpoint


def read_epoch(store: ObjectStore, paths: JobPaths, epoch: Epoch) -> Checkpoint:
    """Read the metadata of a visible epoch, of which more than its metadata is left.

    Raises:
        NotFoundError: an object of the epoch is missing.
        FormatError: an object of the epoch does not decode.
    """
    try:
        return CheckpointTree(store, paths).load_checkpoint_metadata(epoch)
    except NotFoundError as error:
        raise _missing(error, paths, epoch) from error


def chosen_epoch(
    store: ObjectStore, paths: JobPaths, epochs: Sequence[Epoch], epoch: int | None
) -> Epoch:
    """Return the requested epoch out of those of a job; None = the newest.

    Raises:
        NotFoundError: no such epoch, or none at all; lists the existing epochs.
    """
    number = Epoch(epoch) if epoch is not None else (epochs[-1] if epochs else None)
    if number is None or number not in epochs:
        raise NotFoundError(
            "the job has no visible epoch" if number is None else "there is no such epoch",
            job=paths.root,
            epoch=number,
            epochs=_ranges(epochs),
            url=store.url,
            next_step="choose an existing epoch, or wait for it to be written",
        )
    return number


def _ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers as ranges: `1-4, 7`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts) or "none"


def _missing(error: NotFoundError, paths: JobPaths, epoch: Epoch) -> FormatError:
    return FormatError(
        "an object that the epoch needs is missing",
        **({"job": paths.root, "epoch": epoch} | error.facts),  # type: ignore[arg-type]
        next_step="choose another epoch, or restore the object; if the job runs, this epoch may "
        "just have expired",
    )


def describe_epoch(
    store: ObjectStore, paths: JobPaths, epoch: int | None = None
) -> EpochDescription:
    """Describe the content of an epoch: operators, tables, files, rows, bytes.

    Raises:
        NotFoundError: no such epoch.
        FormatError: an object of the epoch, or the footer of a data file, is missing or broken.
    """
    checkpoint = load_epoch(store, paths, epoch)
    listed = list(dict.fromkeys(checkpoint.paths))
    try:
        measured = concurrently(lambda path: _file_facts(store, path), listed)
    except NotFoundError as error:
        raise _missing(error, paths, checkpoint.epoch) from error
    facts = dict(zip(listed, measured, strict=True))
    operators = tuple(
        OperatorSummary(
            operator=operator.operator,
            parallelism=operator.parallelism,
            watermark_micros=operator.min_watermark_micros,
            tables=tuple(
                _table_summary(operator, name, files, facts)
                for name, files in sorted(operator.tables.items())
            ),
        )
        for operator in ordered_operators(checkpoint)
    )
    return EpochDescription(checkpoint=checkpoint, operators=operators)


def _file_facts(store: ObjectStore, path: StatePath) -> tuple[int, int]:
    """Return the rows and bytes of a data file; only its footer is read."""
    from arroyo_dagster.state.codec.parquet import read_facts

    with store.open_input(path) as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        return read_facts(file, path).rows, size


def _table_summary(
    operator: OperatorCheckpoint,
    name: TableName,
    files: TableFiles,
    facts: Mapping[StatePath, tuple[int, int]],
) -> TableSummary:
    from arroyo_dagster.state.tables.known.catalogue import default_catalogue

    config = operator.configs.get(name)
    owner = None if config is None else default_catalogue().owner_of(operator.operator, config)
    return TableSummary(
        table=name,
        kind=files.kind,
        description="" if config is None else config.config.description,
        owner=owner,
        files=len(files.paths),
        rows=sum(facts[path][0] for path in files.paths),
        size_bytes=sum(facts[path][1] for path in files.paths),
    )


# ---- the rows of a table -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRows:
    """Rows of a table at one epoch, as plain JSON values.

    Attributes:
        rows: `{key, value}`, or `{key_hex, value_hex}` where the types are unknown or the bytes do
            not match them; for an expiring table one object per row, by column name.
        count: the number of rows of the table at this epoch.
        known: the table's entry in the catalogue of known tables; None = it has none.
        problem: why entries are printed as bytes, which values are damaged, or why Arroyo would
            restore fewer rows than these, and what to do about it; None = no such problem.
        commit_data: by subtask, its data for the second phase of the commit; bytes in hex where the
            type is unknown, None where the subtask left no data.
        masked: the private columns and fields among those of the rows.
    """

    epoch: Epoch
    rows: tuple[dict[str, Any], ...]
    count: int
    known: KnownTable | None = None
    problem: str | None = None
    commit_data: Mapping[int, Any] = field(default_factory=dict)
    masked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Which rows of a table are read, and how.

    Attributes:
        epoch: read at this epoch; None = the newest visible one.
        limit: return at most this many rows; None = all.
        history: also return the older row generations of generational tables.
        catalogue: decodes entries whose types the job did not store; None = the tables registered
            in this process, see `register_table`.
        private: the columns whose values are masked. If there are any, bytes of unknown type are
            masked, too, and problems name no value.
        on_progress: called after each file that is opened, by any thread, by one at a time.
    """

    epoch: int | None = None
    limit: int | None = None
    history: bool = False
    catalogue: Catalogue | None = None
    private: PrivateColumns = NOTHING_PRIVATE
    on_progress: OnProgress = no_progress


def read_rows(
    store: ObjectStore,
    paths: JobPaths,
    operator: str,
    table: str,
    options: ReadOptions | None = None,
) -> TableRows:
    """Read the rows that a restore at this epoch would load, over all subtasks.

    Removals are applied, and rows older than the retention are left out. In generational tables
    each key has its newest row, if that row is still live.

    With a limit, files are read in batches. Of a global keyed table, memory then holds only the
    keys and the returned values.

    Raises:
        NotFoundError: no such epoch, operator or table; lists the existing ones.
        FormatError: a data file is missing or broken.
    """
    settings = options or ReadOptions()
    checkpoint = load_epoch(store, paths, settings.epoch)
    state, config, files = find_table(checkpoint, operator, table)
    from arroyo_dagster.state.codec.plain import plain_rows
    from arroyo_dagster.state.tables.known.catalogue import default_catalogue
    from arroyo_dagster.state.tables.restoring import restored_rows

    if settings.on_progress is not no_progress:
        store = CountedReads(store, files.paths, settings.on_progress, "opened files")
    catalogue, limit = settings.catalogue or default_catalogue(), settings.limit
    mask = settings.private.table(paths, state.operator, config.table)
    try:
        if isinstance(files, GlobalKeyedFiles):
            entries = _EntryReader(store, catalogue, state, config.table, limit, mask)
            return replace(entries.read(checkpoint.epoch), masked=mask.masked)
        managed = checkpoint.progress is not None
        restored = restored_rows(
            store, state, config.table, managed=managed, history=settings.history, limit=limit
        )
    except NotFoundError as error:
        raise _missing(error, paths, checkpoint.epoch) from error
    assert isinstance(config.config, ExpiringTimeKeyConfig)
    schema = config.config.schema
    indices = {*(schema.key_indices or ()), *schema.hashed_indices}
    names = restored.rows.schema.names
    keys = {names[index] for index in indices if index < len(names)}
    rows = tuple(mask.row(row, keys) for row in plain_rows(restored.rows))
    return TableRows(
        epoch=checkpoint.epoch,
        rows=rows,
        count=restored.count,
        known=catalogue.describe(state.operator, config),
        problem=_damaged_rows(restored.rows, mask)
        or (None if restored.upstream is None else _LESS_UPSTREAM),
        masked=mask.masked,
    )


def _damaged_rows(rows: pa.Table, mask: TableMask) -> str | None:
    import pyarrow as pa

    try:
        rows.validate(full=True)
    except pa.ArrowInvalid as error:
        why = "" if mask else f" ({error})"
        return (
            f"a value does not match its column's type{why}; invalid texts are printed in "
            "hex. Keep the files and report it; `arroyo-state verify` lists them"
        )
    return None


_LESS_UPSTREAM = (
    "an aggregate without GROUP BY: when it is restarted, Arroyo restores only the first row of "
    "each record batch, and continues from an older state than this. `arroyo-state verify` has "
    "details"
)

# How many entries are read to distinguish the forms that releases of Arroyo gave a table.
_REPORT_ROWS = 1000

_BYTES = Primitive("bytes")


@dataclass(frozen=True, slots=True)
class _EntryReader:
    """Reads the entries of a global keyed table for people."""

    store: ObjectStore
    catalogue: Catalogue
    operator: OperatorCheckpoint
    table: TableName
    limit: int | None
    mask: TableMask

    def read(self, epoch: Epoch) -> TableRows:
        """Read the entries at an epoch."""
        from arroyo_dagster.state.tables.global_keyed import GlobalKeyedTable
        from arroyo_dagster.state.tables.global_keys import Entries, first_entries

        config, files = self.operator.configs[self.table], self.operator.tables[self.table]
        assert isinstance(files, GlobalKeyedFiles)
        if self.limit is None:
            entries = GlobalKeyedTable(config, self.store).load_with_version(files.files)
            loaded = Entries(len(entries), entries)
        else:
            loaded = first_entries(self.store, files.files, max(self.limit, _REPORT_ROWS))
        form = self.catalogue.form_of(self.operator.operator, config, loaded.first)
        pairs = list(itertools.islice(loaded.first.items(), self.limit))
        damaged: list[str] = []
        rows = [self._entry(form, key, value, damaged) for key, (_, value) in pairs]
        return TableRows(
            epoch=epoch,
            rows=tuple(rows),
            count=loaded.count,
            known=form.known,
            problem=_damage(damaged, len(pairs)) or (form.problem if loaded.count else None),
            commit_data={
                subtask: self._commit_data(config, data)
                for subtask, data in sorted(files.commit_data_by_subtask.items())
            },
        )

    def _entry(
        self, form: TableForm, key: bytes, value: bytes, damaged: list[str]
    ) -> dict[str, Any]:
        """Return an entry as plain values; if it does not decode, as bytes, and note it in
        `damaged`.
        """
        try:
            entry, types = form.plain(key, value), (form.key_type, form.value_type)
        except FormatError as error:
            damaged.append(error.message if self.mask else f"key {key.hex()}: {error}")
            entry, types = type(form)().plain(key, value), (None, None)
        if not self.mask:
            return entry
        masked = self.mask.row(entry, keys=["key"])
        return {
            name: UNKNOWN_BYTES if kind in (None, _BYTES) else masked[name]
            for name, kind in zip(entry, types, strict=True)
        }

    def _commit_data(self, config: TableConfig, data: bytes) -> Any:
        from arroyo_dagster.state.codec.plain import plain_value

        if not data:
            return None
        decoded = self.catalogue.decode_commit_data(self.operator.operator, config, data)
        if decoded is None:
            return UNKNOWN_BYTES if self.mask else data.hex()
        return self.mask.plain(plain_value(*decoded), ("commit_data",))


def _damage(damaged: Sequence[str], shown: int) -> str | None:
    if not damaged:
        return None
    return (
        f"{len(damaged)} of the {shown} entries do not match the table's stored types and are "
        f"printed as bytes, such as {damaged[0]}. Keep the files and report it; `arroyo-state "
        "verify` lists them"
    )
