"""Reads keys for `verify`: those that several subtasks wrote, and by which hash rows are routed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.errors import FormatError, InputError, NotFoundError
from arroyo_dagster.state.codec.hashing import HashVariant, key_hashes
from arroyo_dagster.state.codec.parquet import decoding
from arroyo_dagster.state.local.health import columns_of
from arroyo_dagster.state.local.verify_rows import BATCH_ROWS, opened
from arroyo_dagster.state.model.ids import OperatorId, StatePath, TableName
from arroyo_dagster.state.model.layout import parse_data_file
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, TableConfig
from arroyo_dagster.state.planning.verify_files import ListedFile
from arroyo_dagster.state.planning.verify_restore import SharedKeys
from arroyo_dagster.state.storage.store import ObjectStore

_SAMPLED_FILES = 8
_SAMPLED_ROWS = 256
_DIGEST_BYTES = 12


# ---- keys written by several subtasks ------------------------------------------------------------


def find_shared_keys(
    store: ObjectStore, operator: OperatorId, config: TableConfig, files: Iterable[StatePath]
) -> list[SharedKeys]:
    """Find keys that several subtasks wrote in one epoch of a global keyed table.

    Only keys of one epoch are in memory at a time, as digests. Files that cannot be read are left
    out; other findings tell them.

    Raises:
        StorageError: the store failed.
    """
    groups: dict[StatePath, dict[int, list[StatePath]]] = {}
    for path in files:
        subtask = parse_data_file(path, config.table)
        if subtask is not None and path.parent is not None:
            groups.setdefault(path.parent, {}).setdefault(subtask, []).append(path)
    found = (
        _shared(store, operator, config.table, directory, by_subtask)
        for directory, by_subtask in groups.items()
        if len(by_subtask) > 1
    )
    return [one for one in found if one is not None]


def _shared(
    store: ObjectStore,
    operator: OperatorId,
    table: TableName,
    directory: StatePath,
    by_subtask: dict[int, list[StatePath]],
) -> SharedKeys | None:
    first: dict[bytes, tuple[int, bytes]] = {}
    shared: dict[bytes, bool] = {}
    writers: set[int] = set()
    example = ""
    for subtask, paths in by_subtask.items():
        for key, second in _pairs_of(store, paths):
            digest = blake2b(key, digest_size=_DIGEST_BYTES).digest()
            said = blake2b(second, digest_size=_DIGEST_BYTES).digest()
            before, earlier = first.setdefault(digest, (subtask, said))
            if before != subtask:
                example = example or key.hex()
                shared[digest] = shared.get(digest, False) or earlier != said
                writers |= {before, subtask}
    if not shared:
        return None
    return SharedKeys(
        operator=operator,
        table=table,
        directory=directory,
        keys=len(shared),
        differ=sum(shared.values()),
        example=example,
        subtasks=tuple(sorted(writers)),
    )


def _pairs_of(store: ObjectStore, paths: Iterable[StatePath]) -> Iterator[tuple[bytes, bytes]]:
    """The keys of files, each with its value, or with the operation that removes it."""
    for path in paths:
        try:
            with store.open_input(path) as source, decoding(path):
                for batch in opened(source).iter_batches(batch_size=BATCH_ROWS):
                    if batch.num_columns > 1 and batch.schema.types[:2] == [pa.binary()] * 2:
                        columns = (batch.column(at).to_pylist() for at in (0, 1))
                        yield from zip(*columns, strict=True)
        except (FormatError, NotFoundError):
            continue


# ---- the hash ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Votes:
    """How many sampled rows each variant of the hash explains."""

    rows: Counter[HashVariant] = field(default_factory=Counter)

    @property
    def winner(self) -> HashVariant | None:
        """The one that explains most; None while two are level."""
        best = self.rows.most_common(2)
        if not best or (len(best) > 1 and best[0][1] == best[1][1]):
            return None
        return best[0][0]


def find_variant(store: ObjectStore, files: Iterable[ListedFile]) -> HashVariant:
    """Find the hash that most routing keys of a few files were made by; the official one if level.

    Unlike `find_hash_variant` it does not mind a file that is damaged: those are judged by it.

    Raises:
        StorageError: the store failed.
    """
    votes = _Votes()
    hashed = [file for file in files if _hashed_by(file)]
    for file in hashed[:_SAMPLED_FILES]:
        try:
            with store.open_input(file.path) as source, decoding(file.path):
                batch = next(opened(source).iter_batches(batch_size=_SAMPLED_ROWS), None)
            if batch is not None and columns_of(batch.schema) in file.forms:
                _vote(votes, batch, _hashed_by(file))
        except (FormatError, NotFoundError, InputError):
            continue
        if votes.winner is not None:
            return votes.winner
    return HashVariant.FALLBACK


def _hashed_by(file: ListedFile) -> tuple[int, ...]:
    config = file.config.config
    return config.schema.hashed_indices if isinstance(config, ExpiringTimeKeyConfig) else ()


def _vote(votes: _Votes, batch: pa.RecordBatch, indices: tuple[int, ...]) -> None:
    stored = batch.column(batch.num_columns - 2)
    for variant in HashVariant:
        columns = [batch.column(index) for index in indices]
        found = key_hashes(columns, batch.num_rows, variant=variant)
        votes.rows[variant] += pc.sum(pc.equal(found, stored)).as_py() or 0
