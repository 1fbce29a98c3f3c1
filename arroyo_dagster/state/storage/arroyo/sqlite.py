"""Reading jobs from the SQLite database of Arroyo's controller.

SQLite never opens the file itself, only a copy, so that no lock, write-ahead log or shared memory
of a running controller is touched.

Source: crates/arroyo-api/migrations and crates/arroyo-controller/queries/controller_queries.sql
(arroyo-state.md 10.4).
"""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from arroyo_dagster.errors import FormatError, StorageError
from arroyo_dagster.redaction import redact_text, redacted_cause
from arroyo_dagster.state.model.ids import JobId, PipelineId
from arroyo_dagster.state.model.job_facts import JobFacts, SourceAnswer
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.surgery.graphs import StoredGraph
from arroyo_dagster.state.storage.arroyo.database_copy import copy_database, redacted_location
from arroyo_dagster.state.storage.arroyo.rows import (
    NEEDED,
    TABLES,
    DatabaseRow,
    JobsAndPipelines,
    answers_of,
    facts_of,
)

_T = TypeVar("_T")


class ArroyoDatabase:
    """The database of a controller, read again at every call.

    Args:
        location: a path on this machine, or a URL in any form of checkpoint URLs.
        max_bytes: the maximum size of a file.
    """

    def __init__(self, location: str, *, max_bytes: int = 4 << 30) -> None:
        self.source = redacted_location(location)
        self._location = location
        self._max_bytes = max_bytes

    def look_up(self, jobs: Sequence[JobPaths], *, checkpoints: bool = False) -> list[SourceAnswer]:
        """Return the database's answer about each of `jobs`, in their order, including previews.

        Args:
            checkpoints: ignored, for compatibility with other sources; epochs are always included.

        Raises:
            NotFoundError, InputError: there is no such file.
            FormatError: it is no database, damaged, or not Arroyo's.
            StorageError: it cannot be read, or kept changing while it was copied.
        """
        return answers_of(self._read(), jobs, self.source)

    def jobs(self) -> dict[JobId, JobFacts]:
        """Return every job in the database. Errors as in `look_up`."""
        return self._read()[0]

    def pipeline_graph(self, pipeline: PipelineId) -> StoredGraph | None:
        """Return the program of a pipeline; None = there is none. Errors as in `look_up`."""
        return self._copied(lambda copy: _program(copy, pipeline))

    def _read(self) -> JobsAndPipelines:
        return facts_of(self._copied(_tables), self.source)

    def _copied(self, read: Callable[[sqlite3.Connection], _T]) -> _T:
        with tempfile.TemporaryDirectory(prefix="arroyo-state-") as directory:
            copy = copy_database(self._location, Path(directory), max_bytes=self._max_bytes)
            try:
                with _opened(copy) as database:
                    return read(database)
            except sqlite3.Error as error:
                raise _unsound(error, self.source) from redacted_cause(error)


def _unsound(error: sqlite3.Error, source: str) -> FormatError | StorageError:
    code = getattr(error, "sqlite_errorname", None) or ""
    if code.startswith(("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_CANTOPEN")):
        return StorageError(
            f"the copy of the database cannot be read: {redact_text(str(error))}",
            path=source,
            next_step="check the free space for temporary files (TMPDIR)",
        )
    return FormatError(
        f"this is not an intact database of Arroyo: {redact_text(str(error))}",
        path=source,
        next_step="name the database of Arroyo's controller; if it is a copy, also copy its -wal",
    )


@contextlib.contextmanager
def _opened(copy: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(copy, isolation_level=None)) as database:
        # The database is untrusted: nothing that its schema defines may be executed.
        database.execute("PRAGMA trusted_schema = OFF")
        database.row_factory = sqlite3.Row
        problem = database.execute("PRAGMA quick_check(1)").fetchone()[0]
        if problem != "ok":
            raise sqlite3.DatabaseError(problem)
        yield database


def _tables(database: sqlite3.Connection) -> dict[str, list[DatabaseRow]]:
    return {table: list(_rows(database, table)) for table in TABLES}


def _program(database: sqlite3.Connection, pipeline: PipelineId) -> bytes | None:
    present = {row["name"] for row in database.execute("PRAGMA table_info(pipelines)")}
    if not {"pub_id", "program"} <= present:
        return None
    query = "SELECT program FROM pipelines WHERE pub_id = ?"
    row = database.execute(query, (pipeline,)).fetchone()
    return row["program"] if row is not None and isinstance(row["program"], bytes) else None


def _rows(database: sqlite3.Connection, table: str) -> Iterator[DatabaseRow]:
    """Yield the rows of a table, with None for the columns that it lacks."""
    kinds = database.execute("SELECT type FROM sqlite_master WHERE name = ?", (table,)).fetchall()
    present = {row["name"] for row in database.execute(f"PRAGMA table_info({table})")}
    if [row["type"] for row in kinds] != ["table"]:
        present = set()
    lacking = NEEDED.get(table, set()) - present
    if lacking:
        raise sqlite3.DatabaseError(f"{table} lacks {', '.join(sorted(lacking))}")
    columns = [name for name in TABLES[table] if name in present]
    if columns:
        for row in database.execute(f"SELECT {', '.join(columns)} FROM {table}"):
            yield dict.fromkeys(TABLES[table]) | dict(row)
