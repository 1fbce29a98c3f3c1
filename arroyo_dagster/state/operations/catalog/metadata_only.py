"""Find the epochs of which an expiry has kept the metadata only. This module writes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from arroyo_dagster.errors import FormatError, NotFoundError
from arroyo_dagster.state.metadata.tree import CheckpointTree
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import JobPaths, Layout, parse_manifest_path
from arroyo_dagster.state.planning.restore.partially_collected import (
    Remains,
    metadata_only,
    parents_kept,
)
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore


def metadata_only_epochs(
    store: ObjectStore, paths: JobPaths, wanted: Collection[Epoch] | None = None
) -> dict[Epoch, Epoch]:
    """Return the epochs of which only the metadata is left, each with the epoch that needs it.

    Costs one request for a job without pins. What cannot be read counts as damaged, not as this.

    Args:
        wanted: the epochs in question; None = all.

    Raises:
        StorageError: the store failed.
    """
    reader = CheckpointTree(store, paths)
    if paths.layout is Layout.LEGACY:
        return {}  # its epochs have no parents
    data = reader.objects.bytes_of(paths.job_pins)
    if data is None:
        return {}  # without loading what decodes pins
    from arroyo_dagster.state.codec.gc import decode_pins

    try:
        pins = decode_pins(data, paths.job_pins)
    except FormatError:
        return {}  # `health` reports it
    pinned = pins.ever_pinned
    if not pinned and not pins.expired_below:
        return {}
    epochs = reader.epochs()
    if not pinned and (not epochs or epochs[-1] > pins.expired_below):
        return {}
    wanted = set(epochs if wanted is None else wanted)
    read = _readable(reader, [epoch for epoch in epochs if epoch in pinned or epoch == epochs[-1]])
    newest = read.get(epochs[-1]) if epochs else None
    if newest is None:
        return {}
    parents = parents_kept(read.values(), pinned, newest, pins.expired_below)
    held = {epoch: by for ref, by in parents.items() if (epoch := _epoch_of(ref)) is not None}
    candidates = held.keys() & set(epochs) - pinned
    if not candidates & wanted:
        return {}
    read |= _readable(reader, sorted(candidates))
    others = {epoch for epoch in epochs if epoch not in pinned and epoch not in candidates}
    sizes = stored_sizes(
        store, {path for epoch in candidates & read.keys() for path in read[epoch].paths}
    )
    remains = [
        Remains(
            epoch=epoch,
            listed=frozenset(one.paths),
            lost=frozenset(path for path in one.paths if epoch in candidates and path not in sizes),
        )
        for epoch, one in read.items()
    ]
    emptied = metadata_only(remains, candidates, others)
    return {epoch: held[epoch] for epoch in sorted(emptied & wanted)}


def _epoch_of(ref: StatePath) -> Epoch | None:
    address = parse_manifest_path(ref)
    return None if address is None else address.epoch


def _readable(reader: CheckpointTree, epochs: Collection[Epoch]) -> dict[Epoch, Checkpoint]:
    def load(epoch: Epoch) -> Checkpoint | None:
        try:
            return reader.load_checkpoint_metadata(epoch)
        except (FormatError, NotFoundError):
            return None

    pairs = zip(epochs, concurrently(load, epochs), strict=True)
    return {epoch: checkpoint for epoch, checkpoint in pairs if checkpoint is not None}


def no_rows_left(paths: JobPaths, epoch: Epoch, held: Mapping[Epoch, Epoch]) -> NotFoundError:
    """Return the error for an epoch of which only the metadata is left.

    Args:
        held: as `metadata_only_epochs` returns it.
    """
    return NotFoundError(
        f"epoch {epoch} is metadata only: it expired, and its metadata stays for epoch "
        f"{held[epoch]}",
        job=paths.root,
        epoch=epoch,
        next_step=f"choose another epoch: `arroyo-state epochs {paths.root}` lists them",
    )


# ---- which of the files that epochs list exist. This module writes nothing -----------------------


def stored_sizes(store: ObjectStore, paths: Iterable[StatePath]) -> dict[StatePath, int]:
    """Return the sizes in bytes of the files that exist, with one listing per directory."""
    unique = set(paths)
    parents = sorted({parent for path in unique if (parent := path.parent) is not None})
    listings = concurrently(store.list_dir, parents)
    return {
        info.path: info.size_bytes
        for listing in listings
        for info in listing.objects
        if info.path in unique
    }
