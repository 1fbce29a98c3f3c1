"""Orphans planned from an inventory of the store: however wrong it is, nothing needed goes."""

from __future__ import annotations

import contextlib
import csv
import gzip
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from arroyo_dagster.cli import main
from arroyo_dagster.errors import (
    ArroyoStateError,
    FormatError,
    InputError,
    NotFoundError,
    ProtocolError,
)
from arroyo_dagster.state.codec.gc import decode_gc_plan, gc_plan_to_json
from arroyo_dagster.state.codec.iso_times import iso_micros
from arroyo_dagster.state.codec.records import encode_json
from arroyo_dagster.state.model.garbage import GcPlan
from arroyo_dagster.state.model.ids import Epoch, StatePath, WorkerGeneration
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.operations.gc.execute import GcOptions, run_gc
from arroyo_dagster.state.operations.gc.plan import GcRequest, plan_gc
from arroyo_dagster.state.operations.gc.store_inventory import (
    StoreInventory,
    read_store_inventory,
)
from arroyo_dagster.state.storage import Counting, MemoryStore, ObjectStore, open_store
from arroyo_dagster.state.storage.names import encode_path
from arroyo_dagster.state.storage.wrappers import Wrapper
from tests.contract import servers
from tests.fleets import OPERATOR, TABLE, Written, legacy_job, protocol_job
from tests.gc_jobs import DAY, Clock, orphans, whole

BUCKET, PREFIX = "state", "arroyo/v1"
EPOCHS = 16
Row = dict[str, Any]
LAYOUTS = {"protocol": protocol_job("p"), "legacy": legacy_job("j")}


class InBucket(Wrapper):
    """A store in memory that says it is a prefix of a bucket."""

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/{PREFIX}"


class Job:
    """A job with orphans, five days old, and an inventory of it that is one day old."""

    def __init__(self, layout: str = "protocol") -> None:
        self.clock = Clock()
        self.memory = MemoryStore(clock=self.clock)
        self.store: ObjectStore = InBucket(self.memory)
        self.paths = LAYOUTS[layout]
        self.written = Written(self.memory, self.paths, now=self.clock, keep=2)
        self.written.epochs(EPOCHS)
        self.lost = {self.put_lost(number, f"lost{number}") for number in (1, 2, 3)}
        self.clock.days(9)
        self.made_at = self.clock.micros
        self.rows = self.listed()
        self.clock.days(1)
        self.store.put(StatePath("elsewhere"), b"x")

    def put_lost(self, epoch: int, name: str, data: bytes = b"lost") -> StatePath:
        generation = WorkerGeneration(1) if self.paths.pipeline else None
        path = self.paths.data_file(OPERATOR, TABLE, 7, Epoch(epoch), generation, attempt=name)
        self.memory.put(path, data)
        return path

    def listed(self) -> list[Row]:
        """What an inventory made now contains."""
        return [
            {
                "key": f"{PREFIX}/{encode_path(info.path)}",
                "size": info.size_bytes,
                "last_modified": iso_micros(info.modified_micros),
                "etag": info.etag,
            }
            for info in self.memory.list()
        ]

    def request(self, inventory: StoreInventory | None = None, **given: Any) -> GcRequest:
        asked = orphans(**{str(self.paths.root): "stopped"}, **given)
        return GcRequest(
            kind=asked.kind,
            grace_micros=asked.grace_micros,
            directory=asked.directory,
            inventory=inventory,
        )

    def plan(self, inventory: StoreInventory | None, **given: Any) -> GcPlan:
        return plan_gc(
            self.store, self.paths, self.request(inventory, **given), now_micros=self.clock.micros
        )

    def run(self, inventory: StoreInventory) -> set[StatePath]:
        """Delete what the plan names, prove that every epoch is whole, and return what is gone."""
        before = {info.path for info in self.memory.list()}
        run_gc(self.store, self.paths, self.request(inventory), GcOptions(clock=self.clock))
        whole(self.memory, self.paths, *range(1, EPOCHS + 1))
        after = {info.path for info in self.memory.list()}
        return {path for path in before - after if "/_arroyo_dagster/" not in path}

    def read(self, folder: Path, rows: Iterable[Row] | None = None) -> StoreInventory:
        """Read an inventory of S3, in CSV."""
        return self.load(s3_inventory(folder, self.rows if rows is None else rows, self.made_at))

    def load(self, path: Path) -> StoreInventory:
        return read_store_inventory(str(path), self.store, self.paths)


def s3_inventory(
    folder: Path,
    rows: Iterable[Row],
    made_at: int,
    change: Callable[[dict[str, Any]], object] = lambda manifest: None,
    parts: int = 2,
) -> Path:
    """Write an inventory as S3 does: keys are URL-encoded, every cell is quoted, no header."""
    names = ("bucket", "key", "versionid", "islatest", "isdeletemarker", "size")
    names = (*names, "last_modified", "etag")
    listed, files = list(rows), []
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for number in range(parts):
        text = io.StringIO()
        writer = csv.writer(text, quoting=csv.QUOTE_ALL)
        for row in listed[number::parts]:
            row = {"bucket": BUCKET, **row, "key": quote_plus(row["key"], safe="")}
            writer.writerow([row.get(name, "") for name in names])
        data = gzip.compress(text.getvalue().encode())
        name = f"{number}.csv.gz"
        (folder / "data" / name).write_bytes(data)
        digest = hashlib.md5(data, usedforsecurity=False).hexdigest()
        files.append({"key": f"a/b/data/{name}", "size": len(data), "MD5checksum": digest})
    manifest = {
        "sourceBucket": BUCKET,
        "destinationBucket": "arn:aws:s3:::reports",
        "version": "2016-11-30",
        "creationTimestamp": str(made_at // 1000),
        "fileFormat": "CSV",
        "fileSchema": "Bucket, Key, VersionId, IsLatest, IsDeleteMarker, Size, "
        "LastModifiedDate, ETag",
        "files": files,
    }
    change(manifest)
    path = folder / "manifest.json"
    path.write_text(json.dumps(manifest))
    return path


# ---- the same plan -------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_plan_is_that_of_a_listing(layout: str, tmp_path: Path) -> None:
    job = Job(layout)
    listed, read = job.plan(None), job.plan(job.read(tmp_path))
    assert set(listed.data.paths) == job.lost
    assert decode_gc_plan(encode_json(gc_plan_to_json(read)), "plan") == read
    assert list(read.data) == list(listed.data)
    assert list(read.records) == list(listed.records)
    assert list(read.metadata) == list(listed.metadata)
    assert read.proof.digest == listed.proof.digest
    assert job.run(job.read(tmp_path)) == job.lost


def test_fewer_objects_are_listed_than_the_job_has(tmp_path: Path) -> None:
    job = Job()
    inventory = job.read(tmp_path)
    counted = Counting(job.store)
    plan_gc(counted, job.paths, job.request(inventory), now_micros=job.clock.micros)
    # The directories of settled epochs are not listed: only the newest two, and those beside.
    assert counted.calls["list"] <= 6
    assert counted.calls["head"] < 3 * len(job.lost) + 10


@pytest.mark.parametrize("form", ["parquet", "csv", "csv.gz", "s3-parquet"])
def test_every_form_gives_the_same_objects(form: str, tmp_path: Path) -> None:
    job = Job()
    expected = job.read(tmp_path / "s3")
    if form == "s3-parquet":
        path = _s3_parquet(tmp_path, job)
    else:
        path = tmp_path / f"inventory.{form}"
        path.write_bytes(_plain(form, job.rows))
    found = job.load(path)
    assert list(found.stored) == list(expected.stored)
    assert found.rows == expected.rows == len(job.rows)


def _plain(form: str, rows: list[Row]) -> bytes:
    if form == "parquet":
        out = io.BytesIO()
        table = pa.Table.from_pylist(rows)
        times = table.column("last_modified").cast(pa.timestamp("us", "UTC"))
        at = table.schema.get_field_index("last_modified")
        pq.write_table(table.set_column(at, "last_modified", times), out)
        return out.getvalue()
    text = io.StringIO()
    writer = csv.DictWriter(text, ["key", "size", "last_modified", "etag"])
    writer.writeheader()
    writer.writerows(rows)
    data = text.getvalue().encode()
    return gzip.compress(data) if form == "csv.gz" else data


def _s3_parquet(folder: Path, job: Job) -> Path:
    times = pa.array([row["last_modified"] for row in job.rows])
    table = pa.table(
        {
            "bucket": [BUCKET] * len(job.rows),
            "key": [row["key"] for row in job.rows],
            "size": pa.array([row["size"] for row in job.rows], pa.int64()),
            "last_modified_date": times.cast(pa.timestamp("us", "UTC")),
            "e_tag": [row["etag"] for row in job.rows],
        }
    )
    out = io.BytesIO()
    pq.write_table(table, out)

    def as_parquet(manifest: dict[str, Any]) -> None:
        digest = hashlib.md5(out.getvalue(), usedforsecurity=False).hexdigest()
        file = {"key": "x/y/data/0.parquet", "size": len(out.getvalue()), "MD5checksum": digest}
        manifest |= {"fileFormat": "Parquet", "fileSchema": "message s3.inventory {}"}
        manifest["files"] = [file]

    path = s3_inventory(folder, [], job.made_at, as_parquet)
    (folder / "data" / "0.parquet").write_bytes(out.getvalue())
    return path


# ---- what is newer -------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_newer_than_the_inventory_stays(layout: str, tmp_path: Path) -> None:
    job = Job(layout)
    inventory = job.read(tmp_path)
    newer = job.put_lost(2, "newer")
    job.clock.days(1.5)
    plan = job.plan(inventory)
    assert newer not in set(plan.data.paths)
    assert set(plan.data.paths) == job.lost
    assert job.run(inventory) == job.lost
    assert job.memory.head(newer) is not None


def test_an_object_that_was_written_again_stays(tmp_path: Path) -> None:
    job = Job()
    inventory = job.read(tmp_path)
    again = sorted(job.lost)[0]
    job.memory.put(again, b"LOST")  # the same size
    job.memory.delete_many([sorted(job.lost)[1]])
    plan = job.plan(inventory)
    assert set(plan.data.paths) == {sorted(job.lost)[2]}
    assert plan.stays["changed"] == (1, 4)
    job.clock.days(0.5)
    assert job.run(inventory) == {sorted(job.lost)[2]}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_that_an_epoch_refers_to_since_stay(layout: str, tmp_path: Path) -> None:
    """The inventory shows orphans that an epoch has listed since, as after an undelete."""
    job = Job(layout)
    inventory = job.read(tmp_path)
    again = sorted(job.lost)[0]
    job.written._listed = [again]
    job.written.write()
    plan = job.plan(inventory)
    assert set(plan.data.paths) == job.lost - {again}
    run_gc(job.store, job.paths, job.request(inventory), GcOptions(clock=job.clock))
    assert job.memory.head(again) is not None


def test_an_attempt_that_is_newer_than_the_inventory_keeps_its_files(tmp_path: Path) -> None:
    """A manifest without an epoch record, which a start may claim, refers to an old file."""
    job = Job()
    inventory = job.read(tmp_path)
    again = sorted(job.lost)[0]
    job.written._listed = [again]
    job.written.write(record=False)
    assert set(job.plan(inventory).data.paths) == set(job.plan(None).data.paths)
    assert again not in set(job.plan(inventory).data.paths)


# ---- hostile inventories -------------------------------------------------------------------------


def test_keys_are_decoded_as_they_are_stored(tmp_path: Path) -> None:
    job = Job()
    strange = job.put_lost(1, "100%<odd>+name é")
    job.rows = job.listed()
    job.made_at = job.clock.micros
    job.clock.days(4)
    inventory = job.read(tmp_path)
    assert strange in {info.path for info in inventory.objects()}
    plan = job.plan(inventory, grace_micros=int(4.5 * DAY))
    assert set(plan.data.paths) == set(job.plan(None, grace_micros=int(4.5 * DAY)).data.paths)


@pytest.mark.parametrize("encode", [quote_plus, lambda key, safe: key.replace("+", "%2B")])
def test_a_key_that_decodes_to_another_name_deletes_nothing(encode: Any, tmp_path: Path) -> None:
    job = Job()
    victim = job.written._listed[0]
    for row in job.rows:
        if row["key"].endswith(victim):
            row["key"] = encode(row["key"], safe="")  # encoded twice
    with contextlib.suppress(ProtocolError):  # it looks incomplete
        job.run(job.read(tmp_path))
    assert job.memory.head(victim) is not None
    whole(job.memory, job.paths, *range(1, EPOCHS + 1))


def test_rows_that_contradict_each_other_are_no_candidates(tmp_path: Path) -> None:
    job = Job()
    first, second, third = sorted(job.lost)
    for row in list(job.rows):
        if row["key"].endswith(first):
            job.rows.append({**row, "size": row["size"] + 1})  # the same time: which is current?
        if row["key"].endswith(second):
            job.rows += [row, row]  # only repeated
    assert job.run(job.read(tmp_path)) == {second, third}


def test_only_the_current_version_counts(tmp_path: Path) -> None:
    job = Job()
    deleted, versioned, plain = sorted(job.lost)
    older = iso_micros(job.made_at - 20 * DAY)
    for row in list(job.rows):
        row["islatest"], row["isdeletemarker"] = "true", "false"
        if row["key"].endswith(deleted):
            row["islatest"] = "false"
            marker = {**row, "islatest": "true", "isdeletemarker": "true", "size": "", "etag": ""}
            job.rows.append(marker)
        if row["key"].endswith(versioned):
            old = {**row, "islatest": "false", "size": 99, "last_modified": older, "etag": "old"}
            job.rows.append(old)
    inventory = job.read(tmp_path)
    assert deleted not in {info.path for info in inventory.objects()}
    assert job.run(inventory) == {versioned, plain}


def test_without_is_latest_the_newest_version_counts(tmp_path: Path) -> None:
    job = Job()
    first, second, third = sorted(job.lost)
    later = iso_micros(job.made_at - 1)
    for row in list(job.rows):
        if row["key"].endswith(first):
            job.rows.append({**row, "isdeletemarker": "true", "last_modified": later})
        if row["key"].endswith(second):
            job.rows.append({**row, "size": 1, "last_modified": iso_micros(DAY)})
    assert job.run(job.read(tmp_path)) == {second, third}


def test_keys_outside_of_the_job_are_ignored(tmp_path: Path) -> None:
    job = Job()
    other = StatePath("q/main/generations/1/checkpoints/checkpoint-0000001/operator-x/table-t-000")
    job.memory.put(other, b"x")
    time = iso_micros(job.made_at - 20 * DAY)
    job.rows += [
        {"key": key, "size": 1, "last_modified": time, "etag": "e"}
        for key in (
            f"{PREFIX}/{other}",
            f"{PREFIX}/{job.paths.root}x/table-t-000",
            f"{PREFIX}/{job.paths.root}/../{other}",
            f"{PREFIX}/{job.paths.root}//table-t-000",
            f"/{PREFIX}/{job.paths.root}/table-t-000",
            "",
        )
        if key
    ]
    assert job.run(job.read(tmp_path)) == job.lost
    assert job.memory.head(other) is not None


def test_rows_without_size_or_time_are_no_candidates(tmp_path: Path) -> None:
    job = Job()
    first, second, third = sorted(job.lost)
    for row in job.rows:
        row |= {"size": ""} if row["key"].endswith(first) else {}
        row |= {"last_modified": ""} if row["key"].endswith(second) else {}
    assert job.run(job.read(tmp_path)) == {third}


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def _refused(expected: type[ArroyoStateError], words: str, read: Callable[[], object]) -> None:
    with pytest.raises(expected, match=words) as caught:
        read()
    assert caught.value.next_step


def test_an_incomplete_inventory_is_refused(tmp_path: Path) -> None:
    job = Job()
    path = s3_inventory(tmp_path, job.rows, job.made_at)
    part = tmp_path / "data" / "1.csv.gz"
    whole_part = part.read_bytes()
    part.unlink()
    _refused(ProtocolError, "a part that its manifest lists is missing", lambda: job.load(path))
    part.write_bytes(whole_part)
    _cut(part)
    _refused(ProtocolError, "a part of .* bytes differs", lambda: job.load(path))

    def unchecked(manifest: dict[str, Any]) -> None:
        for file in manifest["files"]:
            del file["MD5checksum"], file["size"]

    path = s3_inventory(tmp_path, job.rows, job.made_at, unchecked)
    _cut(part)
    _refused(FormatError, "does not decode, or is truncated", lambda: job.load(path))
    path = s3_inventory(tmp_path, job.rows, job.made_at)
    (tmp_path / "manifest.checksum").write_text("0" * 32)
    _refused(ProtocolError, r"does not match manifest\.checksum", lambda: job.load(path))


@pytest.mark.parametrize("form", ["csv.gz", "parquet"])
def test_a_truncated_plain_file_is_refused(form: str, tmp_path: Path) -> None:
    job = Job()
    path = tmp_path / f"inventory.{form}"
    path.write_bytes(_plain(form, job.rows))
    _cut(path)
    _refused(FormatError, "does not decode, or is truncated", lambda: job.load(path))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_inventory_without_files_that_epochs_list_is_refused(
    layout: str, tmp_path: Path
) -> None:
    job = Job(layout)
    victim = str(job.written._listed[-1])
    inventory = job.read(tmp_path, [row for row in job.rows if not row["key"].endswith(victim)])
    _refused(ProtocolError, "the inventory is incomplete: 1 or more", lambda: job.plan(inventory))


def test_an_inventory_of_another_place_is_refused(tmp_path: Path) -> None:
    job = Job()

    def elsewhere(manifest: dict[str, Any]) -> None:
        manifest["sourceBucket"] = "other"

    path = s3_inventory(tmp_path, job.rows, job.made_at, elsewhere)
    _refused(InputError, "of bucket 'other': expected 'state'", lambda: job.load(path))
    rows = [{**row, "bucket": "other"} for row in job.rows]
    _refused(InputError, "objects of bucket 'other'", lambda: job.read(tmp_path, rows))
    rows = [{**row, "key": f"else/{row['key']}"} for row in job.rows]
    words = "nothing below the job: expected keys that begin with arroyo/v1/p/main/"
    _refused(ProtocolError, words, lambda: job.read(tmp_path, rows))
    _refused(ProtocolError, "nothing below the job", lambda: job.read(tmp_path, []))


def test_an_inventory_of_the_wrong_time_is_refused(tmp_path: Path) -> None:
    job = Job()
    inventory = job.read(tmp_path)
    job.clock.days(2.5)
    words = r"the inventory is 3\.5 days old: expected at most the grace period, 3\.0 days"
    _refused(InputError, words, lambda: job.plan(inventory))
    assert set(job.plan(inventory, grace_micros=4 * DAY).data.paths) == job.lost
    job.clock.days(-5)
    with pytest.raises(InputError, match="expected a time in the past"):
        job.plan(inventory)


BROKEN: Mapping[str, tuple[str, bytes, type[ArroyoStateError], str]] = {
    "no time": ("i.csv", b"key,size\na,1\n", FormatError, "expected key, size and last_modified"),
    "no zone": (
        "i.csv",
        b"key,size,last_modified\na,1,2026-01-01T00:00:00\n",
        FormatError,
        "does not decode",
    ),
    "no number": (
        "i.csv",
        b"key,size,last_modified\na,x,2026-01-01T00:00:00Z\n",
        FormatError,
        "does not decode",
    ),
    "empty": ("i.csv", b"", FormatError, "does not decode"),
    "twice": ("i.csv", b"key,size,last_modified,Size\na,1,b,1\n", FormatError, "each once"),
    "orc": ("i.orc", b"", InputError, "expected manifest.json"),
    "json": ("manifest.json", b"[]", FormatError, "not an object"),
    "no fields": ("manifest.json", b"{}", FormatError, "sourceBucket"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_no_inventory_is_refused(what: str, tmp_path: Path) -> None:
    name, data, error, words = BROKEN[what]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(error, match=words):
        Job().load(tmp_path / name)
    with pytest.raises(NotFoundError, match="no such inventory"):
        Job().load(tmp_path / "none" / "i.csv")


def test_an_orc_inventory_of_s3_is_refused(tmp_path: Path) -> None:
    job = Job()
    path = s3_inventory(tmp_path, job.rows, job.made_at, lambda m: m.update(fileFormat="ORC"))
    _refused(InputError, "ORC cannot be read: expected CSV or Parquet", lambda: job.load(path))


# ---- the command ---------------------------------------------------------------------------------


def _command(*words: str) -> Any:
    return CliRunner().invoke(main, words)


def test_the_command_plans_and_deletes_by_an_inventory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job()
    memory = job.memory
    rows = [{**row, "key": row["key"].removeprefix(f"{PREFIX}/")} for row in job.rows]
    path = tmp_path / "inventory.csv"
    path.write_bytes(_plain("csv", rows))
    monkeypatch.setattr(
        "arroyo_dagster.state.storage.remote.open.get_storage_provider", lambda url: memory
    )
    common = ("p/main", "--inventory", str(path), "--assume", "p/main=stopped", "--json")
    now = job.clock.micros
    monkeypatch.setattr(
        "arroyo_dagster.state.operations.gc.plan.wall_clock", lambda: now + 3_600_000_000
    )
    os.utime(path, (now / 1e6, now / 1e6))
    planned = _command("gc", "plan", "orphans", *common)
    assert planned.exit_code == 0, planned.output
    found = json.loads(planned.stdout)
    assert found["rule"]["inventory"].endswith("inventory.csv")
    assert {path for path, *_ in found["data"]} == set(map(str, job.lost))
    wrong = _command("gc", "plan", "expire", "p/main", "--keep", "3", "--inventory", str(path))
    assert wrong.exit_code == 2
    assert "--inventory is an option of `orphans`" in wrong.stderr


def test_an_inventory_is_for_orphans_only() -> None:
    from arroyo_dagster.state.model.garbage import PlanKind

    given = StoreInventory(
        source="i",
        paths=JobPaths("j"),
        made_at_micros=0,
        stored=None,
        rows=0,  # type: ignore[arg-type]
    )
    with pytest.raises(InputError, match="an option of orphans only"):
        GcRequest(kind=PlanKind.DEAD_JOB, inventory=given)


# ---- a server of S3 ------------------------------------------------------------------------------


def test_an_inventory_in_another_bucket_of_s3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parts lie at their keys in that bucket. S3 quotes etags, inventories do not."""
    for name, value in (("ACCESS_KEY_ID", "testing"), ("SECRET_ACCESS_KEY", "testing")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with servers.moto_server() as host:
        for bucket in (BUCKET, "reports"):
            servers.make_moto_bucket(bucket)
        store = open_store(f"s3::http://{host}/{BUCKET}/{PREFIX}")
        job = Job()
        for info in job.memory.list():
            store.put(info.path, job.memory.read(info.path))
        rows = [
            {
                "key": f"{PREFIX}/{encode_path(info.path)}",
                "size": info.size_bytes,
                "last_modified": iso_micros(info.modified_micros),
                "etag": str(info.etag).strip('"'),
            }
            for info in store.list()
        ]
        made_at = max(info.modified_micros or 0 for info in store.list()) + 2 * DAY
        s3_inventory(tmp_path, rows, made_at)
        reports = open_store(f"s3::http://{host}/reports")
        for name in ("0.csv.gz", "1.csv.gz"):
            reports.put(StatePath(f"a/b/data/{name}"), (tmp_path / "data" / name).read_bytes())
        manifest = "a/b/2026-11-20T01-00Z/manifest.json"
        reports.put(StatePath(manifest), (tmp_path / "manifest.json").read_bytes())
        source = f"s3::http://{host}/reports/{manifest}"
        inventory = read_store_inventory(source, store, job.paths)
        now = made_at + 2 * DAY
        plan = plan_gc(store, job.paths, job.request(inventory), now_micros=now)
        assert set(plan.data.paths) == job.lost
        listed = plan_gc(store, job.paths, job.request(), now_micros=now)
        assert list(plan.data) == list(listed.data), "as the store describes them now"
        reports.delete_many([StatePath("a/b/data/1.csv.gz")])
        with pytest.raises(ProtocolError, match="a part that its manifest lists is missing"):
            read_store_inventory(source, store, job.paths)
