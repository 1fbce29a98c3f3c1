"""Protects the rows of a small epoch, which the driver reads in place of the workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster.engine import Pipeline, TableSource
from arroyo_dagster.engine.pipeline_run import SourceSplit
from arroyo_dagster.errors import StorageError
from arroyo_dagster.spark.engine import worker
from arroyo_dagster.spark.engine.worker import LEFT_TO_WORKERS, MOST_SPLITS, SmallEpochs
from arroyo_dagster.state import MemoryStore
from tests.jobs import word_job


@pytest.fixture
def pipeline() -> Pipeline:
    return word_job(MemoryStore(), rows=24, parallelism=3)


def splits_of(pipeline: Pipeline) -> list[SourceSplit]:
    (name,) = pipeline.sources
    source = pipeline.sources[name].source
    start = source.initial_offset()
    found = source.partitions(start, source.latest_offset(start))
    return [SourceSplit(name, index, split) for index, split in enumerate(found)]


def fails(split: Any) -> Iterator[pa.RecordBatch]:
    raise StorageError("only workers reach it")


@pytest.mark.parametrize("reason", ["fails", "many rows", "takes long"])
def test_what_is_not_small_is_left_to_workers_for_some_epochs(
    pipeline: Pipeline, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits, small = splits_of(pipeline), SmallEpochs(pipeline)
    with monkeypatch.context() as patched:
        if reason == "fails":
            patched.setattr(TableSource, "read", lambda self, split: fails(split))
        elif reason == "many rows":
            patched.setattr(worker, "MOST_BYTES", 10)
        else:
            patched.setattr(worker, "MOST_SECONDS", -1.0)
        assert small.read(splits) is None
    assert [small.read(splits) for _ in range(LEFT_TO_WORKERS)] == [None] * LEFT_TO_WORKERS
    assert small.read(splits) is not None


def test_many_splits_are_read_by_many(pipeline: Pipeline) -> None:
    splits = splits_of(pipeline)
    assert SmallEpochs(pipeline).read(splits * MOST_SPLITS) is None
