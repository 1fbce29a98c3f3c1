"""A Postgres for tests, started from the programs of Debian's package; a test without it is
skipped with the reason."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

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
