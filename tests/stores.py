"""What stores are wrapped in and answer with, in one place for all tests."""

from __future__ import annotations

from arroyo_dagster.state.storage import Counting
from arroyo_dagster.state.storage.arroyo.sqlite import ArroyoDatabase
from arroyo_dagster.state.storage.local_disk import LocalDiskStore
from arroyo_dagster.state.storage.names import encode_path
from arroyo_dagster.state.storage.store import DeleteOutcome, Listing, ObjectInfo
from arroyo_dagster.state.storage.urls import parse_url
from arroyo_dagster.state.storage.wrappers import MUTATING, Wrapper

__all__ = [
    "MUTATING", "ArroyoDatabase", "Counting", "DeleteOutcome", "Listing", "LocalDiskStore",
    "ObjectInfo", "Wrapper", "encode_path", "parse_url",
]  # fmt: skip
