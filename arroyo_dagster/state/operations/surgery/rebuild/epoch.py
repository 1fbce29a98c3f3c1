"""An epoch as its rebuilt metadata would describe it, and refusals that both layouts share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from arroyo_dagster.errors import InputError, ProtocolError
from arroyo_dagster.state.model.changes import ChangeKind, JobHead, is_change_of
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import Epoch, OperatorId, StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.surgery.rebuild import RebuiltTable
from arroyo_dagster.state.operations.gc.pins import read_pins
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.storage.wrappers import Extended


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuiltEpoch:
    """An epoch as it would be; attributes as of `RebuildPlan`."""

    checkpoint: Checkpoint
    before: Mapping[StatePath, bytes | None]
    after: Mapping[StatePath, bytes]
    source: Mapping[OperatorId, Epoch]
    tables: tuple[RebuiltTable, ...]
    doubts: tuple[str, ...]
    unlisted: tuple[StatePath, ...]
    head: JobHead

    def over(self, store: ObjectStore) -> ObjectStore:
        """Return the store with the rebuilt objects, which cannot be written through it.

        It looks the same before they are written and afterwards.
        """
        return Extended(store, self.after)


def managed_job(paths: JobPaths) -> InputError:
    """Return the error of a job that this package writes."""
    return InputError(
        "this is a managed job",
        job=paths.root,
        next_step="go back to an older epoch with `arroyo-state rollback`",
    )


def nothing_lost(paths: JobPaths, epoch: Epoch) -> InputError:
    """Return the error of an epoch whose metadata can be read."""
    return InputError(
        "no metadata of the epoch is missing or damaged",
        job=paths.root,
        epoch=epoch,
        next_step="check it with `arroyo-state verify`, or name another one: `rebuild JOB EPOCH`",
    )


def check_not_rewritten(store: ObjectStore, paths: JobPaths, epoch: Epoch) -> None:
    """Refuse an epoch that was edited or compacted in place: its lists are not Arroyo's.

    Raises:
        ProtocolError: a record of such a change exists.
    """
    listed = [info.path for info in store.list_dir(paths.changes).objects]
    pinned = [paths.changes / name for name in read_pins(store, paths).changes]
    in_place = (ChangeKind.COMPACTION, ChangeKind.EDIT)
    for path in (*listed, *pinned):
        if any(is_change_of(paths, path, kind, epoch) for kind in in_place):
            raise ProtocolError(
                "the epoch was edited or compacted in place, so that its lists cannot be known "
                "from names",
                job=paths.root,
                epoch=epoch,
                path=path,
                next_step="the record beside it has the original metadata; nothing was changed",
            )
