"""Preconditions of a rewrite: a snapshot of an Arroyo job, and checks that it has not changed and
is quiet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from arroyo_dagster.errors import (
    ArroyoStateError,
    ConflictError,
    FormatError,
    InputError,
    ProtocolError,
)
from arroyo_dagster.state.codec import metadata
from arroyo_dagster.state.codec.parquet import BATCH_ROWS, read_facts
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.tree import as_checkpoint
from arroyo_dagster.state.model.checkpoints import Checkpoint, CheckpointState
from arroyo_dagster.state.model.clock import Clock
from arroyo_dagster.state.model.ids import OUR_DIRECTORY, Epoch, StatePath
from arroyo_dagster.state.model.job_facts import JobAnswer, JobCondition
from arroyo_dagster.state.model.layout import JobPaths, Layout, is_rewritten, parse_manifest_path
from arroyo_dagster.state.model.progress import OnProgress, no_progress
from arroyo_dagster.state.model.rewrite import RewriteInput
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, ExpiringTimeKeyFiles, TimeFile
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.progress import counter
from arroyo_dagster.state.operations.verify.job import verify_job
from arroyo_dagster.state.planning.compaction.rewrite import (
    PASS_A_SOURCE,
    RUNS,
    TableFacts,
    TableKey,
    UnkeyedFacts,
    epoch_to_rewrite,
    why_not_now,
)
from arroyo_dagster.state.planning.restore import recovery
from arroyo_dagster.state.planning.restore.lost_metadata import cut_checkpoint
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectInfo, ObjectStore
from arroyo_dagster.state.tables.merge.rewrite import unwritable


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """An Arroyo job at one time.

    Attributes:
        objects: the metadata that may be overwritten, as read: in the protocol layout the head's
            manifest, in the legacy layout one object per operator.
        guards: objects that a start of the job, or its end, would change.
        listing: every object below the job.
        why_not: why nothing may be rewritten now; None if it may.
    """

    answer: JobAnswer
    checkpoint: Checkpoint
    objects: Mapping[StatePath, bytes]
    guards: Mapping[StatePath, tuple[str | None, int | None] | bytes]
    listing: Mapping[StatePath, ObjectInfo]
    why_not: str | None


def take_snapshot(store: ObjectStore, paths: JobPaths, directory: JobDirectory) -> JobSnapshot:
    """Read the facts about an Arroyo job and the epoch that it would restore.

    Raises:
        InputError: the job is a managed job.
        NotFoundError, FormatError: the job has no checkpoint, or one that cannot be read.
    """
    # List first: objects written meanwhile then count as changed.
    listing = list_objects(store, paths)
    answer = directory.look_up([paths], checkpoints=True)[0]
    backend = ParquetBackend(store, paths)
    if paths.layout is Layout.PROTOCOL:
        checkpoint, why_not = _head(backend)
        objects = {checkpoint.ref: store.read(checkpoint.ref)}
    else:
        checkpoint, why_not = _legacy_epoch(backend, answer)
        names = [
            paths.operator_metadata(op.operator, checkpoint.epoch) for op in checkpoint.operators
        ]
        objects = dict(zip(names, concurrently(store.read, names), strict=True))
    if checkpoint.progress is not None:
        raise InputError(
            "this is a managed job: it is compacted, not rewritten in place",
            job=paths.root,
            next_step="use `arroyo-state compact run`",
        )
    return JobSnapshot(
        answer=answer,
        checkpoint=_decoded_again(checkpoint, objects),
        objects=objects,
        guards=guards_of(store, paths, checkpoint),
        listing=listing,
        why_not=why_not_now(answer, checkpoint)
        or why_not
        or _why_incomplete(backend, checkpoint, answer, listing),
    )


@dataclass(frozen=True, slots=True)
class ListedJob:
    """The objects of a job from a listing that was complete by `at_micros`."""

    at_micros: int
    objects: Mapping[StatePath, ObjectInfo]


def list_objects(store: ObjectStore, paths: JobPaths) -> dict[StatePath, ObjectInfo]:
    """List every addressable object of a job."""
    return {info.path: info for info in store.list(paths.root) if info.addressable}


def changed_objects(
    paths: JobPaths,
    before: Mapping[StatePath, ObjectInfo],
    now: Mapping[StatePath, ObjectInfo],
) -> list[StatePath]:
    """Return the objects that other processes created, changed or deleted between two listings.

    Objects in this package's own directory, and files written for a rewrite, do not count.
    """
    managed = f"{paths.root}/{OUR_DIRECTORY}/"
    return [
        path
        for path in dict.fromkeys((*before, *now))
        if not path.startswith(managed)
        and before.get(path) != now.get(path)
        and not (path not in before and is_rewritten(path))
    ]


def _head(backend: ParquetBackend) -> tuple[Checkpoint, str | None]:
    outcome = backend.next_restore()
    if isinstance(outcome, recovery.Restore):
        state = CheckpointState.COMMITTING if outcome.replay_commit else CheckpointState.READY
        return as_checkpoint(outcome.manifest, outcome.ref, state), None
    # Returned all the same: how a start treats this job is not decided here.
    newest = backend.load()
    return newest, f"the next start would not restore exactly epoch {newest.epoch}"


def _legacy_epoch(backend: ParquetBackend, answer: JobAnswer) -> tuple[Checkpoint, str | None]:
    visible = backend.epochs()
    epoch = epoch_to_rewrite(answer, visible)
    if epoch is None and visible:
        named = answer.facts.newest_ready_epoch
        return backend.load(), f"Arroyo would restore epoch {named}, which does not exist"
    return backend.load(epoch), None


def _why_incomplete(
    backend: ParquetBackend,
    checkpoint: Checkpoint,
    answer: JobAnswer,
    listing: Mapping[StatePath, ObjectInfo],
) -> str | None:
    """Say which metadata of the epoch is cut, or of a newer one is lost; None: none is.

    A newer epoch that is rebuilt later, or restored from a copy, lists files of this one.
    """
    cut = next(cut_checkpoint(backend.paths, checkpoint, listing), None)
    if cut is not None:
        return f"its metadata is damaged: {cut.path}: {cut.reason}"
    newer = next(_newer_epochs(backend, checkpoint, answer, listing), None)
    return None if newer is None else f"metadata of the newer epoch {newer} is lost"


def _newer_epochs(
    backend: ParquetBackend,
    checkpoint: Checkpoint,
    answer: JobAnswer,
    listing: Mapping[StatePath, ObjectInfo],
) -> Iterator[Epoch]:
    """Yield newer epochs that were complete, although a start restores this one."""
    paths, epoch = backend.paths, checkpoint.epoch
    if paths.layout is Layout.PROTOCOL:
        refs = [parse_manifest_path(ref) for ref in backend.published_last()]
        yield from (number for number in backend.epochs() if number > epoch)
        yield from (ref.epoch for ref in refs if ref is not None and ref.epoch > epoch)
    elif answer.facts.newest_ready_epoch is None:
        names = [operator.operator for operator in checkpoint.operators]
        for number in backend.checkpoint_dirs():
            objects = [paths.operator_metadata(name, number) for name in names]
            if number > epoch and all(path in listing for path in objects):
                yield number


def _decoded_again(checkpoint: Checkpoint, objects: Mapping[StatePath, bytes]) -> Checkpoint:
    """Decode the checkpoint from these bytes: they are what is planned on and replaced later."""
    if checkpoint.worker_generation is not None:
        manifest = metadata.decode_manifest(objects[checkpoint.ref], checkpoint.ref)
        return replace(checkpoint, operators=manifest.operators)
    operators = tuple(metadata.decode_operator(data, path) for path, data in objects.items())
    return replace(checkpoint, operators=operators)


def guards_of(
    store: ObjectStore, paths: JobPaths, checkpoint: Checkpoint
) -> dict[StatePath, tuple[str | None, int | None] | bytes]:
    """Return the objects that a start changes: the fence, or the checkpoint's metadata, which a
    restore writes anew; and the directories of later epochs.
    """
    backend = ParquetBackend(store, paths)
    if paths.layout is Layout.PROTOCOL:
        dirs = repr(sorted(store.list_dir(paths.generations).prefixes)).encode()
        epochs = repr(backend.epochs()).encode()
        return {
            paths.current_generation: store.read(paths.current_generation),
            paths.generations: dirs,
            paths.epochs: epochs,
        }
    info = store.head(checkpoint.ref)
    later = repr([e for e in backend.checkpoint_dirs() if e > checkpoint.epoch]).encode()
    written = (None, None) if info is None else (info.etag, info.modified_micros)
    return {checkpoint.ref: written, paths.checkpoints(): later}


def table_facts(
    store: ObjectStore, snapshot: JobSnapshot, on_progress: OnProgress = no_progress
) -> TableFacts:
    """Return the facts about the epoch's tables that its metadata does not contain.

    Args:
        on_progress: called with how many files were looked at.

    Raises:
        FormatError: a file that the epoch lists is missing.
    """
    files = {
        file.path: file
        for operator in snapshot.checkpoint.operators
        for listed in operator.tables.values()
        if isinstance(listed, ExpiringTimeKeyFiles)
        for file in listed.files
    }
    listed = list(dict.fromkeys(snapshot.checkpoint.paths))
    elsewhere = [path for path in listed if path not in snapshot.listing]
    count = counter(on_progress, "files looked at", len(elsewhere))

    def head(path: StatePath) -> ObjectInfo | None:
        info = store.head(path)
        count()
        return info

    infos = {info.path: info for info in concurrently(head, elsewhere) if info is not None}
    existing = {**snapshot.listing, **infos}
    missing = [path for path in listed if path not in existing]
    if missing:
        raise FormatError(
            f"{len(missing)} of {len(listed)} data files are missing, so nothing is rewritten",
            job=snapshot.checkpoint.job,
            epoch=snapshot.checkpoint.epoch,
            path=missing[0],
            next_step="restore the file; if the job runs, run this again: the epoch may just "
            "have expired",
        )
    return TableFacts(
        sizes={path: existing[path].size_bytes for path in listed},
        inputs={path: _input(file, existing[path]) for path, file in files.items()},
        unkeyed=unkeyed_facts(store, snapshot.checkpoint),
        unwritable=_unwritable(snapshot.checkpoint),
    )


def _input(file: TimeFile, info: ObjectInfo) -> RewriteInput:
    return RewriteInput(
        file=file,
        size_bytes=info.size_bytes,
        modified_micros=info.modified_micros,
        etag=info.etag,
    )


def _expiring(
    checkpoint: Checkpoint,
) -> Iterable[tuple[TableKey, ExpiringTimeKeyConfig, ExpiringTimeKeyFiles]]:
    for operator in checkpoint.operators:
        for name, files in operator.tables.items():
            config = operator.configs[name].config if name in operator.configs else None
            if isinstance(files, ExpiringTimeKeyFiles) and isinstance(
                config, ExpiringTimeKeyConfig
            ):
                yield (operator.operator, name), config, files


def unkeyed_facts(store: ObjectStore, checkpoint: Checkpoint) -> dict[TableKey, UnkeyedFacts]:
    """Read from footers how many rows Arroyo would lose from each aggregate without GROUP BY.

    Raises:
        FormatError, NotFoundError: a file is broken, or missing.
    """
    facts = {}
    for key, config, files in _expiring(checkpoint):
        if config.generational and not config.schema.hashed_indices:
            counts = concurrently(lambda path: _rows_and_batches(store, path), files.paths)
            facts[key] = UnkeyedFacts(
                rows=sum(rows for rows, _ in counts), batches=sum(number for _, number in counts)
            )
    return facts


def _rows_and_batches(store: ObjectStore, path: StatePath) -> tuple[int, int]:
    with store.open_input(path) as source:
        facts = read_facts(source, path)
    return facts.rows, sum(-(-rows // BATCH_ROWS) for rows in facts.row_groups)


def _unwritable(checkpoint: Checkpoint) -> dict[TableKey, str]:
    reasons = {}
    for key, config, _ in _expiring(checkpoint):
        try:
            reason = unwritable(config)
        except FormatError as error:
            reason = f"its stored schema is broken: {error.message}"
        if reason is not None:
            reasons[key] = reason
    return reasons


# ---- is it unchanged -----------------------------------------------------------------------------


def check_may(paths: JobPaths, snapshot: JobSnapshot) -> None:
    """Check that the job may be rewritten now.

    Raises:
        InputError: it may not; names the reason and the next step.
        StorageError…: a source of the job's status could not answer.
    """
    if snapshot.why_not is None:
        return
    condition = snapshot.answer.facts.condition
    step = "stop it with a checkpoint first, or give it a window: `arroyo-state compact window`"
    if condition is JobCondition.UNKNOWN:
        step = PASS_A_SOURCE
        if snapshot.answer.problems:
            raise snapshot.answer.problems[0]
    elif snapshot.why_not != RUNS:
        step = "wait until it is at rest, then run it again"
    raise InputError(
        f"the job cannot be rewritten now: {snapshot.why_not}",
        job=paths.root,
        epoch=snapshot.checkpoint.epoch,
        condition=condition.value,
        next_step=step,
    )


def check_may_undo(
    paths: JobPaths, snapshot: JobSnapshot, operation: str | None, epoch: Epoch
) -> None:
    """Check that a change in place may be undone now: the job is at rest since the change.

    Args:
        operation: what is undone; None = a compaction.
        epoch: the one that was changed.

    Raises:
        InputError: it may not; names the reason and the next step.
        StorageError…: a source of the job's status could not answer.
    """
    if snapshot.answer.facts.condition is not JobCondition.RUNNING:
        check_may(paths, snapshot)
        return
    what = "compaction" if operation is None else operation
    step = (
        "stop the job, then edit it again or go back to an epoch before it: "
        f"`arroyo-state rollback {paths.root} N`"
    )
    if operation is None:
        step = "keep the compacted state: it holds the same rows"
    raise InputError(
        f"the {what} of epoch {epoch} cannot be undone: the job was started from it and runs. To "
        "stop it with a checkpoint writes a newer epoch, from which nothing is undone",
        job=paths.root,
        epoch=epoch,
        condition=JobCondition.RUNNING.value,
        next_step=f"{step}. Only if it has finished no checkpoint since: stop it without one "
        "(`immediate`), then undo",
    )


def check_restorable(store: ObjectStore, paths: JobPaths, epoch: Epoch, level: int) -> None:
    """Check that the epoch passes verification: as it is, before merging duplicate rows hides them;
    and as it would be, before it is published.

    Raises:
        ProtocolError: it does not pass.
    """
    verdict = verify_job(store, paths, epoch, level=level, history=1).verdict
    if not verdict.passed:
        raise ProtocolError(
            f"epoch {epoch} does not pass verification, so nothing was published: "
            f"{verdict.errors[0]}",
            job=paths.root,
            epoch=epoch,
            next_step="check it with `arroyo-state verify`; the job's state is unchanged",
        )


def check_not_cancelled(paths: JobPaths, cancelled: Callable[[], bool]) -> None:
    """Raise a retryable ConflictError if the caller cancelled the rewrite."""
    if cancelled():
        raise ConflictError(
            "the rewrite exceeded its time limit",
            job=paths.root,
            retryable=True,
            next_step="increase the limit, or compact more often; nothing was published",
        )


@dataclass(frozen=True, slots=True)
class Unchanged:
    """The facts needed to check that the job is unchanged.

    Attributes:
        sizes: of every file that the epoch lists.
        cancelled: whether the caller cancelled the rewrite.
    """

    paths: JobPaths
    directory: JobDirectory
    snapshot: JobSnapshot
    sizes: Mapping[StatePath, int] = field(default_factory=dict)
    cancelled: Callable[[], bool] = lambda: False

    def why_changed(self, store: ObjectStore) -> str | None:
        """Return why the job does not count as unchanged and at rest; None if it does.

        Raises:
            StorageError: the store failed.
        """
        before = self.snapshot
        answer = self.directory.look_up([self.paths], checkpoints=True)[0]
        reason = why_not_now(answer, before.checkpoint)
        if reason is None and answer.facts.run_id != before.answer.facts.run_id:
            reason = f"it is now run {answer.facts.run_id}, not {before.answer.facts.run_id}"
        if reason is None and guards_of(store, self.paths, before.checkpoint) != before.guards:
            reason = "its metadata shows that it was started"
        return reason

    def check(self, store: ObjectStore) -> None:
        """Check that the job is at rest and was not started since the snapshot.

        Raises:
            ConflictError: it was started, or no source reports its status any more.
        """
        reason = self.why_changed(store)
        if reason is not None:
            raise self.changed(reason)

    def changed(self, reason: str) -> ConflictError:
        """Return the error of a rewrite that ends because the job changed."""
        return ConflictError(
            f"the job changed while it was rewritten: {reason}",
            job=self.paths.root,
            epoch=self.snapshot.checkpoint.epoch,
            retryable=True,
            next_step="run it again once the job is at rest; no file was deleted",
        )


def overwrite(
    store: ObjectStore, paths: JobPaths, path: StatePath, expected: bytes, data: bytes
) -> None:
    """Replace a metadata object that has the expected content, and read it back.

    Raises:
        ConflictError: the object has other content.
        ProtocolError: it reads back different.
    """
    if store.read(path) != expected:
        raise ConflictError(
            "another process changed the metadata of the job",
            job=paths.root,
            path=path,
            retryable=True,
            next_step="run it again; everything published so far can be restored",
        )
    store.put(path, data)
    if store.read(path) != data:
        raise ProtocolError(
            "metadata that was written reads back different",
            path=path,
            next_step="restore it with `arroyo-state undo` before the job is started",
        )


def is_arroyo_job(store: ObjectStore, paths: JobPaths) -> bool:
    """Whether the newest epoch shows an Arroyo job; False if the job has no readable epoch."""
    try:
        return ParquetBackend(store, paths).load().progress is None
    except ArroyoStateError:
        return False


# ---- when a stopped job is quiet: its controller cleans up for a while ---------------------------

_LONG_AGO = 10
"""A job that stopped this many quiet periods ago is quiet, if its objects do not change."""


class QuietOptions(Protocol):
    """How long a job must be quiet, and how time goes by."""

    @property
    def quiet_seconds(self) -> float:
        """How long no object of the job may change."""

    @property
    def clock(self) -> Clock:
        """Microseconds since 1970 in UTC, by this machine."""

    @property
    def sleep(self) -> Callable[[float], None]:
        """Waits this many seconds."""


def wait_until_quiet(snapshot: JobSnapshot, began_micros: int, options: QuietOptions) -> None:
    """Wait until the objects of a job count as quiet, unless they change meanwhile.

    `check_quiet` then says whether they did.

    Args:
        began_micros: since when they are known not to have changed.
    """
    now, finished = options.clock(), snapshot.answer.facts.finish_time_micros
    if finished is not None and now - finished >= _LONG_AGO * options.quiet_seconds * 1e6:
        return
    left = options.quiet_seconds - (now - began_micros) / 1e6
    if left > 0:
        options.sleep(left)


def check_quiet(store: ObjectStore, paths: JobPaths, before: JobSnapshot) -> None:
    """Check that nothing but files of rewrites changed since the snapshot's listing.

    Raises:
        ConflictError: something did.
    """
    changed = changed_objects(paths, before.listing, list_objects(store, paths))
    if changed:
        raise ConflictError(
            f"{len(changed)} objects of the job changed meanwhile: another process still changes "
            "it",
            job=paths.root,
            path=changed[0],
            retryable=True,
            next_step="wait until the controller's cleanup is over, then run it again; nothing was "
            "published",
        )
