"""As much of S3 as a compaction needs, over a folder, each answer late: a process of its own.

Run as `python -m tests.benchmarks.slow_s3 FOLDER SECONDS`; it prints its address.
"""

from __future__ import annotations

import contextlib
import http.server
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).parents[2]


@contextlib.contextmanager
def slow_s3(folder: Path, latency_seconds: float) -> Iterator[str]:
    """The address of a server whose bucket `bucket` holds `folder` below `root/`."""
    command = [sys.executable, "-m", "tests.benchmarks.slow_s3", str(folder), str(latency_seconds)]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def serve(folder: Path, latency: float) -> None:
    uploads: dict[str, dict[int, bytes]] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            pass

        def _path(self) -> Path:
            name = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
            return folder / name.removeprefix("/bucket/root/")

        def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            time.sleep(latency)
            self.send_response_only(status)
            for header, value in headers.items():
                self.send_header(header.replace("_", "-"), value)
            if "Content_Length" not in headers:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_HEAD(self) -> None:
            path = self._path()
            if not path.is_file():
                return self._answer(404)
            return self._answer(200, **_headers(path), Content_Length=str(path.stat().st_size))

        def do_GET(self) -> None:
            asked = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
            if "list-type" in asked:
                return self._answer(200, _listing(folder, asked))
            path = self._path()
            if not path.is_file():
                return self._answer(404)
            data = path.read_bytes()
            ranged = self.headers.get("Range")
            if not ranged:
                return self._answer(200, data, **_headers(path))
            first, _, last = ranged.removeprefix("bytes=").partition("-")
            start = int(first) if first else len(data) - int(last)
            end = min(len(data), int(last) + 1) if first and last else len(data)
            span = f"bytes {start}-{end - 1}/{len(data)}"
            return self._answer(206, data[start:end], **_headers(path), Content_Range=span)

        def do_PUT(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            asked = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
            if "uploadId" in asked:
                number = int(asked["partNumber"][0])
                uploads[asked["uploadId"][0]][number] = data
                return self._answer(200, ETag=f'"{number}"')
            path = self._path()
            if self.headers.get("If-None-Match") == "*" and path.exists():
                return self._answer(412)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # never through a hard link
            path.write_bytes(data)
            return self._answer(200, ETag=_headers(path)["ETag"])

        def _complete(self, parts: dict[int, bytes]) -> None:
            path = self._path()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # never through a hard link
            path.write_bytes(b"".join(parts[number] for number in sorted(parts)))
            self._answer(
                200,
                b"<CompleteMultipartUploadResult><Location>l</Location><Bucket>bucket</Bucket>"
                b"<Key>k</Key><ETag>%s</ETag></CompleteMultipartUploadResult>"
                % _headers(path)["ETag"].encode(),
            )

        def do_DELETE(self) -> None:
            self._path().unlink(missing_ok=True)
            self._answer(204)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0"))).decode()
            asked = urllib.parse.parse_qs(
                urllib.parse.urlsplit(self.path).query, keep_blank_values=True
            )
            if "uploads" in asked:
                uploads[name := f"upload-{len(uploads)}"] = {}
                return self._answer(
                    200,
                    b"<InitiateMultipartUploadResult><Bucket>bucket</Bucket><Key>k</Key>"
                    b"<UploadId>%s</UploadId></InitiateMultipartUploadResult>" % name.encode(),
                )
            if "uploadId" in asked:
                return self._complete(uploads[asked["uploadId"][0]])
            for part in body.split("<Key>")[1:]:
                (folder / part.split("</Key>")[0].removeprefix("root/")).unlink(missing_ok=True)
            return self._answer(200, b"<DeleteResult></DeleteResult>")

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


def _headers(path: Path) -> dict[str, str]:
    found = path.stat()
    return {
        "ETag": f'"{found.st_mtime_ns:x}-{found.st_size:x}"',
        "Last_Modified": "Wed, 21 Oct 2026 07:28:00 GMT",
    }


def _listing(folder: Path, asked: dict[str, list[str]]) -> bytes:
    prefix = asked.get("prefix", [""])[0]
    delimiter = asked.get("delimiter", [""])[0]
    after = asked.get("start-after", [""])[0]
    names = sorted(
        f"root/{path.relative_to(folder).as_posix()}"
        for path in folder.rglob("*")
        if path.is_file()
    )
    rows, prefixes = [], []
    for name in names:
        if not name.startswith(prefix) or name <= after:
            continue
        rest = name[len(prefix) :]
        if delimiter and delimiter in rest:
            prefixes.append(prefix + rest.split(delimiter)[0] + delimiter)
            continue
        path = folder / name.removeprefix("root/")
        headers = _headers(path)
        rows.append(
            f"<Contents><Key>{name}</Key><LastModified>2026-10-21T07:28:00.000Z</LastModified>"
            f"<ETag>{headers['ETag']}</ETag><Size>{path.stat().st_size}</Size></Contents>"
        )
    common = "".join(
        f"<CommonPrefixes><Prefix>{one}</Prefix></CommonPrefixes>"
        for one in dict.fromkeys(prefixes)
    )
    return (
        "<?xml version='1.0'?><ListBucketResult><IsTruncated>false</IsTruncated>"
        f"{''.join(rows)}{common}</ListBucketResult>"
    ).encode()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), float(sys.argv[2]))
