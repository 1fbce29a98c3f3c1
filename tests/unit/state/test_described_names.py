"""The names of Arroyo's state crate are public, hold their parts, and are what a run uses."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import arroyo_dagster
from arroyo_dagster import errors, state
from arroyo_dagster.state import (
    Epoch,
    MemoryStore,
    StatePath,
    TableManager,
    TableName,
    run_pipeline,
)
from arroyo_dagster.state.model.tables import GlobalKeyedFiles
from tests.jobs import word_job

T = TableName("t")
BARRIER = state.StateMessage.Checkpoint(
    epoch=Epoch(7), min_epoch=Epoch(3), timestamp_micros=9, watermark_micros=5, then_stop=True
)
MERGED = state.StateMessage.Compaction(
    tables={T: GlobalKeyedFiles(files=(StatePath("c"),))},
    inputs={T: (StatePath("a"), StatePath("b"))},
)


def test_a_checkpoint_message_says_when_it_began() -> None:
    assert type(BARRIER) is state.CheckpointMessage is state.StateMessage.Checkpoint
    assert (BARRIER.epoch, BARRIER.min_epoch, BARRIER.timestamp_micros) == (7, 3, 9)
    assert (BARRIER.watermark_micros, BARRIER.then_stop) == (5, True)


@pytest.mark.parametrize(
    "change",
    [
        state.TableData.RecordBatch(None, b"\0"),
        state.TableData.CommitData(b"offset"),
        state.TableData.KeyedData([(b"key", b"value"), (b"gone", None)]),
    ],
)
def test_every_change_of_a_table_is_table_data(change: Any) -> None:
    assert isinstance(change, state.TableData)
    message = state.StateMessage.TableData(T, change)
    assert isinstance(message, state.StateMessage)
    assert (message.table, message.data) == (T, change)


def test_a_compaction_has_the_metadata_of_each_table() -> None:
    assert isinstance(MERGED, state.StateMessage)
    assert MERGED.tables[T].paths == ("c",)
    assert MERGED.inputs[T] == ("a", "b")


@pytest.mark.parametrize("message", [BARRIER, MERGED])
def test_messages_travel_to_workers(message: Any) -> None:
    assert pickle.loads(pickle.dumps(message)) == message


def test_a_run_sends_each_kind_of_message(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    send = TableManager.send
    monkeypatch.setattr(TableManager, "send", lambda m, one: (sent.append(one), send(m, one))[1])
    store = MemoryStore()
    run_pipeline(word_job(store, rows=24, rows_per_epoch=2, merge_files_after=2), store)
    kinds = {type(one) for one in sent}
    variants = state.StateMessage
    assert kinds == {variants.Checkpoint, variants.Compaction, variants.TableData}
    changes = {type(one.data) for one in sent if isinstance(one, variants.TableData)}
    assert changes == {
        state.TableData.RecordBatch,
        state.TableData.CommitData,
        state.TableData.KeyedData,
    }


def test_state_error_is_the_root_of_all_errors() -> None:
    assert state.StateError is arroyo_dagster.StateError is errors.ArroyoStateError
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), state.StateError)
    with pytest.raises(state.StateError):
        state.open_store("no-scheme-of-ours://bucket")
