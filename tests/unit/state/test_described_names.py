"""The names of Arroyo's state crate are public, hold their parts, and are what a run uses."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import arroyo_dagster
from arroyo_dagster import errors, state
from arroyo_dagster.engine import run_pipeline
from arroyo_dagster.state import Epoch, MemoryStore, StatePath, TableManager, TableName
from tests.formats import GlobalKeyedFiles
from tests.jobs import word_job

T = TableName("t")
BARRIER = state.StateMessage.Checkpoint(
    epoch=Epoch(7), min_epoch=Epoch(3), timestamp_micros=9, watermark_micros=5, then_stop=True
)
MERGED = state.StateMessage.Compaction(
    tables={T: GlobalKeyedFiles(files=(StatePath("c"),))},
    inputs={T: (StatePath("a"), StatePath("b"))},
)


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
