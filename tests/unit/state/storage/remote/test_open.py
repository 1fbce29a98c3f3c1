"""From a URL to its store."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from arroyo_dagster.errors import InputError, NotFoundError
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.storage import configure, get_storage_provider, open_store
from arroyo_dagster.state.storage.local_disk import LocalDiskStore
from arroyo_dagster.state.storage.memory import MemoryStore
from arroyo_dagster.state.storage.remote.fsspec_store import FsspecStore
from arroyo_dagster.state.storage.remote.obstore_store import ObstoreStore
from arroyo_dagster.state.storage.remote.s3_store import S3Store


@pytest.fixture(autouse=True)
def nothing_configured() -> Iterator[None]:
    configure(None)
    yield
    configure(None)


REMOTE = (
    *("s3://bucket/key", "r2://acct@bucket/key", "https://s3.eu-west-1.amazonaws.com/bucket/k"),
    *("gs://bucket/key", "https://storage.googleapis.com/bucket/key"),
    *("abfss://box@acct.dfs.core.windows.net/k", "https://acct.blob.core.windows.net/box/k"),
)


def test_the_url_chooses_the_store(tmp_path: Path) -> None:
    assert isinstance(open_store(str(tmp_path)), LocalDiskStore)
    assert isinstance(open_store("memory://x"), MemoryStore)
    for url in REMOTE:
        assert isinstance(open_store(url), ObstoreStore)


def test_an_option_or_the_environment_chooses_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    for url in REMOTE:
        assert isinstance(open_store(url, options={"client": "fsspec"}), FsspecStore)
    monkeypatch.setenv("ARROYO_DAGSTER_STORE_CLIENT", "fsspec")
    assert isinstance(open_store("s3://bucket/key"), S3Store)
    assert isinstance(open_store("s3://bucket/key", options={"client": "obstore"}), ObstoreStore)
    with pytest.raises(InputError, match="no client 'boto'"):
        open_store("s3://bucket", options={"client": "boto"})


def test_what_must_exist_is_asked_for(tmp_path: Path) -> None:
    for url in (f"{tmp_path}/nowhere", "memory://nowhere"):
        with pytest.raises(NotFoundError):
            open_store(url, must_exist=True)
    assert open_store(str(tmp_path), must_exist=True).url == f"file://{tmp_path}"


def test_one_url_has_one_store_in_a_process(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        stores = set(pool.map(lambda _: id(get_storage_provider(str(tmp_path))), range(32)))
    assert len(stores) == 1
    assert get_storage_provider(f"file://{tmp_path}/") is get_storage_provider(str(tmp_path))


def test_the_configured_url_is_used_where_none_is_given(tmp_path: Path) -> None:
    configure(str(tmp_path))
    assert get_storage_provider().url == f"file://{tmp_path}"
    configure("memory://other")
    assert get_storage_provider().url == "memory://other"


def test_a_wrong_url_leaves_the_configured_one(tmp_path: Path) -> None:
    configure(str(tmp_path))
    with pytest.raises(InputError):
        configure("relative/path")
    assert get_storage_provider().url == f"file://{tmp_path}"


def test_without_a_url_the_three_ways_to_give_one_are_told() -> None:
    with pytest.raises(InputError) as caught:
        get_storage_provider()
    for way in ("configure(url)", "--url", "ARROYO__CHECKPOINT_URL"):
        assert way in str(caught.value)


def test_the_environment_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ARROYO__CHECKPOINT_URL", str(tmp_path))
    with pytest.raises(InputError):
        get_storage_provider()


def test_secrets_are_never_shown() -> None:
    for client in ("obstore", "fsspec"):
        options = {"key": "me", "secret": "hunter2", "client": client}
        store = open_store("s3://bucket/key", options=options)
        assert "hunter2" not in f"{store} {store!r} {store.url}"
        assert "hunter2" in pickle.loads(pickle.dumps(store))._options.values()


def test_a_fork_starts_with_stores_of_its_own(tmp_path: Path) -> None:
    before = get_storage_provider(str(tmp_path))
    before.put(StatePath("a"), b"1")
    child = os.fork()
    if child == 0:
        fresh = get_storage_provider(str(tmp_path))
        os._exit(0 if fresh is not before and fresh.read(StatePath("a")) == b"1" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_option_that_local_disk_does_not_know_is_refused(tmp_path: Path) -> None:
    assert open_store(str(tmp_path), options={"sync": False}).url
    with pytest.raises(InputError, match="option"):
        open_store(str(tmp_path), options={"key": "x"})


@pytest.mark.parametrize("client", ["obstore", "fsspec"])
def test_an_r2_url_needs_an_account(client: str) -> None:
    with pytest.raises(InputError, match="its account"):
        open_store("r2://bucket/key", options={"client": client})
    assert open_store("r2://bucket/key", options={"client": client, "account": "acct"}).url


@pytest.mark.skipif(find_spec("gcsfs") is not None, reason="gcsfs is installed")
def test_a_missing_package_is_named() -> None:
    store = FsspecStore("gs", "bucket", url="gs://bucket")
    with pytest.raises(InputError, match="gcsfs"):
        store.read(StatePath("a"))
