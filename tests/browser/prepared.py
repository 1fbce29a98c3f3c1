"""A prepared instance of Dagster in this process: jobs of every kind, what the sensor and the runs
found in them, and the webserver over it.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import uvicorn
from dagster._core.remote_origin import InProcessCodeLocationOrigin
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import InProcessWorkspaceLoadTarget
from dagster._daemon.sensor import execute_sensor_iteration
from dagster_webserver.app import create_app_from_workspace_process_context

from arroyo_dagster.engine import run_pipeline
from arroyo_dagster.state import JobPaths, ParquetBackend, open_store
from arroyo_dagster.state.codec.bincode.codec import encode
from tests.dataflows import Clock, Flow
from tests.fleets import SECOND, Written, legacy_job, protocol_job
from tests.loopback import Reply, serving

PROJECT = Path(__file__).parents[2]
LOCATION = "streaming"
EPOCHS, LATER_EPOCHS, KEPT_EPOCHS = 40, 8, 12
LIVE = "flights/live"
BROKEN = protocol_job("payments", "job_payments")
VANISHED = protocol_job("returns", "job_returns")
STOPPED = legacy_job("job_promotions")
HEALTHY = [protocol_job(name, f"job_{name}") for name in ("clicks", "orders", "sessions", "views")]
WORDS = PROJECT / "examples" / "sdf" / "words" / "dataflow.yaml"

DEFINITIONS = """
from arroyo_dagster import *

defs = build_arroyo_definitions(
    ArroyoStateStore(checkpoint_url={url!r}, arroyo_api_url={arroyo!r}),
    mode="maintain",
    running=True,
    options=ArroyoOptions(
        runner=InProcessRunner(),
        sensor=SensorOptions(interval_seconds=1),
        maintenance=MaintenanceOptions(gc=GcConfig(keep_epochs=12, dry_run=False)),
        dataflows=[{dataflow!r}],
    ),
)
"""
_INSTANCE = {
    "telemetry": {"enabled": False},
    "nux": {"enabled": False},
    # The default one waits for processes that copy what this one prints.
    "compute_logs": {
        "module": "dagster._core.storage.noop_compute_log_manager",
        "class": "NoOpComputeLogManager",
    },
    "run_coordinator": {
        "module": "dagster._core.run_coordinator",
        "class": "DefaultRunCoordinator",
    },
    "run_launcher": {
        "module": "dagster._core.launcher.sync_in_memory_run_launcher",
        "class": "SyncInMemoryRunLauncher",
    },
}
_LAUNCH = """mutation ($params: ExecutionParams!) { launchRun(executionParams: $params) {
  __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message }
  ... on RunConfigValidationInvalid { errors { message } } } }"""


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Runs whose pages are shown.

    Attributes:
        failed: a pipeline lacks an object, and one vanished.
    """

    failed: str


class Prepared:
    """The jobs, and Dagster over them.

    Attributes:
        url: of Dagster's webserver.
    """

    def __init__(
        self, url: str, process: WorkspaceProcessContext, jobs: _Jobs | None = None
    ) -> None:
        self.url = url
        self.jobs = jobs
        self._process = process

    def go_through(self) -> Runs:
        """Let the jobs and Dagster go through all that its pages show. Returns the failed run."""
        self.tick()
        self._look()
        self.launch("arroyo_compaction", table="compacted_state")
        for _ in range(LATER_EPOCHS):
            self.jobs.go_on()
            self.tick()
        expiry = {"keep_epochs": KEPT_EPOCHS, "dry_run": False}
        self.launch("arroyo_gc", table="retained_epochs", arroyo_retained_epochs=expiry)
        self.launch("sdf_examples_words")
        self.jobs.harm()
        self.tick()
        return Runs(failed=self._look())

    def _look(self) -> str:
        run = self.launch("arroyo_verify")
        self.launch("arroyo_fleet")
        return run

    def tick(self) -> None:
        """Evaluate the sensors, as the daemon does."""
        time.sleep(1.1)  # their interval
        logger = logging.getLogger("ticks")
        assert not any(execute_sensor_iteration(self._process, logger, None, None))

    def launch(self, job: str, *, table: str | None = None, **config: Any) -> str:
        """Launch a run, as the launchpad does, and wait for its end. Returns its id.

        Args:
            table: the asset of the managed job; None = all assets of the Dagster job.
            config: of the Dagster job's only op, by its name.
        """
        selector: dict[str, Any] = {
            "repositoryLocationName": LOCATION,
            "repositoryName": "__repository__",
            "jobName": job,
        }
        if table is not None:
            selector["assetSelection"] = [{"path": ["arroyo", *LIVE.split("/"), table]}]
        params = {
            "selector": selector,
            "runConfigData": {"ops": {op: {"config": given} for op, given in config.items()}},
        }
        request = urllib.request.Request(
            f"{self.url}/graphql",
            json.dumps({"query": _LAUNCH, "variables": {"params": params}}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            found = json.load(answer)["data"]["launchRun"]
        assert found["__typename"] == "LaunchRunSuccess", found
        return str(found["run"]["runId"])


class _Jobs:
    """Jobs of every kind: managed ones, those of Arroyo, healthy and sick ones."""

    def __init__(self, folder: Path) -> None:
        self.store = open_store(str(folder / "checkpoints"))
        self._folder = folder
        begun = time.time_ns() // 1000
        self._written = {
            paths: Written(
                self.store,
                paths,
                keep=4 + at,
                now=_every_half_minute(begun),
                ends=_ends(paths),
                row=(encode("key", str), encode("value", str)),
            )
            for at, paths in enumerate((*HEALTHY, BROKEN, VANISHED, STOPPED))
        }
        for job in self._written.values():
            job.epochs(EPOCHS)
        self._flights(EPOCHS)
        flow = Flow(WORDS.read_text(), store=self.store, clock=Clock(ms=begun // 1000))
        for sentence in (WORDS.parent / "sentences.txt").read_text().splitlines():
            words = sentence.lower().split()
            flow.send("words", [{"text": one, "sentence-length": len(words)} for one in words])

    def go_on(self) -> None:
        """Write another epoch of the managed job."""
        self._flights(1)

    def _flights(self, epochs: int) -> None:
        sys.path.insert(0, str(PROJECT / "examples" / "flights"))
        try:
            from pipeline import flights_pipeline
        finally:
            sys.path.pop(0)
        output = str(self._folder / "output")
        job = flights_pipeline(output, rows_per_epoch=512, job="live")
        run_pipeline(job, self.store, max_epochs=epochs)

    def harm(self) -> None:
        """Lose an object of one job, and all of another."""
        self.store.delete_many([ParquetBackend(self.store, BROKEN).load().paths[0]])
        self._written[VANISHED].vanish()

    def answer(self, path: str, query: dict[str, str]) -> Reply:
        """Answer as Arroyo's REST API."""
        jobs = [*HEALTHY, BROKEN, VANISHED, STOPPED]
        short = path.removeprefix("/api/v1")
        if short == "/jobs":
            return Reply(body={"data": [job(paths.job, paths.pipeline) for paths in jobs]})
        if short == "/pipelines":
            found = [
                pipeline(name, TOPICS.get(name))
                for name in (str(paths.pipeline or "promotions") for paths in jobs)
            ]
            return Reply(body={"data": found, "hasMore": False})
        return Reply(404, {"error": "Route not found"})


TOPICS = {
    "clicks": ("clicks", "sessions_by_user"),
    "orders": ("orders", "orders_hourly"),
    "payments": ("orders", "paid"),
    "returns": ("orders", "returned"),
    "sessions": ("sessions_by_user", "session_report"),
    "views": ("views", "views_daily"),
}
"""The topics that pipelines read and write."""


def _ends(paths: JobPaths) -> list[str]:
    source, sink = TOPICS.get(str(paths.pipeline), (None, None))
    return [f"source_{source}_0", f"sink_{sink}_9"] if source else []


def _every_half_minute(until_micros: int) -> Callable[[], int]:
    numbers = iter(range(EPOCHS - 1, -1_000, -1))
    return lambda: until_micros - 30 * SECOND * next(numbers)


def job(identity: str, name: str | None) -> dict[str, Any]:
    """A job as the API shows it; stopped without the name of its pipeline."""
    stopped = name is None
    return {
        "id": identity,
        "pipeline_id": name or "promotions",
        "running_desired": not stopped,
        "state": "Stopped" if stopped else "Running",
        "run_id": 1,
        "start_time": 1,
        "finish_time": None,
        "tasks": 4,
        "failure_reason": None,
        "created_at": 1,
    }


def _query(source: str, sink: str) -> str:
    kafka = "WITH (connector = 'kafka', bootstrap_servers = 'kafka:9092', format = 'json'"
    return (
        f"CREATE TABLE {source} (key TEXT, at TIMESTAMP) {kafka}, topic = '{source}', "
        f"type = 'source');\n"
        f"CREATE TABLE {sink} (key TEXT, events BIGINT) {kafka}, topic = '{sink}', "
        f"type = 'sink');\n"
        f"INSERT INTO {sink} SELECT key, count(*) FROM {source} GROUP BY key;"
    )


def pipeline(name: str, topics: tuple[str, str] | None) -> dict[str, Any]:
    """A pipeline as the API shows it.

    Args:
        topics: what it reads and what it writes.
    """
    return {
        "id": name,
        "name": name,
        "query": _query(*topics) if topics else "SELECT 1;",
        "checkpoint_interval_micros": 30 * SECOND,
        "stop": "none",
        "created_at": 1,
        "action": "checkpoint",
        "action_text": "Stop",
        "action_in_progress": False,
        "preview": False,
        "state_url": None,
    }


@contextmanager
def prepared(folder: Path) -> Iterator[Prepared]:
    """Serve a prepared instance whose jobs lie below `folder`."""
    jobs = _Jobs(folder)
    with serving(jobs.answer) as arroyo:
        url = str(folder / "checkpoints")
        text = DEFINITIONS.format(url=url, arroyo=arroyo.url, dataflow=str(WORDS))
        with location(folder, text) as (address, process):
            yield Prepared(address, process, jobs)


@contextmanager
def location(folder: Path, definitions: str) -> Iterator[tuple[str, WorkspaceProcessContext]]:
    """Serve an instance with a code location in this process. Yields the address of its pages.

    Args:
        definitions: the text of its module, which binds `defs`.
    """
    file = folder / f"{LOCATION}.py"
    file.write_text(definitions)
    target = LoadableTargetOrigin(
        executable_path=sys.executable, python_file=str(file), attribute="defs"
    )
    origin = InProcessCodeLocationOrigin(loadable_target_origin=target, location_name=LOCATION)
    load = InProcessWorkspaceLoadTarget([origin])
    with (
        dg.instance_for_test(overrides=_INSTANCE) as instance,
        WorkspaceProcessContext(instance, load) as process,
        _served(process) as address,
    ):
        yield address, process


@contextmanager
def _served(process: WorkspaceProcessContext) -> Iterator[str]:
    """Serve Dagster's pages. Yields the address."""
    app = create_app_from_workspace_process_context(process)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.05)
        (port,) = {one.getsockname()[1] for one in server.servers[0].sockets}
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
