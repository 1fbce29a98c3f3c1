"""On Spark a subtask stays in one process between epochs, and its operator is started once."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from arroyo_dagster.engine import run_pipeline as run_in_process
from arroyo_dagster.errors import StorageError
from arroyo_dagster.spark.engine.pipeline import run_pipeline
from arroyo_dagster.state import open_store, verify_job
from tests.located import KEYS, Places, counts_of, located_pipeline
from tests.words import newest

EPOCHS = 8


def test_subtasks_stay_and_those_of_a_process_that_ended_move_once(
    session: Any, tmp_path: Path
) -> None:
    log, store = tmp_path / "located.log", open_store(f"file://{tmp_path}/state")
    pipeline = located_pipeline(log, epochs=EPOCHS)
    ended = []

    def end_one(checkpoint: Any) -> None:
        if checkpoint.epoch == EPOCHS // 2:
            ended.append(Places.read(log).processes[0][-1])
            os.kill(ended[0], signal.SIGKILL)

    run_pipeline(pipeline, store, on_epoch=end_one)
    before, after = Places.read(log, up_to_epoch=EPOCHS // 2), Places.read(log)
    assert max(before.moves.values()) <= 1  # of the first epoch, if it was uneven
    assert before.starts == {subtask: 1 + moves for subtask, moves in before.moves.items()}
    assert max(before.copies[epoch] for epoch in (3, 4)) <= 1.3 * pipeline.parallelism
    held = {subtask: found[-1] for subtask, found in before.processes.items()}
    for subtask, process in held.items():
        more = after.starts[subtask] - before.starts[subtask]
        assert more == after.moves[subtask] - before.moves[subtask]
        assert more <= 2
        assert process not in ended or more
    assert counts_of(store, pipeline) == {f"key-{number}": EPOCHS for number in range(KEYS)}
    assert verify_job(store, pipeline.paths).passed


def test_errors_of_user_code_are_reported_with_their_text(session: Any, tmp_path: Path) -> None:
    message = "key 7 is not mine"
    log, store = tmp_path / "located.log", open_store(f"file://{tmp_path}/state")
    pipeline = located_pipeline(log, epochs=3, fail=message)
    with pytest.raises(StorageError, match=f"ValueError: {message}") as failed:
        run_pipeline(pipeline, store)
    assert failed.value.retryable
    run_in_process(located_pipeline(log, epochs=3), store)
    assert newest(store, pipeline).epoch == 3
