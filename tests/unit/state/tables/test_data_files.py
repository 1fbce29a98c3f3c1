"""Data files that are opened again, and reads in chunks."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pytest

from arroyo_dagster.errors import NotFoundError
from arroyo_dagster.state.model.compaction import CompactionPolicy, CompactionSettings, SortOrder
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.keys import KeyRange
from arroyo_dagster.state.model.tables import ExpiringTimeKeyFiles
from arroyo_dagster.state.operations.compaction.job import run_compaction
from arroyo_dagster.state.operations.query.state import open_state
from arroyo_dagster.state.planning.compaction import plan
from arroyo_dagster.state.planning.restore.reads import ALL_KEYS
from arroyo_dagster.state.storage import MemoryStore
from arroyo_dagster.state.storage.remote.open import open_store
from arroyo_dagster.state.storage.store import open_by_ranges
from arroyo_dagster.state.storage.wrappers import Wrapper
from arroyo_dagster.state.tables import data_files, time_files
from arroyo_dagster.state.tables.data_files import FooterCache
from arroyo_dagster.state.tables.expiring_time_key import timestamp_table_config
from arroyo_dagster.state.tables.time_files import ReadRequest, TimeFileReader
from tests.fabricated import OPERATOR, PATHS, publish, stored_rows
from tests.fabricated import time_files as written_files

T = TypeVar("T")
SCHEMA = pa.schema(
    [("key", pa.int64()), ("a", pa.string()), pa.field("_timestamp", pa.timestamp("ns"), False)]
)
CONFIG = timestamp_table_config("t", retention_micros=10**15, schema=SCHEMA, keys=["key"])


class Counting(Wrapper):
    """Counts the requests that a remote store would get."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.calls: Counter[str] = Counter()

    def open_input(self, path: StatePath) -> Any:
        info = self.head(path)
        if info is None:
            raise NotFoundError("there is no such object", path=path)
        assert info.size_bytes is not None
        return open_by_ranges(self, path, info.size_bytes)

    def _call(self, verb: str, path: str, action: Callable[[], T], data: bytes = b"") -> T:
        self.calls[verb] += 1
        return action()


def rows_of(seed: int, count: int = 3000) -> pa.Table:
    chance = np.random.default_rng(seed)
    keys = chance.integers(0, 500, count)
    return pa.table(
        [keys, pa.array([f"{seed}-{at}" for at in range(count)]), np.arange(count) * 1000],
        schema=SCHEMA,
    )


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """A job of five epochs, compacted by key into row groups of few rows."""
    monkeypatch.setattr(data_files, "WHOLE_BYTES", 1)
    monkeypatch.setattr(plan, "_KEYED_ROWS", 400)
    found = MemoryStore()
    files = written_files(found, CONFIG, (stored_rows(CONFIG, rows_of(at)) for at in range(5)), 2)
    publish(found, [(CONFIG, ExpiringTimeKeyFiles(files=files))])
    settings = CompactionSettings(policy=CompactionPolicy.FULL, sort=SortOrder.KEY)
    assert run_compaction(found, PATHS, settings).changed
    return found


def test_a_cache_keeps_the_last_footers_and_travels_without_them(store: MemoryStore) -> None:
    paths = [one.path for one in store.list() if "/table-" in one.path]
    counting = Counting(store)
    cache = FooterCache(counting, 2)
    for path in (*paths[:3], paths[2], paths[1]):
        cache.open(path)
    assert counting.calls["head"] == 3
    cache.open(paths[0])
    assert counting.calls["head"] == 4
    copy = pickle.loads(pickle.dumps(FooterCache(open_store("/tmp"), 2)))
    assert isinstance(copy, FooterCache)


@pytest.mark.parametrize("chunk_bytes", [1, 3000, 1 << 23])
@pytest.mark.parametrize("keys", [ALL_KEYS, KeyRange(2**62, 2**63)])
def test_chunks_hold_the_rows_of_a_read(
    chunk_bytes: int, keys: KeyRange, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_files, "CHUNK_BYTES", chunk_bytes)
    table = open_state(store).job(PATHS.root).epoch().table(OPERATOR, "t")
    listed = table.scan.operator.tables[table.scan.name].files  # type: ignore[union-attr]
    reader = TimeFileReader(CONFIG.config, store, FooterCache(store))
    for columns in ((0, 1, 2), (1,)):
        part = ReadRequest(keys=keys, columns=columns, batches=True)
        whole = pa.concat_tables([one.rows for one in reader.read(listed, part)])
        chunks = list(reader.chunks(listed, part))
        assert pa.concat_tables([one.rows for one in chunks]).equals(whole)
        assert all(one.batches is not None for one in chunks)
        assert (len(chunks) <= len(listed)) == (chunk_bytes == 1 << 23)
