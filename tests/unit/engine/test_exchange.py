"""Rows between subtasks: to the owner of their key, exactly, in an order every run repeats."""

from __future__ import annotations

import pyarrow as pa
import pytest

from arroyo_dagster.engine import Pipeline, TableSource
from arroyo_dagster.engine.exchange import (
    CHUNK_ROWS,
    WATERMARK,
    latest_micros,
    read_split,
    rechunk,
    source_chunks,
)
from arroyo_dagster.engine.pipeline import Edge
from arroyo_dagster.engine.task import advanced, watermark_of
from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state import OperatorId
from tests.jobs import CountWords, KeepWords, words


def edge(*keys: str) -> Edge:
    return Edge(0, OperatorId("a"), OperatorId("b"), 0, keys or None)


def test_batches_are_cut_the_same_wherever_a_pipeline_runs() -> None:
    table = pa.table({"n": range(CHUNK_ROWS + 10)})
    pieces = [table.slice(0, 7), table.slice(7)]
    for tables in ([table], pieces):
        batches = rechunk(tables, table.schema)
        assert [batch.num_rows for batch in batches] == [CHUNK_ROWS, 10]
    assert rechunk([], table.schema) == []
    with pytest.raises(FormatError, match="different schemas"):
        rechunk([table], pa.schema([("m", pa.int64())]))


def two_sources() -> Pipeline:
    pipeline = Pipeline("p", parallelism=2)
    streams = [
        pipeline.source(
            name, TableSource(words(4), rows_per_epoch=2), timestamp="at", lateness_micros=late
        ).key_by("word")
        for name, late in (("a", 0), ("b", 10))
    ]
    pipeline.apply("both", KeepWords(), streams)
    streams[0].apply("one", CountWords())
    return pipeline


def test_the_event_time_of_a_split_reaches_every_subtask_even_without_rows() -> None:
    pipeline = two_sources()
    node = next(iter(pipeline.sources.values()))
    batches = list(read_split(node, node.source.partitions({"row": 0}, {"row": 2})[0]))
    chunks = list(source_chunks(pipeline, node, batches, 0))
    marks = {chunk.subtask: chunk.payload for chunk in chunks if chunk.edge == WATERMARK}
    latest = latest_micros(batches)
    assert marks == {0: f"{latest}:a".encode(), 1: f"{latest}:a".encode()}
    empty = list(source_chunks(pipeline, node, [], 1))
    assert [(chunk.subtask, chunk.payload) for chunk in empty] == [(0, b""), (1, b"")]


def test_a_watermark_waits_for_every_source_and_never_goes_back() -> None:
    pipeline = two_sources()
    a, b, both, one = (OperatorId(name) for name in ("a", "b", "both", "one"))
    marks = advanced(pipeline, {}, {"a": 50})
    assert marks == {a: 50, b: None}
    assert watermark_of(pipeline, both, marks) is None
    assert watermark_of(pipeline, one, marks) == 50
    marks = advanced(pipeline, marks, {"a": 40, "b": 45})
    assert marks == {a: 50, b: 35}
    assert watermark_of(pipeline, both, marks) == 35
    assert advanced(pipeline, marks, {"b": 5}) == marks


def test_rows_without_event_time_or_of_another_schema_are_refused() -> None:
    rows = words(2)
    node = next(iter(two_sources().sources.values()))
    node.source._rows = rows.set_column(1, "at", pa.array([None, None], pa.timestamp("us")))  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="2 rows have no event time"):
        list(read_split(node, node.source.partitions({"row": 0}, {"row": 2})[0]))
    node.source._rows = rows.select(["word"])  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="another schema"):
        list(read_split(node, node.source.partitions({"row": 0}, {"row": 2})[0]))
