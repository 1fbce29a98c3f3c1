"""Whatever a server does, a caller gets JSON or one clear error, soon, and no token leaks."""

from __future__ import annotations

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
from arroyo_dagster.state.storage.arroyo.api import JsonServer
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


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_refused_and_nobody_else_sees_the_token(status: int) -> None:
    with serving(lambda path, query: Reply(body={})) as elsewhere:
        for there in (f"{elsewhere.url}/login?secret=1", "/login", "file:///etc/passwd"):
            error = failing(Reply(status, {}, {"Location": there}))
            assert not error.retryable
            assert "secret" not in str(error)
    assert elsewhere.asked == []


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
