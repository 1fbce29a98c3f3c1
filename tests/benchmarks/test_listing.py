"""Listing through our store against listing through bare obstore, from one server on loopback."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections import deque
from collections.abc import Iterator

import obstore
import pytest
from obstore.store import S3Store

from arroyo_dagster.state.storage import open_store
from tests.benchmarks.conftest import Comparison

OBJECTS = 100_000

# A process of its own, whose pages are made beforehand: what is timed is the client.
SERVER = """
    import http.server, sys, urllib.parse
    OBJECTS, PAGE = int(sys.argv[1]), 1000
    names = sorted(
        f"root/job_1/checkpoints/checkpoint-{n // 100:07}"
        f"/operator-sliding_window_{n % 10}/table-s-{n % 100:03}"
        for n in range(OBJECTS)
    )
    def page(first):
        more = first + PAGE < OBJECTS
        rows = "".join(
            f"<Contents><Key>{name}</Key><LastModified>2026-11-21T06:22:36.000Z</LastModified>"
            "<ETag>&quot;9dd4e461268c8034f5c8564e155c67a6&quot;</ETag><Size>4096</Size></Contents>"
            for name in names[first : first + PAGE]
        )
        token = f"<NextContinuationToken>{first + PAGE}</NextContinuationToken>" if more else ""
        return (
            f"<?xml version='1.0'?><ListBucketResult><IsTruncated>{str(more).lower()}"
            f"</IsTruncated>{token}{rows}</ListBucketResult>"
        ).encode()
    pages = {first: page(first) for first in range(0, OBJECTS, PAGE)}
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        def log_message(self, *_): pass
        def do_GET(self):
            asked = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
            body = pages[int(asked.get("continuation-token", ["0"])[0])]
            head = f"HTTP/1.1 200 OK\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
            self.wfile.write(head.encode() + body)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
"""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    command = [sys.executable, "-c", textwrap.dedent(SERVER), str(OBJECTS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.terminate()


def test_listing_100000_objects(endpoint: str, comparison: Comparison) -> None:
    keys = {"access_key_id": "k", "secret_access_key": "s", "region": "us-east-1"}
    ours = open_store(f"s3::{endpoint}/bucket/root", options=keys)
    bare = S3Store(
        "bucket", config={**keys, "endpoint": endpoint}, client_options={"allow_http": True}
    )

    def list_bare(_: object) -> None:
        seen = sum(len(chunk) for chunk in obstore.list(bare, "root", chunk_size=1000))
        assert seen == OBJECTS

    def list_ours(_: object) -> None:
        # The last of them is looked at, all are made.
        (last,) = deque(ours.list(), maxlen=1)
        assert last.path.startswith("job_1/checkpoints/checkpoint-0000999/")

    comparison.ratio(list_ours, list_bare, goal=1.2)
