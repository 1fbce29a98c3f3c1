"""What the tests of Dagster's definitions share: memory stores by URL, an instance, a tick."""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import dagster as dg
import pytest

from arroyo_dagster.orchestration import failures
from arroyo_dagster.orchestration.catalog.sensor import SensorOptions
from arroyo_dagster.orchestration.definitions import build_arroyo_definitions
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.runners import InProcessRunner
from arroyo_dagster.state.storage import MemoryStore
from arroyo_dagster.state.storage.store import ObjectStore
from tests.jobs import run_word_job
from tests.orchestration.quick_storage import kept_engines
from tests.orchestration.results import JOB, KEY

_NUMBERS = itertools.count()
_WRAPPED: dict[str, ObjectStore] = {}


class WrappedStore(ArroyoStateStore):
    """The resource, over a store object that a test has wrapped."""

    def writable(self) -> ObjectStore:
        return _WRAPPED.get(self.checkpoint_url) or super().writable()


class Deployment:
    """A memory store, its definitions, and an instance of Dagster."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        name = f"deployment-{next(_NUMBERS)}"
        self.store = MemoryStore(name)
        self.catalogue = MemoryStore(f"{name}-catalogue")
        self.resource = WrappedStore(
            checkpoint_url=self.store.url, catalogue_url=self.catalogue.url
        )
        self.instance = instance
        self.cursor: str | None = None
        self.build()

    def build(self, **options: Any) -> None:
        """Build the definitions."""
        self.defs = build_arroyo_definitions(self.resource, **options)

    def wrap(self, wrapper: Callable[[ObjectStore], Any]) -> Any:
        """Let everything look through a wrapper around the store."""
        _WRAPPED[self.store.url] = wrapper(self.store)
        return _WRAPPED[self.store.url]

    def evaluate(self, options: SensorOptions | None = None) -> dg.SensorResult:
        """Evaluate the sensor; nothing of it is kept, as if the daemon died before."""
        if options is not None:
            self.build(sensor=options)
        sensor = self.defs.resolve_sensor_def("arroyo_checkpoint_sensor")
        with dg.build_sensor_context(
            instance_ref=self.instance.get_ref(),
            definitions=self.defs,
            cursor=self.cursor,
            resources={"arroyo_store": self.resource},
        ) as context:
            return sensor.evaluate_tick(context)  # type: ignore[return-value]

    def keep(self, result: Any, events: int | None = None) -> None:
        """Store a tick as the daemon does: events, partitions, cursor; or only some events."""
        for event in result.asset_events[:events]:
            self.instance.report_runless_asset_event(event)
        if events is not None:
            return
        for request in result.dynamic_partitions_requests or []:
            self.instance.add_dynamic_partitions("arroyo_jobs", list(request.partition_keys))
        self.cursor = result.cursor or self.cursor

    def tick(self, options: SensorOptions | None = None) -> dict[str, list[str]]:
        """One whole tick: the data versions told, by job."""
        result = self.evaluate(options)
        self.keep(result)
        return told(result)

    def run(self, job: str, partition: str | None = None, **options: Any) -> Any:
        """Run a job of the definitions in this process."""
        options.setdefault("raise_on_error", False)
        found = self.defs.resolve_job_def(job)
        return found.execute_in_process(instance=self.instance, partition_key=partition, **options)

    def due(self, schedule: str) -> Any:
        """Evaluate a schedule of the definitions."""
        with (
            dg.build_schedule_context(
                instance=self.instance,
                scheduled_execution_time=dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC),
                repository_def=self.defs.get_repository_def(),
                resources={"arroyo_store": self.resource},
            ) as context,
            dg.partition_loading_context(dynamic_partitions_store=self.instance),
        ):
            return self.defs.resolve_schedule_def(schedule).evaluate_tick(context)

    @property
    def keys(self) -> list[str]:
        return sorted(self.instance.get_dynamic_partitions("arroyo_jobs"))


def told(result: Any) -> dict[str, list[str]]:
    """The data versions of a tick's events, by partition."""
    found: dict[str, list[str]] = {}
    for event in result.asset_events:
        found.setdefault(event.partition, []).append(event.tags["dagster/data_version"])
    return found


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
    _shared_instance.wipe_assets(list(_shared_instance.all_asset_keys()))
    for key in _shared_instance.get_dynamic_partitions("arroyo_jobs"):
        _shared_instance.delete_dynamic_partition("arroyo_jobs", key)


@pytest.fixture
def retries_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry failed steps without the wait that outlasts a lease."""
    monkeypatch.setattr(failures, "RETRY_SECONDS", 0.0)


@pytest.fixture
def deployed(instance: dg.DagsterInstance) -> Deployment:
    return Deployment(instance)


@pytest.fixture
def at_rest(deployed: Deployment) -> Deployment:
    """A deployment with a job at rest: eight epochs of small files, and its partition."""
    run_word_job(deployed.store, **JOB, max_epochs=8)
    deployed.build(runner=InProcessRunner())
    deployed.instance.add_dynamic_partitions("arroyo_jobs", [KEY])
    return deployed
