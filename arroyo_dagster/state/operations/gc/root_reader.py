"""Objects of one job read as roots, each once; and an epoch made of what its metadata says."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TypeVar

from arroyo_dagster.errors import NotFoundError
from arroyo_dagster.state.codec import gc as codec
from arroyo_dagster.state.metadata.reader import decode_by_name
from arroyo_dagster.state.model.checkpoints import (
    RECORD_VERSION,
    CheckpointState,
)
from arroyo_dagster.state.model.garbage import (
    EpochRoot,
    JobPins,
    Quarantined,
    References,
    Root,
    digest_of,
)
from arroyo_dagster.state.model.ids import Epoch, OperatorId, StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.objects import NOTHING, Packed
from arroyo_dagster.state.planning.gc.reachability import refuse
from arroyo_dagster.state.planning.restore import recovery
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

T = TypeVar("T")
AT_ONCE = 64
"""How many epochs are read at a time."""

NO_EPOCH = "the job has no epoch, so it is unknown which objects are needed"

Progress = Callable[[str, int, int | None], None]
"""Called with the step, the number of done items, and the total; None = unknown yet."""


def no_root_progress(step: str, done: int, total: int | None) -> None:
    """No-op progress callback."""


class Reader:
    """Reads objects of one job, each once, and remembers what it read as roots."""

    def __init__(self, store: ObjectStore, paths: JobPaths) -> None:
        self.store = store
        self.paths = paths
        self.roots: dict[StatePath, Root] = {}
        self._early: dict[StatePath, bytes | None] = {}

    def optional(self, path: StatePath, decode: Callable[[bytes, str], T]) -> T | None:
        """Read an object; None if there is none."""
        data = self._early.pop(path) if path in self._early else self._bytes(path)
        if data is None:
            return None
        value = decode(data, path)
        self._check_version(path, value)
        self.roots[path] = Root(path=path, digest=digest_of(data), time_micros=_time_of(value))
        return value

    def required(self, path: StatePath, decode: Callable[[bytes, str], T]) -> T:
        """Read an object that something refers to."""
        value = self.optional(path, decode)
        if value is None:
            raise refuse("a required object is missing", self.paths, path=path)
        return value

    def raw(self, path: StatePath) -> bool:
        """Remember an object that does not decode; False if there is none."""
        data = self._bytes(path)
        if data is not None:
            self.roots[path] = Root(path=path, digest=digest_of(data))
        return data is not None

    def early(self, path: StatePath) -> recovery.MetadataRecord | None:
        """Read an object that will be asked for once more; then it is not read again."""
        data = self._early[path] = self._bytes(path)
        if data is None:
            return None
        value = decode_by_name(data, path)
        self._check_version(path, value)
        self.roots[path] = Root(path=path, digest=digest_of(data), time_micros=_time_of(value))
        return value

    def _bytes(self, path: StatePath) -> bytes | None:
        try:
            return self.store.read(path)
        except NotFoundError:
            return None

    def _check_version(self, path: StatePath, value: object) -> None:
        version = getattr(value, "version", RECORD_VERSION)
        if version != RECORD_VERSION:
            raise refuse(
                f"a record of version {version}: this release knows version {RECORD_VERSION}",
                self.paths,
                path=path,
                next_step="use a release of arroyo-dagster that knows it; nothing was deleted",
            )

    def taken(self, found: Iterable[StatePath]) -> tuple[Root, ...]:
        """What was read of these paths, in their order; no longer part of what is left."""
        return tuple(self.roots.pop(path) for path in found if path in self.roots)

    def job_pins(self) -> tuple[JobPins, tuple[Quarantined, ...]]:
        """Pins, and what lies in quarantine."""
        found = self.optional(self.paths.job_pins, codec.decode_pins) or JobPins()
        names = found.quarantines
        aside = concurrently(
            lambda name: self.required(
                self.paths.quarantine / name / "index.json",
                functools.partial(codec.decode_quarantined, name=name),
            ),
            names,
        )
        return found, tuple(aside)


def _time_of(value: object) -> int | None:
    for name in ("finish_time_micros", "created_at_micros", "updated_at_micros"):
        found = getattr(value, name, None)
        if isinstance(found, int):
            return found
    return None


# ---- an epoch ---


def epoch_root(
    paths: JobPaths,
    ref: StatePath,
    found: References,
    state: CheckpointState,
    roots: tuple[Root, ...],
    gone: tuple[StatePath, ...] = (),
    *,
    rolled_back: bool = False,
) -> EpochRoot:
    """An epoch, or an attempt at one, by what its metadata refers to."""
    root = f"{paths.root}/"
    return EpochRoot(
        epoch=found.epoch,
        worker_generation=found.worker_generation,
        ref=ref,
        parent_ref=found.parent_ref,
        state=state,
        min_epoch=found.min_epoch,
        start_time_micros=found.start_time_micros,
        finish_time_micros=found.finish_time_micros,
        needs_commit=found.needs_commit,
        operators=_shared(found.operators),
        managed=found.managed,
        files=Packed.of_paths(found.files),
        outside=next((path for path in found.files if not path.startswith(root)), None),
        gone=gone,
        rolled_back_to=found.rolled_back_to,
        rolled_back=rolled_back,
        roots=roots,
    )


def unreadable_root(
    epoch: Epoch,
    reason: str,
    by_name: tuple[StatePath, ...],
    *,
    roots: tuple[Root, ...] = (),
    finish_time_micros: int,
) -> EpochRoot:
    """An epoch that was rolled back and whose metadata does not say what it lists.

    Args:
        by_name: the objects that go with it, what makes it exist last.
        finish_time_micros: when it was finished at the latest.
    """
    return EpochRoot(
        epoch=epoch,
        worker_generation=None,
        ref=by_name[-1],
        parent_ref=None,
        state=CheckpointState.ROLLED_BACK,
        min_epoch=Epoch(0),
        start_time_micros=finish_time_micros,
        finish_time_micros=finish_time_micros,
        needs_commit=False,
        operators=(),
        managed=True,
        files=NOTHING,
        rolled_back=True,
        unreadable=reason,
        by_name=by_name,
        roots=roots,
    )


@functools.lru_cache(maxsize=64)
def _shared(operators: tuple[tuple[OperatorId, int], ...]) -> tuple[tuple[OperatorId, int], ...]:
    """The same operators as one object: every epoch of a job has them."""
    return operators
