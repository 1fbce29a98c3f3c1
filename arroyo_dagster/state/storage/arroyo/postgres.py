"""Reading jobs from the Postgres database of Arroyo's controller.

One read-only transaction reads all tables at one point in time. Nothing is written or locked.

Source: crates/arroyo-api/migrations and crates/arroyo-controller/queries/controller_queries.sql
(arroyo-state.md 10.4).
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from arroyo_dagster.errors import ArroyoStateError, FormatError, InputError, StorageError
from arroyo_dagster.optional_packages import missing_package
from arroyo_dagster.redaction import redact_text, redact_url, register_url, replaced
from arroyo_dagster.state.model.ids import JobId, PipelineId
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

if TYPE_CHECKING:
    from psycopg import Connection

_T = TypeVar("_T")
SCHEMES = ("postgresql://", "postgres://")
CONNECT_SECONDS = 10
STATEMENT_SECONDS = 30
_COLUMNS = """
SELECT column_name FROM information_schema.columns
WHERE table_name = %s AND table_schema = ANY(current_schemas(false))
"""


def is_postgres(location: str) -> bool:
    """Return whether a location is a Postgres URL."""
    return location.lower().startswith(SCHEMES)


class ArroyoPostgres:
    """The Postgres of a controller, read again at every call.

    Args:
        url: `postgresql://USER:PASSWORD@HOST:PORT/DATABASE`, or any other form that libpq accepts;
            PGPASSWORD or ~/.pgpass may provide the password instead.

    Raises:
        InputError: the extra `postgres` is not installed.
    """

    def __init__(self, url: str) -> None:
        register_url(url)
        self.source = redact_url(url)
        self._url = url
        try:
            import psycopg  # noqa: F401 - only checks that it is installed
        except ImportError as error:
            raise missing_package("psycopg", url=self.source) from error

    def look_up(self, jobs: Sequence[JobPaths], *, checkpoints: bool = False) -> list[SourceAnswer]:
        """Return the database's answer about each of `jobs`, in their order, including previews.

        Args:
            checkpoints: ignored, for compatibility with other sources; epochs are always included.

        Raises:
            InputError: the URL is invalid, or the user may not read Arroyo's tables.
            FormatError: it is not a database of Arroyo.
            StorageError: it does not answer.
        """
        return answers_of(self._read(), jobs, self.source)

    def jobs(self) -> dict[JobId, JobFacts]:
        """Return every job in the database. Errors as in `look_up`."""
        return self._read()[0]

    def pipeline_graph(self, pipeline: PipelineId) -> StoredGraph | None:
        """Return the program of a pipeline; None = there is none. Errors as in `look_up`."""
        return self._read_with(lambda connection: _program(connection, pipeline))

    def _read(self) -> JobsAndPipelines:
        rows = self._read_with(
            lambda connection: {
                table: list(_rows(connection, table, self.source)) for table in TABLES
            }
        )
        return facts_of(rows, self.source)

    def _read_with(self, read: Callable[[Connection[Any]], _T]) -> _T:
        import psycopg

        with (
            replaced(psycopg.Error, lambda error: _translated(error, self.source)),
            _connected(self._url) as connection,
        ):
            return read(connection)


def _connected(url: str) -> Connection[Any]:
    import psycopg

    connection = psycopg.connect(
        url,
        connect_timeout=CONNECT_SECONDS,
        fallback_application_name="arroyo-state",
        autocommit=False,
    )
    connection.read_only = True
    connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    connection.execute(f"SET LOCAL statement_timeout = '{STATEMENT_SECONDS}s'")
    return connection


def _rows(connection: Connection[Any], table: str, source: str) -> Iterator[DatabaseRow]:
    """Yield the rows of a table, with None for the columns that it lacks."""
    from psycopg import sql

    present = {name for (name,) in connection.execute(_COLUMNS, (table,))}
    lacking = NEEDED.get(table, set()) - present
    if lacking:
        raise FormatError(
            f"not a database of Arroyo: {table} lacks {', '.join(sorted(lacking))}, or the user "
            "may not read it",
            path=source,
            next_step="name the database of Arroyo's controller, and grant SELECT on its tables "
            f"{', '.join(TABLES)}",
        )
    columns = [name for name in TABLES[table] if name in present]
    if not columns:
        return
    query = sql.SQL("SELECT {} FROM {}").format(
        sql.SQL(", ").join(map(sql.Identifier, columns)), sql.Identifier(table)
    )
    for row in connection.execute(query):
        named = zip(columns, map(_plain, row), strict=True)
        yield dict.fromkeys(TABLES[table]) | dict(named)


def _program(connection: Connection[Any], pipeline: PipelineId) -> bytes | None:
    present = {name for (name,) in connection.execute(_COLUMNS, ("pipelines",))}
    if not {"pub_id", "program"} <= present:
        return None
    query = "SELECT program FROM pipelines WHERE pub_id = %s"
    row = connection.execute(query, (pipeline,)).fetchone()
    return row[0] if row is not None and isinstance(row[0], bytes) else None


def _plain(value: object) -> object:
    """Return a value as SQLite stores it."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, dt.datetime):
        return value.astimezone(dt.UTC).isoformat()
    return value


def _translated(error: Exception, source: str) -> ArroyoStateError:
    import psycopg

    # libpq's messages name host, port and user on several lines; the first line has the error.
    text = redact_text(next(iter(str(error).strip().splitlines()), type(error).__name__))
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return InputError(
            f"the user may not read Arroyo's tables: {text}",
            url=source,
            next_step=f"grant SELECT on {', '.join(TABLES)} to the user of this URL",
        )
    if isinstance(error, psycopg.OperationalError):
        return StorageError(
            f"the database does not answer: {text}",
            url=source,
            retryable=True,
            next_step="check host, port, database, user and password of the URL",
        )
    if isinstance(error, psycopg.ProgrammingError):
        return InputError(
            f"the URL of the database cannot be used: {text}",
            url=source,
            next_step="write it as postgresql://USER:PASSWORD@HOST:PORT/DATABASE",
        )
    return FormatError(
        f"the database cannot be read: {text}",
        path=source,
        next_step="check that this is the database of Arroyo's controller",
    )
