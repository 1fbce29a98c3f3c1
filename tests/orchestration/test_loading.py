"""A code location loads in any case, and a run sees the pipelines that its code server saw."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.storage.defs_state.base import set_defs_state_storage
from dagster.components.utils.defs_state import DefsStateConfigArgs
from dagster.components.utils.project_paths import get_local_state_path

from arroyo_dagster.errors import FormatError, StorageError
from arroyo_dagster.orchestration import (
    ArroyoStateComponent,
    ArroyoStateStore,
    PipelineList,
    build_arroyo_definitions,
)
from arroyo_dagster.orchestration.loading import read_state
from arroyo_dagster.orchestration.pipelines import model
from arroyo_dagster.state import MemoryStore, ObjectStore, StatePath, open_store
from tests.faulty_stores import Slow
from tests.fleets import Written, protocol_job
from tests.orchestration.conftest import Deployment
from tests.orchestration.launching import PROJECT
from tests.orchestration.results import keys
from tests.shares import all_but
from tests.stores import Wrapper

KEY = "arroyo/words/main/checkpoint"


class Down(Wrapper):
    """A store that does not answer."""

    def _call(self, verb: str, path: str, action: Callable[[], Any], data: bytes = b"") -> Any:
        raise StorageError("the store is down", retryable=False)


def emptied(_: ObjectStore) -> ObjectStore:
    """A store in which a directory, but no pipeline, is left."""
    store = MemoryStore("emptied")
    store.put(StatePath("words/main/current-generation.json.tmp"), b"")
    return store


@pytest.fixture
def words(deployed: Deployment, home: Path) -> Deployment:
    """A deployment with one pipeline, whose list is kept."""
    Written(deployed.store, protocol_job("words")).epochs(1)
    deployed.build()
    assert KEY in keys(deployed.defs)
    return deployed


def fleet(deployed: Deployment) -> str:
    """What the check of the fleet says."""
    assert deployed.run("arroyo_fleet").success
    result = deployed.check("", "every_pipeline_known")
    assert not result.passed
    return result.description


def cached(home: Path) -> Path:
    (file,) = (home / "arroyo_pipelines").glob("*.json")
    return file


@pytest.mark.parametrize(
    ("wrapper", "given", "reason"),
    [
        (Down, {}, "the store is down"),
        (lambda store: Slow(store, 0.5), {"list_within": 0.05}, "was not done in time"),
        (emptied, {}, "the listing"),
    ],
)
def test_a_listing_that_fails_leaves_the_last_list_in_force(
    words: Deployment, wrapper: Any, given: dict[str, Any], reason: str
) -> None:
    words.wrap(wrapper)
    words.build(**given)
    assert KEY in keys(words.defs)
    words.wrap(lambda store: store)
    assert reason in fleet(words)


def test_without_a_last_list_only_the_fleet_is_defined(deployed: Deployment) -> None:
    Written(deployed.store, protocol_job("words")).epochs(1)
    deployed.wrap(Down)
    deployed.build()
    assert keys(deployed.defs) == {"arroyo/fleet"}

    @dg.asset
    def mine() -> None:
        pass

    merged = dg.Definitions.merge(deployed.defs, dg.Definitions(assets=[mine]))
    dg.Definitions.validate_loadable(merged)
    deployed.wrap(lambda store: store)
    text = fleet(deployed)
    assert "the store is down" in text
    assert text.startswith("2 findings, 1 pipeline: ")  # the listing, and what it lacks


def test_a_damaged_list_is_kept_and_named(words: Deployment, home: Path) -> None:
    cached(home).write_text("{")
    words.build()
    assert keys(words.defs) == {"arroyo/fleet"}
    assert cached(home).read_text() == "{"
    text = fleet(words)
    assert "should be JSON" in text
    assert "remove it" in text


def test_a_list_that_cannot_be_kept_is_used(deployed: Deployment, home: Path) -> None:
    (home / "arroyo_pipelines").write_text("a file in place of the folder")
    Written(deployed.store, protocol_job("words")).epochs(1)
    deployed.build(list_cache=home / "arroyo_pipelines" / "list.json")
    assert keys(deployed.defs) == {"arroyo/fleet"}  # nor can it be read
    deployed.build(list_cache="/proc/list.json")
    assert KEY in keys(deployed.defs)
    assert "list of pipelines cannot be written" in fleet(deployed)


def test_a_variable_that_is_not_set_is_named(
    deployed: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ARROYO_NOWHERE", raising=False)
    deployed.resource = ArroyoStateStore(checkpoint_url=dg.EnvVar("ARROYO_NOWHERE"))  # type: ignore[assignment]
    deployed.build()
    assert keys(deployed.defs) == {"arroyo/fleet"}
    monkeypatch.setenv("ARROYO_NOWHERE", deployed.store.url)
    Written(deployed.store, protocol_job("words")).epochs(1)
    assert "variable ARROYO_NOWHERE, which ArroyoStateStore.checkpoint_url" in fleet(deployed)
    deployed.build()
    assert KEY in keys(deployed.defs)


def test_a_list_in_a_file_is_taken_as_it_is(words: Deployment, home: Path) -> None:
    words.wrap(Down)
    assert KEY in keys(build_arroyo_definitions(words.resource, pipelines=cached(home)))
    nowhere = build_arroyo_definitions(words.resource, pipelines=home / "nowhere.json")
    assert keys(nowhere) == {"arroyo/fleet"}


def test_what_is_gone_leaves_a_list_that_is_given(words: Deployment, home: Path) -> None:
    other = Written(words.store, protocol_job("other"))
    other.epochs(1)
    words.build()
    other.vanish()
    words.build()
    for gone, left in (["other/main"], {KEY}), (["words/main"], {KEY.replace("words", "other")}):
        defs = build_arroyo_definitions(words.resource, pipelines=cached(home), gone=gone)
        assert {key for key in keys(defs) if key.endswith("checkpoint")} == left


# ---- state that Dagster keeps --------------------------------------------------------------------

KINDS = ("LOCAL_FILESYSTEM", "VERSIONED_STATE_STORAGE")


class Stored:
    """A component whose list Dagster keeps, without a DAGSTER_HOME of its own."""

    def __init__(self, folder: Path, storage: Any, kind: str) -> None:
        self.store = open_store(str(folder / "state"))
        self._folder, self._storage, self._kind = folder, storage, kind

    def _component(self, url: str) -> ArroyoStateComponent:
        args: Any = {"management_type": self._kind}
        return ArroyoStateComponent(checkpoint_url=url, defs_state=DefsStateConfigArgs(**args))

    def refresh(self, url: str | None = None) -> None:
        """What `dg utils refresh-defs-state` does."""
        component = self._component(url or str(self._folder / "state"))
        with set_defs_state_storage(self._storage):
            version = asyncio.run(component.refresh_state(self._folder))
        self._storage.set_latest_version(component.defs_state_config.key, version)

    def load(self, url: str | None = None) -> PipelineList:
        """The list of which definitions are built."""
        component = self._component(url or str(self._folder / "state"))
        return read_state(self.path(), component.checkpoint_url)

    def path(self) -> Path:
        """The file that a load reads."""
        key = self._component("x").defs_state_config.key
        if self._kind == KINDS[0]:
            return get_local_state_path(key, self._folder)
        file = self._folder / "downloaded"
        self._storage.download_state_to_path(key, self._storage.get_latest_version(key), file)
        return file


@pytest.fixture(params=KINDS)
def stored(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Stored]:
    (tmp_path / "dg.toml").write_text('[project]\ndefs_module = "kept_defs"\n')
    (tmp_path / "kept_defs").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "kept_defs", raising=False)
    with dg.instance_for_test(temp_dir=str(tmp_path)) as instance:
        monkeypatch.delenv("DAGSTER_HOME", raising=False)
        yield Stored(tmp_path, instance.defs_state_storage, request.param)


def test_a_refresh_forgets_no_pipeline_and_no_key(stored: Stored) -> None:
    jobs = [Written(stored.store, protocol_job(name)) for name in ("words", "orders")]
    for job in jobs:
        job.epochs(1)
    stored.refresh()
    jobs[1].vanish()
    stored.refresh()
    assert {one.root for one in stored.load().pipelines} == {"words/main", "orders/main"}
    jobs[0].vanish()
    stored.refresh()  # of nothing
    assert len(stored.load().pipelines) == 2


def test_a_refresh_overwrites_no_list_that_it_cannot_read(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    Written(stored.store, protocol_job("words")).epochs(1)
    with monkeypatch.context() as later:
        later.setattr(model, "FORM", 2)
        stored.refresh()
    with pytest.raises(FormatError, match="form"):
        stored.refresh()
    assert '"form": 2' in stored.path().read_text()


def test_a_list_of_another_url_is_named(stored: Stored, tmp_path: Path) -> None:
    Written(stored.store, protocol_job("words")).epochs(1)
    stored.refresh()
    assert stored.load().problem is None
    other = stored.load(str(tmp_path / "elsewhere"))
    assert "refresh-defs-state" in (other.problem or "")
    assert len(other.pipelines) == 1


# ---- processes -----------------------------------------------------------------------------------

LOCATION = """
import dagster as dg
from arroyo_dagster import ArroyoStateComponent, build_arroyo_definitions

defs = {build}
"""
BUILDS = {
    "function": "build_arroyo_definitions({url!r})",
    "component": "dg.build_defs_for_component(ArroyoStateComponent(checkpoint_url={url!r}))",
}


@pytest.fixture
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    Written(open_store(str(tmp_path / "state")), protocol_job("words")).epochs(1)
    build = BUILDS[request.param].format(url=str(tmp_path / "state"))
    (tmp_path / "location.py").write_text(LOCATION.format(build=build))
    return tmp_path


@pytest.mark.parametrize("location", all_but(BUILDS, ["component"]), indirect=True)
def test_a_run_sees_the_pipelines_of_its_code_server(
    location: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dagster._core.workspace.context import WorkspaceProcessContext
    from dagster._core.workspace.load_target import PythonFileTarget

    from tests.orchestration.launching import LOCATION as NAME
    from tests.orchestration.launching import Webserver

    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    target = PythonFileTarget(str(location / "location.py"), "defs", str(PROJECT), NAME)
    queue = {"module": "dagster._core.run_coordinator", "class": "DefaultRunCoordinator"}
    with (
        dg.instance_for_test(overrides={"run_coordinator": queue}) as instance,
        WorkspaceProcessContext(instance, target) as process,
    ):
        server = Webserver(instance, process, location)
        (location / "state").rename(location / "moved")  # a listing would find nothing
        Written(open_store(str(location / "state")), protocol_job("other")).epochs(1)
        config = {"ops": {"arroyo_verify_op": {"config": {"pipelines": ["words/main"]}}}}
        run = server.ended(server.launch("arroyo_verify", config))
        # It knows the pipeline, and finds that it is gone. It does not know the other.
        assert run.status is dg.DagsterRunStatus.FAILURE
        key = dg.AssetCheckKey(dg.AssetKey(KEY.split("/")), "restorable")
        storage = instance.event_log_storage
        assert storage.get_latest_asset_check_execution_by_key([key])[key].evaluation is not None
        other = {"ops": {"arroyo_verify_op": {"config": {"pipelines": ["other/main"]}}}}
        run = server.ended(server.launch("arroyo_verify", other))
        assert run.status is dg.DagsterRunStatus.FAILURE
        logs = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
        assert "do not know this job" in str(logs[0].dagster_event.step_failure_data)  # type: ignore[union-attr]


LOADED = """
import json, os, sys
opened, started = [], []
def watch(event, args):
    if event in ("open", "os.mkdir", "socket.connect"):
        opened.append(str(args[0]))
    if event in ("subprocess.Popen", "os.posix_spawn", "os.fork"):
        started.append(str(args[0]))
sys.addaudithook(watch)
import definitions, dagster
import dagster.components.core.component_tree, pydantic.json_schema, time
started_at = time.process_time()
from arroyo_dagster.orchestration.component import ArroyoStateComponent
ArroyoStateComponent.model().model_json_schema()
seconds = time.process_time() - started_at
dagster.Definitions.validate_loadable(definitions.defs)
modules = sorted({name.partition(".")[0] for name in sys.modules})
print(json.dumps({"opened": opened, "started": started, "modules": modules, "seconds": seconds}))
"""


def test_the_code_location_of_this_repository_starts_no_jvm(home: Path) -> None:
    import json

    url = str(home / "never-made")
    environment = {**os.environ, "ARROYO__CHECKPOINT_URL": url}
    answer = subprocess.run(
        [sys.executable, "-c", LOADED],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(answer.stdout.splitlines()[-1])
    assert not [program for program in found["started"] if "java" in program]
    assert not {"pyspark", "pyarrow", "polars", "pandas", "s3fs", "obstore"} & {*found["modules"]}
    assert found["seconds"] < 1
    assert list(home.iterdir()) == []


def test_the_environment_configures_the_code_location(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RUNNING": "1", "DEPLOYMENT": "blue", "MODE": "maintain"}.items():
        monkeypatch.setenv(f"ARROYO_{name}", value)
    monkeypatch.setenv("ARROYO__CHECKPOINT_URL", "/does/not/exist")
    monkeypatch.delitem(sys.modules, "definitions", raising=False)
    import definitions

    monkeypatch.delitem(sys.modules, "definitions")
    assert "arroyo/blue/fleet" in keys(definitions.defs)
    sensor = definitions.defs.resolve_sensor_def("arroyo_blue_checkpoint_sensor")
    assert sensor.default_status is dg.DefaultSensorStatus.RUNNING
