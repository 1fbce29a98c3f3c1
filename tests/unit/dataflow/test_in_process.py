"""Services run side by side in rounds: until their sources end, until idle, until asked to stop."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster.dataflow.in_process import DataflowOptions, DataflowOutcome, run_dataflow
from arroyo_dagster.dataflow.storage.boundary import SINK_SCHEMA
from arroyo_dagster.dataflow.topics import segments
from arroyo_dagster.dataflow.topics.cells import JsonLines
from arroyo_dagster.dataflow.topics.segments import SegmentSource
from arroyo_dagster.dataflow.topics.sinks import AppendSink, KeptSink
from arroyo_dagster.engine import Collector, Operator, OperatorContext, Pipeline, TableSource
from arroyo_dagster.state import MemoryStore
from tests.stories import outcome, run_story, write_story

COUNT = 7
LINES = [b"%d" % n for n in range(COUNT)]


class Out(Operator):
    """Records as a service puts them out."""

    output_schema = SINK_SCHEMA

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        columns = [batch.column(name) for name in SINK_SCHEMA.names]
        collector.collect(pa.RecordBatch.from_arrays(columns, schema=SINK_SCHEMA))


def services(
    store: Any, out: Path, *, source: type[TableSource] = TableSource
) -> tuple[Sequence[Pipeline], Sequence[SegmentSource]]:
    """A writer of records, and a reader that puts them into a file."""
    columns = [
        pa.array([None] * COUNT, pa.binary()),
        pa.array(LINES, pa.binary()),
        pa.array(range(COUNT), pa.timestamp("ms")),
    ]
    writer, reader = Pipeline("s.d", "writer"), Pipeline("s.d", "reader")
    rows = source(pa.table(columns, SINK_SCHEMA), rows_per_epoch=2)
    stream = writer.source("topics", rows, timestamp="timestamp").apply("out", Out())
    stream.sink("sink", KeptSink(store.url, "t"))
    between = SegmentSource("t", store, {"writer": writer.paths.topic("t")})
    stream = reader.source("topics", between, timestamp="timestamp").apply("out", Out())
    stream.sink("sink", AppendSink("t", str(out), JsonLines("t")))
    return (writer, reader), (between,)


def run(store: Any, out: Path, **options: Any) -> DataflowOutcome:
    pipelines, between = services(store, out, source=options.pop("source", TableSource))
    chosen = DataflowOptions(idle_seconds=0.01, **options)
    return run_dataflow(pipelines, store, chosen, between=between)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(uuid.uuid4().hex)


def test_records_between_services_go_once_every_reader_has_taken_them(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "EPOCHS_KEPT", 2)
    plain = MemoryStore(uuid.uuid4().hex)
    for name in ("trimmed", "plain"):
        write_story(tmp_path / name, 48, seed=4)
    run_story(store, tmp_path / "trimmed", rows_per_epoch=3)
    monkeypatch.setattr(segments, "EPOCHS_KEPT", 1000)
    run_story(plain, tmp_path / "plain", rows_per_epoch=3)
    assert outcome(store, tmp_path / "trimmed") == outcome(plain, tmp_path / "plain")

    def left(one: MemoryStore) -> int:
        return sum("/topics/" in info.path for info in one.list())

    assert left(plain) > 15
    assert 0 < left(store) <= 6
