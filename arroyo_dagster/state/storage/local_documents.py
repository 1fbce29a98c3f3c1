"""Documents that a person gives as files of this machine: their size is checked before they are
read. Data and objects of stores are read elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from arroyo_dagster.errors import InputError

MOST_BYTES = 64 << 20
"""Of a YAML, JSON or TOML file. A thousand operators need a few megabytes."""


def read_document(path: str | Path, *, most_bytes: int = MOST_BYTES) -> bytes:
    """Read a whole file.

    Raises:
        InputError: it has more bytes than `most_bytes`.
        OSError: it cannot be read.
    """
    with Path(path).open("rb") as file:
        return read_stream(file, str(path), most_bytes=most_bytes)


def read_stream(stream: BinaryIO, name: str, *, most_bytes: int = MOST_BYTES) -> bytes:
    """Read what is left of a stream: a pipe and a device have no size to check before.

    Raises:
        InputError: it has more bytes than `most_bytes`.
    """
    try:
        size = os.fstat(stream.fileno()).st_size
    except (OSError, ValueError):  # no file of the system: a test's, for example
        size = 0
    data = b"" if size > most_bytes else stream.read(most_bytes + 1)
    if max(size, len(data)) > most_bytes:
        raise InputError(
            "the file is too large",
            path=name,
            expected=f"at most {most_bytes} bytes",
            next_step="give a smaller file",
        )
    return data
