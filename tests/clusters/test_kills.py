"""The flights job on a cluster: whatever is killed in the middle, it is exact at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arroyo_dagster.errors import NotFoundError
from arroyo_dagster.state import ParquetBackend, open_store
from examples.flights.pipeline import FLIGHTS
from examples.flights.verify import JOB, explain, prove
from tests.clusters.standalone import SETTINGS, StandaloneCluster, standalone
from tests.clusters.test_connect import connect_server
from tests.clusters.test_standalone import PROJECT

pytestmark = pytest.mark.clusters

ROWS_PER_EPOCH = 24_576
EPOCHS = -(-pq.read_metadata(FLIGHTS).num_rows // ROWS_PER_EPOCH)
PATIENCE_SECONDS = 240.0
ON_CLUSTER = {
    **SETTINGS,
    "spark.pyspark.python": sys.executable,
    "spark.executorEnv.PYTHONPATH": str(PROJECT),
}


class Flights:
    """The job in a process of its own, as a user starts it."""

    def __init__(self, folder: Path) -> None:
        self.url, self.output = str(folder / "checkpoints"), str(folder / "output")
        self._folder = folder
        self._backend = ParquetBackend(open_store(self.url), JOB)
        self._runs = 0

    @contextmanager
    def run(self, *where: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run it on a cluster; it is killed at the end, unless it has ended by itself."""
        self._runs += 1
        environment = {
            **os.environ,
            "PYTHONPATH": str(PROJECT),
            "FLIGHTS_OUTPUT": self.output,
            "FLIGHTS_ROWS_PER_EPOCH": str(ROWS_PER_EPOCH),
            "FLIGHTS_PARALLELISM": "2",
        }
        command = [sys.executable, "-m", "arroyo_dagster.cli", "run"]
        command += ["examples/flights/pipeline.py:pipeline", "--url", self.url, "--spark", *where]
        self.log = self._folder / f"run-{self._runs}.log"
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=PROJECT,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            kill(process)

    def epoch(self) -> int:
        """The newest epoch; 0 while there is none."""
        try:
            return max(self._backend.epochs(), default=0)
        except NotFoundError:
            return 0

    def wait(self, process: subprocess.Popen[bytes], epoch: int) -> None:
        """Wait for an epoch."""
        until = time.monotonic() + PATIENCE_SECONDS
        while self.epoch() < epoch:
            assert process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < until, self.log.read_text()[-3000:]
            time.sleep(0.1)

    def wait_for_end(self, process: subprocess.Popen[bytes]) -> int:
        """Wait until it ends by itself; the exit code."""
        return process.wait(PATIENCE_SECONDS)

    def proven(self) -> None:
        """Tables and output are those of a plain group-by."""
        flights: pa.Table = pq.read_table(FLIGHTS)
        proof = prove(self.url, self.output, flights)
        assert not proof.differences, explain(proof)
        assert proof.flights == flights.num_rows


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it has started with SIGKILL."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def options(conf: Mapping[str, str]) -> list[str]:
    return [part for name, value in conf.items() for part in ("--conf", f"{name}={value}")]


def on(cluster: StandaloneCluster) -> list[str]:
    return [f"master={cluster.master}", *(f"{name}={value}" for name, value in ON_CLUSTER.items())]


def test_kills_of_a_worker_the_driver_and_the_master(tmp_path: Path) -> None:
    """One kill per run of the job; the next run continues from the newest epoch."""
    job = Flights(tmp_path)
    with standalone(tmp_path) as cluster:
        with job.run(*on(cluster), "--epochs", "4") as process:
            job.wait(process, 2)
            cluster.kill("worker-1")
            assert job.wait_for_end(process) == 0, job.log.read_text()[-3000:]
        assert job.epoch() == 4
        cluster.start_worker(1)
        cluster.wait_for_worker(1)
        with job.run(*on(cluster)) as process:
            job.wait(process, 7)
            kill(process)
        killed_at = job.epoch()
        assert killed_at < EPOCHS
        with job.run(*on(cluster)) as process:
            job.wait(process, killed_at + 2)
            cluster.kill("master")
            assert job.wait_for_end(process) == 0, job.log.read_text()[-3000:]
    job.proven()


def test_kills_of_a_worker_the_client_and_the_server_of_spark_connect(tmp_path: Path) -> None:
    job = Flights(tmp_path)
    with standalone(tmp_path) as cluster:
        server = {"master": cluster.master, **ON_CLUSTER}
        with connect_server(tmp_path, sys.executable, **server) as remote:
            with job.run(f"remote={remote}", "--epochs", "4") as process:
                job.wait(process, 2)
                cluster.kill("worker-1")
                assert job.wait_for_end(process) == 0, job.log.read_text()[-3000:]
            cluster.start_worker(1)
            cluster.wait_for_worker(1)
            with job.run(f"remote={remote}") as process:
                job.wait(process, 7)
                kill(process)
            killed_at = job.epoch()
            assert killed_at < EPOCHS
            with job.run(f"remote={remote}") as process:
                job.wait(process, killed_at + 1)
                kill_server(remote)  # its client would try for ten minutes
        with (
            connect_server(tmp_path, sys.executable, **server) as remote,
            job.run(f"remote={remote}") as process,
        ):
            assert job.wait_for_end(process) == 0, job.log.read_text()[-3000:]
    job.proven()


def kill_server(remote: str) -> None:
    """End the server of an address with SIGKILL."""
    port = remote.rpartition(":")[2]
    setting = f"spark.connect.grpc.binding.port={port}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if setting in line and b"SparkConnectServer" in line:
            os.kill(int(folder.name), signal.SIGKILL)
