"""What the subtasks of an Arroyo job load at a restore, by the specification.

It shares no code with what it judges.

Source: arroyo-state.md 4.3 and 5.4.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.explorer.rows import epoch_of, hash_of, rows_in
from tests.explorer.world import Objects
from tests.formats import state_pb2 as pb

PARALLELISMS = (1, 2, 3)
STEP = 10
_KEYS = 2**64

Loaded = Counter[tuple[str, int, str]]
"""How often each row is loaded: by table, subtask and row."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of an expiring table, as it is listed, and its rows."""

    least: int
    most: int
    newest: int
    rows: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OperatorState:
    """One operator at one epoch, with the rows of the files that it lists.

    Attributes:
        snapshots: the rows of each file of a global keyed table, by table.
        files: of each expiring table, with how long its rows are kept.
        commits: the tables of a sink that commits in two phases.
    """

    operator: str
    epoch: int
    watermark: int | None
    parallelism: int
    snapshots: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]
    files: tuple[tuple[str, int, tuple[File, ...]], ...]
    commits: frozenset[str] = frozenset()

    def has_expired(self, row: str) -> bool:
        """Whether no restore loads a row any more."""
        oldest = min((retention for _, retention, _ in self.files), default=0)
        return self.watermark is not None and epoch_of(row) * STEP < self.watermark - oldest

    def loaded(self, parallelism: int | None = None) -> Loaded:
        """Return what each subtask loads.

        Args:
            parallelism: None = the operator's own.
        """
        return Counter(self._loaded(parallelism or self.parallelism))

    def _loaded(self, parallelism: int) -> Iterator[tuple[str, int, str]]:
        for subtask in range(parallelism):
            for table, snapshots in self.snapshots:
                for rows in snapshots:
                    yield from ((table, subtask, one) for one in rows)
            first, last = _range(subtask, parallelism)
            for table, retention, files in self.files:
                cutoff = 0 if self.watermark is None else max(0, self.watermark - retention)
                for file in files:
                    if file.newest < cutoff or file.most < first or last < file.least:
                        continue
                    inside = first <= file.least and file.most <= last
                    for one in file.rows:
                        if epoch_of(one) * STEP < cutoff:
                            continue
                        if inside or first <= hash_of(one) <= last:
                            yield table, subtask, one


@functools.cache
def _range(subtask: int, parallelism: int) -> tuple[int, int]:
    """The first and the last key of a subtask (arroyo-state.md 7)."""
    size = (_KEYS - 1) // parallelism + 1
    last = _KEYS - 1 if subtask == parallelism - 1 else size * (subtask + 1) - 1
    return size * subtask, last


def states_of(objects: Any, data: bytes, *, whole: bool) -> list[OperatorState] | None:
    """The operators of a manifest (`whole`), or the one of a metadata object; None if a file that
    one lists is missing.
    """
    operators: Iterable[Any] = (
        pb.CheckpointManifest.FromString(data).operators
        if whole
        else [pb.OperatorCheckpointMetadata.FromString(data)]
    )
    found = [_state(objects, one) for one in operators]
    return None if None in found else [one for one in found if one is not None]


def _state(objects: Any, operator: Any) -> OperatorState | None:
    about = operator.operator_metadata
    snapshots, expiring, commits = [], [], set()
    for name, table in sorted(operator.table_checkpoint_metadata.items()):
        if table.table_type == pb.GLOBAL_KEY_VALUE:
            listed = pb.GlobalKeyedTableTaskCheckpointMetadata.FromString(table.data).files
            rows = [_rows(objects, path) for path in listed]
            if None in rows:
                return None
            snapshots.append((name, tuple(one for one in rows if one is not None)))
            if pb.GlobalKeyedTableConfig.FromString(
                operator.table_configs[name].config
            ).uses_two_phase_commit:
                commits.add(name)
            continue
        config = pb.ExpiringKeyedTimeTableConfig.FromString(operator.table_configs[name].config)
        files = []
        for one in pb.ExpiringKeyedTimeTableCheckpointMetadata.FromString(table.data).files:
            held = _rows(objects, one.file)
            if held is None:
                return None
            files.append(
                File(one.min_routing_key, one.max_routing_key, one.max_timestamp_micros, held)
            )
        expiring.append((name, config.retention_micros, tuple(files)))
    return OperatorState(
        operator=about.operator_id,
        epoch=about.epoch,
        watermark=about.min_watermark if about.HasField("min_watermark") else None,
        parallelism=about.parallelism,
        snapshots=tuple(snapshots),
        files=tuple(expiring),
        commits=frozenset(commits),
    )


def _rows(objects: Objects, path: str) -> tuple[str, ...] | None:
    found = objects.get(path)
    return None if found is None else tuple(rows_in(found[0]))
