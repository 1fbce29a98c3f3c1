"""Orphans planned from a stored listing: however wrong it is, nothing needed goes."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import polars as pl
import pytest
from click.testing import CliRunner

from arroyo_dagster import (
    Epoch,
    GcOptions,
    GcRequest,
    MemoryStore,
    ObjectStore,
    StatePath,
    WorkerGeneration,
    cli,
    open_store,
    plan_gc,
    run_gc,
)
from arroyo_dagster.errors import (
    ArroyoStateError,
    FormatError,
    InputError,
    NotFoundError,
    ProtocolError,
)
from arroyo_dagster.state.codec.derived import encode_json
from arroyo_dagster.state.operations.gc.listing_files import read_store_listing
from arroyo_dagster.state.operations.gc.store_listing import StoreListing
from tests.contract import servers
from tests.fleets import OPERATOR, TABLE, Written, legacy_job, protocol_job
from tests.formats import GcPlan, decode_gc_plan, gc_plan_to_json, iso_micros
from tests.gc_jobs import DAY, Clock, orphans, whole
from tests.jobs import copy_into
from tests.stores import Counting, Wrapper, encode_path

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
    """A job with orphans, five days old, and a listing of it that is one day old."""

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
        """What a listing made now contains."""
        return [
            {
                "path": f"{PREFIX}/{encode_path(info.path)}",
                "size": info.size_bytes,
                "time": iso_micros(info.modified_micros),
                "etag": info.etag,
            }
            for info in self.memory.list()
        ]

    def request(self, listing: StoreListing | None = None, **given: Any) -> GcRequest:
        asked = orphans(**{str(self.paths.root): "stopped"}, **given)
        return GcRequest(
            kind=asked.kind,
            grace_micros=asked.grace_micros,
            directory=asked.directory,
            listing=listing,
        )

    def plan(self, listing: StoreListing | None, **given: Any) -> GcPlan:
        return plan_gc(
            self.store, self.paths, self.request(listing, **given), now_micros=self.clock.micros
        )

    def run(self, listing: StoreListing) -> set[StatePath]:
        """Delete what the plan names, prove that every epoch is whole, and return what is gone."""
        before = {info.path for info in self.memory.list()}
        run_gc(self.store, self.paths, self.request(listing), GcOptions(clock=self.clock))
        whole(self.memory, self.paths, *range(1, EPOCHS + 1))
        after = {info.path for info in self.memory.list()}
        return {path for path in before - after if "/_arroyo_dagster/" not in path}

    def read(self, folder: Path, rows: Iterable[Row] | None = None) -> StoreListing:
        """Read a listing in CSV, of two files."""
        listed = list(self.rows if rows is None else rows)
        parts = (written(folder / "0.csv", listed[::2]), written(folder / "1.csv", listed[1::2]))
        return self.load(*parts)

    def load(self, *files: Path, columns: str = "") -> StoreListing:
        for file in files:
            if file.exists():
                os.utime(file, ns=(self.made_at * 1000,) * 2)
        return read_store_listing([str(file) for file in files], self.store, self.paths, columns)


def written(path: Path, rows: list[Row], header: bool = True) -> Path:
    """Write a file of a listing, in the form that its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(rows[0]) if rows else ["path", "size", "time", "etag"]
    if ".parquet" in path.name:
        out = io.BytesIO()
        table = pl.DataFrame(rows, schema=names, infer_schema_length=None)
        table.with_columns(pl.col(names[2]).str.to_datetime(time_zone="UTC")).write_parquet(out)
        data = out.getvalue()
    else:
        text = io.StringIO()
        writer = csv.DictWriter(text, names, quoting=csv.QUOTE_ALL)
        if header:
            writer.writeheader()
        writer.writerows(rows)
        data = text.getvalue().encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
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
    listing = job.read(tmp_path)
    counted = Counting(job.store)
    plan_gc(counted, job.paths, job.request(listing), now_micros=job.clock.micros)
    # The directories of settled epochs are not listed: only the newest two, and those beside.
    assert counted.calls["list"] <= 6
    assert counted.calls["head"] < 3 * len(job.lost) + 10


FORMS = ["parquet", "parquet.gz", "csv", "csv.gz"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("encoded", [False, True])
def test_every_form_gives_the_same_objects(form: str, encoded: bool, tmp_path: Path) -> None:
    job = Job()
    job.put_lost(1, "a+b c%")
    job.rows = job.listed()
    expected = job.read(tmp_path)
    names = ("Key", "Size", "LastModifiedDate", "ETag")
    rows = [dict(zip(names, row.values(), strict=True)) for row in job.rows]
    for row in rows if encoded else []:
        row["Key"] = quote_plus(row["Key"])
    columns = "Key,size=Size,time=LastModifiedDate,etag=ETag"
    columns = f"{'encoded_' if encoded else ''}path={columns}"
    found = job.load(written(tmp_path / f"listing.{form}", rows), columns=columns)
    assert list(found.stored) == list(expected.stored)
    assert found.rows == expected.rows == len(job.rows)


def test_columns_of_a_file_without_header_have_numbers(tmp_path: Path) -> None:
    """As S3 Inventory writes them: encoded keys, every cell quoted, compressed."""
    job = Job()
    rows = [{"bucket": BUCKET, **row, "path": quote_plus(row["path"])} for row in job.rows]
    file = written(tmp_path / "data.csv.gz", rows, header=False)
    found = job.load(file, columns="encoded_path=2, size=3, time=4, etag=5")
    assert list(found.stored) == list(job.read(tmp_path).stored)
    assert job.run(found) == job.lost


def test_times_without_a_zone_are_utc_in_parquet_only(tmp_path: Path) -> None:
    job = Job()
    table = pl.DataFrame(job.rows).with_columns(pl.col("time").str.to_datetime(time_zone="UTC"))
    table.with_columns(pl.col("time").dt.replace_time_zone(None)).write_parquet(tmp_path / "naive")
    berlin = pl.col("time").dt.convert_time_zone("Europe/Berlin")
    table.with_columns(berlin).write_parquet(tmp_path / "berlin")
    expected = list(job.read(tmp_path).stored)
    assert list(job.load(tmp_path / "naive").stored) == expected
    assert list(job.load(tmp_path / "berlin").stored) == expected


# ---- what is newer -------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_newer_than_the_listing_stays(layout: str, tmp_path: Path) -> None:
    job = Job(layout)
    listing = job.read(tmp_path)
    newer = job.put_lost(2, "newer")
    job.clock.days(1.5)
    plan = job.plan(listing)
    assert newer not in set(plan.data.paths)
    assert set(plan.data.paths) == job.lost
    assert job.run(listing) == job.lost
    assert job.memory.head(newer) is not None


def test_an_object_that_was_written_again_stays(tmp_path: Path) -> None:
    job = Job()
    listing = job.read(tmp_path)
    again = sorted(job.lost)[0]
    job.memory.put(again, b"LOST")  # the same size
    job.memory.delete_many([sorted(job.lost)[1]])
    plan = job.plan(listing)
    assert set(plan.data.paths) == {sorted(job.lost)[2]}
    assert plan.stays["changed"] == (1, 4)
    job.clock.days(0.5)
    assert job.run(listing) == {sorted(job.lost)[2]}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_that_an_epoch_refers_to_since_stay(layout: str, tmp_path: Path) -> None:
    """The listing shows orphans that an epoch has listed since, as after an undelete."""
    job = Job(layout)
    listing = job.read(tmp_path)
    again = sorted(job.lost)[0]
    job.written._listed = [again]
    job.written.write()
    plan = job.plan(listing)
    assert set(plan.data.paths) == job.lost - {again}
    run_gc(job.store, job.paths, job.request(listing), GcOptions(clock=job.clock))
    assert job.memory.head(again) is not None


def test_an_attempt_that_is_newer_than_the_listing_keeps_its_files(tmp_path: Path) -> None:
    """A manifest without an epoch record, which a start may claim, refers to an old file."""
    job = Job()
    listing = job.read(tmp_path)
    again = sorted(job.lost)[0]
    job.written._listed = [again]
    job.written.write(record=False)
    assert set(job.plan(listing).data.paths) == set(job.plan(None).data.paths)
    assert again not in set(job.plan(listing).data.paths)


# ---- hostile listings ----------------------------------------------------------------------------


@pytest.mark.parametrize("columns", ["", "encoded_path=path"])
def test_a_key_that_decodes_to_another_name_deletes_nothing(columns: str, tmp_path: Path) -> None:
    """Keys that are encoded twice, or once too often for what the option says."""
    job = Job()
    victim, lost = job.written._listed[0], job.put_lost(1, "a+b c%41")
    job.rows = job.listed()
    for row in job.rows:
        if row["path"].endswith(victim):
            row["path"] = quote_plus(quote_plus(row["path"]))
    with contextlib.suppress(ProtocolError):  # it looks incomplete
        job.run(job.load(written(tmp_path / "listing.csv", job.rows), columns=columns))
    assert job.memory.head(victim) is not None
    assert job.memory.head(lost) is not None
    whole(job.memory, job.paths, *range(1, EPOCHS + 1))


def test_rows_that_contradict_each_other_are_no_candidates(tmp_path: Path) -> None:
    job = Job()
    first, second, third = sorted(job.lost)
    for row in list(job.rows):
        if row["path"].endswith(first):
            job.rows.append({**row, "size": row["size"] + 1})  # the same time: which is current?
        if row["path"].endswith(second):
            job.rows += [row, row]  # only repeated
    assert job.run(job.read(tmp_path)) == {second, third}


def test_the_newest_version_counts(tmp_path: Path) -> None:
    job = Job()
    deleted, versioned, unknown = sorted(job.lost)
    later, older = iso_micros(job.made_at - 1), iso_micros(job.made_at - 20 * DAY)
    for row in list(job.rows):
        if row["path"].endswith(deleted):  # a delete marker
            job.rows.append({**row, "time": later, "size": "", "etag": ""})
        if row["path"].endswith(versioned):
            job.rows.append({**row, "time": older, "size": 99, "etag": "old"})
        if row["path"].endswith(unknown):
            job.rows.append({**row, "time": ""})
    listing = job.read(tmp_path)
    assert deleted not in {info.path for info in listing.objects()}
    assert job.run(listing) == {versioned}


def test_what_differs_from_the_store_stays(tmp_path: Path) -> None:
    """Each object is asked for, by size, time and etag: a listing of a copy deletes nothing."""
    job = Job()
    size, moment, etag = sorted(job.lost)
    for row in job.rows:
        if row["path"].endswith(size):
            row["size"] += 1
        if row["path"].endswith(moment):
            row["time"] = iso_micros(job.made_at - 20 * DAY)
        if row["path"].endswith(etag):
            row["etag"] = "of another bucket"
    listing = job.read(tmp_path)
    assert job.plan(listing).stays["changed"][0] == 3
    assert job.run(listing) == set()


def test_without_a_column_of_etags_none_is_compared(tmp_path: Path) -> None:
    job = Job()
    rows = [{name: row[name] for name in ("path", "size", "time")} for row in job.rows]
    assert job.run(job.load(written(tmp_path / "listing.csv", rows))) == job.lost
    with pytest.raises(FormatError, match="expected ETag"):
        job.load(tmp_path / "listing.csv", columns="etag=ETag")


def test_keys_outside_of_the_job_are_ignored(tmp_path: Path) -> None:
    job = Job()
    other = StatePath("q/main/generations/1/checkpoints/checkpoint-0000001/operator-x/table-t-000")
    job.memory.put(other, b"x")
    moment = iso_micros(job.made_at - 20 * DAY)
    job.rows += [
        {"path": key, "size": 1, "time": moment, "etag": "e"}
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
        row |= {"size": ""} if row["path"].endswith(first) else {}
        row |= {"time": ""} if row["path"].endswith(second) else {}
    assert job.run(job.read(tmp_path)) == {third}


def _refused(expected: type[ArroyoStateError], words: str, read: Callable[[], object]) -> None:
    with pytest.raises(expected, match=words) as caught:
        read()
    assert caught.value.next_step


@pytest.mark.parametrize("form", FORMS)
def test_a_truncated_file_is_refused(form: str, tmp_path: Path) -> None:
    job = Job()
    path = written(tmp_path / f"listing.{form}", job.rows)
    path.write_bytes(path.read_bytes()[:-20])
    _refused(FormatError, "does not decode, or is truncated", lambda: job.load(path))


def test_a_file_without_its_last_row_deletes_nothing_that_it_does_not_hold(tmp_path: Path) -> None:
    job = Job()
    path = written(
        tmp_path / "listing.csv", sorted(job.rows, key=lambda row: "lost" in row["path"])
    )
    path.write_bytes(path.read_bytes().rstrip().rpartition(b"\n")[0])
    assert job.run(job.load(path)) == set(sorted(job.lost)[:2])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_listing_without_files_that_epochs_list_is_refused(layout: str, tmp_path: Path) -> None:
    job = Job(layout)
    victim = str(job.written._listed[-1])
    listing = job.read(tmp_path, [row for row in job.rows if not row["path"].endswith(victim)])
    _refused(ProtocolError, "the listing is incomplete: 1 or more", lambda: job.plan(listing))


def test_a_listing_without_one_of_its_files_is_refused(tmp_path: Path) -> None:
    job = Job()
    job.read(tmp_path)
    listing = job.load(tmp_path / "0.csv")
    _refused(ProtocolError, "the listing is incomplete", lambda: job.plan(listing))
    with pytest.raises(NotFoundError, match="no such listing"):
        job.load(tmp_path / "0.csv", tmp_path / "2.csv")


def test_a_listing_of_another_place_is_refused(tmp_path: Path) -> None:
    job = Job()
    words = "nothing below the job: expected keys that begin with arroyo/v1/p/main/"
    rows = [{**row, "path": f"else/{row['path']}"} for row in job.rows]
    _refused(ProtocolError, words, lambda: job.read(tmp_path, rows))
    _refused(ProtocolError, "nothing below the job", lambda: job.read(tmp_path, []))


def test_a_listing_of_the_wrong_time_is_refused(tmp_path: Path) -> None:
    job = Job()
    listing = job.read(tmp_path)
    job.clock.days(2.5)
    words = r"the listing is 3\.5 days old: expected at most the grace period, 3\.0 days"
    _refused(InputError, words, lambda: job.plan(listing))
    assert set(job.plan(listing, grace_micros=4 * DAY).data.paths) == job.lost
    job.clock.days(-5)
    with pytest.raises(InputError, match="expected a time in the past"):
        job.plan(listing)


def test_the_oldest_file_says_when_the_listing_was_made(tmp_path: Path) -> None:
    job = Job()
    listing = job.read(tmp_path)
    os.utime(tmp_path / "0.csv", ns=((job.made_at + 1) * 1000,) * 2)
    files = [str(tmp_path / "0.csv"), str(tmp_path / "1.csv")]
    again = read_store_listing(files, job.store, job.paths)
    assert again.made_at_micros == listing.made_at_micros == job.made_at


BROKEN: Mapping[str, tuple[str, type[ArroyoStateError], str]] = {
    "no time": ("path,size\na,1\n", FormatError, "the columns path, size: expected time"),
    "no zone": ("path,size,time\na,1,2026-01-01T00:00:00\n", FormatError, "does not decode"),
    "no number": ("path,size,time\na,x,2026-01-01T00:00:00Z\n", FormatError, "does not decode"),
    "too many cells": ("path,size,time\na,1,2026-01-01T00:00:00Z,x\n", FormatError, "decode"),
    "no cell": ("", FormatError, "does not decode"),
    "orc": ("ORC\x08", FormatError, "expected path"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_no_listing_is_refused(what: str, tmp_path: Path) -> None:
    text, error, words = BROKEN[what]
    (tmp_path / "listing").write_text(text)
    with pytest.raises(error, match=words):
        Job().load(tmp_path / "listing")


@pytest.mark.parametrize(
    "columns",
    [
        "key=Key",
        "path",
        "path=",
        "path=a,path=b",
        "path=a,encoded_path=b",
        "path=1",
        "path=a,size=2",
    ],
)
def test_wrong_columns_are_refused(columns: str, tmp_path: Path) -> None:
    job = Job()
    path = written(tmp_path / "listing.csv", job.rows)
    _refused(
        InputError, "does not name columns of a listing", lambda: job.load(path, columns=columns)
    )


# ---- the command ---------------------------------------------------------------------------------


def _command(*words: str) -> Any:
    return CliRunner().invoke(cli.main, words)


def test_the_command_plans_and_deletes_by_a_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job()
    memory = job.memory
    rows = [{**row, "path": row["path"].removeprefix(f"{PREFIX}/")} for row in job.rows]
    path = written(tmp_path / "listing.csv", rows)
    monkeypatch.setattr(
        "arroyo_dagster.state.storage.remote.open.get_storage_provider", lambda url: memory
    )
    common = ("p/main", "--listing", str(path), "--assume", "p/main=stopped", "--json")
    now = job.clock.micros
    monkeypatch.setattr(
        "arroyo_dagster.state.operations.gc.plan.wall_clock", lambda: now + 3_600_000_000
    )
    os.utime(path, (now / 1e6, now / 1e6))
    planned = _command("gc", "plan", "orphans", *common)
    assert planned.exit_code == 0, planned.output
    found = json.loads(planned.stdout)
    assert found["rule"]["listing"].endswith("listing.csv")
    assert {path for path, *_ in found["data"]} == set(map(str, job.lost))
    wrong = _command("gc", "plan", "expire", "p/main", "--keep", "3", "--listing", str(path))
    assert wrong.exit_code == 2
    assert "--listing is an option of `orphans`" in wrong.stderr


# ---- a server of S3 ------------------------------------------------------------------------------


def test_a_listing_in_another_bucket_of_s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """S3 quotes etags, listings do not."""
    for name, value in (("ACCESS_KEY_ID", "testing"), ("SECRET_ACCESS_KEY", "testing")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with servers.moto_server() as host:
        for bucket in (BUCKET, "reports"):
            servers.make_moto_bucket(bucket)
        store = open_store(f"s3::http://{host}/{BUCKET}/{PREFIX}")
        job = Job()
        copy_into(store, job.memory)
        rows = [
            {
                "path": f"{PREFIX}/{encode_path(info.path)}",
                "size": info.size_bytes,
                "time": iso_micros(info.modified_micros),
                "etag": str(info.etag).strip('"'),
            }
            for info in store.list()
        ]
        time.sleep(1.1)  # times of S3 have whole seconds
        reports = open_store(f"s3::http://{host}/reports")
        file = written(tmp_path / "listing.csv.gz", rows)
        reports.put(StatePath("daily/listing.csv.gz"), file.read_bytes())
        source = f"s3::http://{host}/reports/daily/listing.csv.gz"
        listing = read_store_listing([source], store, job.paths)
        now = listing.made_at_micros + 2 * DAY
        grace = {"grace_micros": 2 * DAY + 500_000}
        plan = plan_gc(store, job.paths, job.request(listing, **grace), now_micros=now)
        assert set(plan.data.paths) == job.lost
        listed = plan_gc(store, job.paths, job.request(None, **grace), now_micros=now)
        assert list(plan.data) == list(listed.data), "as the store describes them now"
