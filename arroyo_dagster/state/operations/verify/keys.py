"""Read keys for `verify`: keys that several subtasks wrote, and the hash that routed the rows."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

import pyarrow.compute as pc

from arroyo_dagster.errors import FormatError, InputError, NotFoundError
from arroyo_dagster.state.codec.hashing.ahash import HashVariant
from arroyo_dagster.state.codec.hashing.routing import key_hashes
from arroyo_dagster.state.codec.parquet import decoding, open_pages
from arroyo_dagster.state.model.ids import OperatorId, StatePath, TableName
from arroyo_dagster.state.model.layout import parse_data_file
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, TableConfig
from arroyo_dagster.state.planning.verify.files import ListedFile
from arroyo_dagster.state.planning.verify.restore import SharedKeys
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.forms import columns_of
from arroyo_dagster.state.tables.global_keys import keys_of_several, open_keyed_files

_SAMPLED_FILES = 8
_SAMPLED_ROWS = 256


# ---- keys written by several subtasks ------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedEpoch:
    """The files that several subtasks wrote in one epoch of a global keyed table.

    Attributes:
        directory: of the epoch and the operator.
        files: by subtask, ascending.
    """

    operator: OperatorId
    table: TableName
    directory: StatePath
    files: Mapping[int, Sequence[StatePath]]

    @property
    def paths(self) -> Iterator[StatePath]:
        """All files."""
        return itertools.chain.from_iterable(self.files.values())


def keyed_epochs(
    operator: OperatorId, config: TableConfig, files: Iterable[StatePath]
) -> list[KeyedEpoch]:
    """Return the epochs of a global keyed table in which several subtasks wrote.

    Args:
        files: the readable files of the table.
    """
    groups: dict[StatePath, dict[int, list[StatePath]]] = {}
    for path in files:
        subtask = parse_data_file(path, config.table)
        if subtask is not None and path.parent is not None:
            groups.setdefault(path.parent, {}).setdefault(subtask, []).append(path)
    return [
        KeyedEpoch(
            operator=operator,
            table=config.table,
            directory=directory,
            files={subtask: by_subtask[subtask] for subtask in sorted(by_subtask)},
        )
        for directory, by_subtask in groups.items()
        if len(by_subtask) > 1
    ]


def find_shared_keys(store: ObjectStore, epoch: KeyedEpoch) -> SharedKeys | None:
    """Find keys that several subtasks wrote in one epoch; None if there are none.

    The keys of the epoch are in memory.

    Raises:
        StorageError: the store failed.
    """
    subtasks = list(epoch.files)
    with ExitStack() as opened:
        try:
            groups = [list(open_keyed_files(store, epoch.files[subtask])) for subtask in subtasks]
            for file in itertools.chain(*groups):
                opened.enter_context(closing(file.data))
            shared = keys_of_several(groups)
        except (FormatError, NotFoundError):
            return None  # it was deleted or changed since it was checked
    if shared is None:
        return None
    return SharedKeys(
        operator=epoch.operator,
        table=epoch.table,
        directory=epoch.directory,
        keys=shared.keys,
        differ=shared.differ,
        subtasks=tuple(subtasks[place] for place in shared.groups),
    )


# ---- the hash ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Votes:
    """How many sampled rows agree with each variant of the hash."""

    rows: Counter[HashVariant] = field(default_factory=Counter)

    @property
    def winner(self) -> HashVariant | None:
        """The variant that most rows agree with; None in case of a tie."""
        best = self.rows.most_common(2)
        if not best or (len(best) > 1 and best[0][1] == best[1][1]):
            return None
        return best[0][0]


def find_variant(store: ObjectStore, files: Iterable[ListedFile]) -> HashVariant:
    """Find the hash that produced most routing keys of a few files; the official one in case of a
    tie.

    Unlike `find_hash_variant` it skips damaged files, because the result is used to judge them.

    Raises:
        StorageError: the store failed.
    """
    votes = _Votes()
    hashed = [file for file in files if _hashed_by(file)]
    for file in hashed[:_SAMPLED_FILES]:
        try:
            with store.open_input(file.path) as source, decoding(file.path):
                batch = next(open_pages(source).iter_batches(_SAMPLED_ROWS), None)
            if batch is not None and columns_of(batch.schema) in file.forms:
                indices = _hashed_by(file)
                stored = batch.column(batch.num_columns - 2)
                for variant in HashVariant:
                    columns = [batch.column(index) for index in indices]
                    hashes = key_hashes(columns, batch.num_rows, variant=variant)
                    votes.rows[variant] += pc.sum(pc.equal(hashes, stored)).as_py() or 0
        except (FormatError, NotFoundError, InputError):
            continue
        if votes.winner is not None:
            return votes.winner
    return HashVariant.FALLBACK


def _hashed_by(file: ListedFile) -> tuple[int, ...]:
    config = file.config.config
    return config.schema.hashed_indices if isinstance(config, ExpiringTimeKeyConfig) else ()
