"""The last write of each key: against a plain dict, for any files and however bad the hash."""

from __future__ import annotations

import numpy as np
import pytest

from arroyo_dagster.state import (
    GlobalKeyedTable,
    MemoryStore,
    OperatorId,
    StatePath,
    TableName,
    global_table_config,
)
from arroyo_dagster.state.codec.digest import value_codes
from arroyo_dagster.state.model.compaction import PairsMerge
from arroyo_dagster.state.tables.merge.pairs import merge_pairs
from tests.fabricated import pair_files


def test_merge_of_keys_that_share_a_hash_counts_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read again then: their rows count once, and progress is told once."""
    store, config = MemoryStore(), global_table_config("g", key=bytes, value=bytes)
    epochs: list[tuple[dict[bytes, bytes | None], int]] = [
        ({b"a": b"1", b"b": b"2"}, 0),
        ({b"c": b"3"}, 0),
        ({b"a": b"4"}, 0),
    ]
    files = pair_files(store, config, epochs)
    merge = PairsMerge(
        operator=OperatorId("o"),
        table=TableName("g"),
        inputs=files,
        size_bytes=3,
        sizes=(1, 1, 1),
        from_oldest=True,
    )
    told: list[int] = []
    monkeypatch.setattr(
        "arroyo_dagster.state.tables.last_writes.value_codes",
        lambda values, rows=None: value_codes(values, rows) % np.uint64(1),
    )
    done = merge_pairs(config, store, merge, lambda end: StatePath(f"new{end}"), told.append)
    assert done.input_rows == dict(zip(files, (2, 1, 1), strict=True))
    assert (done.rows_in, done.rows_out, done.dropped) == (4, 3, {"older writes of a key": 1})
    assert told == [1, 1, 1]
    kept = GlobalKeyedTable(config, store).load(done.merged.output_paths)  # type: ignore[arg-type]
    assert kept == {b"a": b"4", b"b": b"2", b"c": b"3"}
