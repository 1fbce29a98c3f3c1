"""The options of a remote store, in one set of words for both clients.

| Option | Means |
|---|---|
| `client` | `obstore` (unless said otherwise) or `fsspec` |
| `access_key_id`, `secret_access_key`, `session_token`, `profile` | S3 and R2 |
| `service_account_key` (JSON), `service_account` (file), `bearer_token` | GCS |
| `account_name`, `account_key`, `sas_key`, `client_id`, `client_secret`, `tenant_id` | Azure |
| `account` | R2, where the URL does not say it |
| `skip_signature` | ask without credentials: a public bucket |
| `region`, `endpoint` | where the store is; the URL wins |
| `max_retries`, `retry_timeout_seconds` | a request is tried again so often and so long: 10, 20 |
| `backoff_seconds`, `max_backoff_seconds` | first and longest wait between two tries: 0.1, 5 |
| `connect_timeout_seconds`, `request_timeout_seconds` | 5, 30 |

`aws_`, `google_` and `azure_` before a name are left out, so Arroyo's own names work. Any other
option goes to the client as it is: obstore's configuration keys, or what s3fs, gcsfs or adlfs take.
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
# What fsspec's filesystems and delta-rs call the same things.
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
    """How long one call goes on before it fails; all in seconds but the number of retries."""

    max_retries: int = 10
    retry_timeout_seconds: float = 20.0
    backoff_seconds: float = 0.1
    max_backoff_seconds: float = 5.0
    connect_timeout_seconds: float = 5.0
    request_timeout_seconds: float = 30.0


def patience_of(options: dict[str, Any], url: str) -> Patience:
    """Take out of `options` how long a call may go on.

    Raises:
        InputError: a value is not a number of zero or more.
    """
    given = {name: _number(options.pop(name)) for name in Patience.__slots__ if name in options}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            raise InputError(
                f"the option {name!r} must be a number of zero or more, not {value!r}",
                url=url,
                next_step="correct or remove the option",
            )
    return Patience(**given)


def _number(value: Any) -> Any:
    """A number that is written as text, as environment variables are; others as they are."""
    try:
        found = float(value) if isinstance(value, str) else value
    except ValueError:
        return value
    if not isinstance(found, float) or not math.isfinite(found):
        return value
    return int(found) if found.is_integer() else found


def normalised(options: Mapping[str, Any], backend: Backend) -> dict[str, Any]:
    """Give the options under one name each; those nobody knows stay as they are.

    Raises:
        InputError: two of them say the same thing in different words.
    """
    found: dict[str, Any] = {}
    for given, value in options.items():
        name = given.lower()
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        if name not in _S3_ONLY or backend in ("s3", "r2"):
            name = _ALIASES.get(name, name)
        if name in found:
            raise InputError(
                f"the option {name!r} is given twice: as {given!r} and under another name",
                next_step="remove one of them",
            )
        found[name] = value
    return found


def chosen_client(options: dict[str, Any], default: str | None, url: str) -> Client:
    """Take out of `options` which client to use.

    Args:
        default: where the options do not say; None: obstore.

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
