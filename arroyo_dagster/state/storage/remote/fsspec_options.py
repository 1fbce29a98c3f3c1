"""Conversion of the options in `options.py` to those of s3fs, gcsfs and adlfs."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.storage.remote.credentials import is_true, resolved
from arroyo_dagster.state.storage.remote.options import Patience, normalised, patience_of
from arroyo_dagster.state.storage.urls import CheckpointUrl

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
