"""Primitive states: deletes, expiry, restarts, and which keys a subtask loads."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.dataflow.errors import StateSchemaError, Unsupported
from arroyo_dagster.dataflow.runtime import service
from tests.dataflows import Clock, Flow, builder, definition
from tests.formats import ExpiringTimeKeyFiles
from tests.shares import fewer_examples

BODY = """
operation = record.split(":")[1]
cell = counts()
if operation == "increment":
    cell.increment(1)
elif operation == "delete":
    cell.delete()
elif operation == "set":
    cell.set(100 if cell.exists else 200)
elif operation == "fail":
    cell.delete()
    cell.increment(5)
    raise ValueError
"""
OPERATIONS = ["increment", "delete", "set", "fail", "nothing"]
TTL_MS = 3000


def flow_of(value: str = "{type: u32}", **more: Any) -> Flow:
    text = definition(
        builder(BODY, value=value, key_body="return record.split(':')[0]"), converter="raw"
    )
    return Flow(text, **more)


RECORDS = st.lists(
    st.tuples(st.sampled_from("abcde"), st.sampled_from(OPERATIONS)), min_size=1, max_size=8
)


@fewer_examples(3)
@given(
    st.lists(RECORDS, min_size=1, max_size=6),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 2]),
)
def test_cells_are_what_a_model_says(
    epochs: list[list[tuple[str, str]]],
    expires: bool,
    restarts: bool,
    as_pairs: bool,
    parallelism: int,
) -> None:
    value = f"{{type: u32, ttl: {TTL_MS}ms}}" if expires else "{type: u32}"
    model: dict[str, tuple[int, int]] = {}
    with pytest.MonkeyPatch.context() as patch:
        if as_pairs and not expires:  # a job that began before primitive states had rows
            patch.setattr(service, "_is_stored_as_pairs", lambda state, operator: True)
        flow = flow_of(value, clock=Clock(), parallelism=parallelism)
        for records in epochs:
            flow.clock.ms += 1001
            if restarts:
                flow.restart()
                patch.undo()
            flow.send("words", [f"{key}:{operation}" for key, operation in records])
            now = flow.clock.ms
            for key, operation in records:
                before, updated = model.get(key, (0, now))
                is_there = key in model and not (expires and now - updated >= TTL_MS)
                count = before if is_there else 0
                if operation == "delete":
                    model.pop(key, None)
                elif operation == "increment":
                    model[key] = (count + 1, now)
                elif operation == "set":
                    model[key] = (100 if is_there else 200, now)
            live = {
                key: count
                for key, (count, updated) in model.items()
                if not expires or now - updated < TTL_MS
            }
            assert flow.cells("counts") == live
            view = flow.views().view("counts")
            assert [view.get(key) for key in "abcde"] == [live.get(key) for key in "abcde"]


def test_a_state_stored_as_pairs_stays_so_and_takes_no_ttl() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "_is_stored_as_pairs", lambda state, operator: True)
        before = flow_of().send("words", ["a:increment", "b:increment"])
    flow = flow_of(store=before.store, topics=before.topics)
    flow.send("words", ["a:increment", "b:delete"])
    flow.restart()
    flow.send("words", ["c:increment"])
    assert flow.cells("counts") == {"a": 2, "c": 1}
    assert flow.views().head("build").operator("states").tables["counts"].files  # type: ignore[union-attr]
    assert not isinstance(
        flow.views().head("build").operator("states").tables["counts"],  # type: ignore[union-attr]
        ExpiringTimeKeyFiles,
    )
    with_ttl = flow_of("{type: u32, ttl: 3s}", store=before.store)
    with pytest.raises(StateSchemaError, match="without the update times") as caught:
        _ = with_ttl.pipelines
    assert caught.value.facts["number"] == "E50"
    assert with_ttl.cells("counts") == {"a": 2, "c": 1}


def test_a_ttl_beside_windows_is_refused() -> None:
    text = definition(
        """
  build:
    sources: [{type: topic, id: words}]
    states:
      counts:
        type: keyed-state
        properties: {key: {type: string}, value: {type: u32, ttl: 10s}}
    window:
      tumbling: {duration: 10s}
      assign-timestamp: {run: "def at(record, time): return time"}
      partition:
        assign-key: {run: "def key_of(record): return record"}
        update-state: {run: "def count(record): counts().increment(1)"}
"""
    )
    with pytest.raises(Unsupported, match="live as long as their window"):
        _ = Flow(text).pipelines
