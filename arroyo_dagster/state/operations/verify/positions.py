"""Compare how far the sources of a job have read with the epoch before."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from arroyo_dagster.errors import FormatError, NotFoundError
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.operations.query.positions import counts_records, source_positions
from arroyo_dagster.state.operations.query.state import StateCatalog, StateEpoch, StateJob
from arroyo_dagster.state.planning.privacy import NOTHING_PRIVATE
from arroyo_dagster.state.planning.verify.findings import Finding
from arroyo_dagster.state.planning.verify.positions import (
    Positions,
    absurd_positions,
    position_steps,
)
from arroyo_dagster.state.planning.verify.starts import Origin, origin_of
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.known.catalogue import Catalogue


def position_findings(
    store: ObjectStore,
    paths: JobPaths,
    history: Sequence[Checkpoint],
    catalogue: Catalogue,
    *,
    edited: bool = False,
    unlisted: Collection[StatePath] = (),
) -> Iterator[Finding]:
    """Check the positions of the last epoch, and compare them with those of the epoch before.

    Tables that cannot be read are left to the findings about their files.

    Args:
        history: consecutive visible epochs, oldest first; the last is the one that is verified.
        edited: whether an edit has set the state of the last epoch.
        unlisted: the files that an edit took from its lists.

    Raises:
        StorageError: the store failed.
    """
    now = history[-1]
    new = _positions(store, paths, now, catalogue)
    yield from absurd_positions(now, new)
    if len(history) < 2 or edited or not new:
        return
    before = history[-2]
    revised = now.progress is not None and now.progress.revises == before.epoch
    if now.epoch != before.epoch + 1 or revised:
        return
    if origin_of(before, now, unlisted) is Origin.BEFORE:
        old = _positions(store, paths, before, catalogue)
        yield from position_steps(before, now, old, new)


def _positions(
    store: ObjectStore, paths: JobPaths, checkpoint: Checkpoint, catalogue: Catalogue
) -> Positions:
    job = StateJob(StateCatalog(store, NOTHING_PRIVATE, catalogue), paths)
    try:
        positions = source_positions(StateEpoch(job, checkpoint))
    except (FormatError, NotFoundError):
        return {}
    return {
        (position.operator, position.table, position.partition): position.position
        for position in positions
        if position.position is not None and counts_records(position)
    }
