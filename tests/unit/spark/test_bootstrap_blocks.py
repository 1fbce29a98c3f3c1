"""Rows of a partition are worked on in blocks of bounded size, none left out."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest

from arroyo_dagster.spark.surgery import bootstrap
from arroyo_dagster.state.operations.surgery.computed_rows import RowFacts


def test_every_row_is_in_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "_BLOCK_BYTES", 100)
    rows = pa.table({"n": range(1000)})
    seen: list[list[int]] = []

    def work(block: pa.Table) -> tuple[RowFacts, tuple[()]]:
        seen.append(block.column("n").to_pylist())
        return RowFacts(expired=block.num_rows), ()

    done = list(bootstrap._on_blocks(work, ["n"])(iter(rows.to_batches(max_chunksize=7))))
    assert [n for block in seen for n in block] == list(range(1000))
    assert max(map(len, seen)) <= 14
    results = [pickle.loads(one.column(0)[0].as_py()) for one in done]
    assert sum(facts.expired for facts, _ in results) == 1000
    assert list(bootstrap._on_blocks(work, ["n"])(iter([]))) == []
