"""Fingerprints of what lies in the store: has anything changed since a job was verified?

Sizes and etags decide, where a store gives none the time of change; nothing is read but one listing
and the metadata of one epoch. Source: `ObjectInfo.etag`, which changes whenever its object does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.storage.store import ObjectInfo, ObjectStore

_DIGITS = 16


def list_objects(store: ObjectStore, paths: JobPaths) -> dict[StatePath, ObjectInfo]:
    """Return every object of a job by its path, except leases, which come and go.

    Raises:
        NotFoundError: the root does not exist.
        StorageError: the store failed.
    """
    leases = f"{paths.leases}/"
    return {info.path: info for info in store.list(paths.root) if not info.path.startswith(leases)}


def listing_digest(objects: Mapping[StatePath, ObjectInfo]) -> str:
    """Return 16 hexadecimal digits that differ where an object appeared, vanished or changed."""
    return _digest(_identity(objects[path]) for path in sorted(objects))


@dataclass(frozen=True, slots=True)
class EpochFingerprint:
    """The files of an epoch, as they were when it was verified.

    Attributes:
        operators: of each operator a digest of the paths that it lists, and one of the objects.
    """

    epoch: Epoch
    operators: Mapping[str, tuple[str, str]]

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, objects: Mapping[StatePath, ObjectInfo]
    ) -> EpochFingerprint:
        """Return the fingerprint of an epoch that was read whole."""
        return cls(
            checkpoint.epoch,
            {
                str(operator.operator): (
                    _digest(sorted(set(operator.paths))),
                    _digest(
                        _identity(objects[path]) if path in objects else f"{path}\0missing"
                        for path in sorted(set(operator.paths))
                    ),
                )
                for operator in checkpoint.operators
            },
        )

    def changed(self, now: EpochFingerprint) -> list[str]:
        """Return the operators that list the same files, of which one has another content now.

        An epoch that lists other files was rewritten or edited, which verification judges.
        """
        return [
            name
            for name, (files, objects) in self.operators.items()
            if name in now.operators
            and now.operators[name][0] == files
            and now.operators[name][1] != objects
        ]


def epoch_fingerprint(
    store: ObjectStore, paths: JobPaths, epoch: int, objects: Mapping[StatePath, ObjectInfo]
) -> EpochFingerprint | None:
    """Return the fingerprint of an epoch that the store still has; None if it is gone, or cannot be
    read, which verification judges.

    Raises:
        StorageError: the store failed.
    """
    try:
        return EpochFingerprint.of(
            ParquetBackend(store, paths).load_checkpoint_metadata(Epoch(epoch)), objects
        )
    except OSError:
        raise
    except ArroyoStateError:
        return None


def _identity(info: ObjectInfo) -> str:
    version = info.etag if info.etag is not None else info.modified_micros
    return f"{info.path}\0{info.size_bytes}\0{version}"


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode("utf-8", "surrogateescape"))
        digest.update(b"\n")
    return digest.hexdigest()[:_DIGITS]
