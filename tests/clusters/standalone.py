"""A standalone Spark cluster on loopback, started from pyspark's own files."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sysconfig
import time
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyspark.find_spark_home import _find_spark_home

START_SECONDS = 60.0
MEMORY_MB = 512
NOT_ON_WORKERS = ("arroyo_dagster", "__editable__", "lazy_loader", "tenacity")
"""What `ship` sends."""


@dataclass(frozen=True, slots=True)
class StandaloneCluster:
    """A master with workers of one core each.

    Attributes:
        workers: the process ids of the workers.
    """

    master: str
    folder: Path
    workers: tuple[int, ...]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _started(
    folder: Path, name: str, *command: str, hidden: Path | None
) -> subprocess.Popen[bytes]:
    """Start a daemon of Spark in the foreground, so that it has our process id."""
    home = _find_spark_home()
    line = [f"{home}/bin/spark-class", f"org.apache.spark.deploy.{command[0]}", *command[1:]]
    if hidden is not None:
        # In a mount namespace of its own it does not see what others write below this path.
        script = 'mount -t tmpfs none "$0" && exec "$@"'
        line = ["unshare", "--mount", "sh", "-c", script, str(hidden), *line]
    environment = {**os.environ, "SPARK_HOME": home, "SPARK_LOCAL_IP": "127.0.0.1"}
    environment.pop("PYTHONPATH", None)
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(line, env=environment, stdout=log, stderr=log, cwd=folder)


@contextlib.contextmanager
def standalone(
    folder: Path, *, workers: int = 2, hidden: Sequence[Path | None] = ()
) -> Iterator[StandaloneCluster]:
    """Run a master and workers; they end with the context.

    Args:
        hidden: for each worker a folder in which it sees nothing that others write; None = none.
    """
    port, page = free_port(), free_port()
    at = ("--host", "127.0.0.1")
    daemons = []
    try:
        master = ("master.Master", *at, "--port", str(port), "--webui-port", str(page))
        daemons.append(_started(folder, "master", *master, hidden=None))
        wait_for(folder / "master.log", "I have been elected leader")
        url = f"spark://127.0.0.1:{port}"
        for number in range(workers):
            size = ("--cores", "1", "--memory", f"{MEMORY_MB}m", "--webui-port", str(free_port()))
            work = ("--work-dir", str(folder / f"work-{number}"), url)
            own = hidden[number] if number < len(hidden) else None
            one = _started(
                folder, f"worker-{number}", "worker.Worker", *at, *size, *work, hidden=own
            )
            daemons.append(one)
        for number in range(workers):
            wait_for(folder / f"worker-{number}.log", "Successfully registered with master")
        yield StandaloneCluster(url, folder, tuple(one.pid for one in daemons[1:]))
    finally:
        for one in reversed(daemons):
            one.terminate()
        for one in daemons:
            try:
                one.wait(20)
            except subprocess.TimeoutExpired:
                one.kill()


def wait_for(log: Path, text: str) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if text in log.read_text(errors="replace"):
            return
        time.sleep(0.2)
    raise AssertionError(f"{log}: {log.read_text(errors='replace')[-2000:]}")


def python_without_the_package(folder: Path) -> Path:
    """Make an environment with the packages of this one, but for those that `ship` sends."""
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    for kind in ("purelib", "platlib"):
        for path in Path(sysconfig.get_path(kind)).iterdir():
            left_out = path.name.startswith(NOT_ON_WORKERS) or path.suffix == ".pth"
            if not left_out and not (site / path.name).exists():
                (site / path.name).symlink_to(path)
    return folder / "bin" / "python"


SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.memory": f"{MEMORY_MB}m",
    "spark.ui.enabled": "false",
}
"""What a driver on loopback needs."""
