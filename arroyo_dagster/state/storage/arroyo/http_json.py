"""JSON documents from and to an HTTP server, with limits on waits, answers and addresses."""

from __future__ import annotations

import functools
import http.client
import ipaddress
import json
import re
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from email.message import Message
from typing import IO, Any, Literal, NoReturn

from arroyo_dagster.errors import (
    ArroyoStateError,
    FormatError,
    InputError,
    NotFoundError,
    StorageError,
)
from arroyo_dagster.redaction import (
    redact_text,
    redact_url,
    redacted_cause,
    register_secrets,
    register_url,
)
from arroyo_dagster.state.model.json_fields import parse_json

_CHUNK = 1 << 16
_REMARK_BYTES = 4096
_RETRYABLE_CODES = (408, 425, 429)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: they lead to a login page or another host, which must not get a token."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Message,
        newurl: str,
    ) -> NoReturn:
        fp.close()
        raise InputError(
            "the server redirects to another address, which was not queried",
            url=redact_url(req.full_url),
            status=code,
            location=redact_url(newurl),
            next_step="give the address at which the API itself answers, or a token that it "
            "accepts",
        )


class JsonServer:
    """Requests below one address, without state between them.

    Args:
        url: the address, `http` or `https`, without user, query or fragment.
        token: sent as a bearer token; never displayed.
        timeout_seconds: the maximum time without data from the server.
        deadline_seconds: the maximum time of one answer.
        max_bytes: the maximum size of one answer.

    Raises:
        InputError: the address or the token is invalid.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_seconds: float = 10.0,
        deadline_seconds: float = 60.0,
        max_bytes: int = 64 << 20,
    ) -> None:
        register_url(url)
        register_secrets(token)
        self.url = _checked_url(url)
        self._token = token
        self._headers = {"Accept": "application/json", "User-Agent": "arroyo-state"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {_checked_token(token)}"
        self._timeout = timeout_seconds
        self._deadline = deadline_seconds
        self._max_bytes = max_bytes
        # `build_opener` would also open file: and ftp: addresses.
        self._opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.ProxyHandler(),
            urllib.request.HTTPHandler(),
            urllib.request.HTTPSHandler(),
            urllib.request.HTTPDefaultErrorHandler(),
            urllib.request.HTTPErrorProcessor(),
            _NoRedirects(),
        ):
            self._opener.add_handler(handler)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments: the token goes along, connections do not."""
        rebuild = functools.partial(
            JsonServer,
            token=self._token,
            timeout_seconds=self._timeout,
            deadline_seconds=self._deadline,
            max_bytes=self._max_bytes,
        )
        return rebuild, (self.url,)

    @property
    def from_anywhere(self) -> bool:
        """Whether other machines reach the same server at this address: not one of this machine."""
        host = urllib.parse.urlsplit(self.url).hostname or ""
        try:
            return not ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host != "localhost" and not host.endswith(".localhost")

    def get(self, path: str, query: Mapping[str, str | int] | None = None) -> Any:
        """Return the document at `path`, which is percent-encoded and begins with `/`.

        Raises:
            InputError: 401, 403, or a redirect.
            NotFoundError: 404.
            StorageError: no answer, an incomplete answer, or the server failed; retryable unless
                the failure is permanent.
            FormatError: the answer is too long.
        """
        url = f"{self.url}{path}"
        full = f"{url}?{urllib.parse.urlencode(query)}" if query else url
        return self._answer(urllib.request.Request(full, headers=self._headers), url)

    def send(self, method: Literal["PATCH", "POST"], path: str, body: Mapping[str, Any]) -> Any:
        """Send a change once, and return the answer. Errors as in `get`; after a StorageError it is
        unknown whether the change was made."""
        url = f"{self.url}{path}"
        headers = {**self._headers, "Content-Type": "application/json"}
        data = json.dumps(body).encode()
        return self._answer(urllib.request.Request(url, data, headers, method=method), url)

    def _answer(self, request: urllib.request.Request, url: str) -> Any:
        try:
            return _document(self._read(request, url), url)
        except urllib.error.HTTPError as error:
            with error:
                raise _refused(error, url) from redacted_cause(error)
        except ArroyoStateError:
            raise
        except (OSError, http.client.HTTPException) as error:
            raise _unreachable(error, url, self._timeout) from redacted_cause(error)

    def _read(self, request: urllib.request.Request, url: str) -> bytes:
        until = time.monotonic() + self._deadline
        body = bytearray()
        with self._opener.open(request, timeout=self._timeout) as answer:
            # The timeout limits one wait; a server that sends slowly needs a deadline as well.
            while chunk := answer.read1(_CHUNK):
                body += chunk
                if len(body) > self._max_bytes:
                    raise FormatError(
                        f"the answer is longer than {self._max_bytes} bytes",
                        url=url,
                        next_step="check that this is Arroyo's API",
                    )
                if time.monotonic() > until:
                    raise StorageError(
                        f"the server's answer takes longer than {self._deadline:g} s",
                        url=url,
                        next_step="try again later, when the server has less load",
                    )
        return bytes(body)


def _checked_url(url: str) -> str:
    """Return the address without a trailing `/`; raise InputError if it is invalid."""
    problem = None
    try:
        parts = urllib.parse.urlsplit(url)
        _ = parts.port  # raises for an invalid port
        if parts.scheme not in ("http", "https") or not parts.hostname:
            problem = "it is not http://HOST:PORT or https://HOST"
        elif "@" in parts.netloc:
            problem = "it holds a user or password"
        elif parts.query or parts.fragment or re.search(r"[\s\x00-\x1f\x7f]", url):
            problem = "it holds a query, a fragment or a space"
        else:
            parts.hostname.encode("idna")
    except ValueError:
        problem = "its host or its port is not valid"  # Python's own message repeats a part of it
    if problem is not None:
        raise InputError(
            f"not the address of a server: {problem}",
            url=redact_url(url),
            next_step="give it in the form http://HOST:5115; pass a token separately",
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def _checked_token(token: str) -> str:
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        raise InputError(
            "the token is empty, or contains a character that a header cannot carry",
            next_step="check its source, for example for a line break at its end",
        )
    return token


def _document(body: bytes, url: str) -> Any:
    try:
        return parse_json(body)
    except (ValueError, RecursionError) as error:
        raise StorageError(
            "the server's answer is not JSON, or is incomplete",
            url=url,
            size_bytes=len(body),
            next_step="try again; if it persists, check that this is Arroyo's API and not a "
            "proxy page",
        ) from error


def _refused(error: urllib.error.HTTPError, url: str) -> ArroyoStateError:
    """Return the error for a status other than 200."""
    facts: dict[str, Any] = {"url": url, "status": error.code, "answer": _remark(error)}
    if error.code in (401, 403):
        step = "give a token with read permission, or check the given one"
        return InputError("the server refuses this token or caller", next_step=step, **facts)
    if error.code == 404:
        return NotFoundError("the server has nothing at this address", **facts)
    if error.code >= 500 or error.code in _RETRYABLE_CODES:
        return StorageError("the server failed", next_step="try again later", **facts)
    step = "check that this is Arroyo's API, and of which version"
    return StorageError("the server refused the request", retryable=False, next_step=step, **facts)


def _remark(error: urllib.error.HTTPError) -> str | None:
    """Return the message in the body of an error, if it has Arroyo's form."""
    try:
        answer = parse_json(error.read(_REMARK_BYTES))
    except (OSError, ValueError, RecursionError, http.client.HTTPException):
        return None
    text = answer.get("error") if isinstance(answer, dict) else None
    return redact_text(text)[:200] if isinstance(text, str) else None


def _unreachable(error: Exception, url: str, timeout_seconds: float) -> StorageError:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, ssl.SSLCertVerificationError):
        text, retryable = f"its certificate is not trusted: {reason.verify_message}", False
    elif isinstance(reason, TimeoutError):
        text, retryable = f"it did not answer within {timeout_seconds:g} s", True
    else:
        text, retryable = redact_text(str(reason)) or type(reason).__name__, True
    return StorageError(
        f"the server did not answer: {text}",
        retryable=retryable,
        url=url,
        next_step="check the address, and that the server runs and can be reached from here",
    )
