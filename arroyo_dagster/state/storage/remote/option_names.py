"""Whether the client of a store knows the names of its options; opens no connection."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.storage.remote.credentials import client_of_environment
from arroyo_dagster.state.storage.remote.options import Patience, chosen_client, normalised
from arroyo_dagster.state.storage.urls import CheckpointUrl

_S3 = frozenset({"access_key_id", "secret_access_key", "session_token", "profile"})
_GCS = frozenset({"service_account_key", "service_account", "bearer_token"})
_AZURE = frozenset(
    {"account_name", "account_key", "sas_key", "client_id", "client_secret", "tenant_id"}
)
_OWN = {"s3": _S3, "r2": _S3 | {"account"}, "gs": _GCS, "azure": _AZURE}
"""Those of the table in `options.py` that only some stores have."""

_EVERYWHERE = frozenset({"skip_signature", "endpoint", "client", *Patience.__slots__})
_TRANSLATED = frozenset(
    {"client_kwargs", "config_kwargs", "s3_additional_kwargs", "connection_string"}
    | {"session_kwargs", "application_credentials"}
)
"""For both clients: who does not support one says so where the store is opened."""

_OF_FSSPEC = frozenset(
    {"use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache", "batch_size"}
)
_FILESYSTEMS = {
    "s3": ("s3fs", "S3FileSystem"),
    "r2": ("s3fs", "S3FileSystem"),
    "gs": ("gcsfs", "GCSFileSystem"),
    "azure": ("adlfs", "AzureBlobFileSystem"),
}
_OBSTORES = {"s3": "S3Store", "r2": "S3Store", "gs": "GCSStore", "azure": "AzureStore"}


def check_option_names(url: CheckpointUrl, options: Mapping[str, Any]) -> None:
    """Refuse options that the client of a remote store does not know. Values are not looked at.

    Raises:
        InputError: an option is unknown; names it, and the known one that is most like it.
    """
    if url.backend not in _OWN:
        return
    client = chosen_client(dict(options), client_of_environment(), str(url))
    names = {option: next(iter(normalised({option: None}, url.backend))) for option in options}
    own = _EVERYWHERE | _OWN[url.backend] | ({"region"} if url.backend in ("s3", "r2") else set())
    left = {option: name for option, name in names.items() if name not in own | _TRANSLATED}
    if not left:
        return
    if client == "obstore":
        unknown, others = _unknown_to_obstore(url.backend, left), frozenset[str]()
    else:
        others = _parameters(url.backend)
        unknown = [option for option, name in left.items() if others and name not in others]
    if unknown:
        close = difflib.get_close_matches(left[unknown[0]], sorted(own | others), n=1)
        raise InputError(
            f"{client} has no such option: {', '.join(unknown)}",
            url=str(url),
            next_step=f"did you mean {close[0]}?" if close else "correct or remove it",
        )


def _unknown_to_obstore(backend: str, names: Mapping[str, str]) -> list[str]:
    """Return the given names that obstore refuses; it reads names before values."""
    from obstore import exceptions, store

    def is_unknown(name: str) -> bool:
        try:
            getattr(store, _OBSTORES[backend])("bucket", config={name: ""})
        except exceptions.UnknownConfigurationKeyError:
            return True
        except (exceptions.BaseError, ValueError, TypeError):
            return False  # the name is known
        return False

    return [option for option, name in names.items() if is_unknown(name)]


def _parameters(backend: str) -> frozenset[str]:
    """Return the options of a filesystem; none if its package is not installed."""
    module, name = _FILESYSTEMS[backend]
    try:
        filesystem = getattr(importlib.import_module(module), name)
    except ImportError:
        return frozenset()
    return _OF_FSSPEC | set(inspect.signature(filesystem.__init__).parameters) - {"self", "kwargs"}
