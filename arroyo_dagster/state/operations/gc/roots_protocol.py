"""Read the roots of a job of the protocol layout: the fence, the newest epoch, its ancestors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence

from arroyo_dagster.errors import ArroyoStateError, FormatError, ProtocolError
from arroyo_dagster.state.codec import records
from arroyo_dagster.state.codec.references import manifest_references
from arroyo_dagster.state.model.checkpoints import (
    CheckpointState,
    CurrentGeneration,
    EpochRecord,
    GenerationManifest,
)
from arroyo_dagster.state.model.garbage import EpochRoot, References, Root, Roots
from arroyo_dagster.state.model.ids import Epoch, StatePath, WorkerGeneration
from arroyo_dagster.state.model.layout import (
    CHECKPOINT_MANIFEST,
    GENERATION_MANIFEST,
    parse_manifest_path,
)
from arroyo_dagster.state.model.progress import OnProgress, Progress, ProgressUnit
from arroyo_dagster.state.operations.gc.root_reader import AT_ONCE, NO_EPOCH, Reader, T
from arroyo_dagster.state.planning.gc.epoch_roots import (
    check_inside_job,
    epoch_root,
    unreadable_objects,
    unreadable_root,
)
from arroyo_dagster.state.planning.gc.reachability import refuse
from arroyo_dagster.state.planning.restore import recovery
from arroyo_dagster.state.storage.concurrency import concurrently


def protocol_roots(reader: Reader, on_progress: OnProgress) -> Roots | None:
    """Read the roots of a protocol-layout job; None if the job changed meanwhile: read again."""
    paths = reader.paths
    fence = reader.read(paths.current_generation, records.decode_current_generation)
    job_pins, aside = reader.pins_in_full()
    result = newest_head(reader, fence)
    if result is None:
        raise refuse(NO_EPOCH, paths, path=paths.current_generation)
    head, restorable, manifests = result
    epochs: list[EpochRoot] = []
    for epoch in itertools.chain([head], _below(reader, head)):
        epochs.append(epoch)
        if len(epochs) % AT_ONCE == 1:  # how many there are is known at the last one
            on_progress(Progress(step="read epochs", done=len(epochs), unit=ProgressUnit.EPOCHS))
    if head.parent_ref is not None and len(epochs) == 1:
        # Gc never deletes the head's direct parent: another process did, or there is a newer epoch.
        again = newest_head(Reader(reader.store, paths), fence)
        if again is not None and again[0].ref == head.ref:
            raise refuse("the parent of the newest epoch is missing", paths, path=head.parent_ref)
        return None
    for pin in sorted(job_pins.ever_pinned, reverse=True):
        if pin < epochs[-1].epoch:
            epochs += _pinned(reader, pin)
    epochs = with_rolled_back(reader, epochs, job_pins.ever_pinned)
    data = reader.store.read(paths.current_generation)
    if records.decode_current_generation(data, paths.current_generation) != fence:
        return None
    generations = {path: manifest for path, manifest in manifests.items() if manifest is not None}
    own = generations.get(paths.generation_manifest(fence.worker_generation))
    numbers = sorted(manifest.worker_generation for manifest in generations.values())
    latest = None if own is None else own.latest_ref
    refs = {epoch.ref for epoch in epochs}
    lost = latest is not None and latest not in refs and reader.store.head(latest) is None
    return Roots(
        paths=paths,
        worker_generation=fence.worker_generation,
        resolved_from=numbers[0] if numbers else None,
        restorable=restorable,
        restored=own.base_ref if own else None,
        epochs=tuple(epochs),
        attempts=_unowned(reader, epochs),
        job_pins=job_pins,
        quarantined=aside,
        generations=tuple(numbers),
        lost=latest if lost else None,
        more=tuple(reader.roots.values()),
    )


def newest_head(
    reader: Reader, fence: CurrentGeneration
) -> tuple[EpochRoot, Epoch, dict[StatePath, GenerationManifest | None]] | None:
    """Return the epoch that a start would restore, the epoch that an Arroyo job would restore, and
    the generation manifests read for that.

    None: no worker generation leads to an epoch.
    """
    facts: dict[StatePath, recovery.MetadataRecord | None] = {
        reader.paths.current_generation: fence
    }
    head = _resolved(reader, fence, facts, as_arroyo=False)
    by_arroyo = _resolved(reader, fence, facts, as_arroyo=True)
    if head is None or by_arroyo is None:
        return None
    state = CheckpointState.COMMITTING if head.replay_commit else CheckpointState.READY
    references = reader.read(head.ref, manifest_references)
    path = reader.paths.epoch_record(references.epoch)
    reader.read(path, records.decode_epoch_record)
    root = epoch_root(reader.paths, head.ref, references, state, reader.taken((head.ref, path)))
    generations = {
        path: fact
        for path, fact in facts.items()
        if path.name == GENERATION_MANIFEST
        and (fact is None or isinstance(fact, GenerationManifest))
    }
    return root, by_arroyo.manifest.epoch, generations


def _resolved(
    reader: Reader,
    fence: CurrentGeneration,
    facts: dict[StatePath, recovery.MetadataRecord | None],
    *,
    as_arroyo: bool,
) -> recovery.Restore | None:
    starting = WorkerGeneration(fence.worker_generation + 1)
    outcome = recovery.resolve_with(
        reader.early, reader.paths, starting, facts, as_arroyo=as_arroyo, only_reads=True
    )
    if isinstance(outcome, recovery.CannotStart):
        raise refuse(f"it cannot be restored: {outcome.reason}", reader.paths, path=outcome.ref)
    return outcome if isinstance(outcome, recovery.Restore) else None


def _below(reader: Reader, newest: EpochRoot) -> Iterator[EpochRoot]:
    """Yield an epoch's ancestors, newest first, until one does not exist; reads many at a time."""
    while newest.parent_ref is not None:
        for root in _some_below(reader, newest):
            if root is None:
                return
            yield root
            newest = root


def _some_below(reader: Reader, newest: EpochRoot) -> Iterator[EpochRoot | None]:
    """Yield the next ancestors, then None after the last. Reads guessed numbers in advance."""
    paths = reader.paths
    above = newest.parent_ref
    assert above is not None
    parent = recovery.expect_manifest_path(paths, above).epoch
    first = min(parent, newest.epoch - 1)  # after a rollback it may be much older
    numbers = [Epoch(n) for n in range(first, max(-1, first - AT_ONCE), -1)]
    tried = concurrently(lambda n: _tried(lambda: _claim(reader, n)), numbers)
    refs = [claim.checkpoint_ref if isinstance(claim, EpochRecord) else None for claim in tried]
    if newest.parent_ref not in refs:
        for record_read in tried[:1]:
            _known(record_read)
        claims = [record for record in tried if isinstance(record, EpochRecord)]
        yield _without_record(reader, newest, claims)
        return
    manifests = concurrently(lambda ref: _tried(lambda: _manifest(reader, ref)), refs)
    for number, record_read, manifest_read in zip(numbers, tried, manifests, strict=True):
        if newest.parent_ref is None:
            yield None
            return
        if number != recovery.expect_manifest_path(paths, newest.parent_ref).epoch:
            return  # a rollback: the caller continues from there
        claim: EpochRecord | None = _known(record_read)
        manifest: References | None = _known(manifest_read)
        if claim is None or claim.checkpoint_ref != newest.parent_ref:
            # Gc deletes records first: the manifest refers to the next parent.
            yield _without_record(reader, newest, [claim])
            return
        if manifest is None:
            _check_vanished(reader, newest, claim)
            yield None
            return
        ref = claim.checkpoint_ref
        roots = reader.taken((ref, paths.epoch_record(claim.epoch)))
        newest = _checked(reader, newest, ref, manifest, CheckpointState.READY, roots)
        yield newest


def _claim(reader: Reader, epoch: Epoch) -> EpochRecord | None:
    claim = reader.optional(reader.paths.epoch_record(epoch), records.decode_epoch_record)
    if claim is not None:
        recovery.expect_manifest_path(reader.paths, claim.checkpoint_ref)
    return claim


def _manifest(reader: Reader, ref: StatePath | None) -> References | None:
    return None if ref is None else reader.optional(ref, manifest_references)


def _tried(read: Callable[[], T | None]) -> T | ArroyoStateError | None:
    """Return the object read, or its error: an epoch that a rollback abandoned may be damaged."""
    try:
        return read()
    except (FormatError, ProtocolError) as error:
        return error


def _known(found: T | ArroyoStateError | None) -> T | None:
    """Return what `_tried` read, or raise its error."""
    if isinstance(found, ArroyoStateError):
        raise found
    return found


def _without_record(
    reader: Reader, newest: EpochRoot, claims: Sequence[EpochRecord | None]
) -> EpochRoot | None:
    ref = newest.parent_ref
    assert ref is not None
    recovery.expect_manifest_path(reader.paths, ref)
    manifest = reader.optional(ref, manifest_references)
    if manifest is None:
        return None
    claim = next((c for c in claims if c is not None and c.epoch == manifest.epoch), None)
    if claim is not None:
        raise refuse(
            f"epoch {newest.epoch} refers to a checkpoint that does not own its epoch",
            reader.paths,
            path=ref,
            owner=claim.checkpoint_ref,
        )
    roots = reader.taken((ref,))
    state = CheckpointState.PARTIALLY_COLLECTED
    return _checked(reader, newest, ref, manifest, state, roots)


def _checked(
    reader: Reader,
    newest: EpochRoot,
    ref: StatePath,
    manifest: References,
    state: CheckpointState,
    roots: tuple[Root, ...],
) -> EpochRoot:
    if manifest.epoch >= newest.epoch:
        raise refuse(
            f"the parent of epoch {newest.epoch} belongs to epoch {manifest.epoch}",
            reader.paths,
            path=ref,
        )
    missing = (reader.paths.epoch_record(manifest.epoch),)
    gone = missing if state is CheckpointState.PARTIALLY_COLLECTED else ()
    return epoch_root(reader.paths, ref, manifest, state, roots, gone)


def _check_vanished(reader: Reader, newest: EpochRoot, claim: EpochRecord) -> None:
    """Refuse a record without its manifest, unless both were deleted between the two reads."""
    path = reader.paths.epoch_record(claim.epoch)
    if reader.store.head(path) is None:
        reader.roots.pop(path, None)
        return
    raise refuse(
        f"epoch {claim.epoch} has a record but no manifest",
        reader.paths,
        path=claim.checkpoint_ref,
        newer=newest.ref,
    )


def _pinned(reader: Reader, pin: Epoch) -> list[EpochRoot]:
    """Read a pinned epoch below the chain, and its existing ancestors."""
    path = reader.paths.epoch_record(pin)
    claim = reader.optional(path, records.decode_epoch_record)
    if claim is None:
        return []  # reported by `check_roots`
    recovery.expect_manifest_path(reader.paths, claim.checkpoint_ref)
    manifest = reader.read(claim.checkpoint_ref, manifest_references)
    roots = reader.taken((claim.checkpoint_ref, path))
    root = epoch_root(reader.paths, claim.checkpoint_ref, manifest, CheckpointState.READY, roots)
    return [root, *_below(reader, root)]


def _unowned(reader: Reader, epochs: Sequence[EpochRoot]) -> tuple[EpochRoot, ...]:
    """Return the manifests that a start would read and that own no epoch; their files are kept."""
    owned = {epoch.ref for epoch in epochs}
    refs = [ref for ref in reader.roots if ref.name == CHECKPOINT_MANIFEST]
    roots = (attempt(reader, ref) for ref in refs if ref not in owned)
    return tuple(root for root in roots if root is not None)


def attempt(reader: Reader, ref: StatePath) -> EpochRoot | None:
    """Read a manifest that owns no epoch, with its state; None if it no longer exists."""
    manifest = reader.optional(ref, manifest_references)
    if manifest is None:
        return None
    path = reader.paths.epoch_record(manifest.epoch)
    claim = reader.optional(path, records.decode_epoch_record)
    state = CheckpointState.UNCLAIMED
    if claim is not None:
        owns = claim.checkpoint_ref == ref
        state = CheckpointState.READY if owns else CheckpointState.ORPHANED
    return epoch_root(reader.paths, ref, manifest, state, reader.taken((ref, path)))


# ---- epochs that a rollback has abandoned: they exist until they expire, and may be damaged ------
# The files that such an epoch lists are kept as long as the epoch exists. An epoch whose metadata
# does not decode lists no files, but is a root all the same, identified by its name.


def with_rolled_back(
    reader: Reader, epochs: Sequence[EpochRoot], pinned: Collection[Epoch]
) -> list[EpochRoot]:
    """Add the epochs that rollbacks have abandoned to the chain of epochs.

    Args:
        epochs: newest first.
        pinned: epochs that are read even where no neighbour exists.
    """
    by_number = {root.epoch: root for root in epochs}
    for root in epochs:
        restored = root.rolled_back_to
        parent = None if root.parent_ref is None else parse_manifest_path(root.parent_ref)
        if restored is not None and parent is not None and parent.epoch == restored:
            for older in _between(reader, restored, root, pinned):
                by_number.setdefault(older.epoch, older)
    return sorted(by_number.values(), key=lambda root: -root.epoch)


def _between(
    reader: Reader, restored: Epoch, newer: EpochRoot, pinned: Collection[Epoch]
) -> Iterator[EpochRoot]:
    """Yield the epochs between the restored epoch and the rollback's, newest first.

    Epochs expire oldest first: below a run of numbers without an epoch, only pinned ones exist.
    """
    last = newer.epoch
    while last > restored + 1:
        first = max(restored + 1, last - AT_ONCE)
        numbers = [Epoch(n) for n in range(last - 1, first - 1, -1)]
        roots = [root for root in concurrently(lambda n: _one(reader, n, newer), numbers) if root]
        yield from roots
        last = Epoch(first)
        if not roots:
            break
    rest = [pin for pin in sorted(pinned, reverse=True) if restored < pin < last]
    yield from (root for pin in rest if (root := _one(reader, pin, newer)) is not None)


def _one(reader: Reader, epoch: Epoch, newer: EpochRoot) -> EpochRoot | None:
    """Read one epoch by its number; None if it does not exist."""
    record = reader.paths.epoch_record(epoch)
    claim: EpochRecord | None = None
    try:
        claim = reader.optional(record, records.decode_epoch_record)
        if claim is None:
            return None
        _check_claim(reader, claim, epoch)
        manifest = reader.optional(claim.checkpoint_ref, manifest_references)
        return _readable(reader, claim, manifest)
    except (FormatError, ProtocolError) as error:
        address = None if claim is None else parse_manifest_path(claim.checkpoint_ref)
        own = address is not None and (address.paths, address.epoch) == (reader.paths, epoch)
        ref = claim.checkpoint_ref if claim is not None and own else None
        by_name = unreadable_objects(reader.paths, epoch, ref)
        return unreadable_root(
            epoch,
            error.message,
            by_name,
            roots=known_roots(reader, by_name),
            finish_time_micros=newer.finish_time_micros,
        )


def _check_claim(reader: Reader, claim: EpochRecord, epoch: Epoch) -> None:
    try:
        address = recovery.expect_manifest_path(reader.paths, claim.checkpoint_ref)
    except ProtocolError as error:
        raise FormatError(error.message) from error
    if address.epoch != epoch:
        raise FormatError(f"its record names a manifest of epoch {address.epoch}")


def _readable(reader: Reader, claim: EpochRecord, manifest: References | None) -> EpochRoot:
    paths, ref = reader.paths, claim.checkpoint_ref
    if manifest is None:
        raise FormatError("its manifest is missing")
    check_inside_job(paths, claim.epoch, manifest)
    roots = reader.taken((ref, paths.epoch_record(claim.epoch)))
    return epoch_root(paths, ref, manifest, CheckpointState.ROLLED_BACK, roots, rolled_back=True)


def known_roots(reader: Reader, found: Sequence[StatePath]) -> tuple[Root, ...]:
    """Remember undecodable metadata by its bytes; this package's own objects list no files."""
    metadata = [path for path in found if not path.startswith(f"{reader.paths.maintenance}/")]
    stored = [path for path in metadata if path in reader.roots or reader.raw(path)]
    return reader.taken(stored)
