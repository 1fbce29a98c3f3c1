"""What a job has stored contradicts a declaration that its names and types allow."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.ids import OperatorId, TableName
from arroyo_dagster.state.model.layout import Layout
from arroyo_dagster.state.model.surgery.declared import DeclaredTable
from arroyo_dagster.state.operations.surgery.declared_checks import contradictions
from tests.arroyo_jobs import SECOND
from tests.evolved_jobs import Sql, sql_job

IDS = Sql().ids


def found(name: str, table: str, arguments: dict[int, pa.DataType], **more: Any) -> list[str]:
    """What the job of `sql_job` contradicts. Its aggregate 1 has kept unsigned numbers of 64 bits,
    and its bins begin at each second.
    """
    job = sql_job(Layout.PROTOCOL, "job_b")
    declared = DeclaredTable(
        operator=OperatorId(IDS[name]), table=TableName(table), source="events", **more
    )
    checkpoint = ParquetBackend(job.store, job.paths).load()
    return [str(one) for one in contradictions(job.store, checkpoint, declared, arguments)]


ARGUMENTS: dict[str, tuple[dict[int, pa.DataType], list[str]]] = {
    "as stored": ({1: pa.uint64()}, []),
    "another aggregate": ({2: pa.uint64()}, ["keeps the arguments of the aggregates at 1, not"]),
    "one too many": ({1: pa.uint64(), 2: pa.uint64()}, ["at 1, not at 1, 2"]),
    "a narrower number": ({1: pa.int32()}, ["have the type int32, and in the job 64 bits"]),
    "text": ({1: pa.string()}, ["have the type string, and in the job 64 bits"]),
    "a sign": ({1: pa.int64()}, ["are unsigned, or all are negative"]),
    "a type that is not encoded": ({1: pa.list_(pa.int64())}, ["are not encoded"]),
    "NULL": ({1: pa.null()}, ["always NULL"]),
    "two mistakes": ({3: pa.null()}, ["at 1, not at 3", "always NULL"]),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_those_that_the_job_has_kept(name: str) -> None:
    arguments, expected = ARGUMENTS[name]
    texts = found("totals", "b", arguments)
    assert len(texts) == len(expected)
    for text, part in zip(texts, expected, strict=True):
        assert text.startswith(f"tables.{IDS['totals']}.b.distinct")
        assert part in text


def test_a_slide_divides_the_starts_of_the_bins() -> None:
    assert found("window", "t", {}, every_micros=SECOND) == []
    (text,) = found("window", "t", {}, every_micros=5 * SECOND)
    assert "the job has bins that do not begin at multiples of 5 s" in text
