"""What the product computes of bytes and names alone, computed once for all schedules.

Schedules of one past read the same objects over and over. Every function here gives the same
value for the same arguments whatever the store holds and whoever asks: no rule of the collectors
is among them, and values are never changed by whoever gets them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

from arroyo_dagster.state import JobPaths, StatePath
from arroyo_dagster.state.codec import gc as collecting
from arroyo_dagster.state.codec import references
from arroyo_dagster.state.model import aliases, ids
from arroyo_dagster.state.operations.gc import inventory as inventory
from arroyo_dagster.state.operations.gc import quarantine, undelete
from arroyo_dagster.state.operations.gc import root_reader as roots_read
from arroyo_dagster.state.planning.gc import dead_jobs, epoch_roots, expiry, orphans
from tests.formats import maintenance_records, metadata, objects, records

MOST = 50_000

DECODERS = (
    (metadata, "decoded"),
    (references, "decoded"),
    (records, "decode_current_generation"),
    (records, "decode_generation_manifest"),
    (records, "decode_epoch_record"),
    (records, "decode_committed_marker"),
    (maintenance_records, "decode_compaction_record"),
    (records, "decode_commit_note"),
    (collecting, "decode_pins"),
)
NAMES = (
    *((one, "object_name") for one in (inventory, orphans, expiry, dead_jobs)),
    *((one, "object_name") for one in (quarantine, undelete)),
    (ids, "path_error"),
    (aliases, "_number"),
    (roots_read, "digest_of"),
)
PLACES = (
    *("generation_manifest", "epoch_record", "manifest", "committed", "checkpoint"),
    *("operator_metadata", "legacy_metadata", "subtask_metadata", "checkpoints"),
)


def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, asked once for the same arguments. What it raises is not remembered."""
    return functools.lru_cache(maxsize=MOST)(function)


class _Packed:
    """`Packed.of_paths` of the files that one object lists."""

    def __init__(self) -> None:
        self._packed = remembered(objects.Packed.of_paths)

    def of_paths(self, paths: Iterable[StatePath]) -> objects.Packed:
        return self._packed(tuple(paths))  # type: ignore[no-any-return]


def _unpacked(pack: tuple[Any, ...]) -> list[objects.StoredObject]:
    paths, *others = pack
    nothing = [None] * len(paths)
    return [*map(objects.StoredObject, paths, *(column or nothing for column in others))]


@contextlib.contextmanager
def remembering() -> Iterator[None]:
    """While it lasts nothing is decoded or taken apart twice, and nothing is compressed."""
    with contextlib.ExitStack() as stack:

        def instead(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        for owner, name in (*DECODERS, *NAMES, *((JobPaths, place) for place in PLACES)):
            instead(owner, name, remembered(getattr(owner, name)))
        instead(objects, "_pack_columns", lambda *columns: columns)
        instead(objects, "_paths_in", lambda pack: pack[0])
        instead(objects, "_unpacked", _unpacked)
        instead(epoch_roots, "Packed", _Packed())
        yield
