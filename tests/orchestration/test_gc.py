"""Garbage collection as assets: what is planned, proved, approved, done, read back and shown."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from arroyo_dagster.errors import InputError
from arroyo_dagster.orchestration.definitions import build_arroyo_definitions
from arroyo_dagster.orchestration.gc.assets import dead_jobs_backlog, orphans_backlog
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.runners import InProcessRunner
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.operations.gc.undelete import run_undelete
from arroyo_dagster.state.storage.remote.open import open_store
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.storage.wrappers import WriteProtected
from tests.compat.arroyo import DATA
from tests.fleets import Written, legacy_job
from tests.gc_jobs import restorable, without_ours
from tests.jobs import listing, run_word_job, word_job

JOB: dict[str, Any] = {
    "rows": 24,
    "rows_per_epoch": 2,
    "keep_epochs": None,
    "merge_files_after": 99,
    "sinks": 0,
    "parallelism": 1,
}
PATHS = word_job(None, **JOB).paths  # type: ignore[arg-type]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"memory://gc-{tmp_path.name}"


@pytest.fixture
def store(url: str) -> ObjectStore:
    found = open_store(url)
    run_word_job(found, **JOB, max_epochs=8)
    return found


@pytest.fixture(scope="module")
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.instance_for_test() as found:
        found.add_dynamic_partitions("arroyo_jobs", [str(PATHS.root), "j"])
        yield found


class Run:
    """A run of one of the jobs."""

    def __init__(
        self,
        instance: dg.DagsterInstance,
        store: ArroyoStateStore,
        job: str,
        key: str = str(PATHS.root),
        **config: Any,
    ) -> None:
        ops = {
            "arroyo_gc": "arroyo_retained_epochs",
            "arroyo_collect_orphans": "arroyo_orphans",
            "arroyo_remove_dead_jobs": "arroyo_dead_jobs",
        }
        defs = build_arroyo_definitions(store, runner=InProcessRunner())
        self.result = defs.resolve_job_def(job).execute_in_process(
            instance=instance,
            partition_key=key,
            run_config={"ops": {ops[job]: {"config": config}}},
            raise_on_error=False,
        )

    @property
    def checks(self) -> dict[str, bool]:
        return {one.check_name: one.passed for one in self.result.get_asset_check_evaluations()}

    @property
    def assets(self) -> dict[str, dict[str, Any]]:
        return {
            event.asset_key.path[-1]: {
                name: one.value for name, one in event.materialization.metadata.items()
            }
            for event in self.result.get_asset_materialization_events()
            if event.asset_key is not None
        }

    @property
    def first_line(self) -> str:
        (failed,) = [event for event in self.result.all_events if event.is_step_failure]
        assert failed.step_failure_data.user_failure_data is not None
        return str(failed.step_failure_data.user_failure_data.description)


def resource(url: str, **options: Any) -> ArroyoStateStore:
    return ArroyoStateStore(checkpoint_url=url, catalogue_url=f"{url}-catalogue", **options)


class ReadOnly(ArroyoStateStore):
    """Credentials that can read, and nothing else."""

    def writable(self) -> ObjectStore:
        return WriteProtected(super().writable())


def test_a_dry_run_shows_the_plan_and_read_only_credentials_are_enough(
    url: str, store: ObjectStore, instance: dg.DagsterInstance
) -> None:
    objects = listing(store)
    reading = ReadOnly(checkpoint_url=url, catalogue_url=f"{url}-catalogue")
    run = Run(instance, reading, "arroyo_gc", keep_epochs=3)
    assert run.result.success
    assert run.checks == {"referenced_set_proved": True, "files_exist": True}
    plan = run.assets["retained_epochs_plan"]
    assert list(run.assets) == ["retained_epochs_plan"]
    assert plan["epochs"] == "5 removed, 3 kept, from epoch 6 on"
    assert re.fullmatch(r"\d+ objects, [\d.]+ kB \([\d,]+ bytes\)", plan["would be deleted"])
    assert int(re.match(r"read (\d+) roots, 8 epochs, ", plan["proof"])[1]) > 16  # type: ignore[index]
    assert "what goes first" in plan
    assert listing(store) == objects


def test_deletion_needs_credentials_that_allow_it(
    url: str, store: ObjectStore, instance: dg.DagsterInstance
) -> None:
    objects = listing(store)
    reading = ReadOnly(checkpoint_url=url, catalogue_url=f"{url}-catalogue")
    run = Run(instance, reading, "arroyo_gc", keep_epochs=3, dry_run=False)
    assert not run.result.success
    assert "write-protected" in run.first_line
    assert listing(store) == objects


def test_expired_epochs_go_are_read_back_and_journalled(
    url: str, store: ObjectStore, instance: dg.DagsterInstance
) -> None:
    run = Run(instance, resource(url), "arroyo_gc", keep_epochs=3, dry_run=False)
    assert run.result.success
    assert all(run.checks.values())
    done, plan = run.assets["retained_epochs"], run.assets["retained_epochs_plan"]
    assert done["epochs"] == plan["epochs"] == "5 removed, 3 kept, from epoch 6 on"
    assert done["deleted"] == plan["would be deleted"]
    journal = run.assets["gc_journal"]
    assert journal["deleted so far"].endswith(" in 1 run")
    assert journal["arroyo/newest_run"] == done["arroyo/journal"]
    restorable(store, PATHS, 6, 7, 8)
    again = Run(instance, resource(url), "arroyo_gc", keep_epochs=3, dry_run=False)
    assert again.result.success
    assert again.assets == {}


def test_what_needs_approval_waits_for_it_and_takes_no_other_plan(
    url: str, store: ObjectStore, instance: dg.DagsterInstance
) -> None:
    config: dict[str, Any] = {"keep_epochs": 3, "dry_run": False, "needs_approval": True}
    waiting = Run(instance, resource(url), "arroyo_gc", **config)
    assert waiting.result.success
    digest = waiting.assets["retained_epochs_plan"]["arroyo/plan"]
    assert "retained_epochs" not in waiting.assets
    other = Run(instance, resource(url), "arroyo_gc", **config, approved_plan="0" * 32)
    assert not other.result.success
    assert f"the current plan is {digest}" in other.first_line
    assert len(ParquetBackend(store, PATHS).epochs()) == 8
    approved = Run(instance, resource(url), "arroyo_gc", **config, approved_plan=digest)
    assert approved.result.success
    assert ParquetBackend(store, PATHS).epochs() == [6, 7, 8]


def test_what_is_refused_fails_the_blocking_check_with_the_evidence(
    url: str, store: ObjectStore, instance: dg.DagsterInstance
) -> None:
    manifest = ParquetBackend(store, PATHS).load_checkpoint_metadata(3).ref  # type: ignore[arg-type]
    store.delete_many([manifest])
    before = without_ours(store)
    run = Run(instance, resource(url), "arroyo_gc", keep_epochs=3, dry_run=False)
    assert not run.result.success
    assert run.checks == {"referenced_set_proved": False}
    assert "has a record but no manifest" in run.first_line
    assert without_ours(store) == before


def test_what_was_moved_aside_can_come_back(
    url: str, store: ObjectStore, instance: dg.DagsterInstance
) -> None:
    before = without_ours(store)
    run = Run(instance, resource(url), "arroyo_gc", keep_epochs=3, dry_run=False, quarantine=True)
    name = run.assets["retained_epochs"]["arroyo/quarantine"]
    run_undelete(store, PATHS, name)
    assert without_ours(store) == before


def test_orphans_are_planned_with_why_the_rest_stays(
    url: str, store: ObjectStore, instance: dg.DagsterInstance
) -> None:
    run = Run(instance, resource(url), "arroyo_collect_orphans")
    assert run.result.success
    assert run.assets == {}
    assert run.checks["referenced_set_proved"]
    bad = Run(instance, resource(url), "arroyo_collect_orphans", older_than_days=0.001)
    assert "below an hour:" in bad.first_line


def test_a_job_whose_pipeline_nobody_knows_to_be_gone_is_not_removed(
    url: str, store: ObjectStore, instance: dg.DagsterInstance
) -> None:
    before = without_ours(store)
    run = Run(instance, resource(url), "arroyo_remove_dead_jobs", dry_run=False)
    assert not run.result.success
    assert run.checks == {"referenced_set_proved": False}
    young = Run(instance, resource(url), "arroyo_remove_dead_jobs", dry_run=False, gone=True)
    assert "within the grace period" in young.first_line
    assert without_ours(store) == before


@pytest.mark.parametrize(
    ("job", "step"),
    [
        ("arroyo_gc", "`arroyo_api_url` or `arroyo_database`"),
        ("arroyo_collect_orphans", "`arroyo_api_url` or `arroyo_database`"),
        ("arroyo_remove_dead_jobs", "set `arroyo_database`"),
    ],
)
def test_a_job_of_arroyos_that_nobody_knows_fails_and_names_the_fields_that_are_missing(
    url: str, store: ObjectStore, instance: dg.DagsterInstance, job: str, step: str
) -> None:
    Written(store, legacy_job("j")).epochs(12)
    run = Run(instance, resource(url), job, "j", dry_run=False)
    assert not run.result.success
    assert run.assets == {}
    assert run.checks == {"referenced_set_proved": False}
    assert step in run.first_line
    texts = [entry.message for entry in instance.all_logs(run.result.run_id)]
    (check,) = run.result.get_asset_check_evaluations()
    assert not [text for text in (*texts, check.description or "") if "--" in text]


def test_schedules_look_only_where_collecting_is_allowed(url: str, store: ObjectStore) -> None:
    Written(store, legacy_job("j")).epochs(12)
    assert orphans_backlog(resource(url)) == {"j": 0, str(PATHS.root): 1}
    assert dead_jobs_backlog(resource(url)) == {"j": 0, str(PATHS.root): 0}
    database = resource(url, arroyo_database=str(DATA / "state-legacy.sqlite"))
    # The database knows none of the jobs of this URL: it may be another cluster's.
    assert dead_jobs_backlog(database) == {"j": 0, str(PATHS.root): 0}
    Written(store, legacy_job("job_d14OMmRXhf")).epochs(2)
    assert dead_jobs_backlog(database) == {"j": 1, str(PATHS.root): 0, "job_d14OMmRXhf": 0}


def test_the_source_of_words_is_the_resource_s(url: str) -> None:
    with pytest.raises(InputError, match="not the address of a server"):
        resource(url, arroyo_api_url="localhost:5115").directory(None)
    assert json.dumps(resource(url).model_dump()).count("token") == 1
