"""Listings of all objects below a directory through obstore."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import obstore
from obstore import exceptions

from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.failures import root_missing, translated
from arroyo_dagster.state.storage.names import listed_path
from arroyo_dagster.state.storage.remote.fsspec_store import FsspecStore
from arroyo_dagster.state.storage.remote.obstore_listing import (
    ListingChunk,
    chunk_of_batch,
    described,
    fetched_ahead,
)
from arroyo_dagster.state.storage.store import ObjectInfo

UNLISTABLE = "there are names that obstore cannot list"
# Each chunk costs a thread switch, which CPython does every 5 ms only: so a chunk is a few pages.
_CHUNK = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class ListingWalk:
    """Lists objects of one store.

    Attributes:
        remote: gives the store of obstore, of this very process.
        base: what every name begins with: the key prefix of the root, with a slash; or nothing.
        twin_since: gives the fsspec store, for a reason.
    """

    remote: Callable[[], Any]
    url: str
    base: str
    twin_since: Callable[[str], FsspecStore]

    def objects(self, below: str, after: str, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects below a directory, in order of their names.

        Args:
            below, after: as stored; only names that begin with the one and follow the other.
            prefix: the directory, for the fsspec store that lists what obstore cannot.
        """
        last, empty = after, True
        try:
            for batch in fetched_ahead(self._batches(below, after, _CHUNK)):
                empty = False
                chunk = chunk_of_batch(batch, len(self.base))
                yield from self._described(chunk, below, after)
                last = chunk.names[-1]
        except (exceptions.InvalidPathError, ValueError) as error:
            start = listed_path(last) if last else None
            twin = self.twin_since(f"{UNLISTABLE}: {error}")
            yield from twin.list(prefix, start_after=start)
            return
        if empty:
            self.require_root()

    def _batches(self, below: str, after: str, size: int) -> Iterator[Any]:
        try:
            batches = obstore.list(
                self.remote(),
                f"{self.base}{below}".rstrip("/") or None,
                offset=f"{self.base}{after}" if after else None,
                chunk_size=size,
                return_arrow=True,
            )
            yield from batches
        except (exceptions.InvalidPathError, ValueError):
            raise
        except Exception as error:
            with translated(self.url, below or None):
                raise error

    def _described(self, chunk: ListingChunk, below: str, after: str) -> Sequence[ObjectInfo]:
        """Describe a chunk without markers and without names before those requested (Azure)."""
        if after or chunk.names[0] <= below:
            chunk = chunk.kept(lambda name: name.startswith(below) and name > after)
        # obstore lists a directory's marker `a/` as an object `a`; only empty objects are markers.
        empty = [name for name, size in zip(chunk.names, chunk.sizes, strict=True) if not size]
        missing = concurrently(self._is_missing, empty)
        markers = frozenset(name for name, lacks in zip(empty, missing, strict=True) if lacks)
        return described(chunk, markers)

    def _is_missing(self, name: str) -> bool:
        with translated(self.url):
            try:
                obstore.head(self.remote(), self.base + name)
            except FileNotFoundError:
                return True
            return False

    def require_root(self) -> None:
        """Check that the root exists, after an empty listing.

        Raises:
            NotFoundError: it does not.
        """
        # Without a prefix, the empty listing has proved that the bucket exists.
        if not self.base:
            return
        try:
            batch = next(self._batches("", "", 1), None)
        except (exceptions.InvalidPathError, ValueError):
            return
        if batch is None:
            raise root_missing(self.url)
