"""Whether a checkpoint may be restored, must replay its commit, or is orphaned; and who may write.

Every question is a pure function of objects that the caller has read. A question that needs another
object returns `Need(path)`: `answer_with` reads it (None = absent) and asks again. Every
interleaving of two processes can thus be tested without a store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

from arroyo_dagster.errors import ProtocolError
from arroyo_dagster.state.model.checkpoints import (
    RECORD_VERSION,
    CheckpointState,
    CommittedMarker,
    CurrentGeneration,
    EpochRecord,
    GenerationManifest,
    LegacyCheckpoint,
    Manifest,
    OperatorCheckpoint,
)
from arroyo_dagster.state.model.ids import Epoch, StatePath, WorkerGeneration
from arroyo_dagster.state.model.layout import (
    COMMITTED_MARKER,
    JobPaths,
    ManifestAddress,
    parse_manifest_path,
)

MetadataRecord = Manifest | EpochRecord | CommittedMarker | GenerationManifest | CurrentGeneration
_A = TypeVar("_A")
_R = TypeVar("_R", Manifest, EpochRecord, CommittedMarker, GenerationManifest, CurrentGeneration)
Facts = Mapping[StatePath, MetadataRecord | None]


@dataclass(frozen=True, slots=True)
class Need:
    """The question needs this object: read it, add it to the facts (None if absent), ask again."""

    path: StatePath


@dataclass(frozen=True, slots=True)
class CheckpointStanding:
    """The state of a checkpoint; if it is orphaned, `canonical_ref` is the owner of its epoch."""

    state: CheckpointState
    canonical_ref: StatePath | None = None


@dataclass(frozen=True, slots=True)
class Restore:
    """Restore this checkpoint; first finish its commit if `replay_commit`."""

    ref: StatePath
    manifest: Manifest
    replay_commit: bool


@dataclass(frozen=True, slots=True)
class Claim:
    """The epoch of this checkpoint has no owner yet: create its epoch record, then ask again."""

    record_path: StatePath
    record: EpochRecord


@dataclass(frozen=True, slots=True)
class StartEmpty:
    """No worker generation has left a checkpoint to restore."""


@dataclass(frozen=True, slots=True)
class CannotStart:
    """A restore would contradict the protocol, so the start fails."""

    reason: str
    ref: StatePath


def answer_with(
    question: Callable[[Facts], _A | Need],
    read: Callable[[StatePath], MetadataRecord | None],
    facts: dict[StatePath, MetadataRecord | None],
) -> _A:
    """Ask a question repeatedly, reading the objects it needs, until it is answered.

    Args:
        read: reads one object; None if it is absent.
        facts: the objects known so far; every object read is added.
    """
    while isinstance(answer := question(facts), Need):
        facts[answer.path] = read(answer.path)
    return answer


# ---- the state of one checkpoint -----------------------------------------------------------------


def checkpoint_state(
    ref: StatePath,
    manifest: Manifest | None,
    record: EpochRecord | None,
    marker: CommittedMarker | None,
) -> CheckpointStanding:
    """Return the state of a checkpoint according to its three objects.

    Args:
        ref: the path of the manifest.
        manifest: the object at `ref`; None if it is absent.
        record: the epoch record of the manifest's epoch; None if it is absent.
        marker: the commit marker beside the manifest; None if it is absent.

    Raises:
        ProtocolError: record or marker belong to another epoch, job, checkpoint or parent.

    Source: crates/arroyo-state-protocol/src/state.rs, in the order tested there.
    """
    if manifest is None:
        return CheckpointStanding(CheckpointState.INVISIBLE)
    if record is None:
        return CheckpointStanding(CheckpointState.UNCLAIMED)
    if record.epoch != manifest.epoch:
        raise ProtocolError(
            f"the epoch record belongs to epoch {record.epoch}, the manifest to {manifest.epoch}",
            path=ref,
        )
    if record.checkpoint_ref != ref:
        return CheckpointStanding(CheckpointState.ORPHANED, record.checkpoint_ref)
    if record.parent_ref != manifest.parent_ref:
        raise ProtocolError(
            "epoch record and manifest name different parents",
            path=ref,
            record_parent=record.parent_ref,
            manifest_parent=manifest.parent_ref,
        )
    if not manifest.needs_commit:
        return CheckpointStanding(CheckpointState.READY)
    if marker is None:
        return CheckpointStanding(CheckpointState.COMMITTING)
    if (marker.job, marker.epoch, marker.checkpoint_ref) != (manifest.job, manifest.epoch, ref):
        raise ProtocolError("the commit marker belongs to another checkpoint", path=ref)
    return CheckpointStanding(CheckpointState.READY)


def legacy_state(
    head: LegacyCheckpoint, operators: Iterable[OperatorCheckpoint], committed: bool
) -> CheckpointState:
    """Return the state of an epoch of the legacy layout according to its objects.

    Args:
        committed: whether this package's commit note exists: both phases of the commit are done.

    Source: crates/arroyo-controller/queries/controller_queries.sql: only Arroyo's database has
    which epochs are ready and which are committing, so its epochs with metadata count as ready.
    """
    managed = head.progress is not None
    if managed and not committed and any(operator.needs_commit for operator in operators):
        return CheckpointState.COMMITTING
    return CheckpointState.READY


def standing(paths: JobPaths, ref: StatePath, facts: Facts) -> CheckpointStanding | Need:
    """Return `checkpoint_state` of `ref`, or the next object that it needs."""
    manifest = _fact(facts, ref, Manifest)
    if isinstance(manifest, Need):
        return manifest
    if manifest is None:
        return checkpoint_state(ref, None, None, None)
    record = _fact(facts, paths.epoch_record(manifest.epoch), EpochRecord)
    if isinstance(record, Need):
        return record
    if not manifest.needs_commit or record is None:
        return checkpoint_state(ref, manifest, record, None)
    marker = _fact(facts, marker_path(ref), CommittedMarker)
    if isinstance(marker, Need):
        return marker
    return checkpoint_state(ref, manifest, record, marker)


def marker_path(ref: StatePath) -> StatePath:
    """Return the path of the commit marker of the checkpoint `ref`."""
    directory = ref.parent
    if directory is None:
        raise ProtocolError("a checkpoint reference has no directory", path=ref)
    return directory / COMMITTED_MARKER


def parent_ready(paths: JobPaths, manifest: Manifest, facts: Facts) -> bool | Need:
    """Return whether the parent owns its epoch and is ready; True if there is no parent."""
    if manifest.parent_ref is None:
        return True
    parent = standing(paths, manifest.parent_ref, facts)
    if isinstance(parent, Need):
        return parent
    return parent.state is CheckpointState.READY


# ---- what to restore -----------------------------------------------------------------------------

Resolved = Restore | Claim | StartEmpty | CannotStart
Resolution = Need | Resolved


def resolve_with(
    read: Callable[[StatePath], MetadataRecord | None],
    paths: JobPaths,
    starting: WorkerGeneration,
    facts: dict[StatePath, MetadataRecord | None],
    *,
    now_micros: int = 0,
    as_arroyo: bool = False,
    only_reads: bool = False,
) -> Resolved:
    """Ask `resolve` repeatedly until it is answered; `read` and `facts` as in `answer_with`."""
    question = partial(
        resolve,
        paths,
        starting,
        now_micros=now_micros,
        as_arroyo=as_arroyo,
        only_reads=only_reads,
    )
    return cast("Resolved", answer_with(question, read, facts))  # mypy joins unions to object


def resolve(
    paths: JobPaths,
    starting: WorkerGeneration,
    facts: Facts,
    *,
    now_micros: int,
    as_arroyo: bool,
    only_reads: bool,
) -> Resolution:
    """Choose what worker generation `starting` restores.

    Reads the generation manifests below `starting`, newest first, and skips those that refer to
    nothing visible. Returns a `Claim` only while the fence names `starting`: the checkpoint's
    writer may have died between manifest and record, and no newer generation may be deciding
    otherwise.

    Args:
        as_arroyo: return exactly what an Arroyo would restore that starts as `starting`.
        only_reads: no generation starts, so that nothing is claimed: instead of a checkpoint that
            is being published, return its parent, the newest published one.

    Raises:
        ProtocolError: objects contradict each other, so that nothing may be restored.

    Source: crates/arroyo-state-protocol/src/{resolve,workflow}.rs.
    Differs: unless `as_arroyo`, continues from the found checkpoint along the epoch records, which
    alone decide ownership: a run that was fenced while it published may have left a newer
    checkpoint. Arroyo finds it only one start later, after it has lost the epoch to it.
    """
    fence = _fact(facts, paths.current_generation, CurrentGeneration)
    if isinstance(fence, Need):
        return fence
    asked = _ResolveQuestion(
        paths=paths,
        facts=facts,
        may_claim=fence is not None and fence.worker_generation == starting,
        follow_records=not as_arroyo,
        only_reads=only_reads,
        now_micros=now_micros,
    )
    for number in range(starting - 1, -1, -1):
        generation = _fact(
            facts, paths.generation_manifest(WorkerGeneration(number)), GenerationManifest
        )
        if isinstance(generation, Need):
            return generation
        if generation is None:
            continue
        resolution = _resolve_generation(asked, generation)
        if resolution is not None:
            return resolution
    return StartEmpty()


@dataclass(frozen=True, slots=True, kw_only=True)
class _ResolveQuestion:
    """The facts and options of one call of `resolve`."""

    paths: JobPaths
    facts: Facts
    may_claim: bool
    follow_records: bool
    only_reads: bool
    now_micros: int


def _resolve_generation(
    asked: _ResolveQuestion, generation: GenerationManifest
) -> Resolution | None:
    candidates = [ref for ref in (generation.latest_ref, generation.base_ref) if ref is not None]
    for ref in dict.fromkeys(candidates):
        resolution = _resolve_candidate(asked, ref)
        if resolution is not None:
            return resolution
    return None


def _resolve_candidate(
    asked: _ResolveQuestion, ref: StatePath, *, canonical: bool = False
) -> Resolution | None:
    """Resolve one reference; None = nothing visible or claimable, so the next one is tried.

    Args:
        canonical: an epoch record names it, so that there is no next one.
    """
    manifest = _fact(asked.facts, ref, Manifest)
    if isinstance(manifest, Need):
        return manifest
    if manifest is None:
        if canonical:
            return CannotStart("the epoch record names a checkpoint that has no manifest", ref)
        return None
    # The parent is checked before the candidate's own state, as in Arroyo.
    ready = parent_ready(asked.paths, manifest, asked.facts)
    if isinstance(ready, Need):
        return ready
    if not ready:
        return CannotStart("the parent of the checkpoint is not ready", ref)
    status = standing(asked.paths, ref, asked.facts)
    if isinstance(status, Need):
        return status
    if status.state is CheckpointState.COMMITTING:
        return _replay(asked, ref, manifest)
    if status.state is CheckpointState.READY:
        return _follow(asked, ref, manifest)
    if canonical:
        return CannotStart(f"the canonical checkpoint is {status.state.value} itself", ref)
    if status.state is CheckpointState.ORPHANED:
        assert status.canonical_ref is not None
        expect_manifest_path(asked.paths, status.canonical_ref)
        return _resolve_candidate(asked, status.canonical_ref, canonical=True)
    if asked.may_claim:
        record = claim_of(ref, manifest, asked.now_micros)
        return Claim(asked.paths.epoch_record(manifest.epoch), record)
    if asked.only_reads and manifest.parent_ref is not None:
        parent = asked.facts[manifest.parent_ref]  # ready: its own parent is not needed any more
        assert isinstance(parent, Manifest)
        return _follow(asked, manifest.parent_ref, parent)
    return None


def _replay(asked: _ResolveQuestion, ref: StatePath, manifest: Manifest) -> Restore:
    record = asked.facts[asked.paths.epoch_record(manifest.epoch)]
    assert isinstance(record, EpochRecord)
    check_permit(ref, manifest, record)
    return Restore(ref, manifest, replay_commit=True)


def _follow(asked: _ResolveQuestion, ref: StatePath, manifest: Manifest) -> Resolution | None:
    """Restore a ready checkpoint, or the one that the epoch records name after it."""
    if not asked.follow_records:
        return Restore(ref, manifest, replay_commit=False)
    path = asked.paths.epoch_record(Epoch(manifest.epoch + 1))
    following = _fact(asked.facts, path, EpochRecord)
    if isinstance(following, Need):
        return following
    if following is None:
        return Restore(ref, manifest, replay_commit=False)
    expect_manifest_path(asked.paths, following.checkpoint_ref)
    return _resolve_candidate(asked, following.checkpoint_ref, canonical=True)


def check_permit(ref: StatePath, manifest: Manifest, record: EpochRecord) -> None:
    """Check that `record` permits the commit of the checkpoint at `ref`.

    Raises:
        ProtocolError: it is of another version, job, generation or checkpoint.

    Source: crates/arroyo-state-protocol/src/workflow.rs, `CommitPermit::new`.
    """
    check_versions(ref, record)
    expected = (manifest.pipeline, manifest.job, manifest.worker_generation, ref)
    actual = (record.pipeline, record.job, record.worker_generation, record.checkpoint_ref)
    if actual != expected:
        raise ProtocolError(
            "the epoch record belongs to another checkpoint than the commit",
            path=ref,
            found=actual,
            next_step="compare both with `arroyo-state epochs`; nothing was committed",
        )


def check_versions(path: StatePath, record: MetadataRecord | None) -> None:
    """Refuse to continue a job from a record of another version, whose meaning is unknown.

    Raises:
        ProtocolError: its version is not the one that this release writes.
    """
    if not isinstance(record, Manifest | None) and record.version != RECORD_VERSION:
        raise ProtocolError(
            f"a record of version {record.version} can be read, but its job cannot be continued: "
            f"this release knows version {RECORD_VERSION}",
            path=path,
            next_step="run the job with a release of arroyo-dagster that knows this version",
        )


def claim_of(ref: StatePath, manifest: Manifest, now_micros: int) -> EpochRecord:
    """Return the record that makes `manifest` at `ref` the owner of its epoch."""
    return EpochRecord(
        pipeline=manifest.pipeline,
        job=manifest.job,
        epoch=manifest.epoch,
        worker_generation=manifest.worker_generation,
        parent_ref=manifest.parent_ref,
        checkpoint_ref=ref,
        created_at_micros=now_micros,
    )


# ---- who may write -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fenced:
    """A newer worker generation was started: this one must stop, and delete nothing."""

    newer: WorkerGeneration


@dataclass(frozen=True, slots=True)
class RaiseFence:
    """The fence is older than this generation (a slow start wrote it late): write it again."""


def fence_verdict(
    paths: JobPaths, mine: WorkerGeneration, facts: Facts
) -> Need | Fenced | RaiseFence | None:
    """Decide whether worker generation `mine` is still the newest; None = it is.

    Generation numbers are assigned without gaps, each by creating its generation manifest. If the
    fence was written out of order, the manifest of the next number decides.
    """
    fence = _fact(facts, paths.current_generation, CurrentGeneration)
    if isinstance(fence, Need):
        return fence
    if fence is not None and fence.worker_generation > mine:
        return Fenced(fence.worker_generation)
    following = WorkerGeneration(mine + 1)
    successor = _fact(facts, paths.generation_manifest(following), GenerationManifest)
    if isinstance(successor, Need):
        return successor
    if successor is not None:
        return Fenced(following)
    if fence is None or fence.worker_generation < mine:
        return RaiseFence()
    return None


# ---- facts ---------------------------------------------------------------------------------------


def _fact(facts: Facts, path: StatePath, kind: type[_R]) -> _R | Need | None:
    if path not in facts:
        return Need(path)
    value = facts[path]
    if value is not None and not isinstance(value, kind):
        raise ProtocolError(
            f"a {kind.__name__} was expected, found a {type(value).__name__}", path=path
        )
    return value


def expect_manifest_path(paths: JobPaths, ref: StatePath) -> ManifestAddress:
    """Parse a checkpoint reference, and refuse one that is not a manifest of this job.

    Raises:
        ProtocolError: it is no manifest path, or of another job.
    """
    address = parse_manifest_path(ref)
    if address is None or address.paths != paths:
        raise ProtocolError("a checkpoint reference leads out of its job", path=ref, job=paths.job)
    return address
