"""What a failure of a store means, in the words of `errors.py`."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from arroyo_dagster.errors import ArroyoStateError, NotFoundError, StorageError

_LASTING = {
    errno.EROFS: "the file system is mounted read-only",
    errno.ENOSPC: "no space is left on the device",
    errno.EDQUOT: "the disk quota is used up",
    errno.ENAMETOOLONG: "the file system does not take so long a name",
    errno.ENOTDIR: "a part of this path is a file, so it cannot be a directory",
    errno.EISDIR: "there is a directory at this path, so it cannot be an object",
    errno.ENOTEMPTY: "there is a directory at this path, so it cannot be an object",
    errno.ELOOP: "too many symbolic links",
    errno.EINVAL: "the store refused the request as wrong",
    errno.ENOSYS: "the store does not know this operation",
}


@contextlib.contextmanager
def translated(url: str, path: str | None = None) -> Iterator[None]:
    """Turn what a store's library raises within into errors of ours that name `url` and `path`.

    Raises:
        NotFoundError: there is nothing at `path`.
        StorageError: anything else; `retryable` unless somebody has to change something first.
    """
    try:
        yield
    except ArroyoStateError:
        raise
    except FileNotFoundError as error:
        raise NotFoundError("there is no such object", url=url, path=path) from error
    except Exception as error:
        raise storage_error(error, url, path) from error


def storage_error(error: Exception, url: str, path: str | None = None) -> StorageError:
    """Say what `error` means for whoever called the store."""
    reason, retryable = explained(error)
    step = "try again; the outcome of a write is unknown" if retryable else None
    return StorageError(reason, retryable=retryable, url=url, path=path, next_step=step)


def explained(error: Exception) -> tuple[str, bool]:
    """Give the reason of a failure and whether trying again may help."""
    text = str(error) or type(error).__name__
    if isinstance(error, PermissionError):
        return f"permission denied: {text}", False
    if "Credentials" in type(error).__name__:
        return f"no usable credentials for this store: {text}", False
    code = error.errno if isinstance(error, OSError) else None
    if code in _LASTING:
        return f"{_LASTING[code]}: {text}", False
    return f"the store failed: {text}", True
