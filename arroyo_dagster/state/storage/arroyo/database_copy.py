"""A consistent copy of a SQLite database that another process may write, without locking it."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path
from urllib.parse import unquote

from arroyo_dagster.errors import InputError, NotFoundError, StorageError
from arroyo_dagster.redaction import redact_url, register_url
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.storage.failures import translated
from arroyo_dagster.state.storage.remote.open import open_store
from arroyo_dagster.state.storage.retries import ask_again

_BESIDE = ("", "-wal", "-journal")
_WAL_HEADER_BYTES = 32
_FILE_HEADER_BYTES = 100
_ATTEMPTS = 20
_PAUSE_SECONDS = 0.05


def copy_database(location: str, directory: Path, *, max_bytes: int) -> Path:
    """Copy a database and its logs into `directory`; return the path of the copy.

    Nothing is written, locked or created at `location`. The database must belong to another
    process: closing a file releases the locks that this process holds on it.

    Args:
        location: a path on this machine, or a URL in any form of checkpoint URLs.

    Raises:
        NotFoundError: there is no file at `location`.
        InputError: it is no regular file, or larger than `max_bytes`.
        StorageError: it cannot be read, or kept changing while it was copied.
    """
    register_url(location)
    with translated(redacted_location(location)):
        local = _local_path(location)
        if local is None:
            return _fetched(location, directory, max_bytes)
        # SQLite stores its logs beside the file itself, not beside a link to it.
        source = local.resolve(strict=True)

        def unchanged_copy() -> Path | None:
            before = _signature(source, max_bytes)
            copy = _copied(source, directory)
            return copy if _signature(source, max_bytes) == before else None

        copy = ask_again(unchanged_copy, tries=_ATTEMPTS, pause_seconds=_PAUSE_SECONDS, growth=1)
    if copy is None:
        raise StorageError(
            "the database changes faster than it can be copied",
            path=redacted_location(str(local)),
            next_step="try again when its controller is less busy, or name a backup of it",
        )
    return copy


def redacted_location(location: str) -> str:
    """Return the location without user info and query, for display."""
    return redact_url(location)


def _local_path(location: str) -> Path | None:
    if location.startswith("file://"):
        return Path("/" + location.removeprefix("file://").lstrip("/"))
    return None if "://" in location or location.startswith("s3::") else Path(location)


def _copied(source: Path, directory: Path) -> Path:
    """Copy once. The log is copied after the file, because it repairs a partial checkpoint."""
    for suffix in _BESIDE:
        target = directory / f"copy.sqlite{suffix}"
        target.unlink(missing_ok=True)
        try:
            shutil.copyfile(f"{source}{suffix}", target)
        except FileNotFoundError:
            if not suffix:
                raise
    return directory / "copy.sqlite"


def _signature(source: Path, max_bytes: int) -> tuple[object, ...]:
    """Return values that do not change while a copy is consistent.

    The header of a write-ahead log contains a salt that changes whenever the log restarts. Until
    then frames are only appended, and a partial frame is ignored. The header of the file counts the
    transactions without such a log.
    """
    info = source.stat()
    if not stat.S_ISREG(info.st_mode):
        raise InputError(
            "the path is not a file, so it is not a SQLite database",
            path=redacted_location(str(source)),
            next_step="name the file; Arroyo's setting is database.sqlite.path",
        )
    if info.st_size > max_bytes:
        raise _too_large(redacted_location(str(source)), info.st_size, max_bytes)
    journal = Path(f"{source}-journal")
    rollback = (journal.stat().st_size, journal.stat().st_mtime_ns) if journal.exists() else None
    return (
        (info.st_ino, info.st_size, info.st_mtime_ns, _start(source, _FILE_HEADER_BYTES)),
        _start(Path(f"{source}-wal"), _WAL_HEADER_BYTES),
        rollback,
    )


def _start(path: Path, count: int) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(count)
    except FileNotFoundError:
        return None


def _fetched(location: str, directory: Path, max_bytes: int) -> Path:
    """Fetch a backup from a store, where objects are never modified in place."""
    if redact_url(location) != location:
        raise InputError(
            "the URL of a database must not contain user, password or query",
            url=redacted_location(location),
            next_step="give credentials in the environment, as for the checkpoint URL",
        )
    parent, _, name = location.rpartition("/")
    store = open_store(parent)
    for suffix in _BESIDE:
        path = StatePath(f"{unquote(name)}{suffix}")
        info = store.head(path)
        if info is None:
            if not suffix:
                raise NotFoundError(
                    "there is no such database",
                    url=redacted_location(location),
                    next_step="check the name; `arroyo run` keeps state.sqlite beside its state",
                )
            continue
        if info.size_bytes > max_bytes:
            raise _too_large(redacted_location(location), info.size_bytes, max_bytes)
        (directory / f"copy.sqlite{suffix}").write_bytes(store.read(path))
    return directory / "copy.sqlite"


def _too_large(location: str, size_bytes: int, max_bytes: int) -> InputError:
    return InputError(
        f"this file is larger than the limit of {max_bytes} bytes",
        path=location,
        size_bytes=size_bytes,
        next_step="check that it is the database of Arroyo's controller",
    )
