"""Dagster's UI, alive: a job that writes an epoch every five seconds, and a dataflow whose states
change as often; the sensor on, files compacted and old epochs expired by schedules that look every
minute.

    make ui
    python examples/flights/ui.py --port 3001

The instance, the job and the dataflow are kept in `.demo/live/`. Ctrl-C ends all; they go on where
they were next time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from home import PROJECT, dagster_home
from states import FLIGHTS, live_command

FOLDER = PROJECT / ".demo" / "live"
ROWS_PER_EPOCH = 256
SECONDS_BETWEEN_EPOCHS = 5
BEGUN_EPOCHS = 12
STARTED_SECONDS = 120.0


class Live:
    """The job and the instance of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = str(folder / "checkpoints")
        folder.mkdir(parents=True, exist_ok=True)
        self._home = dagster_home(folder / "dagster")

    def writer(self, *options: str) -> list[str]:
        """The command that writes epochs."""
        command = str(Path(sys.executable).with_name("arroyo-state"))
        target = "examples/flights/pipeline.py:pipeline"
        return [command, "run", target, "--url", self.url, *options]

    def environment(self) -> dict[str, str]:
        """What both processes are told. A checkpoint URL or an instance of the user's own is
        never touched: old epochs are deleted here."""
        return {
            **os.environ,
            "DAGSTER_HOME": str(self._home),
            "FLIGHTS_URL": self.url,
            "FLIGHTS_JOB": "live",
            "FLIGHTS_OUTPUT": str(self.folder / "output"),
            "FLIGHTS_ROWS_PER_EPOCH": str(ROWS_PER_EPOCH),
        }


@contextmanager
def running(
    command: list[str], environment: dict[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A process and all it starts, ended on leaving."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=PROJECT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # A background parent makes it ignore SIGINT, and Dagster then SIGTERM too.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
                if number is signal.SIGTERM:
                    time.sleep(1)  # its code servers end by themselves


def _free_port(wanted: int) -> int:
    for port in range(wanted, wanted + 50):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise SystemExit(f"no free port from {wanted} on; say another with --port")


def await_url(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + STARTED_SECONDS
    while time.monotonic() < until:
        if process.poll() is not None:
            raise SystemExit(f"Dagster ended with exit code {process.returncode}; see {log}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/server_info", timeout=5):
            return
        time.sleep(0.5)
    raise SystemExit(f"Dagster does not answer after {STARTED_SECONDS:.0f} seconds; see {log}")


def _watch(
    writer: subprocess.Popen[bytes], ui: subprocess.Popen[bytes], seconds: float, folder: Path
) -> None:
    """Wait until the UI ends, or so many seconds have passed; say it once if the job has ended."""
    until = time.monotonic() + seconds
    told = False
    while time.monotonic() < until and ui.poll() is None:
        if writer.poll() is not None and not told:
            print(f"The job has ended; see its log. Remove {folder} to begin anew.", flush=True)
            told = True
        time.sleep(0.5)


def main() -> int:
    """Open the UI and keep it open. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Open Dagster's UI on a job that goes on.")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the job lives")
    parser.add_argument("--port", type=int, default=3000, help="3000, or the next one free")
    parser.add_argument("--seconds", type=float, help="end by itself after so long")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    live = Live(options.folder.resolve())
    environment, logs = (
        live.environment(),
        [live.folder / f"{n}.log" for n in ("writer", "states", "dagster")],
    )
    print(f"A first {BEGUN_EPOCHS} epochs of the flights job, into {live.folder} …", flush=True)
    states = live_command(
        live.url, live.folder, rows_per_epoch=ROWS_PER_EPOCH, seconds=SECONDS_BETWEEN_EPOCHS
    )
    # Dagster's assets are those of the pipelines that exist when it starts.
    for command in (live.writer("--epochs", str(BEGUN_EPOCHS)), [*states, "--epochs", "1"]):
        subprocess.run(command, cwd=PROJECT, env=environment, check=True, stdout=subprocess.DEVNULL)
    port = _free_port(options.port)
    url = f"http://127.0.0.1:{port}"
    paced = live.writer("--interval", str(SECONDS_BETWEEN_EPOCHS), "--follow")
    dagster = [sys.executable, "-m", "dagster", "dev", "-f", "examples/flights/live.py"]
    dagster += ["-h", "127.0.0.1", "-p", str(port)]
    with (
        running(paced, environment, logs[0]) as writer,
        running(states, environment, logs[1]),
        running(dagster, environment, logs[2]) as ui,
    ):
        print("Dagster starts (some 15 seconds) …", flush=True)
        await_url(url, ui, logs[2])
        print(
            f"Open {url}/asset-groups\n"
            f"An epoch every {SECONDS_BETWEEN_EPOCHS} seconds (log: {logs[0]}); the sensor looks "
            "every 10 seconds; files are compacted every minute, on Spark.\n"
            f"States of {FLIGHTS.relative_to(PROJECT)} change as often (log: {logs[1]}).\n"
            "Ctrl-C ends it.",
            flush=True,
        )
        _watch(writer, ui, options.seconds or float("inf"), live.folder)
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
