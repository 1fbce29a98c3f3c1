"""Work that a Dagster Pipes client starts: the same pages, one answer, no process left."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import dagster as dg
import pytest
from dagster._core.pipes.client import PipesClientCompletedInvocation
from dagster._core.pipes.utils import (
    PipesEnvContextInjector,
    PipesTempFileMessageReader,
    open_pipes_session,
)

from arroyo_dagster.errors import InputError
from arroyo_dagster.orchestration import (
    ArroyoOptions,
    ArroyoStateStore,
    InProcessRunner,
    MaintenanceRunner,
    PipesRunner,
    build_arroyo_definitions,
    run_pipes_command,
)
from arroyo_dagster.orchestration.pipes import EXTERNAL_TAG, load_client
from arroyo_dagster.orchestration.serving import WAITING
from arroyo_dagster.state import open_store, verify_job
from tests.documentation import blocks
from tests.internals import lease, newest_lease
from tests.jobs import state_of, word_job
from tests.orchestration.results import COMPACT, GC, JOB, KEY, PATHS, configured, logged
from tests.orchestration.test_store_options import of_yaml

PROJECT = Path(__file__).parents[2]
SERVE = [sys.executable, "-m", "arroyo_dagster.cli.pipes"]
PIPELINE = word_job(None, **JOB)  # type: ignore[arg-type]
ALWAYS = {"in_process_mb": 0, "spark_from_files": 0, "spark_from_objects": 0}


@dataclass
class ClusterClient(dg.PipesClient):
    """A client with the interface of that of EMR: one argument with what to start, which it
    changes; parameters in variables; a failed cluster as an exception; metadata of the cluster.
    """

    before: list[str] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)

    def run(  # type: ignore[override]
        self,
        *,
        context: Any,
        run_job_flow_params: dict[str, Any],
        extras: Mapping[str, Any] | None = None,
    ) -> PipesClientCompletedInvocation:
        self.asked.append(extras)
        with open_pipes_session(
            context=context,
            message_reader=PipesTempFileMessageReader(),
            context_injector=PipesEnvContextInjector(),
            extras=dict(extras or {}),
        ) as session:
            assert "Tags" not in run_job_flow_params
            run_job_flow_params["Tags"] = session.default_remote_invocation_info
            (step,) = run_job_flow_params["Steps"]
            environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
            environment |= session.get_bootstrap_env_vars()
            done = subprocess.run([*self.before, *step["Args"]], env=environment, check=False)
            if done.returncode != 0:
                raise Exception(f"[pipes] EMR job j-1 failed: {done.returncode}")
            return PipesClientCompletedInvocation(session, metadata={"Cluster ID": "j-1"})


def subprocess_runner(store: ArroyoStateStore, **changes: Any) -> PipesRunner:
    client = dg.PipesSubprocessClient(env={"PYTHONPATH": str(PROJECT)})
    given: dict[str, Any] = {"client": client, "arguments": {"command": SERVE}, **ALWAYS}
    return PipesRunner(store=store, **{**given, **changes})


def store_of(root: Path) -> ArroyoStateStore:
    return ArroyoStateStore(checkpoint_url=str(root))


def run(
    root: Path, instance: dg.DagsterInstance, job: str, config: Any, runner: MaintenanceRunner
) -> dg.ExecuteInProcessResult:
    defs = build_arroyo_definitions(
        store_of(root), mode="maintain", options=ArroyoOptions(runner=runner)
    )
    return defs.resolve_job_def(job).execute_in_process(
        run_config=config, instance=instance, raise_on_error=False
    )


def metadata_of(result: dg.ExecuteInProcessResult, asset: str) -> dict[str, Any]:
    """The metadata of an asset, without what differs between two runs or copies of a job."""
    (event,) = (
        one
        for one in result.get_asset_materialization_events()
        if one.asset_key == dg.AssetKey(["arroyo", "words", "main", asset])
    )
    values = {name: one.value for name, one in event.materialization.metadata.items()}
    differ = ("duration", "arroyo/journal", "arroyo/plan", "engine")
    return {name: value for name, value in values.items() if name not in differ}


def failure_of(result: dg.ExecuteInProcessResult) -> str:
    (event,) = (one for one in result.all_events if one.is_step_failure)
    data: Any = event.step_failure_data
    return str(data.user_failure_data.description if data.user_failure_data else data.error)


@pytest.mark.parametrize(
    ("job", "config", "asset"),
    [("arroyo_compaction", COMPACT, "compacted_state"), ("arroyo_gc", GC, "retained_epochs")],
)
def test_the_pages_of_a_run_elsewhere_are_those_of_a_run_here(
    root: Path, tmp_path: Path, instance: dg.DagsterInstance, job: str, config: Any, asset: str
) -> None:
    other = Path(shutil.copytree(root, tmp_path / "other" / "checkpoints"))
    here = run(other, instance, job, config, InProcessRunner())
    before = state_of(open_store(str(root)), PIPELINE)
    there = run(root, instance, job, config, subprocess_runner(store_of(root)))
    assert there.success, failure_of(there)
    assert metadata_of(there, asset) == metadata_of(here, asset)
    after = state_of(open_store(str(root)), PIPELINE)
    assert {**after, "": before[""]} == before  # the epoch apart
    found = newest_lease(open_store(str(root)), PATHS.leases)
    assert found is not None
    assert found.owner.endswith(f"(dagster run {there.run_id})")


def test_only_the_documented_interface_of_a_client_is_used(
    root: Path, instance: dg.DagsterInstance
) -> None:
    client = ClusterClient()
    arguments = {"run_job_flow_params": {"Steps": [{"Args": SERVE}]}}
    runner = subprocess_runner(store_of(root), client=client, arguments=arguments)
    for job, config in (("arroyo_compaction", COMPACT), ("arroyo_gc", GC)):
        done = run(root, instance, job, config, runner)  # the client changes its arguments
        assert done.success, failure_of(done)
        found = instance.get_run_by_id(done.run_id)
        assert found is not None
        assert found.tags[EXTERNAL_TAG] == "Cluster ID: j-1"
        assert "the process of the Pipes client: Cluster ID: j-1" in str(logged(instance, done))
    assert len(client.asked) == 2


def test_a_small_step_starts_no_process(root: Path, instance: dg.DagsterInstance) -> None:
    client = ClusterClient()
    runner = PipesRunner(client=client, store=store_of(root), arguments={})
    done = run(root, instance, "arroyo_compaction", COMPACT, runner)
    assert done.success, failure_of(done)
    assert client.asked == []


def test_an_error_elsewhere_is_the_failure_of_the_run(
    root: Path, instance: dg.DagsterInstance
) -> None:
    store = open_store(str(root))
    broken = next(one.path for one in store.list(KEY) if "/table-" in one.path)
    store.put(broken, b"no Parquet")
    here = run(root, instance, "arroyo_compaction", COMPACT, InProcessRunner())
    there = run(root, instance, "arroyo_compaction", COMPACT, subprocess_runner(store_of(root)))
    assert not there.success
    assert failure_of(there) == failure_of(here)
    assert broken in failure_of(there)


def test_a_lease_that_another_process_holds_lets_the_pipeline_wait(
    root: Path, instance: dg.DagsterInstance
) -> None:
    config = configured(
        "arroyo_compacted_state", policy="full", wait_seconds=0.0, lease_wait_seconds=0.0
    )
    with lease(open_store(str(root)), PATHS, "another"):
        there = run(root, instance, "arroyo_compaction", config, subprocess_runner(store_of(root)))
    assert there.success, failure_of(there)
    (event,) = there.get_asset_observation_events()
    observation = event.event_specific_data.asset_observation  # type: ignore[union-attr]
    assert "(another)" in str(observation.metadata[WAITING].value)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["false"], "External execution process failed with code 1"),
        (["true"], "ended without an answer"),
        (["/nowhere/spark-submit"], "No such file or directory"),
    ],
)
def test_a_process_without_an_answer_fails_the_run_at_once(
    root: Path, instance: dg.DagsterInstance, command: list[str], said: str
) -> None:
    runner = subprocess_runner(store_of(root), arguments={"command": command})
    there = run(root, instance, "arroyo_compaction", COMPACT, runner)
    assert not there.success
    assert said in failure_of(there)
    assert "the process of the Pipes client" in failure_of(there)
    assert not any(one.is_step_up_for_retry for one in there.all_events)


def test_secrets_are_names_of_variables_that_the_process_resolves(
    root: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ArroyoStateStore(
        checkpoint_url=str(root), storage_options={"secret_access_key": dg.EnvVar("S3_SECRET")}
    )
    monkeypatch.setenv("S3_SECRET", "canary")
    client = ClusterClient(before=["env", "-u", "S3_SECRET"])
    arguments = {"run_job_flow_params": {"Steps": [{"Args": SERVE}]}}
    runner = subprocess_runner(store, client=client, arguments=arguments)
    there = run(root, instance, "arroyo_compaction", COMPACT, runner)
    assert "the environment variable S3_SECRET" in failure_of(there)
    assert "canary" not in str(client.asked)
    assert {"env": "S3_SECRET"} in client.asked[0]["arroyo/request"]["store"][
        "storage_options"
    ].values()
    with pytest.raises(InputError, match="PipesRunner: arguments"):
        subprocess_runner(store, arguments={"env": {"S3_SECRET": "canary"}}).check_fields()


def test_only_the_approved_plan_is_executed(root: Path, instance: dg.DagsterInstance) -> None:
    """The process makes its own plan: an epoch that came meanwhile must not widen an approval."""
    config = configured("arroyo_retained_epochs", keep_epochs=3, dry_run=True)
    (event,) = run(
        root, instance, "arroyo_gc", config, InProcessRunner()
    ).get_asset_observation_events()
    observation = event.event_specific_data.asset_observation  # type: ignore[union-attr]
    plan = observation.metadata["arroyo/plan"].value
    approved = {"keep_epochs": 3, "dry_run": False, "approved_plan": plan}
    config = configured("arroyo_retained_epochs", **approved)
    late = [sys.executable, "-c", _MORE_EPOCHS.format(root=str(root))]
    runner = subprocess_runner(store_of(root), arguments={"command": late})
    before = [one.path for one in open_store(str(root)).list(KEY) if "/data/" in one.path]
    there = run(root, instance, "arroyo_gc", config, runner)
    assert f"plan {plan} was approved, but the current plan is" in failure_of(there)
    after = {one.path for one in open_store(str(root)).list(KEY)}
    assert set(before) <= after


_MORE_EPOCHS = """
from arroyo_dagster.cli.pipes import serve
from arroyo_dagster.state.storage.remote.open import open_store
from tests.orchestration.results import JOB
from tests.jobs import run_word_job
run_word_job(open_store({root!r}), **JOB, max_epochs=2)
serve()
"""


# ---- ending a run --------------------------------------------------------------------------------


def processes_of(text: str) -> list[int]:
    """The processes with a text in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


def interrupt_when(there: Any) -> threading.Thread:
    """Interrupt this process, as Dagster's launchers do, once something is there."""

    def wait() -> None:
        until = time.monotonic() + 60
        while not there() and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_ending_a_run_ends_the_process_which_gives_its_lease_back(
    root: Path, instance: dg.DagsterInstance
) -> None:
    marker = f"held-{root.parent.name}"
    script = root.parent / f"{marker}.py"
    script.write_text(_HELD)
    runner = subprocess_runner(store_of(root), arguments={"command": [sys.executable, str(script)]})
    thread = interrupt_when(lambda: (script.parent / "held").exists())
    done = run(root, instance, "arroyo_compaction", COMPACT, runner)
    thread.join()
    assert not done.success
    assert "DagsterExecutionInterruptedError" in failure_of(done)
    assert processes_of(marker) == []
    with lease(open_store(str(root)), PATHS, "the next", None):
        pass  # nobody holds it
    assert verify_job(open_store(str(root)), PATHS).passed


_HELD = """
import pathlib, time
from arroyo_dagster.cli.pipes import serve
from arroyo_dagster.state.operations.compaction import execute
first = execute.merge_here
def held(*given):
    pathlib.Path(__file__).with_name("held").touch()
    time.sleep(600)
import arroyo_dagster.spark.compaction as compaction
compaction.merge_here = held
serve()
"""


# ---- commands ------------------------------------------------------------------------------------

PROGRAM = """
from tests.jobs import word_job
def pipeline():
    return word_job(None, **{job!r})
"""


def test_a_pipeline_runs_elsewhere_and_its_document_is_the_metadata(
    tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    (tmp_path / "words.py").write_text(PROGRAM.format(job=JOB))
    client = dg.PipesSubprocessClient(env={"PYTHONPATH": str(PROJECT)})

    @dg.asset
    def words(context: dg.AssetExecutionContext) -> dg.MaterializeResult[Any]:
        target = f"{tmp_path / 'words.py'}:pipeline"
        given = ["run", target, "--url", str(tmp_path / "state"), "--epochs", "2"]
        return dg.MaterializeResult(
            metadata=run_pipes_command(context, client, given, command=SERVE)
        )

    done = dg.materialize([words], instance=instance)
    (event,) = done.get_asset_materialization_events()
    assert event.materialization.metadata["newest_epoch"].value == 2
    assert "epoch 1: " in str(logged(instance, done))


# ---- the component and the pages -----------------------------------------------------------------


def test_the_component_takes_a_client_of_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "clients_of_a_project.py").write_text(
        "import dagster as dg\ndef submit():\n    return dg.PipesSubprocessClient()\nnone = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    pipes: dict[str, Any] = {"client": "clients_of_a_project:submit"}
    spark = {"pipes": {**pipes, "arguments": {"command": SERVE}}, "in_process_mb": 5}
    runner = runner_of(tmp_path, spark)
    assert isinstance(runner, PipesRunner)
    assert isinstance(runner.client, dg.PipesSubprocessClient)
    assert runner.arguments == {"command": SERVE}
    assert runner.thresholds.size_bytes == 5 << 20
    for name, said in (
        ("clients_of_a_project:none", "is no Pipes client, but of type int"),
        ("clients_of_a_project:more", "there is no Pipes client"),
        ("clients_of_a_project", "there is no Pipes client"),
        ("no_such_module:client", "there is no Pipes client"),
    ):
        with pytest.raises(InputError, match=said):
            load_client(name)


def runner_of(folder: Path, spark: Any) -> Any:
    """The runner of a component with these settings of Spark."""
    defs = of_yaml({"checkpoint_url": f"{folder}/checkpoints", "advanced": {"spark": spark}})
    assert defs.resources is not None
    return defs.resources["arroyo_runner"]


class AnyModule(ModuleType):
    """A client library that is not installed here: each of its names takes any arguments."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return ClusterClient if name.endswith("Client") and "Pipes" in name else MagicMock()


PLACES = ("pipes", "kubernetes", "emr", "dataproc", "databricks")
LIBRARIES = ("boto3", "dagster_k8s", "dagster_aws.pipes", "dagster_gcp.pipes")
LIBRARIES += ("google.cloud.dataproc_v1.types", "google.cloud.storage")
LIBRARIES += ("dagster_databricks", "databricks.sdk", "databricks.sdk.service.jobs")


@pytest.mark.parametrize("place", PLACES)
def test_the_programs_of_a_page_load(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr("arroyo_dagster.cli.pipes.serve", lambda **given: served.append(given))
    for name in LIBRARIES:
        for end in range(1, name.count(".") + 2):
            above = ".".join(name.split(".")[:end])
            if above != "google":
                monkeypatch.setitem(sys.modules, above, AnyModule(above))
    monkeypatch.setattr(ClusterClient, "__init__", lambda self, **given: None)
    monkeypatch.setattr("dagster_pipes.PipesS3MessageWriter", MagicMock())
    programs = blocks(f"docs/operate/spark-{place}.md", "python")
    assert programs
    for code in programs:
        found: dict[str, Any] = {}
        exec(compile(textwrap.dedent(code), place, "exec", dont_inherit=True), found)
        if "defs" in found:
            dg.Definitions.validate_loadable(found["defs"])
        else:
            assert served.pop() is not None
