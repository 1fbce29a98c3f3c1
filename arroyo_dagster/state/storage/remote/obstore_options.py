"""Conversion of the options in `options.py` to those of obstore."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from arroyo_dagster.errors import InputError, StorageError
from arroyo_dagster.state.storage.remote.credentials import (
    AwsChain,
    AwsKeys,
    check_sendable,
    is_true,
    resolved,
)
from arroyo_dagster.state.storage.remote.options import Patience, normalised, patience_of
from arroyo_dagster.state.storage.urls import CheckpointUrl

# Options that only s3fs, gcsfs or adlfs support.
_FSSPEC_ONLY = ("config_kwargs", "s3_additional_kwargs", "connection_string", "session_kwargs")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """The options with which one of obstore's stores is opened.

    Attributes:
        config: obstore's configuration keys.
        provider: returns credentials; None: obstore finds them.
    """

    config: Mapping[str, Any] = field(repr=False)
    patience: Patience
    provider: Callable[[], AwsKeys] | None = None


class GivenKeys:
    """Given keys, to which obstore cannot add any from the environment."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._keys = AwsKeys(
            access_key_id=config.pop("access_key_id"),
            secret_access_key=config.pop("secret_access_key"),
            token=config.pop("session_token", None),
            expires_at=None,
        )

    def __call__(self) -> AwsKeys:
        """Return the keys."""
        return self._keys


def check_options(url: CheckpointUrl, options: Mapping[str, Any]) -> None:
    """Refuse invalid options, as far as they can be checked before the store is opened.

    Raises:
        InputError: an option has an invalid value, or there is no account for the URL.
    """
    settings = _without_client_kwargs(url, normalised(options, url.backend))
    patience_of(settings, str(url))
    resolved(url, settings)


def obstore_options(url: CheckpointUrl, options: Mapping[str, Any]) -> RemoteOptions:
    """Return the options with which the store at `url` is opened.

    Raises:
        InputError: an option has an invalid value.
        StorageError: there are no credentials for S3.
    """
    settings = _without_client_kwargs(url, normalised(options, url.backend))
    patience = patience_of(settings, str(url))
    config = resolved(url, settings)
    if url.backend == "gs" and "endpoint" in config:
        config["base_url"] = config.pop("endpoint")
    provider = _s3(url, config) if url.backend in ("s3", "r2") else None
    return RemoteOptions(config=config, patience=patience, provider=provider)


def http_options(patience: Patience) -> dict[str, Any]:
    """Return the options of obstore's HTTP client."""
    return {
        "allow_http": True,  # as in Arroyo, for private servers; https stays https
        "connect_timeout": dt.timedelta(seconds=patience.connect_timeout_seconds),
        "timeout": dt.timedelta(seconds=patience.request_timeout_seconds),
    }


def retry_options(patience: Patience) -> dict[str, Any]:
    """Return the retry options of obstore."""
    return {
        "max_retries": int(patience.max_retries),
        "retry_timeout": dt.timedelta(seconds=patience.retry_timeout_seconds),
        "backoff": {
            "init_backoff": dt.timedelta(seconds=patience.backoff_seconds),
            "max_backoff": dt.timedelta(seconds=patience.max_backoff_seconds),
            "base": 2,
        },
    }


def _s3(url: CheckpointUrl, config: dict[str, Any]) -> Callable[[], AwsKeys] | None:
    """Complete the configuration for S3; return the provider of its keys."""
    if "endpoint" in config:
        # AWS_ENDPOINT_URL_S3 would take precedence over `endpoint`.
        config["aws_endpoint_url_s3"] = config["endpoint"]
        config.setdefault("virtual_hosted_style_request", False)
    profile = config.pop("profile", None)
    if "access_key_id" in config:
        keys = GivenKeys(config)
        check_sendable(keys())
        return keys
    if is_true(config.get("skip_signature", False)):
        return None
    chain = AwsChain(profile)
    if not chain.found:
        raise StorageError(
            "no usable credentials for this store: none in options, environment, ~/.aws or this "
            "machine's role",
            retryable=False,
            url=str(url),
            next_step="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, "
            "or AWS_SKIP_SIGNATURE=true for a public bucket",
        )
    check_sendable(chain())
    if chain.region:
        config.setdefault("region", chain.region)
    return chain


def _without_client_kwargs(url: CheckpointUrl, given: dict[str, Any]) -> dict[str, Any]:
    """Convert s3fs's option for the region; refuse options that only fsspec supports."""
    client = dict(given.pop("client_kwargs", None) or {})
    if "region_name" in client:
        given.setdefault("region", client.pop("region_name"))
    strange = [name for name in _FSSPEC_ONLY if name in given] + [*client]
    if strange:
        raise InputError(
            f"obstore has no such option: {', '.join(strange)}",
            url=str(url),
            next_step="remove it, or add the option client='fsspec', which supports it",
        )
    return given
