"""Find the orphans of one job with Spark's workers, which list and classify one directory each.

The driver reads the metadata that refers to data files, and sends the references to all workers.
The workers return only the orphans. They apply the same rule as in process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from arroyo_dagster.spark.tasks import run_items
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.garbage import GcPlan
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.objects import NOTHING, Packed
from arroyo_dagster.state.model.progress import OnProgress, Progress, no_progress
from arroyo_dagster.state.operations.gc.inventory import (
    Inventory,
    directories_of,
    list_job,
    read_listed,
)
from arroyo_dagster.state.operations.gc.plan import GcRequest, needed_answer
from arroyo_dagster.state.operations.gc.root_reader import NO_EPOCH
from arroyo_dagster.state.operations.gc.roots import newest_root
from arroyo_dagster.state.operations.progress import timed
from arroyo_dagster.state.planning.gc.orphans import (
    ClassifiedObjects,
    OrphanRules,
    judge_below,
    plan_orphans,
    standing_of,
)
from arroyo_dagster.state.planning.gc.reachability import check_aliases, refuse
from arroyo_dagster.state.storage.store import ObjectStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class _Place:
    """The job whose directories workers list."""

    store: ObjectStore
    paths: JobPaths
    newest: Epoch


def plan_orphans_on_spark(
    session: Callable[[], SparkSession],
    store: ObjectStore,
    paths: JobPaths,
    asked: GcRequest,
    *,
    now_micros: int | None = None,
    on_progress: OnProgress = no_progress,
) -> GcPlan:
    """Plan a gc of orphans as `plan_gc`; the driver holds references and orphans, not all objects.

    Each directory is listed twice: first for its metadata and, after that was read, for orphans.
    Objects that are written in between are too young to be deleted.

    Args:
        session: returns the session.
        store: the store of the job; workers must be able to open it too.
        paths: the paths of the job.
        asked: the request of the gc.
        now_micros: the current time, in epoch microseconds; None = the clock.
        progress: called with the numbers of listed objects and read roots.

    Raises:
        ProtocolError, FormatError, NotFoundError, ConflictError, InputError: as in `plan_gc`.
    """
    now = wall_clock() if now_micros is None else now_micros
    on_progress = timed(on_progress)
    before = asked.answer(paths)
    newest = newest_root(store, paths)
    if newest is None:
        raise refuse(NO_EPOCH, paths)
    directories = directories_of(store, paths)
    ones = [1] * len(directories)
    place = _Place(store, paths, newest.epoch)
    beside = list_beside(store, paths, newest.epoch, directories)
    parts = (
        run_items(session(), partial(_inventory, place), directories, ones, store=store)
        if directories
        else []
    )
    inventory = _joined([beside, *parts])
    on_progress(Progress(step="listed objects", done=inventory.listed))
    roots = read_listed(store, inventory, on_progress)
    check_aliases(roots, inventory.foreign, inventory.metadata)
    answer = needed_answer(asked, roots, before)
    standing = standing_of(
        roots,
        inventory.metadata,
        now_micros=now,
        grace_micros=asked.grace_micros,
        answer=answer,
        in_parts=True,
    )
    judged = run_items(session(), partial(_judged, place, standing), directories, ones, store=store)
    return plan_orphans(
        standing,
        judged,
        inventory.metadata,
        inventory.foreign,
        listed=inventory.listed,
        answer=answer,
    )


def list_beside(
    store: ObjectStore, paths: JobPaths, newest: Epoch, directories: list[StatePath]
) -> Inventory:
    """List the objects outside of these directories, level by level; none can be an orphan."""
    levels = {paths.root, paths.generations, paths.checkpoints()}
    for path in directories:
        while (parent := path.parent) is not None and parent not in levels:
            levels.add(parent)
            path = parent

    class Levels:
        """A listing of only these levels."""

        def list(self, prefix: str) -> object:
            for level in sorted(
                level for level in levels if f"{level}/".startswith(f"{paths.root}/")
            ):
                yield from store.list_dir(level).objects

    return list_job(Levels(), paths, newest)  # type: ignore[arg-type]


def _inventory(place: _Place, directory: StatePath) -> Inventory:
    """Return the inventory of one directory, with the number of its files instead of the files."""
    found = list_job(place.store, place.paths, place.newest, below=directory)
    return replace(found, files=NOTHING, beside=len(found.files))


def _joined(parts: list[Inventory]) -> Inventory:
    return replace(
        parts[0],
        metadata=Packed.joined(part.metadata for part in parts),
        maintenance=Packed.joined(part.maintenance for part in parts),
        foreign=Packed.joined(part.foreign for part in parts),
        beside=sum(part.beside for part in parts),
    )


def _judged(place: _Place, standing: OrphanRules, directory: StatePath) -> ClassifiedObjects:
    found = list_job(place.store, place.paths, place.newest, below=directory)
    return judge_below(standing, f"{directory}/", found.files)
