"""Processes that hold subtasks: whatever ends, hangs or comes twice, the state is exact."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster.engine import (
    Collector,
    Operator,
    OperatorContext,
    Pipeline,
    TableSource,
    run_pipeline,
)
from arroyo_dagster.errors import StorageError
from arroyo_dagster.spark.engine.holders.conversation import Conversation
from arroyo_dagster.spark.engine.holders.messages import Channel, Meeting, Secret, connect
from arroyo_dagster.spark.engine.holders.slot import ProcessId, WorkerSlot
from arroyo_dagster.spark.engine.holders.subtasks import LevelWork
from arroyo_dagster.spark.engine.worker import run_level
from arroyo_dagster.state import (
    MemoryStore,
    ObjectStore,
    TableConfig,
    global_table_config,
    open_store,
)
from tests.holders import (
    HeldRun,
    Workers,
    ask_once,
    end,
    held_run,
    started_workers,
    wait_until_ended,
)
from tests.located import Places, located_pipeline
from tests.words import newest, tables_of

EPOCHS, ROWS = 4, 60
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture(scope="module")
def shared() -> Iterator[Workers]:
    with started_workers(2) as workers:
        yield workers


def _store(tmp_path: Path, name: str = "state") -> ObjectStore:
    return open_store(f"file://{tmp_path}/{name}", options={"sync": False})


class Trip(Operator):
    """Counts by key; does in one epoch, once, what a test says, and writes down where it runs."""

    output_schema = pa.schema([("key", pa.string()), ("n", pa.int64())])

    def __init__(self, folder: Path, trip: Any = None, epoch: int = 2) -> None:
        self._folder, self._trip, self._epoch = str(folder), trip, epoch

    def tables(self) -> Sequence[TableConfig]:
        return [global_table_config("counts", key=str, value=int)]

    def on_start(self, ctx: OperatorContext) -> None:
        self.counts = ctx.table_manager.get_global_keyed_state("counts", str, int)

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        keys = batch["key"].to_pylist()
        for key in keys:
            self.counts.insert(key, (self.counts.get(key) or 0) + 1)
        collector.collect(
            pa.record_batch([keys, [self.counts.get(key) for key in keys]], self.output_schema)
        )

    def handle_checkpoint(self, ctx: OperatorContext, collector: Collector) -> None:
        folder = Path(self._folder)
        with contextlib.suppress(FileExistsError):
            if self._trip is not None and ctx.epoch == self._epoch:
                (folder / "tripped").touch(exist_ok=False)
                self._trip(folder)


def _counting(tmp_path: Path, trip: Any = None, **options: Any) -> Pipeline:
    """Two levels: what the first puts out must come once, too."""
    pipeline = Pipeline("counting", parallelism=1)
    keys = [f"k{number % 7}" for number in range(EPOCHS * ROWS)]
    rows = pa.table({"key": keys, "at": pa.array(range(len(keys)), pa.timestamp("ms"))})
    source = TableSource(rows, rows_per_epoch=ROWS)
    first = pipeline.source("rows", source, timestamp="at").key_by("key")
    again = first.apply("count", Trip(tmp_path, trip, **options)).key_by("n")
    again.apply("again", CountAgain())
    return pipeline


class CountAgain(Operator):
    def tables(self) -> Sequence[TableConfig]:
        return [global_table_config("times", key=int, value=int)]

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        times = ctx.table_manager.get_global_keyed_state("times", int, int)
        for n in batch["n"].to_pylist():
            times.insert(n, (times.get(n) or 0) + 1)


@functools.cache
def _expected() -> Any:
    store, pipeline = MemoryStore(), _counting(Path("nowhere"))
    run_pipeline(pipeline, store)
    return tables_of(store, newest(store, pipeline))


def _lost(run: HeldRun) -> list[list[int]]:
    """By epoch, the levels whose holder was gone."""
    return [[one.level for one in places if one.lost is not None] for places in run.placed]


# ---- a holder ends -------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_subtask_is_taken_over_from_a_holder_that_ended(tmp_path: Path, when: str) -> None:
    store, pipeline = _store(tmp_path), _counting(tmp_path)
    with started_workers() as workers:

        def ask(
            run: HeldRun, work: LevelWork, subtask: int, rows: pa.Buffer, at: Meeting
        ) -> list[pa.RecordBatch]:
            chosen = (work.plan.epoch, work.level) == (2, 1)
            if chosen and when == "before":
                end(workers.processes()[0])
            output = ask_once(run, work, subtask, rows, at)
            if chosen and when == "after":
                end(workers.processes()[0])
            return output

        with held_run(pipeline, store, workers, ask) as run:
            run.run()
    # The other level of the same process is taken over by the process that has come.
    assert _lost(run) == ([[], [1, 2], [], []] if when == "before" else [[], [2], [1], []])
    assert tables_of(store, newest(store, pipeline)) == _expected()


def _in_a_holder() -> None:
    assert "pytest" not in sys.modules


def _die_twice(folder: Path) -> None:
    _in_a_holder()
    if not (folder / "twice").exists():
        (folder / "twice").touch()
        (folder / "tripped").unlink()
    os.kill(os.getpid(), signal.SIGKILL)


def test_user_code_that_ends_every_process_fails_the_task(tmp_path: Path) -> None:
    store, pipeline = _store(tmp_path), _counting(tmp_path, _die_twice)
    with started_workers() as workers:
        with (
            held_run(pipeline, store, workers) as run,
            pytest.raises(StorageError, match="ended by signal 9 while it worked") as failed,
        ):
            run.run()
        assert failed.value.retryable
        assert newest(store, pipeline).epoch == 1
        with held_run(pipeline, store, workers) as run:
            run.run()
    assert tables_of(store, newest(store, pipeline)) == _expected()


# ---- a holder answers late -----------------------------------------------------------------------


def _stop(folder: Path) -> None:
    _in_a_holder()
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_holder_that_hangs_is_ended_and_its_subtask_taken_over(tmp_path: Path) -> None:
    store, pipeline = _store(tmp_path), _counting(tmp_path, _stop)
    with started_workers() as workers:
        with held_run(pipeline, store, workers) as run:
            assert run.step() is not None
            workers.silence_seconds = 8.0
            hung = workers.processes()[0]
            assert run.step() is not None
            workers.silence_seconds = 60.0
            run.run()
        wait_until_ended(hung)
    assert _lost(run)[1] == [1, 2]
    assert tables_of(store, newest(store, pipeline)) == _expected()


# ---- who asks ------------------------------------------------------------------------------------


def test_nobody_without_the_secret_is_served(tmp_path: Path, shared: Workers) -> None:
    with shared.worker(0) as slot:
        address = slot.address()
    assert address is not None
    other = replace(shared.meeting(), secret=Secret.new())
    with pytest.raises(OSError):
        Conversation.begin(address, other)
    for said in (b"", b"H", b"H" + (1 << 40).to_bytes(8, "big"), os.urandom(300)):
        with connect(address, across=False) as connection:
            connection.sendall(said)
    # One that does not know the secret cannot pass for a holder either.
    with socket.socket(socket.AF_UNIX) as impostor:
        impostor.bind("\0arroyo-impostor")
        impostor.listen()

        def pretend() -> None:
            with Channel(impostor.accept()[0]) as channel:
                channel.send(b"H", os.urandom(32))
                channel.receive()
                channel.send(b"P", os.urandom(32) + address.about(1))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(ConnectionAbortedError):
            Conversation.begin(replace(address, name="arroyo-impostor"), shared.meeting())
        thread.join()
    found = Conversation.begin(address, shared.meeting())
    found.close()
    assert found.address == address


def test_the_secret_is_not_in_any_text(shared: Workers) -> None:
    shown = repr(shared.meeting()) + repr(shared.secret)
    assert shared.secret.value.hex() not in shown
    assert repr(shared.secret.value) not in shown
    for process in shared.processes():
        for name in ("cmdline", "environ"):
            assert shared.secret.value.hex() not in Path(f"/proc/{process}/{name}").read_text()


@pytest.mark.parametrize("chosen", [0, 1])
def test_epoch_asked_for_twice_counts_once(tmp_path: Path, shared: Workers, chosen: int) -> None:
    """Whichever report the driver takes: of a speculative task, or of one that Spark retried."""
    store, pipeline = _store(tmp_path), _counting(tmp_path)

    def ask(
        run: HeldRun, work: LevelWork, subtask: int, rows: pa.Buffer, meeting: Meeting
    ) -> list[pa.RecordBatch]:
        outputs = [ask_once(run, work, subtask, rows, meeting) for _ in range(2)]
        return outputs[chosen]

    with held_run(pipeline, store, shared, ask) as run:
        run.run()
    assert tables_of(store, newest(store, pipeline)) == _expected()


ASKER = """
import pickle, sys
from arroyo_dagster.spark.engine.holders import slot
from arroyo_dagster.spark.engine.worker import run_level
import pyarrow as pa
work, subtask, rows, placed, meeting = pickle.load(sys.stdin.buffer)
run_level(work.level, pickle.dumps(work), subtask, pa.py_buffer(rows), placed, meeting)
"""


def _wait_for_ever(folder: Path) -> None:
    _in_a_holder()
    while True:
        time.sleep(0.1)


def test_a_cancelled_task_ends_the_user_code_that_ran_for_it(tmp_path: Path) -> None:
    store, pipeline = _store(tmp_path), _counting(tmp_path, _wait_for_ever)

    def ask(
        run: HeldRun, work: LevelWork, subtask: int, rows: pa.Buffer, meeting: Meeting
    ) -> list[pa.RecordBatch]:
        if (work.plan.epoch, work.level) == (2, 1):
            placed = run.placement.of_level(1)[0]
            process = workers.processes()[0]
            with subprocess.Popen(
                [sys.executable, "-c", ASKER], stdin=subprocess.PIPE, env=ENVIRONMENT
            ) as asker:
                assert asker.stdin is not None
                asker.stdin.write(pickle.dumps((work, subtask, rows.to_pybytes(), placed, meeting)))
                asker.stdin.close()
                until = time.monotonic() + 30
                while not (tmp_path / "tripped").exists():
                    assert time.monotonic() < until
                    time.sleep(0.02)
                asker.kill()
            wait_until_ended(process)
        return ask_once(run, work, subtask, rows, meeting)

    with started_workers() as workers, held_run(pipeline, store, workers, ask) as run:
        run.run()
    assert _lost(run) == [[], [1, 2], [], []]
    assert tables_of(store, newest(store, pipeline)) == _expected()


# ---- the life of a holder ------------------------------------------------------------------------


def test_a_holder_ends_with_its_owner_even_in_the_middle_of_user_code(tmp_path: Path) -> None:
    store, pipeline = _store(tmp_path), _counting(tmp_path, _wait_for_ever)
    with started_workers() as workers:

        def stop_owner() -> None:
            while not (tmp_path / "tripped").exists():
                time.sleep(0.02)
            workers.owner.kill()
            workers.owner.wait()

        thread = threading.Thread(target=stop_owner)
        thread.start()
        with held_run(pipeline, store, workers) as run:
            run.step()
            process = workers.processes()[0]
            run.run()
        thread.join()
        wait_until_ended(process)
    # No other holder can be started, and the worker does without.
    assert {place.holder for place in run.placed[-1]} == {None}
    assert tables_of(store, newest(store, pipeline)) == _expected()


def test_worker_without_holder_keeps_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, pipeline = _store(tmp_path), _counting(tmp_path)
    monkeypatch.setattr("arroyo_dagster.spark.engine.holders.slot._START", "raise SystemExit(1)")
    with started_workers() as workers, held_run(pipeline, store, workers) as run:
        run.run()
    assert {place.holder for places in run.placed for place in places} == {None}
    assert tables_of(store, newest(store, pipeline)) == _expected()


def test_subtasks_that_moved_are_dropped(tmp_path: Path, shared: Workers) -> None:
    """Only the process that held a subtask last keeps it: memory is that of one copy."""
    log, epochs = tmp_path / "log", 6
    pipeline, store = located_pipeline(log, epochs=epochs, parallelism=4), _store(tmp_path)

    def ask(
        run: HeldRun, work: LevelWork, subtask: int, rows: pa.Buffer, meeting: Meeting
    ) -> list[pa.RecordBatch]:
        placed = run.placement.of_level(1).get(subtask)
        if (work.plan.epoch, subtask) == (3, 1):
            placed = None  # the worker takes what is held elsewhere: 1 % 2 + 1
            with shared.worker(0):
                return run_level(work.level, pickle.dumps(work), subtask, rows, placed, meeting)
        return run_level(work.level, pickle.dumps(work), subtask, rows, placed, meeting)

    with held_run(pipeline, store, shared, ask) as run:
        run.placement._spread = lambda level: None  # type: ignore[method-assign]
        run.run()
    found = Places.read(log)
    assert found.moves == {0: 0, 1: 1, 2: 0, 3: 0}
    assert found.starts == {0: 1, 1: 2, 2: 1, 3: 1}
    # The former process learns that it has moved when it is asked for another, an epoch later.
    assert [found.copies[epoch] for epoch in range(1, epochs + 1)] == [4, 4, 5, 4, 4, 4]


def test_jobs_do_not_drop_each_others_subtasks(tmp_path: Path, shared: Workers) -> None:
    logs = [tmp_path / name for name in ("one", "two")]
    pipelines = [
        located_pipeline(log, epochs=3, parallelism=2, name=f"job{number}")
        for number, log in enumerate(logs)
    ]
    with contextlib.ExitStack() as both:
        runs = [
            both.enter_context(held_run(pipeline, _store(tmp_path), shared))
            for pipeline in pipelines
        ]
        for _ in range(3):
            for run in runs:
                run.step()
    for log in logs:
        assert Places.read(log).starts == {0: 1, 1: 1}


# ---- across hosts --------------------------------------------------------------------------------


def test_a_holder_of_another_host_is_reached_over_tcp_only_if_that_is_allowed() -> None:
    with started_workers(0) as workers:
        meeting = replace(workers.meeting(), driver_host="127.0.0.1")
        slot = WorkerSlot.claim(meeting, ProcessId.of(workers.owner.pid))
        address = slot.address()
        assert address is not None
        assert (address.host, address.port is None) == ("127.0.0.1", False)
        elsewhere = replace(address, name="arroyo-not-here")
        found = Conversation.begin(elsewhere, meeting)
        found.close()
        assert found.address == address
        with pytest.raises(OSError):
            Conversation.begin(elsewhere, workers.meeting())
        with pytest.raises(OSError):
            Conversation.begin(elsewhere, replace(meeting, secret=Secret.new()))
        workers.slots.append(slot)
