"""Whatever a server does, a caller gets JSON or one clear error, soon, and no token leaks."""

from __future__ import annotations

import socket
import time
import traceback

import pytest

from arroyo_dagster.errors import (
    ArroyoStateError,
    FormatError,
    InputError,
    NotFoundError,
    StorageError,
)
from arroyo_dagster.state.storage.arroyo.http_json import JsonServer
from tests.loopback import Reply, serving

TOKEN = "s3cr3t-t0ken"


def failing(reply: Reply, **limits: float) -> ArroyoStateError:
    with serving(lambda path, query: reply) as server:
        client = JsonServer(server.url, token=TOKEN, **limits)  # type: ignore[arg-type]
        with pytest.raises(ArroyoStateError) as caught:
            client.get("/x")
        assert caught.value.facts["url"] == f"{server.url}/x"
        assert caught.value.next_step or isinstance(caught.value, NotFoundError)
        assert TOKEN not in "".join(traceback.format_exception(caught.value))
        assert TOKEN not in repr(vars(caught.value))
        return caught.value


def test_a_document_is_fetched_with_the_token_and_the_query() -> None:
    with serving(lambda path, query: Reply(body=[path, query])) as server:
        client = JsonServer(f"{server.url}/base/", token=TOKEN)
        assert client.get("/a%2Fb", {"limit": 3, "after": "x&y"}) == [
            "/base/a%2Fb",
            {"limit": "3", "after": "x&y"},
        ]
        JsonServer(server.url).get("/")
    (method, _, first), (_, _, second) = server.asked
    assert method == "GET"
    assert first["Authorization"] == f"Bearer {TOKEN}"
    assert "Authorization" not in second


@pytest.mark.parametrize(
    ("status", "kind", "retryable"),
    [
        (400, StorageError, False),
        (401, InputError, False),
        (403, InputError, False),
        (404, NotFoundError, False),
        (429, StorageError, True),
        (500, StorageError, True),
        (502, StorageError, True),
        (503, StorageError, True),
    ],
)
def test_a_status_is_the_next_action(status: int, kind: type, retryable: bool) -> None:
    error = failing(Reply(status, {"error": "so it is"}))
    assert (type(error), error.retryable) == (kind, retryable)
    assert (error.facts["status"], error.facts["answer"]) == (status, "so it is")


def test_a_remark_beside_a_status_need_not_be_what_arroyo_sends() -> None:
    for body in (b"\xff", b"[" * 5000, {"error": {"x": 1}}, ["error"], b""):
        assert "answer" not in failing(Reply(500, body)).facts
    assert len(failing(Reply(500, {"error": "x" * 300})).facts["answer"]) == 200


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_refused_and_nobody_else_sees_the_token(status: int) -> None:
    with serving(lambda path, query: Reply(body={})) as elsewhere:
        for there in (f"{elsewhere.url}/login?secret=1", "/login", "file:///etc/passwd"):
            error = failing(Reply(status, {}, {"Location": there}))
            assert not error.retryable
            assert "secret" not in str(error)
    assert elsewhere.asked == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>sign in</html>",
        b'{"data": [{"id": "job_',
        b"\xff\xfe",
        b"[" * 200_000,
        b"[" + b"9" * 5000 + b"]",
    ],
)
def test_nonsense_is_an_error_that_may_pass(body: bytes) -> None:
    error = failing(Reply(body=body))
    assert (type(error), error.retryable) == (StorageError, True)
    assert error.facts["size_bytes"] == len(body)


def test_half_an_answer_is_an_error_that_may_pass() -> None:
    for headers in ({"Content-Length": "900"}, {"Transfer-Encoding": "chunked"}):
        error = failing(
            Reply(
                chunks=[b'40\r\n{"data": ['] if "Transfer-Encoding" in headers else [b'{"data": ['],
                headers=headers,
            )
        )
        assert (type(error), error.retryable) == (StorageError, True)


def test_an_answer_is_read_to_its_bound_only() -> None:
    error = failing(Reply(body=b'"' + b"x" * 1_000_000 + b'"'), max_bytes=1000)
    assert isinstance(error, FormatError)
    endless = failing(Reply(chunks=[b"x" * 65536] * 1000), max_bytes=1000)
    assert isinstance(endless, FormatError)


def test_a_silent_server_is_left_after_the_timeout() -> None:
    begun = time.monotonic()
    for reply in (Reply(body={}, pause=20), Reply(chunks=[b"[", b"]"], pause=20)):
        error = failing(reply, timeout_seconds=0.2)
        assert (type(error), error.retryable) == (StorageError, True)
        assert "did not answer within 0.2 s" in error.message
    assert time.monotonic() - begun < 5


def test_a_server_that_trickles_is_left_after_the_deadline() -> None:
    reply = Reply(chunks=[b" "] * 1000, pause=0.05)
    error = failing(reply, timeout_seconds=5, deadline_seconds=0.3)
    assert (type(error), error.retryable) == (StorageError, True)
    assert "longer than 0.3 s" in error.message


def test_nobody_there_and_nonsense_before_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(StorageError) as gone:
        JsonServer(f"http://127.0.0.1:{port}").get("/")
    assert gone.value.retryable
    with pytest.raises(StorageError) as nameless:
        JsonServer("http://no-such-host.invalid").get("/")
    assert nameless.value.retryable
    with serving(lambda path, query: Reply(status=0, body={})) as server:
        with pytest.raises(StorageError):  # "HTTP/1.0 0": no status there is
            JsonServer(server.url).get("/")
        with pytest.raises(StorageError):  # TLS, where none is spoken
            JsonServer(server.url.replace("http:", "https:")).get("/")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:5115",
        "ftp://host/",
        "file:///etc/passwd",
        "http://",
        "http://:5115",
        "http://host:99999",
        "http://host:port",
        "http://user:secret@host",
        "http://host?token=secret",
        "http://host/#secret",
        "http://ho st",
        "http://host\r\nX: y",
        "http://[::1",
        f"http://{'x' * 70}.org",
    ],
)
def test_an_address_that_cannot_be_used_is_refused_before_any_request(url: str) -> None:
    with pytest.raises(InputError) as caught:
        JsonServer(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("token", ["", "a b", "a\n", "a\r\nX: y", "ü"])
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(InputError) as caught:
        JsonServer("http://localhost", token=token)
    assert not token or repr(token) not in repr(caught.value)
