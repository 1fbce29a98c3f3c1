"""The first epoch of a stopped Arroyo job that never finished a checkpoint.

In the legacy layout Arroyo's database decides which epoch is restored: the operator sets its row to
`ready` once the epoch is written. In the protocol layout the store decides alone. Nothing that
exists is deleted.

Source: docs/spec/state-surgery.md, `Create a whole epoch`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from arroyo_dagster.errors import InputError, NotFoundError
from arroyo_dagster.state.codec.derived import encode
from arroyo_dagster.state.codec.metadata import (
    encode_legacy_checkpoint,
    encode_manifest,
    encode_operator,
)
from arroyo_dagster.state.codec.records import decode_current_generation, decode_generation_manifest
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.lease import Leased
from arroyo_dagster.state.metadata.tree import CheckpointTree, legacy_head
from arroyo_dagster.state.model.changes import ChangeKind
from arroyo_dagster.state.model.checkpoints import (
    Checkpoint,
    CheckpointState,
    EpochRecord,
    GenerationManifest,
    Manifest,
    OperatorCheckpoint,
)
from arroyo_dagster.state.model.ids import Epoch, JobId, OperatorId, StatePath, WorkerGeneration
from arroyo_dagster.state.model.job_facts import CheckpointFacts, JobFacts
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.model.surgery.plans import EditOutcome, EditPlan, EditPrecondition
from arroyo_dagster.state.model.tables import GlobalKeyedFiles
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.catalog.jobs import find_job
from arroyo_dagster.state.operations.compaction.rewrite_preconditions import (
    JobSnapshot,
    Unchanged,
    guards_of,
    list_objects,
)
from arroyo_dagster.state.operations.compaction.rewrite_publish import (
    change_record,
    publish_change,
)
from arroyo_dagster.state.operations.surgery.execute import EditOptions, NewState
from arroyo_dagster.state.planning.compaction.rewrite import why_not_now
from arroyo_dagster.state.planning.restore.recovery import StartEmpty
from arroyo_dagster.state.storage.store import ObjectInfo, ObjectStore, read_optional
from arroyo_dagster.state.storage.wrappers import Extended

_SINK_FILE = "file_sink"
_LET_IT_FINISH = "let the job finish a checkpoint, stop it with one, and call this without --create"


def job_to_create(store: ObjectStore, name: str) -> JobPaths:
    """Return the job of this name, which may have no object yet.

    Raises:
        NotFoundError, InputError: as `find_job`; a name without a pipeline is always accepted.
    """
    try:
        return find_job(store, name)
    except (InputError, NotFoundError):
        if "/" in name:
            raise
        return JobPaths(JobId(name))


def begun_snapshot(
    store: ObjectStore, paths: JobPaths, directory: JobDirectory, taken: Checkpoint
) -> JobSnapshot:
    """Return a job that never finished a checkpoint, as if it had one, which is empty.

    Args:
        taken: the epoch of the other job, whose operators this one has.

    Raises:
        InputError: the job has an epoch, or none can be created; names the next step.
    """
    listing = list_objects(store, paths)
    answer = directory.look_up([paths], checkpoints=True)[0]
    existing = ParquetBackend(store, paths).every_epoch()
    if existing:
        raise InputError(
            f"the job has epoch {existing[-1]}, so none needs to be created",
            job=paths.root,
            next_step="call this without --create",
        )
    if paths.layout is Layout.LEGACY:
        begun = _begun(paths, answer.facts)
        epoch, generation = begun.epoch, None
        ref = paths.legacy_metadata(epoch)
    else:
        begun = None
        generation, _, epoch = empty_generation(store, paths, answer.facts)
        ref = paths.manifest(generation, epoch)
    began_micros = None if begun is None else begun.start_time_micros
    checkpoint = Checkpoint(
        pipeline=paths.pipeline,
        job=paths.job,
        worker_generation=generation,
        epoch=epoch,
        min_epoch=Epoch(0) if begun is None else begun.min_epoch or Epoch(0),
        start_time_micros=began_micros or taken.start_time_micros,
        finish_time_micros=began_micros or taken.finish_time_micros,
        state=CheckpointState.READY,
        operators=(),
        ref=ref,
    )
    _check_operators(paths, checkpoint, listing, taken)
    checkpoint = replace(
        checkpoint,
        operators=tuple(_empty(paths, op, checkpoint, listing) for op in taken.operators),
    )
    why_not = why_not_now(answer, checkpoint)
    guards = guards_of(store, paths, checkpoint)
    return JobSnapshot(answer, checkpoint, {}, guards, listing, why_not)


def _begun(paths: JobPaths, facts: JobFacts) -> CheckpointFacts:
    """Return the checkpoint that the job has begun and not finished."""
    if facts.checkpoints is None:
        raise InputError(
            "no source names the checkpoints of the job",
            job=paths.root,
            next_step="pass --arroyo-db or --arroyo-api",
        )
    last = max(facts.checkpoints, key=lambda checkpoint: checkpoint.epoch, default=None)
    if last is None:
        raise InputError(
            "the job has not begun a checkpoint, so Arroyo's database has no row to set to ready",
            job=paths.root,
            next_step=_LET_IT_FINISH,
        )
    if last.ready or facts.newest_ready_epoch is not None:
        raise InputError(
            f"Arroyo names epoch {facts.newest_ready_epoch} as ready, but its metadata is missing",
            job=paths.root,
            next_step="rebuild it with `arroyo-state rebuild`, or restore it from a copy",
        )
    return last


def _check_operators(
    paths: JobPaths,
    checkpoint: Checkpoint,
    listing: dict[StatePath, ObjectInfo],
    taken: Checkpoint,
) -> None:
    """Check that what the job has written of the epoch is of operators of the other job.

    Raises:
        InputError: it is not, or an operator commits in two phases.
    """
    for operator in taken.operators:
        if operator.needs_commit:
            raise InputError(
                "a sink commits in two phases, and its state is never created",
                job=paths.root,
                operator=operator.operator,
                next_step=_LET_IT_FINISH,
            )
    key = checkpoint.epoch, checkpoint.worker_generation
    prefixes = tuple(f"{paths.operator(operator.operator, *key)}/" for operator in taken.operators)
    directory = f"{paths.checkpoint(*key)}/"
    for path in listing:
        if path.startswith(directory) and not path.startswith(prefixes):
            raise InputError(
                "the job has an operator that the source lacks, so they are not of the same SQL",
                job=paths.root,
                path=path,
                next_step="create the job from the source's SQL",
            )


def _empty(
    paths: JobPaths,
    other: OperatorCheckpoint,
    checkpoint: Checkpoint,
    listing: dict[StatePath, ObjectInfo],
) -> OperatorCheckpoint:
    """Return an operator without tables, but for the files that a sink writes its output to."""
    tables, configs = {}, {}
    epoch = checkpoint.epoch
    for name, config in other.configs.items():
        if config.config.description == _SINK_FILE:
            named = (
                paths.subtask_file(other.operator, name, at, epoch, checkpoint.worker_generation)
                for at in range(other.parallelism)
            )
            files = tuple(path for path in named if path in listing)
            if files:
                tables[name], configs[name] = GlobalKeyedFiles(files=files), config
    return OperatorCheckpoint(
        job=paths.job,
        operator=other.operator,
        epoch=epoch,
        parallelism=other.parallelism,
        start_time_micros=other.start_time_micros,
        finish_time_micros=other.finish_time_micros,
        tables=tables,
        configs=configs,
    )


# ---- the plan ------------------------------------------------------------------------------------


def created_plan(
    plan: EditPlan,
    snapshot: JobSnapshot,
    taken: Checkpoint,
    evidence: Iterable[EditPrecondition],
) -> EditPlan:
    """Return the plan of a transfer into an epoch that it creates.

    Args:
        evidence: that the jobs match.
    """
    return replace(
        plan,
        creates=True,
        preconditions=(*_preconditions(snapshot), *evidence),
        unknown=(*plan.unknown, *_unknown(snapshot, taken)),
        afterwards=tuple(_afterwards(plan)),
    )


def _afterwards(plan: EditPlan) -> Iterator[str]:
    if plan.paths.layout is Layout.LEGACY:  # in the other one, the store alone decides
        yield (
            "before the job is started, set the row in Arroyo's database: UPDATE checkpoints SET "
            f"state = 'ready' WHERE job_id = '{plan.job}' AND epoch = {plan.epoch}"
        )


def _preconditions(snapshot: JobSnapshot) -> Iterator[EditPrecondition]:
    facts, epoch = snapshot.answer.facts, snapshot.checkpoint.epoch
    yield EditPrecondition(
        name="the job is stopped",
        met=snapshot.why_not is None,
        evidence=snapshot.why_not or f"{facts.condition.value}, by {facts.source}",
    )
    generation = snapshot.checkpoint.worker_generation
    if generation is not None:
        yield EditPrecondition(
            name="the next start of the job finds no checkpoint",
            met=True,
            evidence=f"worker generation {generation} names none, and no epoch is in the store",
        )
        return
    yield EditPrecondition(
        name="the job has begun a checkpoint and finished none",
        met=True,
        evidence=f"epoch {epoch}, by {facts.source}; no epoch is in the store",
    )


def _unknown(snapshot: JobSnapshot, taken: Checkpoint) -> Iterator[str]:
    if snapshot.checkpoint.worker_generation is not None:
        yield (
            "the first epoch of a job of the protocol layout was never created for a running "
            "Arroyo: it has the objects that Arroyo's own publication writes"
        )
    mine: dict[OperatorId, OperatorCheckpoint] = {
        operator.operator: operator for operator in snapshot.checkpoint.operators
    }
    for other in taken.operators:
        writes = any(table.config.description == _SINK_FILE for table in other.configs.values())
        if writes and not mine[other.operator].tables:
            yield (
                f"which file {other.operator} writes: if it is the source's, the job cuts off what "
                "the source has written"
            )


# ---- execution -----------------------------------------------------------------------------------


def publish_created(
    held: Leased, work: Unchanged, plan: EditPlan, new: NewState, options: EditOptions
) -> EditOutcome:
    """Write the metadata of an epoch that the job does not have yet, once it passes verification.

    `run_undo` undoes it.

    Raises:
        ConflictError: the job changed or was started meanwhile.
        ProtocolError: the epoch as it would be does not pass verification; nothing was published.
    """
    paths, checkpoint = work.paths, replace(work.snapshot.checkpoint, operators=new.operators)
    after = _encoded(held, work, checkpoint)
    snapshot = replace(work.snapshot, checkpoint=checkpoint)
    if paths.layout is Layout.PROTOCOL:  # the record of the epoch is no change of the job
        work.check(held)
        snapshot = replace(snapshot, guards=guards_of(Extended(held, after), paths, checkpoint))
    change = change_record(
        held,
        checkpoint,
        {path: read_optional(held, path) for path in after},
        after,
        kind=ChangeKind.REBUILD,
        operation=plan.edit.name,
        digest=plan.digest,
        created_at_micros=options.clock(),
        written=after,
        doubts=plan.unknown,
    )
    work = replace(work, snapshot=snapshot)
    path = publish_change(held, work, change, after, options.verify_level)
    return EditOutcome(plan=plan, published=True, record=path, objects=change.objects)


def _encoded(store: ObjectStore, work: Unchanged, checkpoint: Checkpoint) -> dict[StatePath, bytes]:
    """Return the metadata of an epoch, by path; what makes it exist comes last."""
    paths = work.paths
    if paths.layout is Layout.PROTOCOL:
        number, manifest, _ = empty_generation(store, paths, work.snapshot.answer.facts)
        return first_epoch(number, manifest, checkpoint)
    objects = {
        paths.operator_metadata(operator.operator, checkpoint.epoch): encode_operator(operator)
        for operator in checkpoint.operators
    }
    objects[checkpoint.ref] = encode_legacy_checkpoint(legacy_head(paths.job, checkpoint))
    return objects


# ---- the first epoch of a stopped job of the protocol layout: the objects by which it exists -----
# They are those that Arroyo's own publication writes, in its order. The manifest of the worker
# generation decides: before it names the checkpoint, the next start finds nothing; from then on a
# start restores the whole epoch, and writes its record if that is missing.
#
# Source: crates/arroyo-state-protocol/src/{resolve,workflow}.rs (arroyo-state.md 3.2 and 3.3).

_RUN_ONCE = "let the job run, stop it, and call this again"


def empty_generation(
    store: ObjectStore, paths: JobPaths, facts: JobFacts
) -> tuple[WorkerGeneration, GenerationManifest, Epoch]:
    """Return the worker generation of a job whose next start finds no checkpoint, its manifest, and
    the number for the first epoch: that of which files were written, else 1.

    Raises:
        InputError: the job never ran; its next start finds a checkpoint; a source names another
            run; or the generation names a checkpoint that is missing.
        FormatError, ProtocolError: a record is broken, or contradicts another.
    """
    try:
        fence = decode_current_generation(
            store.read(paths.current_generation), paths.current_generation
        )
        path = paths.generation_manifest(fence.worker_generation)
        manifest = decode_generation_manifest(store.read(path), path)
    except NotFoundError as error:
        raise InputError(
            "the job has no worker generation that an epoch could belong to: it never ran",
            job=paths.root,
            path=error.facts.get("path"),
            next_step=_RUN_ONCE,
        ) from error
    number = fence.worker_generation
    if facts.run_id is not None and facts.run_id != number:
        raise InputError(
            f"the newest worker generation of the job is {number}, and {facts.source} names run "
            f"{facts.run_id}",
            job=paths.root,
            next_step="check that both are of the same job; if its last start was cut off, "
            + _RUN_ONCE,
        )
    if not isinstance(ParquetBackend(store, paths).next_restore(), StartEmpty):
        raise InputError(
            "the next start of the job finds a checkpoint, so none needs to be created",
            job=paths.root,
            next_step="call this without --create; if an earlier call was interrupted, first "
            "`arroyo-state undo`",
        )
    named = manifest.latest_ref or manifest.base_ref
    if named is not None:
        raise InputError(
            f"worker generation {number} names the checkpoint {named}, which is missing",
            job=paths.root,
            path=path,
            next_step="rebuild it with `arroyo-state rebuild`, or restore it from a copy",
        )
    epoch = max(CheckpointTree(store, paths).checkpoint_dirs(number), default=Epoch(1))
    left = paths.manifest(number, epoch)
    if store.head(left) is not None:
        raise InputError(
            f"epoch {epoch} has a manifest that nothing names: an earlier call, or a checkpoint, "
            "was cut off",
            job=paths.root,
            path=left,
            next_step="`arroyo-state undo` deletes that of an earlier call; otherwise let the "
            "job finish a checkpoint",
        )
    return number, manifest, epoch


def first_epoch(
    number: WorkerGeneration, generation: GenerationManifest, checkpoint: Checkpoint
) -> dict[StatePath, bytes]:
    """Return the objects of the epoch, in the order in which they are written."""
    assert checkpoint.pipeline is not None
    ref = checkpoint.ref
    manifest = Manifest(
        pipeline=checkpoint.pipeline,
        job=checkpoint.job,
        worker_generation=number,
        epoch=checkpoint.epoch,
        min_epoch=checkpoint.min_epoch,
        start_time_micros=checkpoint.start_time_micros,
        finish_time_micros=checkpoint.finish_time_micros,
        needs_commit=False,
        operators=checkpoint.operators,
    )
    record = EpochRecord(
        pipeline=checkpoint.pipeline,
        job=checkpoint.job,
        epoch=checkpoint.epoch,
        worker_generation=number,
        parent_ref=None,
        checkpoint_ref=ref,
        created_at_micros=checkpoint.finish_time_micros,
    )
    paths = JobPaths(checkpoint.job, checkpoint.pipeline)
    return {
        ref: encode_manifest(manifest),
        paths.generation_manifest(number): encode(replace(generation, latest_ref=ref)),
        paths.epoch_record(checkpoint.epoch): encode(record),
    }
