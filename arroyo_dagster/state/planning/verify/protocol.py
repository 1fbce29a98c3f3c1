"""Chain, ownership and commit of an epoch in the protocol layout, and what the next start restores.

A restore needs the epoch and its direct parent; problems in earlier epochs are warnings.

Source: crates/arroyo-state-protocol/src/{state,resolve,workflow}.rs (arroyo-state.md 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from arroyo_dagster.state.model.checkpoints import (
    CommittedMarker,
    CurrentGeneration,
    EpochRecord,
    GenerationManifest,
    Manifest,
)
from arroyo_dagster.state.model.ids import Epoch, StatePath, WorkerGeneration
from arroyo_dagster.state.model.layout import JobPaths, parse_manifest_path
from arroyo_dagster.state.planning.restore import recovery
from arroyo_dagster.state.planning.restore.checkpoint import merged_needs_commit
from arroyo_dagster.state.planning.verify.findings import (
    KEEP_AND_REPORT,
    Finding,
    Severity,
    either,
    error,
    note,
    warning,
)
from arroyo_dagster.state.planning.verify.records import (
    NO_STATE_LOST,
    MetadataFacts,
    Unreadable,
    identity_findings,
    unreadable_finding,
    version_findings,
)

NextStart = recovery.Resolved


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolFacts(MetadataFacts):
    """Like `MetadataFacts`, for the protocol layout.

    Attributes:
        generations: the worker generations that have a directory, ascending.
        next_start: what the next start would restore; a text if the objects contradict each other;
            None if not requested, or if it depends on an object that does not decode.
    """

    generations: tuple[WorkerGeneration, ...]
    next_start: NextStart | str | None = None


def protocol_findings(facts: ProtocolFacts) -> list[Finding]:
    """Find what is wrong with the objects around an epoch."""
    parent = _parent_epoch(facts)
    findings = [
        finding
        for epoch in reversed(_expected_epochs(facts, parent))
        for finding in _epoch_findings(facts, epoch, critical=epoch in (facts.epoch, parent))
    ]
    findings += _fence_findings(facts)
    findings += _generation_findings(facts)
    # An error reported above is the cause of what the next start would do.
    if not any(finding.severity is Severity.ERROR for finding in findings):
        findings += _start_findings(facts)
    return findings


def head_of(facts: MetadataFacts) -> tuple[StatePath, Manifest] | None:
    """Return the path and manifest of the verified epoch's owner; None if they cannot be read."""
    record = facts.get(facts.paths.epoch_record(facts.epoch), EpochRecord)
    if record is None:
        return None
    manifest = facts.get(record.checkpoint_ref, Manifest)
    return None if manifest is None else (record.checkpoint_ref, manifest)


def _parent_epoch(facts: MetadataFacts) -> Epoch | None:
    """Return the parent's epoch, if record and manifest agree on it."""
    head = head_of(facts)
    record = facts.get(facts.paths.epoch_record(facts.epoch), EpochRecord)
    if head is None or record is None or head[1].parent_ref is None:
        return None
    address = parse_manifest_path(head[1].parent_ref)
    agreed = record.parent_ref == head[1].parent_ref
    managed = address is not None and address.paths == facts.paths and agreed
    return address.epoch if address is not None and managed else None


def _expected_epochs(facts: MetadataFacts, parent: Epoch | None) -> list[Epoch]:
    """Return the epochs with a record, the parent, and the number before each, to find gaps."""
    oldest = min(facts.epochs, default=facts.epoch)
    before = (Epoch(epoch - 1) for epoch in facts.epochs if epoch > oldest)
    epochs = {*facts.epochs, *before, facts.epoch, *([] if parent is None else [parent])}
    return sorted(epoch for epoch in epochs if not facts.rolled_back(epoch))


# ---- one epoch -----------------------------------------------------------------------------------


def _epoch_findings(facts: MetadataFacts, epoch: Epoch, *, critical: bool) -> Iterator[Finding]:
    path = facts.paths.epoch_record(epoch)
    record = facts.objects.get(path)
    if record is None and epoch < min(facts.epochs, default=epoch) and not facts.newest:
        # An older epoch is restored only on request, where the rule for parents is checked.
        evidence = f"epoch {epoch}, the parent of epoch {facts.epoch}, has expired"
        step = "nothing, to read it; a start from it would be refused"
        yield note("parent-expired", path, evidence, step)
    elif record is None:
        evidence = f"epoch {epoch} has no record, though a later one has"
        step = KEEP_AND_REPORT if critical else NO_STATE_LOST
        yield either(critical, "record-missing", path, evidence, step)
    elif isinstance(record, Unreadable):
        yield unreadable_finding(path, record, critical=critical)
    elif isinstance(record, EpochRecord):
        wrong = list(identity_findings(facts.paths, path, record, critical=critical))
        wrong = wrong or list(_ref_findings(facts.paths, path, record, critical=critical))
        yield from version_findings(path, record.version)
        yield from wrong or _manifest_findings(facts, record, critical=critical)


def _ref_findings(
    paths: JobPaths, path: StatePath, record: EpochRecord, *, critical: bool
) -> Iterator[Finding]:
    address = parse_manifest_path(record.checkpoint_ref)
    expected = (paths, record.worker_generation, record.epoch)
    if address is None or (address.paths, address.worker_generation, address.epoch) != expected:
        evidence = (
            f"names {record.checkpoint_ref}; expected a manifest of epoch {record.epoch} in "
            f"generation {record.worker_generation} of this job"
        )
        yield either(critical, "leads-elsewhere", path, evidence, KEEP_AND_REPORT)


def _manifest_findings(
    facts: MetadataFacts, record: EpochRecord, *, critical: bool
) -> Iterator[Finding]:
    ref = record.checkpoint_ref
    manifest = facts.objects.get(ref)
    if manifest is None:
        evidence = f"the manifest of epoch {record.epoch} is missing; its record names it"
        yield either(critical, "manifest-missing", ref, evidence, KEEP_AND_REPORT)
    elif isinstance(manifest, Unreadable):
        yield unreadable_finding(ref, manifest, critical=critical)
    elif isinstance(manifest, Manifest):
        identity = {"worker_generation": record.worker_generation, "epoch": record.epoch}
        wrong = list(identity_findings(facts.paths, ref, manifest, critical=critical, **identity))
        yield from wrong or _link_findings(facts, record, manifest, critical=critical)
        yield from () if wrong else _commit_findings(facts, ref, manifest, critical=critical)


def _link_findings(
    facts: MetadataFacts, record: EpochRecord, manifest: Manifest, *, critical: bool
) -> Iterator[Finding]:
    ref, parent = record.checkpoint_ref, manifest.parent_ref
    if record.parent_ref != parent:
        evidence = f"names {parent} as its parent, its epoch record {record.parent_ref}"
        yield either(critical, "parents-differ", ref, evidence, KEEP_AND_REPORT)
    elif parent is None:
        if manifest.epoch > min(facts.epochs, default=manifest.epoch):
            evidence = f"epoch {manifest.epoch} names no parent, although there are earlier epochs"
            step = "restore the epoch before it if state seems lost; cleanups stop here"
            yield warning("chain-broken", ref, evidence, step)
    else:
        yield from _parent_findings(facts, ref, manifest.epoch, parent, critical=critical)


def _parent_findings(
    facts: MetadataFacts, ref: StatePath, epoch: Epoch, parent: StatePath, *, critical: bool
) -> Iterator[Finding]:
    critical = critical and epoch == facts.epoch
    address = parse_manifest_path(parent)
    if address is None or address.paths != facts.paths or address.epoch >= epoch:
        evidence = f"names {parent} as its parent, which is no earlier checkpoint of this job"
        yield either(critical, "leads-elsewhere", ref, evidence, KEEP_AND_REPORT)
        return
    owner = facts.get(facts.paths.epoch_record(address.epoch), EpochRecord)
    if owner is not None and owner.checkpoint_ref != parent:
        evidence = f"its parent {parent} is orphaned: {owner.checkpoint_ref} owns that epoch"
        yield either(critical, "parent-orphaned", ref, evidence, KEEP_AND_REPORT)


def _commit_findings(
    facts: MetadataFacts, ref: StatePath, manifest: Manifest, *, critical: bool
) -> Iterator[Finding]:
    tables = merged_needs_commit({operator.operator: operator for operator in manifest.operators})
    # An epoch of a compaction has nothing to commit, even if its tables commit in two phases.
    if tables != manifest.needs_commit and not facts.managed:
        evidence = f"has needs_commit = {manifest.needs_commit}, but its tables imply {tables}"
        yield either(critical, "commit-flag", ref, evidence, KEEP_AND_REPORT)
    if not manifest.needs_commit:
        return
    path = recovery.marker_path(ref)
    marker = facts.objects.get(path)
    if isinstance(marker, Unreadable):
        yield unreadable_finding(path, marker, critical=critical)
    elif isinstance(marker, CommittedMarker):
        yield from identity_findings(
            facts.paths, path, marker, critical=critical, checkpoint_ref=ref
        )
        yield from version_findings(path, marker.version)
    elif manifest.epoch == facts.epoch:
        evidence = (
            f"epoch {manifest.epoch} is committing: there is no record that its commit is finished"
        )
        step = "nothing, if the job runs; else the next start commits it again, then continues"
        yield warning("commit-pending", path, evidence, step)
    else:
        evidence = f"epoch {manifest.epoch} was not committed, although a later epoch follows it"
        step = "restore an epoch whose parent is committed" if critical else NO_STATE_LOST
        yield either(critical, "commit-missing", path, evidence, step)


# ---- fence and generations -----------------------------------------------------------------------


def _fence_findings(facts: ProtocolFacts) -> Iterator[Finding]:
    path = facts.paths.current_generation
    fence = facts.objects.get(path)
    if isinstance(fence, Unreadable):
        yield unreadable_finding(path, fence, critical=True)
    elif fence is None:
        evidence = (
            "the fence is missing: tools do not find this job, and older writers are not stopped"
        )
        yield warning("fence-missing", path, evidence, "start the job: a start writes it")
    elif isinstance(fence, CurrentGeneration):
        yield from version_findings(path, fence.version)
        own = facts.paths.generation_manifest(fence.worker_generation)
        yield from identity_findings(
            facts.paths, path, fence, critical=True, generation_manifest_ref=own
        )
        yield from _stale_findings(facts, path, fence.worker_generation)


def _stale_findings(
    facts: ProtocolFacts, path: StatePath, fence: WorkerGeneration
) -> Iterator[Finding]:
    records = [facts.get(facts.paths.epoch_record(epoch), EpochRecord) for epoch in facts.epochs]
    newer = [entry for entry in records if entry is not None and entry.worker_generation > fence]
    if newer:
        evidence = (
            f"names generation {fence}, although generation {newer[-1].worker_generation} wrote "
            f"epoch {newer[-1].epoch}: writers of generation {fence} would not be stopped"
        )
        step = "make sure that no older run is alive, then start the job: a start raises it"
        yield error("fence-stale", path, evidence, step)


def _generation_findings(facts: ProtocolFacts) -> Iterator[Finding]:
    head = head_of(facts)
    for number in facts.generations:
        path = facts.paths.generation_manifest(number)
        manifest = facts.objects.get(path)
        # A start reads the newest manifest first, and an older one only if it finds nothing.
        critical = facts.newest and head is not None and number >= head[1].worker_generation
        if isinstance(manifest, Unreadable):
            yield unreadable_finding(path, manifest, critical=critical)
        elif isinstance(manifest, GenerationManifest):
            yield from version_findings(path, manifest.version)
            yield from identity_findings(facts.paths, path, manifest, critical=critical)


# ---- the next start ------------------------------------------------------------------------------


def _start_findings(facts: ProtocolFacts) -> Iterator[Finding]:
    head = head_of(facts)
    start = facts.next_start
    if head is None or start is None or not facts.newest:
        return
    ref, manifest = head
    if isinstance(start, str):
        yield error("start-contradicted", ref, start, "delete nothing, and report it")
    elif isinstance(start, recovery.Claim):
        evidence = (
            f"epoch {start.record.epoch} is unclaimed: its run ended before it wrote the record; "
            "the next start claims and restores it"
        )
        step = "nothing, if that is intended; verify it then"
        yield warning("epoch-unclaimed", start.record.checkpoint_ref, evidence, step)
    elif isinstance(start, recovery.Restore) and start.ref == ref:
        yield from _hint_findings(facts, ref, manifest)
    elif isinstance(start, recovery.Restore) and start.manifest.epoch > manifest.epoch:
        evidence = f"epoch {start.manifest.epoch} was published while this one was verified"
        yield note("epoch-published", start.ref, evidence, "nothing; verify that epoch, if needed")
    else:
        yield _lost_head(facts, manifest, start)


def _lost_head(
    facts: ProtocolFacts,
    head: Manifest,
    start: recovery.StartEmpty | recovery.Restore | recovery.CannotStart,
) -> Finding:
    path = facts.paths.generation_manifest(head.worker_generation)
    missing = facts.objects.get(path) is None
    if isinstance(start, recovery.CannotStart):
        if not missing:
            return error("start-fails", start.ref, start.reason, "restore the epoch before it")
        evidence = f"the next start fails at {start.ref} ({start.reason})"
    else:
        instead = start.ref if isinstance(start, recovery.Restore) else "nothing at all"
        evidence = f"the next start restores {instead}, not epoch {head.epoch}"
    step = f"write {path} again, its latest_checkpoint_ref naming epoch {head.epoch}"
    if missing:
        return error("generation-manifest-missing", path, f"missing: {evidence}", step)
    return error("hint-stale", path, evidence, step)


def _hint_findings(facts: ProtocolFacts, ref: StatePath, head: Manifest) -> Iterator[Finding]:
    """Find a stale hint that the next start does not use: managed jobs follow the records."""
    path = facts.paths.generation_manifest(head.worker_generation)
    fence = facts.get(facts.paths.current_generation, CurrentGeneration)
    manifest = facts.get(path, GenerationManifest)
    step = "nothing; a start of a managed job follows the records"
    if manifest is not None and manifest.latest_ref != ref:
        evidence = f"names {manifest.latest_ref} as its latest, not epoch {head.epoch}"
        yield note("hint-stale", path, evidence, step)
    elif manifest is None and fence and fence.worker_generation == head.worker_generation:
        evidence = f"missing, although generation {head.worker_generation} is the newest"
        yield note("generation-manifest-missing", path, evidence, step)
