"""What interrupted writes leave on local disk: files `name#digits` that no listing shows.

A raw name with `#` is stored percent-encoded, so no object has such a name. Remote stores leave
nothing of this kind.

Source: object_store `LocalFileSystem`, which writes `name#N` first (arroyo-state.md 1.3).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

from arroyo_dagster.errors import InputError, NotFoundError
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.storage.directories import Directories, open_directory
from arroyo_dagster.state.storage.failures import translated
from arroyo_dagster.state.storage.local_disk import delete_error, info_of_file, local_disk
from arroyo_dagster.state.storage.names import StoredName, encode_path, is_staging
from arroyo_dagster.state.storage.store import ObjectInfo, ObjectStore
from arroyo_dagster.state.storage.urls import parse_url


def list_write_remains(store: ObjectStore, prefix: StatePath) -> Iterator[ObjectInfo]:
    """Iterate over the remains below a directory, by stored name; none on remote stores.

    Raises:
        StorageError: a directory cannot be listed.
    """
    disk = local_disk(store)
    if disk is None:
        return
    below = encode_path(prefix)
    with Directories(parse_url(disk.url).directory) as directories:
        try:
            handle = directories.open(below)
        except (FileNotFoundError, NotADirectoryError, InputError):
            return
        with translated(disk.url, prefix):
            yield from _remains_below(handle, f"{below}/")


def delete_write_remains(store: ObjectStore, names: Iterable[str]) -> dict[str, str]:
    """Delete what `list_write_remains` returned; return why some could not be deleted, by name.

    Raises:
        InputError: a name is not one that an interrupted write leaves.
    """
    failed: dict[str, str] = {}
    disk = local_disk(store)
    if disk is None:
        return failed
    with Directories(parse_url(disk.url).directory) as directories:
        for name in names:
            if not is_staging(name):
                raise InputError("not what an interrupted write leaves", path=name)
            reason = delete_error(directories, name)
            if reason is not None:
                failed[name] = reason
    return failed


def _remains_below(handle: int, below: str) -> Iterator[ObjectInfo]:
    with os.scandir(handle) as listing:
        entries = sorted(listing, key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            with contextlib.suppress(FileNotFoundError, NotFoundError, InputError):
                inner = open_directory(entry.name, handle, below)
                try:
                    yield from _remains_below(inner, f"{below}{entry.name}/")
                finally:
                    os.close(inner)
        elif entry.is_file(follow_symlinks=False) and is_staging(entry.name):
            with contextlib.suppress(FileNotFoundError):
                found_file = os.stat(entry.name, dir_fd=handle, follow_symlinks=False)
                yield info_of_file(StoredName(below + entry.name), found_file)
