"""Messages between processes: what arrives is what was sent, and a lost chunk is an error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.cli.common import error_json
from arroyo_dagster.errors import FormatError, LeaseHeldError, StorageError
from arroyo_dagster.state import (
    CompactionSettings,
    Epoch,
    OperatorId,
    Retention,
    StatePath,
    TableName,
)
from arroyo_dagster.state.codec.derived import plain_values, value_from_json
from arroyo_dagster.state.codec.messages import error_from_json, join_documents, split_document
from arroyo_dagster.state.model.compaction import Budget, MergeOrder
from tests.formats import MergedPairs, MergedRows, MergeOutcome, RowsDigest, SortOrder, TimeFile

DOCUMENTS = st.dictionaries(st.text(), st.text() | st.integers() | st.lists(st.text()))


@given(st.lists(DOCUMENTS, max_size=3))
def test_documents_arrive_as_they_were_sent(documents: list[dict[str, Any]]) -> None:
    messages: list[Any] = [{"of": "another"}, "text"]
    for document in documents:
        messages.extend(split_document(document))
    assert list(join_documents(messages)) == documents


def test_a_large_document_goes_in_short_lines_and_a_lost_one_is_an_error() -> None:
    paths = [f"job/checkpoints/{number * 7_919 % 99_991:x}" for number in range(20_000)]
    messages = list(split_document({"paths": paths}))
    assert len(messages) > 2
    assert max(len(json.dumps(one)) for one in messages) < 9_000
    for lost in range(len(messages)):
        with pytest.raises(FormatError, match="missing"):
            list(join_documents(messages[:lost] + messages[lost + 1 :]))


def _outcome(merged: MergedPairs | MergedRows) -> MergeOutcome:
    return MergeOutcome(
        merged=merged,
        rows_in=5,
        rows_out=4,
        dropped={"expired": 1},
        before=RowsDigest(4, 2**63),
        input_rows={StatePath("a/b"): 5},
    )


FILE = TimeFile(
    epoch=Epoch(3),
    path=StatePath("a/b"),
    min_routing_key=0,
    max_routing_key=2**64 - 1,
    max_timestamp_micros=1,
)
NAMES: Mapping[str, Any] = {"operator": OperatorId("sum"), "table": TableName("t")}


@pytest.mark.parametrize(
    "value",
    [
        CompactionSettings(
            sort=SortOrder.KEY, window_micros=5, budget=Budget(files=3, order=MergeOrder.LISTED)
        ),
        Retention(keep_epochs=3),
        Retention(keep_micros=10**15),
        _outcome(MergedPairs(**NAMES, inputs=(StatePath("a/b"),), outputs=(StatePath("a/c"),))),
        _outcome(MergedRows(**NAMES, inputs=(FILE,), outputs=(FILE,))),
        _outcome(MergedRows(**NAMES, inputs=(FILE,), outputs=())),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_are_the_same_on_the_other_side(value: Any) -> None:
    document = json.loads(json.dumps(plain_values(value)))
    assert value_from_json(type(value), document) == value


@pytest.mark.parametrize(
    "document",
    [{"keep_epochs": "3"}, {"keep_epochs": 0}, {"keep": 3}, {}, ["keep_epochs"], "keep_epochs"],
    ids=str,
)
def test_what_is_no_such_value_is_refused(document: Any) -> None:
    with pytest.raises(FormatError, match="not a Retention"):
        value_from_json(Retention, document)


def test_an_error_has_its_class_and_its_facts_on_the_other_side() -> None:
    for error in (
        LeaseHeldError("leased", owner="a", pid=5, until="12:00Z"),
        StorageError("full", path=StatePath("a/b"), retryable=False, next_step="empty it"),
    ):
        found = error_from_json(json.loads(json.dumps(error_json(error))))
        assert type(found) is type(error)
        assert (str(found), found.retryable) == (str(error), error.retryable)
    unknown = error_from_json({**error_json(error), "type": "SystemExit"})
    assert type(unknown).__name__ == "ArroyoStateError"
