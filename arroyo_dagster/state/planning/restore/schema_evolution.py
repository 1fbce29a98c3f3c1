"""How the columns of an expiring table of a managed job may change from one epoch to the next.

Columns may be added, dropped and widened. Files of older epochs stay unchanged and are read with
the table's present columns: an added column is null in them, a dropped one is left out, a widened
one is cast. The stored schema records the epoch in which the columns last changed, and the epoch
in which each column was added. A column that was dropped and added again is a new column, whose old
values are never read.

All functions use the JSON form of schemas and open no file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.model.numbers import parse_number
from arroyo_dagster.state.model.tables import (
    ADDED_IN,
    CHANGED_IN,
    GENERATION_COLUMN,
    KEY_HASH_COLUMN,
    OPERATION_COLUMN,
    ExpiringTimeKeyConfig,
    StoredSchema,
)

_NEVER = Epoch(0)
_Name = tuple[str, int]
"""A column, identified by its name and the number of columns of that name before it."""


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of a stored schema.

    Attributes:
        data_type: the JSON form of its Arrow type.
        added_in: the epoch in which it was added; 0 = when the table was created.
    """

    name: str
    data_type: Any
    nullable: bool
    added_in: Epoch = _NEVER

    def __str__(self) -> str:
        return f"{self.name}: {type_text(self.data_type)}{'' if self.nullable else ' not null'}"

    def same(self, other: TableColumn) -> bool:
        """Return whether both have the same name, type and nullability."""
        own = (self.name, bare(self.data_type), self.nullable)
        return own == (other.name, bare(other.data_type), other.nullable)


_BEHIND = (
    TableColumn(KEY_HASH_COLUMN, "UInt64", False),
    TableColumn(OPERATION_COLUMN, "Binary", False),
)
_ROW_GENERATION = TableColumn(GENERATION_COLUMN, "UInt64", False)


def columns_in(schema_json: str) -> tuple[TableColumn, ...]:
    """Return the columns of a schema in JSON form, which `codec.schema` has validated."""
    return tuple(
        TableColumn(
            field["name"],
            field["data_type"],
            field["nullable"],
            _noted_epoch(field["metadata"], ADDED_IN),
        )
        for field in json.loads(schema_json)["fields"]
    )


def changed_in(schema: StoredSchema) -> Epoch:
    """Return the epoch since which a table has its columns; older files may have others.

    0 = they never changed, as in all Arroyo jobs.
    """
    return _noted_epoch(json.loads(schema.arrow_schema).get("metadata"), CHANGED_IN)


def _noted_epoch(metadata: dict[str, str] | None, note: str) -> Epoch:
    number = parse_number((metadata or {}).get(note, ""))
    return _NEVER if number is None else Epoch(number)


# ---- from one schema to the next -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Evolution:
    """The changes of a table's columns, as text.

    Attributes:
        changes: added, dropped, widened or moved columns; empty if the columns are the same.
        problems: why rows of the old columns cannot be read as the new ones; empty if they can.
    """

    changes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def evolution(before: ExpiringTimeKeyConfig, now: ExpiringTimeKeyConfig) -> Evolution:
    """Compare two configurations of a table, and check whether the change is allowed.

    Columns may be added (nullable, since older rows have no value), dropped, moved, made nullable,
    and widened to a type that contains every value of the old one (see `type_widening`). These
    never change: `_timestamp`, the key columns, which columns are keys, the row generation.
    """
    old, new = columns_in(before.schema.arrow_schema), columns_in(now.schema.arrow_schema)
    problems = list(_fixed_errors(before, now, old, new))
    changes: list[str] = []
    places = _places(old, new)
    for column, place in zip(new, places, strict=True):
        if place is None:
            changes.append(f"added {column}")
            if not column.nullable:
                problems.append(f"the new column {column} must be nullable: older rows have none")
        elif not column.same(old[place]):
            changes.append(f"{old[place]} became {column}")
            problems.extend(_not_widened(old[place], column))
    kept = [place for place in places if place is not None]
    changes.extend(f"dropped {old[place]}" for place in range(len(old)) if place not in kept)
    if kept != sorted(kept):
        changes.append("columns moved")
    problems.extend(_twins(old, new))
    return Evolution(tuple(changes), tuple(dict.fromkeys(problems)))


def _named(columns: Iterable[TableColumn]) -> list[_Name]:
    seen: Counter[str] = Counter()
    names = []
    for column in columns:
        names.append((column.name, seen[column.name]))
        seen[column.name] += 1
    return names


def _places(old: Sequence[TableColumn], new: Sequence[TableColumn]) -> list[int | None]:
    """Return the index of each new column among the old ones, or None; twins match in order."""
    by_name = {name: place for place, name in enumerate(_named(old))}
    return [by_name.get(name) for name in _named(new)]


def _twins(old: Sequence[TableColumn], new: Sequence[TableColumn]) -> list[str]:
    before, now = (Counter(column.name for column in columns) for columns in (old, new))
    return [
        f"there were {before[name]} columns named {name!r}, and there are now {now[name]}: they "
        "cannot be matched"
        for name in before.keys() & now.keys()
        if before[name] != now[name]
    ]


def _not_widened(source: TableColumn, column: TableColumn) -> list[str]:
    problems = []
    if not fits(source.data_type, column.data_type):
        problems.append(f"{source} cannot become {column}: some values would not fit")
    if source.nullable and not column.nullable:
        problems.append(f"{source} cannot become {column}: older rows may hold nulls")
    return problems


def _fixed_errors(
    before: ExpiringTimeKeyConfig,
    now: ExpiringTimeKeyConfig,
    old: Sequence[TableColumn],
    new: Sequence[TableColumn],
) -> Iterable[str]:
    if not (_whole(before.schema, old) and _whole(now.schema, new)):
        yield "the stored schema names a column that it does not have"
        return
    if before.generational is not now.generational:
        yield "a table gets its row generations when it is created, and keeps them"
    time_before, time_now = old[before.schema.timestamp_index], new[now.schema.timestamp_index]
    if not time_before.same(time_now):
        yield f"{time_before} cannot become {time_now}"
    was, is_ = before.schema, now.schema
    for role, earlier, later in (
        ("storage key", was.key_indices, is_.key_indices),
        ("routing key", was.hashed_indices, is_.hashed_indices),
    ):
        if not _same_keys(earlier, old, later, new):
            # Rows are stored with, and deleted by, the hash of the old keys.
            was_keys, now_keys = _listed(earlier, old), _listed(later, new)
            yield f"the {role} was ({was_keys}) and is now ({now_keys}); keys never change"


def _whole(schema: StoredSchema, columns: Sequence[TableColumn]) -> bool:
    named = (schema.timestamp_index, *(schema.key_indices or ()), *schema.hashed_indices)
    return all(0 <= index < len(columns) for index in named)


def _same_keys(
    earlier: tuple[int, ...] | None,
    old: Sequence[TableColumn],
    later: tuple[int, ...] | None,
    new: Sequence[TableColumn],
) -> bool:
    if earlier is None or later is None:
        return earlier == later
    if len(earlier) != len(later):
        return False
    old_names, new_names = _named(old), _named(new)
    return all(
        old_names[i] == new_names[j] and old[i].same(new[j])
        for i, j in zip(earlier, later, strict=True)
    )


def _listed(indices: tuple[int, ...] | None, columns: Sequence[TableColumn]) -> str:
    return ", ".join(str(columns[index]) for index in indices or ())


def noted(
    before: ExpiringTimeKeyConfig, now: ExpiringTimeKeyConfig, epoch: Epoch
) -> ExpiringTimeKeyConfig:
    """Return `now` with the notes to store from `epoch` on, where the table was `before`.

    Args:
        epoch: the first epoch that is written with the columns of `now`.
    """
    old, new = columns_in(before.schema.arrow_schema), columns_in(now.schema.arrow_schema)
    changed = len(old) != len(new) or not all(
        column.same(other) for column, other in zip(new, old, strict=True)
    )
    since = epoch if changed else changed_in(before.schema)
    if not since:
        return now
    schema = json.loads(now.schema.arrow_schema)
    schema["metadata"] = _with_note(schema["metadata"], CHANGED_IN, since)
    for field, place in zip(schema["fields"], _places(old, new), strict=True):
        added = epoch if place is None else old[place].added_in
        field["metadata"] = _with_note(field["metadata"], ADDED_IN, added)
    text = json.dumps(schema, separators=(",", ":"), ensure_ascii=False)
    return replace(now, schema=replace(now.schema, arrow_schema=text))


def _with_note(metadata: dict[str, str], name: str, epoch: Epoch) -> dict[str, str]:
    rest = {key: value for key, value in metadata.items() if key != name}
    return dict(sorted({**rest, name: str(epoch)}.items())) if epoch else rest


# ---- a file of an older schema -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileReading:
    """How a data file is read with the present columns of its table.

    Attributes:
        sources: for each column that the operator sees, its index in the file; None = it is null.
        problem: why the file does not belong to the table; None if it does.
    """

    sources: tuple[int | None, ...] = ()
    problem: str | None = None


def how_to_read(config: ExpiringTimeKeyConfig, file_schema: str, epoch: Epoch) -> FileReading:
    """Decide how a data file is read as rows of its table.

    If the table had its present columns in the file's epoch, the file has exactly these columns,
    followed by `_key_hash` and `_operation` (before them `_generation` in a generational table).
    An older file may have other columns, from which the present ones are derived.

    Args:
        config: the table's stored configuration, with its notes.
        file_schema: the JSON form of the complete schema of the file.
        epoch: the epoch of the file's entry in metadata (`TimeFile.epoch`).
    """
    expected = columns_in(config.schema.arrow_schema)
    behind = (_ROW_GENERATION, *_BEHIND) if config.generational else _BEHIND
    columns = columns_in(file_schema)
    users, last = columns[: -len(behind)], columns[-len(behind) :]
    tail_differs = len(last) != len(behind) or not all(map(TableColumn.same, last, behind))
    older = epoch < changed_in(config.schema)
    exact = len(users) == len(expected) and all(map(TableColumn.same, users, expected))
    if tail_differs or not (exact or older):
        return FileReading(problem="the columns of a data file do not match its table")
    problems = [] if exact else list(_unreadable(users, expected, epoch))
    if problems:
        return FileReading(problem="; ".join(problems))
    places = {name: place for place, name in enumerate(_named(users))}
    sources = [
        None if column.added_in > epoch else places[name]
        for column, name in zip(expected, _named(expected), strict=True)
    ]
    if config.generational:
        sources.append(len(users))
    return FileReading(tuple(sources))


def _unreadable(
    users: Sequence[TableColumn], wanted: Sequence[TableColumn], epoch: Epoch
) -> Iterable[str]:
    present = [column for column in wanted if column.added_in <= epoch]
    yield from _twins(users, present)
    for column, place in zip(present, _places(users, present), strict=True):
        if place is None:
            yield f"a data file lacks the column {column}, which its table had at epoch {epoch}"
        else:
            yield from _not_widened(users[place], column)


# ---- type widening -------------------------------------------------------------------------------
# Which Arrow types contain every value of another type, compared in their JSON form in metadata.
#
# From | To ---|--- Int8, Int16, Int32, Int64 | a wider one of them; a float that represents all
# values exactly UInt8, UInt16, UInt32, UInt64 | a wider one of them, or a wider signed one; a float
# as above Float16, Float32 | a wider float Decimal128, Decimal256 | at least as many digits before
# and after the decimal point Utf8, Binary, List | LargeUtf8, LargeBinary, LargeList FixedSizeBinary
# | Binary, LargeBinary Date32 | Date64 Time32, Time64 | a finer unit Null | any List, LargeList,
# FixedSizeList, Map | as before, its elements widened or made nullable Struct | as before, its
# fields widened or made nullable; none added, dropped or moved Dictionary | as before, its indices
# wider
#
# Instants and durations do not widen: a finer unit has a smaller range.

_BITS = (8, 16, 32, 64)
_SIGNED = {f"Int{bits}": bits for bits in _BITS}
_UNSIGNED = {f"UInt{bits}": bits for bits in _BITS}
_FLOATS = {"Float16": 11, "Float32": 24, "Float64": 53}
"""The number of binary digits that each float type represents exactly."""
_LARGER = {"Utf8": "LargeUtf8", "Binary": "LargeBinary", "Date32": "Date64"}
_UNITS = ("Second", "Millisecond", "Microsecond", "Nanosecond")
_NOTES = frozenset({"metadata", "dict_id"})


def bare(data_type: Any) -> Any:
    """Return a type without its metadata and without the names inside lists and maps."""
    if isinstance(data_type, list):
        return [bare(part) for part in data_type]
    if not isinstance(data_type, dict):
        return data_type
    if "data_type" in data_type:  # a field
        return {key: bare(value) for key, value in data_type.items() if key not in _NOTES}
    ((kind, inner),) = data_type.items()
    if kind in ("List", "LargeList"):
        return {kind: bare({**inner, "name": ""})}
    if kind == "FixedSizeList":
        return {kind: [bare({**inner[0], "name": ""}), inner[1]]}
    if kind == "Map":
        key, value = inner[0]["data_type"]["Struct"]
        return {kind: [bare({**key, "name": ""}), bare({**value, "name": ""}), inner[1]]}
    return {kind: bare(inner)}


def type_text(data_type: Any) -> str:
    """Format a type as short text."""
    if isinstance(data_type, str):
        return data_type
    ((kind, inner),) = data_type.items()
    return f"{kind}<{_inner_text(inner)}>"


def _inner_text(inner: Any) -> str:
    if isinstance(inner, dict):
        if "data_type" not in inner:
            return type_text(inner)
        return f"{type_text(inner['data_type'])}{'' if inner['nullable'] else ' not null'}"
    if isinstance(inner, list):
        parts = (
            f"{part['name']}: {_inner_text(part)}"
            if isinstance(part, dict) and "name" in part
            else _inner_text(part)
            for part in inner
        )
        return ", ".join(parts)
    return str(inner)


def fits(before: Any, now: Any) -> bool:
    """Return whether the type `now` contains every value of the type `before`, unchanged."""
    if before == "Null" or bare(before) == bare(now):
        return True
    if isinstance(before, str):
        return isinstance(now, str) and (_LARGER.get(before) == now or _number_fits(before, now))
    ((kind, inner),) = before.items()
    if kind == "FixedSizeBinary":
        return now in ("Binary", "LargeBinary")
    if isinstance(now, str):
        return False
    ((later, parts),) = now.items()
    return _parameters_fit(kind, inner, later, parts)


def _number_fits(before: str, now: str) -> bool:
    if before in _FLOATS and now in _FLOATS:
        return _FLOATS[before] <= _FLOATS[now]
    if before in _SIGNED:
        # The most negative value is a power of two, so it needs no more digits than the others.
        digits = _SIGNED[before] - 1
        return digits <= _SIGNED.get(now, 0) - 1 or digits <= _FLOATS.get(now, 0)
    if before in _UNSIGNED:
        room = max(_UNSIGNED.get(now, 0), _SIGNED.get(now, 0) - 1, _FLOATS.get(now, 0))
        return _UNSIGNED[before] <= room
    return False


def _parameters_fit(kind: str, inner: Any, later: str, parts: Any) -> bool:
    if kind.startswith("Decimal") and later.startswith("Decimal"):
        (precision, scale), (wider, finer) = inner, parts
        return kind <= later and scale <= finer and precision - scale <= wider - finer
    if kind in ("Time32", "Time64") and later in ("Time32", "Time64"):
        return _UNITS.index(inner) <= _UNITS.index(parts)
    if kind in ("List", "LargeList") and later in (kind, "LargeList"):
        return _field_fits(inner, parts)
    if kind != later:
        return False
    if kind == "FixedSizeList":
        return inner[1] == parts[1] and _field_fits(inner[0], parts[0])
    if kind == "Struct":
        return _fields_fit(inner, parts)
    if kind == "Map":
        return inner[1] == parts[1] and _entries_fit(inner[0], parts[0])
    if kind == "Dictionary":
        indices = {**_SIGNED, **_UNSIGNED}
        whole = inner[0] in indices and parts[0] in indices and _number_fits(inner[0], parts[0])
        return whole and bare(inner[1]) == bare(parts[1])
    return False


def _field_fits(before: Any, now: Any) -> bool:
    nullable = now["nullable"] or not before["nullable"]
    return nullable and fits(before["data_type"], now["data_type"])


def _fields_fit(before: Any, now: Any) -> bool:
    same_names = [field["name"] for field in before] == [field["name"] for field in now]
    return same_names and all(map(_field_fits, before, now))


def _entries_fit(before: Any, now: Any) -> bool:
    (key, value), (key_now, value_now) = before["data_type"]["Struct"], now["data_type"]["Struct"]
    return bare(key["data_type"]) == bare(key_now["data_type"]) and _field_fits(value, value_now)
