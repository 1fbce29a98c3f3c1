"""Checkpoint URLs: every form that Arroyo accepts is parsed to a value with one canonical form."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from arroyo_dagster.errors import InputError
from arroyo_dagster.redaction import redact_url
from arroyo_dagster.state.storage.names import encode_path

Backend = Literal["s3", "r2", "gs", "azure", "file", "memory"]

ACCEPTED_FORMS = (
    "/abs/dir, file:///abs/dir; "
    "s3://bucket/key, https://s3.{region}.amazonaws.com/bucket/key, "
    "https://bucket.s3.{region}.amazonaws.com/key, s3::http://host:port/bucket/key; "
    "r2://[account@]bucket/key, https://{account}[.{jurisdiction}].r2.cloudflarestorage.com/"
    "bucket/key, https://bucket.{account}[.{jurisdiction}].r2.cloudflarestorage.com/key; "
    "gs://bucket/key, https://storage.googleapis.com/bucket/key, "
    "https://bucket.storage.googleapis.com/key; "
    "abfss://container@account.dfs.core.windows.net/key, "
    "https://account.blob.core.windows.net/container/key; "
    "/key may be left out, but no bare '/' at the end of a bucket"
)

_KEY = r"(?:/(?P<key>.+))?"
_BUCKET = r"(?P<bucket>[a-z0-9.\-]+)"
_GCS_BUCKET = r"(?P<bucket>[a-z0-9._\-]+)"
_R2_HOST = (
    r"(?P<account>[a-zA-Z0-9]+)(?:\.(?P<jurisdiction>[a-zA-Z0-9]+))?\.r2\.cloudflarestorage\.com"
)
_AZURE_HOST = r"(?P<account>[a-z0-9]+)\.(?:blob|dfs)\.core\.windows\.net"

# Order matters: the first matching form applies, and some texts match two of R2's forms
# (https://b.acct.r2…/x/y is bucket x of account b in jurisdiction acct, as Arroyo parses it).
_FORMS: tuple[tuple[Backend, str], ...] = (
    ("s3", rf"https://s3\.(?P<region>[\w\-]+)\.amazonaws\.com/{_BUCKET}{_KEY}"),
    ("s3", rf"https://{_BUCKET}\.s3\.(?P<region>[\w\-]+)\.amazonaws\.com{_KEY}"),
    ("s3", rf"[sS]3[aA]?::(?P<endpoint>https?://[^:/@?#\s]+:[0-9]+)/{_BUCKET}{_KEY}"),
    ("s3", rf"[sS]3[aA]?://{_BUCKET}{_KEY}"),
    ("r2", rf"[rR]2://(?:(?P<account>[a-zA-Z0-9]+)@)?{_BUCKET}{_KEY}"),
    ("r2", rf"https://{_R2_HOST}/{_BUCKET}{_KEY}"),
    ("r2", rf"https://(?P<bucket>[a-z0-9\-]+)\.{_R2_HOST}{_KEY}"),
    ("gs", rf"[gG][sS]://{_BUCKET}{_KEY}"),
    ("gs", rf"https://storage\.googleapis\.com/{_GCS_BUCKET}{_KEY}"),
    ("gs", rf"https://{_GCS_BUCKET}\.storage\.googleapis\.com{_KEY}"),
    ("azure", rf"abfss?://(?P<bucket>[a-z0-9\-]+)@{_AZURE_HOST}{_KEY}"),
    ("azure", rf"https://{_AZURE_HOST}/(?P<bucket>[a-z0-9\-]+){_KEY}"),
    ("file", r"file://(?P<key>.*)"),
    ("file", r"file:/(?P<key>.*)"),
    ("file", r"/(?P<key>.*)"),
    ("memory", r"memory://(?P<bucket>[A-Za-z0-9._\-]+)"),
)
_R2_ENDPOINT = rf"https://{_R2_HOST}(?::443)?"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointUrl:
    """The location of a tree of checkpoints; `str()` returns a URL that parses to an equal value.

    Attributes:
        bucket: the bucket, container or memory store; "" for local disk.
        key_prefix: raw, without `/` at either end; for local disk the directory without its first
            `/`. "" for the whole bucket.
        region, endpoint: of S3; None = from the client's own configuration.
        account: of R2 or Azure.
        jurisdiction: of R2.
    """

    backend: Backend
    bucket: str = ""
    key_prefix: str = ""
    region: str | None = None
    endpoint: str | None = None
    account: str | None = None
    jurisdiction: str | None = None

    def __str__(self) -> str:
        return _BASES[self.backend](self) + (f"/{self.key_prefix}" if self.key_prefix else "")

    @property
    def directory(self) -> str:
        """The absolute directory of a URL on local disk."""
        return f"/{self.key_prefix}"

    @property
    def stored_root(self) -> str:
        """The bucket and the encoded key prefix, with which the keys of objects begin."""
        if not self.key_prefix:
            return self.bucket
        return f"{self.bucket}/{encode_path(self.key_prefix)}"


def parse_url(text: str) -> CheckpointUrl:
    """Parse a checkpoint URL in any form that Arroyo accepts, or `memory://name` for tests.

    Raises:
        InputError: it has no accepted form; the error does not repeat possible secrets in it.

    Source: crates/arroyo-storage/src/lib.rs, `BackendConfig::parse_url` (arroyo-state.md 10.2).
    Differs: refuses `..` in a path and the root of the file system, as likely mistakes, and a query
        or a user, which may be secrets and must not be in a URL that is stored and displayed.
    """
    for backend, form in _FORMS:
        match = re.fullmatch(form, text, re.DOTALL)
        if match:
            return _built(text, backend, match.groupdict())
    raise _refused(text, "not a checkpoint URL")


def _built(text: str, backend: Backend, parts: dict[str, str | None]) -> CheckpointUrl:
    key = parts.pop("key", None) or ""
    # A directory may have a `?` in its name, but a `?` that `=` follows begins a URL's query.
    query = r"\?.*=" if backend == "file" else r"\?"
    if re.search(query, text, re.DOTALL):
        raise _refused(text, "a checkpoint URL must not contain a query or signature")
    if text.startswith("file://") and "@" in key.partition("/")[0]:
        raise _refused(text, "a file URL must not contain a user or host")
    segments = [segment for segment in key.split("/") if segment not in ("", ".")]
    if ".." in segments or "\0" in key:
        raise _refused(text, "a checkpoint URL must not contain '..' or NUL")
    if backend == "file" and not segments:
        raise _refused(text, "the root of the file system cannot be a checkpoint URL")
    if backend == "s3" and parts.get("endpoint"):
        host = re.fullmatch(_R2_ENDPOINT, parts["endpoint"] or "")
        if host:
            backend, parts = "r2", {"bucket": parts["bucket"], **host.groupdict()}
    return CheckpointUrl(
        backend=backend,
        bucket=parts.pop("bucket", None) or "",
        key_prefix="/".join(segments),
        **parts,
    )


def _refused(text: str, problem: str) -> InputError:
    step = f"use one of: {ACCEPTED_FORMS}"
    return InputError(problem, url=redact_url(text), next_step=step)


def _s3_base(url: CheckpointUrl) -> str:
    if url.endpoint:
        return f"s3::{url.endpoint}/{url.bucket}"
    if url.region:
        return f"https://s3.{url.region}.amazonaws.com/{url.bucket}"
    return f"s3://{url.bucket}"


def _r2_base(url: CheckpointUrl) -> str:
    if url.jurisdiction:
        host = f"{url.account}.{url.jurisdiction}.r2.cloudflarestorage.com"
        return f"https://{host}/{url.bucket}"
    return f"r2://{url.account}@{url.bucket}" if url.account else f"r2://{url.bucket}"


def _gs_base(url: CheckpointUrl) -> str:
    # gs:// does not accept underscores; the https forms do.
    scheme = "https://storage.googleapis.com" if "_" in url.bucket else "gs:/"
    return f"{scheme}/{url.bucket}"


_BASES: dict[Backend, Callable[[CheckpointUrl], str]] = {
    "s3": _s3_base,
    "r2": _r2_base,
    "gs": _gs_base,
    "azure": lambda url: f"abfss://{url.bucket}@{url.account}.dfs.core.windows.net",
    "file": lambda url: "file://",
    "memory": lambda url: f"memory://{url.bucket}",
}
