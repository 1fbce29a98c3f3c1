"""The files of a topic: one file, or all files of a directory, local or in an object store."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from arroyo_dagster.errors import InputError, NotFoundError, StorageError
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.storage.remote.open import open_store
from arroyo_dagster.state.storage.store import ObjectStore, open_by_ranges


@dataclass(frozen=True, slots=True, order=True)
class FolderEntry:
    """A file with records."""

    name: str
    size_bytes: int


class Folder(Protocol):
    """Files that are read by name. Hidden files are excluded; see `hidden`."""

    @property
    def where(self) -> str:
        """The path or URL, for messages."""

    def entries(self) -> list[FolderEntry]:
        """Return all files, sorted by name.

        Raises:
            NotFoundError: there is no such file or directory.
        """

    def read(self, name: str, start: int, length: int) -> bytes:
        """Return up to `length` bytes from byte `start`."""

    def open(self, name: str, size_bytes: int) -> BinaryIO:
        """Open a file of a known size for random access."""


def folder_at(path: str) -> Folder:
    """Return the files at a local path, or at a URL with a scheme that checkpoint URLs support.

    Args:
        path: a file or a directory, or the URL of a directory.
    """
    if path.startswith("file://"):
        path = path.removeprefix("file://")
    return StoreFolder(path) if "://" in path else LocalFolder(path)


def hidden(name: str) -> bool:
    """Return whether a file is unfinished or metadata: its name begins with `_` or `.`, or
    contains `#`.
    """
    return name[:1] in ("_", ".") or "#" in name


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """A local file or directory."""

    where: str

    def entries(self) -> list[FolderEntry]:
        """See `Folder.entries`; subdirectories are ignored."""
        try:
            if not os.path.isdir(self.where):
                return [FolderEntry(os.path.basename(self.where), os.stat(self.where).st_size)]
            with os.scandir(self.where) as entries:
                return sorted(
                    FolderEntry(entry.name, entry.stat().st_size)
                    for entry in entries
                    if entry.is_file() and not hidden(entry.name)
                )
        except FileNotFoundError as error:
            raise NotFoundError(
                "there is no such file or directory to read records from",
                path=self.where,
                next_step="create it, or bind the topic to another path",
            ) from error
        except OSError as error:
            raise self._failed(error) from error

    def _path(self, name: str) -> str:
        return os.path.join(self.where, name) if os.path.isdir(self.where) else self.where

    def _failed(self, error: OSError) -> StorageError:
        return StorageError(f"records cannot be read ({error.strerror})", path=self.where)

    def read(self, name: str, start: int, length: int) -> bytes:
        """See `Folder.read`."""
        with self.open(name, 0) as file:
            file.seek(start)
            return file.read(length)

    def open(self, name: str, size_bytes: int) -> BinaryIO:
        """See `Folder.open`."""
        try:
            return open(self._path(name), "rb")
        except FileNotFoundError as error:
            raise gone(self.where, name) from error
        except OSError as error:
            raise self._failed(error) from error


class StoreFolder:
    """A directory of an object store."""

    def __init__(self, url: str) -> None:
        self.where = url
        self._opened: ObjectStore | None = None

    def __reduce__(self) -> tuple[type[StoreFolder], tuple[str]]:
        return StoreFolder, (self.where,)

    @property
    def _store(self) -> ObjectStore:
        if self._opened is None:
            self._opened = open_store(self.where)
        return self._opened

    def entries(self) -> list[FolderEntry]:
        """See `Folder.entries`; subdirectories are ignored."""
        objects = self._store.list_dir().objects
        return sorted(
            FolderEntry(info.path, info.size_bytes)
            for info in objects
            if info.addressable and not hidden(info.path)
        )

    def read(self, name: str, start: int, length: int) -> bytes:
        """See `Folder.read`."""
        try:
            return self._store.read_range(StatePath(name), start, length)
        except NotFoundError as error:
            raise gone(self.where, name) from error

    def open(self, name: str, size_bytes: int) -> BinaryIO:
        """See `Folder.open`."""
        return open_by_ranges(self._store, StatePath(name), size_bytes)


def gone(where: str, name: str) -> NotFoundError:
    """Return the error for a file that was removed after the epoch was planned."""
    return NotFoundError(
        "a file of records was removed while it was read",
        path=where,
        file=name,
        next_step="restore it, or bind the topic to its new place; nothing was written",
    )


def refuse_compressed(where: str, name: str) -> None:
    """Reject a compressed file, since it cannot be read from an offset.

    Raises:
        InputError: the name has the suffix of a compressed file.
    """
    if name.endswith((".gz", ".zst", ".bz2", ".xz", ".zip")):
        raise InputError(
            "a compressed file cannot be continued at an offset",
            path=where,
            file=name,
            next_step="unpack it, or store the records in Parquet, which is compressed internally",
        )
