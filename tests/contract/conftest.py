"""The stores that the suite runs on, each on a server that the first test of it starts."""

from __future__ import annotations

import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from arroyo_dagster.state import ObjectStore, open_store
from tests import s3_servers
from tests.contract import servers

NewStore = Callable[[], ObjectStore]

OTHER_S3 = ("gofakes3", "versitygw", "s3rver")
BACKENDS = (
    *("memory", "local", "s3-obstore", "s3-fsspec"),
    *(f"{name}-{client}" for name in OTHER_S3 for client in ("obstore", "fsspec")),
    *("gs-obstore", "gs-fsspec", "azure-obstore", "azure-fsspec"),
)
MOTO_BACKENDS = ("s3-obstore", "s3-fsspec", "gs-obstore")
# A fault that lasts must fail while a test waits.
QUICK = {
    "max_retries": 2,
    "backoff_seconds": 0.001,
    "max_backoff_seconds": 0.01,
    "retry_timeout_seconds": 3,
    "request_timeout_seconds": 3,
    "connect_timeout_seconds": 1,
}
S3_KEYS = {"access_key_id": "testing", "secret_access_key": "testing", "region": "us-east-1"}

BUCKET = "suite"

READ_AND_DELETE = ("TestReadAndPut", "TestRanges", "TestDelete", "TestManyReaders")
"""Of the suite: what a server has to pass that ignores conditions, and that no job writes to."""

NO_EMPTY_RANGE = "s3rver promises a byte for a range of an empty object, and sends none"
LIMITS = {
    "s3rver": {
        "test_a_reader_sees_the_old_bytes_or_the_new_ones": "s3rver does not replace atomically",
        "test_what_was_put_is_read[s3rver-fsspec-0]": NO_EMPTY_RANGE,
        "test_an_empty_object_has_empty_ranges[s3rver-fsspec-0-5]": NO_EMPTY_RANGE,
    }
}
"""What a server cannot do, and our clients cannot mend; by test, or by test and parameters."""

ALWAYS = ("memory", "local")
"""All cases of a test run on these; see `pytest_collection_modifyitems`."""

_NUMBERS = itertools.count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deal the cases of a test out to the servers: of each, all run the first, and every eighth
    one, each server others. All cases on all servers are soak tests.
    """
    seen: Counter[tuple[str, str]] = Counter()
    for item in items:
        backend = getattr(item, "callspec", None) and item.callspec.params.get("new_store")
        if backend is None or backend in ALWAYS:
            continue
        test = (item.nodeid.partition("[")[0], backend)
        case, server = seen[test], BACKENDS.index(backend)
        seen[test] += 1
        if case and case % 8 != server % 8:
            item.add_marker(pytest.mark.soak)


def open_s3(url: str, client: str = "obstore", **more: Any) -> ObjectStore:
    return open_store(url, options={**S3_KEYS, **QUICK, "client": client, **more})


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    with servers.moto_server() as endpoint:
        servers.make_moto_bucket(BUCKET)
        yield endpoint


@pytest.fixture(scope="session")
def gofakes3_endpoint() -> Iterator[str]:
    with s3_servers.s3_server("gofakes3", BUCKET) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def versitygw_endpoint() -> Iterator[str]:
    with s3_servers.s3_server("versitygw", BUCKET) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def s3rver_endpoint() -> Iterator[str]:
    with s3_servers.s3_server("s3rver", BUCKET) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def google_endpoint(s3_endpoint: str) -> Iterator[str]:
    with servers.moto_server(servers.GoogleDialect) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def google_json_endpoint() -> Iterator[str]:
    with servers.google_json_server() as endpoint:
        servers.make_google_bucket(endpoint, BUCKET)
        yield endpoint


@pytest.fixture(scope="session")
def azure_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with servers.azure_server(tmp_path_factory.mktemp("azurite")) as endpoint:
        servers.make_azure_container(endpoint, BUCKET)
        yield endpoint


@pytest.fixture(params=BACKENDS)
def new_store(request: pytest.FixtureRequest, tmp_path: Path) -> NewStore:
    """Give a function that opens a store whose root does not exist yet, another one each time."""
    kind, _, client = request.param.partition("-")
    if kind == "memory":
        return lambda: open_store(f"memory://contract-{next(_NUMBERS)}-{secrets.token_hex(4)}")
    if kind == "local":
        return lambda: open_store(f"file://{tmp_path}/root-{next(_NUMBERS)}/deeper")
    if client == "fsspec" and kind == "azure":
        pytest.importorskip("adlfs", reason="adlfs is on request only: no requirement file has it")
    server = "google_json" if request.param == "gs-fsspec" else _SERVERS.get(kind, kind)
    bucket, options = _BUCKETS.get(kind, _s3_bucket)(request.getfixturevalue(f"{server}_endpoint"))
    if request.param == "gs-fsspec":
        options = {"endpoint": options["endpoint"], "skip_signature": True}
    if kind in OTHER_S3:
        _skip_limits(request, kind)
        options = s3_servers.options_of(kind)
    options = {**options, **QUICK, "client": client}
    return lambda: open_store(f"{bucket}/root-{next(_NUMBERS)}/with {{key}}", options=options)


def _skip_limits(request: pytest.FixtureRequest, server: str) -> None:
    test = request.node
    partly = not s3_servers.SERVERS[server].conditional_create
    if partly and getattr(test.cls, "__name__", "") not in READ_AND_DELETE:
        pytest.skip(f"{server} ignores conditions and lists out of order: no job writes to it")
    limits = LIMITS.get(server, {})
    if (limit := limits.get(test.originalname) or limits.get(test.name)) is not None:
        pytest.skip(limit)


@pytest.fixture
def store(new_store: NewStore) -> ObjectStore:
    return new_store()


def _s3_bucket(endpoint: str) -> tuple[str, dict[str, Any]]:
    return f"s3::http://{endpoint}/{BUCKET}", S3_KEYS


def _google_bucket(endpoint: str) -> tuple[str, dict[str, Any]]:
    return f"gs://{BUCKET}", {"endpoint": f"http://{endpoint}", "bearer_token": "testing"}


def _azure_bucket(endpoint: str) -> tuple[str, dict[str, Any]]:
    return f"abfss://{BUCKET}@{servers.AZURE_ACCOUNT}.dfs.core.windows.net", {
        "endpoint": f"http://{endpoint}/{servers.AZURE_ACCOUNT}",
        "account_key": servers.AZURE_KEY,
    }


_SERVERS = {"s3": "s3", "gs": "google", "azure": "azure"}
_BUCKETS: dict[str, Callable[[str], tuple[str, dict[str, Any]]]] = {
    "s3": _s3_bucket,
    "gs": _google_bucket,
    "azure": _azure_bucket,
}
