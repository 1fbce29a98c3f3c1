"""Servers of the protocols of S3, GCS and Azure, on loopback, each started by who asks for it.

What the project's requirement files install is always there: moto, for S3. Google's client speaks
nearly the same protocol (its XML interface), so a thin layer makes moto a server of that; what it
changes is written below. The servers that others made are used where they are on the PATH:
`fake-gcs-server` (a Go module) for gcsfs and `azurite-blob` (in the npm package azurite) for
Azure. They are not in the requirement files, which are Python's.
"""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import hashlib
import hmac
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from tests.s3_servers import free_port

AZURE_ACCOUNT = "devstoreaccount1"
# Azurite's own, the same everywhere, printed in its documentation.
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
_MOTO_ACCOUNT = "123456789012"

_SIGNED = (
    "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request, "
    "SignedHeaders=host, Signature=0"
)

App = Callable[..., Any]


class GoogleDialect:
    """Moto's S3 as the XML interface of GCS, where the two differ for `object_store`.

    "Only if there is none" is a generation of 0, not an etag; deleting what is not there is an
    error; keys come with a bearer token; the source of a copy has a header of its own, and a copy
    takes the condition too, which Moto's does not.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        self._copying = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        # Moto reads the service and the account out of a signature, and checks none.
        environ["HTTP_AUTHORIZATION"] = _SIGNED
        if environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None) == "0":
            environ["HTTP_IF_NONE_MATCH"] = "*"
        if environ["REQUEST_METHOD"] == "DELETE" and not self._exists(environ):
            start_response("404 Not Found", [("Content-Length", "0")])
            return [b""]
        if "HTTP_X_GOOG_COPY_SOURCE" in environ:
            return self._copy(environ, start_response)
        return self.app(environ, start_response)

    def _copy(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        environ["HTTP_X_AMZ_COPY_SOURCE"] = environ.pop("HTTP_X_GOOG_COPY_SOURCE")
        with self._copying:
            if environ.pop("HTTP_IF_NONE_MATCH", None) and self._exists(environ):
                start_response("412 Precondition Failed", [("Content-Length", "0")])
                return [b""]
            return [*self.app(environ, start_response)]

    def _exists(self, environ: dict[str, Any]) -> bool:
        answers: list[str] = []
        asked = {**environ, "REQUEST_METHOD": "HEAD"}
        answer = self.app(asked, lambda status, *_: answers.append(status))
        list(answer)
        return answers[0].startswith("200")


class OneCreateAtATime:
    """Moto's S3, which looks and writes in two steps, as a server of which one creator wins."""

    def __init__(self, app: App) -> None:
        self.app = app
        self._creating = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        if "HTTP_IF_NONE_MATCH" not in environ:
            return self.app(environ, start_response)
        with self._creating:
            return [*self.app(environ, start_response)]


class IgnoresConditions:
    """Moto's S3 as a server that ignores the condition of a conditional create."""

    def __init__(self, app: App) -> None:
        self.app = app

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        environ.pop("HTTP_IF_NONE_MATCH", None)
        return self.app(environ, start_response)


class Recording:
    """A server that records the requests it gets, as (method, path), and may refuse some.

    Attributes:
        allowed: requests to other paths are answered with 403; None allows all.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        self.seen: list[tuple[str, str]] = []
        self.allowed: str | None = None

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        path = environ["PATH_INFO"]
        self.seen.append((environ["REQUEST_METHOD"], path))
        writes = environ["REQUEST_METHOD"] in ("PUT", "DELETE")
        if writes and self.allowed is not None and not path.startswith(self.allowed):
            start_response("403 Forbidden", [("Content-Length", "0")])
            return [b""]
        return self.app(environ, start_response)


class FailingDeletes:
    """Moto's S3 as a server that does not delete every key of a bulk delete.

    Attributes:
        problem_of: the error code of a key, `LEFT_OUT` for one that the answer does not name, None
            for one that is deleted.
    """

    LEFT_OUT = "left out"

    def __init__(self, app: App) -> None:
        self.app = app
        self.problem_of: Callable[[str], str | None] = lambda key: None

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        query = environ.get("QUERY_STRING", "")
        if environ["REQUEST_METHOD"] != "POST" or not query.startswith("delete"):
            return self.app(environ, start_response)
        body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])).decode()
        keys = re.findall(r"<Key>([^<]+)</Key>", body)
        problems = {key: code for key in keys if (code := self.problem_of(key)) is not None}
        bucket = environ["PATH_INFO"].strip("/")
        for key in keys:
            if key not in problems:
                delete_from_moto(bucket, key)
        rows = [
            f"<Error><Key>{key}</Key><Code>{problems[key]}</Code><Message>injected</Message></Error>"
            if key in problems
            else f"<Deleted><Key>{key}</Key></Deleted>"
            for key in keys
            if problems.get(key) != self.LEFT_OUT
            and not ("<Quiet>true" in body and key not in problems)
        ]
        answer = f"<?xml version='1.0'?><DeleteResult>{''.join(rows)}</DeleteResult>".encode()
        headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(answer)))]
        start_response("200 OK", headers)
        return [answer]


@contextlib.contextmanager
def moto_server(dialect: Callable[[App], App] = lambda app: app) -> Iterator[str]:
    """Give `host:port` of a server of S3; all of one process hold the same buckets."""
    app = dialect(OneCreateAtATime(DomainDispatcherApplication(create_backend_app)))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    server.RequestHandlerClass.log_request = lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def put_into_moto(bucket: str, key: str, data: bytes) -> None:
    """Write an object under any name at all, straight into the server: requests take seconds."""
    from moto.s3.models import s3_backends

    s3_backends[_MOTO_ACCOUNT]["aws"].put_object(bucket, key, data)


def delete_from_moto(bucket: str, key: str) -> None:
    from moto.s3.models import s3_backends

    s3_backends[_MOTO_ACCOUNT]["aws"].delete_object(bucket, key)


def make_moto_bucket(name: str) -> None:
    from moto.s3.models import s3_backends

    s3_backends[_MOTO_ACCOUNT]["aws"].create_bucket(name, "us-east-1")


def set_moto_versioning(bucket: str, status: str) -> None:
    """Set whether a bucket keeps versions: Enabled or Suspended."""
    from moto.s3.models import s3_backends

    s3_backends[_MOTO_ACCOUNT]["aws"].put_bucket_versioning(bucket, status)


@contextlib.contextmanager
def google_json_server() -> Iterator[str]:
    """Give `host:port` of a server of the JSON interface of GCS, which gcsfs speaks."""
    if find_spec("gcsfs") is None:
        pytest.skip("gcsfs is not installed: it is on request only, in no requirement file")
    # Else it asks another service of Google's, which nobody plays here, what kind of bucket it is.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    port = free_port()
    command = [_found("fake-gcs-server"), "-scheme", "http", "-backend", "memory"]
    command += ["-host", "127.0.0.1", "-port", str(port), "-log-level", "error"]
    command += ["-public-host", f"127.0.0.1:{port}"]
    with _running(command, port):
        yield f"127.0.0.1:{port}"


def make_google_bucket(endpoint: str, name: str) -> None:
    _ask(
        "POST",
        f"http://{endpoint}/storage/v1/b?project=test",
        json.dumps({"name": name}).encode(),
        {"Content-Type": "application/json"},
    )


@contextlib.contextmanager
def azure_server(directory: Path) -> Iterator[str]:
    """Give `host:port` of a server of Azure's blobs."""
    port = free_port()
    command = [_found("azurite-blob"), "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    command += ["--inMemoryPersistence", "--skipApiVersionCheck", "--silent"]
    with _running([*command, "--disableTelemetry"], port, directory):
        yield f"127.0.0.1:{port}"


def make_azure_container(endpoint: str, name: str) -> None:
    moment = dt.datetime.now(dt.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    signed = (
        "PUT" + "\n" * 5 + "text/plain" + "\n" * 7 + f"x-ms-date:{moment}\n"
        f"x-ms-version:2021-08-06\n/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{name}\nrestype:container"
    )
    digest = hmac.new(base64.b64decode(AZURE_KEY), signed.encode(), hashlib.sha256).digest()
    _ask(
        "PUT",
        f"http://{endpoint}/{AZURE_ACCOUNT}/{name}?restype=container",
        b"",
        {
            "x-ms-date": moment,
            "x-ms-version": "2021-08-06",
            "Content-Type": "text/plain",
            "Authorization": f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}",
        },
    )


def _found(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not on the PATH: no requirement file of Python's installs it")
    return path


@contextlib.contextmanager
def _running(command: list[str], port: int, directory: Path | None = None) -> Iterator[None]:
    with subprocess.Popen(
        command, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            _wait_for(port, process)
            yield
        finally:
            process.terminate()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 0.2).close()
            return
        time.sleep(0.05)
    raise AssertionError(f"the server on port {port} does not answer")


def _ask(method: str, url: str, data: bytes, headers: dict[str, str]) -> None:
    request = urllib.request.Request(url, data=data, headers=headers, method=method)
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status < 300
