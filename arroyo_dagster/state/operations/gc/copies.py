"""Digests and copies of stored objects of any size, in bounded memory."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator

from arroyo_dagster.state.model.garbage import DIGEST_BYTES
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.storage.store import CHUNK_BYTES, ObjectStore, read_in_chunks

COPY_BYTES = 1 << 16
"""The cost of the requests of one copy, as the equivalent number of bytes."""

_SMALL_BYTES = 1 << 20
_LARGE_AT_ONCE = threading.BoundedSemaphore(8)
"""Limits the large objects that this process reads at once, and thereby its memory: many threads
copy batches of objects concurrently, each with up to `CHUNK_BYTES` of its object.
"""


@contextlib.contextmanager
def in_turn(size_bytes: int | None) -> Iterator[None]:
    """Wait until a large object may be read or copied; a small one need not.

    Args:
        size_bytes: of the object; None = unknown, which counts as large.
    """
    if size_bytes is not None and size_bytes <= _SMALL_BYTES:
        yield
        return
    with _LARGE_AT_ONCE:
        yield


def digest_stored(store: ObjectStore, path: StatePath) -> tuple[str, int]:
    """Digest the bytes of an object, as `digest_of` does, and count them.

    Raises:
        NotFoundError: there is no object at `path`.
    """
    hashed = hashlib.blake2b(digest_size=DIGEST_BYTES)
    size_bytes = 0
    for piece in read_in_chunks(store, path, CHUNK_BYTES):
        hashed.update(piece)
        size_bytes += len(piece)
        del piece  # see `read_in_chunks`
    return hashed.hexdigest(), size_bytes
