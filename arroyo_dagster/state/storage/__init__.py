"""Bytes at a path, independent of their meaning: stores, their URLs and wrappers."""

from __future__ import annotations

from arroyo_dagster.state.storage.memory import MemoryStore
from arroyo_dagster.state.storage.names import StoredName, decode_path, encode_path
from arroyo_dagster.state.storage.remote.open import configure, get_storage_provider, open_store
from arroyo_dagster.state.storage.store import (
    DeleteOutcome,
    Listing,
    ObjectInfo,
    ObjectStore,
    read_many,
)
from arroyo_dagster.state.storage.urls import CheckpointUrl, parse_url
from arroyo_dagster.state.storage.wrappers import (
    Counting,
    Crash,
    FaultInjecting,
    Slow,
    WriteProtected,
)

__all__ = [
    "CheckpointUrl",
    "Counting",
    "Crash",
    "DeleteOutcome",
    "FaultInjecting",
    "Listing",
    "MemoryStore",
    "ObjectInfo",
    "ObjectStore",
    "Slow",
    "StoredName",
    "WriteProtected",
    "configure",
    "decode_path",
    "encode_path",
    "get_storage_provider",
    "open_store",
    "parse_url",
    "read_many",
]
