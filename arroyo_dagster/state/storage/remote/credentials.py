"""Credentials, endpoint, region and client of remote stores from the environment.

Each ecosystem's own client reads its own variables and files. This module adds only what one of our
two clients would miss, under the names that Arroyo reads (arroyo-state.md 10.2).
"""

from __future__ import annotations

import datetime as dt
import os
import re
from collections.abc import Mapping
from typing import Any, TypedDict

from arroyo_dagster.errors import InputError
from arroyo_dagster.redaction import redact_url, register_options, register_secrets
from arroyo_dagster.state.storage.urls import CheckpointUrl

CLIENT_VARIABLE = "ARROYO_DAGSTER_STORE_CLIENT"

_R2_KEYS = {
    "access_key_id": "R2_ACCESS_KEY_ID",
    "secret_access_key": "R2_SECRET_ACCESS_KEY",
}
_AWS = {
    "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AWS_ENDPOINT_URL"),
    "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    "skip_signature": ("AWS_SKIP_SIGNATURE",),
}
_GOOGLE = {
    "service_account_key": ("GOOGLE_SERVICE_ACCOUNT_KEY",),
    "service_account": ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH"),
    "skip_signature": ("GOOGLE_SKIP_SIGNATURE",),
    "endpoint": ("GOOGLE_BASE_URL",),
}
_AZURE = {
    "account_key": ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY"),
    "sas_key": ("AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_SAS_TOKEN"),
    "client_id": ("AZURE_STORAGE_CLIENT_ID", "AZURE_CLIENT_ID"),
    "client_secret": ("AZURE_STORAGE_CLIENT_SECRET", "AZURE_CLIENT_SECRET"),
    "tenant_id": ("AZURE_STORAGE_TENANT_ID", "AZURE_TENANT_ID"),
    "skip_signature": ("AZURE_SKIP_SIGNATURE",),
    "endpoint": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_PLACE = frozenset({"endpoint", "region"})
CREDENTIALS = frozenset(
    {
        *("access_key_id", "secret_access_key", "session_token", "profile", "skip_signature"),
        *("service_account_key", "service_account", "application_credentials", "bearer_token"),
        *("account_key", "sas_key", "client_id", "client_secret", "tenant_id"),
    }
)
_AZURE_ACCOUNT = ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT")


class AwsKeys(TypedDict):
    """Keys for S3, and until when a client may use them before it requests them again."""

    access_key_id: str
    secret_access_key: str
    token: str | None
    expires_at: dt.datetime | None


def client_of_environment() -> str | None:
    """Return the client that ARROYO_DAGSTER_STORE_CLIENT names, or None."""
    return os.environ.get(CLIENT_VARIABLE) or None


def resolved(url: CheckpointUrl, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, completed from the URL and then from the environment.

    For endpoint and region, the URL takes precedence over the options, and those over the
    environment. The values are registered as secrets, except public ones.

    Args:
        options: by the names of `options.py`.

    Raises:
        InputError: an R2 URL without an account; an Azure URL of another account than the
            environment's; an endpoint with a user, a password or a query.
    """
    options_in_full = _resolved(url, options)
    register_options(options_in_full)
    endpoint = str(options_in_full.get("endpoint") or "")
    if redact_url(endpoint) != endpoint:
        raise InputError(
            "the endpoint of the store contains a user, a password or a query",
            url=str(url),
            endpoint=redact_url(endpoint),
            next_step="give it in the form http://HOST:PORT, and credentials as options or "
            "variables",
        )
    return options_in_full


def _resolved(url: CheckpointUrl, options: Mapping[str, Any]) -> dict[str, Any]:
    if url.backend == "r2":
        return _resolved_r2(url, dict(options))
    if url.backend == "gs":
        return _around(_GOOGLE, options)
    if url.backend == "azure":
        return _resolved_azure(url, dict(options))
    from_url = {"endpoint": url.endpoint, "region": url.region}
    return _around(_AWS, options) | {name: value for name, value in from_url.items() if value}


def _resolved_r2(url: CheckpointUrl, options: dict[str, Any]) -> dict[str, Any]:
    option = options.pop("account", None)
    account = url.account or option or os.environ.get("CLOUDFLARE_ACCOUNT_ID")
    if not account:
        raise InputError(
            "this R2 URL does not name its account",
            url=str(url),
            next_step="write r2://account@bucket/key, give the option 'account', "
            "or set CLOUDFLARE_ACCOUNT_ID",
        )
    host = ".".join(filter(None, (account, url.jurisdiction)))
    keys = {}
    if not CREDENTIALS & options.keys():
        keys = {name: os.environ[key] for name, key in _R2_KEYS.items() if os.environ.get(key)}
    place = {"endpoint": f"https://{host}.r2.cloudflarestorage.com", "region": "auto"}
    return keys | options | place


def _resolved_azure(url: CheckpointUrl, options: dict[str, Any]) -> dict[str, Any]:
    """Resolve Azure options. Differs: Arroyo always takes the account from the environment."""
    elsewhere = next((os.environ[name] for name in _AZURE_ACCOUNT if os.environ.get(name)), None)
    if elsewhere and elsewhere != url.account and "account_name" not in options:
        raise InputError(
            f"the URL names the account {url.account!r}, the environment {elsewhere!r}: Arroyo "
            "uses the latter, so this may be another store than the one it wrote to",
            url=str(url),
            next_step="make AZURE_STORAGE_ACCOUNT_NAME and the URL agree, or give the option "
            "'account_name'",
        )
    return {"account_name": url.account} | _around(_AZURE, options)


def _around(variables: Mapping[str, tuple[str, ...]], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, completed from the environment."""
    # Parts of credentials from different origins do not belong together.
    selected = _PLACE if CREDENTIALS & options.keys() else variables.keys()
    values = {
        option: next((os.environ[name] for name in names if os.environ.get(name)), None)
        for option, names in variables.items()
        if option in selected
    }
    return {option: value for option, value in values.items() if value is not None} | dict(options)


def is_true(value: object) -> bool:
    """Return whether an option or a variable has a true value."""
    return str(value).lower() in ("true", "1", "yes", "on", "y")


def check_sendable(keys: AwsKeys) -> AwsKeys:
    """Return keys that HTTP headers can contain: obstore panics on others, and prints them.

    Raises:
        InputError: the key's id or the session token is empty or has an invalid character.
    """
    for name, value in (("access key id", keys["access_key_id"]), ("session token", keys["token"])):
        if value is not None and not re.fullmatch(r"[\x21-\x7e]+", value):
            raise InputError(
                f"the {name} is empty, or contains a character that a header cannot carry",
                next_step="check its source, for example for a line break at its end",
            )
    return keys


class AwsChain:
    """Keys for S3 from the sources of the AWS tools: environment, profiles, roles, containers.

    Args:
        profile: of `~/.aws`; None: the one that AWS_PROFILE names, or the default one.

    Source: crates/arroyo-storage/src/aws.rs, which uses the AWS SDK's default chain.
    """

    # botocore renews credentials that expire sooner than this, so its keys live at least so long.
    _LIVES = dt.timedelta(minutes=8)

    def __init__(self, profile: str | None = None) -> None:
        import botocore.session

        self._session = botocore.session.Session(profile=profile)
        self._credentials = self._session.get_credentials()

    @property
    def region(self) -> str | None:
        """The region of the profile, if it has one."""
        region = self._session.get_config_variable("region")
        return str(region) if region else None

    @property
    def found(self) -> bool:
        """Whether there are credentials."""
        return self._credentials is not None

    def __call__(self) -> AwsKeys:
        """Return keys that are valid now."""
        frozen = self._credentials.get_frozen_credentials()
        register_secrets(frozen.secret_key, frozen.token)
        return AwsKeys(
            access_key_id=frozen.access_key,
            secret_access_key=frozen.secret_key,
            token=frozen.token,
            expires_at=dt.datetime.now(dt.UTC) + self._LIVES,
        )
