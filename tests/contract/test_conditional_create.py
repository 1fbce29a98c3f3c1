"""No claim on a server that ignores the condition of a create: two runs would win it."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import cli
from arroyo_dagster.errors import InputError, NotFoundError, StorageError
from arroyo_dagster.state import (
    JobId,
    JobPaths,
    MemoryStore,
    ObjectStore,
    ParquetBackend,
    PipelineId,
    StatePath,
    list_jobs,
    open_store,
)
from arroyo_dagster.state.metadata.lease import newest_token
from tests import s3_servers
from tests.contract import servers
from tests.contract.conftest import BUCKET, open_s3
from tests.contract.faulty import Answer, Faulty, Request, failing, faulty_server, object_of
from tests.internals import lease, read_inventory
from tests.jobs import run_word_job, word_job

P = StatePath
CLIENTS = ("obstore", "fsspec")
PROBES = "_arroyo_dagster/leases/probe-"
KEYS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_REGION": "us-east-1",
}
LOST = -1  # cut before the first byte of the answer


@pytest.fixture(scope="module")
def ignoring() -> Iterator[str]:
    with servers.moto_server(servers.IgnoresConditions) as endpoint:
        yield endpoint


@pytest.fixture
def recording() -> Iterator[tuple[servers.Recording, str]]:
    made: list[servers.Recording] = []

    def dialect(app: servers.App) -> servers.App:
        made.append(servers.Recording(app))
        return made[0]

    with servers.moto_server(dialect) as endpoint:
        yield made[0], endpoint


@pytest.fixture
def faulty() -> Iterator[Faulty]:
    with faulty_server() as server:
        yield server


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def bucket_on(endpoint: str, client: str, name: str) -> ObjectStore:
    servers.make_moto_bucket(f"{name}-{client}")
    return open_s3(f"s3::http://{endpoint}/{name}-{client}", client)


def objects(store: ObjectStore) -> list[str]:
    return [info.path for info in store.list()]


class TestServerThatIgnoresConditions:
    def test_every_creator_is_refused_and_nothing_is_left(self, ignoring: str, client: str) -> None:
        store = bucket_on(ignoring, client, "creators")

        def create(number: int) -> object:
            try:
                return store.create(P("a/b"), str(number).encode())
            except InputError as error:
                return error

        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(create, range(12)))
        assert {type(answer) for answer in answers} == {InputError}
        assert "accepted two creations of one object: it ignores If-None-Match" in str(answers[0])
        assert store.url in str(answers[0])
        assert objects(store) == []

    def test_a_run_is_refused_before_it_writes(self, ignoring: str, client: str) -> None:
        store = bucket_on(ignoring, client, "run")
        with pytest.raises(InputError, match="ignores If-None-Match"):
            run_word_job(store)
        assert objects(store) == []

    def test_a_lease_is_refused(self, ignoring: str, client: str) -> None:
        store = bucket_on(ignoring, client, "lease")
        paths = JobPaths(JobId("job"), PipelineId("pipeline"))
        with pytest.raises(InputError, match="ignores"), lease(store, paths, "somebody"):
            pass
        assert objects(store) == []

    def test_a_run_on_s3rver_is_refused(self, s3rver_endpoint: str, client: str) -> None:
        url = f"s3::http://{s3rver_endpoint}/{BUCKET}/{client}"
        store = open_store(url, options={**s3_servers.options_of("s3rver"), "client": client})
        with pytest.raises(InputError, match="ignores If-None-Match"):
            run_word_job(store)
        with pytest.raises(NotFoundError, match="nothing below this prefix"):
            store.list_dir()

    def test_it_is_read_as_any_other(self, ignoring: str, client: str) -> None:
        store = bucket_on(ignoring, client, "read")
        store.put(P("a"), b"x")
        assert (store.read(P("a")), objects(store)) == (b"x", ["a"])


class TestProof:
    def test_it_costs_two_requests_and_the_removal_once_a_process(
        self, recording: tuple[servers.Recording, str], client: str
    ) -> None:
        server, endpoint = recording
        store = bucket_on(endpoint, client, "cost")
        assert store.create(P("a/b"), b"x") is True
        methods = [method for method, _ in server.seen]
        assert methods == ["PUT", "PUT", "POST", "PUT"]
        assert objects(store) == ["a/b"]
        server.seen.clear()
        assert store.create(P("a/b"), b"x") is False
        again = pickle.loads(pickle.dumps(store))
        assert again.create(P("a/b"), b"x") is False
        assert [method for method, _ in server.seen] == ["PUT", "PUT"]

    def test_first_uses_at_once_make_one_proof(
        self, recording: tuple[servers.Recording, str], client: str
    ) -> None:
        server, endpoint = recording
        store = bucket_on(endpoint, client, "threads")
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda n: store.create(P("a"), str(n).encode()), range(8)))
        assert sorted(won) == [False] * 7 + [True]
        assert sum(PROBES in path for _, path in server.seen) == 2

    def test_credentials_of_one_job_are_enough(
        self, recording: tuple[servers.Recording, str], client: str
    ) -> None:
        server, endpoint = recording
        store = bucket_on(endpoint, client, "limited")
        server.allowed = f"/limited-{client}/words/main/"
        assert store.create(P("words/main/generations/1/generation-manifest.json"), b"x")
        probe = next(path for _, path in server.seen if PROBES in path)
        assert probe.startswith(server.allowed)

    def test_a_lost_answer_of_the_first_creation_is_no_refusal(
        self, faulty: Faulty, client: str
    ) -> None:
        kept: dict[str, bytes] = {}
        lock = threading.Lock()

        def script(request: Request) -> Answer:
            with lock:
                if request.method == "GET":
                    return object_of(kept[request.path])
                if request.method == "PUT" and request.path not in kept:
                    kept[request.path] = request.body
                    return Answer(cut_at=LOST if "probe" in request.path else None)
                return failing(412, "PreconditionFailed")

        faulty.script = script
        store = open_s3(f"s3::http://{faulty.endpoint}/bucket/key", client)
        assert store.create(P("a"), b"mine") is True

    def test_a_store_that_refuses_every_creation_is_told_apart(
        self, faulty: Faulty, client: str
    ) -> None:
        def script(request: Request) -> Answer:
            missing = failing(404, "NoSuchKey")
            return missing if request.method == "GET" else failing(412, "PreconditionFailed")

        faulty.script = script
        store = open_s3(f"s3::http://{faulty.endpoint}/bucket/key", client)
        with pytest.raises(StorageError, match="refused to create an object of a fresh name"):
            store.create(P("a"), b"x")

    def test_a_failure_proves_nothing_and_is_tried_again(self, faulty: Faulty, client: str) -> None:
        store = open_s3(f"s3::http://{faulty.endpoint}/bucket/key", client, max_retries=0)
        faulty.script = lambda _: failing(503, "SlowDown")
        with pytest.raises(StorageError, match="throttling"):
            store.create(P("a"), b"x")
        faulty.script = lambda _: Answer()
        with pytest.raises(InputError, match="ignores"):
            store.create(P("a"), b"x")

    def test_a_server_without_the_condition_is_reported_as_such(
        self, faulty: Faulty, client: str
    ) -> None:
        faulty.script = lambda _: failing(501, "NotImplemented")
        store = open_s3(f"s3::http://{faulty.endpoint}/bucket/key", client)
        with pytest.raises(StorageError, match="does not know conditional create"):
            store.create(P("a"), b"x")


class TestDoctor:
    @staticmethod
    def doctor(url: str, *more: str) -> Result:
        return CliRunner().invoke(
            cli.main, ["doctor", "--store-only", "--url", url, *more], env=KEYS
        )

    def test_a_sound_store_is_reported_and_nothing_is_left(
        self, s3_endpoint: str, tmp_path: Path
    ) -> None:
        store = bucket_on(s3_endpoint, "obstore", "sound")
        for url in (store.url, f"file://{tmp_path}", "memory://doctor"):
            done = self.doctor(url)
            assert done.exit_code == 0, done.output
            assert done.stdout.splitlines()[0] == (
                "conditional create: ok (two attempts to create one name: the second was refused)"
            )
        assert objects(store) == []
        assert objects(open_store(f"file://{tmp_path}")) == []

    def test_a_server_that_ignores_conditions_is_a_problem(self, ignoring: str) -> None:
        store = bucket_on(ignoring, "obstore", "unsound")
        done = self.doctor(store.url)
        assert done.exit_code == 3
        assert done.stdout.startswith("conditional create: error (the store at s3::http://")
        assert "\n  next: nothing was written; use local disk" in done.stdout
        document = json.loads(self.doctor(store.url, "--json").stdout)
        assert (document["url"], document["healthy"]) == (store.url, False)
        assert [one["status"] for one in document["checks"]][:2] == ["error", "ok"]
        assert objects(store) == []

    def test_read_only_sends_no_write(self, recording: tuple[servers.Recording, str]) -> None:
        server, endpoint = recording
        store = bucket_on(endpoint, "obstore", "read-only")
        done = self.doctor(store.url, "--read-only")
        assert done.exit_code == 0
        assert done.stdout.startswith("conditional create: not checked (it needs a write)\n")
        assert {method for method, _ in server.seen} <= {"GET", "HEAD"}

    def test_what_cannot_be_checked_is_an_error(self, s3_endpoint: str, tmp_path: Path) -> None:
        for url in (f"s3::http://{s3_endpoint}/no-such-bucket", f"file://{tmp_path}/mistyped"):
            done = self.doctor(url)
            assert (done.exit_code, done.stdout) == (1, "")
            assert done.stderr.startswith("NotFoundError: the root")
        assert not (tmp_path / "mistyped").exists()


def test_a_probe_that_a_kill_left_behind_is_neither_foreign_nor_a_lease() -> None:
    store = MemoryStore()
    run_word_job(store, rows=8)
    paths = word_job(store).paths
    store.put(paths.leases / "probe-0123", b"")
    store.put(P("_arroyo_dagster/leases/probe-4567"), b"")
    found, _ = read_inventory(store, paths)
    assert paths.leases / "probe-0123" in list(found.maintenance.paths)
    assert not len(found.foreign)
    assert newest_token(store, paths.leases) == 0
    with lease(store, paths, "somebody") as held:
        assert held.lease.token == 1
    assert list_jobs(store) == [paths]
    run_word_job(store, rows=16)
    assert ParquetBackend(store, paths).epochs()
