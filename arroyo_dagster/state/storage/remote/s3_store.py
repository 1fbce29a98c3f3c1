"""Objects on S3 and compatible servers, through s3fs."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.storage.failures import (
    explained,
    lasts,
    root_missing,
    translated,
    understood,
)
from arroyo_dagster.state.storage.names import listed_path, stored_prefix, stored_start
from arroyo_dagster.state.storage.remote.credentials import is_true, resolved
from arroyo_dagster.state.storage.remote.fsspec_store import FsspecStore, info_of
from arroyo_dagster.state.storage.remote.options import Patience, normalised, patience_of
from arroyo_dagster.state.storage.store import (
    CHUNK_BYTES,
    DeleteOutcome,
    Listing,
    ObjectInfo,
    read_in_chunks,
)
from arroyo_dagster.state.storage.urls import CheckpointUrl

_KEYS_PER_DELETE = 1000
_PARTS = 10_000
_DELETE_PAUSES_SECONDS = (0.1, 0.4, 1.2)


class S3Store(FsspecStore):
    """An `ObjectStore` on S3, R2 or another compatible server.

    Listings are read page by page and can begin after a name; deletes take 1000 keys per request
    and report each failure. fsspec's general calls support neither.

    Args:
        url: an S3 or R2 URL; its region, endpoint and account take precedence over `options`.
        options: by the names of `options.py`, or as `s3fs.S3FileSystem` accepts them.

    Raises:
        InputError: an R2 URL without an account.
    """

    def __init__(self, url: CheckpointUrl, options: Mapping[str, Any] | None = None) -> None:
        words = functools.partial(s3fs_options, url)
        words(options or {})
        super().__init__("s3", url.stored_root, url=str(url), options=options, words=words)
        self._bucket, _, prefix = self._root.partition("/")
        self._prefix = f"{prefix}/" if prefix else ""

    @property
    def filesystem(self) -> Any:
        """The filesystem of s3fs; see `FsspecStore.filesystem`."""
        filesystem = super().filesystem
        filesystem.retries = tries_of_s3fs(self._options)
        return filesystem

    def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Iterate over all objects below a directory; see `ObjectStore.list`."""
        below, after = stored_prefix(prefix), stored_start(start_after)
        empty = True
        for page in self._pages(below, after):
            for info in page.get("Contents", ()):
                empty = False
                # Some consoles mark a directory by a key equal to the prefix.
                if info["Key"] != self._prefix + below:
                    yield self._listed(info)
        if empty:
            self._require_root()

    def list_dir(self, prefix: str = "") -> Listing:
        """List one level; see `ObjectStore.list_dir`."""
        below = stored_prefix(prefix)
        objects: list[ObjectInfo] = []
        prefixes: list[StatePath] = []
        for page in self._pages(below, "", Delimiter="/"):
            infos = (obj for obj in page.get("Contents", ()) if obj["Key"] != self._prefix + below)
            objects.extend(map(self._listed, infos))
            for item in page.get("CommonPrefixes", ()):
                stored = item["Prefix"].removeprefix(self._prefix).removesuffix("/")
                prefixes.append(listed_path(stored))
        if not objects and not prefixes:
            self._require_root()
        return Listing(objects=tuple(objects), prefixes=tuple(prefixes))

    def delete_many(self, paths: Iterable[StatePath]) -> DeleteOutcome:
        """Delete objects, 1000 per request; see `ObjectStore.delete_many`.

        Keys that the store fails to delete are retried a few times, within two seconds.
        """
        keys = {self._key(path).removeprefix(f"{self._bucket}/"): path for path in paths}
        deleted: list[StatePath] = []
        failed: dict[StatePath, str] = {}
        waiting = iter(keys)
        while batch := list(itertools.islice(waiting, _KEYS_PER_DELETE)):
            problems = self._delete_patiently(batch)
            for key in batch:
                if key in problems:
                    failed[keys[key]] = problems[key]
                else:
                    deleted.append(keys[key])
        return DeleteOutcome(deleted=tuple(deleted), failed=failed)

    def keeps_versions(self) -> bool:
        """Whether the bucket keeps replaced or deleted objects as older versions.

        A bucket whose versioning is suspended keeps those that it has.

        Raises:
            StorageError: it cannot be asked; needs the right `s3:GetBucketVersioning`.
        """
        with translated(self.url):
            answer = self.filesystem.call_s3("get_bucket_versioning", Bucket=self._bucket)
        return answer.get("Status") in ("Enabled", "Suspended")

    def _create_multipart(self, source: StatePath, target: StatePath, size_bytes: int) -> bool:
        """Create a large object by a multipart upload of ranges of another one.

        The last request has the condition. For servers that ignore it, the object is checked just
        before, so that only the time between the two requests is unprotected.
        """
        where = {"Bucket": self._bucket, "Key": self._key(target).removeprefix(f"{self._bucket}/")}
        with translated(self.url, target):
            upload = self.filesystem.call_s3("create_multipart_upload", **where)
            where["UploadId"] = upload["UploadId"]
            try:
                part_bytes = max(CHUNK_BYTES, -(-size_bytes // _PARTS))
                parts = []
                for number, data in enumerate(read_in_chunks(self, source, part_bytes), start=1):
                    sent = self.filesystem.call_s3(
                        "upload_part", **where, PartNumber=number, Body=data
                    )
                    parts.append({"PartNumber": number, "ETag": sent["ETag"]})
                created = self.head(target) is None and self._completed(target, where, parts)
            except BaseException:
                self._give_up(where)
                raise
            if not created:
                self._give_up(where)
            return created

    def _completed(
        self, target: StatePath, where: Mapping[str, str], parts: Sequence[Mapping[str, Any]]
    ) -> bool:
        try:
            self.filesystem.call_s3(
                "complete_multipart_upload",
                **where,
                MultipartUpload={"Parts": parts},
                IfNoneMatch="*",
            )
        except Exception as error:
            # A repeated request finds no upload if the first one succeeded and its answer was lost.
            ended = isinstance(error, FileNotFoundError) or understood(error).code == "NoSuchUpload"
            if self._means_exists(error) or (ended and self.head(target) is not None):
                return False
            raise
        return True

    def _give_up(self, where: Mapping[str, str]) -> None:
        # An unfinished upload costs money and is in no listing; a failure to abort is ignored.
        with contextlib.suppress(Exception):
            self.filesystem.call_s3("abort_multipart_upload", **where)

    def _delete_patiently(self, keys: Sequence[str]) -> dict[str, str]:
        """Delete up to 1000 keys; return those that may still exist, with the reason."""
        failed: dict[str, str] = {}
        for pause in (*_DELETE_PAUSES_SECONDS, None):
            try:
                failures = self._delete_batch(keys)
            except Exception as error:
                # The client has already retried the whole request several times.
                return failed | dict.fromkeys(keys, explained(error)[0])
            retried = [key for key, reason in failures.items() if not lasts(reason)]
            if pause is None or not retried:
                return failed | failures
            failed |= {key: failures[key] for key in failures if key not in retried}
            keys = retried
            time.sleep(pause)
        return failed

    def _delete_batch(self, keys: Sequence[str]) -> dict[str, str]:
        """Delete keys with one request; return those that it does not report as deleted."""
        request = {"Objects": [{"Key": key} for key in keys]}
        answer = self.filesystem.call_s3("delete_objects", Bucket=self._bucket, Delete=request)
        errors = {item.get("Key"): item for item in answer.get("Errors", ())}
        deleted = {item.get("Key") for item in answer.get("Deleted", ())}
        deleted.update(key for key, item in errors.items() if item.get("Code") == "NoSuchKey")
        return {
            key: f"{errors[key].get('Code', 'error')}: {errors[key].get('Message', '')}"
            if key in errors
            else "the store's answer does not name this key"
            for key in keys
            if key not in deleted
        }

    def _pages(self, below: str, after: str, **more: str) -> Iterator[Mapping[str, Any]]:
        request = {"Bucket": self._bucket, "Prefix": self._prefix + below, **more}
        if after:
            request["StartAfter"] = self._prefix + after
        while True:
            with translated(self.url, below or None):
                try:
                    page = self.filesystem.call_s3("list_objects_v2", **request)
                except FileNotFoundError as error:
                    raise root_missing(self.url) from error
            yield page
            if not page.get("IsTruncated"):
                return
            request["ContinuationToken"] = page["NextContinuationToken"]

    def _listed(self, found: Mapping[str, Any]) -> ObjectInfo:
        return info_of(found["Key"].removeprefix(self._prefix), {**found, "size": found["Size"]})

    def _require_root(self) -> None:
        # Without a prefix, the empty listing has proved that the bucket exists.
        if not self._prefix:
            return
        with translated(self.url):
            page = self.filesystem.call_s3(
                "list_objects_v2", Bucket=self._bucket, Prefix=self._prefix, MaxKeys=1
            )
        if not page.get("Contents"):
            raise root_missing(self.url)

    def _may_be_probed(self, error: Exception) -> bool:
        failure = understood(error)
        return failure.status == 416 or failure.code == "InvalidRange"

    def _means_exists(self, error: Exception) -> bool:
        # Only AWS names the failed condition, from which s3fs derives a FileExistsError.
        answer = getattr(error.__cause__, "response", None) or {}
        code = answer.get("Error", {}).get("Code")
        return isinstance(error, FileExistsError) or code in ("PreconditionFailed", "412")


# ---- conversion of the options in `options.py` to those of s3fs, gcsfs and adlfs -----------------

# Retries multiply: botocore makes this many tries for each of s3fs's own.
_BOTOCORE_TRIES = 3
_S3FS_TRIES = 2
# A server that is silent for this long hangs: botocore's timeout is between two reads only.
_SILENCE_SECONDS = 10.0

_S3FS_NAMES = {
    "access_key_id": "key",
    "secret_access_key": "secret",
    "session_token": "token",
    "endpoint": "endpoint_url",
}
_ADLFS_NAMES = {"sas_key": "sas_token"}


def s3fs_options(url: CheckpointUrl, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `s3fs.S3FileSystem`.

    Raises:
        InputError: an R2 URL without an account; an option with an invalid value.
    """
    settings = normalised(options, url.backend)
    patience = patience_of(settings, str(url))
    merged = resolved(url, settings)
    region = merged.pop("region", None)
    if "skip_signature" in merged:
        merged["anon"] = is_true(merged.pop("skip_signature"))
    named = {_S3FS_NAMES.get(name, name): value for name, value in merged.items()}
    has_endpoint = "endpoint" in merged
    from botocore.config import Config

    tries = min(_BOTOCORE_TRIES, 1 + patience.max_retries)
    config: dict[str, Any] = {
        "retries": {"mode": "standard", "total_max_attempts": tries},
        "connect_timeout": patience.connect_timeout_seconds,
        "read_timeout": min(patience.request_timeout_seconds, _SILENCE_SECONDS),
    }
    if has_endpoint:
        config["s3"] = {"addressing_style": "path"}
        if "response_checksum_validation" in Config.OPTION_DEFAULTS:
            # gofakes3 sends the checksum of the whole object with a part of it, versitygw the
            # checksum of another version with an object that is being replaced.
            config["response_checksum_validation"] = "when_required"
    named["config_kwargs"] = {**config, **named.get("config_kwargs", {})}
    if region:
        named["client_kwargs"] = {**named.get("client_kwargs", {}), "region_name": region}
    named.setdefault("session", _session(named.get("profile")))
    return named


@functools.cache
def _session(profile: str | None) -> Any:
    """Return a session of aiobotocore that does not send `Expect: 100-continue`.

    aiohttp waits for the answer to that without limit: none of its timeouts begins before the body
    is sent. There is one session per profile, since s3fs keeps a filesystem for each session.
    """
    from aiobotocore.session import AioSession
    from botocore.handlers import add_expect_header

    session = AioSession(profile=profile)
    session.unregister("before-call.s3", add_expect_header)
    return session


def tries_of_s3fs(options: Mapping[str, Any]) -> int:
    """Return how many times s3fs itself tries a request that failed in botocore."""
    return min(_S3FS_TRIES, 1 + int(options.get("max_retries", Patience().max_retries)))


def gcsfs_options(url: CheckpointUrl, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `gcsfs.GCSFileSystem`.

    Raises:
        InputError: the service account key is not JSON, or there is a bearer token.
    """
    merged = _for_others(url, options)
    key = merged.pop("service_account_key", None)
    token = merged.pop("service_account", None) or merged.pop("application_credentials", None)
    if "bearer_token" in merged:
        # gcsfs validates it at Google with a URL that errors and logs then contain.
        raise InputError(
            "gcsfs does not keep a bearer token secret",
            url=str(url),
            next_step="leave out client='fsspec', or give 'service_account'",
        )
    if key is not None and token is None:
        token = _parsed_key(url, key)
    if is_true(merged.pop("skip_signature", False)):
        token = "anon"
    if token is not None:
        merged.setdefault("token", token)
    if "endpoint" in merged:
        merged["endpoint_url"] = merged.pop("endpoint")
    return merged


def adlfs_options(url: CheckpointUrl, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `adlfs.AzureBlobFileSystem`."""
    merged = _for_others(url, options)
    if "skip_signature" in merged:
        merged["anon"] = is_true(merged.pop("skip_signature"))
    endpoint, key = merged.pop("endpoint", None), merged.get("account_key")
    if endpoint and key:
        # adlfs supports an endpoint other than Azure's only in a connection string.
        merged["connection_string"] = (
            f"DefaultEndpointsProtocol={endpoint.partition(':')[0]};"
            f"AccountName={merged['account_name']};AccountKey={key};BlobEndpoint={endpoint};"
        )
    return {_ADLFS_NAMES.get(name, name): value for name, value in merged.items()}


def _for_others(url: CheckpointUrl, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merged options without timeouts: gcsfs and adlfs use their own."""
    settings = normalised(options, url.backend)
    patience_of(settings, str(url))
    return resolved(url, settings)


def _parsed_key(url: CheckpointUrl, key: object) -> Any:
    try:
        return key if isinstance(key, dict) else json.loads(str(key))
    except ValueError:
        # The text is a secret, so the error does not even contain the position.
        raise InputError(
            "the service account key is not JSON",
            url=str(url),
            next_step="put the complete text of the key file in GOOGLE_SERVICE_ACCOUNT_KEY",
        ) from None
