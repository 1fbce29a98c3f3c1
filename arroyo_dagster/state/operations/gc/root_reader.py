"""Objects of one job read as roots, each once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TypeVar

from arroyo_dagster.errors import NotFoundError
from arroyo_dagster.state.codec import gc as codec
from arroyo_dagster.state.metadata.objects import decode_by_name
from arroyo_dagster.state.model.checkpoints import RECORD_VERSION
from arroyo_dagster.state.model.garbage import JobPins, Quarantined, Root, digest_of
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.planning.gc.reachability import refuse
from arroyo_dagster.state.planning.restore import recovery
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

T = TypeVar("T")
AT_ONCE = 64
"""So many epochs are read at a time."""

NO_EPOCH = "the job has no epoch, so nothing says what is needed"

Progress = Callable[[str, int, int | None], None]
"""Told what is being done, how much of it is done, and of how much: None if nobody knows yet."""


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
            raise refuse("an object that must be there is missing", self.paths, path=path)
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
