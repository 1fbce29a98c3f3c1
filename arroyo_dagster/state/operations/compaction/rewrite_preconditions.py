"""What is known of a job of Arroyo's before it is rewritten, and whether it is still so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

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
from arroyo_dagster.state.metadata.reader import as_checkpoint
from arroyo_dagster.state.model.checkpoints import Checkpoint, CheckpointState
from arroyo_dagster.state.model.ids import OUR_DIRECTORY, Epoch, StatePath
from arroyo_dagster.state.model.job_facts import JobAnswer, JobCondition
from arroyo_dagster.state.model.layout import JobPaths, Layout, is_rewritten
from arroyo_dagster.state.model.rewrite import RewriteInput
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    TimeFile,
)
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
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
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectInfo, ObjectStore
from arroyo_dagster.state.tables.merge.rewrite import unwritable


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """A job of Arroyo's as it was found.

    Attributes:
        objects: the metadata that may be overwritten, as read; in the protocol layout the head's
            manifest, in the legacy layout one of every operator.
        guards: objects that a start of the job, or its end, would change.
        listing: everything below the job.
        why_not: why nothing may be rewritten now.
    """

    answer: JobAnswer
    checkpoint: Checkpoint
    objects: Mapping[StatePath, bytes]
    guards: Mapping[StatePath, tuple[str | None, int | None] | bytes]
    listing: Mapping[StatePath, ObjectInfo]
    why_not: str | None


def take_snapshot(store: ObjectStore, paths: JobPaths, directory: JobDirectory) -> JobSnapshot:
    """Gather what is known of a job of Arroyo's, and of the epoch that it would restore.

    Raises:
        InputError: a job of ours.
        NotFoundError, FormatError: it has no checkpoint, or one that cannot be read.
    """
    # Listed first: what is written meanwhile shows later as a change.
    listing = list_objects(store, paths)
    answer = directory.look_up([paths], checkpoints=True)[0]
    backend = ParquetBackend(store, paths)
    if paths.layout is Layout.PROTOCOL:
        checkpoint, why_not = _head(backend)
        objects = {checkpoint.ref: store.read(checkpoint.ref)}
    else:
        checkpoint, why_not = _legacy_epoch(backend, answer)
        names = [
            paths.operator_metadata(one.operator, checkpoint.epoch) for one in checkpoint.operators
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
        why_not=why_not_now(answer, checkpoint) or why_not,
    )


@dataclass(frozen=True, slots=True)
class ListedJob:
    """The objects of a job, as a listing that had ended by `at_micros` showed them."""

    at_micros: int
    objects: Mapping[StatePath, ObjectInfo]


def list_objects(store: ObjectStore, paths: JobPaths) -> dict[StatePath, ObjectInfo]:
    """List every object of a job that can be addressed."""
    return {info.path: info for info in store.list(paths.root) if info.addressable}


def changed_objects(
    paths: JobPaths,
    before: Mapping[StatePath, ObjectInfo],
    now: Mapping[StatePath, ObjectInfo],
) -> list[StatePath]:
    """The objects that somebody else created, changed or deleted between two listings.

    What this package keeps for itself, and files that it has written for a rewrite, do not count.
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
    found = backend.next_restore()
    if isinstance(found, recovery.Restore):
        state = CheckpointState.COMMITTING if found.replay_commit else CheckpointState.READY
        return as_checkpoint(found.manifest, found.ref, state), None
    # Shown all the same: what a start makes of it is not for us to decide.
    newest = backend.load()
    return newest, f"the next start would not restore exactly epoch {newest.epoch}"


def _legacy_epoch(backend: ParquetBackend, answer: JobAnswer) -> tuple[Checkpoint, str | None]:
    visible = backend.epochs()
    epoch = epoch_to_rewrite(answer, visible)
    if epoch is None and visible:
        named = answer.facts.newest_ready_epoch
        return backend.load(), f"Arroyo would restore epoch {named}, which does not exist"
    return backend.load(epoch), None


def _decoded_again(checkpoint: Checkpoint, objects: Mapping[StatePath, bytes]) -> Checkpoint:
    """The checkpoint as these very bytes say it: what is replaced later is what was planned on."""
    if checkpoint.worker_generation is not None:
        manifest = metadata.decode_manifest(objects[checkpoint.ref], checkpoint.ref)
        return replace(checkpoint, operators=manifest.operators)
    operators = tuple(metadata.decode_operator(data, path) for path, data in objects.items())
    return replace(checkpoint, operators=operators)


def guards_of(
    store: ObjectStore, paths: JobPaths, checkpoint: Checkpoint
) -> dict[StatePath, tuple[str | None, int | None] | bytes]:
    """What a start changes: the fence, or the checkpoint's metadata, which a restore writes anew;
    and the directories of later epochs."""
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


def table_facts(store: ObjectStore, snapshot: JobSnapshot) -> TableFacts:
    """What is known of the tables of the epoch beside its metadata.

    Raises:
        FormatError: a file that it lists is missing.
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
    found = {info.path: info for info in concurrently(store.head, elsewhere) if info is not None}
    known = {**snapshot.listing, **found}
    missing = [path for path in listed if path not in known]
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
        sizes={path: known[path].size_bytes for path in listed},
        inputs={path: _input(file, known[path]) for path, file in files.items()},
        unkeyed=_unkeyed_facts(store, snapshot.checkpoint),
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


def _unkeyed_facts(store: ObjectStore, checkpoint: Checkpoint) -> dict[TableKey, UnkeyedFacts]:
    """Footers tell what Arroyo would lose of an aggregate without GROUP BY."""
    found = {}
    for key, config, files in _expiring(checkpoint):
        if config.generational and not config.schema.hashed_indices:
            counts = concurrently(lambda path: _rows_and_batches(store, path), files.paths)
            found[key] = UnkeyedFacts(
                rows=sum(rows for rows, _ in counts), batches=sum(number for _, number in counts)
            )
    return found


def _rows_and_batches(store: ObjectStore, path: StatePath) -> tuple[int, int]:
    with store.open_input(path) as source:
        facts = read_facts(source, path)
    return facts.rows, sum(-(-rows // BATCH_ROWS) for rows in facts.row_groups)


def _unwritable(checkpoint: Checkpoint) -> dict[TableKey, str]:
    found = {}
    for key, config, _ in _expiring(checkpoint):
        try:
            reason = unwritable(config)
        except FormatError as error:
            reason = f"its stored schema is broken: {error.message}"
        if reason is not None:
            found[key] = reason
    return found


# ---- is it still so ------------------------------------------------------------------------------


def check_may(paths: JobPaths, snapshot: JobSnapshot) -> None:
    """Make sure that the job may be rewritten now.

    Raises:
        InputError: it may not; says why, and what would help.
        StorageError…: whoever was asked about it could not answer.
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


def check_restorable(store: ObjectStore, paths: JobPaths, epoch: Epoch, level: int) -> None:
    """Make sure that the epoch passes: as it is, before rows that came twice are merged and nobody
    can tell any more; and as it would be, before it is published.

    Raises:
        ProtocolError: it does not.
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
    """Give up where the caller wants it: a ConflictError, retryable."""
    if cancelled():
        raise ConflictError(
            "the rewrite exceeded its time limit",
            job=paths.root,
            retryable=True,
            next_step="increase the limit, or compact more often; nothing was published",
        )


@dataclass(frozen=True, slots=True)
class Unchanged:
    """What is needed to find out whether everything is still as it was.

    Attributes:
        sizes: of every file that the epoch lists.
        cancelled: whether the caller has had enough.
    """

    paths: JobPaths
    directory: JobDirectory
    snapshot: JobSnapshot
    sizes: Mapping[StatePath, int] = field(default_factory=dict)
    cancelled: Callable[[], bool] = lambda: False

    def check(self, store: ObjectStore, *, published: bool = False) -> None:
        """Make sure that the job is at rest and was not started since.

        Raises:
            ConflictError: it was, or nobody says so any more.
        """
        before = self.snapshot
        answer = self.directory.look_up([self.paths], checkpoints=True)[0]
        reason = why_not_now(answer, before.checkpoint)
        if reason is None and answer.facts.run_id != before.answer.facts.run_id:
            reason = f"it is now run {answer.facts.run_id}, not {before.answer.facts.run_id}"
        if reason is None and guards_of(store, self.paths, before.checkpoint) != before.guards:
            reason = "its metadata shows that it was started"
        if reason is None:
            return
        done = "after its metadata was rewritten" if published else "while it was rewritten"
        step = (
            "let it run, and verify its next epoch: old and new lists hold the same rows, and no "
            "file was deleted"
            if published
            else (
                "run it again once the job is at rest; everything published so far can be restored"
            )
        )
        raise ConflictError(
            f"the job changed {done}: {reason}",
            job=self.paths.root,
            epoch=before.checkpoint.epoch,
            retryable=not published,
            next_step=step,
        )


def overwrite(
    store: ObjectStore, paths: JobPaths, path: StatePath, expected: bytes, data: bytes
) -> None:
    """Put a metadata object in the place of the one that is expected there, and read it back.

    Raises:
        ConflictError: another one is there.
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
            next_step="restore it with `arroyo-state compact undo` before the job is started",
        )


def is_arroyo_job(store: ObjectStore, paths: JobPaths) -> bool:
    """Whether a job is Arroyo's, by its newest epoch; False if it has none that can be read."""
    try:
        return ParquetBackend(store, paths).load().progress is None
    except ArroyoStateError:
        return False
