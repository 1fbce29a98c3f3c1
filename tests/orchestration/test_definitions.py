"""The definitions load, start nothing, touch nothing, and can be named otherwise."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from arroyo_dagster.errors import ArroyoStateError, ConflictError, InputError, StorageError
from arroyo_dagster.orchestration import failures
from arroyo_dagster.orchestration.definitions import build_arroyo_definitions
from arroyo_dagster.orchestration.failures import as_failure
from arroyo_dagster.orchestration.resources import ArroyoStateStore, SparkSessionResource
from arroyo_dagster.orchestration.translator import ArroyoTableProps, DagsterArroyoTranslator
from arroyo_dagster.spark.session import OpenedSession
from arroyo_dagster.spark.settings import SparkChoice

ROOT = Path(__file__).parents[2]
NOWHERE = "/does/not/exist/anywhere"


def keys(defs: dg.Definitions) -> set[str]:
    return {key.to_user_string() for key in defs.resolve_all_asset_keys()}


LOADED = """
import builtins, json, os, sys
opened, started = [], []
def watch(event, args):
    if event in ("open", "os.mkdir", "os.listdir", "os.scandir", "socket.connect"):
        opened.append(str(args[0]))
    if event in ("subprocess.Popen", "os.posix_spawn", "os.fork"):
        started.append(str(args[0]))
sys.addaudithook(watch)
import definitions, dagster
import dagster.components.core.component_tree, pydantic.json_schema, time
started_at = time.process_time()
from arroyo_dagster.orchestration.component import ArroyoStateComponent
ArroyoStateComponent.model().model_json_schema()
component = dagster.build_defs_for_component(ArroyoStateComponent(checkpoint_url="/x"))
seconds = time.process_time() - started_at
dagster.Definitions.validate_loadable(definitions.defs)
modules = sorted({name.partition(".")[0] for name in sys.modules})
print(json.dumps({"opened": opened, "started": started, "modules": modules, "seconds": seconds,
    "storage": [name for name in sys.modules if name.startswith("arroyo_dagster.state.storage.")]}))
"""


def test_loading_the_code_location_touches_no_store_and_starts_no_jvm(tmp_path: Path) -> None:
    url = str(tmp_path / "never-made")
    environment = {**os.environ, "ARROYO__CHECKPOINT_URL": url, "DAGSTER_HOME": str(tmp_path)}
    answer = subprocess.run(
        [sys.executable, "-c", LOADED],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(answer.stdout.splitlines()[-1])
    assert not [path for path in found["opened"] if str(tmp_path) in path]
    assert not [program for program in found["started"] if "java" in program]
    assert not {"pyspark", "pyarrow", "polars", "pandas", "s3fs", "obstore"} & {*found["modules"]}
    assert found["storage"] == []
    assert found["seconds"] < 1  # what the component adds, of 1.5 s for `dg check defs`
    assert list(tmp_path.iterdir()) == []


def test_the_environment_configures_the_code_location(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARROYO_RUNNING", "1")
    monkeypatch.setenv("ARROYO_DEPLOYMENT", "blue")
    monkeypatch.setenv("ARROYO_SENSOR_SECONDS", "45")
    monkeypatch.delitem(sys.modules, "definitions", raising=False)
    import definitions

    monkeypatch.delitem(sys.modules, "definitions")
    assert "arroyo/blue/fleet" in keys(definitions.defs)
    sensor = definitions.defs.resolve_sensor_def("arroyo_blue_checkpoint_sensor")
    assert sensor.minimum_interval_seconds == 45
    assert sensor.default_status is dg.DefaultSensorStatus.RUNNING


# ---- names ---------------------------------------------------------------------------------------


class Prefixed(DagsterArroyoTranslator):
    def get_asset_spec(self, props: ArroyoTableProps) -> dg.AssetSpec:
        spec = super().get_asset_spec(props)
        named = spec.replace_attributes(key=spec.key.with_prefix("prod"), owners=["team:streams"])
        return named.merge_attributes(tags={"tier": "one"})


def test_a_translator_renames_every_asset_and_what_depends_on_it() -> None:
    defs = build_arroyo_definitions(NOWHERE, translator=Prefixed())
    dg.Definitions.validate_loadable(defs)
    assert all(key.startswith("prod/arroyo/") for key in keys(defs))
    graph = defs.resolve_asset_graph()
    catalog = graph.get(dg.AssetKey(["prod", "arroyo", "epoch_catalog"]))
    assert {key.path[0] for key in catalog.parent_keys} == {"prod"}
    assert catalog.owners == ["team:streams"]
    assert catalog.tags["tier"] == "one"


# ---- failures ------------------------------------------------------------------------------------


def test_an_error_becomes_a_failure_that_begins_with_its_job() -> None:
    error = ConflictError("somebody else won", job="words/main", next_step="look again")
    with pytest.raises(dg.Failure) as caught, as_failure():
        raise error
    assert caught.value.description == "words/main: somebody else won. Next: look again"
    assert caught.value.allow_retries is False
    assert caught.value.metadata["arroyo/job"].value == "words/main"
    assert caught.value.__cause__ is error


@pytest.mark.usefixtures("retries_at_once")
@pytest.mark.parametrize(("error", "retries"), [(StorageError("down"), 2), (InputError("no"), 0)])
def test_only_what_may_heal_by_itself_is_retried(error: ArroyoStateError, retries: int) -> None:
    @dg.op
    def failing() -> None:
        with as_failure():
            raise error

    @dg.job
    def one() -> None:
        failing()

    result = one.execute_in_process(raise_on_error=False)
    assert sum(event.is_step_up_for_retry for event in result.all_events) == retries
    (failed,) = [event for event in result.all_events if event.is_step_failure]
    assert failed.step_failure_data.user_failure_data is not None
    assert failed.step_failure_data.user_failure_data.description == str(error)


def test_no_next_step_of_maintenance_names_an_option_of_the_command_line() -> None:
    from arroyo_dagster.state.planning.compaction import rewrite as rewriting
    from arroyo_dagster.state.planning.gc import dead_jobs
    from arroyo_dagster.state.planning.gc import safety_checks as permission
    from arroyo_dagster.state.planning.restore import reads as query

    for module in (dead_jobs, permission, rewriting, query):
        text = failures.name_dagster_fields(inspect.getsource(module))
        assert not re.findall(r"--[a-z][a-z-]+", text), module.__name__


# ---- resources -----------------------------------------------------------------------------------


def test_everything_that_looks_gets_a_write_protected_store(deployed: Any) -> None:
    from arroyo_dagster.state.model.ids import StatePath

    with pytest.raises(InputError, match="write-protected"):
        deployed.resource.reading().put(StatePath("a"), b"")
    deployed.resource.writable().put(StatePath("a"), b"")


def test_the_catalogue_lies_below_dagster_home_by_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    resource = ArroyoStateStore(checkpoint_url="memory://somewhere")
    assert resource.catalogue().url.startswith(f"file://{tmp_path}/arroyo_catalogue/default/")


def test_without_dagster_home_it_lies_where_the_instance_keeps_its_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    found: list[str] = []

    @dg.op
    def view(arroyo_store: ArroyoStateStore) -> None:
        found.append(arroyo_store.catalogue().url)

    @dg.job(resource_defs={"arroyo_store": ArroyoStateStore(checkpoint_url="memory://x")})
    def job() -> None:
        view()

    assert job.execute_in_process(instance=dg.DagsterInstance.ephemeral()).success
    assert "/arroyo_catalogue/default/" in found[0]
    with pytest.raises(InputError, match="the catalogue's place is not configured"):
        ArroyoStateStore(checkpoint_url="memory://x").catalogue()


@pytest.mark.parametrize("catalogue", ["", "/below/it"])
def test_the_catalogue_never_lies_below_the_checkpoint_url(tmp_path: Path, catalogue: str) -> None:
    resource = ArroyoStateStore(
        checkpoint_url=str(tmp_path), catalogue_url=f"{tmp_path}{catalogue}"
    )
    with pytest.raises(InputError, match="cannot be stored below the checkpoint URL"):
        resource.catalogue()


def test_only_a_session_that_was_started_here_is_stopped() -> None:
    class Session:
        stopped = False

        def stop(self) -> None:
            self.stopped = True

    context = dg.build_init_resource_context()
    for managed, stop, stopped in ((True, True, True), (False, True, False), (True, False, False)):
        session, resource = Session(), SparkSessionResource(stop_on_teardown=stop)
        with resource.yield_for_execution(context):
            resource._opened = OpenedSession(session, SparkChoice("local[1]", "a test"), managed)
        assert session.stopped is stopped


def test_dots_in_names_are_no_trouble_for_dagster_1_12(monkeypatch: pytest.MonkeyPatch) -> None:
    """It derives names of inputs from asset keys, as this replacement does."""
    from dagster._core.definitions.decorators import decorator_assets_definition_builder as builder

    def of_1_12(key: dg.AssetKey) -> str:
        return "_".join(key.path).replace("-", "_")

    monkeypatch.setattr(builder, "stringify_asset_key_to_input_name", of_1_12)
    words = Path("examples/sdf/words/dataflow.yaml")
    defs = build_arroyo_definitions("/x", deployment="eu.1", dataflows=[words])
    dg.Definitions.validate_loadable(defs)
