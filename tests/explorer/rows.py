"""What data files hold in a world: rows of a key and a number each, written as text.

An edit reads and writes rows. What does that is replaced here, the rest of it is the product's.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import pyarrow as pa

from arroyo_dagster.state import (
    Checkpoint,
    Epoch,
    HashEvidence,
    HashVariant,
    JobPaths,
    KeyRange,
    OperatorCheckpoint,
    StatePath,
    TableConfig,
    TableName,
    codec_for,
    default_catalogue,
    server_for_hash,
)
from arroyo_dagster.state.model.compaction import RowsMerge
from arroyo_dagster.state.model.types import STRING, Primitive
from arroyo_dagster.state.operations.compaction.rewrite_preconditions import check_restorable
from arroyo_dagster.state.operations.restore import revision
from arroyo_dagster.state.operations.surgery import execute as edit_module
from arroyo_dagster.state.operations.surgery import fork, rescale, transfer
from arroyo_dagster.state.operations.surgery import rows as edited_rows
from arroyo_dagster.state.operations.surgery.entries import GlobalTable, PairFile, changed_entries
from arroyo_dagster.state.operations.surgery.managed import entries as managed_entries
from arroyo_dagster.state.operations.surgery.managed import plan as managed_plan
from arroyo_dagster.state.operations.surgery.managed import rows as managed_rows
from arroyo_dagster.state.operations.surgery.managed.entries import MovedSources
from arroyo_dagster.state.operations.surgery.rebuild import operator as rebuilt_operator
from arroyo_dagster.state.operations.surgery.rows import expiring_tables
from arroyo_dagster.state.planning.verify.checks import StoredFile
from arroyo_dagster.state.tables.last_writes import PairColumns
from arroyo_dagster.state.tables.merge.conditions import KeyRows, RowCondition
from tests.formats import MergedRows, MergeOutcome, RewriteShard, RowsDigest, SetOffsets, TimeFile

STEP = 10
"""How far event time moves with an epoch."""

KEYS = "ab"
STAYS = "c"
"""The key of rows that no edit removes."""

_TEXT, _NUMBER = codec_for(STRING), codec_for(Primitive("i64"))


def row(key: str, number: int) -> str:
    return f"{key}={number}"


def encoded(rows: Iterable[str]) -> bytes:
    return " ".join(sorted(set(rows))).encode()


def rows_in(data: bytes) -> list[str]:
    """The rows of a file; of a file that is none of a world, none."""
    return [one for one in data.decode().split() if "=" in one]


def key_of(one: str) -> str:
    return one.partition("=")[0]


def is_old(one: str) -> bool:
    """Whether an edit takes a row for old: those of even numbers."""
    return int(one.partition("=")[2]) % 2 == 0


_SPREAD = 0x9E3779B97F4A7C15
_ROWS_OF_AN_EPOCH = 64
_EPOCHS = 1000


def numbers_of(job: str, run: int, epoch: int, keys: KeyRange, count: int) -> list[int]:
    """The numbers of rows that a subtask of an Arroyo job writes: their hashes are in its range,
    they tell their epoch, and no other run or job gives them. Those of every other epoch are old.
    """
    first = ((zlib.crc32(job.encode()) % 1000) * 1000 + run) * _EPOCHS + epoch
    tried = range(_ROWS_OF_AN_EPOCH * first, _ROWS_OF_AN_EPOCH * (first + 1))
    mine = (one for one in tried if keys.start <= one * _SPREAD % 2**64 <= keys.end)
    return [2 * one + epoch // 2 % 2 for one in itertools.islice(mine, count)]


def hash_of(one: str) -> int:
    """The routing key of a row of an Arroyo job."""
    return int(one.partition("=")[2]) // 2 * _SPREAD % 2**64


def epoch_of(one: str) -> int:
    """The epoch in which a row of an Arroyo job was written."""
    return int(one.partition("=")[2]) // (2 * _ROWS_OF_AN_EPOCH) % _EPOCHS


def goes(condition: RowCondition | None, one: str) -> bool:
    """Whether an edit removes a row."""
    if condition is None:
        return False
    if isinstance(condition, KeyRows):
        return key_of(one) == condition.values[0].as_py()
    return is_old(one)


def merged(store: Any, files: Iterable[TimeFile | StatePath]) -> set[str]:
    """The rows of several files."""
    paths = [one.path if isinstance(one, TimeFile) else one for one in files]
    return {one for path in paths for one in rows_in(store.read(path))}


def rewritten(store: Any, tasks: Iterable[Any]) -> Iterator[RewriteShard]:
    """The product's `rewrite_here`, of such rows."""
    for task in tasks:
        rows = {
            one
            for one in merged(store, task.inputs)
            if task.keys.start <= hash_of(one) <= task.keys.end and not goes(task.removes, one)
        }
        outputs: tuple[TimeFile, ...] = ()
        if rows:
            path = task.output()
            store.put(path, encoded(rows))
            new = TimeFile(
                epoch=max(one.file.epoch for one in task.table.inputs),
                path=path,
                min_routing_key=task.keys.start,
                max_routing_key=task.keys.end,
                max_timestamp_micros=max(file.max_timestamp_micros for file in task.inputs),
                compaction_generation=task.table.compaction_generation,
            )
            outputs = (new,)
        done = MergedRows(
            operator=task.table.operator,
            table=task.table.table,
            inputs=task.inputs,
            outputs=outputs,
        )
        yield RewriteShard(merged=done, rows_in=1, rows_out=1)


# ---- what an edit reads and writes ---------------------------------------------------------------


def _count(store: Any, config: Any, file: TimeFile, condition: RowCondition) -> tuple[int, int]:
    rows = rows_in(store.read(file.path))
    return len(rows), sum(goes(condition, one) for one in rows)


def _merge(
    table: Any,
    store: Any,
    merge: RowsMerge,
    name: Callable[..., StatePath],
    removes: RowCondition | None = None,
) -> MergeOutcome:
    (file,) = merge.inputs
    before = rows_in(store.read(file.path))
    rows = [one for one in before if not goes(removes, one)]
    outputs: tuple[TimeFile, ...] = ()
    if rows:
        path = name(merge.ranges[0], "")
        store.put(path, encoded(rows))
        outputs = (
            TimeFile(
                epoch=file.epoch,
                path=path,
                min_routing_key=file.min_routing_key,
                max_routing_key=file.max_routing_key,
                max_timestamp_micros=file.max_timestamp_micros,
                compaction_generation=merge.level,
            ),
        )
    done = MergedRows(
        operator=merge.operator, table=merge.table, inputs=merge.inputs, outputs=outputs
    )
    dropped = {"removed": len(before) - len(rows)}
    return MergeOutcome(merged=done, rows_in=len(before), rows_out=len(rows), dropped=dropped)


def _pairs(data: bytes) -> list[tuple[bytes, bytes]]:
    split = (one.partition("=") for one in rows_in(data))
    return [(_TEXT.encode(key), _NUMBER.encode(int(number))) for key, _, number in split]


def _of_pairs(keys: Iterable[bytes], seconds: Iterable[bytes], *_: Any, version: int) -> bytes:
    decoded = zip(map(_TEXT.decode, keys), map(_NUMBER.decode, seconds), strict=True)
    return encoded(row(key, number) for key, number in decoded)


def _columns(data: bytes, path: StatePath) -> PairColumns:
    found = _pairs(data)
    keys, values = ([pair[at] for pair in found] for at in (0, 1))
    columns = (pa.chunked_array([pa.array(one, pa.binary())]) for one in (keys, values))
    return PairColumns(*columns, version=0, removals=False)


def _of_columns(keys: Any, seconds: Any, *schema: Any, version: int) -> bytes:
    return _of_pairs(keys.to_pylist(), seconds.to_pylist(), version=version)


def _entries(
    store: Any,
    operator: OperatorCheckpoint,
    name: TableName,
    wanted: Collection[bytes] | None = None,
) -> GlobalTable:
    files, config = operator.tables[name].paths, operator.configs[name]
    found: dict[bytes, bytes] = {}
    for path in files:
        found.update(_pairs(store.read(path)))
    kept = {key: one for key, one in found.items() if wanted is None or key in wanted}
    form = default_catalogue().form_of(operator.operator, config, _versioned(kept))
    file = (PairFile(files[-1], tuple(kept.items()), 0),) if files else ()
    return GlobalTable(operator, name, config, file, form)


def _moved_sources(store: Any, checkpoint: Checkpoint, edit: SetOffsets) -> MovedSources:
    """As if table `g` of an operator were the positions of a source."""
    (position,) = edit.positions
    (table,) = (
        _entries(store, one, TableName("g"))
        for one in checkpoint.operators
        if one.operator == edit.operator and TableName("g") in one.tables
    )
    changed = changed_entries(
        table,
        lambda key, value: value + int(position.position) if key == position.partition else value,
    )
    assert checkpoint.progress is not None
    return (changed,), checkpoint.progress.offsets, (), ()


def _loaded(store: Any, checkpoint: Checkpoint, parallelism: int | None) -> dict[Any, RowsDigest]:
    """`rescale.loaded_rows`, of such rows."""
    found = {}
    for table in expiring_tables(checkpoint):
        subtasks = parallelism or table.operator.parallelism
        rows = [
            one
            for subtask in range(subtasks)
            for file in table.files.files
            if subtask in file.owners(subtasks)
            for one in rows_in(store.read(file.path))
            if subtask == server_for_hash(hash_of(one), subtasks)
        ]
        digests = (zlib.crc32(one.encode()) for one in rows)
        found[table.key] = RowsDigest(rows=len(rows), hash_sum=sum(digests) % 2**64)
    return found


def _check_restorable(store: Any, paths: JobPaths, epoch: Epoch, level: int) -> None:
    """The product's, of files without footers."""
    check_restorable(store, paths, epoch, 0)


def _stored(store: Any, path: StatePath) -> StoredFile | None:
    """`read_stored_file`, of such rows."""
    if store.head(path) is None:
        return None
    rows = rows_in(store.read(path))
    hashes = [hash_of(one) for one in rows]
    return StoredFile(
        size_bytes=1,
        rows=len(rows),
        min_routing_key=min(hashes, default=None),
        max_routing_key=max(hashes, default=None),
        max_timestamp_micros=max((epoch_of(one) * STEP for one in rows), default=None),
    )


def _versioned(found: Mapping[bytes, bytes]) -> dict[bytes, tuple[int, bytes]]:
    return {key: (0, value) for key, value in found.items()}


@contextlib.contextmanager
def replaced_rows() -> Iterator[None]:
    """While it lasts, edits read and write such rows."""
    replaced = (
        (edited_rows, "count_rows", _count),
        (edit_module, "count_rows", _count),
        (managed_rows, "count_stored", _count),
        (managed_rows, "merge_rows", _merge),
        (managed_rows, "decode_pair_columns", _columns),
        (managed_rows, "encode_pair_columns", _of_columns),
        (managed_entries, "read_entries", _entries),
        (managed_plan, "moved_sources", _moved_sources),
        (revision, "encode_pairs", _of_pairs),
        (rebuilt_operator, "read_stored_file", _stored),
        (rescale, "loaded_rows", _loaded),
        (rescale, "read_global_tables", lambda *_: []),
        (rescale, "why_one_parallelism", lambda *_: None),
        (fork, "why_one_parallelism", lambda *_: None),
        (transfer, "check_restorable", _check_restorable),
        (transfer, "read_global_tables", lambda *_: []),
        (transfer, "find_hash_variant", lambda *_: HashEvidence(possible=tuple(HashVariant))),
    )
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def keys_of(config: TableConfig) -> str:
    """The keys of a table's rows; those of a commit in two phases are no user's."""
    return STAYS if config.uses_two_phase_commit else KEYS
