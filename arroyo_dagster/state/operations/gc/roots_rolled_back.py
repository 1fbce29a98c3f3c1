"""Epochs that a rollback has abandoned: they exist until they expire, and may be damaged.

The files that such an epoch lists are kept as long as the epoch exists. An epoch whose metadata
does not decode lists no files, but is a root all the same, identified by its name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from arroyo_dagster.errors import FormatError, ProtocolError
from arroyo_dagster.state.codec import records
from arroyo_dagster.state.codec.references import manifest_references
from arroyo_dagster.state.model.checkpoints import CheckpointState, EpochRecord
from arroyo_dagster.state.model.garbage import EpochRoot, References, Root
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import parse_manifest_path
from arroyo_dagster.state.operations.gc.root_reader import AT_ONCE, Reader
from arroyo_dagster.state.planning.gc.epoch_roots import (
    check_inside_job,
    epoch_root,
    unreadable_objects,
    unreadable_root,
)
from arroyo_dagster.state.planning.restore import recovery
from arroyo_dagster.state.storage.concurrency import concurrently


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
