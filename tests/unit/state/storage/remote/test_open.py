"""From a URL to its store."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from arroyo_dagster.errors import InputError
from arroyo_dagster.state import MemoryStore, StatePath, configure, get_storage_provider, open_store
from arroyo_dagster.state.storage.remote.fsspec_store import FsspecStore
from arroyo_dagster.state.storage.remote.obstore_store import ObstoreStore
from arroyo_dagster.state.storage.remote.s3_store import S3Store
from tests.stores import LocalDiskStore


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
