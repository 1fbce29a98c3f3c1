"""An HTTP server on 127.0.0.1 that answers as a test says, and remembers what it was asked."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.compat.arroyo import DATA


@dataclass
class Reply:
    """What the server sends: `chunks` one by one, `pause` seconds before each."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[bytes] | None = None
    pause: float = 0.0


@dataclass
class Loopback:
    url: str
    asked: list[tuple[str, str, dict[str, str]]]

    @property
    def paths(self) -> list[str]:
        return [path for _, path, _ in self.asked]


Answer = Callable[[str, dict[str, str]], Reply]
"""From a path below the root and its query to a reply."""

Change = Callable[[str, str, Any], Reply]
"""From a method, a path below the root and the document sent to a reply."""


@contextlib.contextmanager
def serving(answer: Answer, change: Change | None = None) -> Iterator[Loopback]:
    asked: list[tuple[str, str, dict[str, str]]] = []
    released = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            asked.append((self.command, parts.path, dict(self.headers.items())))
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            with contextlib.suppress(ConnectionError):  # the client may have had enough
                self._send(answer(parts.path, query))

        def _change(self) -> None:
            asked.append((self.command, self.path, dict(self.headers.items())))
            document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with contextlib.suppress(ConnectionError):
                assert change is not None
                self._send(change(self.command, self.path, document))

        do_PATCH = do_POST = _change  # noqa: N815

        def _send(self, reply: Reply) -> None:
            body = reply.body
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            chunks = [data] if reply.chunks is None else reply.chunks
            if reply.chunks is None:
                released.wait(reply.pause)
            self.send_response(reply.status)
            if reply.chunks is None:
                self.send_header("Content-Length", str(len(data)))
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.end_headers()
            for chunk in chunks:
                if reply.chunks is not None:
                    released.wait(reply.pause)
                self.wfile.write(chunk)

        def log_message(self, *_: object) -> None:
            pass

    with listening(Handler) as port:
        try:
            yield Loopback(f"http://127.0.0.1:{port}", asked)
        finally:
            released.set()


@contextlib.contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    """A server of requests, on a port of loopback."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def recorded(name: str) -> dict[str, Any]:
    """The answers in `rest-{name}.json`, by path."""
    answers: dict[str, Any] = json.loads((DATA / f"rest-{name}.json").read_text())
    return {request.removeprefix("GET "): one for request, one in answers.items()}


def replaying(name: str, changed: dict[str, Reply] | None = None) -> Answer:
    """Answers as a real Arroyo did, pages of the pipelines included.

    Args:
        changed: replies to send instead, by path below `/api/v1`.
    """
    answers = recorded(name)

    def answer(path: str, query: dict[str, str]) -> Reply:
        short = path.removeprefix("/api/v1")
        if changed and short in changed:
            return changed[short]
        found = answers.get(path)
        if path == "/api/v1/pipelines":
            return Reply(body=_page(found["data"], query))
        if found is None or "error" in found:
            what = "Pipeline" if short.startswith("/pipelines/") else "Route"
            return Reply(404, {"error": f"{what} not found"})
        return Reply(body=found)

    return answer


def _page(pipelines: list[dict[str, Any]], query: dict[str, str]) -> dict[str, Any]:
    # As the server's SQL has it: newest first, and only what is older than the one named.
    after = query.get("starting_after")
    before = {one["id"]: one["created_at"] for one in pipelines}.get(after or "", 1 << 62)
    rest = [one for one in pipelines if one["created_at"] < before]
    rest.sort(key=lambda one: -one["created_at"])
    limit = int(query.get("limit", 10))
    return {"data": rest[:limit], "hasMore": len(rest) > limit}
