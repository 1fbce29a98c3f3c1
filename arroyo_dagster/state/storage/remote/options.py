"""The options of a remote store, with the same names for both clients.

| Option | Meaning |
|---|---|
| `client` | `obstore` (default) or `fsspec` |
| `access_key_id`, `secret_access_key`, `session_token`, `profile` | S3 and R2 |
| `service_account_key` (JSON), `service_account` (file), `bearer_token` | GCS |
| `account_name`, `account_key`, `sas_key`, `client_id`, `client_secret`, `tenant_id` | Azure |
| `account` | R2, if the URL does not contain it |
| `skip_signature` | send requests without credentials: a public bucket |
| `region`, `endpoint` | location of the store; the URL takes precedence |
| `max_retries`, `retry_timeout_seconds` | limits of the retries of a request; default: 10, 20 |
| `backoff_seconds`, `max_backoff_seconds` | first and longest pause of retries; default: 0.1, 5 |
| `connect_timeout_seconds`, `request_timeout_seconds` | default: 5, 30 |

The prefixes `aws_`, `google_` and `azure_` are removed, so Arroyo's own names work. Any other
option is passed to the client: obstore's configuration keys, or those of s3fs, gcsfs or adlfs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.storage.urls import Backend

Client = Literal["obstore", "fsspec"]

_CLIENTS = ("obstore", "fsspec")
_PREFIXES = ("aws_", "google_", "azure_storage_", "azure_")
# The names of fsspec's filesystems and delta-rs.
_ALIASES = {
    "key": "access_key_id",
    "secret": "secret_access_key",
    "token": "session_token",
    "anon": "skip_signature",
    "endpoint_url": "endpoint",
    "endpoint_url_s3": "endpoint",
    "base_url": "endpoint",
    "default_region": "region",
    "sas_token": "sas_key",
    "access_key": "account_key",
}
_S3_ONLY = frozenset({"key", "secret", "token"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """The time and retry limits of one call; all in seconds except the number of retries."""

    max_retries: int = 10
    retry_timeout_seconds: float = 20.0
    backoff_seconds: float = 0.1
    max_backoff_seconds: float = 5.0
    connect_timeout_seconds: float = 5.0
    request_timeout_seconds: float = 30.0


def patience_of(options: dict[str, Any], url: str) -> Patience:
    """Remove the limits of a call from `options` and return them.

    Raises:
        InputError: a value is not a number of zero or more.
    """
    numbers = {name: _number(options.pop(name)) for name in Patience.__slots__ if name in options}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            raise InputError(
                f"the option {name!r} must be a number of zero or more, not {value!r}",
                url=url,
                next_step="correct or remove the option",
            )
    return Patience(**numbers)


def _number(value: Any) -> Any:
    """Parse a number in a text, as in environment variables; return other values unchanged."""
    try:
        number = float(value) if isinstance(value, str) else value
    except ValueError:
        return value
    if not isinstance(number, float) or not math.isfinite(number):
        return value
    return int(number) if number.is_integer() else number


def normalised(options: Mapping[str, Any], backend: Backend) -> dict[str, Any]:
    """Return the options with one name for each; unknown options are unchanged.

    Raises:
        InputError: two names of the same option are given.
    """
    named: dict[str, Any] = {}
    for spelling, value in options.items():
        name = spelling.lower()
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        if name not in _S3_ONLY or backend in ("s3", "r2"):
            name = _ALIASES.get(name, name)
        if name in named:
            raise InputError(
                f"the option {name!r} is given twice: as {spelling!r} and under another name",
                next_step="remove one of them",
            )
        named[name] = value
    return named


def chosen_client(options: dict[str, Any], default: str | None, url: str) -> Client:
    """Remove the client's name from `options` and return it.

    Args:
        default: used without this option; None: obstore.

    Raises:
        InputError: there is no such client.
    """
    name = options.pop("client", None) or default or "obstore"
    if name not in _CLIENTS:
        raise InputError(
            f"there is no client {name!r}",
            url=url,
            next_step=f"choose one of: {', '.join(_CLIENTS)}",
        )
    return cast(Client, name)
