"""One suite that every store passes: in memory, on local disk, on S3, GCS and Azure on loopback."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arroyo_dagster.errors import FormatError, InputError, NotFoundError, StorageError
from arroyo_dagster.state import MemoryStore, ObjectStore, StatePath, WriteProtected
from arroyo_dagster.state.model.sizes import RECORD
from arroyo_dagster.state.storage import ObjectInfo, encode_path, read_many
from arroyo_dagster.state.storage.remote.obstore_store import ObstoreStore
from arroyo_dagster.state.storage.store import CHUNK_BYTES, read_in_chunks
from tests.contract import servers
from tests.contract.conftest import BUCKET, MOTO_BACKENDS, open_s3
from tests.faulty_stores import Crash, FaultInjecting
from tests.stores import Counting

P = StatePath

SPECIAL = (
    "operator-SessionWindow<30s>/table-s-000",
    "a b/c d",
    "50%/100%25",
    "name#5",
    "Grüße/日本/🦆",
    'q"uote/back`tick',
    "{curly}/[square]/^~|*?",
    "tab\there/new\nline\r/\x7f",
    "dots../.hidden/a.b",
    "plus+and=amp&;:@,$!'()",
)


CLIENTS = ("obstore", "fsspec")


@pytest.mark.parametrize("client", CLIENTS)
def test_a_missing_bucket_is_told_from_an_empty_one(s3_endpoint: str, client: str) -> None:
    nowhere = open_s3(f"s3::http://{s3_endpoint}/nowhere/key", client)
    for verb in (
        lambda: list(nowhere.list()),
        lambda: nowhere.list_dir(),
        lambda: nowhere.put(P("a"), b""),
        lambda: nowhere.create(P("a"), b""),
        lambda: nowhere.read(P("a")),
    ):
        with pytest.raises(NotFoundError, match="no such bucket"):
            verb()
    assert list(nowhere.delete_many([P("a")]).failed) == ["a"]
    servers.make_moto_bucket(f"empty-{client}")
    empty = open_s3(f"s3::http://{s3_endpoint}/empty-{client}", client)
    assert list(empty.list()) == []
    assert empty.list_dir("a").objects == ()
    empty.put(P("a/b"), b"")
    assert paths(empty) == ["a/b"]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_server_that_is_gone_is_a_retryable_failure(client: str) -> None:
    gone = open_s3("s3::http://127.0.0.1:9/bucket/key", client, max_retries=0)
    with pytest.raises(StorageError, match="cannot be reached") as caught:
        gone.read(P("a"))
    assert caught.value.retryable


@pytest.mark.parametrize("client", CLIENTS)
def test_names_that_a_client_takes_for_damaged_are_listed(s3_endpoint: str, client: str) -> None:
    root = f"odd-{client}"
    odd = ["a//b", "a/./c", "m/", "m/n/", "z//"]
    for name in ["", *odd, "b/c", "zz"]:
        servers.put_into_moto(BUCKET, f"{root}/{name}", b"x" if name[-1:].isalpha() else b"")
    store = open_s3(f"s3::http://{s3_endpoint}/{BUCKET}/{root}", client)
    found = {info.path: info for info in store.list()}
    assert [str(path) for path in found] == sorted([*odd, "b/c", "zz"])
    assert [path for path, info in found.items() if info.addressable] == ["b/c", "zz"]
    assert paths(store, "m") == ["m/n/"]
    assert paths(store, start_after=P("m/n")) == ["m/n/", "z//", "zz"]
    assert paths(store, start_after=P("z")) == ["z//", "zz"]
    assert [info.path for info in store.list_dir().objects] == ["zz"]


def paths(store: ObjectStore, prefix: str = "", start_after: str | None = None) -> list[str]:
    return [info.path for info in store.list(prefix, start_after=start_after)]


def assert_same_but_for_a_second(head: ObjectInfo | None, listed: ObjectInfo) -> None:
    """HEAD tells whole seconds where a listing of some servers tells fractions, which it rounds."""
    assert head is not None
    apart = abs((head.modified_micros or 0) - (listed.modified_micros or 0))
    assert apart <= 1_000_000
    assert replace(head, modified_micros=listed.modified_micros) == listed


def put_all(store: ObjectStore, names: list[str]) -> None:
    for name in names:
        store.put(P(name), name.encode())


class TestReadAndPut:
    def test_it_is_an_object_store(self, store: ObjectStore) -> None:
        assert isinstance(store, ObjectStore)

    @pytest.mark.parametrize("size", [0, 1, 100_000])
    def test_what_was_put_is_read(self, store: ObjectStore, size: int) -> None:
        data = os.urandom(size)
        store.put(P("a/b/c"), data)
        assert store.read(P("a/b/c")) == data

    def test_an_overwrite_is_seen_at_once_and_by_others(self, store: ObjectStore) -> None:
        other = pickle.loads(pickle.dumps(store))
        store.put(P("a"), b"old, and longer")
        assert paths(other) == ["a"]
        store.put(P("a"), b"new")
        assert (store.read(P("a")), other.read(P("a"))) == (b"new", b"new")
        assert next(iter(other.list())).size_bytes == 3
        head = other.head(P("a"))
        assert head is not None
        assert head.size_bytes == 3

    def test_a_reader_sees_the_old_bytes_or_the_new_ones(self, store: ObjectStore) -> None:
        versions = {bytes([letter]) * 200_000 for letter in b"xyz"}
        store.put(P("a"), next(iter(versions)))
        done = threading.Event()

        def write() -> None:
            for data in itertools.islice(itertools.cycle(versions), 20):
                store.put(P("a"), data)
            done.set()

        writer = threading.Thread(target=write)
        writer.start()
        while not done.is_set():
            assert store.read(P("a")) in versions
        writer.join()

    @pytest.mark.parametrize("missing", ["a", "a/b", "a/b/c", "held/below"])
    def test_a_missing_object_is_not_found(self, store: ObjectStore, missing: str) -> None:
        put_all(store, ["a/b/c/d", "held"])
        path = P(missing)
        for verb in (
            lambda: store.read(path),
            lambda: store.read_range(path, 0, 5),
            lambda: store.read_range(path, 0, 0),
            lambda: store.open_input(path),
        ):
            with pytest.raises(NotFoundError) as caught:
                verb()
            assert caught.value.facts["path"] == missing
            assert caught.value.facts["url"] == store.url
        assert store.head(path) is None

    def test_nothing_is_found_below_a_root_that_does_not_exist(self, store: ObjectStore) -> None:
        assert store.head(P("a")) is None
        with pytest.raises(NotFoundError):
            store.read(P("a"))

    @pytest.mark.parametrize("bad", ["", "/a", "a/", "a//b", "../a", "a/./b", "a\\b"])
    def test_no_path_leads_out_of_the_root(self, store: ObjectStore, bad: str) -> None:
        for verb in (
            lambda: store.read(bad),  # type: ignore[arg-type]
            lambda: store.put(bad, b""),  # type: ignore[arg-type]
            lambda: store.create(bad, b""),  # type: ignore[arg-type]
            lambda: store.head(bad),  # type: ignore[arg-type]
            lambda: store.delete_many([bad]),  # type: ignore[list-item]
        ):
            with pytest.raises(InputError):
                verb()

    @pytest.mark.parametrize("bad", ["..", "a/../..", "/etc"])
    def test_no_prefix_leads_out_of_the_root(self, store: ObjectStore, bad: str) -> None:
        store.put(P("a"), b"")
        with pytest.raises(InputError):
            list(store.list(bad))
        with pytest.raises(InputError):
            store.list_dir(bad)


class TestSizes:
    @pytest.mark.parametrize("name", ["current-generation.json", "epochs/epoch-0000001.record"])
    def test_an_object_larger_than_any_of_its_kind_is_refused(
        self, store: ObjectStore, name: str
    ) -> None:
        most = RECORD.size_bytes
        store.put(P(f"p/j/{name}"), b"0" * most)
        assert len(store.read(P(f"p/j/{name}"))) == most
        store.put(P(f"p/j/{name}"), b"0" * (most + 3))
        said = f"larger than the limit of a record: {most + 3} bytes, expected at most {most}"
        with pytest.raises(FormatError, match=said) as caught:
            store.read(P(f"p/j/{name}"))
        assert caught.value.facts["path"] == f"p/j/{name}"
        assert not caught.value.retryable
        assert store.copy(P(f"p/j/{name}"), P("copy"))
        assert len(store.read(P("copy"))) == most + 3

    def test_an_empty_record_is_read(self, store: ObjectStore) -> None:
        store.put(P("p/j/current-generation.json"), b"")
        assert store.read(P("p/j/current-generation.json")) == b""


class TestRanges:
    @pytest.mark.parametrize(
        ("start", "length", "expected"),
        [
            (0, 4, b"0123"),
            (3, 4, b"3456"),
            (8, 5, b"89"),
            (9, 1, b"9"),
            (0, 10, b"0123456789"),
            (0, 10**12, b"0123456789"),
            (10, 1, b""),
            (10**9, 5, b""),
            (4, 0, b""),
        ],
    )
    def test_a_range_gives_what_there_is(
        self, store: ObjectStore, start: int, length: int, expected: bytes
    ) -> None:
        store.put(P("a/b"), b"0123456789")
        assert store.read_range(P("a/b"), start, length) == expected

    @pytest.mark.parametrize(("start", "length"), [(0, 0), (0, 5), (3, 5)])
    def test_an_empty_object_has_empty_ranges(
        self, store: ObjectStore, start: int, length: int
    ) -> None:
        store.put(P("a"), b"")
        assert store.read_range(P("a"), start, length) == b""

    @pytest.mark.parametrize(("start", "length"), [(-1, 5), (0, -1)])
    def test_a_negative_range_is_refused(self, store: ObjectStore, start: int, length: int) -> None:
        store.put(P("a"), b"01234")
        with pytest.raises(InputError):
            store.read_range(P("a"), start, length)

    def test_an_open_object_can_be_read_in_any_order(self, store: ObjectStore) -> None:
        store.put(P("a"), b"0123456789")
        with store.open_input(P("a")) as file:
            assert file.seekable()
            assert (file.seek(-3, io.SEEK_END), file.read(2), file.tell()) == (7, b"78", 9)
            assert (file.seek(2), file.read()) == (2, b"23456789")
            assert file.read(5) == b""

    def test_parquet_is_read_by_ranges(self, store: ObjectStore) -> None:
        table = pa.table({"key": list(range(5000)), "value": ["x" * 20] * 5000})
        written = io.BytesIO()
        pq.write_table(table, written, row_group_size=1000)
        store.put(P("t/table-s-000"), written.getvalue())
        with store.open_input(P("t/table-s-000")) as file:
            parquet = pq.ParquetFile(file)
            assert parquet.num_row_groups == 5
            assert parquet.read_row_group(3) == table.slice(3000, 1000)
            assert parquet.read() == table


class TestCreate:
    def test_only_the_first_create_does_anything(self, store: ObjectStore) -> None:
        assert store.create(P("a/b"), b"first") is True
        assert store.create(P("a/b"), b"second") is False
        assert store.read(P("a/b")) == b"first"

    def test_a_put_object_cannot_be_created_until_it_is_deleted(self, store: ObjectStore) -> None:
        store.put(P("a"), b"put")
        assert store.create(P("a"), b"created") is False
        store.delete_many([P("a")])
        assert store.create(P("a"), b"created") is True
        assert store.read(P("a")) == b"created"

    def test_of_many_creators_one_wins_and_its_bytes_stay(self, store: ObjectStore) -> None:
        start = threading.Barrier(16)

        def compete(number: int) -> bool:
            start.wait()
            return store.create(P("epochs/epoch-0000001.record"), b"%d" % number * 1000)

        for _ in range(3):
            with ThreadPoolExecutor(16) as pool:
                won = list(pool.map(compete, range(16)))
            assert won.count(True) == 1
            winner = b"%d" % won.index(True) * 1000
            assert store.read(P("epochs/epoch-0000001.record")) == winner
            assert paths(store) == ["epochs/epoch-0000001.record"]
            store.delete_many([P("epochs/epoch-0000001.record")])


class TestCopy:
    @pytest.mark.parametrize("create", [False, True])
    @pytest.mark.parametrize("size", [0, 1, 100_000, CHUNK_BYTES, CHUNK_BYTES + 1])
    def test_a_copy_has_the_same_bytes(self, store: ObjectStore, size: int, create: bool) -> None:
        data = os.urandom(min(size, 1000)) * (size // 1000 + 1)
        store.put(P("from/a"), data[:size])
        assert store.copy(P("from/a"), P("to/b/c"), create=create) is True
        assert store.read(P("to/b/c")) == data[:size] == store.read(P("from/a"))
        assert b"".join(read_in_chunks(store, P("to/b/c"))) == data[:size]
        assert paths(store) == ["from/a", "to/b/c"]

    def test_a_copy_overwrites_and_is_no_link(self, store: ObjectStore) -> None:
        store.put(P("a"), b"new")
        store.put(P("b"), b"old, and longer")
        assert store.copy(P("a"), P("b")) is True
        store.put(P("a"), b"newer")
        assert store.read(P("b")) == b"new"
        store.delete_many([P("a")])
        assert store.read(P("b")) == b"new"

    def test_a_copy_is_as_old_as_itself(self, store: ObjectStore) -> None:
        store.put(P("a"), b"1")
        time.sleep(1.1)
        store.copy(P("a"), P("b"))
        old, new = store.head(P("a")), store.head(P("b"))
        assert old is not None and new is not None  # noqa: PT018
        assert (old.modified_micros or 0) < (new.modified_micros or 1)

    @pytest.mark.parametrize("size", [1, CHUNK_BYTES + 1])
    def test_a_copy_that_is_to_create_leaves_what_is_there(
        self, store: ObjectStore, size: int
    ) -> None:
        store.put(P("a"), b"x" * size)
        store.put(P("b"), b"first")
        assert store.copy(P("a"), P("b"), create=True) is False
        assert store.read(P("b")) == b"first"
        assert paths(store) == ["a", "b"]

    def test_of_many_copies_that_create_one_wins(self, store: ObjectStore) -> None:
        names = [f"from/{number}" for number in range(8)]
        put_all(store, names)

        def copy(name: str) -> bool:
            return store.copy(P(name), P("to"), create=True)

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(copy, names))
        assert sum(won) == 1
        assert store.read(P("to")) == names[won.index(True)].encode()

    @pytest.mark.parametrize("create", [False, True])
    def test_a_missing_source_is_not_found(self, store: ObjectStore, create: bool) -> None:
        store.put(P("there"), b"1")
        with pytest.raises(NotFoundError):
            store.copy(P("a/b"), P("c"), create=create)
        assert paths(store) == ["there"]

    @pytest.mark.parametrize("create", [False, True])
    def test_special_names_are_copied_from_and_to(self, store: ObjectStore, create: bool) -> None:
        for number, name in enumerate(SPECIAL):
            store.put(P(f"x/{name}"), name.encode())
            assert store.copy(P(f"x/{name}"), P(f"y{number}/{name}"), create=create) is True
            assert store.read(P(f"y{number}/{name}")) == name.encode()
        assert len(paths(store)) == 2 * len(SPECIAL)

    @pytest.mark.parametrize("bad", ["", "../a", "a//b", "/a"])
    def test_no_copy_leads_out_of_the_root(self, store: ObjectStore, bad: str) -> None:
        store.put(P("a"), b"1")
        for source, target in ((bad, "b"), ("a", bad)):
            with pytest.raises(InputError):
                store.copy(source, target)  # type: ignore[arg-type]
        assert paths(store) == ["a"]


class TestNames:
    @pytest.mark.parametrize("name", SPECIAL)
    def test_a_special_name_works_with_every_verb(self, store: ObjectStore, name: str) -> None:
        path = P(name)
        assert store.create(path, b"one") is True
        assert store.create(path, b"one") is False
        store.put(path, b"two!")
        assert store.read(path) == b"two!"
        assert store.read_range(path, 1, 2) == b"wo"
        (listed,) = store.list()
        assert (listed.path, listed.size_bytes, listed.addressable) == (name, 4, True)
        assert_same_but_for_a_second(store.head(path), listed)
        parent = path.parent or ""
        assert [info.path for info in store.list_dir(parent).objects] == [name]
        assert paths(store, parent) == [name]
        assert store.delete_many([path]).deleted == (path,)
        assert store.head(path) is None

    def test_a_name_is_never_encoded_twice(self, store: ObjectStore) -> None:
        put_all(store, ["a<b", "a%3Cb"])
        assert store.read(P("a<b")) == b"a<b"
        assert store.read(P("a%3Cb")) == b"a%3Cb"
        assert set(paths(store)) == {"a<b", "a%3Cb"}


class TestListing:
    NAMES = ("a", "a.b/c", "a/b", "a/b.c", "a/b/c", "a0", "b/<1>", "b/[2]", "b/c/d/e", "z")

    @pytest.fixture
    def filled(self, store: ObjectStore) -> ObjectStore:
        # "a" and "a/b" are objects and directories at once: only stores without directories can.
        flat = [name for name in self.NAMES if name not in ("a", "a/b")]
        put_all(store, flat)
        return store

    @property
    def expected(self) -> list[str]:
        names = [name for name in self.NAMES if name not in ("a", "a/b")]
        return sorted(names, key=encode_path)

    def test_objects_come_in_order_of_stored_name(self, filled: ObjectStore) -> None:
        assert paths(filled) == self.expected

    def test_a_listing_tells_size_time_and_etag(self, store: ObjectStore) -> None:
        before = time.time_ns() // 1000
        store.put(P("a"), b"12345")
        (first,) = store.list()
        assert first.size_bytes == 5
        assert first.modified_micros is not None
        # S3 cuts to whole seconds.
        assert abs(first.modified_micros - before) < 5_000_000
        assert first.etag
        assert_same_but_for_a_second(store.head(P("a")), first)
        assert store.list_dir().objects == (first,)
        time.sleep(0.002)
        store.put(P("a"), b"54321")
        (second,) = store.list()
        assert second.etag != first.etag

    @pytest.mark.parametrize("cut", range(8))
    def test_a_listing_goes_on_after_a_name(self, filled: ObjectStore, cut: int) -> None:
        expected = self.expected
        assert paths(filled, start_after=expected[cut]) == expected[cut + 1 :]

    @pytest.mark.parametrize("after", ["a/a", "a/zz", "b", "b/c", "b/c/z", "zz", "0", "a-"])
    def test_it_goes_on_after_a_name_that_is_not_there(
        self, filled: ObjectStore, after: str
    ) -> None:
        expected = [name for name in self.expected if encode_path(name) > encode_path(after)]
        assert paths(filled, start_after=after) == expected
        below = [name for name in expected if name.startswith("b/")]
        assert paths(filled, "b", after) == below

    @pytest.mark.parametrize("prefix", ["b", "b/"])
    def test_a_prefix_is_whole_segments(self, filled: ObjectStore, prefix: str) -> None:
        filled.put(P("bb/c"), b"")
        assert paths(filled, prefix) == ["b/<1>", "b/[2]", "b/c/d/e"]
        assert filled.list_dir("b/c").prefixes == ("b/c/d",)

    @pytest.mark.parametrize("prefix", ["c", "b/x/y", "z", "z/y", "a0"])
    def test_a_prefix_where_nothing_is_is_empty(self, filled: ObjectStore, prefix: str) -> None:
        assert paths(filled, prefix) == []
        listing = filled.list_dir(prefix)
        assert (listing.objects, listing.prefixes) == ((), ())

    def test_one_level_is_listed(self, filled: ObjectStore) -> None:
        root = filled.list_dir("")
        assert [info.path for info in root.objects] == ["a0", "z"]
        assert root.prefixes == ("a.b", "a", "b")
        below = filled.list_dir("b")
        assert [info.path for info in below.objects] == ["b/<1>", "b/[2]"]
        assert below.prefixes == ("b/c",)

    def test_a_root_that_does_not_exist_is_not_empty_but_missing(self, store: ObjectStore) -> None:
        for verb in (
            lambda: list(store.list()),
            lambda: list(store.list("a/b")),
            lambda: store.list_dir(),
            lambda: store.list_dir("a"),
        ):
            with pytest.raises(NotFoundError) as caught:
                verb()
            assert caught.value.facts["url"] == store.url

    def test_reading_creates_nothing(self, store: ObjectStore) -> None:
        assert store.head(P("a/b")) is None
        store.delete_many([P("a/b")])
        with pytest.raises(NotFoundError):
            list(store.list())

    def test_names_that_come_from_no_path_are_seen_but_refused(self, store: ObjectStore) -> None:
        if isinstance(store, MemoryStore):
            pytest.skip("nothing else can write to a memory store")
        store.put(P("a/good"), b"")
        _write_foreign(store, ["a/lower%3c", "a/raw<", "a/%2Fslash", "a/bad%FF", "dir>/x"])
        found = {info.path: info for info in store.list()}
        assert len(found) == 6
        assert [path for path, info in found.items() if info.addressable] == ["a/good"]
        for path, info in found.items():
            if not info.addressable:
                with pytest.raises(InputError):
                    store.delete_many([path])
                with pytest.raises(InputError):
                    store.read(path)
                assert pickle.loads(pickle.dumps(info)) == info
        assert found[P("a/raw<")].path == "a/raw<"
        last = max(found)
        assert paths(store, start_after=last) == []
        (foreign,) = [prefix for prefix in store.list_dir().prefixes if prefix != "a"]
        assert paths(store, foreign) == ["dir>/x"]

    def test_thousands_of_objects_are_listed_and_deleted(
        self, store: ObjectStore, request: pytest.FixtureRequest
    ) -> None:
        count = 1100
        names = [P(f"d/{number:05}") for number in range(count)]
        on_moto = request.node.callspec.params["new_store"] in MOTO_BACKENDS
        _put_small(store, names, on_moto)
        store.put(P("kept"), b"")
        assert paths(store, "d") == names
        assert paths(store, "d", names[1050]) == names[1051:]
        assert len(store.list_dir("d").objects) == count
        # GCS deletes one object a request, and here each takes milliseconds.
        doomed = names[-100:] if store.url.startswith("gs:") else names
        outcome = store.delete_many(doomed)
        assert (outcome.deleted, outcome.failed) == (tuple(doomed), {})
        assert paths(store) == [*names[: count - len(doomed)], "kept"]


class TestDelete:
    def test_a_missing_object_counts_as_deleted(self, store: ObjectStore) -> None:
        put_all(store, ["a/b", "a/c", "d"])
        doomed = [P("a/b"), P("never/there"), P("d"), P("a/b/below"), P("a")]
        outcome = store.delete_many(doomed)
        assert outcome.deleted == tuple(doomed)
        assert outcome.failed == {}
        assert paths(store) == ["a/c"]

    def test_nothing_is_a_fine_thing_to_delete(self, store: ObjectStore) -> None:
        assert store.delete_many([]).deleted == ()

    def test_one_bad_path_and_nothing_is_deleted(self, store: ObjectStore) -> None:
        store.put(P("a"), b"")
        with pytest.raises(InputError):
            store.delete_many([P("a"), "../x"])  # type: ignore[list-item]
        assert paths(store) == ["a"]

    def test_paths_may_come_from_a_generator(self, store: ObjectStore) -> None:
        put_all(store, ["a", "b"])
        assert store.delete_many(P(name) for name in "ab").deleted == ("a", "b")


class TestManyReaders:
    def test_many_objects_are_read_in_the_order_asked(self, store: ObjectStore) -> None:
        names = [f"d/{number}" for number in range(40)]
        put_all(store, names)
        wanted = [P(name) for name in reversed(names)]
        found = read_many(store, wanted)
        assert list(found) == wanted
        assert all(found[path] == path.encode() for path in wanted)

    def test_the_first_missing_one_is_raised(self, store: ObjectStore) -> None:
        put_all(store, ["a", "b"])
        with pytest.raises(NotFoundError) as caught:
            read_many(store, [P("a"), P("x"), P("b"), P("y")], concurrency=2)
        assert caught.value.facts["path"] == "x"


class TestPicklingAndWrapping:
    def test_a_pickled_store_leads_to_the_same_objects(self, store: ObjectStore) -> None:
        store.put(P("a"), b"1")
        twin = pickle.loads(pickle.dumps(store))
        assert twin.url == store.url
        assert twin.read(P("a")) == b"1"
        twin.put(P("b"), b"2")
        assert paths(store) == ["a", "b"]

    def test_a_store_used_before_a_fork_works_after_it(self, store: ObjectStore) -> None:
        store.put(P("a"), b"1")
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 0 if store.read(P("a")) == b"1" else 2
            except StorageError as error:
                # Only fsspec works there, and for GCS and Azure its packages are on request.
                told = "obstore does not work after a fork" in str(error) and "install" in str(
                    error
                )
                status = 3 if told and not store.url.startswith("s3") else 4
            finally:
                os._exit(status)
        assert _status_within(child, 20) in (0, 3)

    def test_another_process_sees_what_was_written(self, store: ObjectStore) -> None:
        if isinstance(store, MemoryStore):
            pytest.skip("lives in one process")
        store.put(P("a"), b"1")
        code = textwrap.dedent("""
            import pickle, sys
            store = pickle.load(sys.stdin.buffer)
            assert [i.path for i in store.list()] == ["a"]
            store.put(store.list_dir().objects[0].path, b"2")
        """)
        subprocess.run([sys.executable, "-c", code], input=pickle.dumps(store), check=True)
        assert store.read(P("a")) == b"2"

    def test_a_write_protected_store_reads_and_refuses_to_write(self, store: ObjectStore) -> None:
        store.put(P("a/b"), b"12345")
        safe = WriteProtected(store)
        assert isinstance(safe, ObjectStore)
        assert safe.read(P("a/b")) == b"12345"
        with safe.open_input(P("a/b")) as file:
            assert file.read() == b"12345"
        assert [info.path for info in safe.list("a")] == ["a/b"]
        for verb in (
            lambda: safe.put(P("a/b"), b""),
            lambda: safe.create(P("c"), b""),
            lambda: safe.copy(P("a/b"), P("c")),
            lambda: safe.delete_many([P("a/b")]),
        ):
            with pytest.raises(InputError, match="write-protected"):
                verb()
        assert pickle.loads(pickle.dumps(safe)).read(P("a/b")) == b"12345"
        assert paths(store) == ["a/b"]

    def test_a_crashed_store_does_nothing_more(self, store: ObjectStore) -> None:
        dying = FaultInjecting(Counting(store), fail_at=2, mode="after", crash=True)
        dying.put(P("a"), b"1")
        with pytest.raises(Crash):
            dying.put(P("b"), b"2")
        with pytest.raises(Crash):
            dying.read(P("a"))
        assert paths(store) == ["a", "b"]

    def test_an_unknown_outcome_is_a_retryable_error(self, store: ObjectStore) -> None:
        faulty = FaultInjecting(store, fail_at=1, mode="after")
        with pytest.raises(StorageError) as caught:
            faulty.create(P("a"), b"1")
        assert caught.value.retryable
        assert faulty.create(P("a"), b"1") is False


def _write_foreign(store: ObjectStore, stored: list[str]) -> None:
    """Write objects under names that no raw path encodes to, as another program might."""
    for name in stored:
        if store.url.startswith("file://"):
            file = Path(store.url.removeprefix("file://")) / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"")
        elif isinstance(store, ObstoreStore):
            obstore.put(store._remote(), store._base + name, b"x")
        else:
            store.filesystem.pipe_file(f"{store._root}/{name}", b"x")  # type: ignore[attr-defined]


def _put_small(store: ObjectStore, names: list[StatePath], on_moto: bool) -> None:
    if on_moto:
        key = store.url.partition(f"/{BUCKET}/")[2]
        for name in names:
            servers.put_into_moto(BUCKET, f"{encode_path(key)}/{name}", b"x")
        return
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: store.put(name, b"x"), names))


def _status_within(child: int, seconds: float) -> int:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    raise AssertionError("the forked child hangs")
