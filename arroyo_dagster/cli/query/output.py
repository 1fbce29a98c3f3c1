"""Answers as tables, JSON, CSV and Parquet, exactly: no digit and no byte is lost."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from arroyo_dagster.cli.rendering import print_json, print_table
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.iso_times import format_moment, format_span
from arroyo_dagster.state.model.json_fields import plain_number
from arroyo_dagster.state.model.units import plural

if TYPE_CHECKING:
    import polars as pl

FORMATS = ("table", "jsonl", "csv", "parquet")


def print_answer(rows: pl.DataFrame, form: str) -> None:
    """Print rows in a format of `FORMATS`, or as one JSON document (`json`).

    Raises:
        InputError: Parquet for a terminal.
    """
    if form == "parquet":
        if sys.stdout.isatty():
            raise InputError(
                "a terminal cannot show Parquet", next_step="add --output FILE, or redirect stdout"
            )
        _write_parquet(rows, sys.stdout.buffer)
    elif form in ("json", "table"):
        print_rows(rows.columns, plain_frame(rows), as_json=form == "json")
    else:
        _write_text(rows, sys.stdout, form)


def print_rows(
    columns: Sequence[str], rows: Sequence[Mapping[str, Any]], *, as_json: bool = False
) -> None:
    """Print rows of plain values as a table, or as one JSON document."""
    if as_json:
        print_json(rows)
        return
    print_table(columns, [[format_cell(value) for value in row.values()] for row in rows])
    click.echo(plural(len(rows), "row"))


def write_answer(rows: pl.DataFrame, path: Path, form: str | None) -> None:
    """Write rows to a new file.

    Args:
        form: a format of `FORMATS` but `table`; None = by the end of the name.

    Raises:
        InputError: the file exists or cannot be written, or its name tells no format.
    """
    file_format = form or path.suffix.removeprefix(".")
    if file_format not in FORMATS or file_format == "table":
        raise InputError(
            f"not a format for a file: {file_format or path.name!r}",
            expected=", ".join(FORMATS[1:]),
            next_step="name it with --format",
        )
    try:
        with path.open("xb") as file:
            if file_format == "parquet":
                _write_parquet(rows, file)
            else:
                with open(file.fileno(), "w", encoding="utf-8", newline="", closefd=False) as text:
                    _write_text(rows, text, file_format)
    except FileExistsError:
        raise InputError("the file exists", path=path, next_step="choose another name") from None
    except OSError as error:
        raise InputError(f"the file cannot be written ({error.strerror})", path=path) from error
    click.echo(f"{plural(rows.height, 'row')} written to {path}")


def _write_parquet(rows: pl.DataFrame, file: IO[bytes]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        pq.write_table(rows.to_arrow(), pa.PythonFile(file, mode="w"), compression="zstd")
    except pa.ArrowException as error:
        raise InputError(f"Parquet cannot hold a column of the answer ({error})") from error


def _write_text(rows: pl.DataFrame, file: IO[str], form: str) -> None:
    if form == "jsonl":
        for row in plain_frame(rows):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        return
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(rows.columns)
    for row in plain_frame(rows):
        writer.writerow("" if value is None else format_cell(value) for value in row.values())


def plain_frame(rows: pl.DataFrame) -> list[dict[str, Any]]:
    """Convert rows to objects by column name, as `plain_rows`.

    Arrow, which takes long to load, converts only columns of other than plain types.
    """
    columns = [_plain_column(column) for column in rows.get_columns()]
    if not columns:
        return [{} for _ in range(rows.height)]
    return [dict(zip(rows.columns, row, strict=True)) for row in zip(*columns, strict=True)]


def _plain_column(column: pl.Series) -> Sequence[Any]:
    import polars as pl

    kind = column.dtype
    if kind.is_integer() or kind in (pl.Boolean, pl.String, pl.Null):
        return column.to_list()
    if kind.is_float():
        return [None if value is None else plain_number(value) for value in column]
    if isinstance(kind, pl.Datetime):
        unit, zone = kind.time_unit, "Z" if kind.time_zone else ""
        counts = column.to_physical()
        return [None if count is None else format_moment(count, unit, zone) for count in counts]
    if isinstance(kind, pl.Duration):
        counts = column.to_physical()
        return [None if count is None else format_span(count, kind.time_unit) for count in counts]
    from arroyo_dagster.state.codec.plain import plain_scalar

    return [plain_scalar(value) for value in column.to_arrow()]


def format_cell(value: object) -> object:
    """Return a plain value for a cell: lists and objects as JSON."""
    if value is None or isinstance(value, str | int | float):
        return value
    return json.dumps(value, ensure_ascii=False)
