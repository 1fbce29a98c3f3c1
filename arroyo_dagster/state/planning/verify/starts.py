"""From which epoch an epoch goes on, as its metadata shows it.

Source: crates/arroyo-state/src/tables/table_manager.rs (arroyo-state.md 1.5 and 9.4).
"""

from __future__ import annotations

import enum
from collections.abc import Collection

from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import is_rewritten, written_epoch
from arroyo_dagster.state.model.tables import ExpiringTimeKeyFiles, GlobalKeyedFiles


class Origin(enum.Enum):
    """What an epoch goes on from."""

    BEFORE = "the epoch of the number before"
    EMPTY = "nothing: it is the first of a run that was started without state"
    UNKNOWN = "unknown"


def origin_of(before: Checkpoint, now: Checkpoint, unlisted: Collection[StatePath] = ()) -> Origin:
    """Return what `now` goes on from; `before` is the epoch of the number before.

    In the protocol layout the metadata names the epoch. In the legacy layout a worker without state
    numbers the directories of its files from 1, any other from the epoch that it goes on from.

    Args:
        unlisted: files of `now` that an edit took from its lists.
    """
    if now.worker_generation is not None:
        return Origin.BEFORE if now.parent_ref == before.ref else Origin.UNKNOWN
    if now.progress is not None:
        return Origin.BEFORE  # a managed job always goes on from what is there
    if now.start_time_micros < before.finish_time_micros:
        # One checkpoint at a time (9.1): another run wrote `before` since, or a clock was set.
        return Origin.UNKNOWN
    prior = set(before.paths)
    # An edit of `now` writes its files into the directory of the epoch.
    written = {path for path in (*now.paths, *unlisted) if path in prior or not is_rewritten(path)}
    directories = {written_epoch(path) for path in written}
    if directories - {1}:
        return Origin.UNKNOWN if _is_of_another_run(before, written) else Origin.BEFORE
    return Origin.EMPTY if _has_own_files(before, now) else Origin.UNKNOWN


def _is_of_another_run(before: Checkpoint, written: Collection[StatePath]) -> bool:
    """Return whether an epoch cannot go on from the one before: directories never count down.

    An older run that still writes may overwrite the metadata of an epoch of its successor.
    """
    prior = {path for path in before.paths if not is_rewritten(path)}
    newest = max(filter(None, map(written_epoch, prior)), default=0)
    later = any((written_epoch(path) or newest) >= newest for path in written)
    return prior.isdisjoint(written) and not later


def _has_own_files(before: Checkpoint, now: Checkpoint) -> bool:
    """Return whether an Arroyo job wrote some listed file for this very epoch.

    Global keyed tables are written at every epoch. A name that is used again has other bounds.
    """
    tables = [files for operator in now.operators for files in operator.tables.values()]
    if any(isinstance(files, GlobalKeyedFiles) and files.files for files in tables):
        return True
    past = [files for operator in before.operators for files in operator.tables.values()]
    old = {file for one in past if isinstance(one, ExpiringTimeKeyFiles) for file in one.files}
    return any(
        file not in old
        for table in tables
        if isinstance(table, ExpiringTimeKeyFiles)
        for file in table.files
    )
