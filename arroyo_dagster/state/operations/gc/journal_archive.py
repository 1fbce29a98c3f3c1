"""Archive runs of the journal that ended long ago in one file, since journals are kept for ever.

A run consists of a few small objects. Once dozens of runs have ended, they are written as one
Parquet file, which is read back; only then are their own objects deleted. If that is interrupted at
any point, every run still exists and none counts twice: an archived run is not read from its
directory.
"""

from __future__ import annotations

from collections.abc import Sequence

from arroyo_dagster.errors import FormatError, NotFoundError
from arroyo_dagster.state.codec.journal import (
    ArchivedRun,
    archived_runs,
    decode_archive,
    encode_archive,
)
from arroyo_dagster.state.codec.records import known_fields
from arroyo_dagster.state.metadata.expiry import delete_all
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.operations.gc.journal import ARCHIVE, archives_of
from arroyo_dagster.state.operations.gc.journal_chain import (
    END,
    PLAN,
    RUNS_INSPECTED,
    batch_name,
    batches_by_name,
    decode_batch,
)
from arroyo_dagster.state.operations.gc.journal_check import check_archived
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import Listing, ObjectStore

ARCHIVE_AFTER = 64
"""How many ended runs, besides the newest, are worth an archive file."""

AT_ONCE = 2 * ARCHIVE_AFTER
"""The maximum number of runs in an archive file."""

MOST_OBJECTS = 5_000
"""Runs of more objects are not archived."""


def archive_runs(held: ObjectStore, paths: JobPaths, listed: Listing) -> int:
    """Archive the oldest runs, if there are many.

    Args:
        held: the store, under the lease.
        listed: the journal's directory, one level.

    Returns:
        How many runs were archived.

    Raises:
        FormatError: an archive does not decode, or reads back different; nothing was deleted.
    """
    waiting = sorted(listed.prefixes)[:-RUNS_INSPECTED]
    if len(waiting) < ARCHIVE_AFTER:
        return 0
    archives = archives_of(info.path for info in listed.objects)
    known = {run.name for path in archives for run in archived_runs(held.read(path), path)}
    _remove(held, [path for path in waiting if path.name in known])
    fresh = [path for path in waiting if path.name not in known]
    done = 0
    for at in range(0, len(fresh), AT_ONCE):
        read = concurrently(lambda path: _ended(held, path), fresh[at : at + AT_ONCE])
        ended = [run for run in read if run is not None]
        if len(ended) >= ARCHIVE_AFTER:
            _write(held, paths, ended)
            _remove(held, [paths.journal / run.name for run in ended])
            done += len(ended)
    return done


def _ended(store: ObjectStore, directory: StatePath) -> ArchivedRun | None:
    """Read a run; None if it is too large, has not ended, or is damaged."""
    try:
        plan = store.read(directory / PLAN)
        with known_fields(plan, directory / PLAN) as fields:
            if fields.number("objects") > MOST_OBJECTS:
                return None
        end = store.read(directory / END)
        batches = dict(batches_by_name(store, directory))
        # Batches are numbered without a gap, so an incomplete listing hides none.
        if list(batches) != list(range(1, len(batches) + 1)):
            return None
        decoded = [
            decode_batch(data, directory / batch_name(number)) for number, data in batches.items()
        ]
    except (NotFoundError, FormatError):
        return None
    run = ArchivedRun(
        name=directory.name,
        plan=plan.decode(),
        end=end.decode(),
        lines=tuple((at, *line) for at, part, _ in decoded for line in part),
    )
    # A changed run stays in place, as evidence.
    return None if check_archived(run, directory) else run


def _write(held: ObjectStore, paths: JobPaths, runs: list[ArchivedRun]) -> None:
    data = encode_archive(runs)
    path = paths.journal / f"{runs[0].name}--{runs[-1].name}{ARCHIVE}"
    held.put(path, data)
    if decode_archive(held.read(path), path) != runs:
        raise FormatError(
            "an archive of the journal reads back different from what was written",
            path=path,
            next_step="keep it and report it; nothing of the journal was deleted",
        )


def _remove(held: ObjectStore, directories: Sequence[StatePath]) -> None:
    found = concurrently(lambda path: held.list_dir(path).objects, directories)
    # The plan is deleted last: it shows that more objects of the run may exist.
    objects = [info.path for level in found for info in level]
    delete_all(held, sorted(objects, key=lambda path: path.name == PLAN))
