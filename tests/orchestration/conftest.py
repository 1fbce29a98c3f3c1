"""What the tests of Dagster's definitions share: memory stores by URL, an instance, a tick."""

from __future__ import annotations

import datetime as dt
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from arroyo_dagster.orchestration import (
    ArroyoOptions,
    ArroyoStateStore,
    InProcessRunner,
    build_arroyo_definitions,
    failures,
    serving,
)
from arroyo_dagster.orchestration.check_results import LastResult, last_results
from arroyo_dagster.state import MemoryStore, ObjectStore, open_store
from tests.jobs import run_word_job
from tests.orchestration.quick_storage import kept_engines
from tests.orchestration.results import JOB

_NUMBERS = itertools.count()
_WRAPPED: dict[str, ObjectStore] = {}


class WrappedStore(ArroyoStateStore):
    """The resource, over a store object that a test has wrapped."""

    def writable(self) -> ObjectStore:
        return _WRAPPED.get(self.checkpoint_url) or super().writable()


class Deployment:
    """A memory store, its definitions, and an instance of Dagster."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self.store = MemoryStore(f"deployment-{next(_NUMBERS)}")
        self.resource = WrappedStore(checkpoint_url=self.store.url)
        self.instance = instance
        self.cursor: str | None = None
        self._given: dict[str, Any] = {"mode": "maintain"}
        self._options: dict[str, Any] = {"runner": InProcessRunner()}
        self.build()

    def build(self, **given: Any) -> None:
        """Build the definitions anew: arguments of `build_arroyo_definitions`, or its options; the
        URL of Arroyo's API as `api_url`.

        What was given before stays.
        """
        if "api_url" in given:
            url = given.pop("api_url")
            self.resource = WrappedStore(checkpoint_url=self.store.url, arroyo_api_url=url)
        fields = ArroyoOptions.__dataclass_fields__
        self._options |= {name: value for name, value in given.items() if name in fields}
        self._given |= {name: value for name, value in given.items() if name not in fields}
        options = ArroyoOptions(**self._options)
        self.defs = build_arroyo_definitions(self.resource, options=options, **self._given)
        self.repository = self.defs.get_repository_def()

    def wrap(self, wrapper: Callable[[ObjectStore], Any]) -> Any:
        """Let everything look through a wrapper around the store."""
        _WRAPPED[self.store.url] = wrapper(self.store)
        return _WRAPPED[self.store.url]

    def evaluate(self, name: str = "arroyo_checkpoint_sensor") -> Any:
        """Evaluate a sensor; nothing of it is kept, as if the daemon died before."""
        with dg.build_sensor_context(
            instance=self.instance,
            definitions=self.defs,
            cursor=self.cursor,
            resources=self.defs.resources,
        ) as context:
            return self.defs.resolve_sensor_def(name).evaluate_tick(context)

    def keep(self, result: Any, events: int | None = None) -> None:
        """Store a tick as the daemon does: events, then the cursor; or only some events."""
        for event in result.asset_events[:events]:
            self.instance.report_runless_asset_event(event)
        if events is None:
            self.cursor = result.cursor or self.cursor

    def tick(self) -> dict[str, str]:
        """One whole tick over the pipelines that there are now: the data versions told, by key."""
        self.build()
        result = self.evaluate()
        self.keep(result)
        return told(result)

    def run(self, job: str, *tables: str, **options: Any) -> Any:
        """Run a job of the definitions in this process, or only assets of it, by their keys."""
        options.setdefault("raise_on_error", False)
        keys = [dg.AssetKey(["arroyo", *table.split("/")]) for table in tables] or None
        found = self.defs.resolve_job_def(job)
        return found.execute_in_process(instance=self.instance, asset_selection=keys, **options)

    def due(self, schedule: str) -> Any:
        """Evaluate a schedule of the definitions."""
        with dg.build_schedule_context(
            instance=self.instance,
            scheduled_execution_time=dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC),
            repository_def=self.repository,
            resources=self.defs.resources,
        ) as context:
            return self.defs.resolve_schedule_def(schedule).evaluate_tick(context)

    def launch_due(self, schedule: str) -> Any:
        """Evaluate a schedule, and run the run that it requests; None = it requests none."""
        name = schedule.removesuffix("_schedule")
        requests = self.due(schedule).run_requests
        if not requests:
            return None
        (request,) = requests
        found = self.defs.resolve_job_def(name)
        return found.execute_in_process(
            instance=self.instance,
            run_config=request.run_config,
            asset_selection=request.asset_selection,
            raise_on_error=False,
        )

    def check(self, pipeline: str, name: str = "restorable") -> LastResult:
        """The last result of a check of a pipeline, or of the fleet, as Dagster shows it."""
        table = "fleet" if name == "every_pipeline_known" else f"{pipeline}/checkpoint"
        key = dg.AssetCheckKey(dg.AssetKey(["arroyo", *table.split("/")]), name)
        return last_results(self.instance, [key])[key]


def told(result: Any) -> dict[str, str]:
    """The data version of each event of a tick, by the key of its pipeline."""
    versions = {}
    for event in result.asset_events:
        key = "/".join(event.asset_key.path[1:-1])
        assert key not in versions, "a pipeline has one event a tick"
        versions[key] = event.tags["dagster/data_version"]
    return versions


@pytest.fixture(scope="session", autouse=True)
def _quick_storage() -> Iterator[None]:
    with kept_engines():
        yield


@pytest.fixture(scope="session")
def _shared_instance() -> Iterator[dg.DagsterInstance]:
    with dg.instance_for_test() as found:
        yield found


@pytest.fixture
def instance(_shared_instance: dg.DagsterInstance) -> Iterator[dg.DagsterInstance]:
    """An instance on disk, as good as new: making one takes a second."""
    yield _shared_instance
    _shared_instance.wipe()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty DAGSTER_HOME."""
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def retries_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve pipelines, and run steps, again without the wait that outlasts a lease."""
    monkeypatch.setattr(serving, "_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(failures, "RETRY_SECONDS", 0.0)


@pytest.fixture
def deployed(instance: dg.DagsterInstance) -> Deployment:
    return Deployment(instance)


@pytest.fixture
def at_rest(deployed: Deployment) -> Deployment:
    """A deployment with a job at rest: eight epochs of small files."""
    run_word_job(deployed.store, **JOB, max_epochs=8)
    deployed.build()
    return deployed


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job at rest, with eight epochs of small files."""
    root = tmp_path_factory.mktemp("written")
    run_word_job(open_store(str(root)), **JOB, max_epochs=8)
    return root


@pytest.fixture
def root(written: Path, tmp_path: Path) -> Path:
    """A copy of it on local disk."""
    return Path(shutil.copytree(written, tmp_path / "checkpoints"))
