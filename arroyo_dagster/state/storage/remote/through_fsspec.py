"""Remote stores through fsspec: on request, and for what obstore does not support."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from arroyo_dagster.state.storage.remote.fsspec_store import FsspecStore
from arroyo_dagster.state.storage.remote.s3_store import S3Store, adlfs_options, gcsfs_options
from arroyo_dagster.state.storage.urls import CheckpointUrl


def open_through_fsspec(
    url: CheckpointUrl, options: Mapping[str, Any] | None = None
) -> FsspecStore:
    """Open the store at a URL of S3, R2, GCS or Azure through s3fs, gcsfs or adlfs.

    Args:
        options: by the names of `options.py`, or as the filesystem accepts them.

    Raises:
        InputError: an option has an invalid value.
    """
    if url.backend in ("s3", "r2"):
        return S3Store(url, options)
    protocol, translate = ("gs", gcsfs_options)
    if url.backend == "azure":
        protocol, translate = ("abfs", adlfs_options)
    words = functools.partial(translate, url)
    words(options or {})
    return FsspecStore(protocol, url.stored_root, url=str(url), options=options, words=words)
