"""A server on loopback that answers as it is told: errors, silence, half a body."""

from __future__ import annotations

import contextlib
import email.utils
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

_MODIFIED = email.utils.formatdate(1_790_000_000, usegmt=True)


@dataclass
class Request:
    """What was asked: `path` decoded once, `query` by name, header names in lower case."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


@dataclass
class Answer:
    """What to answer.

    Attributes:
        cut_at: say the whole length, send so many bytes, and cut the connection.
        silence: wait so many seconds first.
    """

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut_at: int | None = None
    silence: float = 0.0


Script = Callable[[Request], Answer]


def failing(status: int, code: str) -> Answer:
    """An error as S3 words it."""
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>as told</Message></Error>"
    return Answer(status, text.encode(), {"Content-Type": "application/xml"})


def object_of(data: bytes, request: Request | None = None) -> Answer:
    """An object, or the part of it that was asked for."""
    asked = request.headers.get("range", "") if request else ""
    if not asked:
        return Answer(200, data)
    start, _, end = asked.removeprefix("bytes=").partition("-")
    last = min(int(end or len(data)), len(data) - 1)
    place = f"bytes {start}-{last}/{len(data)}"
    return Answer(206, data[int(start) : last + 1], {"Content-Range": place})


def page_of(names: list[str], following: str | None = None) -> Answer:
    """A page of a listing; `following` is the token of the next one."""
    token = f"<NextContinuationToken>{following}</NextContinuationToken>" if following else ""
    rows = "".join(
        f"<Contents><Key>{name}</Key><Size>1</Size><ETag>&quot;e&quot;</ETag>"
        "<LastModified>2026-11-21T06:00:00.000Z</LastModified></Contents>"
        for name in names
    )
    truncated = "true" if following else "false"
    text = (
        "<?xml version='1.0'?><ListBucketResult>"
        f"<IsTruncated>{truncated}</IsTruncated>{token}{rows}</ListBucketResult>"
    )
    return Answer(200, text.encode(), {"Content-Type": "application/xml"})


class Faulty:
    """The server; `script` may be changed at any time, `seen` are the requests."""

    def __init__(self) -> None:
        self.script: Script = lambda _: failing(500, "Unscripted")
        self.seen: list[Request] = []
        self.endpoint = ""

    def in_turn(self, *answers: Answer | Script) -> None:
        """Answer the first request by the first, and so on; the last answers all others."""
        turn = iter(range(len(answers)))
        self.seen.clear()

        def script(request: Request) -> Answer:
            chosen = answers[next(turn, len(answers) - 1)]
            return chosen if isinstance(chosen, Answer) else chosen(request)

        self.script = script


@contextlib.contextmanager
def faulty_server() -> Iterator[Faulty]:
    faulty = Faulty()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            pass

        def answer(self) -> None:
            request = self.request_of()
            faulty.seen.append(request)
            answer = faulty.script(request)
            time.sleep(answer.silence)
            self.send(answer)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer  # noqa: N815

        def request_of(self) -> Request:
            parts = urlsplit(self.path)
            query = {name: one[0] for name, one in parse_qs(parts.query, True).items()}
            headers = {name.lower(): value for name, value in self.headers.items()}
            body = self.rfile.read(int(headers.get("content-length", 0)))
            return Request(self.command, unquote(parts.path), query, headers, body)

        def send(self, answer: Answer) -> None:
            headers = {
                "ETag": '"e"',
                "Last-Modified": _MODIFIED,
                **answer.headers,
                "Content-Length": str(len(answer.body)),
            }
            lines = [f"HTTP/1.1 {answer.status} Told", *(f"{k}: {v}" for k, v in headers.items())]
            head = "\r\n".join([*lines, "", ""]).encode()
            body = b"" if self.command == "HEAD" else answer.body
            with contextlib.suppress(ConnectionError):
                if answer.cut_at is None:
                    self.connection.sendall(head + body)
                    return
                self.connection.sendall(
                    (head + body)[: len(head) + answer.cut_at if answer.cut_at >= 0 else 0]
                )
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    faulty.endpoint = f"127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield faulty
    finally:
        server.shutdown()
        server.server_close()
