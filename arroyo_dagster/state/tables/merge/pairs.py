"""One merge of a global keyed table: keeps the last write of each key, including removals.

An older write is left out only if its key equals that of a newer one byte by byte. The proof is
then that the files read back hold each key once, and the rows that were the last in the inputs.
Memory grows with the number of remaining keys, as in every subtask that restores the table, and not
with the files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

import pyarrow as pa

from arroyo_dagster.errors import FormatError
from arroyo_dagster.state.codec.parquet import (
    GLOBAL_KEY_VALUE_SCHEMA,
    REMOVAL_SCHEMA,
    encode_pair_columns,
)
from arroyo_dagster.state.model.compaction import MergedPairs, MergeOutcome, PairsMerge, RowsDigest
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import REMOVED as REMOVED_SUFFIX
from arroyo_dagster.state.model.layout import compacted
from arroyo_dagster.state.model.tables import TableConfig
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.last_writes import REMOVED, LastWrites, decoded_ahead, last_writes


def merge_pairs(
    config: TableConfig,
    store: ObjectStore,
    merge: PairsMerge,
    name: Callable[[str], StatePath],
    on_bytes: Callable[[int], None] = lambda count: None,
) -> MergeOutcome:
    """Execute one merge and read its outputs back.

    Writes one file per state version, and one of removals unless the merge begins at the oldest
    file: without an older file, no removed key can reappear. If nothing remains, it writes a file
    without rows: a table that lists no file any more would look as if it had lost them.

    Args:
        name: returns a new path; its argument is the suffix of the name.
        on_bytes: called for every input with the number of its bytes that were read.

    Raises:
        FormatError: an input is broken; or an output does not read back as written.
        NotFoundError: an input no longer exists.
    """
    sizes = merge.sizes or (0,) * len(merge.inputs)
    of_file = dict(zip(merge.inputs, sizes, strict=True))
    read: dict[StatePath, int] = {}

    def on_file(path: StatePath, rows: int) -> None:
        if path not in read:
            on_bytes(of_file[path])
        read[path] = rows

    writes = last_writes(store, list(of_file.items()), on_file)
    written = _written(config, writes, name, merge)
    for path, data in written:
        store.put(path, data)
    rows_in, removals = sum(read.values()), not merge.from_oldest
    dropped = {
        "older writes of a key": rows_in - len(writes),
        "removals, applied": 0 if removals else writes.removals,
    }
    after = _read_back(store, [(path, len(data)) for path, data in written])
    return MergeOutcome(
        merged=MergedPairs(
            operator=merge.operator,
            table=merge.table,
            inputs=merge.inputs,
            outputs=tuple(path for path, _ in written),
        ),
        rows_in=rows_in,
        rows_out=after.rows,
        dropped={reason: count for reason, count in dropped.items() if count},
        size_bytes_in=merge.size_bytes,
        size_bytes_out=sum(len(data) for _, data in written),
        before=writes.digest(removals=removals),
        after=after,
        input_rows=read,
    )


def _written(
    config: TableConfig, writes: LastWrites, name: Callable[[str], StatePath], merge: PairsMerge
) -> list[tuple[StatePath, bytes]]:
    files = []
    for version, (keys, seconds) in writes.by_version().items():
        removals = version == REMOVED
        if removals and merge.from_oldest:
            continue
        data = encode_pair_columns(
            keys,
            seconds,
            REMOVAL_SCHEMA if removals else GLOBAL_KEY_VALUE_SCHEMA,
            version=config.state_version if removals else version,
        )
        suffix = REMOVED_SUFFIX if removals else ""
        files.append((name(suffix + compacted(merge.level)), data))
    if not files:
        none = pa.array([], pa.binary())
        data = encode_pair_columns(
            none, none, GLOBAL_KEY_VALUE_SCHEMA, version=config.state_version
        )
        files.append((name(compacted(merge.level)), data))
    return files


def _read_back(store: ObjectStore, files: Sequence[tuple[StatePath, int]]) -> RowsDigest:
    total = RowsDigest()
    with closing(decoded_ahead(store, files)) as decoded:
        for (path, _), pairs in zip(files, decoded, strict=True):
            if not pairs.ascending:
                raise FormatError(
                    "a merged file, read back, holds a key twice or out of order",
                    path=path,
                    next_step="keep the file and report it; nothing was published",
                )
            total += pairs.digest()
    return total
