"""What the database of Arroyo's controller, a SQLite file, says of its jobs.

The file itself is never opened by SQLite: a copy is, so no lock, no write-ahead log and no shared
memory of a running controller is ever touched.

Source: crates/arroyo-api/migrations and crates/arroyo-controller/queries/controller_queries.sql
(arroyo-state.md 10.4).
"""

from __future__ import annotations

import contextlib
import datetime as dt
import re
import sqlite3
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from arroyo_dagster.errors import FormatError, StorageError
from arroyo_dagster.redaction import redact_text, redacted_cause
from arroyo_dagster.state.model.directory import (
    Absence,
    CheckpointFacts,
    JobFacts,
    SourceWord,
    condition_of,
    newest_ready,
)
from arroyo_dagster.state.model.ids import Epoch, JobId, PipelineId
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.storage.database_copy import copy_database, shown_location

# What later releases added is read as unknown where it is missing.
_TABLES: Mapping[str, tuple[str, ...]] = {
    "job_configs": (
        *("id", "pipeline_name", "pipeline_id", "stop", "checkpoint_interval_micros"),
        *("ttl_micros", "ignore_state_before_epoch"),
    ),
    "job_statuses": ("id", "state", "run_id", "start_time", "finish_time", "failure_message"),
    "pipelines": ("id", "pub_id", "name", "state_url"),
    "checkpoints": (
        *("job_id", "epoch", "min_epoch", "state", "is_stopping", "start_time", "finish_time"),
    ),
}
_NEEDED = {"job_configs": {"id"}, "job_statuses": {"id", "state"}}
_NOT_ARROYO = "check that this is the database of Arroyo's controller"
_GONE = ("compacted", "failed")
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)?")
_UNIX = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)

_Row = Mapping[str, Any]
_T = TypeVar("_T")


class ArroyoDatabase:
    """The database of a controller, read anew at every call.

    Args:
        location: a path on this machine, or a URL in any form that checkpoint URLs have.
        max_bytes: how large a file may be.
    """

    def __init__(self, location: str, *, max_bytes: int = 4 << 30) -> None:
        self.source = shown_location(location)
        self._location = location
        self._max_bytes = max_bytes

    def look_up(self, jobs: Sequence[JobPaths], *, checkpoints: bool = False) -> list[SourceWord]:
        """Say what the database knows of each of `jobs`, in their order, previews included.

        Args:
            checkpoints: for the sake of other sources; the database gives epochs in any case.

        Raises:
            NotFoundError, InputError: there is no such file.
            FormatError: it is no database, a damaged one, or not Arroyo's.
            StorageError: it cannot be read, or changed all the time while it was copied.
        """
        known, pipelines = self._read()
        words = []
        for paths in jobs:
            facts = known.get(paths.job)
            if facts is not None and facts.concerns(paths):
                words.append(SourceWord(source=self.source, facts=facts))
            else:
                lost = paths.pipeline is not None and paths.pipeline not in pipelines
                absence = Absence.NO_PIPELINE if lost else Absence.NO_JOB
                words.append(SourceWord(source=self.source, absence=absence))
        return words

    def jobs(self) -> dict[JobId, JobFacts]:
        """Every job that the database has. Errors as `look_up`."""
        return self._read()[0]

    def _read(self) -> tuple[dict[JobId, JobFacts], set[PipelineId]]:
        with tempfile.TemporaryDirectory(prefix="arroyo-state-") as directory:
            copy = copy_database(self._location, Path(directory), max_bytes=self._max_bytes)
            try:
                rows = _tables(copy)
            except sqlite3.Error as error:
                raise _unsound(error, self.source) from redacted_cause(error)
        try:
            return _facts(rows, self.source), {_pub_id(one) for one in rows["pipelines"]}
        except FormatError as error:
            error.facts["path"] = self.source
            raise


def _unsound(error: sqlite3.Error, source: str) -> FormatError | StorageError:
    code = getattr(error, "sqlite_errorname", None) or ""
    if code.startswith(("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_CANTOPEN")):
        return StorageError(
            f"the copy of the database cannot be read: {redact_text(str(error))}",
            path=source,
            next_step="check the space left for temporary files (TMPDIR)",
        )
    return FormatError(
        f"this is not a sound database of Arroyo's: {redact_text(str(error))}",
        path=source,
        next_step="name the database of Arroyo's controller; if it is a copy, copy its -wal too",
    )


def _tables(copy: Path) -> dict[str, list[_Row]]:
    with contextlib.closing(sqlite3.connect(copy, isolation_level=None)) as database:
        # A database is data: nothing that it defines is to run.
        database.execute("PRAGMA trusted_schema = OFF")
        database.row_factory = sqlite3.Row
        problem = database.execute("PRAGMA quick_check(1)").fetchone()[0]
        if problem != "ok":
            raise sqlite3.DatabaseError(problem)
        return {table: list(_rows(database, table)) for table in _TABLES}


def _rows(database: sqlite3.Connection, table: str) -> Iterator[_Row]:
    """The rows of a table with the columns it has; those it lacks are None."""
    kinds = database.execute("SELECT type FROM sqlite_master WHERE name = ?", (table,)).fetchall()
    there = {row["name"] for row in database.execute(f"PRAGMA table_info({table})")}
    if [row["type"] for row in kinds] != ["table"]:
        there = set()
    lacking = _NEEDED.get(table, set()) - there
    if lacking:
        raise sqlite3.DatabaseError(f"{table} lacks {', '.join(sorted(lacking))}")
    columns = [name for name in _TABLES[table] if name in there]
    if columns:
        for row in database.execute(f"SELECT {', '.join(columns)} FROM {table}"):
            yield dict.fromkeys(_TABLES[table]) | dict(row)


# ---- rows to facts -------------------------------------------------------------------------------


def _facts(rows: Mapping[str, Sequence[_Row]], source: str) -> dict[JobId, JobFacts]:
    pipelines = {one["id"]: one for one in rows["pipelines"]}
    statuses = {one["id"]: one for one in rows["job_statuses"]}
    epochs = defaultdict(list)
    for one in rows["checkpoints"]:
        if one["state"] not in _GONE:
            epochs[one["job_id"]].append(_checkpoint(one))
    found = (
        _job(
            config,
            statuses.get(config["id"], {}),
            pipelines.get(config["pipeline_id"], {}),
            tuple(sorted(epochs[config["id"]], key=lambda one: one.epoch)),
            source,
        )
        for config in rows["job_configs"]
    )
    return {facts.job: facts for facts in found}


def _job(
    config: _Row,
    status: _Row,
    pipeline: _Row,
    checkpoints: tuple[CheckpointFacts, ...],
    source: str,
) -> JobFacts:
    state = _value(status, "state", str)
    before = _value(config, "ignore_state_before_epoch", int)
    return JobFacts(
        job=JobId(_needed(config, "id", str)),
        source=source,
        pipeline=_pub_id(pipeline) if pipeline else None,
        name=_value(pipeline, "name", str) or _value(config, "pipeline_name", str),
        condition=condition_of(state),
        state=state,
        run_id=_value(status, "run_id", int),
        newest_ready_epoch=newest_ready(checkpoints),
        checkpoints=checkpoints,
        stop_requested=_value(config, "stop", str),
        failure=_value(status, "failure_message", str),
        start_time_micros=_micros(status.get("start_time")),
        finish_time_micros=_micros(status.get("finish_time")),
        checkpoint_interval_micros=_value(config, "checkpoint_interval_micros", int),
        preview=None if "ttl_micros" not in config else config["ttl_micros"] is not None,
        state_url=_value(pipeline, "state_url", str),
        ignore_state_before_epoch=None if before is None else Epoch(before),
    )


def _checkpoint(one: _Row) -> CheckpointFacts:
    min_epoch = _value(one, "min_epoch", int)
    stopping = _value(one, "is_stopping", int)
    state = _value(one, "state", str)
    return CheckpointFacts(
        epoch=Epoch(_needed(one, "epoch", int)),
        ready=state == "ready",
        state=state,
        final=None if stopping is None else bool(stopping),
        min_epoch=None if min_epoch is None else Epoch(min_epoch),
        start_time_micros=_micros(one["start_time"]),
        finish_time_micros=_micros(one["finish_time"]),
    )


def _pub_id(pipeline: _Row) -> PipelineId:
    return PipelineId(_needed(pipeline, "pub_id", str))


def _needed(row: _Row, name: str, kind: Callable[..., _T]) -> _T:
    value = _value(row, name, kind)
    if value is None:
        raise FormatError(f"a row of Arroyo's database has no {name}", next_step=_NOT_ARROYO)
    return value


def _value(row: _Row, name: str, kind: Callable[..., _T]) -> _T | None:
    value = row.get(name)
    # Columns of SQLite hold values of any type, whatever they were declared as.
    if value is not None and type(value) is not kind:
        raise FormatError(
            f"a row of Arroyo's database has another shape: {name} is no {kind.__name__}",
            found=repr(value)[:100],
            next_step=_NOT_ARROYO,
        )
    return value


def _micros(text: object) -> int | None:
    """Microseconds since 1970 of a time as text, nanoseconds cut; None if it is in another form."""
    found = _TIME.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return None
    day, clock, part, zone = found.groups()
    try:
        moment = dt.datetime.fromisoformat(f"{day}T{clock}{(zone or '+00:00')}")
    except ValueError:
        return None
    seconds = (moment - _UNIX) // dt.timedelta(seconds=1)
    return seconds * 1_000_000 + int(f"{part or '0':0<6.6}")
