"""Roots that somebody broke, or laid as a trap: what is healthy is shown, what is broken is named,
and no reference that leads away is ever followed. A job that the store denies hides no other."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import cli, find_job
from arroyo_dagster.errors import (
    ArroyoStateError,
    FormatError,
    InputError,
    NotFoundError,
    ProtocolError,
    StorageError,
)
from arroyo_dagster.state import (
    Epoch,
    JobPaths,
    Layout,
    MemoryStore,
    ObjectStore,
    ParquetBackend,
    StatePath,
    WriteProtected,
    describe_epoch,
    list_epochs,
    list_jobs,
    open_store,
    read_rows,
    summarise_jobs,
)
from arroyo_dagster.state.storage.remote import open as opening
from tests.denied import ALL, READS, Denied
from tests.fleets import OPERATOR, TABLE, Written, legacy_job, protocol_job
from tests.formats import EpochRecord, encode, metadata, path_error, records
from tests.formats import state_pb2 as pb
from tests.jobs import listing
from tests.stores import MUTATING, Counting

T = TypeVar("T")
HOSTILE = {
    "up": "../../etc/passwd",
    "up and down": "a/../../../etc/passwd",
    "dot": "a/./b",
    "absolute": "/etc/passwd",
    "nul": "p/main/a\0b",
    "1025 bytes": "x" * 1025,
    "1025 bytes of umlauts": "ä" * 512 + "x",
    "empty": "",
    "empty segment": "a//b",
    "folder": "p/main/",
    "backslash": "..\\..\\x",
    "encoded": "%2e%2e/%2E%2E/etc/passwd",
    "encoded slash": "..%2f..%2fetc/passwd",
    "encoded absolute": "%2fetc/passwd",
    "encoded backslash": "..%5c..%5cx",
    "encoded nul": "a%00b",
    "encoded twice": "%252e%252e/%252e%252e/etc/passwd",
    "encoded four times": "%2525252e%2525252e/etc/passwd",
    "encoded over and over": "%" + "25" * 300 + "2e",
}
CASES = pytest.mark.parametrize("ref", HOSTILE.values(), ids=HOSTILE)


class Watched(Counting):
    """A store that notes every path it is asked for."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self.asked: list[str] = []

    def _call(self, verb: str, path: str, action: Callable[[], T], data: bytes = b"") -> T:
        self.asked.append(str(path))
        return super()._call(verb, path, action, data)


def everything(store: ObjectStore, paths: JobPaths) -> list[Callable[[], object]]:
    """Every way in."""
    backend = ParquetBackend(store, paths)
    ways: list[Callable[[], object]] = [
        lambda: list_epochs(store, paths),
        lambda: summarise_jobs(store),
        lambda: describe_epoch(store, paths),
        lambda: read_rows(store, paths, OPERATOR, TABLE),
        lambda: [backend.load(epoch) for epoch in backend.epochs()],
        lambda: backend.prepare_checkpoint_load(Epoch(2)),
        lambda: backend.load_operator_metadata(OPERATOR, Epoch(2)),
        lambda: backend.cleanup_checkpoint(Epoch(2)),
    ]
    if paths.layout is Layout.PROTOCOL:
        ways.append(lambda: ParquetBackend(store, paths).start())
    return ways


def check_nobody_follows(store: MemoryStore, paths: JobPaths, *, harmless: bool = False) -> None:
    """Only objects of the job are asked for, nothing is deleted, and every error is one of ours."""
    before = set(listing(store))
    watched = Watched(store)
    errors = [error for way in everything(watched, paths) if (error := error_of(way)) is not None]
    assert errors or harmless
    kinds = (FormatError, ProtocolError, *([NotFoundError] if harmless else []))
    for error in errors:
        assert isinstance(error, kinds), error
        assert len(str(error)) < 3000
    assert before <= set(listing(store))
    own = f"{paths.root}/"
    for path in watched.asked:
        assert not path or f"{path}/".startswith(own) or own.startswith(f"{path}/"), path
        assert path_error(path) is None or path == ""


@CASES
def test_such_a_path_is_refused_before_it_is_one(ref: str) -> None:
    with pytest.raises(InputError, match="not a path below the checkpoint URL"):
        StatePath(ref)


def test_what_only_looks_like_it_is_a_path() -> None:
    for fine in ("a%", "100%/%%", "a%2520b", "..a/b..", "...", "operator-x%2Fy/t", "ä" * 512):
        assert StatePath(fine) == fine


def protocol(**options: Any) -> tuple[MemoryStore, JobPaths]:
    store = MemoryStore()
    job = Written(store, protocol_job("p"), **options)
    job.epochs(2)
    return store, job.paths


def legacy() -> tuple[MemoryStore, JobPaths]:
    store = MemoryStore()
    job = Written(store, legacy_job("j"))
    job.epochs(2)
    return store, job.paths


def rewritten(store: MemoryStore, path: StatePath, **changes: Any) -> None:
    store.put(path, json.dumps(json.loads(store.read(path)) | changes).encode())


@CASES
def test_references_in_records_are_not_followed(ref: str) -> None:
    for field in ("checkpoint_ref", "parent_checkpoint_ref"):
        store, paths = protocol()
        rewritten(store, paths.epoch_record(Epoch(2)), **{field: ref})
        check_nobody_follows(store, paths)
    for field in ("latest_checkpoint_ref", "base_checkpoint_ref"):
        store, paths = protocol()
        rewritten(store, paths.generation(1) / "generation-manifest.json", **{field: ref})  # type: ignore[arg-type]
        check_nobody_follows(store, paths)
    store, paths = protocol()
    rewritten(store, paths.current_generation, generation_manifest_ref=ref)
    check_nobody_follows(store, paths)


@CASES
def test_references_in_manifests_are_not_followed(ref: str) -> None:
    for change in (with_file, with_time_file, with_parent):
        store, paths = protocol()
        path = ParquetBackend(store, paths).load().ref
        manifest = pb.CheckpointManifest.FromString(store.read(path))
        change(manifest, ref)
        store.put(path, manifest.SerializeToString())
        check_nobody_follows(store, paths)


def with_file(manifest: pb.CheckpointManifest, ref: str) -> None:
    files = pb.GlobalKeyedTableTaskCheckpointMetadata(files=[ref])
    table = manifest.operators[0].table_checkpoint_metadata[TABLE]
    table.data = files.SerializeToString()


def with_time_file(manifest: pb.CheckpointManifest, ref: str) -> None:
    files = pb.ExpiringKeyedTimeTableCheckpointMetadata(files=[pb.ParquetTimeFile(file=ref)])
    table = manifest.operators[0].table_checkpoint_metadata[TABLE]
    table.table_type, table.data = pb.EXPIRING_KEYED_TIME_TABLE, files.SerializeToString()


def with_parent(manifest: pb.CheckpointManifest, ref: str) -> None:
    manifest.parent_checkpoint_ref = ref


@CASES
def test_references_in_the_legacy_layout_are_not_followed(ref: str) -> None:
    store, paths = legacy()
    path = paths.operator_metadata(OPERATOR, Epoch(2))
    operator = pb.OperatorCheckpointMetadata.FromString(store.read(path))
    files = pb.GlobalKeyedTableTaskCheckpointMetadata(files=[ref])
    operator.table_checkpoint_metadata[TABLE].data = files.SerializeToString()
    store.put(path, operator.SerializeToString())
    check_nobody_follows(store, paths)
    store, paths = legacy()
    path = paths.legacy_metadata(Epoch(2))
    head = pb.CheckpointMetadata.FromString(store.read(path))
    head.operator_ids.append(ref)
    store.put(path, head.SerializeToString())
    # Behind `operator-` a few of them stay where they are.
    check_nobody_follows(store, paths, harmless=True)


@pytest.mark.parametrize(
    "ref",
    [
        "p/other/generations/1/checkpoints/checkpoint-0000002/checkpoint-manifest.pb",
        "q/main/generations/1/checkpoints/checkpoint-0000002/checkpoint-manifest.pb",
        "p/main/_arroyo_dagster/checkpoint-manifest.pb",
        "secret",
    ],
)
def test_a_record_that_names_another_job_is_not_followed_either(ref: str) -> None:
    store, paths = protocol()
    store.put(StatePath(ref), b"secret")
    path = paths.epoch_record(Epoch(2))
    record = records.decode_epoch_record(store.read(path), path)
    hostile: EpochRecord = replace(record, checkpoint_ref=StatePath(ref))
    store.put(path, encode(hostile))
    watched = Watched(store)
    for way in everything(watched, paths):
        error_of(way)
    assert ref not in watched.asked


def error_of(way: Callable[[], object]) -> ArroyoStateError | None:
    try:
        way()
    except ArroyoStateError as error:
        return error
    return None


def test_parents_that_lead_in_a_circle_end_in_an_error() -> None:
    store, paths = protocol()
    backend = ParquetBackend(store, paths)
    first, newest = backend.load(Epoch(1)), backend.load()
    manifest = metadata.decode_manifest(store.read(first.ref), first.ref)
    store.put(first.ref, metadata.encode_manifest(replace(manifest, parent_ref=newest.ref)))
    rewritten(store, paths.epoch_record(Epoch(1)), parent_checkpoint_ref=str(newest.ref))
    before = set(listing(store))
    with pytest.raises(ProtocolError, match="belongs to epoch 2"):
        backend.cleanup_checkpoint(Epoch(2))
    assert any(isinstance(one.problem, ProtocolError) for one in list_epochs(store, paths))
    assert set(listing(store)) == before


# ---- versions that are not known -----------------------------------------------------------------


def test_records_of_another_version_are_reported_when_read_and_not_written_on() -> None:
    for name in ("record", "marker"):
        store, paths = MemoryStore(), protocol_job("p")
        job = Written(store, paths)
        job.write(committing=True)
        job.commit()
        marker = paths.committed(job.generation, Epoch(1))
        rewritten(store, paths.epoch_record(Epoch(1)) if name == "record" else marker, version=2)
        (epoch,) = list_epochs(store, paths)
        (summary,) = summarise_jobs(store)
        assert epoch.state is not None
        for problem in (epoch.problem, summary.problem):
            assert isinstance(problem, FormatError)
            assert "version 2" in problem.message
        assert describe_epoch(store, paths).checkpoint.record_version == 2
        before = {path for path in listing(store) if path.endswith((".record", ".pb", "ted.json"))}
        with pytest.raises(ProtocolError, match="version 2"):
            ParquetBackend(store, paths).start()
        after = {path for path in listing(store) if path.endswith((".record", ".pb", "ted.json"))}
        assert after == before


def test_a_fence_of_another_version_is_never_overwritten() -> None:
    store, paths = protocol()
    rewritten(store, paths.current_generation, version=2)
    before = listing(store)
    with pytest.raises(ProtocolError, match="version 2"):
        ParquetBackend(store, paths).start()
    assert listing(store) == before


# ---- three hundred jobs --------------------------------------------------------------------------

Damage = Callable[[ObjectStore, JobPaths], None]


def cut_root(store: ObjectStore, paths: JobPaths) -> None:
    legacy = paths.layout is Layout.LEGACY
    path = paths.legacy_metadata(Epoch(3)) if legacy else paths.epoch_record(Epoch(3))
    store.put(path, store.read(path)[:-3])


def random_root(store: ObjectStore, paths: JobPaths) -> None:
    legacy = paths.layout is Layout.LEGACY
    path = paths.legacy_metadata(Epoch(3)) if legacy else paths.epoch_record(Epoch(3))
    store.put(path, bytes(range(128, 256)) * 9)


def without_metadata(store: ObjectStore, paths: JobPaths) -> None:
    legacy = paths.layout is Layout.LEGACY
    backend = ParquetBackend(store, paths)
    newest = paths.operator_metadata(OPERATOR, Epoch(3)) if legacy else backend.load().ref
    store.delete_many([newest])


def trapped(store: ObjectStore, paths: JobPaths) -> None:
    if paths.layout is Layout.PROTOCOL:
        path = paths.epoch_record(Epoch(3))
        changed = json.loads(store.read(path)) | {"checkpoint_ref": "../../../etc/passwd"}
        store.put(path, json.dumps(changed).encode())
        return
    path = paths.legacy_metadata(Epoch(3))
    head = metadata.decode_legacy_checkpoint(store.read(path), path)
    message = pb.CheckpointMetadata(
        job_id=head.job, epoch=3, operator_ids=["../../../../../etc/passwd"]
    )
    store.put(path, message.SerializeToString())


DAMAGES: list[Damage] = [cut_root, random_root, without_metadata, trapped]
STRANGE = ("..%2f..%2fetc", "%252e%252e", "checkpoints", "a b", "naïve", "#5", "~")


@pytest.fixture(scope="module", params=[100, pytest.param(300, marks=pytest.mark.soak)])
def root(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, set[str], set[str]]:
    """Many jobs on local disk, of both layouts; every fifth is damaged. URL, healthy, damaged."""
    directory = tmp_path_factory.mktemp("root")
    store = open_store(str(directory))
    healthy, damaged = set(), set()
    for number in range(request.param):
        name = f"job_{number:03}"
        paths = legacy_job(name) if number % 2 else protocol_job("pl", name)
        Written(store, paths).epochs(3)
        if number % 10 in (0, 5):
            DAMAGES[number // 10 % 4](store, paths)
        (damaged if number % 10 in (0, 5) else healthy).add(str(paths.root))
    for name in STRANGE:
        (directory / name).mkdir()
        (directory / name / "file").write_bytes(b"x")
    return str(directory), healthy, damaged


def test_the_command_prints_all_of_them_and_ends_with_an_error(
    root: tuple[str, set[str], set[str]],
) -> None:
    url, healthy, damaged = root
    began = time.perf_counter()
    result = CliRunner().invoke(cli.main, ["jobs", "--json", "--url", url], catch_exceptions=False)
    took = time.perf_counter() - began
    assert result.exit_code == 1
    shown = {
        f"{j['pipeline']}/{j['job']}" if j["pipeline"] else j["job"]: j
        for j in json.loads(result.stdout)
    }
    assert set(shown) == healthy | damaged
    assert {name for name, job in shown.items() if job["problem"]} == damaged
    said = [json.loads(line) for line in result.stderr.splitlines()]
    errors = [one["error"] for one in said if "error" in one]
    assert [one["names"] for one in said if "warning" in one]
    assert len(errors) == len(damaged)
    assert all(error["next_step"] for error in errors)
    plain = CliRunner().invoke(cli.main, ["jobs", "--url", url], catch_exceptions=False)
    assert plain.exit_code == 1
    assert all(name.rpartition("/")[2] in plain.stdout for name in shown)
    assert "Traceback" not in plain.stderr
    assert took < 8


def test_a_root_is_a_root_whatever_else_lies_in_it(
    root: tuple[str, set[str], set[str]], tmp_path: Path
) -> None:
    url, healthy, damaged = root
    assert {str(paths.root) for paths in list_jobs(open_store(url))} == healthy | damaged
    (tmp_path / "%252e%252e" / "checkpoints" / "checkpoint-0000001").mkdir(parents=True)
    (tmp_path / "%252e%252e" / "checkpoints" / "checkpoint-0000001" / "metadata").write_bytes(b"")
    with pytest.raises(InputError, match="not a checkpoint root"):
        list_jobs(open_store(str(tmp_path)))


def test_nothing_of_all_this_is_written_to() -> None:
    store, paths = protocol()
    watched = Watched(WriteProtected(store))
    for way in everything(watched, paths)[:-2]:
        error_of(way)
    assert not MUTATING & set(watched.calls)


JOBS = [legacy_job("legacy"), protocol_job("pl_a"), protocol_job("pl_b")]


def fleet(denied: JobPaths, verbs: frozenset[str]) -> Denied:
    """Three jobs of which one is denied: its objects, or its listings too."""
    store = MemoryStore("denied-jobs")
    for paths in JOBS:
        job = Written(store, paths)
        job.epochs(3)
    prefix = denied.root if verbs is READS else str(denied.root).partition("/")[0]
    return Denied(store, prefix, verbs)


@pytest.fixture(params=[(JOBS[0], READS), (JOBS[1], READS), (JOBS[0], ALL), (JOBS[1], ALL)])
def denied(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Denied:
    store = fleet(*request.param)
    monkeypatch.setattr(opening, "get_storage_provider", lambda *_: store)
    return store


def run(*words: str) -> Result:
    result = CliRunner().invoke(
        cli.main, [*words, "--url", "file:///nowhere"], catch_exceptions=False
    )
    assert "Traceback" not in result.output
    return result


def test_jobs_lists_the_denied_job_as_unreadable_beside_the_others(denied: Denied) -> None:
    lines = run("jobs").stdout.splitlines()
    result = run("jobs", "--json")
    rows = {"/".join(filter(None, [r["pipeline"], r["job"]])): r for r in json.loads(result.stdout)}
    assert result.exit_code == 1
    assert "permission denied" in result.stderr
    assert len(rows) == 3
    [unreadable] = [row for name, row in rows.items() if name.startswith(denied.prefix)]
    assert "permission denied" in unreadable["problem"]
    assert unreadable["epochs"] is None or unreadable["newest_epoch"] == 3
    assert [row["newest_epoch"] for row in rows.values() if row["problem"] is None] == [3, 3]
    assert sum("unreadable" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["health"], 3),
        (["health", "--level", "4"], 3),
        (["sql", "@leases"], 0),
        (["compact", "plan"], 1),
        (["sql", "select * from jobs"], 0),
        (["sql", "select * from files"], 1),
        (["sql", "show tables"], 1),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, list) else str(value),
)
def test_commands_over_all_jobs_name_the_denied_job_and_answer_for_the_others(
    denied: Denied, command: list[str], code: int
) -> None:
    result = run(*command, "--json")
    assert "permission denied" in result.output
    if command != ["sql", "@leases"]:  # its row of a lease that cannot be read has the problem
        assert result.exit_code == code, result.output
    readable = [str(paths.root) for paths in JOBS if not paths.root.startswith(denied.prefix)]
    if command != ["sql", "@leases"]:  # no job was ever leased
        assert [root for root in readable if root in result.stdout] == readable


def test_epochs_lists_the_denied_epoch_as_unreadable_beside_the_others() -> None:
    store = MemoryStore("denied-epoch")
    Written(store, JOBS[1]).epochs(3)
    denied = Denied(store, str(JOBS[1].epoch_record(Epoch(2))), READS)
    rows: list[Any] = list_epochs(denied, JOBS[1])
    assert [(row.epoch, row.problem is None) for row in rows] == [(1, True), (2, False), (3, True)]


def test_a_short_name_may_be_ambiguous_and_a_full_name_is_not() -> None:
    store = fleet(JOBS[1], ALL)
    assert find_job(store, str(JOBS[2].root)) == JOBS[2]
    with pytest.raises(StorageError, match="permission denied") as error:
        find_job(store, "main")
    assert error.value.next_step == "name it as pipeline/job"
