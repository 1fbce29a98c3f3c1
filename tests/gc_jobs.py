"""What tests of garbage collection share: a clock, jobs, and the truth by brute force."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar
from unittest import mock

import pytest

from arroyo_dagster.state import (
    Epoch,
    GcRequest,
    JobPaths,
    Layout,
    MemoryStore,
    ObjectStore,
    ParquetBackend,
    PlanKind,
    Retention,
    StatePath,
    WriteProtected,
    verify_job,
)
from arroyo_dagster.state.codec import parquet
from arroyo_dagster.state.codec.maintenance_records import decode_compaction_record
from arroyo_dagster.state.codec.parquet import FooterFacts
from arroyo_dagster.state.model.garbage import GRACE_MICROS
from tests.fleets import legacy_job, protocol_job
from tests.formats import metadata, read_facts
from tests.internals import AssumedJobs, JobDirectory
from tests.jobs import run_word_job, word_job
from tests.stores import Listing, ObjectInfo, Wrapper

T = TypeVar("T")
DAY = 86_400 * 1_000_000
JOB: dict[str, Any] = {
    "rows": 24,
    "rows_per_epoch": 2,
    "keep_epochs": None,
    "merge_files_after": 99,
}
PATHS = word_job(MemoryStore(), **JOB).paths


KINDS: dict[str, JobPaths] = {
    "ours": PATHS,
    "protocol": protocol_job("p"),
    "legacy": legacy_job("j"),
}


class Clock:
    """The time of a store and of who looks at it; goes on only when it is told to."""

    def __init__(self) -> None:
        self.micros = time.time_ns() // 1000

    def __call__(self) -> int:
        self.micros += 1
        return self.micros

    def days(self, count: float) -> None:
        """Let so much time go by."""
        self.micros += int(count * DAY)

    def seconds(self, count: float) -> None:
        """Let so much time go by."""
        self.days(count / 86_400)


def clock_of_all(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that whoever asks this machine for the time is told, too."""
    clock = Clock()
    monkeypatch.setattr(time, "time_ns", lambda: clock() * 1000)
    return clock


def begun(epochs: int, clock: Clock | None = None, **changes: Any) -> MemoryStore:
    """A job of ours with so many epochs."""
    store = MemoryStore(clock=clock or Clock())
    run_word_job(store, **{**JOB, **changes}, max_epochs=epochs)
    return store


def kept_no_more(run: Callable[..., T], *given: Any, **options: Any) -> T:
    """Run a job whose newest epoch says that it keeps three, and that has removed none."""
    with mock.patch.object(ParquetBackend, "cleanup_checkpoint"):
        return run(*given, **options, keep_epochs=3)


def expiry(keep: int | None = None, micros: int | None = None, **said: str) -> GcRequest:
    """An expiry that keeps so many epochs, or those so young."""
    retention = Retention(keep_epochs=keep, keep_micros=micros)
    return GcRequest(kind=PlanKind.EXPIRE, retention=retention, directory=directory(**said))


def orphans(grace_micros: int = GRACE_MICROS, **said: str) -> GcRequest:
    """A collection of what nothing refers to."""
    return GcRequest(kind=PlanKind.ORPHANS, grace_micros=grace_micros, directory=directory(**said))


def dead(grace_micros: int = GRACE_MICROS, **said: str) -> GcRequest:
    """The removal of a job."""
    return GcRequest(kind=PlanKind.DEAD_JOB, grace_micros=grace_micros, directory=directory(**said))


def directory(**said: str) -> JobDirectory:
    """Who knows about jobs: the user, if anything is said."""
    return JobDirectory([AssumedJobs(said)] if said else [])


class Hiding(Wrapper):
    """A store whose listings, one level and all below, leave out names, as one behind a broken
    proxy or of eventual consistency.

    Args:
        hides: whether a path is left out.
    """

    def __init__(self, store: ObjectStore, hides: Callable[[str], bool]) -> None:
        super().__init__(store)
        self._hides = hides

    def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Objects below a prefix that are not hidden."""
        found = self.inner.list(prefix, start_after=start_after)
        return (info for info in found if not self._hides(info.path))

    def list_dir(self, prefix: str = "") -> Listing:
        """One level without what is hidden."""
        found = self.inner.list_dir(prefix)
        return Listing(
            objects=tuple(info for info in found.objects if not self._hides(info.path)),
            prefixes=tuple(path for path in found.prefixes if not self._hides(path)),
        )


def hiding(store: ObjectStore, paths: JobPaths, epochs: Collection[int]) -> Hiding:
    """A store whose listings show nothing of these epochs."""
    name = paths.checkpoint if paths.layout is Layout.LEGACY else paths.epoch_record
    roots = [name(Epoch(n)) for n in epochs]
    return Hiding(store, lambda path: any(f"{path}/".startswith(f"{root}/") for root in roots))


# ---- the truth -----------------------------------------------------------------------------------


def reachable(store: ObjectStore, paths: JobPaths) -> set[StatePath]:
    """Every data file that any metadata object below a job lists, by looking at all of them."""
    found: set[StatePath] = set()
    for info in store.list(paths.root):
        found.update(_listed(store, info.path))
    return found


def _listed(store: ObjectStore, path: StatePath) -> Iterable[StatePath]:
    name = path.name
    if "/_arroyo_dagster/" in path:
        if "/compactions/" in path:
            record = decode_compaction_record(store.read(path), path)
            return [p for one in record.merged for p in (*one.input_paths, *one.output_paths)]
        return []
    if name == "checkpoint-manifest.pb":
        manifest = metadata.decode_manifest(store.read(path), path)
        return [p for operator in manifest.operators for p in operator.paths]
    if name == "metadata" and "/operator-" in path:
        return metadata.decode_operator(store.read(path), path).paths
    return []


def data_files(store: ObjectStore, paths: JobPaths) -> set[StatePath]:
    """Every data file below a job."""
    return {info.path for info in store.list(paths.root) if info.path.name.startswith("table-")}


def restorable(store: ObjectStore, paths: JobPaths, *epochs: int) -> None:
    """Prove that epochs can be restored, by simulating it."""
    for epoch in epochs:
        verdict = verify_job(WriteProtected(store), paths, Epoch(epoch), level=4).verdict
        assert verdict.errors == (), (epoch, verdict.errors)


def whole(store: ObjectStore, paths: JobPaths, *epochs: int) -> None:
    """Prove that every file of these epochs is there and can be opened."""
    with mock.patch.object(parquet, "read_facts", lambda file, path: _facts(file.read(), path)):
        for epoch in epochs:
            ParquetBackend(store, paths).prepare_checkpoint_load(Epoch(epoch))


@functools.lru_cache(maxsize=4096)
def _facts(data: bytes, path: str) -> FooterFacts:
    """The footer of the same bytes: thousands of copies of one job are proved whole."""
    return read_facts(data, path)


def without_ours(store: ObjectStore) -> dict[StatePath, bytes]:
    """Every object but what maintenance keeps for itself."""
    return {
        info.path: store.read(info.path)
        for info in store.list()
        if "/_arroyo_dagster/" not in info.path
    }
