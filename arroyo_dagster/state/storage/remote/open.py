"""Opening the store at a URL; a process has one store per URL."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.storage.local_disk import LocalDiskStore
from arroyo_dagster.state.storage.memory import MemoryStore
from arroyo_dagster.state.storage.read_only import guarded, read_only_prefixes
from arroyo_dagster.state.storage.remote.credentials import client_of_environment
from arroyo_dagster.state.storage.remote.option_names import check_option_names
from arroyo_dagster.state.storage.remote.options import chosen_client
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.storage.urls import CheckpointUrl, parse_url
from arroyo_dagster.state.storage.wrappers import SeparateDeletes


def open_store(
    url: str | CheckpointUrl,
    *,
    options: Mapping[str, Any] | None = None,
    delete_options: Mapping[str, Any] | None = None,
    must_exist: bool = False,
) -> ObjectStore:
    """Open the store at `url`; nothing is written, nor read unless `must_exist`.

    Below the prefixes that `read_only` of the configuration file names, the store refuses changes.

    Args:
        options: for the client of a remote store, as listed in `options.py`; never displayed.
            Without them, the client finds credentials in its ecosystem's usual places. `client`
            selects `obstore` (the default) or `fsspec`; without this option, the environment
            variable ARROYO_DAGSTER_STORE_CLIENT does.
        delete_options: in the form of `options`, for a client that deletes; all other requests are
            sent with `options`, which then need no permission to delete. None = one client for all.
        must_exist: check that the store contains something at `url`.

    Raises:
        InputError: `url` is no checkpoint URL, a package it needs is not installed, or the
            configuration file cannot be read.
        NotFoundError: `must_exist` is set, and the root does not exist.
    """
    parsed = parse_url(url) if isinstance(url, str) else url
    store = _opened(parsed, dict(options or {}))
    if delete_options is not None:
        store = SeparateDeletes(store, _opened(parsed, dict(delete_options)))
    store = guarded(store, parsed, read_only_prefixes())
    if must_exist:
        store.list_dir()
    return store


def _opened(url: CheckpointUrl, options: dict[str, Any]) -> ObjectStore:
    if url.backend == "memory":
        return MemoryStore(url.bucket)
    if url.backend != "file":
        if options:
            check_option_names(url, options)
        client = chosen_client(options, client_of_environment(), str(url))
        # A client is loaded for the stores that need it: local disk needs none of them.
        if client == "obstore":
            from arroyo_dagster.state.storage.remote.obstore_store import ObstoreStore

            return ObstoreStore(url, options)
        from arroyo_dagster.state.storage.remote.through_fsspec import open_through_fsspec

        return open_through_fsspec(url, options)
    unknown = options.keys() - {"sync"}
    if unknown:
        raise InputError(
            f"local disk has no such option: {', '.join(sorted(unknown))}",
            url=str(url),
            next_step="remove it; the only option is 'sync'",
        )
    # Only explicit values disable syncs; a typing error must not.
    sync = str(options.get("sync", True)).lower() not in ("false", "0", "no", "off", "n")
    return LocalDiskStore(url, sync=sync)


class _Configured:
    """The stores of this process, and its default URL."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.stores: dict[str, ObjectStore] = {}
        self.options: dict[str, Mapping[str, Any]] = {}
        self.delete_options: dict[str, Mapping[str, Any] | None] = {}
        self.url: str | None = None

    def after_fork(self) -> None:
        # The parent may have held the lock, and no client survives a fork.
        self.lock = threading.Lock()
        self.stores = {}


_CONFIGURED = _Configured()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_CONFIGURED.after_fork)


def configure(
    url: str | None,
    *,
    options: Mapping[str, Any] | None = None,
    delete_options: Mapping[str, Any] | None = None,
) -> None:
    """Set the default URL of this process; None: no default URL.

    Args:
        options, delete_options: as in `open_store`, for every later use of this URL.

    Raises:
        InputError: `url` is no checkpoint URL; the previous one stays.
    """
    canonical = None if url is None else str(parse_url(url))
    with _CONFIGURED.lock:
        _CONFIGURED.url = canonical
        if canonical is not None:
            _CONFIGURED.options[canonical] = dict(options or {})
            _CONFIGURED.delete_options[canonical] = delete_options
            _CONFIGURED.stores.pop(canonical, None)


def get_storage_provider(url: str | None = None) -> ObjectStore:
    """Return the store at `url`, one instance per process; None: at the default URL.

    Raises:
        InputError: no URL is given or configured, or it is no checkpoint URL.

    Source: crates/arroyo-state/src/lib.rs, `get_storage_provider`.
    Differs: takes a URL, and this package never reads the environment to find one.
    """
    location = url if url is not None else _CONFIGURED.url
    if location is None:
        raise InputError(
            "no checkpoint URL is configured",
            next_step="give --url, set ARROYO__CHECKPOINT_URL, or call configure(url) first",
        )
    parsed = parse_url(location)
    canonical = str(parsed)
    with _CONFIGURED.lock:
        if canonical not in _CONFIGURED.stores:
            _CONFIGURED.stores[canonical] = open_store(
                parsed,
                options=_CONFIGURED.options.get(canonical),
                delete_options=_CONFIGURED.delete_options.get(canonical),
            )
        return _CONFIGURED.stores[canonical]
