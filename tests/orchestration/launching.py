"""Runs as Dagster's webserver starts and terminates them: a code server in a process of its own,
the default run launcher, and GraphQL. A run can be held at a chosen call of its store.

`in_process` is the same in the process of the test, for what pages show.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import graphql
from dagster._core.remote_origin import InProcessCodeLocationOrigin
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import InProcessWorkspaceLoadTarget, PythonFileTarget
from dagster._daemon.monitoring.run_monitoring import execute_run_monitoring_iteration
from dagster._daemon.sensor import execute_sensor_iteration
from dagster_graphql.schema import create_schema

from arroyo_dagster.orchestration import ArroyoStateStore
from arroyo_dagster.state import ObjectStore
from tests.orchestration import terminating
from tests.orchestration.terminating import PATIENCE_SECONDS, Blocking, Phase, Setting

PROJECT = Path(__file__).parents[2]
LOCATION = "launched"
ROOTS = ["words/a", "words/b", "words/c"]
DEFINITIONS = """
from tests.orchestration.launching import definitions
defs = definitions({url!r})
"""
LAUNCH = """mutation ($params: ExecutionParams!) { launchRun(executionParams: $params) {
  __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message }
  ... on RunConfigValidationInvalid { errors { message } } } }"""
TERMINATE = """mutation ($run: String!) { terminateRun(runId: $run) {
  __typename ... on TerminateRunFailure { message } ... on PythonError { message } } }"""


@dataclass(frozen=True)
class FileEvent:
    """An event between processes that share nothing but a disk."""

    path: Path

    def set(self) -> None:
        """Let it happen."""
        self.path.touch()

    def wait(self, seconds: float) -> bool:
        """Wait for it; whether it happened."""
        until = time.monotonic() + seconds
        while not self.path.exists() and time.monotonic() < until:
            time.sleep(0.02)
        return self.path.exists()


class PhasedStore(ArroyoStateStore):
    """The resource of the code server: its store blocks where a file beside the root says so."""

    def writable(self) -> ObjectStore:
        """The store, which blocks at a phase."""
        folder = Path(self.checkpoint_url).parent
        if not (folder / "phase.json").exists():
            return super().writable()
        if "blocking" not in self._stores:
            phase = Phase(**json.loads((folder / "phase.json").read_text()))
            store = Blocking(super().writable())
            store.setting = Setting("", phase, *_events(folder))
            store.left = phase.number
            self._stores["blocking"] = store
        found: ObjectStore = self._stores["blocking"]
        return found


def _events(folder: Path) -> tuple[FileEvent, FileEvent]:
    return FileEvent(folder / "there"), FileEvent(folder / "release")


def definitions(url: str) -> dg.Definitions:
    """The definitions of the code server."""
    return terminating.definitions(PhasedStore(checkpoint_url=url), *ROOTS)


class Webserver:
    """What the webserver and the daemon do with runs.

    Args:
        folder: the root of the jobs is `checkpoints` in it.
    """

    def __init__(
        self, instance: dg.DagsterInstance, process: WorkspaceProcessContext, folder: Path
    ) -> None:
        self.instance = instance
        self._process = process
        self._schema = create_schema().graphql_schema
        self.folder = folder

    def ask(self, text: str, **variables: Any) -> Any:
        """The answer to a mutation, which has one field."""
        document = graphql.parse(text)
        context = self._process.create_request_context()

        async def answer() -> Any:
            found: Any = graphql.execute(
                self._schema, document, context_value=context, variable_values=variables
            )
            return await found if hasattr(found, "__await__") else found

        found = asyncio.run(answer())
        assert not found.errors, found.errors
        return next(iter(found.data.values()))

    def launch(
        self,
        job: str,
        config: Any,
        *,
        checks: Sequence[tuple[Sequence[str], str]] = (),
        **tags: str,
    ) -> str:
        """Launch a run; its id.

        Args:
            checks: only these, by the paths of their assets.
        """
        selector: dict[str, Any] = {
            "repositoryLocationName": LOCATION,
            "repositoryName": "__repository__",
            "jobName": job,
        }
        if checks:
            selector["assetSelection"] = []
            selector["assetCheckSelection"] = [
                {"assetKey": {"path": [*path]}, "name": name} for path, name in checks
            ]
        params = {
            "selector": selector,
            "runConfigData": config,
            "executionMetadata": {
                "tags": [{"key": f"dagster/{name}", "value": one} for name, one in tags.items()]
            },
        }
        found = self.ask(LAUNCH, params=params)
        assert found["__typename"] == "LaunchRunSuccess", found
        return str(found["run"]["runId"])

    @contextmanager
    def held(self, job: str, config: Any, phase: Phase, **tags: str) -> Iterator[str]:
        """Launch a run that is held at a phase, and goes on when the block is left."""
        there, release = _events(self.folder)
        for event in (there, release):
            event.path.unlink(missing_ok=True)
        (self.folder / "phase.json").write_text(json.dumps(dataclasses.asdict(phase)))
        run = self.launch(job, config, **tags)
        try:
            assert there.wait(PATIENCE_SECONDS), f"{phase} never came"
            yield run
        finally:
            (self.folder / "phase.json").unlink()
            release.set()

    def here(self, job: str, config: Any) -> dg.ExecuteInProcessResult:
        """Run a job in this process."""
        found = definitions(str(self.folder / "checkpoints")).resolve_job_def(job)
        return found.execute_in_process(run_config=config, instance=self.instance)

    def terminate(self, run: str) -> None:
        """Terminate a run, as its page does."""
        found = self.ask(TERMINATE, run=run)
        assert found["__typename"] == "TerminateRunSuccess", found

    def monitor(self) -> None:
        """Look at all runs once, as the daemon does."""
        logger = logging.getLogger("monitoring")
        assert not any(execute_run_monitoring_iteration(self._process, logger))

    def ended(self, run: str) -> dg.DagsterRun:
        """The run, once it has ended, and its process with it."""
        until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < until:
            found = self.instance.get_run_by_id(run)
            assert found is not None
            if found.is_finished and not self._alive(found):
                return found
            time.sleep(0.1)
        raise AssertionError(f"{found.status} after {PATIENCE_SECONDS} seconds")

    def _alive(self, run: dg.DagsterRun) -> bool:
        """Whether its process is there: a run that the daemon fails has ended before it."""
        for entry in self.instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ENGINE_EVENT):
            assert entry.dagster_event is not None
            process = entry.dagster_event.engine_event_data.metadata.get("pid")
            if process is not None and Path(f"/proc/{process.value}").exists():
                return True
        return False


@contextmanager
def webserver(folder: Path, settings: Mapping[str, Any]) -> Iterator[Webserver]:
    """An instance with a code server over the jobs in `folder`.

    Args:
        settings: of the instance, as in dagster.yaml.
    """
    file = folder / "launched.py"
    file.write_text(DEFINITIONS.format(url=str(folder / "checkpoints")))
    target = PythonFileTarget(str(file), "defs", str(PROJECT), LOCATION)
    queue = {"module": "dagster._core.run_coordinator", "class": "DefaultRunCoordinator"}
    with (
        dg.instance_for_test(overrides={"run_coordinator": queue, **settings}) as instance,
        WorkspaceProcessContext(instance, target) as process,
    ):
        yield Webserver(instance, process, folder)


# ---- in the process of the test ------------------------------------------------------------------

_IN_PROCESS = {
    "run_coordinator": {
        "module": "dagster._core.run_coordinator",
        "class": "DefaultRunCoordinator",
    },
    "run_launcher": {
        "module": "dagster._core.launcher.sync_in_memory_run_launcher",
        "class": "SyncInMemoryRunLauncher",
    },
}
_CHECKS = """query ($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) {
  ... on AssetNode { assetMaterializations(limit: 1) { timestamp }
    assetChecksOrError { ... on AssetChecks { checks { name
      executionForLatestMaterialization { status runId evaluation { severity description } } } } }
} } }"""


class InProcess(Webserver):
    """The webserver, and the daemon's part. Its runs have ended when `launch` returns."""

    def tick(self) -> None:
        """Evaluate the sensors, as the daemon does."""
        time.sleep(1.1)  # their interval
        logger = logging.getLogger("ticks")
        assert not any(execute_sensor_iteration(self._process, logger, None, None))

    def checks(self, path: Sequence[str]) -> tuple[str, dict[str, tuple[str, str] | None]]:
        """The time of the newest event of an asset; the status and severity of its checks, as its
        page shows them: None if they are not evaluated.
        """
        node = self.ask(_CHECKS, key={"path": [*path]})
        shown: dict[str, tuple[str, str] | None] = {}
        for check in node["assetChecksOrError"]["checks"]:
            execution = check["executionForLatestMaterialization"]
            evaluation = execution and execution["evaluation"]
            severity = evaluation and evaluation["severity"]
            shown[check["name"]] = execution and (execution["status"], severity)
        return node["assetMaterializations"][0]["timestamp"], shown


@contextmanager
def in_process(folder: Path, definitions: str) -> Iterator[InProcess]:
    """An instance with a code location in this process.

    Args:
        definitions: the text of its module, which binds `defs`.
    """
    file = folder / "location.py"
    file.write_text(definitions)
    target = LoadableTargetOrigin(
        executable_path=sys.executable, python_file=str(file), attribute="defs"
    )
    origin = InProcessCodeLocationOrigin(loadable_target_origin=target, location_name=LOCATION)
    with (
        dg.instance_for_test(overrides=_IN_PROCESS) as instance,
        WorkspaceProcessContext(instance, InProcessWorkspaceLoadTarget([origin])) as process,
    ):
        yield InProcess(instance, process, folder)
