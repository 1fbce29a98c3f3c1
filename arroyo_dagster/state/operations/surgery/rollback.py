"""Rollback of a stopped Arroyo job: its newest epoch gets the state of an older one, in place.

Tables that take part in a commit in two phases stay as they are: what the older epoch says of files
and transactions was true before they were committed.

Source: docs/decisions/rollback.md; arroyo-state.md 9.6 and 9.8.
"""

from __future__ import annotations

from collections.abc import Iterator

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.changes import ChangeKind, is_change_of
from arroyo_dagster.state.model.checkpoints import OperatorCheckpoint
from arroyo_dagster.state.model.ids import Epoch, StatePath, TableName
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.model.surgery.edits import Rollback
from arroyo_dagster.state.model.surgery.plans import EditOutcome, EditPlan
from arroyo_dagster.state.model.tables import ExpiringTimeKeyFiles
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.restore.rollback import restorable_epoch
from arroyo_dagster.state.operations.surgery.carried_files import StateSource
from arroyo_dagster.state.operations.surgery.execute import EditOptions
from arroyo_dagster.state.operations.surgery.fork import Match
from arroyo_dagster.state.operations.surgery.offsets import note_move
from arroyo_dagster.state.operations.surgery.transfer import Transfer, TransferJob, TwoJobs
from arroyo_dagster.state.operations.verify.job import known_positions
from arroyo_dagster.state.planning.restore.rollback import ranges, rollback_command
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.known.catalogue import default_catalogue


def plan_job_rollback(
    store: ObjectStore, paths: JobPaths, directory: JobDirectory, epoch: int
) -> EditPlan:
    """Plan to give the newest epoch of a stopped Arroyo job the state of an older one. Writes
    nothing: this is the dry run.

    Files of the newest epoch may be missing; its metadata must be readable.

    Args:
        directory: the source of the job's status.

    Raises:
        InputError: the epoch is not older than the one that the next start restores; it is a
            managed job; whether that one is committed is not known; or a table differs.
        NotFoundError: the job has no such epoch.
        FormatError, ProtocolError: the epoch cannot be restored; names the first reason.
        ConflictError: an earlier edit was interrupted; undo it first.
    """
    return _job(store, paths, directory, epoch).prepare(store).plan


def run_job_rollback(
    store: ObjectStore,
    paths: JobPaths,
    directory: JobDirectory,
    epoch: int,
    options: EditOptions | None = None,
) -> EditOutcome:
    """Give the newest epoch of a stopped Arroyo job the state of an older one, in place.

    The next start then loads what it would have loaded at the older epoch. Nothing is deleted, and
    `run_undo` restores the newest epoch's own state until the job is started. If it is interrupted,
    see `run_edit`.

    Args:
        directory: the source of the job's status; asked again before each change.

    Raises:
        LeaseHeldError: another process maintains the job.
        ConflictError: the job changed or was started meanwhile; or another plan was approved.
        InputError, NotFoundError, ProtocolError, FormatError: as `plan_job_rollback`.
    """
    run_options = options or EditOptions(owner="arroyo-state rollback")
    return _job(store, paths, directory, epoch).run(store, run_options)


def _job(store: ObjectStore, paths: JobPaths, directory: JobDirectory, epoch: int) -> TransferJob:
    older = restorable_epoch(store, paths, epoch)

    def request(path: StatePath, epoch: Epoch) -> Rollback:
        return Rollback(epoch=epoch)

    source = StateSource(store=store, paths=paths, epoch=older.epoch)
    return TransferJob(source, paths, directory, request, _decide, goes_back=True)


def _decide(jobs: TwoJobs) -> Transfer:
    _check_older(jobs)
    _check_committed(jobs)
    epoch, command = jobs.taken.epoch, rollback_command(jobs.paths, None)
    otherwise = f"take another epoch; `{command}` lists them"
    transfer = Match(jobs, f"epoch {epoch}", otherwise, _why_kept).compared()
    transfer.unknown += [
        "a rollback was not tried on a real Arroyo; forks, which change an epoch likewise, were",
        "whether the sources still have what they would read again",
        *_edits_given_up(jobs),
    ]
    transfer.duplicate_outputs += [
        f"what the sources have read since epoch {epoch} is read again: outputs since then are "
        "seen twice, but for a sink of a single file, which cuts its file back at the start",
        *_moves(jobs, transfer),
    ]
    if jobs.target.needs_commit:
        transfer.duplicate_outputs.append(
            "rows that sinks committed in two phases are written and committed again"
        )
    return transfer


def _check_older(jobs: TwoJobs) -> None:
    if jobs.taken.epoch >= jobs.target.epoch:
        raise InputError(
            f"nothing to roll back: the next start restores epoch {jobs.target.epoch}",
            job=jobs.paths.root,
            epoch=jobs.taken.epoch,
            next_step=f"choose an older epoch; `{rollback_command(jobs.paths, None)}` lists them",
        )


def _check_committed(jobs: TwoJobs) -> None:
    """Refuse while commit data may be pending. In the legacy layout only Arroyo knows whether."""
    epoch = jobs.target.epoch
    if jobs.target.needs_commit and jobs.paths.layout is Layout.LEGACY and jobs.committed != epoch:
        raise InputError(
            f"sinks commit in two phases, and no source says that epoch {epoch} is committed",
            job=jobs.paths.root,
            epoch=epoch,
            next_step="pass --arroyo-db or --arroyo-api; nothing was changed",
        )


def _why_kept(
    older: OperatorCheckpoint, operator: OperatorCheckpoint, name: TableName
) -> str | None:
    files = older.tables.get(name, operator.tables.get(name))
    commits = older.needs_commit or operator.needs_commit
    if not commits or isinstance(files, ExpiringTimeKeyFiles):
        return None
    return "its sink commits in two phases, and has committed since: it stays as it is"


def _edits_given_up(jobs: TwoJobs) -> Iterator[str]:
    """Yield that edits of later epochs are given up, such as the deletion of a person's key."""
    records = [info.path for info in jobs.store.list_dir(jobs.paths.changes).objects]
    edits = (path for path in records if is_change_of(jobs.paths, path, ChangeKind.EDIT))
    numbers = {path.name.partition("-")[0] for path in edits}
    epochs = sorted(Epoch(int(number)) for number in numbers if number.isdecimal())
    later = [epoch for epoch in epochs if epoch > jobs.taken.epoch]
    if later:
        yield (
            f"what edits of epochs {ranges(later)} have changed or removed is as it was: repeat "
            "those that must hold"
        )


def _moves(jobs: TwoJobs, transfer: Transfer) -> Iterator[str]:
    """Yield how far each source goes back, as far as positions are numbers."""
    catalogue = default_catalogue()
    then, now = (
        known_positions(jobs.store, jobs.paths, checkpoint, catalogue)
        for checkpoint in (jobs.taken, jobs.target)
    )
    for key, before in now.items():
        operator, _, partition = key
        where = f"{operator} partition {partition}"
        if key not in then:
            yield f"{where}: epoch {jobs.taken.epoch} has no position, so it is read from its start"
            continue
        again: list[str] = []
        note_move(where, before, then[key], again, transfer.missing_outputs, counted_in=None)
        yield from again
