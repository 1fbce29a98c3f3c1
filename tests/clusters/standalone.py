"""A standalone Spark cluster on loopback, started from pyspark's own files."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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
        daemons: their processes, by the names `master`, `worker-0`, `worker-1`…
    """

    master: str
    folder: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def kill(self, name: str) -> None:
        """End a daemon with SIGKILL."""
        self.daemons[name].kill()
        self.daemons[name].wait()

    def start_worker(self, number: int, *, hidden: Path | None = None) -> None:
        """Start a worker of one core."""
        name = f"worker-{number}"
        at = ("--host", "127.0.0.1", "--cores", "1", "--memory", f"{MEMORY_MB}m")
        work = ("--webui-port", str(free_port()), "--work-dir", str(self.folder / f"work-{number}"))
        self.daemons[name] = _started(
            self.folder, name, "worker.Worker", *at, *work, self.master, hidden=hidden
        )

    def wait_for_worker(self, number: int) -> None:
        """Wait until a worker has registered with the master."""
        wait_for(self.folder / f"worker-{number}.log", "Successfully registered with master")

    @property
    def workers(self) -> tuple[int, ...]:
        """The process ids of the workers."""
        return tuple(one.pid for name, one in self.daemons.items() if name != "master")


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
    cluster = StandaloneCluster(f"spark://127.0.0.1:{port}", folder)
    try:
        at = ("--host", "127.0.0.1", "--port", str(port), "--webui-port", str(page))
        cluster.daemons["master"] = _started(folder, "master", "master.Master", *at, hidden=None)
        wait_for(folder / "master.log", "I have been elected leader")
        for number in range(workers):
            cluster.start_worker(number, hidden=hidden[number] if number < len(hidden) else None)
        for number in range(workers):
            cluster.wait_for_worker(number)
        yield cluster
    finally:
        for one in reversed(cluster.daemons.values()):
            one.terminate()
        for one in cluster.daemons.values():
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
    # Two of them where the pyspark of `make test-spark` is beside the packages of .venv.
    for packages in (one for one in sys.path if one.endswith("site-packages")):
        for path in Path(packages).iterdir():
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
