"""The derived codec refuses what does not fit the annotations, and names object and field."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state import Epoch, JobId, OperatorId, PipelineId, StatePath, TableName
from arroyo_dagster.state.codec.derived import decode, encode, plain_values, value_from_json
from arroyo_dagster.state.model.changes import ChangeKind, ChangeRecord, JobHead
from arroyo_dagster.state.model.compaction import (
    CompactionRecord,
    CompactionSettings,
    MergedPairs,
    MergedRows,
)
from arroyo_dagster.state.model.tables import TimeFile

PATH = StatePath("j/o/table-t-000")
OF = {"operator": OperatorId("o"), "table": TableName("t")}
FILE = TimeFile(
    epoch=Epoch(3), path=PATH, min_routing_key=0, max_routing_key=2**64 - 1, max_timestamp_micros=7
)
JOB: dict[str, Any] = {"job": JobId("j"), "epoch": Epoch(3), "token": 1, "created_at_micros": 5}
COMPACTION = CompactionRecord(
    **JOB,
    pipeline=PipelineId("p"),
    merged=(
        MergedPairs(**OF, inputs=(PATH,), outputs=()),
        MergedRows(**OF, inputs=(FILE,), outputs=(FILE,)),
    ),
)
CHANGE: dict[str, Any] = {
    **JOB,
    "pipeline": None,
    "worker_generation": None,
    "finish_time_micros": 4,
    "head": JobHead(epoch=Epoch(3)),
}
REBUILD = ChangeRecord(
    **CHANGE,
    kind=ChangeKind.REBUILD,
    operation="rebuild",
    digest="d",
    objects={PATH: (None, "ab")},
    before={PATH: None},
    written={PATH: b"\0\xff"},
)
REWRITE = ChangeRecord(
    **CHANGE,
    kind=ChangeKind.COMPACTION,
    operation=None,
    digest=None,
    objects={PATH: ("aa", "ab")},
    before={PATH: b"x"},
)


@pytest.mark.parametrize("record", [COMPACTION, REBUILD, REWRITE])
def test_a_record_reads_back(record: Any) -> None:
    assert decode(type(record), encode(record), "the/path") == record


def changed(record: Any, *steps: Any, value: Any) -> bytes:
    document = json.loads(encode(record))
    place = document
    for step in steps[:-1]:
        place = place[step]
    place[steps[-1]] = value
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("record", "steps", "value", "message"),
    [
        (COMPACTION, ("job",), 3, "field job should be a string, found 3"),
        (COMPACTION, ("job",), None, "field job should be a string, found None"),
        (COMPACTION, ("epoch",), -1, "field epoch should be a whole number from 0 to "),
        (COMPACTION, ("epoch",), True, "field epoch should be a whole number from 0 to "),
        (COMPACTION, ("token",), 2**64, "field token should be a whole number from 0 to "),
        (COMPACTION, ("merged",), {}, "field merged should be a list, found {}"),
        (COMPACTION, ("more",), 1, "field more should be absent: this release does not know it"),
        (
            COMPACTION,
            ("merged", 1, "inputs", 0, "path"),
            "../x",
            "field merged[1].inputs[0].path should be a path below the checkpoint URL",
        ),
        (
            COMPACTION,
            ("merged", 0, "inputs", 0),
            "/x",
            "field merged[0].inputs[0] should be a path below the checkpoint URL",
        ),
        (COMPACTION, ("merged", 0), {"operator": "o"}, "field merged[0] should be an object with"),
        (COMPACTION, ("version",), 2, "an object of version 2: this release knows version 1"),
        (COMPACTION, ("version",), None, "an object of version None"),
        (REBUILD, ("objects",), {}, "should be a valid ChangeRecord"),
        (REBUILD, ("head",), {"epoch": "3"}, "field head.epoch should be a whole number"),
        (REWRITE, ("before",), {str(PATH): "?"}, "should be Base64, found '?'"),
        (REWRITE, ("before",), {"../x": ""}, "should be a path below the checkpoint URL"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_names_of_object_and_field(
    record: Any, steps: tuple[Any, ...], value: Any, message: str
) -> None:
    with pytest.raises(FormatError) as refused:
        decode(type(record), changed(record, *steps, value=value), "the/path")
    assert message in refused.value.message
    assert refused.value.facts["path"] == "the/path"
    assert refused.value.next_step


@pytest.mark.parametrize("field", json.loads(encode(COMPACTION)))
def test_no_field_of_a_record_may_be_missing(field: str) -> None:
    document = json.loads(encode(COMPACTION))
    del document[field]
    with pytest.raises(FormatError, match=field):
        decode(CompactionRecord, json.dumps(document).encode(), "p")


def test_a_choice_is_one_of_the_known_ones() -> None:
    document = {**plain_values(CompactionSettings()), "policy": "none"}
    with pytest.raises(FormatError, match="field policy should be one of bin-pack, "):
        value_from_json(CompactionSettings, document)


def test_what_a_reader_would_refuse_is_not_written() -> None:
    with pytest.raises(InputError, match="field token should be a whole number"):
        encode(replace(REWRITE, token=-1))


def test_a_record_that_would_be_read_as_another_one_is_not_written() -> None:
    nothing = MergedRows(**OF, inputs=(), outputs=())  # as JSON like a merge of pairs
    with pytest.raises(InputError, match="would be read as another one"):
        encode(replace(COMPACTION, merged=(nothing,)))
