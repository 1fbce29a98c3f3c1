"""Arrow rows as tables, JSON, CSV and Parquet, exactly: no digit and no byte is lost."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import IO

import click
import pyarrow as pa

from arroyo_dagster.cli.rendering import print_json, print_table
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.plain import plain_rows, unique_names

FORMATS = ("table", "jsonl", "csv", "parquet")


def print_rows(rows: pa.Table, form: str) -> None:
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
    elif form == "json":
        print_json(plain_rows(rows))
    elif form == "table":
        columns = unique_names(rows.schema.names)
        print_table(
            columns, [[format_cell(one) for one in row.values()] for row in plain_rows(rows)]
        )
        click.echo(f"{rows.num_rows} rows" if rows.num_rows != 1 else "1 row")
    else:
        _write_text(rows, sys.stdout, form)


def write_rows(rows: pa.Table, path: Path, form: str | None) -> None:
    """Write rows to a new file.

    Args:
        form: a format of `FORMATS` but `table`; None = by the end of the name.

    Raises:
        InputError: the file exists or cannot be written, or its name tells no format.
    """
    chosen = form or path.suffix.removeprefix(".")
    if chosen not in FORMATS or chosen == "table":
        raise InputError(
            f"not a format for a file: {chosen or path.name!r}",
            expected=", ".join(FORMATS[1:]),
            next_step="name it with --format",
        )
    try:
        with path.open("xb") as file:
            if chosen == "parquet":
                _write_parquet(rows, file)
            else:
                with open(file.fileno(), "w", encoding="utf-8", newline="", closefd=False) as text:
                    _write_text(rows, text, chosen)
    except FileExistsError:
        raise InputError("the file exists", path=path, next_step="choose another name") from None
    except OSError as error:
        raise InputError(f"the file cannot be written ({error.strerror})", path=path) from error
    click.echo(f"{rows.num_rows} rows written to {path}")


def _write_parquet(rows: pa.Table, file: IO[bytes]) -> None:
    import pyarrow.parquet as pq

    named = rows.rename_columns(unique_names(rows.schema.names))
    try:
        pq.write_table(named, pa.PythonFile(file, mode="w"), compression="zstd")
    except pa.ArrowException as error:
        raise InputError(f"Parquet cannot hold a column of the answer ({error})") from error


def _write_text(rows: pa.Table, file: IO[str], form: str) -> None:
    if form == "jsonl":
        for row in plain_rows(rows):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        return
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(unique_names(rows.schema.names))
    for row in plain_rows(rows):
        writer.writerow("" if one is None else format_cell(one) for one in row.values())


def format_cell(value: object) -> object:
    """Return a plain value for a cell: lists and objects as JSON."""
    if value is None or isinstance(value, str | int | float):
        return value
    return json.dumps(value, ensure_ascii=False)
