"""Garbage collection beside second names of objects: copies, links, stores that ignore case."""

from __future__ import annotations

import os
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from arroyo_dagster.errors import ArroyoStateError, InputError, ProtocolError, StorageError
from arroyo_dagster.state import (
    Epoch,
    GcOptions,
    GcRequest,
    JobPaths,
    Layout,
    MemoryStore,
    ObjectStore,
    OperatorId,
    ParquetBackend,
    StatePath,
    WorkerGeneration,
    WriteProtected,
    find_job,
    list_jobs,
    plan_gc,
    run_gc,
    verify_job,
)
from tests.fleets import OPERATOR, TABLE, Written, legacy_job, protocol_job
from tests.gc_jobs import Clock, data_files, dead, expiry, orphans
from tests.jobs import listing
from tests.stores import DeleteOutcome, Listing, LocalDiskStore, ObjectInfo, Wrapper

T = TypeVar("T")
DAY_SECONDS = 86_400
LAYOUTS = pytest.mark.parametrize(
    "paths", [protocol_job("p"), legacy_job("j")], ids=["protocol", "legacy"]
)


def age(root: Path, days: float) -> None:
    """Make everything on disk look as if it was written so many days ago."""
    then = time.time() - days * DAY_SECONDS
    for folder, _, names in os.walk(root):
        for name in names:
            os.utime(os.path.join(folder, name), (then, then), follow_symlinks=False)


def old_job(root: Path, paths: JobPaths) -> LocalDiskStore:
    """A job at rest on local disk: three epochs and one orphan, all ten days old."""
    store = LocalDiskStore(str(root), sync=False)
    Written(store, paths, start=int((time.time() - 10 * DAY_SECONDS) * 1e6)).epochs(3)
    generation = WorkerGeneration(1) if paths.pipeline else None
    lost = paths.data_file(OPERATOR, TABLE, 7, Epoch(1), generation, attempt="lost")
    store.put(lost, b"lost")
    age(root, 10)
    return store


def said(paths: JobPaths) -> GcRequest:
    return orphans(**{str(paths.root): "stopped"})


def expired(paths: JobPaths) -> GcRequest:
    return expiry(2, **{str(paths.root): "stopped"})


def restorable(store: ObjectStore, paths: JobPaths, *epochs: int) -> None:
    """Prove that `verify` finds nothing wrong; values of these jobs are not decoded."""
    for epoch in epochs:
        verdict = verify_job(WriteProtected(store), paths, Epoch(epoch), level=2).verdict
        assert verdict.errors == (), (epoch, verdict.errors)


def second_names(paths: JobPaths) -> list[tuple[str, str]]:
    """Directories of a job, and other names for them."""
    if paths.layout is Layout.PROTOCOL:
        first = "generations/1/checkpoints/checkpoint-0000003"
        return [
            ("generations/1", "generations/01"),
            ("generations/1", "generations/١"),
            ("generations/1", "generations/1."),
            ("generations", "Generations"),
            (first, first.replace("0000003", "3")),
            (first, first.replace("0000003", "00000003")),
            (f"{first}/operator-count", f"{first}/Operator-Count"),
        ]
    first = "checkpoints/checkpoint-0000003"
    return [
        (first, first.replace("0000003", "3")),
        (first, first.replace("0000003", "00000003")),
        (first, first.replace("0000003", "000000٣")),
        ("checkpoints", "CHECKPOINTS"),
    ]


CASES = [
    pytest.param(paths, name, other, id=f"{paths.layout.value}: {other}")
    for paths in (protocol_job("p"), legacy_job("j"))
    for name, other in second_names(paths)
]


@pytest.mark.parametrize(("paths", "name", "other"), CASES)
def test_beside_a_copy_under_a_second_name_nothing_is_collected(
    paths: JobPaths, name: str, other: str, tmp_path: Path
) -> None:
    store = old_job(tmp_path, paths)
    job = StatePath(paths.root)
    for info in list(store.list(job / name)):
        store.put(
            StatePath(f"{job}/{other}{info.path.removeprefix(f'{job}/{name}')}"),
            store.read(info.path),
        )
    age(tmp_path, 10)
    before = listing(store)
    for asked in (said(paths), expired(paths)):
        with pytest.raises(ProtocolError, match="may be a second name of") as caught:
            run_gc(store, paths, asked)
        assert other in str(caught.value)
        assert name in str(caught.value)
        assert "nothing was deleted" in str(caught.value)
    restorable(store, paths, 3)
    after = [path for path in listing(store) if "_arroyo_dagster" not in path]
    assert after == [path for path in before if "_arroyo_dagster" not in path]


@LAYOUTS
def test_a_user_s_folder_inside_an_operator_is_reported_and_never_touched(
    paths: JobPaths, tmp_path: Path
) -> None:
    store = old_job(tmp_path, paths)
    generation = WorkerGeneration(1) if paths.pipeline else None
    mine = paths.operator(OPERATOR, Epoch(1), generation) / "my-backup/table-counts-000"
    store.put(mine, b"mine")
    age(tmp_path, 10)
    outcome = run_gc(store, paths, said(paths))
    assert outcome.deleted == 1
    assert outcome.plan.foreign == (mine,)
    assert store.read(mine) == b"mine"
    restorable(store, paths, 3)


@LAYOUTS
def test_an_operator_id_with_a_slash_expires_by_reference_and_is_never_an_orphan(
    paths: JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.fleets.OPERATOR", OperatorId("source_a/b_0"))
    clock = Clock()
    store = MemoryStore(clock=clock)
    Written(store, paths, start=clock.micros, keep=1).epochs(14)
    clock.days(5)
    before = data_files(store, paths)
    assert not plan_gc(store, paths, said(paths), now_micros=clock()).objects
    asked = expired(paths)
    for aside in (True, False):
        outcome = run_gc(store, paths, asked, GcOptions(quarantine=aside, clock=clock))
        assert outcome.done is aside
    epochs = ParquetBackend(store, paths).epochs()
    assert len(epochs) == (2 if paths.pipeline else 12)
    assert len(data_files(store, paths)) == len(epochs)
    assert before - data_files(store, paths)
    restorable(store, paths, 14)


# ---- stores that ignore case, Unicode form and trailing dots -------------------------------------


def folded(path: str) -> str:
    text = unicodedata.normalize("NFC", path).casefold()
    return "/".join(segment.rstrip(". ") for segment in text.split("/"))


class Forgiving(Wrapper):
    """A store that takes names for one that differ in case, Unicode form or trailing dots.

    As on a Mac's or a Windows disk a listing shows the name that was written first.
    """

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self._first: dict[str, StatePath] = {}

    def _name(self, path: str) -> StatePath:
        """The name of an object as it was first written, each directory for itself."""
        found: list[str] = []
        for segment in path.split("/"):
            key = folded("/".join([*found, segment]))
            known = self._first.setdefault(key, StatePath("/".join([*found, segment])))
            found = known.split("/")
        return StatePath("/".join(found))

    def read(self, path: StatePath) -> bytes:
        return self.inner.read(self._name(path))

    def read_range(self, path: StatePath, start: int, length: int) -> bytes:
        return self.inner.read_range(self._name(path), start, length)

    def put(self, path: StatePath, data: bytes) -> None:
        self.inner.put(self._name(path), data)

    def create(self, path: StatePath, data: bytes) -> bool:
        return self.inner.create(self._name(path), data)

    def head(self, path: StatePath) -> ObjectInfo | None:
        return self.inner.head(self._name(path))

    def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        name = self._name(prefix) if prefix else ""
        for info in self.inner.list(name, start_after=start_after):
            yield replace(info, path=StatePath(prefix + info.path[len(name) :]))

    def list_dir(self, prefix: str = "") -> Listing:
        name = self._name(prefix) if prefix else ""
        found = self.inner.list_dir(name)
        asked = [StatePath(prefix + path[len(name) :]) for path in found.prefixes]
        infos = (replace(i, path=StatePath(prefix + i.path[len(name) :])) for i in found.objects)
        return Listing(objects=tuple(infos), prefixes=tuple(asked))

    def delete_many(self, paths: Iterable[StatePath]) -> DeleteOutcome:
        doomed = tuple(paths)
        self.inner.delete_many([self._name(path) for path in doomed])
        return DeleteOutcome(deleted=doomed)


OTHER_FORMS: list[Callable[[str], str]] = [
    str.upper,
    lambda name: unicodedata.normalize("NFD", name),
    lambda name: f"{name}.",
    lambda name: f"{name} ",
]


@LAYOUTS
@pytest.mark.parametrize("other", OTHER_FORMS, ids=["case", "unicode", "dot", "space"])
def test_a_file_whose_directory_was_first_written_in_another_form_stays(
    paths: JobPaths, other: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = OperatorId("Zähler")
    monkeypatch.setattr("tests.fleets.OPERATOR", operator)
    clock = Clock()
    store = Forgiving(MemoryStore(clock=clock))
    generation = WorkerGeneration(1) if paths.pipeline else None
    for number in (1, 2, 3):
        # An earlier release of the job called its operator otherwise, and left something behind.
        before = paths.operator(OperatorId(other(operator)), Epoch(number), generation)
        store.put(before / "table-counts-009-left", b"left")
    Written(store, paths, start=clock.micros).epochs(3)
    clock.days(5)
    if paths.pipeline is None:
        # Metadata of operators is listed under the other name as well.
        with pytest.raises(ProtocolError):
            run_gc(store, paths, said(paths), GcOptions(clock=clock))
        restorable(store, paths, 1, 2, 3)
        return
    plan = plan_gc(store, paths, said(paths), now_micros=clock())
    assert {reason: count for reason, (count, _) in plan.stays.items()} == {
        "alias": 2,
        "restored_from": 2,
        "metadata": 8,
    }
    assert len(plan.data) == 2
    run_gc(store, paths, said(paths), GcOptions(clock=clock))
    restorable(store, paths, 1, 2, 3)


# ---- symbolic links on local disk ----------------------------------------------------------------


def everything_below(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and "_arroyo_dagster" not in path.parts
    }


def link_cases(paths: JobPaths, outside: Path, root: Path) -> list[tuple[str, Path]]:
    first = (
        "generations/1/checkpoints/checkpoint-0000001"
        if paths.pipeline
        else "checkpoints/checkpoint-0000001"
    )
    job = root / paths.root
    cases = [
        (f"{first}/operator-evil", outside),
        (f"{first}/operator-count/up", job),
        (f"{first}/operator-count/table-counts-009-x", outside / "table-counts-000-x"),
        (f"{first}/operator-count/table-counts-009-y", outside / "nowhere"),
        ("_arroyo_dagster/compactions", outside),
    ]
    if paths.pipeline:
        return [*cases, ("generations/2", job / "generations/1"), ("epochs2", job / "epochs")]
    return [*cases, ("checkpoints/checkpoint-0000009", job / "checkpoints/checkpoint-0000001")]


@LAYOUTS
@pytest.mark.parametrize("which", range(7))
def test_a_job_with_a_symbolic_link_in_it_is_not_collected(
    paths: JobPaths, which: int, tmp_path: Path
) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    outside.mkdir()
    for name in ("table-counts-000-x", "table-counts-001-x", "metadata"):
        (outside / name).write_bytes(b"the user's")
    store = old_job(root, paths)
    age(tmp_path, 10)
    cases = link_cases(paths, outside, root)
    name, target = cases[which % len(cases)]
    link = root / paths.root / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)
    before, users = everything_below(root), everything_below(outside)
    gone = dead(**{str(paths.root): "gone"})
    for asked in (said(paths), expired(paths), gone):
        for aside in (False, True):
            # A second name of an epoch is found by its name before the job is listed.
            with pytest.raises(
                (ProtocolError, InputError), match=r"symbolic link|listing is incomplete"
            ) as caught:
                run_gc(store, paths, asked, GcOptions(quarantine=aside))
            assert name in str(caught.value)
    assert everything_below(root) == before
    assert everything_below(outside) == users
    assert link.is_symlink()
    link.unlink()
    assert run_gc(store, paths, said(paths)).deleted == 1
    restorable(store, paths, 3)


@LAYOUTS
def test_a_link_that_takes_the_place_of_a_directory_during_a_collection_is_not_followed(
    paths: JobPaths, tmp_path: Path
) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    outside.mkdir()
    (outside / "table-counts-007-lost").write_bytes(b"the user's")
    inner = old_job(root, paths)
    generation = WorkerGeneration(1) if paths.pipeline else None
    place = root / paths.operator(OPERATOR, Epoch(1), generation)
    exchanged: list[object] = []

    class Exchanging(Wrapper):
        def delete_many(self, doomed: Iterable[StatePath]) -> DeleteOutcome:
            wanted = list(doomed)
            if not exchanged and any(path.endswith("-lost") for path in wanted):
                exchanged.append(place.rename(place.with_name("away")))
                place.symlink_to(outside)
            return self.inner.delete_many(wanted)

    with pytest.raises(StorageError, match="symbolic link"):
        run_gc(Exchanging(inner), paths, said(paths))
    assert exchanged
    assert everything_below(outside) == {"table-counts-007-lost": b"the user's"}
    assert len(list(place.with_name("away").iterdir())) >= 2
    place.unlink()
    place.with_name("away").rename(place)
    assert run_gc(inner, paths, said(paths)).deleted == 1
    restorable(inner, paths, 3)


def test_a_job_behind_a_link_is_not_listed_and_not_collected_by_that_name(tmp_path: Path) -> None:
    paths = protocol_job("p")
    store = old_job(tmp_path, paths)
    (tmp_path / "q").symlink_to(tmp_path / "p")
    assert list_jobs(store) == [paths]
    with pytest.raises(InputError, match="symbolic link"):
        find_job(store, "q/main")
    other = protocol_job("q")
    before = everything_below(tmp_path)
    for asked in (orphans(**{"q/main": "stopped"}), dead(**{"q/main": "gone"})):
        with pytest.raises(ArroyoStateError, match=r"symbolic link|names another job"):
            run_gc(store, other, asked)
    assert everything_below(tmp_path) == before
    assert run_gc(store, paths, said(paths)).deleted == 1
