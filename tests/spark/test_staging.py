"""Streaming sources of Spark landed in files: every record once, whatever dies when."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster.dataflow.topics.cells import Shape
from arroyo_dagster.dataflow.topics.records import RECORDS
from arroyo_dagster.errors import ProtocolError, StorageError
from arroyo_dagster.spark.engine.connectors.queries import SparkStream
from arroyo_dagster.spark.engine.dataflow.topics import TopicRecords
from arroyo_dagster.spark.engine.staging import StagedSource, Staging, staged_batches
from arroyo_dagster.state import StatePath, open_store

DATA = Path(__file__).parents[1] / "compat" / "data"
DIRECTORY = StatePath("landed/words")


def staged_rows(store: Any, directory: StatePath) -> list[StatePath]:
    """The files of rows that are staged."""
    return [one.path for one in store.list(directory) if one.path.endswith(".parquet")]


class Place:
    """A folder of JSON lines that Spark reads, and where its records land."""

    def __init__(self, session: Any, root: Path) -> None:
        self.session = session
        self.root = root
        self.input = root / "in"
        self.input.mkdir()
        self.store = open_store(str(root / "out"))
        self.stream = SparkStream(
            name="words",
            format="json",
            options={"path": str(self.input), "maxFilesPerTrigger": "1"},
            schema="word string, count long, at timestamp",
        )

    def write(self, name: str, *words: str) -> None:
        lines = [json.dumps({"word": word, "count": at}) for at, word in enumerate(words)]
        (self.input / name).write_text("\n".join(lines) + "\n")

    def stage(self, log: str = "log", store: Any = None) -> None:
        frame = self.stream.frame(self.session)
        staging = Staging(
            "words",
            store or self.store,
            DIRECTORY,
            TopicRecords(Shape().from_row),
            str(self.root / log),
        )
        query = staging.start(frame, follow=False)
        query.awaitTermination()

    @property
    def source(self) -> StagedSource:
        return StagedSource("words", self.store, DIRECTORY, RECORDS)

    def words(self, start: dict[str, Any] | None = None) -> list[str]:
        source = self.source
        begin = start or source.initial_offset()
        end = source.latest_offset(begin)
        batches = [batch for one in source.partitions(begin, end) for batch in source.read(one)]
        return [json.loads(row["value"])["word"] for batch in batches for row in batch.to_pylist()]


@pytest.fixture
def place(session: Any, tmp_path: Path) -> Place:
    return Place(session, tmp_path)


def test_records_are_numbered_in_the_order_they_are_read_in(place: Place) -> None:
    for name in "abc":
        place.write(f"{name}.json", *"xyz")
    place.stage()
    source = place.source
    end = source.latest_offset(source.initial_offset())
    batches = [
        batch
        for one in source.partitions(source.initial_offset(), end)
        for batch in source.read(one)
    ]
    offsets = [offset for batch in batches for offset in batch["offset"].to_pylist()]
    assert len(offsets) == 9
    assert offsets == sorted(set(offsets))


class FailsOnce:
    """A store whose first creation of a list fails: before it happens, or behind it."""

    def __init__(self, inner: Any, *, behind: bool) -> None:
        self._inner, self._behind, self._failed = inner, behind, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create(self, path: StatePath, data: bytes) -> bool:
        if self._failed or not path.endswith(".json"):
            return bool(self._inner.create(path, data))
        self._failed = True
        if self._behind:
            self._inner.create(path, data)
        raise StorageError("lost", path=path)

    def __reduce__(self) -> Any:
        return (lambda inner: inner), (self._inner,)  # workers only put


@pytest.mark.parametrize("behind", [False, True], ids=["not-written", "answer-lost"])
def test_a_batch_whose_list_failed_lands_once_when_it_is_repeated(
    place: Place, behind: bool
) -> None:
    place.write("a.json", "to", "be")
    with pytest.raises(Exception, match="lost"):
        place.stage(store=FailsOnce(place.store, behind=behind))
    place.write("b.json", "or")
    place.stage()
    assert sorted(place.words()) == ["be", "or", "to"]


def test_another_log_of_spark_is_refused_and_nothing_is_taken_for_landed(place: Place) -> None:
    place.write("a.json", "to")
    place.stage()
    place.write("b.json", "be")
    with pytest.raises(Exception, match="not the log that its records were staged with"):
        place.stage(log="recreated")
    place.stage()
    assert place.words() == ["to", "be"]


def test_an_older_copy_of_the_log_is_refused_as_its_batches_would_not_be_read(place: Place) -> None:
    place.write("a.json", "to")
    place.stage()
    shutil.copytree(place.root / "log", place.root / "backup")
    place.write("b.json", "be")
    place.stage()
    source = place.source
    taken = source.latest_offset(source.initial_offset())
    source.forget(taken)
    place.write("c.json", "or")
    with pytest.raises(Exception, match="older than the rows that were staged"):
        place.stage(log="backup")
    place.stage()
    assert place.words(taken) == ["or"]


def test_rows_that_were_taken_are_not_kept_and_no_batch_comes_twice(place: Place) -> None:
    place.write("a.json", "to")
    place.stage()
    source = place.source
    taken = source.latest_offset(source.initial_offset())
    source.forget(taken)
    source.forget(taken)
    assert staged_rows(place.store, DIRECTORY) == []
    assert source.latest_offset(taken) == taken
    with pytest.raises(ProtocolError, match="are missing"):
        place.words()
    place.write("b.json", "be")
    place.stage()
    assert place.words(taken) == ["be"]
    source.forget(source.latest_offset(taken))
    assert staged_batches(place.store, DIRECTORY) == [1]


def test_a_topic_that_an_earlier_release_staged_is_read(tmp_path: Path) -> None:
    with tarfile.open(DATA / "staged-0.1.0.tar.gz") as file:
        file.extractall(tmp_path, filter="data")
    store = open_store(str(tmp_path))
    source = StagedSource("words", store, DIRECTORY, RECORDS)
    start = source.initial_offset()
    end = source.latest_offset(start)
    assert end == {"batch": 1}
    rows = [row for one in source.partitions(start, end) for row in source.read(one)]
    words = [json.loads(value)["word"] for batch in rows for value in batch["value"].to_pylist()]
    assert words == ["to", "be", "or"]


def test_records_of_kafka_keep_key_partition_offset_and_time() -> None:
    records = TopicRecords(Shape().from_row)
    rows = pa.table(
        {
            "key": pa.array([b"k", None], pa.binary()),
            "value": pa.array([b"{}", b"[]"], pa.binary()),
            "topic": ["t", "t"],
            "partition": pa.array([4, 4], pa.int32()),
            "offset": pa.array([17, 18], pa.int64()),
            "timestamp": pa.array([1_500, 2_500], pa.timestamp("us", "UTC")),
            "timestampType": pa.array([0, 0], pa.int32()),
        }
    )
    (first, second) = records(rows, 0, 0).to_pylist()
    assert (first["key"], first["partition"], first["offset"]) == (b"k", 4, 17)
    assert (second["key"], second["value"]) == (None, b"[]")
    assert first["timestamp"].microsecond == 1000
