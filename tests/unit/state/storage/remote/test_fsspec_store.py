"""Any fsspec filesystem (its own memory one here), and S3 answers that moto does not give."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from arroyo_dagster.errors import NotFoundError, StorageError
from arroyo_dagster.state import StatePath
from arroyo_dagster.state.storage.remote import fsspec_store
from arroyo_dagster.state.storage.remote.fsspec_store import FsspecStore
from arroyo_dagster.state.storage.remote.s3_store import S3Store
from tests.stores import parse_url

P = StatePath


@pytest.fixture
def store() -> FsspecStore:
    root = f"bucket-{uuid.uuid4().hex}/key"
    return FsspecStore("memory", root, url=f"fsspec-memory://{root}")


def test_a_general_filesystem_reads_writes_and_lists(store: FsspecStore) -> None:
    with pytest.raises(NotFoundError):
        list(store.list())
    with pytest.raises(NotFoundError):
        store.list_dir()
    for name in ("a/b<1>", "a/c/d", "e"):
        store.put(P(name), name.encode())
    assert [info.path for info in store.list()] == ["a/b<1>", "a/c/d", "e"]
    assert [info.path for info in store.list("a", start_after="a/b<1>")] == ["a/c/d"]
    level = store.list_dir("a")
    assert ([info.path for info in level.objects], level.prefixes) == (["a/b<1>"], ("a/c",))
    assert list(store.list("none")) == []
    assert store.list_dir("none").prefixes == ()
    assert store.read(P("e")) == b"e"
    assert store.read_range(P("a/c/d"), 2, 10) == b"c/d"
    assert store.read_range(P("a/c/d"), 99, 10) == b""
    assert store.open_input(P("a/c/d")).read() == b"a/c/d"
    head = store.head(P("e"))
    assert head is not None
    assert (head.size_bytes, head.modified_micros is None) == (1, False)
    assert store.head(P("a")) is None
    assert store.delete_many([P("e"), P("x")]).deleted == ("e", "x")


class Answering:
    """In place of an s3fs filesystem: answers each call as told."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self.call_s3 = answer
        self.pipe_file = answer
        self.cat_file = answer
        self.info = answer


class ClientError(Exception):
    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code, "Message": code}}


def s3_answering(monkeypatch: pytest.MonkeyPatch, answer: Callable[..., Any]) -> S3Store:
    monkeypatch.setattr(S3Store, "filesystem", Answering(answer))
    monkeypatch.setattr(fsspec_store, "prove_once", lambda *_: None)
    return S3Store(parse_url("s3://bucket/key"))


def raising(error: Exception, cause: Exception | None = None) -> Callable[..., Any]:
    def answer(*_: object, **__: object) -> None:
        raise error from cause

    return answer


@pytest.mark.parametrize("code", ["PreconditionFailed", "412"])
def test_unnamed_conditions_are_understood(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    store = s3_answering(monkeypatch, raising(OSError(22, "failed"), ClientError(code)))
    assert store.create(P("a"), b"") is False


def test_other_failures_of_a_create_are_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    error = raising(OSError(16, "busy"), ClientError("ConditionalRequestConflict"))
    store = s3_answering(monkeypatch, error)
    with pytest.raises(StorageError) as caught:
        store.create(P("a"), b"")
    assert caught.value.retryable


def test_each_key_that_s3_did_not_delete_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [
        {"Key": "key/b%3C", "Code": "AccessDenied", "Message": "no"},
        {"Key": "key/c", "Code": "NoSuchKey", "Message": ""},
    ]
    said = {"Errors": errors, "Deleted": [{"Key": "key/a"}]}
    store = s3_answering(monkeypatch, lambda *_, **__: said)
    outcome = store.delete_many([P("a"), P("b<"), P("c"), P("d")])
    assert outcome.deleted == ("a", "c")
    assert outcome.failed == {
        P("b<"): "AccessDenied: no",
        P("d"): "the store's answer does not name this key",
    }


def test_failed_delete_request_reports_all_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    store = s3_answering(monkeypatch, raising(PermissionError("no")))
    outcome = store.delete_many([P("a"), P("b")])
    assert outcome.deleted == ()
    assert list(outcome.failed) == ["a", "b"]


@pytest.mark.parametrize(
    ("error", "retryable", "said"),
    [
        (PermissionError("Access Denied"), False, "permission denied"),
        (OSError(16, "slow down"), True, "the store failed"),
        (RuntimeError("socket"), True, "the store failed"),
        (type("NoCredentialsError", (Exception,), {})(), False, "no usable credentials"),
    ],
)
def test_failures_say_whether_trying_again_may_help(
    monkeypatch: pytest.MonkeyPatch, error: Exception, retryable: bool, said: str
) -> None:
    store = s3_answering(monkeypatch, raising(error))
    verbs: list[Callable[[], object]] = [
        lambda: store.read(P("a")),
        lambda: store.put(P("a"), b""),
        lambda: list(store.list()),
        lambda: store.list_dir(),
        lambda: store.head(P("a")),
    ]
    for verb in verbs:
        with pytest.raises(StorageError, match=said) as caught:
            verb()
        assert caught.value.retryable is retryable
        assert caught.value.facts["url"] == "s3://bucket/key"
        assert caught.value.__cause__ is error
