"""S3 servers of other makers than moto, built once from package registries into a cache directory.

`make servers` installs them; a test that asks for one that is missing is skipped with the reason.
`python -m tests.s3_servers NAME…` installs those it names.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

KEYS = {"access_key_id": "testing", "secret_access_key": "testing", "region": "us-east-1"}
_INSTALL_SECONDS = 900
_START_SECONDS = 20


@dataclass(frozen=True)
class Server:
    """One server.

    Attributes:
        version: pinned; a newer one is tried on purpose.
        tool: what installs it.
        package: how the tool names it, without the version.
        program: where the tool puts it, below the server's directory.
        arguments: from its directory of data and its port.
        conditional_create: False for a server that ignores `If-None-Match`.
    """

    name: str
    version: str
    tool: str
    package: str
    program: str
    arguments: Callable[[Path, int], Sequence[str]]
    conditional_create: bool = True

    @property
    def directory(self) -> Path:
        return cache() / f"{self.name}-{self.version}"

    @property
    def command(self) -> Path:
        return self.directory / self.program

    def install(self) -> None:
        """Build it, unless that is done; another process that does so is waited for.

        Raises:
            OSError: its tool is missing.
            subprocess.SubprocessError: it could not be downloaded or built.
        """
        cache().mkdir(parents=True, exist_ok=True)
        with open(cache() / f"{self.name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.command.exists():
                return
            building = Path(tempfile.mkdtemp(prefix=f"{self.name}-", dir=cache()))
            try:
                _run(*self._install_command(building), GOBIN=str(building / "bin"))
                building.chmod(0o755)
                building.rename(self.directory)
            finally:
                shutil.rmtree(building, ignore_errors=True)

    def _install_command(self, into: Path) -> Sequence[str]:
        package = f"{self.package}@{self.version}"
        if self.tool == "go":
            return ("go", "install", package)
        return ("npm", "install", "--no-audit", "--no-fund", "--prefix", str(into), package)


def _gofakes3(data: Path, port: int) -> Sequence[str]:
    return ("-backend", "memory", "-host", f"127.0.0.1:{port}", "-quiet")


def _versitygw(data: Path, port: int) -> Sequence[str]:
    (data / "root").mkdir()
    return (
        *("--port", f"127.0.0.1:{port}", "--quiet", "--keep-alive"),
        *("--access", KEYS["access_key_id"], "--secret", KEYS["secret_access_key"]),
        *("posix", str(data / "root")),
    )


def _s3rver(data: Path, port: int) -> Sequence[str]:
    flags = ("--allow-mismatched-signatures", "--no-vhost-buckets", "--silent")
    return ("-d", str(data), "-a", "127.0.0.1", "-p", str(port), *flags)


SERVERS = {
    server.name: server
    for server in (
        Server(
            "gofakes3",
            "v1.2.0",
            "go",
            "github.com/johannesboyne/gofakes3/cmd/gofakes3",
            "bin/gofakes3",
            _gofakes3,
        ),
        Server(
            "versitygw",
            "v1.8.0",
            "go",
            "github.com/versity/versitygw/cmd/versitygw",
            "bin/versitygw",
            _versitygw,
        ),
        Server(
            "s3rver",
            "3.7.1",
            "npm",
            "s3rver",
            "node_modules/.bin/s3rver",
            _s3rver,
            conditional_create=False,
        ),
    )
}


def cache() -> Path:
    """Where the servers are kept, outside the repository."""
    above = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(above) / "arroyo-dagster-tests"


def options_of(name: str) -> dict[str, Any]:
    """How a store on a server is opened."""
    secret = {"access_key_id": "S3RVER", "secret_access_key": "S3RVER"}
    return {**KEYS, **(secret if name == "s3rver" else {})}


@contextlib.contextmanager
def s3_server(name: str, bucket: str) -> Iterator[str]:
    """Give `host:port` of a server with an empty bucket; skip the test if it is not installed."""
    server = SERVERS[name]
    if not server.command.exists():
        pytest.skip(f"{name} {server.version} is not installed: run `make servers`")
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as data, open(f"{data}/log", "wb") as log:
        port = free_port()
        command = [str(server.command), *server.arguments(Path(data), port)]
        process = subprocess.Popen(command, cwd=data, stdout=log, stderr=log)
        try:
            _wait_for(port, process, Path(data, "log"))
            make_bucket(f"127.0.0.1:{port}", bucket, name)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()  # one waits for connections that clients keep open
            process.wait()


def make_bucket(endpoint: str, bucket: str, name: str) -> None:
    """Make a bucket as any client would."""
    import s3fs

    options = options_of(name)
    s3fs.S3FileSystem(
        key=options["access_key_id"],
        secret=options["secret_access_key"],
        endpoint_url=f"http://{endpoint}",
        skip_instance_cache=True,
    ).call_s3("create_bucket", Bucket=bucket)


def _run(*command: str, **environment: str) -> None:
    subprocess.run(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=True,
        timeout=_INSTALL_SECONDS,
    )


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 0.2).close()
            return
        time.sleep(0.05)
    raise AssertionError(f"the server on port {port} does not answer: {log.read_text()}")


def free_port() -> int:
    """A port of loopback that nobody listened to a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main(names: Sequence[str]) -> None:
    """Install servers; one that cannot be is reported, and the tests that need it are skipped."""
    for name in names or SERVERS:
        begun = time.monotonic()
        try:
            SERVERS[name].install()
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or str(error).encode()
            last = said.decode(errors="replace").strip().splitlines()[-1:]
            print(f"{name}: not installed, its tests are skipped ({' '.join(last)})")
        else:
            print(f"{name} {SERVERS[name].version}: ready ({time.monotonic() - begun:.0f} s)")


if __name__ == "__main__":
    main(sys.argv[1:])
