"""The first epoch of a stopped job of the protocol layout: the objects by which it exists.

They are those that Arroyo's own publication writes, in its order. The manifest of the worker
generation decides: before it names the checkpoint, the next start finds nothing; from then on a
start restores the whole epoch, and writes its record if that is missing.

Source: crates/arroyo-state-protocol/src/{resolve,workflow}.rs (arroyo-state.md 3.2 and 3.3).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from arroyo_dagster.errors import InputError, NotFoundError
from arroyo_dagster.state.codec.derived import encode
from arroyo_dagster.state.codec.metadata import encode_manifest
from arroyo_dagster.state.codec.records import (
    decode_current_generation,
    decode_generation_manifest,
)
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.epoch_finder import EpochFinder
from arroyo_dagster.state.model.checkpoints import (
    Checkpoint,
    EpochRecord,
    GenerationManifest,
    Manifest,
)
from arroyo_dagster.state.model.ids import Epoch, StatePath, WorkerGeneration
from arroyo_dagster.state.model.job_facts import JobFacts
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.planning.restore.recovery import StartEmpty
from arroyo_dagster.state.storage.store import ObjectStore

_RUN_ONCE = "let the job run, stop it, and call this again"


@dataclass(frozen=True, slots=True)
class EmptyGeneration:
    """The worker generation of a stopped job whose next start finds no checkpoint.

    Attributes:
        epoch: the number for the first epoch: that of which files were written, else 1.
    """

    number: WorkerGeneration
    epoch: Epoch
    path: StatePath
    manifest: GenerationManifest


def empty_generation(store: ObjectStore, paths: JobPaths, facts: JobFacts) -> EmptyGeneration:
    """Return the worker generation of a job whose next start finds no checkpoint.

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
    epoch = max(EpochFinder(store, paths).checkpoint_dirs(number), default=Epoch(1))
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
    return EmptyGeneration(number, epoch, path, manifest)


def first_epoch(generation: EmptyGeneration, checkpoint: Checkpoint) -> dict[StatePath, bytes]:
    """Return the objects of the epoch, in the order in which they are written."""
    assert checkpoint.pipeline is not None
    ref = checkpoint.ref
    manifest = Manifest(
        pipeline=checkpoint.pipeline,
        job=checkpoint.job,
        worker_generation=generation.number,
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
        worker_generation=generation.number,
        parent_ref=None,
        checkpoint_ref=ref,
        created_at_micros=checkpoint.finish_time_micros,
    )
    paths = JobPaths(checkpoint.job, checkpoint.pipeline)
    return {
        ref: encode_manifest(manifest),
        generation.path: encode(replace(generation.manifest, latest_ref=ref)),
        paths.epoch_record(checkpoint.epoch): encode(record),
    }
