"""Convert between the cells of files and the record values of topics.

Source: sdf-states.md 6.1 (converters), 7 (types).
"""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from arroyo_dagster.dataflow.definition.types import (
    CompositeType,
    ScalarType,
    Scope,
    TypeDef,
    same_name,
)
from arroyo_dagster.dataflow.storage.values import arrow_type
from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state.model.json_fields import parse_json


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a topic's values.

    Attributes:
        raw: whether the topic's converter is raw: a value is plain text, not JSON.
        fields: the fields of a declared object, by their names in JSON, each with its type (None =
            unknown); None unless the declared type is an object.
    """

    raw: bool = False
    fields: Mapping[str, TypeDef | None] | None = None
    _fields: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    def from_cells(self, cells: Mapping[str, str]) -> bytes:
        """Return the value of a CSV row: an object of its cells, each of its declared type.

        An empty cell of another type than text is omitted. A cell that cannot be parsed as its type
        stays text, so that the topic's converter counts the record as failed. Without a declared
        object, a single cell is the value, and several cells are an object of texts.
        """
        if self.fields is None:
            return self.from_row(cells)
        pairs = ((self.field(name), text) for name, text in cells.items())
        typed = ((name, _typed(text, self.fields.get(name))) for name, text in pairs)
        return _json({name: value for name, value in typed if value is not None})

    def from_row(self, row: Mapping[str, Any]) -> bytes:
        """Return the value of a row of typed cells."""
        if self.fields is not None or len(row) != 1:
            return _json({self.field(name): value for name, value in row.items()})
        (value,) = row.values()
        if self.raw and isinstance(value, str | bytes):
            return value.encode() if isinstance(value, str) else value
        return _json(value)

    def field(self, column: str) -> str:
        """Return the field of a column, or the column if there is none; `-` and `_` are equal."""
        name = self._fields.get(column)
        if name is None:
            plain = same_name(column)
            same = (name for name in self.fields or () if same_name(name) == plain)
            name = self._fields[column] = next(same, column)
        return name

    def wants(self, column: str) -> bool:
        """Return whether a column has a field; without a declared object, every column has."""
        return self.fields is None or self.field(column) in self.fields

    def row(self, value: bytes) -> dict[str, Any]:
        """Return the cells of a value: the fields of a declared object, else one cell `value`.

        Raises:
            FormatError: an object is declared, and the value is not a JSON object.
        """
        if self.fields is None:
            return {"value": value.decode(errors="replace")}
        try:
            document = parse_json(value)
        except ValueError as error:
            raise FormatError(f"a value is not valid JSON ({error})", value=value[:200]) from error
        if not isinstance(document, dict):
            raise FormatError("a value is not an object", value=value[:200])
        return {name: document.get(name) for name in self.fields}


def shape_of(
    declared: TypeDef | None,
    types: Scope,
    *,
    raw: bool = False,
    reading: bool = True,
    snake_case: bool = False,
) -> Shape:
    """Return the shape of a topic's values by its declared type.

    Args:
        declared: the type of the values; None = undeclared.
        types: the scope that resolves named types.
        raw: whether the topic's converter is raw.
        reading: whether to use the fields' names in read JSON (True) or in written JSON.
        snake_case: whether names in JSON are those of 0.5.0.
    """
    resolved = None if declared is None else types.resolve(declared).type
    if not isinstance(resolved, CompositeType) or resolved.kind != "object":
        return Shape(raw)
    fields = {}
    for member in resolved.members:
        name = (member.read_as if reading else member.written_as) or member.name
        renamed = name != member.name
        fields[name.replace("-", "_") if snake_case and not renamed else name] = types.resolve(
            member.type
        ).type
    return Shape(raw, fields)


def _json(value: Any) -> bytes:
    return _ENCODER.encode(value).encode("utf-8", "surrogatepass")


def _unusual(value: Any) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


_ENCODER = json.JSONEncoder(ensure_ascii=False, default=_unusual, separators=(",", ":"))


def _typed(text: str, declared: TypeDef | None) -> Any:
    if not isinstance(declared, ScalarType) or declared is ScalarType.STRING:
        return text if text or declared is ScalarType.STRING else None
    if not text:
        return None
    try:
        if declared is ScalarType.BOOL:
            return {"true": True, "false": False}.get(text.strip().lower(), text)
        return float(text) if declared.is_float else int(text)
    except ValueError:
        return text


# ---- writing -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JsonLines:
    """Writes one value per line, unchanged."""

    topic: str
    suffix: str = ".jsonl"
    header: bytes = b""

    def rows(self, values: Iterable[bytes]) -> bytes:
        """Return values as lines.

        Raises:
            InputError: a value contains a line break.
        """
        lines = list(values)
        for line in lines:
            if b"\n" in line:
                raise InputError(
                    "a value of a raw topic contains a line break, which a file of lines cannot "
                    "hold",
                    topic=self.topic,
                    value=line[:200],
                    next_step="bind the topic to parquet, or set its converter to json",
                )
        return b"".join(line + b"\n" for line in lines)


@dataclass(frozen=True, slots=True)
class CsvLines:
    """Writes one row per value; the columns are the fields of the declared object, else `value`."""

    topic: str
    shape: Shape
    suffix: str = ".csv"

    @property
    def columns(self) -> Sequence[str]:
        """The column names of the header."""
        return ["value"] if self.shape.fields is None else list(self.shape.fields)

    @property
    def header(self) -> bytes:
        """The first line of every file."""
        return self._lines([self.columns])

    def rows(self, values: Iterable[bytes]) -> bytes:
        """Return values as lines. Errors as in `Shape.row`."""
        rows = (self.shape.row(value) for value in values)
        return self._lines([[_cell(row[name]) for name in self.columns] for row in rows])

    @staticmethod
    def _lines(rows: Iterable[Sequence[str]]) -> bytes:
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(rows)
        return text.getvalue().encode()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else _json(value).decode()


def typed_table(values: Iterable[bytes], shape: Shape) -> pa.Table:
    """Return values as a table for Parquet: scalars as declared, nested values as JSON text.

    Raises:
        FormatError: a value does not fit.
    """
    rows = [shape.row(value) for value in values]
    if shape.fields is None:
        return pa.table({"value": pa.array([row["value"] for row in rows], pa.string())})
    return pa.table(
        {name: _column(name, [row[name] for row in rows], kind) for name, kind in _kinds(shape)}
    )


def _kinds(shape: Shape) -> list[tuple[str, pa.DataType]]:
    fields = (shape.fields or {}).items()
    return [
        (name, arrow_type(kind) if isinstance(kind, ScalarType) else pa.string())
        for name, kind in fields
    ]


def _column(name: str, cells: list[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_string(kind):
        cells = [cell if cell is None or isinstance(cell, str) else _cell(cell) for cell in cells]
    try:
        return pa.array(cells, kind)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise FormatError(
            f"a value does not fit its declared type ({error})", column=name, expected=str(kind)
        ) from error
