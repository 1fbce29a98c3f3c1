"""Marked prefixes: seen everywhere, and changed through no door."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner

from arroyo_dagster import cli
from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.orchestration.component import ArroyoStateComponent
from arroyo_dagster.orchestration.definitions import build_arroyo_definitions
from arroyo_dagster.orchestration.gc.assets import GcConfig
from arroyo_dagster.orchestration.maintenance import MaintenanceOptions
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.runners import InProcessRunner
from arroyo_dagster.state.metadata.ownership import Owned, read_ownership, write_mark
from arroyo_dagster.state.model.compaction import CompactionPolicy, CompactionSettings
from arroyo_dagster.state.model.garbage import PlanKind, Retention
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.model.layout import Layout, mark_path
from arroyo_dagster.state.operations.catalog.leases import break_lease
from arroyo_dagster.state.operations.compaction.job import run_compaction
from arroyo_dagster.state.operations.gc.execute import GcOptions, run_gc
from arroyo_dagster.state.operations.gc.pins import pin_epoch, unpin_epochs
from arroyo_dagster.state.operations.gc.plan import GcRequest
from arroyo_dagster.state.operations.gc.quarantine import list_quarantines, purge
from arroyo_dagster.state.operations.gc.undelete import run_undelete
from arroyo_dagster.state.operations.restore.rollback import plan_rollback, run_rollback
from arroyo_dagster.state.operations.verify.job import verify_job
from arroyo_dagster.state.planning.ownership import EVERYTHING, Mark, Ownership, parse_ownership
from arroyo_dagster.state.storage import MemoryStore, configure
from arroyo_dagster.state.storage.store import ObjectStore
from tests.arroyo_jobs import EVENTS, SECOND, ArroyoJob, table_rows, window_config
from tests.arroyo_server import ModelArroyo, arroyo
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
KEY = str(PATHS.root)
SENTENCE = "is marked as `{}`: it is shown and checked, and never compacted, rewritten or deleted"
FULL = CompactionSettings(policy=CompactionPolicy.FULL)
EXPIRE = GcRequest(kind=PlanKind.EXPIRE, retention=Retention(keep_epochs=2))

Door = Callable[[ObjectStore], object]
LIBRARY: dict[str, Door] = {
    "compact": lambda store: run_compaction(store, PATHS, FULL),
    "expire": lambda store: run_gc(store, PATHS, EXPIRE),
    "orphans": lambda store: run_gc(store, PATHS, GcRequest(kind=PlanKind.ORPHANS)),
    "pin": lambda store: pin_epoch(store, PATHS, Epoch(7)),
    "unpin": lambda store: unpin_epochs(store, PATHS, [Epoch(7)]),
    "rollback": lambda store: run_rollback(store, plan_rollback(store, PATHS, 4)),
    "undelete": lambda store: run_undelete(store, PATHS, quarantine_of(store)),
    "purge": lambda store: purge(store, PATHS, yes=True),
    "lease break": lambda store: break_lease(store, PATHS, "maintenance", sleep=lambda _: None),
}
COMMANDS: dict[str, list[str]] = {
    "compact": ["compact", "run", KEY, "--policy", "full", "--yes"],
    "expire": ["gc", "run", "expire", KEY, "--keep", "2", "--yes"],
    "orphans": ["gc", "run", "orphans", KEY, "--yes"],
    "pin": ["pin", KEY, "7"],
    "unpin": ["unpin", KEY, "7"],
    "rollback": ["rollback", KEY, "4", "--yes"],
    "undelete": ["gc", "undelete", KEY, "QUARANTINE", "--yes"],
    "purge": ["gc", "purge", KEY, "--yes"],
}


def quarantine_of(store: ObjectStore) -> str:
    ((found, _),) = list_quarantines(store, PATHS)
    return found.name


@pytest.fixture(scope="module")
def written() -> MemoryStore:
    found = MemoryStore()
    for job in ("main", "ours"):
        run_word_job(found, **JOB, job=job, max_epochs=8)
    earlier = GcRequest(kind=PlanKind.EXPIRE, retention=Retention(keep_epochs=6))
    run_gc(found, PATHS, earlier, GcOptions(quarantine=True))
    return found


@pytest.fixture
def store(written: MemoryStore, tmp_path: Path) -> Any:
    found = MemoryStore(f"ownership-{tmp_path.name}")
    for info in written.list():
        found.put(info.path, written.read(info.path))
    yield found
    configure(None)


def mark(prefix: str, ownership: Ownership = Ownership.OTHER) -> Mark:
    return Mark(prefix=prefix, ownership=ownership)


@pytest.mark.parametrize("door", LIBRARY)
def test_the_library_refuses_what_an_object_or_a_setting_marks(
    door: str, store: MemoryStore
) -> None:
    for prefix, kind in ((EVERYTHING, Ownership.OTHER), ("words", Ownership.BORROWED)):
        before = listing(store)
        with pytest.raises(InputError, match=SENTENCE.format(kind.value)) as error:
            LIBRARY[door](Owned(store, [mark(prefix, kind)]))
        assert error.value.next_step is not None
        assert listing(store) == before
        write_mark(store, mark(prefix, kind))
        marked = listing(store)
        with pytest.raises(InputError, match=SENTENCE.format(kind.value)) as error:
            LIBRARY[door](store)
        assert f"arroyo-state ownership clear {prefix} --yes" in str(error.value.next_step)
        assert listing(store) == marked
        store.delete_many([mark_path(prefix)])


def test_other_jobs_of_a_pipeline_with_a_mark_are_maintained(store: MemoryStore) -> None:
    write_mark(store, mark("words/ours"))
    write_mark(store, mark("word"))  # a part of the name, and another pipeline
    assert run_compaction(store, PATHS, FULL).changed


def test_a_mark_that_does_not_decode_forbids(store: MemoryStore) -> None:
    store.put(mark_path("words"), b'{"version": 1, "ownership": "whoever"}')
    with pytest.raises(FormatError, match="neither other nor borrowed"):
        run_compaction(store, PATHS, FULL)
    with pytest.raises(FormatError):
        read_ownership(store)


def test_a_marked_job_runs_on_and_is_verified(store: MemoryStore) -> None:
    write_mark(store, mark(KEY))
    run_word_job(store, **JOB)
    assert verify_job(store, PATHS, level=4).verdict.passed


@pytest.mark.parametrize("given", ["words=mine", "x/../y=other", "words="])
def test_a_wrong_mark_is_refused(given: str) -> None:
    prefix, _, kind = given.rpartition("=")
    with pytest.raises(InputError):
        parse_ownership({prefix: kind})


# ---- the command line ----------------------------------------------------------------------------


def run(store: MemoryStore, *args: str) -> Any:
    return CliRunner().invoke(cli.main, [*args, "--url", store.url])


@pytest.mark.parametrize("how", ["flag", "environment", "file", "object"])
def test_commands_refuse_with_the_same_sentence(
    how: str, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    more: list[str] = []
    if how == "flag":
        more = ["--ownership", "words=borrowed"]
    elif how == "environment":
        monkeypatch.setenv("ARROYO_OWNERSHIP", "else=other, words=borrowed")
    elif how == "file":
        (tmp_path / "arroyo-state.toml").write_text('ownership = ["words=borrowed"]')
    else:
        assert run(store, "ownership", "set", "words", "borrowed", "--yes").exit_code == 0
    before = listing(store)
    quarantine = quarantine_of(store)
    for command in COMMANDS.values():
        words = [quarantine if word == "QUARANTINE" else word for word in command]
        found = run(store, *words, *more)
        assert found.exit_code == 1, found.output
        assert SENTENCE.format("borrowed") in found.output
        assert listing(store) == before


def test_commands_refuse_to_stop_or_change_a_marked_arroyo_job(tmp_path: Path) -> None:
    store = MemoryStore(f"ownership-arroyo-{tmp_path.name}")
    model = ModelArroyo(ArroyoJob(Layout.PROTOCOL, watermark_micros=30 * SECOND, store=store))
    rows = table_rows(EVENTS, [["a", "b"], [1, 2], [20 * SECOND * 1000] * 2])
    for _ in range(4):
        model.job.write({("tumbling_1", window_config(EVENTS, ["k"], retention=600)): rows})
    job, said = model.job.job, ("--assume", f"{model.job.job}=stopped")
    rewrite = ("compact", "run", job, *said, "--policy", "full", "--quiet", "0", "--yes")
    undo = ("compact", "undo", job, *said, "--yes")
    set_mark = ("ownership", "set", "pl_x", "borrowed", "--yes")
    clear = ("ownership", "clear", "pl_x", "--yes")

    def refused(*words: str) -> None:
        assert run(store, *set_mark).exit_code == 0
        before = listing(store)
        found = run(store, *words)
        assert found.exit_code == 1, found.output
        assert SENTENCE.format("borrowed") in found.output
        assert listing(store) == before
        assert run(store, *clear).exit_code == 0

    try:
        with arroyo(model) as server:
            api = ("--arroyo-api", server.url)
            refused("compact", "window", job, "--now", *api, "--yes")
        assert (model.state, model.stop, model.log) == ("Running", "none", [])
        refused(*rewrite)
        assert run(store, *rewrite).exit_code == 0
        refused(*undo)
        assert "was restored" in run(store, *undo).output
    finally:
        configure(None)


def test_marks_are_set_listed_and_cleared(store: MemoryStore) -> None:
    before = listing(store)
    assert "nothing was changed" in run(store, "ownership", "set", "words/", "other").output
    assert listing(store) == before
    run(store, "ownership", "set", "words/", "other", "--note", "team billing", "--yes")
    found = json.loads(run(store, "ownership", "list", "--json").output)
    assert found == [{"prefix": "words", "ownership": "other", "note": "team billing"}]
    jobs = json.loads(run(store, "jobs", "--json").output)
    assert len(jobs) == 2  # a mark is no job
    assert "nothing was changed" in run(store, "ownership", "clear", "words").output
    assert "the mark was deleted" in run(store, "ownership", "clear", "words", "--yes").output
    assert "there is no mark" in run(store, "ownership", "clear", "words", "--yes").output
    assert listing(store) == before


# ---- Dagster -------------------------------------------------------------------------------------


def built(store: MemoryStore, tmp_path: Path, how: str) -> dg.Definitions:
    urls = {"checkpoint_url": store.url, "catalogue_url": str(tmp_path / "catalogue")}
    if how == "component":
        maintenance = {"engine": "in-process", "keep_epochs": 2}
        fields = {**urls, "ownership": {KEY: "other"}, "maintenance": maintenance}
        found = ArroyoStateComponent.from_attributes_dict(attributes=fields)
        return dg.build_defs_for_component(found)
    if how == "object":
        write_mark(store, mark(KEY))
    marks = {} if how == "object" else {KEY: "other"}
    return build_arroyo_definitions(
        ArroyoStateStore(**urls, ownership=marks),
        runner=InProcessRunner(),
        maintenance=MaintenanceOptions(gc=GcConfig(keep_epochs=2)),
    )


def below(store: ObjectStore, key: str) -> dict[str, str | None]:
    return {path: etag for path, etag in listing(store).items() if path.startswith(f"{key}/")}


@pytest.mark.parametrize("how", ["component", "definitions", "object"])
def test_dagster_sees_a_marked_job_and_refuses_to_change_it(
    how: str, store: MemoryStore, tmp_path: Path
) -> None:
    defs, before = built(store, tmp_path, how), below(store, KEY)
    steps = {
        "arroyo_compaction": ("arroyo_compacted_state", {"policy": "full"}),
        "arroyo_gc": ("arroyo_retained_epochs", {"keep_epochs": 2, "dry_run": False}),
    }
    with dg.instance_for_test() as instance:
        instance.add_dynamic_partitions("arroyo_jobs", [KEY, "words/ours"])

        def execute(job: str, key: str | None, config: Any = None) -> Any:
            return defs.resolve_job_def(job).execute_in_process(
                instance=instance, partition_key=key, run_config=config, raise_on_error=False
            )

        assert execute("arroyo_refresh", KEY).success
        for job, (op, config) in steps.items():
            result = execute(job, KEY, {"ops": {op: {"config": config}}})
            assert not result.success
            failure = result.failure_data_for_node(op)
            assert failure is not None
            assert failure.user_failure_data is not None
            assert SENTENCE.format("other") in str(failure.user_failure_data.description)
        # Of the jobs that need it most, the marked one is left out.
        op, config = "arroyo_gc_fleet_op", {"settings": {"keep_epochs": 2, "dry_run": False}}
        batch = execute("arroyo_gc_fleet", None, {"ops": {op: {"config": config}}})
        assert batch.success
        found = {event.partition for event in batch.get_asset_materialization_events()}
        assert found == {"words/ours"}
    assert below(store, KEY) == before
