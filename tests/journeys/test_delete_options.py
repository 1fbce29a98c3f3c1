"""Deletes with credentials of their own: other requests are sent with keys that cannot delete."""

from __future__ import annotations

import contextlib
import json
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from arroyo_dagster import cli
from arroyo_dagster.errors import InputError, NotFoundError
from arroyo_dagster.orchestration import ArroyoStateStore
from arroyo_dagster.state import MemoryStore, ParquetBackend, StatePath, open_store
from arroyo_dagster.state.storage.wrappers import SeparateDeletes
from tests.contract import servers
from tests.jobs import run_word_job, word_job

BUCKET = "separate"
READER = {"access_key_id": "reader", "secret_access_key": "reads", "region": "us-east-1"}
DELETER = {"access_key_id": "deleter", "secret_access_key": "deletes", "region": "us-east-1"}
PATHS = word_job(MemoryStore()).paths


class TwoKeys:
    """A server of S3 where one key may only delete and check, and the other everything else.

    Attributes:
        refused: the requests that came with the wrong key: method, path and key.
    """

    def __init__(self, app: Callable[..., Any]) -> None:
        self.app = app
        self.deleted = 0
        self.refused: list[tuple[str, str, str]] = []

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        found = re.search(r"Credential=(\w+)/", environ.get("HTTP_AUTHORIZATION", ""))
        key = "" if found is None else found[1]
        method, query = environ["REQUEST_METHOD"], environ.get("QUERY_STRING", "")
        deletes = method == "DELETE" or (method == "POST" and query.startswith("delete"))
        # Each request that deletes is checked by a HEAD of its last object.
        if key != ("deleter" if deletes else "reader") and (method, key) != ("HEAD", "deleter"):
            self.refused.append((method, environ["PATH_INFO"], key))
            start_response("403 Forbidden", [("Content-Length", "0")])
            return [b""]
        self.deleted += deletes
        return self.app(environ, start_response)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, TwoKeys]]:
    made: list[TwoKeys] = []

    def dialect(app: Callable[..., Any]) -> TwoKeys:
        made.append(TwoKeys(app))
        return made[0]

    with servers.moto_server(dialect) as host:
        servers.make_moto_bucket(BUCKET)
        yield f"s3::http://{host}/{BUCKET}/checkpoints", made[0]


@pytest.fixture
def url(server: tuple[str, TwoKeys], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "reader")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "reads")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    store = open_store(server[0], options=READER, delete_options=DELETER)
    with contextlib.suppress(NotFoundError):
        store.delete_many([info.path for info in store.list()])
    run_word_job(store, rows=24, rows_per_epoch=2, keep_epochs=None, parallelism=1)
    server[1].refused.clear()
    return server[0]


def run(command: str, url: str, **environment: str) -> Any:
    args = command.replace("JOB", str(PATHS.root)).split()
    return CliRunner().invoke(cli.main, args, env={"ARROYO__CHECKPOINT_URL": url, **environment})


COMMANDS = (
    "gc run expire JOB --keep 8 --quarantine --yes",
    "gc run expire JOB --keep 4 --yes",
    "gc run orphans JOB --yes",
    "compact run JOB --yes",
    "gc purge JOB --yes",
    "doctor",
)


@pytest.mark.parametrize("form", ["text", "file"])
def test_only_deletes_are_sent_with_the_credentials_that_may_delete(
    form: str, url: str, server: tuple[str, TwoKeys], tmp_path: Path
) -> None:
    given = json.dumps(DELETER)
    if form == "file":
        file = tmp_path / "delete.json"
        file.write_text(given)
        given = str(file)
    before = server[1].deleted
    for command in COMMANDS:
        result = run(command, url, ARROYO_DELETE_OPTIONS=given)
        assert result.exit_code == 0, (command, result.output, server[1].refused[:3])
    assert server[1].refused == []
    assert server[1].deleted > before
    store = open_store(url, options=READER)
    assert len(ParquetBackend(store, PATHS).epochs()) <= 5


def test_without_them_nothing_is_half_deleted(url: str, server: tuple[str, TwoKeys]) -> None:
    store = open_store(url, options=READER)
    epochs = ParquetBackend(store, PATHS).epochs()
    assert run("gc plan expire JOB --keep 2", url).exit_code == 0
    assert server[1].refused == [], "a dry run deletes nothing"
    assert run("gc run expire JOB --keep 2 --yes", url).exit_code == 1
    assert {key for _, _, key in server[1].refused} == {"reader"}
    assert ParquetBackend(store, PATHS).epochs() == epochs
    for epoch in epochs:
        ParquetBackend(store, PATHS).prepare_checkpoint_load(epoch)


def test_the_resource_deletes_with_its_delete_options(
    url: str, server: tuple[str, TwoKeys], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELETE_SECRET", "deletes")
    import dagster as dg

    resource = ArroyoStateStore(
        checkpoint_url=url,
        catalogue_url=f"{url}-catalogue",
        storage_options={**READER, "secret_access_key": dg.EnvVar("AWS_SECRET_ACCESS_KEY")},
        delete_options={**DELETER, "secret_access_key": dg.EnvVar("DELETE_SECRET")},
    )
    store = resource.writable()
    probe = StatePath("probe")
    store.put(probe, b"1")
    assert pickle.loads(pickle.dumps(store)).delete_many([probe]).deleted == (probe,)
    assert store.head(probe) is None
    assert server[1].refused == []
    with pytest.raises(InputError, match="write-protected"):
        resource.reading().delete_many([probe])


@pytest.mark.parametrize("given", ["{", "[1]", "/does/not/exist.json", "{hunter2}"])
def test_options_that_are_no_object_are_refused_without_repeating_them(given: str) -> None:
    result = run("jobs", "memory://none", ARROYO_DELETE_OPTIONS=given)
    assert result.exit_code == 1
    assert "ARROYO_DELETE_OPTIONS" in result.stderr
    assert "hunter2" not in result.stderr


def test_a_client_for_deletes_of_another_place_is_refused() -> None:
    with pytest.raises(InputError, match="another URL"):
        SeparateDeletes(MemoryStore("one"), MemoryStore("two"))
