"""Sinks of topics: each record once, whatever fails between an epoch and its commit."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arroyo_dagster.dataflow.definition.types import ScalarType
from arroyo_dagster.dataflow.storage.boundary import SINK_SCHEMA
from arroyo_dagster.dataflow.topics import segments
from arroyo_dagster.dataflow.topics.cells import JsonLines, Shape
from arroyo_dagster.dataflow.topics.segments import SegmentSource
from arroyo_dagster.dataflow.topics.sinks import (
    AppendSink,
    KeptSink,
    LinesFolderSink,
    ParquetFolderSink,
    PrintSink,
)
from arroyo_dagster.engine import (
    Collector,
    Operator,
    OperatorContext,
    Pipeline,
    Sink,
    TableSource,
    run_pipeline,
)
from arroyo_dagster.errors import FormatError, InputError, ProtocolError, StorageError
from arroyo_dagster.state import MemoryStore, StatePath
from tests.faulty_stores import Before, Crash, FaultInjecting
from tests.reading import read_on, records
from tests.stories import outcome, run_story, write_story

COUNT = 9
LINES = [b'{"n":%d}' % n for n in range(COUNT)]
OBJECT = Shape(fields={"n": ScalarType.U32, "tags": None})


class Out(Operator):
    """Records as a service puts them out."""

    output_schema = SINK_SCHEMA

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        collector.collect(batch.select(SINK_SCHEMA.names))


def job(sink: Sink, values: list[bytes] = LINES, *, rows_per_epoch: int = 2, **options: Any) -> Any:
    count = len(values)
    columns = [
        pa.array([b"k"] * count, pa.binary()),
        pa.array(values, pa.binary()),
        pa.array(range(count), pa.timestamp("ms")),
    ]
    rows = pa.table(columns, SINK_SCHEMA)
    pipeline = Pipeline("s.d", "writer", **options)
    source = TableSource(rows, rows_per_epoch=rows_per_epoch)
    stream = pipeline.source("topics", source, timestamp="timestamp").apply("out", Out())
    stream.sink("sink", sink)
    return pipeline


def appended(path: Path, **options: Any) -> AppendSink:
    return AppendSink("counts", str(path), options.get("writer", JsonLines("counts")))


@pytest.mark.parametrize("mode", ["before", "after", "partial"])
def test_a_fault_anywhere_leaves_each_line_once_in_order(tmp_path: Path, mode: Any) -> None:
    counted = FaultInjecting(MemoryStore())
    run_pipeline(job(appended(tmp_path / "plain"), LINES[:4]), counted)
    assert (tmp_path / "plain").read_bytes() == b"".join(line + b"\n" for line in LINES[:4])
    for at in range(1, counted.changes + 1):
        store, path = MemoryStore(), tmp_path / f"{at}"
        with pytest.raises(Crash):
            run_pipeline(
                job(appended(path), LINES[:4]),
                FaultInjecting(store, fail_at=at, mode=mode, crash=True),
            )
        run_pipeline(job(appended(path), LINES[:4]), store)
        assert path.read_bytes() == (tmp_path / "plain").read_bytes(), at


class Torn(AppendSink):
    """Is killed within the commit of its second epoch."""

    def _write(self, start: int, content: bytes) -> None:
        if start == 0:
            super()._write(start, content)
            return
        with open(self._path, "ab") as file:
            file.write(content[: self.at])
        raise Crash("killed within a write")

    at = 0


def test_a_write_that_stops_anywhere_within_the_file_is_finished(tmp_path: Path) -> None:
    whole = b"".join(line + b"\n" for line in LINES)
    for at in range(0, len(whole) // 4, 2):
        store, path = MemoryStore(), tmp_path / str(at)
        torn = Torn("counts", str(path), JsonLines("counts"))
        torn.at = at
        with pytest.raises(Crash):
            run_pipeline(job(torn), store)
        run_pipeline(job(appended(path)), store)
        assert path.read_bytes() == whole, at


def test_what_somebody_else_wrote_into_the_file_stops_the_job(tmp_path: Path) -> None:
    store, path = MemoryStore(), tmp_path / "out"
    run_pipeline(job(appended(path)), store, max_epochs=1)
    with path.open("a") as file:
        file.write("mine\n")
    with pytest.raises(ProtocolError, match="another program") as raised:
        run_pipeline(job(appended(path)), store)
    assert (raised.value.facts["topic"], raised.value.facts["path"]) == ("counts", str(path))
    assert path.read_bytes().endswith(b"mine\n")
    path.write_bytes(path.read_bytes().removesuffix(b"mine\n"))
    run_pipeline(job(appended(path)), store)
    assert path.read_bytes().splitlines() == LINES


def test_a_file_that_got_shorter_stops_the_job(tmp_path: Path) -> None:
    store, path = MemoryStore(), tmp_path / "out"
    run_pipeline(job(appended(path)), store, max_epochs=1)
    path.write_bytes(b"")
    with pytest.raises(ProtocolError, match="has 0 bytes"):
        run_pipeline(job(appended(path)), store)


def test_a_job_does_not_begin_in_a_file_that_holds_something(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("old\n")
    with pytest.raises(InputError, match="this job wrote none of it"):
        run_pipeline(job(appended(path)), MemoryStore())
    assert path.read_text() == "old\n"
    with pytest.raises(InputError, match="folder of a sink's file"):
        appended(tmp_path / "nowhere" / "out")
    with pytest.raises(InputError, match="one subtask"):
        run_pipeline(job(appended(tmp_path / "new"), parallelism=2), MemoryStore())


def test_folders_get_a_file_an_epoch(tmp_path: Path) -> None:
    run_pipeline(
        job(LinesFolderSink("counts", f"{tmp_path}/lines", JsonLines("counts"))), MemoryStore()
    )
    files = sorted((tmp_path / "lines").glob("*.jsonl"))
    assert b"".join(file.read_bytes() for file in files).splitlines() == LINES
    assert len(files) == 5
    run_pipeline(job(ParquetFolderSink("counts", f"{tmp_path}/rows", OBJECT)), MemoryStore())
    tables = [pq.read_table(file) for file in sorted((tmp_path / "rows").glob("*.parquet"))]
    rows = pa.concat_tables(tables)
    assert rows.schema.types == [pa.uint32(), pa.string()]
    assert rows.column("n").to_pylist() == list(range(COUNT))


def test_a_value_that_does_not_fit_its_declared_type_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="declared type") as raised:
        run_pipeline(
            job(ParquetFolderSink("counts", str(tmp_path), OBJECT), [b'{"n":-1}']), MemoryStore()
        )
    assert raised.value.facts["column"] == "n"


# ---- between services ----------------------------------------------------------------------------


def between(store: Any, pipeline: Pipeline, **options: Any) -> SegmentSource:
    directory = pipeline.paths.topic("counts")
    return SegmentSource("counts", store, {"writer": directory}, **options)


@pytest.mark.parametrize("files", [1, 2, 64])
def test_another_service_reads_what_is_ready_and_only_that(files: int) -> None:
    store = MemoryStore(uuid.uuid4().hex)
    pipeline = job(KeptSink(store.url, "counts"))
    reader = between(store, pipeline, files_per_epoch=files)
    assert read_on(reader, reader.initial_offset()) == (
        [],
        {"from:writer": {"epoch": 0, "read": []}},
    )
    found: list[bytes] = []
    offset = reader.initial_offset()
    for _ in range(6):
        run_pipeline(job(KeptSink(store.url, "counts")), store, max_epochs=1)
        more, offset = read_on(between(store, pipeline, files_per_epoch=files), offset)
        found += more
    assert found == LINES
    assert (offset["from:writer"]["epoch"], len(offset["from:writer"]["read"])) == (4, 1)
    rows = records(reader, reader.initial_offset(), offset)
    assert [row["value"] for row in rows] == LINES
    assert {row["key"] for row in rows} == {b"k"}


def test_a_listing_that_fails_while_records_expire_ends_no_service() -> None:
    def unlistable(verb: str, path: str) -> None:
        if verb == "list":
            raise StorageError("the store is throttling us", path=path)

    store = MemoryStore(uuid.uuid4().hex)
    pipeline = job(KeptSink(store.url, "counts"))
    newest = run_pipeline(pipeline, store).newest
    assert newest is not None
    offset = between(store, pipeline).latest_offset(between(store, pipeline).initial_offset())
    offset["from:writer"]["epoch"] = 1000
    assert newest.progress is not None
    offsets = json.dumps({"topics": {"topics": {"counts": offset}}})
    ready = replace(newest, progress=replace(newest.progress, offsets=offsets))
    between(Before(store, unlistable), pipeline, readers={"reader"}).note("reader", ready)


def test_records_that_are_gone_are_missed() -> None:
    store = MemoryStore()
    directory = StatePath("d/writer/_arroyo_dagster/topics/counts")
    name = f"{1:07}-000-{'0' * 16}.parquet"
    store.put(directory / name, b"")
    reader = SegmentSource("counts", store, {"writer": directory})
    end = reader.latest_offset(reader.initial_offset())
    store.delete_many([directory / name])
    with pytest.raises(ProtocolError, match="are missing"):
        reader.partitions(reader.initial_offset(), end)


def test_epochs_of_several_subtasks_are_read_whichever_comes_first() -> None:
    """A commit moves its files at once: another process may see the second before the first."""
    store, directory = MemoryStore(), StatePath("d/writer/topics")
    reader = SegmentSource("counts", store, {"writer": directory})
    names = [f"{epoch:07}-{task:03}-{'a' * 16}.parquet" for epoch in (1, 2) for task in (0, 1)]
    offset, seen = reader.initial_offset(), []
    for name in (names[1], names[0], names[3], names[2]):
        store.put(directory / name, b"")
        end = reader.latest_offset(offset)
        seen += [split.path.name for split in reader.partitions(offset, end)]
        offset = json.loads(json.dumps(end))
    assert seen == [names[1], names[0], names[3], names[2]]
    assert offset == {"from:writer": {"epoch": 1, "read": sorted(names[2:])}}


def test_a_sink_is_bound_to_another_thing_and_back(tmp_path: Path, capsys: Any) -> None:
    """Each epoch of the same job goes where the topic is bound to just then."""
    store, first, second = MemoryStore(), tmp_path / "first", tmp_path / "second"
    folder = f"{tmp_path}/folder"
    for sink in (
        appended(first),
        PrintSink("counts", JsonLines("counts")),
        appended(second),
        LinesFolderSink("counts", folder, JsonLines("counts")),
        appended(first),
    ):
        run_pipeline(job(sink), store, max_epochs=1)
    assert first.read_bytes().splitlines() == [*LINES[:2], LINES[8]]
    assert capsys.readouterr().out.encode().splitlines() == LINES[2:4]
    assert second.read_bytes().splitlines() == LINES[4:6]
    (file,) = Path(folder).glob("*.jsonl")
    assert file.read_bytes().splitlines() == LINES[6:8]


@pytest.mark.parametrize("other", ["stdout", "file", "folder"])
def test_what_was_prepared_for_one_sink_is_not_committed_to_another(
    tmp_path: Path, other: str
) -> None:
    store, path = MemoryStore(), tmp_path / "out"
    torn = Torn("counts", str(path), JsonLines("counts"))
    with pytest.raises(Crash):
        run_pipeline(job(torn), store)
    sinks: dict[str, Sink] = {
        "stdout": PrintSink("counts", JsonLines("counts")),
        "file": appended(tmp_path / "another"),
        "folder": LinesFolderSink("counts", f"{tmp_path}/folder", JsonLines("counts")),
    }
    with pytest.raises(InputError, match="was prepared for a") as raised:
        run_pipeline(job(sinks[other]), store)
    assert raised.value.facts["topic"] == "counts"
    run_pipeline(job(appended(path)), store)
    assert path.read_bytes().splitlines() == LINES


def test_records_between_services_go_once_every_reader_has_taken_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trimmed, plain = MemoryStore(uuid.uuid4().hex), MemoryStore(uuid.uuid4().hex)
    for name, store, kept in (("trimmed", trimmed, 2), ("plain", plain, 1000)):
        monkeypatch.setattr(segments, "EPOCHS_KEPT", kept)
        write_story(tmp_path / name, 48, seed=4)
        run_story(store, tmp_path / name, rows_per_epoch=3)
    assert outcome(trimmed, tmp_path / "trimmed") == outcome(plain, tmp_path / "plain")

    def left(one: MemoryStore) -> int:
        return sum("/topics/" in info.path for info in one.list())

    assert left(plain) > 15
    assert 0 < left(trimmed) <= 6
