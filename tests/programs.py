"""Arroyo's database with programs of pipelines, as far as it is read."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path

Operator = tuple[str, str] | tuple[str, str, bytes]
"""The id of an operator, Arroyo's name of its kind, and what its SQL says, as bytes."""


def program_database(
    path: Path,
    pipelines: Mapping[str, Sequence[Operator]],
    *,
    rows: Mapping[str, str] | None = None,
    state: str = "Stopped",
) -> str:
    """Write a database with a pipeline for each job, whose operators are a chain after its sources.

    Args:
        rows: by job the state of its row of epoch 1; the row has no finish_time.
        state: of the jobs.
    """
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.executescript(
            """
            CREATE TABLE pipelines (id INTEGER, pub_id TEXT, name TEXT, program BLOB);
            CREATE TABLE job_configs (id TEXT, pipeline_id INTEGER, stop TEXT);
            CREATE TABLE job_statuses (id TEXT, state TEXT, run_id INTEGER);
            CREATE TABLE checkpoints (
                job_id TEXT, epoch INTEGER, min_epoch INTEGER, state TEXT, finish_time TEXT
            );
            """
        )
        for number, (job, operators) in enumerate(pipelines.items()):
            program = (number, f"pl_{job}", job, _program(operators))
            database.execute("INSERT INTO pipelines VALUES (?, ?, ?, ?)", program)
            database.execute("INSERT INTO job_configs VALUES (?, ?, 'checkpoint')", (job, number))
            database.execute("INSERT INTO job_statuses VALUES (?, ?, 1)", (job, state))
        for job, ready in (rows or {}).items():
            row = (job, 1, 0, ready, None)
            database.execute("INSERT INTO checkpoints VALUES (?, ?, ?, ?, ?)", row)
        database.commit()
    return str(path)


def _program(operators: Sequence[Operator]) -> bytes:
    nodes = b""
    for number, (name, kind, *config) in enumerate(operators):
        operator = _field(1, name) + _field(2, kind) + _field(3, *config or [b""])
        nodes += _field(1, _field(1, number) + _field(2, number) + _field(5, operator))
    names = [name for name, *_ in operators]
    middle = [at for at, name in enumerate(names) if not name.startswith("source_")]
    edges = [
        _field(2, _field(1, at) + _field(2, target) + _field(5, 1))
        for at in range(len(names))
        if (target := next((one for one in middle if one > at), None)) is not None
    ]
    return nodes + b"".join(edges)


def _field(number: int, value: bytes | str | int) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def sliding(name: str, width_seconds: int, slide_seconds: int) -> bytes:
    """What a program says of a sliding window."""
    return (
        _field(1, name)
        + _field(2, width_seconds * 1_000_000)
        + _field(3, slide_seconds * 1_000_000)
    )


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])
