"""Directories below a root on local disk, opened one segment at a time, never through a link.

A path that was checked and is then used again may lead elsewhere by then. A handle cannot: what is
done relative to it happens in the directory that was opened.
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
"""Directories whose entry in their parent is known to be on disk: path and inode."""


class Directories:
    """Handles of the directory that was asked for last, and of those above it.

    Args:
        root: the path of the root, which may itself be, or lie behind, a symbolic link.
        synced: sync the entry of every directory that is created or passed through, unless it is
            known here; None: sync nothing.
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
        """Close every handle; the next `open` begins at the root."""
        self._opened = None
        self._leave(0)

    def open(self, directory: str, *, create: bool = False) -> int:
        """Give the handle of a directory; it is closed by the next call for another one.

        Args:
            directory: its path below the root, as stored; "" for the root.
            create: create what is missing of it, the root and its parents included.

        Raises:
            FileNotFoundError, NotADirectoryError: there is none.
            InputError: a part of the path is a symbolic link; names it.
        """
        wanted = directory.split("/") if directory else []
        known = 0
        while (
            known < len(self._names) and self._names[known : known + 1] == wanted[known : known + 1]
        ):
            known += 1
        self._leave(known + 1)
        if not self._handles:
            self._enter_root(create)
        for name in wanted[known:]:
            self._enter(name, create)
        self._opened = directory
        return self._handles[-1]

    def _leave(self, depth: int) -> None:
        while len(self._handles) > depth:
            os.close(self._handles.pop())
        del self._names[max(0, depth - 1) :]

    def _enter_root(self, create: bool) -> None:
        created = create and not os.path.isdir(self._root)
        if created:
            _make_directory(self._root, sync=self._synced is not None)
        self._handles.append(os.open(self._root, _DIRECTORY))
        if create:
            self._sync_entry("", created, lambda: _sync_parent(self._root))

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
        """Sync the entry of the directory that was entered last, unless that is known.

        Whoever created it may die before syncing it, so one that was there is synced once, too.
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
        path: for the message.

    Raises:
        FileNotFoundError, NotADirectoryError: there is none.
        InputError: it is a symbolic link.
    """
    try:
        return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP) and is_link(name, parent):
            raise link_refused(path) from error
        raise


def link_refused(path: str) -> InputError:
    """Say that a path is a symbolic link below the root, and what serves instead."""
    return InputError(
        "a symbolic link below the checkpoint URL is never followed, replaced or deleted",
        path=path,
        next_step="replace it by the directory itself (or a bind mount), or give its target as "
        "the URL",
    )


def is_link(name: str, parent: int) -> bool:
    """Whether there is a symbolic link of this name in an open directory."""
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def sync_directory(handle: int) -> None:
    """Bring the entries of a directory to disk, where the file system can."""
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
    # One that may be searched and not read cannot be opened to sync it.
    with contextlib.suppress(PermissionError):
        handle = os.open(os.path.dirname(path), _DIRECTORY)
        try:
            sync_directory(handle)
        finally:
            os.close(handle)
