"""Checkpoints that a real Arroyo wrote, unpacked, and what an independent reader says of them."""

from __future__ import annotations

import json
import os
import tarfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
ARCHIVES = ("legacy", "leader", "flights")


@dataclass(frozen=True)
class Member:
    """A file of an archive, or a directory (without data)."""

    name: str
    data: bytes | None
    mtime: float


@cache
def members(archive: str) -> tuple[Member, ...]:
    """What an archive holds, read once a process: a dozen modules unpack the same three."""
    found = []
    with tarfile.open(DATA / f"arroyo-{archive}.tar.gz") as file:
        for one in file:
            assert one.isdir() or one.isfile()
            part = file.extractfile(one)
            found.append(Member(one.name, None if part is None else part.read(), one.mtime))
    return tuple(found)


def unpack(archive: str, directory: Path) -> str:
    """Unpack one archive into an empty directory and give its checkpoint URL."""
    found = members(archive)
    for one in found:
        at = directory / one.name
        if one.data is None:
            at.mkdir(parents=True, exist_ok=True)
        else:
            at.parent.mkdir(parents=True, exist_ok=True)
            at.write_bytes(one.data)
            os.utime(at, (one.mtime, one.mtime))
    return str(directory)


def description(archive: str) -> dict[str, Any]:
    """What `arroyo-{archive}.json` says: by job (`pipeline/job` in leader mode)."""
    described: dict[str, Any] = json.loads((DATA / f"arroyo-{archive}.json").read_text())
    return described
