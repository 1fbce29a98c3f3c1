"""Take the pictures of a fleet of 43 jobs in Dagster's UI: 40 are healthy, one lacks an object, one
vanished, one was stopped.

    make pictures
    python docs/pictures/fleet.py --keep

Starts Dagster over jobs that are written for the pictures, with sensor and schedules on, waits for
what they find, and lets a headless Chromium look. `--keep` leaves the UI open until Ctrl-C, and
takes no picture. Needs the command `chromium` (Debian: apt-get install chromium).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PICTURES = Path(__file__).resolve().parent
PROJECT = PICTURES.parents[1]
sys.path[:0] = [str(PROJECT), str(PROJECT / "examples" / "flights")]

from browser import asked, picture  # noqa: E402
from home import dagster_home  # noqa: E402
from ui import await_url, running  # noqa: E402

from arroyo_dagster.state.metadata.backend import ParquetBackend  # noqa: E402
from arroyo_dagster.state.model.layout import JobPaths  # noqa: E402
from arroyo_dagster.state.storage.remote.open import open_store  # noqa: E402
from tests.fleets import Written, legacy_job, protocol_job  # noqa: E402

PORT = 3201
URL = f"http://127.0.0.1:{PORT}"
PATIENCE_SECONDS = 420
FRESH_SECONDS = 8
SECONDS_BETWEEN_EPOCHS = 30
HEALTHY = 40
BROKEN = protocol_job("payments", "job_payments")
VANISHED = protocol_job("returns", "job_returns")
STOPPED = legacy_job("job_promotions")
CHECKS = ("every_job_files_exist", "every_job_restorable", "every_job_recent")

DEFINITIONS = """
import dagster as dg
from arroyo_dagster import ArroyoStateComponent

defs = dg.build_defs_for_component(ArroyoStateComponent.resolve_from_yaml('''
checkpoint_url: {url}
arroyo_database: {database}
sensor_running: true
schedules:
  running: true
  refresh: "* * * * *"
  fleet: "* * * * *"
  gc: "* * * * *"
maintenance: {{engine: in-process, keep_epochs: 3, delete: true}}
'''))
"""
PAGES = {
    "fleet-checks.png": ("/assets/arroyo/fleet?view=checks&checkDetail={check}", "1300,800"),
    "fleet-overview.png": ("/assets/arroyo/fleet?view=overview", "1300,1000"),
    "fleet-runs.png": ("/runs", "1300,700"),
}
EVALUATIONS = """{ assetNodes(assetKeys: [{path: ["arroyo", "fleet"]}]) {
  assetChecksOrError { ... on AssetChecks { checks { name executionForLatestMaterialization {
    evaluation { timestamp description } } } } } } }"""


def healthy_jobs() -> list[JobPaths]:
    """Forty jobs, every fourth of Arroyo's older layout."""
    names = [f"{kind}_{at:02}" for kind in ("clicks", "orders") for at in range(HEALTHY // 2)]
    return [
        legacy_job(f"job_{name}") if at % 4 == 3 else protocol_job(name, f"job_{name}")
        for at, name in enumerate(names)
    ]


class Jobs:
    """The jobs of the pictures: they write an epoch each half minute, but for the stopped one."""

    def __init__(self, root: Path) -> None:
        self.store = open_store(str(root))
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._write_on, daemon=True)
        options: dict[str, Any] = {"now": _now_micros}
        self.moving = [Written(self.store, paths, **options) for paths in healthy_jobs()]
        # The lost object stays listed: all of them are.
        self.broken = Written(self.store, BROKEN, keep=10_000, **options)
        self.vanished = Written(self.store, VANISHED, **options)
        self.stopped = Written(self.store, STOPPED, start=_now_micros() - 86_400_000_000)
        for job in (*self.moving, self.broken, self.vanished, self.stopped):
            job.epochs(6)
        self._thread.start()

    def harm(self) -> None:
        """Lose an object of one job, and all of another."""
        path = ParquetBackend(self.store, BROKEN).load().paths[0]
        self.store.delete_many([path])
        self.vanished.vanish()

    def close(self) -> None:
        """Write no more."""
        self._stopping.set()
        self._thread.join()

    def _write_on(self) -> None:
        while not self._stopping.wait(SECONDS_BETWEEN_EPOCHS):
            for job in (*self.moving, self.broken):
                job.write()


def _now_micros() -> int:
    return time.time_ns() // 1000


def arroyo_database(path: Path) -> None:
    """Arroyo's database, as far as its controller says what jobs are doing."""
    jobs = [(str(paths.job), paths.pipeline, "Running") for paths in (*healthy_jobs(), BROKEN)]
    jobs += [(str(VANISHED.job), VANISHED.pipeline, "Running"), (str(STOPPED.job), None, "Stopped")]
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE pipelines (id INTEGER, pub_id TEXT, name TEXT)")
        database.execute("CREATE TABLE job_configs (id TEXT, pipeline_id INTEGER)")
        database.execute("CREATE TABLE job_statuses (id TEXT, state TEXT)")
        for at, (job, pipeline, state) in enumerate(jobs):
            if pipeline is not None:
                database.execute("INSERT INTO pipelines VALUES (?, ?, ?)", (at, pipeline, pipeline))
            number = None if pipeline is None else at
            database.execute("INSERT INTO job_configs VALUES (?, ?)", (job, number))
            database.execute("INSERT INTO job_statuses VALUES (?, ?)", (job, state))
        database.commit()


@contextmanager
def dagster(folder: Path) -> Iterator[Jobs]:
    """Dagster with all its processes, over the jobs, both below `folder`."""
    jobs = Jobs(folder / "checkpoints")
    database = folder / "state.sqlite"
    arroyo_database(database)
    definitions = folder / "fleet.py"
    definitions.write_text(DEFINITIONS.format(url=folder / "checkpoints", database=database))
    home = dagster_home(folder / "dagster")
    command = [sys.executable, "-m", "dagster", "dev", "-f", str(definitions)]
    command += ["-h", "127.0.0.1", "-p", str(PORT)]
    environment = {**os.environ, "DAGSTER_HOME": str(home), "PYTHONPATH": str(PROJECT)}
    log = folder / "dagster.log"
    try:
        with running(command, environment, log) as process:
            await_url(URL, process, log)
            yield jobs
    finally:
        jobs.close()


def checks() -> dict[str, dict[str, Any]]:
    """The evaluations of the checks over all jobs, by name, as they are shown; none while a run
    evaluates them, nor if the last such run is so long ago that the next one may begin."""
    nodes = asked(URL, EVALUATIONS)["assetNodes"]
    found = nodes[0]["assetChecksOrError"]["checks"]
    done = {one["name"]: one["executionForLatestMaterialization"] for one in found}
    shown = {name: one["evaluation"] for name, one in done.items() if one and one["evaluation"]}
    recent = shown.get("every_job_recent", {"timestamp": 0})["timestamp"]
    return shown if shown.keys() >= set(CHECKS) and time.time() - recent < FRESH_SECONDS else {}


def await_checks(what: str, wanted: Mapping[str, str]) -> None:
    """Wait until the checks say what is wanted.

    Args:
        wanted: how the description of each begins.
    """
    until = time.monotonic() + PATIENCE_SECONDS
    told: dict[str, dict[str, Any]] = {}
    while not told or any(not told[name]["description"].startswith(wanted[name]) for name in told):
        if time.monotonic() > until:
            raise SystemExit(f"{what}: not seen; the checks say {told}")
        time.sleep(2)
        told = checks()
    print(f"{what}:", flush=True)
    for name, one in told.items():
        print(f"  {name}: {one['description']}", flush=True)


def forget(folder: Path) -> None:
    """Acknowledge that a job is gone, as the failed checks say."""
    (catalogue,) = (folder / "dagster" / "arroyo_catalogue" / "default").iterdir()
    command = str(Path(sys.executable).with_name("arroyo-state"))
    arguments = ["forget", str(VANISHED.root), "--catalogue", str(catalogue)]
    subprocess.run([command, *arguments], check=True, cwd=PROJECT)


def main() -> int:
    """Take every picture. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Take the pictures of a fleet in Dagster's UI.")
    parser.add_argument("--folder", type=Path, help="keep the jobs and the instance there")
    parser.add_argument("--keep", action="store_true", help="leave the UI open; no picture")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    with tempfile.TemporaryDirectory(prefix="arroyo-fleet-") as directory:
        folder = (options.folder or Path(directory)).resolve()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with dagster(folder) as jobs:
            print(f"{URL}, below {folder}", flush=True)
            await_checks("nothing is wrong", dict.fromkeys(CHECKS, "43 jobs, all passed"))
            jobs.harm()
            files, restorable, recent = CHECKS
            bad = dict.fromkeys((files, restorable), "2 of 43 jobs: payments/job_payments: ")
            gone = {recent: "1 of 43 jobs: returns/job_returns: "}
            await_checks("an object is lost, and a job", {**bad, **gone})
            for name, (page, size) in {} if options.keep else PAGES.items():
                where = page.format(check=restorable, location="/locations/fleet.py")
                picture(f"{URL}{where}", PICTURES / name, size)
            forget(folder)
            bad = dict.fromkeys((files, restorable), "1 of 42 jobs: payments/job_payments: ")
            await_checks("the job is forgotten", {**bad, recent: "42 jobs, all passed"})
            while options.keep:
                time.sleep(1)
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
