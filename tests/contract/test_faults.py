"""What each client of S3 makes of errors, throttling, silence and broken connections."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from arroyo_dagster.errors import InputError, NotFoundError, StorageError
from arroyo_dagster.state import ObjectStore, StatePath
from arroyo_dagster.state.storage.remote.obstore_store import ObstoreStore
from arroyo_dagster.state.storage.store import CHUNK_BYTES
from tests.contract.conftest import open_s3
from tests.contract.faulty import (
    Answer,
    Faulty,
    Request,
    failing,
    faulty_server,
    object_of,
    page_of,
)

P = StatePath
LOST = -1  # cut before the first byte of the answer


@pytest.fixture(scope="module")
def server() -> Iterator[Faulty]:
    with faulty_server() as faulty:
        yield faulty


@pytest.fixture(params=["obstore", "fsspec"])
def store(request: pytest.FixtureRequest, server: Faulty) -> ObjectStore:
    return proven(server, open_s3(f"s3::http://{server.endpoint}/bucket/key", request.param))


@pytest.fixture(params=["obstore", "fsspec"])
def hasty(request: pytest.FixtureRequest, server: Faulty) -> ObjectStore:
    """A store for faults that last: botocore's waits between two tries are seconds."""
    more = {"max_retries": 0} if request.param == "fsspec" else {}
    return proven(
        server, open_s3(f"s3::http://{server.endpoint}/bucket/key", request.param, **more)
    )


@pytest.fixture
def through_obstore(server: Faulty) -> ObjectStore:
    return proven(server, open_s3(f"s3::http://{server.endpoint}/bucket/key"))


def proven(server: Faulty, store: ObjectStore) -> ObjectStore:
    """A store that has seen the server refuse a second creation, as before any first claim."""
    known: set[str] = set()

    def script(request: Request) -> Answer:
        if request.path in known:
            return failing(412, "PreconditionFailed")
        known.add(request.path)
        return Answer()

    server.script = script
    store.create(P("claimed"), b"")
    return store


def verbs_of(store: ObjectStore) -> dict[str, Callable[[], object]]:
    return {
        "read": lambda: store.read(P("a")),
        "read_range": lambda: store.read_range(P("a"), 0, 5),
        "put": lambda: store.put(P("a"), b"x"),
        "create": lambda: store.create(P("a"), b"x"),
        "list": lambda: list(store.list()),
        "list_dir": lambda: store.list_dir("a"),
        "head": lambda: store.head(P("a")),
        "open_input": lambda: store.open_input(P("a")),
    }


class TestWhatPasses:
    @pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (500, "InternalError")])
    def test_a_failure_that_passes_is_not_noticed(
        self, server: Faulty, store: ObjectStore, status: int, code: str
    ) -> None:
        bad = failing(status, code)
        server.in_turn(bad, bad, object_of(b"data"))
        assert store.read(P("a")) == b"data"
        assert len(server.seen) == 3
        server.in_turn(bad, bad, Answer())
        assert store.create(P("a"), b"x") is True
        assert [request.headers["if-none-match"] for request in server.seen] == ["*"] * 3

    def test_a_body_cut_in_the_middle_is_read_whole(
        self, server: Faulty, store: ObjectStore
    ) -> None:
        data = bytes(range(256)) * 400
        server.in_turn(Answer(200, data, cut_at=50_000), lambda asked: object_of(data, asked))
        assert store.read(P("a")) == data
        assert len(server.seen) == 2

    def test_a_listing_loses_and_repeats_nothing(self, server: Faulty, store: ObjectStore) -> None:
        busy = failing(503, "SlowDown")
        pages = [page_of([f"key/{p}{n}" for n in range(3)], f"t{p}") for p in "ab"]
        server.in_turn(pages[0], busy, pages[1], busy, busy, page_of(["key/c"]))
        assert [info.path for info in store.list()] == ["a0", "a1", "a2", "b0", "b1", "b2", "c"]
        tokens = [request.query.get("continuation-token") for request in server.seen]
        assert tokens == [None, "ta", "ta", "tb", "tb", "tb"]

    def test_a_conflict_is_no_proof_that_the_object_exists(
        self, server: Faulty, through_obstore: ObjectStore
    ) -> None:
        conflict = failing(409, "ConditionalRequestConflict")
        server.in_turn(conflict, Answer(404), conflict, Answer(404), Answer(200))
        assert through_obstore.create(P("a"), b"x") is True
        assert [request.method for request in server.seen] == ["PUT", "HEAD", "PUT", "HEAD", "PUT"]
        server.in_turn(conflict, Answer(200))
        assert through_obstore.create(P("a"), b"x") is False

    def test_an_object_that_exists_needs_no_second_question(
        self, server: Faulty, store: ObjectStore
    ) -> None:
        server.in_turn(failing(412, "PreconditionFailed"))
        assert store.create(P("a"), b"x") is False
        assert len(server.seen) == 1


class TestWhatDoesNotPass:
    @pytest.mark.parametrize(
        ("status", "code", "said", "retryable"),
        [
            (503, "SlowDown", "throttling", True),
            (429, "TooManyRequests", "throttling", True),
            (500, "InternalError", "server failed", True),
            (503, "ServiceUnavailable", "server failed", True),
            (403, "AccessDenied", "permission denied", False),
            (403, "InvalidAccessKeyId", "does not accept these credentials", False),
            (403, "SignatureDoesNotMatch", "does not accept these credentials", False),
            (400, "InvalidArgument", "refused the request", False),
        ],
    )
    def test_each_kind_of_failure_is_told_apart(
        self, server: Faulty, hasty: ObjectStore, status: int, code: str, said: str, retryable: bool
    ) -> None:
        server.in_turn(failing(status, code))
        begun = time.monotonic()
        for name in ("read", "put", "create", "list"):
            with pytest.raises(StorageError, match=said) as caught:
                verbs_of(hasty)[name]()
            error = caught.value
            assert error.retryable is retryable, name
            assert (error.facts["status"], error.facts["code"]) == (status, code), name
            assert error.facts["url"] == hasty.url
            if name != "list":
                assert error.facts["path"] == "a"
            assert error.__cause__ is not None
            assert bool(error.next_step) is (status != 400)
        # Each call ends by itself, however long the store goes on.
        assert time.monotonic() - begun < 20

    def test_without_a_body_the_status_says_enough(
        self, server: Faulty, hasty: ObjectStore
    ) -> None:
        for status, said in ((403, "permission denied"), (500, "server failed")):
            server.in_turn(Answer(status))
            with pytest.raises(StorageError, match=said) as caught:
                hasty.head(P("a"))
            assert caught.value.facts["status"] == status

    def test_what_needs_somebody_is_asked_once(
        self, server: Faulty, through_obstore: ObjectStore
    ) -> None:
        for name, verb in verbs_of(through_obstore).items():
            server.in_turn(failing(403, "AccessDenied"))
            with pytest.raises(StorageError, match="permission denied"):
                verb()
            # A refused range is asked about once more: it may begin beyond the end.
            assert len(server.seen) <= (2 if name == "read_range" else 1), name

    def test_a_missing_object_and_a_missing_bucket_are_two_things(
        self, server: Faulty, store: ObjectStore
    ) -> None:
        server.in_turn(failing(404, "NoSuchKey"))
        with pytest.raises(NotFoundError, match="no such object"):
            store.read(P("a"))
        server.in_turn(failing(404, "NoSuchBucket"))
        for name in ("read", "put", "create", "list", "list_dir"):
            with pytest.raises(NotFoundError, match="no such bucket"):
                verbs_of(store)[name]()

    def test_a_bucket_elsewhere_is_said_so(
        self, server: Faulty, through_obstore: ObjectStore
    ) -> None:
        server.in_turn(failing(400, "AuthorizationHeaderMalformed"))
        with pytest.raises(StorageError, match="another region") as caught:
            through_obstore.read(P("a"))
        assert not caught.value.retryable
        assert "AWS_DEFAULT_REGION" in str(caught.value)

    def test_a_server_without_conditional_create_is_said_so(
        self, server: Faulty, hasty: ObjectStore
    ) -> None:
        server.in_turn(failing(501, "NotImplemented"))
        with pytest.raises(StorageError, match="does not know") as caught:
            hasty.create(P("a"), b"x")
        assert not caught.value.retryable
        assert "If-None-Match" in str(caught.value)

    def test_conflicts_without_end_are_a_failure(
        self, server: Faulty, hasty: ObjectStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def script(request: Request) -> Answer:
            missing = request.method == "HEAD"
            return Answer(404) if missing else failing(409, "ConditionalRequestConflict")

        server.in_turn(script)
        monkeypatch.setattr(
            "arroyo_dagster.state.storage.remote.obstore_store._CREATE_PAUSE_SECONDS", 0.001
        )
        with pytest.raises(StorageError) as caught:
            hasty.create(P("a"), b"x")
        assert caught.value.retryable


class TestBrokenConnections:
    def test_a_body_that_is_always_cut_is_never_given_short(
        self, server: Faulty, hasty: ObjectStore
    ) -> None:
        data = b"x" * 10_000

        def cut(request: Request) -> Answer:
            whole = object_of(data, request)
            return Answer(whole.status, whole.body, whole.headers, cut_at=len(whole.body) // 2)

        server.in_turn(cut)
        for verb in (lambda: hasty.read(P("a")), lambda: hasty.read_range(P("a"), 0, 10_000)):
            with pytest.raises(StorageError) as caught:
                verb()
            assert caught.value.retryable

    def test_a_create_whose_answer_was_lost_is_known_by_reading(
        self, server: Faulty, store: ObjectStore
    ) -> None:
        objects: dict[str, bytes] = {}
        lock = threading.Lock()

        def script(request: Request) -> Answer:
            with lock:
                if request.method == "GET":
                    return object_of(objects[request.path])
                if request.path in objects:
                    return failing(412, "PreconditionFailed")
                objects[request.path] = request.body
                return Answer(cut_at=LOST)

        server.in_turn(script)
        # It repeats the request by itself, and finds its own object.
        assert store.create(P("a"), b"mine") is False
        assert store.read(P("a")) == b"mine"

    @pytest.mark.parametrize("again", [(404, "NoSuchUpload"), (412, "PreconditionFailed")])
    def test_a_copy_whose_last_answer_was_lost_is_known_by_reading(
        self, server: Faulty, store: ObjectStore, again: tuple[int, str]
    ) -> None:
        data, there = bytes(CHUNK_BYTES + 1), {"/bucket/key/from"}
        upload = (
            b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
        )

        def script(request: Request) -> Answer:
            if request.method in ("HEAD", "GET"):
                found = request.path in there
                return object_of(data, request) if found else failing(404, "NoSuchKey")
            if request.method == "POST" and "uploadId" in request.query:
                if request.path in there:
                    return failing(*again)
                there.add(request.path)
                return Answer(cut_at=LOST)
            return Answer(200, upload if request.method == "POST" else b"")

        server.in_turn(script)
        assert store.copy(P("from"), P("to"), create=True) is False
        assert len(store.read(P("to"))) == len(data)

    def test_a_server_that_says_nothing_is_given_up(self, server: Faulty) -> None:
        for client in ("obstore", "fsspec"):
            store = open_s3(
                f"s3::http://{server.endpoint}/bucket/key",
                client,
                max_retries=0,
                request_timeout_seconds=0.3,
                retry_timeout_seconds=0.6,
            )
            server.in_turn(Answer(silence=1.0))
            begun = time.monotonic()
            for name in ("read", "create"):
                with pytest.raises(StorageError, match=r"in time|reached") as caught:
                    verbs_of(store)[name]()
                assert caught.value.retryable
            assert time.monotonic() - begun < 5

    @pytest.mark.parametrize("client", ["obstore", "fsspec"])
    def test_a_server_that_never_asks_for_the_body_is_given_up(self, client: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            store = open_s3(
                f"s3::http://127.0.0.1:{listening.getsockname()[1]}/bucket/key",
                client,
                max_retries=0,
                request_timeout_seconds=0.3,
                retry_timeout_seconds=0.6,
            )
            for name in ("put", "create"):
                failed: list[BaseException] = []
                thread = threading.Thread(
                    target=_catching, args=(verbs_of(store)[name], failed), daemon=True
                )
                thread.start()
                thread.join(30)
                assert [type(one) for one in failed] == [StorageError], name


def _catching(call: Callable[[], object], failed: list[BaseException]) -> None:
    try:
        call()
    except Exception as error:
        failed.append(error)


class TestDeletes:
    @staticmethod
    def _keys(request: Request) -> list[str]:
        return re.findall(r"<Key>([^<]+)</Key>", request.body.decode())

    def _answer(self, request: Request) -> Answer:
        if request.method == "HEAD":
            return Answer(404)
        errors = {"key/b": "AccessDenied", "key/d": "InternalError"}
        rows = "".join(
            f"<Error><Key>{key}</Key><Code>{errors[key]}</Code><Message>told</Message></Error>"
            if key in errors
            else f"<Deleted><Key>{key}</Key></Deleted>"
            for key in self._keys(request)
        )
        text = f"<?xml version='1.0'?><DeleteResult>{rows}</DeleteResult>"
        return Answer(200, text.encode(), {"Content-Type": "application/xml"})

    def test_each_object_that_was_not_deleted_is_named(
        self, server: Faulty, store: ObjectStore
    ) -> None:
        server.in_turn(self._answer)
        outcome = store.delete_many([P(name) for name in "abcde"])
        assert outcome.deleted == ("a", "c", "e")
        assert list(outcome.failed) == ["b", "d"]
        assert "AccessDenied" in outcome.failed[P("b")]
        assert "InternalError" in outcome.failed[P("d")]

    @pytest.mark.parametrize(
        ("status", "code"), [(503, "SlowDown"), (403, "AccessDenied"), (500, "InternalError")]
    )
    def test_a_request_that_fails_leaves_all_its_objects_in_doubt(
        self, server: Faulty, hasty: ObjectStore, status: int, code: str
    ) -> None:
        server.in_turn(failing(status, code))
        begun = time.monotonic()
        outcome = hasty.delete_many([P(name) for name in "abc"])
        assert outcome.deleted == ()
        assert list(outcome.failed) == ["a", "b", "c"]
        assert all(code in reason for reason in outcome.failed.values())
        assert time.monotonic() - begun < 10

    def test_objects_are_deleted_a_thousand_a_request(
        self, server: Faulty, store: ObjectStore
    ) -> None:
        server.in_turn(self._answer)
        names = [P(f"x/{number}") for number in range(2500)]
        assert store.delete_many(names).deleted == tuple(names)
        asked = [len(self._keys(one)) for one in server.seen if one.method == "POST"]
        assert sorted(asked) == [500, 1000, 1000]
        # obstore does not say which keys the answer left out: the last of each request is checked.
        heads = len(server.seen) - len(asked)
        assert heads == (3 if isinstance(store, ObstoreStore) else 0)

    def test_a_key_that_fails_now_is_asked_for_again(
        self, server: Faulty, store: ObjectStore
    ) -> None:
        failed: list[str] = []

        def script(request: Request) -> Answer:
            if request.method == "HEAD":
                return Answer(404)
            rows = ""
            for key in self._keys(request):
                if key == "key/b" and len(failed) < 2:
                    failed.append(key)
                    rows += f"<Error><Key>{key}</Key><Code>SlowDown</Code></Error>"
                else:
                    rows += f"<Deleted><Key>{key}</Key></Deleted>"
            text = f"<?xml version='1.0'?><DeleteResult>{rows}</DeleteResult>"
            return Answer(200, text.encode(), {"Content-Type": "application/xml"})

        server.in_turn(script)
        outcome = store.delete_many([P(name) for name in "abc"])
        assert (outcome.deleted, dict(outcome.failed)) == (("a", "b", "c"), {})
        assert len(failed) == 2

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"<?xml version='1.0'?><DeleteResult/>",
            b"<?xml version='1.0'?><DeleteResult><Deleted><Key>key/a</Key></Deleted><Dele",
            b"<?xml version='1.0'?><Error><Code>InternalError</Code></Error>",
        ],
        ids=["empty", "no entries", "cut short", "an error"],
    )
    def test_an_answer_that_is_cut_short_deletes_nothing_for_certain(
        self, server: Faulty, hasty: ObjectStore, body: bytes
    ) -> None:
        server.in_turn(Answer(200, body, {"Content-Type": "application/xml"}))
        outcome = hasty.delete_many([P(name) for name in "abc"])
        assert (outcome.deleted, list(outcome.failed)) == ((), ["a", "b", "c"])


def test_an_option_nobody_knows_is_refused(server: Faulty) -> None:
    with pytest.raises(InputError, match="nonsense"):
        open_s3(f"s3::http://{server.endpoint}/bucket/key", nonsense="x")
    with pytest.raises(InputError, match="client='fsspec'"):
        open_s3(f"s3::http://{server.endpoint}/b", client_kwargs={"verify": False})
