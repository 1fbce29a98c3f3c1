"""Batches: one run for many jobs, asked once, whatever fails and whoever dies."""

import datetime as dt
import random
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import dagster as dg
import pytest
from dagster._core.errors import DagsterExecutionInterruptedError
from dagster._core.events import DagsterEvent
from dagster._core.events.log import EventLogEntry
from dagster._core.remote_origin import (
    RegisteredCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from arroyo_dagster.errors import StorageError
from arroyo_dagster.orchestration.batch_requests import (
    MOST_JOBS,
    ROOT_TAG,
    BatchConfig,
    BatchKind,
    BatchRequests,
    EarlierBatches,
    build_batch_schedule,
    chosen,
    decide,
    inspect_runs,
    root_of,
)
from arroyo_dagster.orchestration.batches import build_batch_job
from arroyo_dagster.orchestration.directory import ArroyoDirectory
from arroyo_dagster.orchestration.failures import as_failure
from arroyo_dagster.orchestration.job_pool import JobContext, JobPool, Tools
from arroyo_dagster.orchestration.partitions import jobs_partitions
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.runners import InProcessRunner
from arroyo_dagster.orchestration.schedules import MAX_RUNTIME_SECONDS
from arroyo_dagster.orchestration.translator import DagsterArroyoTranslator, Naming
from arroyo_dagster.state.metadata.lease import lease, newest_lease
from arroyo_dagster.state.model.ids import JobId, PipelineId, StatePath
from arroyo_dagster.state.model.layout import JobPaths

NAMING = Naming(DagsterArroyoTranslator(), jobs_partitions(None), None)
STORE = ArroyoStateStore(checkpoint_url="memory://batches")
KEY = dg.AssetKey(["arroyo", "compacted_state"])
RESOURCES = {
    "arroyo_store": STORE,
    "arroyo_runner": InProcessRunner(),
    "arroyo_directory": ArroyoDirectory(),
}


class WorkSettings(dg.Config):
    fails: list[str] = Field(default_factory=list)
    interrupted: str | None = None


class WorkBatch(BatchConfig):
    settings: WorkSettings = WorkSettings()


def work(context: JobContext, given: WorkSettings, tools: Tools) -> Iterator[Any]:
    """Say of each job that it was done."""
    key = context.partition_key
    context.log.info(f"works on {key} in run {context.run.run_id}")
    if key == given.interrupted:
        raise DagsterExecutionInterruptedError
    yield dg.MaterializeResult(
        asset_key=KEY, metadata={"arroyo/bytes": len(key)}, data_version=dg.DataVersion("v")
    )
    if key in given.fails:
        with as_failure():
            raise StorageError(
                "the disk of https://user:canary@host is full", path=key, next_step="empty it"
            )
    yield dg.AssetCheckResult(asset_key=KEY, check_name="whole", passed=key != "d/bad")


def kind(backlog: Mapping[str, int] | None = None, **changes: Any) -> BatchKind:
    options: dict[str, Any] = {
        "name": "arroyo_work_fleet",
        "description": "Work.",
        "config": WorkBatch,
        "events": work,
        "backlog": lambda store: backlog or {},
        "single": "arroyo_work",
    }
    return BatchKind(**{**options, **changes})


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.instance_for_test() as found:
        yield found


def run(instance: dg.DagsterInstance, one: BatchKind, **config: Any) -> dg.ExecuteInProcessResult:
    job = build_batch_job(one, NAMING)
    return job.execute_in_process(
        instance=instance,
        resources=RESOURCES,
        run_config={"ops": {one.op: {"config": config}}},
        raise_on_error=False,
    )


# ---- the run -------------------------------------------------------------------------------------


def test_one_run_serves_many_jobs_each_with_events_of_its_own(instance: dg.DagsterInstance) -> None:
    done = run(instance, kind(), jobs=["a/1", "b/2", "d/bad"])
    assert done.success
    found = instance.fetch_materializations(KEY, limit=10).records
    assert {one.partition_key for one in found} == {"a/1", "b/2", "d/bad"}
    assert {one.asset_materialization.tags["dagster/data_version"] for one in found} == {"v"}  # type: ignore[union-attr,index]
    checks = {
        one.metadata["arroyo/job"].value: one.passed for one in done.get_asset_check_evaluations()
    }
    assert checks == {"a/1": True, "b/2": True, "d/bad": False}


def test_a_job_that_fails_holds_up_no_other_and_the_run_names_it_first(
    instance: dg.DagsterInstance,
) -> None:
    done = run(instance, kind(), jobs=["a/1", "b/2", "c/3"], settings={"fails": ["b/2"]})
    assert not done.success
    assert {
        one.partition_key for one in instance.fetch_materializations(KEY, limit=10).records
    } == {"a/1", "b/2", "c/3"}
    failure = done.failure_data_for_node(kind().op)
    assert failure is not None
    assert failure.user_failure_data is not None
    words = str(failure.user_failure_data.description)
    assert words.startswith("1 of 3 jobs failed; the first is b/2: the disk of https://")
    assert "Next: empty it" in words
    assert "canary" not in words
    assert done.retry_attempts_for_node(kind().op) == 0


def test_no_job_is_begun_after_the_budget(instance: dg.DagsterInstance) -> None:
    done = run(instance, kind(), jobs=["a/1", "b/2"], budget_minutes=1e-9)
    assert done.success
    assert instance.fetch_materializations(KEY, limit=10).records == []
    [output] = [one for one in done.all_events if one.event_type_value == "STEP_OUTPUT"]
    metadata = output.step_output_data.metadata
    assert metadata["arroyo/jobs_left"].value == 2
    assert [row.data["outcome"] for row in metadata["jobs"].records] == [
        "left for the next run"
    ] * 2


def test_an_interrupt_ends_the_batch_and_is_no_failure_of_a_job(
    instance: dg.DagsterInstance,
) -> None:
    done = run(instance, kind(), jobs=["a/1", "b/2", "c/3"], settings={"interrupted": "b/2"})
    assert not done.success
    failure = done.failure_data_for_node(kind().op)
    assert failure is not None
    assert failure.user_failure_data is None
    assert "DagsterExecutionInterruptedError" in str(failure.error)
    assert [m.partition_key for m in instance.fetch_materializations(KEY, limit=10).records] == [
        "a/1"
    ]


def test_without_jobs_those_that_need_it_most_are_served(instance: dg.DagsterInstance) -> None:
    run(instance, kind({"a/1": 3, "b/2": 9, "c/3": 1}, min_backlog=2))
    found = instance.fetch_materializations(KEY, limit=10).records
    assert [one.partition_key for one in found][::-1] == ["b/2", "a/1"]


def test_jobs_are_served_at_the_same_time_and_told_in_their_order(
    instance: dg.DagsterInstance,
) -> None:
    meet, order = threading.Barrier(3), list[str]()

    def together(context: JobContext, given: WorkSettings, tools: Tools) -> Iterator[Any]:
        key = context.partition_key
        if key != "d/4":
            meet.wait(30)  # passes only once three of them are here
        order.append(key)
        yield from work(context, given, tools)

    one = kind(events=together)
    done = run(instance, one, jobs=["a/1", "b/2", "c/3", "d/4"], parallel_jobs=3)
    assert done.success
    found = [event.partition for event in done.get_asset_materialization_events()]
    assert found == ["a/1", "b/2", "c/3", "d/4"]
    assert order[-1] == "d/4"  # it reports on the whole fleet


def test_a_mistake_of_ours_in_one_job_fails_that_job_only(instance: dg.DagsterInstance) -> None:
    def mistaken(context: JobContext, given: WorkSettings, tools: Tools) -> Iterator[Any]:
        if context.partition_key == "b/2":
            raise KeyError("password=canary")
        yield from work(context, given, tools)

    done = run(instance, kind(events=mistaken), jobs=["a/1", "b/2", "c/3"])
    assert not done.success
    found = [event.partition for event in done.get_asset_materialization_events()]
    assert found == ["a/1", "c/3"]
    failure = done.failure_data_for_node(kind().op)
    assert failure is not None
    assert failure.user_failure_data is not None
    assert "1 of 3 jobs failed; the first is b/2" in str(failure.user_failure_data.description)
    logs = "".join(entry.user_message for entry in instance.all_logs(done.run_id))
    assert "canary" not in logs


def test_an_interrupt_reaches_the_jobs_that_other_threads_serve(
    instance: dg.DagsterInstance,
) -> None:
    """The main thread is interrupted; a job ends at its next call, and releases its lease."""
    released: list[str] = []

    def leased(context: JobContext, given: WorkSettings, tools: Tools) -> Iterator[Any]:
        paths, store = JobPaths(JobId("2"), PipelineId("b")), tools.store.writable()
        try:
            with lease(store, paths, "batch"):
                context.log.info("interrupt the main thread")
                for _ in range(3000):
                    store.head(StatePath("b/2/nothing"))
                    time.sleep(0.01)
                raise AssertionError("it was not interrupted")
        finally:
            released.append(context.partition_key)
        yield

    class Interrupted:
        """The context of a step whose log the interrupt comes to."""

        run_id = "r"
        log: Any

        def info(self, text: str) -> None:
            raise DagsterExecutionInterruptedError(text)

    context: Any = Interrupted()
    context.log = context
    config = WorkBatch(parallel_jobs=2)
    tools = Tools(STORE, RESOURCES["arroyo_runner"], RESOURCES["arroyo_directory"])  # type: ignore[arg-type]
    served = JobPool(leased, context, config, tools).served(["b/2"], True, lease_wait_seconds=0.0)
    with pytest.raises(DagsterExecutionInterruptedError):
        list(served)
    assert released == ["b/2"]
    paths = JobPaths(JobId("2"), PipelineId("b"))
    found = newest_lease(STORE.writable(), paths.leases)
    assert found is not None
    assert found.released


# ---- what is asked -------------------------------------------------------------------------------


def requests(
    instance: dg.DagsterInstance, one: BatchKind, **options: Any
) -> dg.RunRequest | dg.SkipReason:
    job = build_batch_job(one, NAMING)
    asks = BatchRequests(naming=NAMING, kind=one, **options)
    schedule = build_batch_schedule("work_schedule", job, "* * * * *", asks)
    with dg.build_schedule_context(
        instance=instance,
        scheduled_execution_time=dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
        resources={"arroyo_store": STORE},
    ) as context:
        data = schedule.evaluate_tick(context)
    if data.run_requests:
        [request] = data.run_requests
        return request
    return dg.SkipReason(str(data.skip_message))


def store_run(instance: dg.DagsterInstance, name: str, status: str, **options: Any) -> str:
    location = RegisteredCodeLocationOrigin("here")
    origin = RemoteJobOrigin(RemoteRepositoryOrigin(location, "repository"), name)
    made = dg.DagsterRun(
        job_name=name,
        status=dg.DagsterRunStatus(status),
        remote_job_origin=origin,
        **options,
    )
    instance.add_run(made)
    return made.run_id


def _event(run_id: str, name: str, kind_of_event: str) -> EventLogEntry:
    return EventLogEntry(
        error_info=None,
        level=20,
        user_message="",
        run_id=run_id,
        timestamp=dt.datetime.now(dt.UTC).timestamp(),
        job_name=name,
        dagster_event=DagsterEvent(event_type_value=kind_of_event, job_name=name),
    )


def test_a_schedule_asks_for_one_run_for_all_that_is_due(instance: dg.DagsterInstance) -> None:
    instance.add_dynamic_partitions("arroyo_jobs", ["a", "b", "c"])
    found = requests(
        instance,
        kind({"a": 1, "b": 5, "c": 9, "new": 99}, min_backlog=4),
        settings=WorkSettings(fails=["x"]),
        budget_minutes=5.0,
    )
    assert isinstance(found, dg.RunRequest)
    [config] = found.run_config["ops"].values()
    assert config["config"]["jobs"] == ["c", "b"]
    assert config["config"]["settings"]["fails"] == ["x"]
    assert config["config"]["budget_minutes"] == 5.0
    assert found.tags[ROOT_TAG] == root_of(STORE)
    assert found.run_key is None
    done = build_batch_job(kind(), NAMING).execute_in_process(
        instance=instance, resources=RESOURCES, run_config=found.run_config
    )
    assert done.success


@pytest.mark.parametrize("status", ["QUEUED", "NOT_STARTED", "STARTING", "STARTED", "CANCELING"])
def test_nothing_is_asked_while_a_batch_is_queued_or_running(
    instance: dg.DagsterInstance, status: str
) -> None:
    instance.add_dynamic_partitions("arroyo_jobs", ["a"])
    one = kind({"a": 1})
    store_run(instance, one.name, status, tags={ROOT_TAG: "another URL"})
    assert isinstance(requests(instance, one), dg.RunRequest)
    store_run(instance, one.name, status, tags={ROOT_TAG: root_of(STORE)})
    found = requests(instance, one)
    assert isinstance(found, dg.SkipReason)
    assert f"is {status.lower()}" in str(found.skip_message)


def test_a_job_with_a_run_of_its_own_is_left_out(instance: dg.DagsterInstance) -> None:
    instance.add_dynamic_partitions("arroyo_jobs", ["a", "b"])
    one = kind({"a": 5, "b": 1})
    store_run(instance, one.single, "QUEUED", tags={"dagster/partition": "a"})
    found = requests(instance, one)
    assert isinstance(found, dg.RunRequest)
    [config] = found.run_config["ops"].values()
    assert config["config"]["jobs"] == ["b"]
    store_run(instance, one.single, "STARTED", tags={"dagster/partition": "b"})
    assert "2 have a run of their own" in str(requests(instance, one))


def test_a_batch_whose_process_has_died_does_not_hold_up_the_others_for_ever(
    instance: dg.DagsterInstance,
) -> None:
    one = kind({"a": 1})
    job = build_batch_job(one, NAMING)
    run_id = instance.create_run_for_job(job, tags={ROOT_TAG: "r"}).run_id
    instance.report_run_failed
    instance.handle_new_event(_event(run_id, job.name, "PIPELINE_START"))
    began = instance.get_run_record_by_id(run_id)
    assert began is not None
    assert began.start_time is not None
    now = began.start_time
    assert inspect_runs(instance, one, "r", now + 60).unfinished is not None
    assert inspect_runs(instance, one, "r", now + 3 * MAX_RUNTIME_SECONDS).unfinished is None


def test_runs_say_when_a_job_was_served_last(instance: dg.DagsterInstance) -> None:
    one = kind()
    config = {"ops": {one.op: {"config": {"jobs": ["a", "b"]}}}}
    store_run(instance, one.name, "SUCCESS", run_config=config, tags={ROOT_TAG: "r"})
    store_run(instance, one.name, "FAILURE", run_config={"ops": "?"}, tags={ROOT_TAG: "r"})
    asked = inspect_runs(instance, one, "r", dt.datetime.now(dt.UTC).timestamp() + 600)
    assert asked.unfinished is None
    assert set(asked.seconds_ago) == {"a", "b"}
    assert all(590 < ago < 660 for ago in asked.seconds_ago.values())


# ---- which ---------------------------------------------------------------------------------------


@given(
    backlog=st.dictionaries(st.text("abc", min_size=1), st.integers(0, 1000)),
    ago=st.dictionaries(st.text("abc", min_size=1), st.floats(0, 1e6)),
    most=st.integers(1, 5),
    least=st.integers(1, 100),
)
@settings(max_examples=200, deadline=None)
def test_those_that_are_due_and_no_others(
    backlog: dict[str, int], ago: dict[str, float], most: int, least: int
) -> None:
    found = chosen(backlog, ago, min_backlog=least, most_jobs=most)
    due = {key for key, count in backlog.items() if count >= least}
    assert len(found) == len(set(found)) == min(most, len(due))
    assert set(found) <= due


# ---- a day of 500 jobs ---------------------------------------------------------------------------


@dataclass
class Day:
    """A simulated deployment: jobs that grow, ticks every few minutes, a queue of one worker.

    Attributes:
        growth: files a minute of each job.
        stuck: jobs whose compaction always fails.
    """

    chance: random.Random
    growth: dict[str, float]
    stuck: frozenset[str]
    files: dict[str, float] = field(default_factory=dict)
    served: dict[str, float] = field(default_factory=dict)
    longest: dict[str, float] = field(default_factory=dict)
    due_since: dict[str, float] = field(default_factory=dict)
    queue: list[list[str]] = field(default_factory=list)
    running: tuple[float, list[str]] | None = None
    runs: int = 0

    def minute(self, now: float, least: int) -> None:
        """Let files come, and a run end or begin."""
        for job, rate in self.growth.items():
            self.files[job] = self.files.get(job, 0.0) + rate
            if self.files[job] >= least:
                self.due_since.setdefault(job, now)
        if self.running is not None and self.running[0] <= now:
            for job in self.running[1]:
                if job not in self.stuck:
                    waited = now - self.due_since.pop(job, now)
                    self.longest[job] = max(self.longest.get(job, 0.0), waited)
                    self.files[job] = 0.0
            self.running = None
        if self.running is None and self.queue:
            jobs = self.queue.pop(0)
            self.running = (now + 0.3 + 0.02 * len(jobs) * self.chance.uniform(0.5, 4), jobs)

    def tick(self, now: float, one: BatchKind) -> None:
        """What the daemon does; it may die behind the request, and then does it again."""
        for _ in range(2 if self.chance.random() < 0.05 else 1):
            busy = [*self.queue, *([self.running[1]] if self.running else [])]
            asked = EarlierBatches(
                unfinished="run x is queued" if busy else None,
                busy=frozenset(),
                seconds_ago={job: (now - at) * 60 for job, at in self.served.items()},
            )
            backlog = {job: int(files) for job, files in self.files.items()}
            keys = decide(one, asked, backlog, self.growth)
            if isinstance(keys, str):
                continue
            waiting = {job for batch in busy for job in batch}
            assert waiting.isdisjoint(keys)
            self.runs += 1
            self.queue.append(keys)
            assert len(self.queue) == 1
            self.served.update(dict.fromkeys(keys, now))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_day_of_500_jobs_leaves_no_queue_and_no_job_waiting(seed: int) -> None:
    chance = random.Random(seed)
    names = [f"p/job_{at}" for at in range(500)]
    growth = {name: chance.choice((0.05, 0.5, 2.0, 10.0)) for name in names}
    day = Day(chance, growth, frozenset(chance.sample(names, 40)))
    one = kind(min_backlog=64)
    for minute in range(24 * 60):
        day.minute(float(minute), 64)
        daemon_is_down = 300 <= minute < 360
        if minute % 5 == 0 and not daemon_is_down:
            day.tick(float(minute), one)
    # 24 hours hold 288 ticks; a run per job would have been some 20,000.
    assert day.runs <= 288
    healthy = [job for job in names if job not in day.stuck and growth[job] >= 0.5]
    assert set(healthy) <= day.longest.keys()
    assert max(day.longest[job] for job in healthy) < 150  # an hour without a daemon included
    assert all(len(keys) <= MOST_JOBS for keys in day.queue)
