"""Find routing keys that have a large share of a table's rows. Reads one column of each file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from arroyo_dagster.errors import NotFoundError
from arroyo_dagster.state.codec.parquet import decoding, open_pages
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.tables import KEY_HASH_COLUMN, ExpiringTimeKeyConfig
from arroyo_dagster.state.model.verify import AuditSettings
from arroyo_dagster.state.planning.verify.audit import KeyCounts, hot_key_finding
from arroyo_dagster.state.planning.verify.findings import Finding
from arroyo_dagster.state.storage.store import ObjectStore

_ROWS_AT_ONCE = 1 << 16
_KEYS_KEPT = 100_000
_RARE = 10_000

_Numbers = npt.NDArray[np.uint64]


def hot_keys(
    store: ObjectStore, paths: JobPaths, epoch: Epoch, settings: AuditSettings
) -> Iterator[Finding]:
    """Yield a finding for each table of an epoch with a hot key.

    Global tables and tables without keys have none. Files that expire meanwhile are left out.

    Raises:
        FormatError: a file does not decode.
        StorageError: the store failed.
    """
    checkpoint = ParquetBackend(store, paths).load_checkpoint_metadata(epoch)
    for operator in checkpoint.operators:
        for name, listed in operator.tables.items():
            config = operator.configs[name].config
            if isinstance(config, ExpiringTimeKeyConfig) and config.schema.hashed_indices:
                counts = _count(store, list(dict.fromkeys(listed.paths)))
                table = f"{operator.operator}.{name}"
                finding = hot_key_finding(paths.root, table, counts, settings)
                if finding is not None:
                    yield finding


def _count(store: ObjectStore, files: Sequence[StatePath]) -> KeyCounts:
    """Count the rows of each key.

    Keys that are rare so far are dropped beyond 100,000, so memory is bounded. A key with a large
    share of the rows is never rare.
    """
    rows = most_keys = 0
    keys, counts = np.empty(0, np.uint64), np.empty(0, np.uint64)
    for path in files:
        for hashes in _hashes(store, path):
            rows += len(hashes)
            new, amounts = np.unique(hashes, return_counts=True)
            keys, place = np.unique(np.concatenate([keys, new]), return_inverse=True)
            together = np.concatenate([counts, amounts.astype(np.uint64)])
            counts = np.bincount(place, weights=together).astype(np.uint64)
            most_keys = max(most_keys, len(keys))
            if len(keys) > _KEYS_KEPT:
                kept = counts * _RARE >= rows
                keys, counts = keys[kept], counts[kept]
    return KeyCounts(rows=rows, keys=most_keys, most=int(counts.max(initial=0)))


def _hashes(store: ObjectStore, path: StatePath) -> Iterator[_Numbers]:
    try:
        source = store.open_input(path)
    except NotFoundError:
        return
    with source, decoding(path):
        file = open_pages(source)
        if KEY_HASH_COLUMN not in file.schema_arrow.names:
            return
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=[KEY_HASH_COLUMN]):
            yield batch.column(0).to_numpy(zero_copy_only=False)
