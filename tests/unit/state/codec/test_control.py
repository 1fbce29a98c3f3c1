"""Control messages that carry state, both ways."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state.codec.control import (
    CheckpointCompleted,
    CheckpointEvent,
    CheckpointRequest,
    CheckpointStep,
    CommitRequest,
    CompactedLoaded,
    JobCheckpoint,
    LoadCompacted,
    OperatorCommit,
    StartExecution,
    TableCommit,
    WorkerContext,
    decode_control,
    encode_control,
)
from arroyo_dagster.state.codec.proto import state_pb2 as pb
from arroyo_dagster.state.model.ids import (
    Epoch,
    JobId,
    OperatorId,
    PipelineId,
    TableName,
    WorkerGeneration,
)
from tests.strategies import EXPIRING_FILES, GLOBAL_FILES, NAMES, PATHS, SUBTASKS, U32, U64

UNKNOWN = st.sampled_from([b"", b"\xc2\xb5\x03\x02hi", b"\xc0\x3e\x07"])
EPOCH = U64.map(Epoch)
OPERATOR = NAMES.map(OperatorId)
CONTEXT = st.none() | st.builds(
    WorkerContext,
    machine=st.text(),
    worker=U64,
    job=NAMES.map(JobId),
    worker_generation=U64.map(WorkerGeneration),
    pipeline=NAMES.map(PipelineId),
    unknown=UNKNOWN,
)
TABLE_COMMIT = st.builds(
    TableCommit,
    data_by_subtask=st.dictionaries(U32, st.binary(max_size=4), max_size=3),
    unknown=UNKNOWN,
)
OPERATOR_COMMIT = st.builds(
    OperatorCommit,
    tables=st.dictionaries(NAMES.map(TableName), TABLE_COMMIT, max_size=2),
    unknown=UNKNOWN,
)
MESSAGES: dict[type[Any], Any] = {
    LoadCompacted: st.builds(
        LoadCompacted,
        operator=OPERATOR,
        tables=st.dictionaries(NAMES.map(TableName), GLOBAL_FILES | EXPIRING_FILES, max_size=3),
        node=st.none() | U32,
        unknown=UNKNOWN,
    ),
    CompactedLoaded: st.builds(CompactedLoaded, unknown=UNKNOWN),
    CheckpointRequest: st.builds(
        CheckpointRequest,
        epoch=EPOCH,
        min_epoch=EPOCH,
        timestamp_micros=U64,
        then_stop=st.booleans(),
        is_commit=st.booleans(),
        unknown=UNKNOWN,
    ),
    CommitRequest: st.builds(
        CommitRequest,
        epoch=EPOCH,
        operators=st.dictionaries(OPERATOR, OPERATOR_COMMIT, max_size=2),
        unknown=UNKNOWN,
    ),
    StartExecution: st.builds(
        StartExecution,
        program=st.none() | st.binary(max_size=8),
        restore_epoch=st.none() | EPOCH,
        tasks=st.lists(st.binary(max_size=4), max_size=3).map(tuple),
        job_controller_address=st.none() | st.text(),
        is_leader=st.booleans(),
        start_epoch=EPOCH,
        min_epoch=EPOCH,
        wait_for_leader=st.booleans(),
        checkpoint_interval_micros=U64,
        manifest_ref=st.none() | PATHS,
        unknown=UNKNOWN,
    ),
    CheckpointEvent: st.builds(
        CheckpointEvent,
        context=CONTEXT,
        time_micros=U64,
        operator=OPERATOR,
        subtask_index=U32,
        epoch=EPOCH,
        step=st.sampled_from([*CheckpointStep, 77]),
        unknown=UNKNOWN,
    ),
    CheckpointCompleted: st.builds(
        CheckpointCompleted,
        context=CONTEXT,
        time_micros=U64,
        operator=OPERATOR,
        epoch=EPOCH,
        subtask=st.none() | SUBTASKS,
        needs_commit=st.booleans(),
        unknown=UNKNOWN,
    ),
    JobCheckpoint: st.builds(
        JobCheckpoint,
        epoch=EPOCH,
        backend=st.text(),
        start_time_micros=U64,
        finish_time_micros=st.none() | U64,
        event_spans=st.lists(st.binary(max_size=4), max_size=3).map(tuple),
        is_stopping=st.booleans(),
        unknown=UNKNOWN,
    ),
}


@given(st.one_of(*MESSAGES.values()))
def test_every_message_comes_back_as_it_was_and_in_the_same_bytes(value: Any) -> None:
    data = encode_control(value)
    again = decode_control(type(value), data, "recorded")
    assert again == value
    assert encode_control(again) == data  # type: ignore[arg-type]


def test_every_control_message_of_the_specification_has_a_value() -> None:
    # arroyo-state.md 2.2: the request that v0.13 to v0.15 sent has a field more.
    request = pb.LoadCompactedDataReq(operator_id="o", node_id=3)
    assert request.SerializeToString() == b"\x0a\x01o\x18\x03"
    event = CheckpointEvent(
        context=None,
        time_micros=1,
        operator=OperatorId("o"),
        subtask_index=2,
        epoch=Epoch(3),
        step=CheckpointStep.FINISHED_COMMIT,
    )
    assert encode_control(event) == b"\x10\x01\x28\x02\x30\x03\x38\x04\x42\x01o"
    assert len(MESSAGES) == 8
    assert {field.name for kind in MESSAGES for field in fields(kind)} >= {"unknown", "epoch"}


@pytest.mark.parametrize("kind", MESSAGES)
def test_bytes_that_are_no_message_are_refused_by_name(kind: type[Any]) -> None:
    for data in (b"\xff", b"\x0a\x7f", b"\x0b", b"\x0a\x05ab"):
        with pytest.raises(FormatError) as caught:
            decode_control(kind, data, "the request")
        assert caught.value.facts["path"] == "the request"


def test_a_manifest_reference_that_leads_away_is_refused() -> None:
    message = pb.StartExecutionReq(checkpoint_manifest_ref="../x")
    with pytest.raises(FormatError, match="not a path below"):
        decode_control(StartExecution, message.SerializeToString(), "m")


def test_a_number_that_does_not_fit_is_named_before_anything_is_sent() -> None:
    request = CheckpointRequest(epoch=Epoch(1), min_epoch=Epoch(1), timestamp_micros=1)
    for wrong in (2**64, -1):
        with pytest.raises(InputError, match="does not fit"):
            encode_control(replace(request, timestamp_micros=wrong))
