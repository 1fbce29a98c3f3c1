"""The hashes by which Arroyo routes keys to subtasks, of scalars and of columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arroyo_dagster.lazy import lazy_names

if TYPE_CHECKING:
    from arroyo_dagster.state.codec.hashing.routing import (
        HashVariant,
        hash_key,
        hash_keys,
        key_hashes,
        matching_variants,
    )

__all__ = ["HashVariant", "hash_key", "hash_keys", "key_hashes", "matching_variants"]

__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(__all__, "routing"))
