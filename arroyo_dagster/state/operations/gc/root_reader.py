"""Reader of a job's roots, which reads each object once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.state.metadata.objects import MetadataReader, decode_by_name
from arroyo_dagster.state.model.checkpoints import RECORD_VERSION
from arroyo_dagster.state.model.garbage import Root, digest_of
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.planning.gc.reachability import refuse
from arroyo_dagster.state.planning.restore import recovery
from arroyo_dagster.state.storage.store import ObjectStore

T = TypeVar("T")
AT_ONCE = 64
"""How many epochs are read at a time."""

NO_EPOCH = "the job has no epoch, so it is unknown which objects are needed"


class Reader(MetadataReader):
    """Reads objects of one job, each once, and keeps them as roots."""

    def __init__(self, store: ObjectStore, paths: JobPaths) -> None:
        super().__init__(store, paths)
        self.roots: dict[StatePath, Root] = {}
        self._early: dict[StatePath, bytes | None] = {}

    def bytes_of(self, path: StatePath) -> bytes | None:
        """Read an object's bytes, or return those that `early` read; None if it does not exist."""
        return self._early.pop(path) if path in self._early else super().bytes_of(path)

    def raw(self, path: StatePath) -> bool:
        """Keep an object that does not decode as a root; False if it does not exist."""
        data = super().bytes_of(path)
        if data is not None:
            self.roots[path] = Root(path=path, digest=digest_of(data))
        return data is not None

    def early(self, path: StatePath) -> recovery.MetadataRecord | None:
        """Read an object that is requested once more later; that request does not read it again."""
        data = super().bytes_of(path)
        self._early[path] = data
        record = self.optional(path, decode_by_name)
        self._early[path] = data
        return record

    def _remember(self, path: StatePath, data: bytes, value: object) -> None:
        version = getattr(value, "version", RECORD_VERSION)
        if version != RECORD_VERSION:
            raise refuse(
                f"a record of version {version}: this release knows version {RECORD_VERSION}",
                self.paths,
                path=path,
                next_step="use a release of arroyo-dagster that knows it; nothing was deleted",
            )
        self.roots[path] = Root(path=path, digest=digest_of(data), time_micros=_time_of(value))

    def _absent(self, path: StatePath, missing: str | None) -> ArroyoStateError:
        return refuse("a required object is missing", self.paths, path=path)

    def taken(self, found: Iterable[StatePath]) -> tuple[Root, ...]:
        """Remove these paths from the roots and return them, in their order."""
        return tuple(self.roots.pop(path) for path in found if path in self.roots)


def _time_of(value: object) -> int | None:
    for name in ("finish_time_micros", "created_at_micros", "updated_at_micros"):
        micros = getattr(value, name, None)
        if isinstance(micros, int):
            return micros
    return None
