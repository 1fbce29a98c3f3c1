"""The tables that Arroyo's operators register, and how their entries are decoded.

Arroyo stores no types: the meaning of a global keyed table's bytes depends on the operator that
wrote them. A catalogue knows the built-in operators and connectors; add others with
`register_table`:

```python
from arroyo_dagster.state import KnownTable, register_table
from arroyo_dagster.state.model.types import U64

@dataclass(frozen=True)
class Position:
    file: str
    line: U64

register_table(
    KnownTable(
        owner="log source", holds="the next line by file", table="p", description="positions",
        key=str, value=Position,
    )
)
```

To make them known to the command line and Dagster too, install a package whose entry point in the
group `arroyo_dagster.tables` names one or more `KnownTable`s. Managed jobs need neither: they store
their types with their tables.

Source: crates/arroyo-connectors/src/; crates/arroyo-worker/src/arrow/.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state.model.tables import TableConfig
from arroyo_dagster.state.model.types import Type
from arroyo_dagster.state.tables.known.built_in import BUILT_IN
from arroyo_dagster.state.tables.known.tables import KnownTable

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from arroyo_dagster.state.codec.bincode.codec import Codec


ENTRY_POINTS = "arroyo_dagster.tables"
"""The group of entry points by which installed packages name tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableForm:
    """How the entries of one table are decoded.

    Attributes:
        known: the table's entry in the catalogue; None = it has none.
        key_type, value_type: the encoding of entries; None for both = they stay bytes.
        problem: why they stay bytes, and what to do about it; None = they are decoded.
    """

    known: KnownTable | None = None
    key_type: Type | None = None
    value_type: Type | None = None
    problem: str | None = None

    def decode(self, key: bytes, value: bytes) -> tuple[Any, Any] | None:
        """Decode one entry; None if entries stay bytes.

        Raises:
            FormatError: the bytes do not match the key or value type.
        """
        if self.key_type is None or self.value_type is None:
            return None
        return _codec_of(self.key_type).decode(key), _codec_of(self.value_type).decode(value)

    def plain(self, key: bytes, value: bytes) -> dict[str, Any]:
        """Decode one entry for people: `{key, value}` as JSON, else `{key_hex, value_hex}`.

        Raises:
            FormatError: as `decode`.
        """
        decoded = self.decode(key, value)
        if decoded is None or self.key_type is None or self.value_type is None:
            return {"key_hex": key.hex(), "value_hex": value.hex()}
        from arroyo_dagster.state.codec.plain import plain_value

        return {
            "key": plain_value(decoded[0], self.key_type),
            "value": plain_value(decoded[1], self.value_type),
        }


class Catalogue:
    """Known tables; if several match a table, the first whose types match its bytes is used."""

    def __init__(self, tables: Iterable[KnownTable]) -> None:
        self.tables: tuple[KnownTable, ...] = tuple(tables)

    def find(self, operator: str, config: TableConfig) -> tuple[KnownTable, ...]:
        """Return the matches for an operator's table, most likely first, of any state version."""
        return tuple(known for known in self.tables if known.is_of(operator, config))

    def describe(self, operator: str, config: TableConfig) -> KnownTable | None:
        """Return the best match for a table without reading its bytes; None = no match."""
        options = self.find(operator, config)
        of_version = [known for known in options if known.has_version(config.state_version)]
        return next(iter(of_version or options), None)

    def owner_of(self, operator: str, config: TableConfig) -> str | None:
        """Return a table's owner without reading its bytes; several, if only these decide."""
        options = self.find(operator, config)
        of_version = [known for known in options if known.has_version(config.state_version)]
        owners = dict.fromkeys(known.owner for known in of_version if not known.releases)
        return " or ".join(owners) or (options[0].owner if options else None)

    def form_of(
        self, operator: str, config: TableConfig, entries: Mapping[bytes, tuple[int, bytes]]
    ) -> TableForm:
        """Choose how the entries of a global keyed table are decoded.

        Args:
            entries: by key, the state version of the file and the value; all of the table's, or
                enough to distinguish the forms of several releases.

        Returns:
            The types that the job stored, if any; else the first known form that decodes all
            entries to the last byte; else a form without types that says why.
        """
        if config.key_type is not None and config.value_type is not None:
            known = self.describe(operator, config)
            return TableForm(known=known, key_type=config.key_type, value_type=config.value_type)
        options = self.find(operator, config)
        if not options:
            return TableForm(problem=_unknown(operator, config))
        versions = {version for version, _ in entries.values()} or {config.state_version}
        fitting = [option for option in options if all(map(option.has_version, versions))]
        if not fitting:
            return TableForm(known=options[0], problem=_other_version(options[0], config, versions))
        refused: FormatError | None = None
        for known in fitting:
            if not known.has_entries and entries:
                continue
            try:
                _decode_all(_codec_of(known.key_type), entries)
                _decode_all(_codec_of(known.value_type), [value for _, value in entries.values()])
            except FormatError as error:
                refused = refused or error
                continue
            return TableForm(known=known, key_type=known.key_type, value_type=known.value_type)
        return TableForm(known=fitting[0], problem=_misfit(fitting[0], config, refused))

    def decode_commit_data(
        self, operator: str, config: TableConfig, data: bytes
    ) -> tuple[Any, Type] | None:
        """Decode a subtask's data for the second phase of a commit.

        Returns:
            The value and its type; None if there is no data, or its type is unknown.
        """
        options = self.find(operator, config)
        kinds = [known.commit_type for known in options if known.commit is not None]
        for codec in map(_codec_of, kinds if data else ()):
            try:
                return codec.decode(data), codec.type
            except FormatError:
                # Releases differ: the next form may match.
                continue
        return None


def _codec_of(kind: Any) -> Codec[Any]:
    # The command `show` names the owners of tables, and decodes nothing.
    from arroyo_dagster.state.codec.bincode.codec import codec_for

    return codec_for(kind)


def _decode_all(codec: Codec[Any], values: Collection[bytes]) -> None:
    """Raise a FormatError if one of the values does not decode."""
    if codec.column_type is not None:
        import pyarrow as pa

        try:
            codec.decode_column(pa.array(list(values), pa.binary()))
        except InputError:
            pass  # a time that no Arrow column can hold: decode one by one
        else:
            return
    codec.decode_many(values)


# --- why entries stay bytes ----------------------------------------------------------------------


def _how_to_register(config: TableConfig) -> str:
    return (
        f"arroyo_dagster.state.register_table(KnownTable(owner=…, holds=…, "
        f"table={str(config.table)!r}, description={config.config.description!r}, "
        f"key=…, value=…)), or the same in an entry point of the group {ENTRY_POINTS}"
    )


def _unknown(operator: str, config: TableConfig) -> str:
    return (
        f"no type is known for the entries of table {str(config.table)!r} of {operator}, so they "
        f"are shown as bytes. Register one: {_how_to_register(config)}"
    )


def _other_version(known: KnownTable, config: TableConfig, versions: Collection[int]) -> str:
    text = ", ".join(map(str, sorted(versions)))
    return (
        f"the entries are of state version {text}, which is not known of the {known.owner}, so "
        f"they are shown as bytes. Register it with state_version=…: {_how_to_register(config)}"
    )


def _misfit(known: KnownTable, config: TableConfig, error: FormatError | None) -> str:
    why = f"do not decode ({error})" if error else "should not be there, for it writes none"
    return (
        f"table {str(config.table)!r} is known from the {known.owner}, but its entries {why}; "
        "they are printed as bytes. Another release of Arroyo may have written them, or they "
        f"are damaged. To register another form: {_how_to_register(config)}"
    )


# --- the catalogue of this process ---------------------------------------------------------------

_registered: list[KnownTable] = []


def register_table(*tables: KnownTable) -> None:
    """Register tables in this process; they take precedence over the built-in ones.

    The table registered last is tried first; registering the same one again changes nothing.

    Raises:
        InputError: not a `KnownTable`.
    """
    for table in tables:
        _check(table, "register_table")
        if table not in _registered:
            _registered.insert(0, table)


def default_catalogue() -> Catalogue:
    """Return the tables registered here, those of installed packages, and the built-in ones.

    Raises:
        InputError: an installed package names something other than tables, or fails to load.
    """
    return Catalogue((*_registered, *_installed(), *BUILT_IN))


@lru_cache(maxsize=1)
def _installed() -> tuple[KnownTable, ...]:
    points = sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name)
    return tuple(table for point in points for table in _load(point))


def _load(point: EntryPoint) -> tuple[KnownTable, ...]:
    where = f"the entry point {point.name!r} ({point.value})"
    try:
        named = point.load()
    except Exception as error:
        raise InputError(
            f"{where} of the group {ENTRY_POINTS} does not load: {error}",
            next_step="repair or uninstall the package that names it",
        ) from error
    tables = (named,) if not isinstance(named, Iterable) else tuple(named)
    for table in tables:
        _check(table, where)
    return tables


def _check(table: object, where: str) -> None:
    if not isinstance(table, KnownTable):
        raise InputError(
            f"{where} is not a KnownTable",
            found=f"{type(table).__name__} {table!r:.80}",
            next_step="pass KnownTable(owner=…, holds=…, table=…, description=…, key=…, value=…)",
        )


# ---- installed -----------------------------------------------------------------------------------
# The entry points of installed packages, found without `importlib.metadata` where there are none.
#
# Loading that module takes as much processor time as the work of a short command, and hardly any
# package names tables.

_METADATA = (".dist-info", ".egg-info", "egg-info")


def entry_points(*, group: str) -> Collection[EntryPoint]:
    """Return the entry points of a group, of all packages that this process can import."""
    foreign = (finder for finder in sys.meta_path if finder is not PathFinder)
    if not any(hasattr(finder, "find_distributions") for finder in foreign) and not any(
        _may_mention(group, Path(folder)) for folder in sys.path
    ):
        return ()
    import importlib.metadata

    return importlib.metadata.entry_points(group=group)


def _may_mention(group: str, folder: Path) -> bool:
    """Whether the metadata of a package below an entry of `sys.path` mentions a group; True for
    what is no folder, for example an archive, and for what cannot be read.
    """
    try:
        if not folder.is_dir():
            return folder.exists()
        names = [name for name in os.listdir(folder) if name.lower().endswith(_METADATA)]
        texts = (folder / name / "entry_points.txt" for name in names)
        return any(group in text.read_text("utf-8") for text in texts if text.is_file())
    except (OSError, ValueError):
        return True
