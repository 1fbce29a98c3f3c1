"""The controller's Postgres: the same facts as from SQLite, read only, no password in any text."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from arroyo_dagster.errors import FormatError, InputError, StorageError
from arroyo_dagster.state import JobId
from arroyo_dagster.state.storage.arroyo.postgres import ArroyoPostgres
from tests.compat.arroyo import DATA
from tests.formats import JobCondition, JobFacts
from tests.internals import open_directory
from tests.stores import ArroyoDatabase

PASSWORD = "canary-9f3c1a77"
_START_SECONDS = 60


@dataclass(frozen=True)
class Postgres:
    """A running server; `user` may do anything, and logs in by password."""

    port: int
    user: str = "arroyo"

    def url(self, user: str | None = None, password: str = PASSWORD) -> str:
        return f"postgresql://{user or self.user}:{password}@127.0.0.1:{self.port}/postgres"


def programs() -> Path | None:
    """The directory of the newest server's programs; None if there is none."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=_version)
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    return None if on_path is None else Path(on_path).resolve().parent


def _version(path: Path) -> int:
    name = path.parents[1].name
    return int(name) if name.isdigit() else 0


@contextlib.contextmanager
def running_postgres() -> Iterator[Postgres]:
    """Start a server with an empty database, and stop it."""
    found = programs()
    if found is None:
        pytest.skip("no Postgres server is installed (Debian: apt-get install postgresql)")
    with tempfile.TemporaryDirectory(prefix="arroyo-pg-", dir="/tmp") as name:
        home = Path(name)
        (home / "password").write_text(PASSWORD)
        _give_to_server(home)
        data = home / "data"
        _run(
            *(found / "initdb", "-D", data, "-U", "arroyo", "--auth=scram-sha-256"),
            *(f"--pwfile={home / 'password'}", "--no-sync"),
        )
        port = _free_port()
        settings = ("fsync=off", "listen_addresses=127.0.0.1", f"unix_socket_directories={home}")
        options = [part for one in settings for part in ("-c", one)]
        command = _as_server(found / "postgres", "-D", data, "-p", port, *options)
        with open(home / "log", "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _wait_for(port, process, home / "log")
            yield Postgres(port)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


def _give_to_server(directory: Path) -> None:
    """Postgres refuses to run as root."""
    if os.geteuid() == 0:
        try:
            account = pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("a Postgres server does not run as root, and there is no user postgres")
        for path in (directory, *directory.iterdir()):
            os.chown(path, account.pw_uid, account.pw_gid)


def _as_server(*command: object) -> Sequence[str]:
    words = [str(one) for one in command]
    if os.geteuid() != 0:
        return words
    return ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", *words]


def _run(*command: object) -> None:
    done = subprocess.run(_as_server(*command), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    import psycopg

    until = time.monotonic() + _START_SECONDS
    while True:
        try:
            psycopg.connect(Postgres(port).url()).close()
            return
        except psycopg.OperationalError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.1)


FIXTURE = DATA / "state-legacy.sqlite"

# As Arroyo's migrations leave it: crates/arroyo-api/migrations, V1 to V35. What is not read is left
# out.
SCHEMA = """
CREATE TYPE stop_mode AS ENUM ('none', 'checkpoint', 'graceful', 'immediate', 'force');
CREATE TYPE checkpoint_state AS ENUM
  ('inprogress', 'ready', 'compacting', 'compacted', 'failed', 'committing');
CREATE TABLE pipelines (
  id BIGSERIAL PRIMARY KEY, pub_id VARCHAR NOT NULL UNIQUE, name TEXT NOT NULL,
  textual_repr TEXT, program BYTEA, state_url TEXT, tags JSONB);
CREATE TABLE job_configs (
  id VARCHAR PRIMARY KEY, pipeline_name TEXT NOT NULL, created_at TIMESTAMPTZ DEFAULT now(),
  ttl_micros BIGINT, stop stop_mode DEFAULT 'none', parallelism_overrides JSONB DEFAULT '{}',
  checkpoint_interval_micros BIGINT NOT NULL DEFAULT 10000000,
  pipeline_id BIGINT REFERENCES pipelines(id) ON DELETE CASCADE, ignore_state_before_epoch INT);
CREATE TABLE job_statuses (
  id VARCHAR PRIMARY KEY REFERENCES job_configs(id) ON DELETE CASCADE,
  run_id BIGINT NOT NULL DEFAULT 0, start_time TIMESTAMPTZ, finish_time TIMESTAMPTZ,
  failure_message TEXT, state TEXT DEFAULT 'Created', state_context JSONB);
CREATE TABLE checkpoints (
  id BIGSERIAL PRIMARY KEY, job_id VARCHAR REFERENCES job_configs(id) ON DELETE CASCADE NOT NULL,
  epoch INT NOT NULL, min_epoch INT NOT NULL, start_time TIMESTAMPTZ NOT NULL,
  finish_time TIMESTAMPTZ, state checkpoint_state DEFAULT 'inprogress',
  operators JSONB DEFAULT '{}' NOT NULL, is_stopping BOOLEAN DEFAULT false NOT NULL);
CREATE ROLE reader LOGIN PASSWORD 'reader-5d1e';
CREATE ROLE stranger LOGIN PASSWORD 'stranger-77aa';
GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader;
"""
COPIED = {
    "pipelines": ("id", "pub_id", "name", "textual_repr", "state_url", "program"),
    "job_configs": (
        *("id", "pipeline_name", "pipeline_id", "stop", "checkpoint_interval_micros"),
        *("ttl_micros", "ignore_state_before_epoch"),
    ),
    "job_statuses": ("id", "state", "run_id", "start_time", "finish_time", "failure_message"),
    "checkpoints": (
        *("job_id", "epoch", "min_epoch", "state", "is_stopping", "start_time", "finish_time"),
    ),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with running_postgres() as found:
        with connected(found) as connection:
            connection.execute(SCHEMA)
            copy_fixture(connection)
        yield found


def connected(server: Postgres) -> Any:
    import psycopg

    return psycopg.connect(server.url())


def copy_fixture(connection: Any) -> None:
    """What a real Arroyo wrote into SQLite, in the types of Postgres."""
    with contextlib.closing(sqlite3.connect(FIXTURE)) as source:
        for table, columns in COPIED.items():
            for row in source.execute(f"SELECT {', '.join(columns)} FROM {table}"):
                values = [_value(name, value) for name, value in zip(columns, row, strict=True)]
                marks = ", ".join(["%s"] * len(columns))
                connection.execute(
                    f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})", values
                )


def _value(column: str, value: Any) -> Any:
    if column == "is_stopping":
        return bool(value)
    if column.endswith("_time") and value:
        day, _, part = value.partition(".")
        return f"{day}.{part[:6]}+00:00"  # Postgres would round what we cut
    return value


def without_source(jobs: dict[JobId, JobFacts]) -> dict[JobId, JobFacts]:
    return {job: replace(facts, source=None) for job, facts in jobs.items()}


# ---- facts ---------------------------------------------------------------------------------------


def test_the_facts_are_those_of_sqlite(server: Postgres) -> None:
    expected = ArroyoDatabase(str(FIXTURE)).jobs()
    found = ArroyoPostgres(server.url("reader", "reader-5d1e")).jobs()
    assert without_source(found) == without_source(expected)
    assert {facts.condition for facts in found.values()} == {JobCondition.STOPPED}
    assert all(facts.checkpoints for facts in found.values())


# ---- read only -----------------------------------------------------------------------------------


def test_the_session_can_write_nothing(server: Postgres) -> None:
    import psycopg

    from arroyo_dagster.state.storage.arroyo import postgres as arroyo_postgres

    with arroyo_postgres._connected(server.url()) as connection:
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            connection.execute("DELETE FROM checkpoints")
        connection.rollback()
    with connected(server) as connection:
        (count,) = connection.execute("SELECT count(*) FROM checkpoints").fetchone()
    assert count > 0


def test_exclusive_lock_is_an_error(server: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    from arroyo_dagster.state.storage.arroyo import postgres as arroyo_postgres

    monkeypatch.setattr(arroyo_postgres, "STATEMENT_SECONDS", 1)
    with connected(server) as connection:
        connection.execute("LOCK TABLE job_configs IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(StorageError, match="statement timeout") as raised:
            ArroyoPostgres(server.url()).jobs()
        connection.rollback()
    assert raised.value.retryable


# ---- what goes wrong -----------------------------------------------------------------------------


def test_no_error_holds_a_password(server: Postgres) -> None:
    urls = {
        server.url(password="wrong-canary-1"): "wrong-canary-1",
        f"postgresql://arroyo:{PASSWORD}@127.0.0.1:1/postgres": PASSWORD,
        f"postgresql://arroyo:{PASSWORD}@127.0.0.1:{server.port}/nodatabase": PASSWORD,
        f"postgresql://127.0.0.1:{server.port}/postgres?password=wrong-canary-2": "wrong-canary-2",
        f"postgresql://arroyo:{PASSWORD}@127.0.0.1:noport/postgres": PASSWORD,
        f"postgresql://arroyo:{PASSWORD}@127.0.0.1/postgres?nooption=1": PASSWORD,
    }
    for url, secret in urls.items():
        with pytest.raises((StorageError, InputError)) as raised:
            ArroyoPostgres(url).jobs()
        text = f"{raised.value!r} {raised.value} {raised.value.__cause__!r}"
        assert secret not in text, text
        assert raised.value.next_step


def test_a_user_without_rights_and_another_database_are_told(server: Postgres) -> None:
    with pytest.raises((InputError, FormatError), match=r"job_configs|tables") as raised:
        ArroyoPostgres(server.url("stranger", "stranger-77aa")).jobs()
    assert "grant SELECT" in str(raised.value.next_step)
    with connected(server) as connection:
        connection.autocommit = True
        connection.execute("CREATE DATABASE other")
    other = server.url().replace("/postgres", "/other").replace("postgresql:/other", "postgresql:/")
    with pytest.raises(FormatError, match="not a database of Arroyo"):
        ArroyoPostgres(other).jobs()


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(InputError) as raised:
        open_directory(database=f"postgresql://arroyo:{PASSWORD}@db/arroyo")
    assert "pip install 'psycopg[binary]>=3.2'" in str(raised.value.next_step)
    assert PASSWORD not in str(raised.value)
