"""Entries of global keyed tables: read with their types, changed by codec round trip, written."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from arroyo_dagster.errors import FormatError, InputError, ProtocolError
from arroyo_dagster.state.codec.bincode.codec import codec_for
from arroyo_dagster.state.codec.parquet import GLOBAL_KEY_VALUE_SCHEMA, decode_file, encode_pairs
from arroyo_dagster.state.codec.plain import plain_value
from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.ids import StatePath, TableName
from arroyo_dagster.state.model.json_fields import parse_json
from arroyo_dagster.state.model.layout import JobPaths, rewritten_attempt
from arroyo_dagster.state.model.surgery.plans import EntryChange
from arroyo_dagster.state.model.tables import GlobalKeyedFiles, TableConfig
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.known.catalogue import Catalogue, TableForm

Change = Callable[[Any, Any], Any]
"""The new value of an entry, from its decoded key and value; the value itself = it stays."""


@dataclass(frozen=True, slots=True)
class PairFile:
    """One data file of a global keyed table: its pairs in their order, and its state version."""

    path: StatePath
    pairs: tuple[tuple[bytes, bytes], ...]
    version: int


@dataclass(frozen=True, slots=True)
class GlobalTable:
    """A global keyed table at one epoch, with the types of its entries.

    Attributes:
        files: in replay order; a key may be in several of them.
    """

    operator: OperatorCheckpoint
    name: TableName
    config: TableConfig
    files: tuple[PairFile, ...]
    form: TableForm

    @property
    def owner(self) -> str:
        """The connector or operator that keeps it."""
        return self.form.known.owner if self.form.known is not None else "unknown operator"

    @property
    def where(self) -> dict[str, Any]:
        """The facts of an error about it."""
        return {"operator": str(self.operator.operator), "table": str(self.name)}

    def entries(self) -> Iterator[tuple[PairFile, Any, Any]]:
        """Yield the decoded key and value of each entry, with its file.

        Raises:
            FormatError: an entry does not decode, or its types are not known.
        """
        for file in self.files:
            for key, value in file.pairs:
                decoded = self.form.decode(key, value)
                if decoded is None:
                    raise FormatError(
                        self.form.problem or "the types of the entries are not known",
                        path=file.path,
                        **self.where,
                    )
                yield (file, *decoded)


def read_global_tables(
    store: ObjectStore, checkpoint: Checkpoint, catalogue: Catalogue
) -> list[GlobalTable]:
    """Read every global keyed table of an epoch.

    Raises:
        FormatError, NotFoundError: a file is broken, or missing.
    """
    stored = [
        (operator, name, files)
        for operator in checkpoint.operators
        for name, files in operator.tables.items()
        if isinstance(files, GlobalKeyedFiles) and name in operator.configs
    ]
    return concurrently(lambda table: _read(store, catalogue, *table), stored)


def _read(
    store: ObjectStore,
    catalogue: Catalogue,
    operator: OperatorCheckpoint,
    name: TableName,
    files: GlobalKeyedFiles,
) -> GlobalTable:
    contents = tuple(_read_pairs(store, path) for path in files.files)
    entries = {key: (file.version, value) for file in contents for key, value in file.pairs}
    form = catalogue.form_of(operator.operator, operator.configs[name], entries)
    return GlobalTable(operator, name, operator.configs[name], contents, form)


def _read_pairs(store: ObjectStore, path: StatePath) -> PairFile:
    rows, version = decode_file(store.read(path), path)
    if not rows.schema.equals(GLOBAL_KEY_VALUE_SCHEMA):
        raise FormatError(
            "a file of a global keyed table has other columns",
            path=path,
            found=rows.schema.to_string(show_schema_metadata=False),
        )
    pairs = zip(rows.column(0).to_pylist(), rows.column(1).to_pylist(), strict=True)
    return PairFile(path, tuple(pairs), version)


# ---- changes -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChangedEntries:
    """The new content of some files of a global keyed table.

    Attributes:
        changes: the entries that change, for the plan.
        files: the new pairs of each file that changes.
    """

    table: GlobalTable
    changes: tuple[EntryChange, ...]
    files: Mapping[StatePath, PairFile]


def changed_entries(table: GlobalTable, change: Change) -> ChangedEntries:
    """Apply a change to every entry of a table, and prove that the new values decode as intended.

    Raises:
        InputError: the change refuses an entry; or the codec does not round trip it.
        FormatError: an entry does not decode, or its types are not known.
    """
    changes: list[EntryChange] = []
    files: dict[StatePath, PairFile] = {}
    for file in table.files:
        pairs = []
        for key, value in file.pairs:
            new = _changed(table, file, key, value, change)
            if new != value:
                changes.append(_entry_change(table, file, key, value, new))
            pairs.append((key, new))
        if tuple(pairs) != file.pairs:
            files[file.path] = PairFile(file.path, tuple(pairs), file.version)
    return ChangedEntries(table, tuple(changes), files)


def _changed(table: GlobalTable, file: PairFile, key: bytes, value: bytes, change: Change) -> bytes:
    decoded = table.form.decode(key, value)
    if decoded is None:
        raise FormatError(
            table.form.problem or "the types of the entries are not known",
            path=file.path,
            **table.where,
        )
    new = change(*decoded)
    if new == decoded[1]:
        return value
    codec = codec_for(table.form.value_type)
    if codec.encode(decoded[1]) != value:
        raise InputError(
            "an entry does not encode to the bytes it was decoded from, so it cannot be changed",
            path=file.path,
            **table.where,
            next_step="report it; nothing was changed",
        )
    data = codec.encode(new)
    if codec.decode(data) != new:
        raise InputError(
            "the new value of an entry would not decode as intended",
            path=file.path,
            **table.where,
            next_step="report it; nothing was changed",
        )
    return data


def _entry_change(
    table: GlobalTable, file: PairFile, key: bytes, before: bytes, after: bytes
) -> EntryChange:
    old, new = table.form.plain(key, before), table.form.plain(key, after)
    return EntryChange(
        file=file.path,
        key=json.dumps(old["key"]),
        before=json.dumps(old["value"]),
        after=json.dumps(new["value"]),
    )


def plain_key(table: GlobalTable, key: Any) -> str:
    """Return a decoded key as JSON text."""
    assert table.form.key_type is not None
    return json.dumps(plain_value(key, table.form.key_type))


def json_of(text: str, name: str, where: Mapping[str, Any]) -> Any:
    """Parse a key or a value that a person gave as JSON.

    Raises:
        InputError: it is no JSON.
    """
    try:
        return parse_json(text)
    except ValueError as error:
        raise InputError(
            f"the {name} is no JSON: {text:.80}",
            **where,
            next_step="give it in the form in which `arroyo-state rows --json` prints it",
        ) from error


# ---- writing -------------------------------------------------------------------------------------


def write_entries(
    store: ObjectStore, paths: JobPaths, checkpoint: Checkpoint, changed: ChangedEntries
) -> tuple[StatePath, ...]:
    """Write the changed files under new names, and return the table's new list of files.

    The list keeps its order: where subtasks share a key, a later file wins.

    Raises:
        ProtocolError: a file reads back different from what was written.
    """
    table = changed.table
    listed = []
    for subtask, file in enumerate(table.files):
        new = changed.files.get(file.path)
        if new is None:
            listed.append(file.path)
            continue
        path = paths.data_file(
            table.operator.operator,
            table.name,
            subtask,
            checkpoint.epoch,
            checkpoint.worker_generation,
            attempt=rewritten_attempt(uuid.uuid4().hex),
        )
        keys, values = zip(*new.pairs, strict=True)
        data = encode_pairs(keys, values, GLOBAL_KEY_VALUE_SCHEMA, version=new.version)
        store.put(path, data)
        again = _read_pairs(store, path)
        if (sorted(again.pairs), again.version) != (sorted(new.pairs), new.version):
            raise ProtocolError(
                "a new file reads back different from what was written; nothing was published",
                path=path,
                **table.where,
            )
        listed.append(path)
    return tuple(listed)
