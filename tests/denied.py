"""A store that denies one prefix."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from arroyo_dagster.errors import StorageError
from arroyo_dagster.state import ObjectStore
from tests.stores import Wrapper

T = TypeVar("T")

READS = frozenset({"read", "read_range", "head"})
ALL = READS | {"list", "list_dir"}


class Denied(Wrapper):
    """A store that answers 403 below one prefix.

    Args:
        verbs: the methods that are denied, READS or ALL.
    """

    def __init__(self, store: ObjectStore, prefix: str, verbs: frozenset[str]) -> None:
        super().__init__(store)
        self.prefix, self.verbs = prefix, verbs

    def _call(self, verb: str, path: str, action: Callable[[], T], data: bytes = b"") -> T:
        if verb in self.verbs and f"{path}/".startswith(f"{self.prefix}/"):
            raise StorageError("permission denied (403)", retryable=False, path=path, status=403)
        return action()
