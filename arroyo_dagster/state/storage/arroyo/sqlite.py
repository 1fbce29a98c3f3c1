"""Reading jobs from the SQLite database of Arroyo's controller.

SQLite never opens the file itself, only a copy, so that no lock, write-ahead log or shared memory
of a running controller is touched.

Source: crates/arroyo-api/migrations and crates/arroyo-controller/queries/controller_queries.sql
(arroyo-state.md 10.4).
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

from arroyo_dagster.errors import FormatError, InputError, NotFoundError, StorageError
from arroyo_dagster.redaction import redact_text, redact_url, register_url, replaced
from arroyo_dagster.state.model.ids import JobId, PipelineId, StatePath
from arroyo_dagster.state.model.job_facts import JobFacts, SourceAnswer
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.surgery.graphs import StoredGraph
from arroyo_dagster.state.storage.arroyo.rows import (
    NEEDED,
    TABLES,
    DatabaseRow,
    JobsAndPipelines,
    answers_of,
    facts_of,
)
from arroyo_dagster.state.storage.failures import translated
from arroyo_dagster.state.storage.remote.open import open_store
from arroyo_dagster.state.storage.retries import ask_again

_T = TypeVar("_T")


class ArroyoDatabase:
    """The database of a controller, read again at every call.

    Args:
        location: a path on this machine, or a URL in any form of checkpoint URLs.
        max_bytes: the maximum size of a file.
    """

    def __init__(self, location: str, *, max_bytes: int = 4 << 30) -> None:
        self.source = redact_url(location)
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
            with (
                replaced(sqlite3.Error, lambda error: _unsound(error, self.source)),
                _opened(copy) as database,
            ):
                return read(database)


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


# ---- a consistent copy of a database that another process may write, without locking it ----------

_BESIDE = ("", "-wal", "-journal")
_WAL_HEADER_BYTES = 32
_FILE_HEADER_BYTES = 100
_ATTEMPTS = 20
_PAUSE_SECONDS = 0.05


def copy_database(location: str, directory: Path, *, max_bytes: int) -> Path:
    """Copy a database and its logs into `directory`; return the path of the copy.

    Nothing is written, locked or created at `location`. The database must belong to another
    process: closing a file releases the locks that this process holds on it.

    Args:
        location: a path on this machine, or a URL in any form of checkpoint URLs.

    Raises:
        NotFoundError: there is no file at `location`.
        InputError: it is no regular file, or larger than `max_bytes`.
        StorageError: it cannot be read, or kept changing while it was copied.
    """
    register_url(location)
    with translated(redact_url(location)):
        local = _local_path(location)
        if local is None:
            return _fetched(location, directory, max_bytes)
        # SQLite stores its logs beside the file itself, not beside a link to it.
        source = local.resolve(strict=True)

        def unchanged_copy() -> Path | None:
            before = _signature(source, max_bytes)
            copy = _copied(source, directory)
            return copy if _signature(source, max_bytes) == before else None

        copy = ask_again(unchanged_copy, tries=_ATTEMPTS, pause_seconds=_PAUSE_SECONDS, growth=1)
    if copy is None:
        raise StorageError(
            "the database changes faster than it can be copied",
            path=redact_url(str(local)),
            next_step="try again when its controller is less busy, or name a backup of it",
        )
    return copy


def _local_path(location: str) -> Path | None:
    if location.startswith("file://"):
        return Path("/" + location.removeprefix("file://").lstrip("/"))
    return None if "://" in location or location.startswith("s3::") else Path(location)


def _copied(source: Path, directory: Path) -> Path:
    """Copy once. The log is copied after the file, because it repairs a partial checkpoint."""
    for suffix in _BESIDE:
        target = directory / f"copy.sqlite{suffix}"
        target.unlink(missing_ok=True)
        try:
            shutil.copyfile(f"{source}{suffix}", target)
        except FileNotFoundError:
            if not suffix:
                raise
    return directory / "copy.sqlite"


def _signature(source: Path, max_bytes: int) -> tuple[object, ...]:
    """Return values that do not change while a copy is consistent.

    The header of a write-ahead log contains a salt that changes whenever the log restarts. Until
    then frames are only appended, and a partial frame is ignored. The header of the file counts the
    transactions without such a log.
    """
    info = source.stat()
    if not stat.S_ISREG(info.st_mode):
        raise InputError(
            "the path is not a file, so it is not a SQLite database",
            path=redact_url(str(source)),
            next_step="name the file; Arroyo's setting is database.sqlite.path",
        )
    if info.st_size > max_bytes:
        raise _too_large(redact_url(str(source)), info.st_size, max_bytes)
    journal = Path(f"{source}-journal")
    rollback = (journal.stat().st_size, journal.stat().st_mtime_ns) if journal.exists() else None
    return (
        (info.st_ino, info.st_size, info.st_mtime_ns, _start(source, _FILE_HEADER_BYTES)),
        _start(Path(f"{source}-wal"), _WAL_HEADER_BYTES),
        rollback,
    )


def _start(path: Path, count: int) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(count)
    except FileNotFoundError:
        return None


def _fetched(location: str, directory: Path, max_bytes: int) -> Path:
    """Fetch a backup from a store, where objects are never modified in place."""
    if redact_url(location) != location:
        raise InputError(
            "the URL of a database must not contain user, password or query",
            url=redact_url(location),
            next_step="give credentials in the environment, as for the checkpoint URL",
        )
    parent, _, name = location.rpartition("/")
    store = open_store(parent)
    for suffix in _BESIDE:
        path = StatePath(f"{unquote(name)}{suffix}")
        info = store.head(path)
        if info is None:
            if not suffix:
                raise NotFoundError(
                    "there is no such database",
                    url=redact_url(location),
                    next_step="check the name; `arroyo run` keeps state.sqlite beside its state",
                )
            continue
        if info.size_bytes > max_bytes:
            raise _too_large(redact_url(location), info.size_bytes, max_bytes)
        (directory / f"copy.sqlite{suffix}").write_bytes(store.read(path))
    return directory / "copy.sqlite"


def _too_large(location: str, size_bytes: int, max_bytes: int) -> InputError:
    return InputError(
        f"this file is larger than the limit of {max_bytes} bytes",
        path=location,
        size_bytes=size_bytes,
        next_step="check that it is the database of Arroyo's controller",
    )
