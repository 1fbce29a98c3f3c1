"""The controller's database: live, old, damaged or something else; never written, never locked."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from arroyo_dagster.errors import FormatError, InputError, NotFoundError, StorageError
from arroyo_dagster.state import JobId, MemoryStore, StatePath
from arroyo_dagster.state.storage.arroyo import sqlite
from tests.compat.arroyo import DATA
from tests.stores import ArroyoDatabase

FIXTURE = DATA / "state-legacy.sqlite"
JOINS = JobId("job_d14OMmRXhf")

# A controller in a process of its own, since SQLite's locks do not hold within one.
CONTROLLER = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None)
for statement in sys.argv[2:]:
    database.execute(statement)
print("ready", flush=True)
sys.stdin.read()
import os; os._exit(0)  # as a kill would: no log is folded in, no lock released in order
"""


@contextlib.contextmanager
def controller(path: Path, *statements: str) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, str(path), *statements],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield
    finally:
        process.communicate("")


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "live" / "state.sqlite"
    path.parent.mkdir()
    return Path(shutil.copyfile(FIXTURE, path))


def edit(path: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def state_of(path: Path | str) -> str | None:
    return ArroyoDatabase(str(path)).jobs()[JOINS].state


def contents(directory: Path) -> dict[str, tuple[int, bytes]]:
    return {
        one.name: (one.stat().st_mtime_ns, one.read_bytes())
        for one in directory.iterdir()
        if not one.name.endswith("-shm")
    }


# ---- a live database -----------------------------------------------------------------------------

RUN = f"UPDATE job_statuses SET state = 'Running', run_id = 2 WHERE id = '{JOINS}'"


def test_transaction_of_a_controller_is_neither_seen_nor_disturbed(database: Path) -> None:
    for mode in ("WAL", "DELETE"):
        begun = (f"PRAGMA journal_mode = {mode}", "PRAGMA cache_size = 1", "BEGIN EXCLUSIVE", RUN)
        with controller(database, *begun):
            before = contents(database.parent)
            assert state_of(database) == "Stopped"
            assert contents(database.parent) == before
            with contextlib.closing(sqlite3.connect(database, timeout=0)) as another:
                # The controller's lock is still there, in a mode that shows it.
                if mode == "DELETE":
                    with pytest.raises(sqlite3.OperationalError, match="locked"):
                        another.execute("SELECT * FROM job_statuses").fetchall()


def test_a_transaction_that_a_crash_cut_off_is_rolled_back_in_the_copy_only(database: Path) -> None:
    spill = "UPDATE pipelines SET textual_repr = hex(randomblob(200000))"
    with controller(database, "PRAGMA cache_size = 1", "BEGIN", RUN, spill, spill):
        assert state_of(database) == "Stopped"
    before = contents(database.parent)
    assert "state.sqlite-journal" in before
    assert state_of(database) == "Stopped"
    assert contents(database.parent) == before


def test_nothing_is_written_where_nothing_may_be(database: Path) -> None:
    database.parent.chmod(0o500)
    database.chmod(0o400)
    try:
        before = contents(database.parent)
        assert state_of(database) == "Stopped"
        assert contents(database.parent) == before
    finally:
        database.parent.chmod(0o700)


def test_database_never_at_rest_is_retryable(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = sqlite._copied

    def disturbed(source: Path, directory: Path) -> Path:
        edit(database, "UPDATE job_statuses SET run_id = run_id + 1")
        return copied(source, directory)

    monkeypatch.setattr(sqlite, "_copied", disturbed)
    monkeypatch.setattr(sqlite, "_PAUSE_SECONDS", 0)
    with pytest.raises(StorageError) as caught:
        state_of(database)
    assert caught.value.retryable


def test_log_restarted_in_a_copy_is_noticed(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(database, "PRAGMA journal_mode = WAL")
    keeper = sqlite3.connect(database, isolation_level=None)
    keeper.execute(RUN)
    before = sqlite._signature(database, 1 << 30)
    keeper.execute("UPDATE job_statuses SET run_id = 5")
    grown = sqlite._signature(database, 1 << 30)
    keeper.execute("PRAGMA wal_checkpoint(RESTART)")
    keeper.execute("UPDATE job_statuses SET run_id = 6")
    again = sqlite._signature(database, 1 << 30)
    keeper.close()
    assert before == grown != again


# ---- where it lies -------------------------------------------------------------------------------


def test_a_backup_in_a_store_is_fetched_with_its_log(database: Path) -> None:
    store = MemoryStore("sqlite-backup")
    with controller(database, "PRAGMA journal_mode = WAL", RUN):
        store.put(StatePath("state.sqlite"), database.read_bytes())
        assert state_of("memory://sqlite-backup/state.sqlite") == "Stopped"
        log = database.with_name("state.sqlite-wal").read_bytes()
        store.put(StatePath("state.sqlite-wal"), log)
    found = ArroyoDatabase("memory://sqlite-backup/state.sqlite")
    assert found.jobs()[JOINS].state == "Running"
    assert found.source == "memory://sqlite-backup/state.sqlite"
    with pytest.raises(NotFoundError, match="no such database"):
        state_of("memory://sqlite-backup/other.sqlite")
    with pytest.raises(InputError, match="larger than"):
        ArroyoDatabase("memory://sqlite-backup/state.sqlite", max_bytes=100).jobs()


# ---- what it holds -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 15, 100, 4096, 100_000, 400_000, 606_207])
def test_a_truncated_file_is_a_format_error(database: Path, size: int) -> None:
    os.truncate(database, size)
    with pytest.raises(FormatError) as caught:
        state_of(database)
    assert caught.value.facts["path"] == str(database)
    assert caught.value.next_step


@pytest.mark.parametrize(
    "statement",
    [
        "DROP TABLE job_configs",
        "DROP TABLE job_statuses",
        "ALTER TABLE job_statuses RENAME COLUMN state TO condition",
        "ALTER TABLE job_statuses RENAME TO real",
        "UPDATE job_statuses SET run_id = 'one'",
        "UPDATE job_statuses SET state = x'00'",
        "UPDATE checkpoints SET epoch = 1.5 WHERE epoch = 14",
        "UPDATE job_statuses SET state = CAST(x'ff' AS TEXT)",
    ],
)
def test_database_of_another_form_is_refused(database: Path, statement: str) -> None:
    edit(database, "PRAGMA legacy_alter_table = ON", statement)
    if "RENAME TO" in statement:  # a view may run anything
        edit(database, "CREATE VIEW job_statuses AS SELECT * FROM real")
    with pytest.raises(FormatError) as caught:
        state_of(database)
    assert caught.value.facts["path"] == str(database)


def test_older_schemas_are_read_as_far_as_they_go(database: Path) -> None:
    for table, columns in {
        "checkpoints": ("is_stopping", "event_spans"),
        "job_configs": ("ignore_state_before_epoch", "env_vars", "scheduler_config"),
        "job_statuses": ("state_context", "failure_domain"),
        "pipelines": ("state_url", "tags"),
    }.items():
        edit(database, *(f"ALTER TABLE {table} DROP COLUMN {column}" for column in columns))
    facts = ArroyoDatabase(str(database)).jobs()[JOINS]
    assert (facts.name, facts.state, facts.newest_ready_epoch) == ("joins", "Stopped", 14)
    assert facts.checkpoints is not None
    assert facts.checkpoints[-1].final is None
    edit(database, "DROP TABLE checkpoints", "DROP TABLE pipelines")
    facts = ArroyoDatabase(str(database)).jobs()[JOINS]
    assert (facts.name, facts.pipeline, facts.newest_ready_epoch) == ("joins", None, None)


@pytest.mark.parametrize(
    ("text", "micros"),
    [
        ("1970-01-01 00:00:01", 1_000_000),
        ("1970-01-01T00:00:01.5Z", 1_500_000),
        ("1970-01-01 00:00:00.000001999+00:00", 1),
        ("1970-01-01 01:00:00+01:00", 0),
        ("1969-12-31 23:59:59.75+00:00", -250_000),
        ("2026-13-01 00:00:00", None),
        ("yesterday", None),
        ("5", None),
    ],
)
def test_times_are_exact_or_not_read(database: Path, text: str, micros: int | None) -> None:
    edit(database, f"UPDATE job_statuses SET start_time = '{text}'")
    assert ArroyoDatabase(str(database)).jobs()[JOINS].start_time_micros == micros
