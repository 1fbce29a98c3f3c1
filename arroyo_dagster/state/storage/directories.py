"""Directories below a root on local disk, opened one segment at a time, never through a link.

Between check and use a path may be redirected. A handle cannot: operations relative to it apply to
the directory that was opened.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from types import TracebackType

from arroyo_dagster.errors import InputError

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_MOST_KNOWN = 10_000
_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP}

Synced = set[tuple[str, int]]
"""Directories whose entry in their parent has been synced: path and inode."""


class Directories:
    """Handles of the directory that was opened last, and of its parents up to the root.

    Args:
        root: the path of the root; it and its parents may be symbolic links.
        synced: sync the entry of every directory that is created or entered, unless it is in this
            set; None: sync nothing.
    """

    def __init__(self, root: str, synced: Synced | None = None) -> None:
        self._root = root
        self._synced = synced
        self._opened: str | None = None
        self._names: list[str] = []
        self._handles: list[int] = []

    def __enter__(self) -> Directories:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all handles; the next `open` begins at the root."""
        self._opened = None
        self._leave(0)

    def open(self, directory: str, *, create: bool = False) -> int:
        """Return the handle of a directory; a call for another directory may close it.

        Args:
            directory: its path below the root, as stored; "" for the root.
            create: create missing directories, including the root and its parents.

        Raises:
            FileNotFoundError, NotADirectoryError: there is no such directory.
            InputError: a part of the path, which the error names, is a symbolic link.
        """
        names = directory.split("/") if directory else []
        depth = 0
        while (
            depth < len(self._names) and self._names[depth : depth + 1] == names[depth : depth + 1]
        ):
            depth += 1
        self._leave(depth + 1)
        if not self._handles:
            created = create and not os.path.isdir(self._root)
            if created:
                _make_directory(self._root, sync=self._synced is not None)
            self._handles.append(os.open(self._root, _DIRECTORY))
            if create:
                self._sync_entry("", created, lambda: _sync_parent(self._root))
        for name in names[depth:]:
            self._enter(name, create)
        self._opened = directory
        return self._handles[-1]

    def _leave(self, depth: int) -> None:
        while len(self._handles) > depth:
            os.close(self._handles.pop())
        del self._names[max(0, depth - 1) :]

    def _enter(self, name: str, create: bool) -> None:
        parent, created = self._handles[-1], False
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=parent)
                created = True
        path = "/".join([*self._names, name])
        self._handles.append(open_directory(name, parent, path))
        self._names.append(name)
        if create:
            self._sync_entry(path, created, lambda: sync_directory(parent))

    def _sync_entry(self, path: str, created: bool, sync: Callable[[], None]) -> None:
        """Sync the entry of the directory that was entered last, unless it is known to be synced.

        Existing directories are synced once as well: their creator may have died before syncing.
        """
        if self._synced is None:
            return
        entry = (path, os.fstat(self._handles[-1]).st_ino)
        if created or entry not in self._synced:
            sync()
            if len(self._synced) >= _MOST_KNOWN:
                self._synced.clear()
            self._synced.add(entry)


def open_directory(name: str, parent: int, path: str) -> int:
    """Open a directory in an open one.

    Args:
        path: for the error.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such directory.
        InputError: it is a symbolic link.
    """
    try:
        return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP) and is_link(name, parent):
            raise link_refused(path) from error
        raise


def link_refused(path: str) -> InputError:
    """Return the error for a symbolic link below the root, with alternatives."""
    return InputError(
        "a symbolic link below the checkpoint URL is never followed, replaced or deleted",
        path=path,
        next_step="replace it by the directory itself (or a bind mount), or give its target as "
        "the URL",
    )


def is_link(name: str, parent: int) -> bool:
    """Return whether an open directory contains a symbolic link of this name."""
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def sync_directory(handle: int) -> None:
    """Write the entries of a directory to disk, if the file system supports it."""
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


def _make_directory(path: str, *, sync: bool) -> None:
    """Create a directory and its parents; sync the entry of each that was created."""
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        _make_directory(parent, sync=sync)
    try:
        os.mkdir(path)
    except FileExistsError:
        return
    if sync:
        _sync_parent(path)


def _sync_parent(path: str) -> None:
    # A directory without read permission cannot be opened for syncing.
    with contextlib.suppress(PermissionError):
        handle = os.open(os.path.dirname(path), _DIRECTORY)
        try:
            sync_directory(handle)
        finally:
            os.close(handle)
