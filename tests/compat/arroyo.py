"""Checkpoints that a real Arroyo wrote, unpacked, and what an independent reader says of them."""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from tests.formats import metadata

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
    return tuple(_with_times(found))


_EPOCH = re.compile(r"(.*?)/(?:generations/\d+/)?(?:checkpoints/checkpoint-|epochs/epoch-)(\d+)")


def _with_times(found: Sequence[Member]) -> list[Member]:
    """The archives hold one time for all: here each object is as old as its epoch says, as in the
    store that it was taken from."""
    finished: dict[tuple[str, str], float] = {}
    for one in found:
        at = _EPOCH.match(one.name)
        if at is None or one.data is None:
            continue
        if one.name.endswith("/checkpoint-manifest.pb"):
            micros = metadata.decode_manifest(one.data, one.name).finish_time_micros
        elif "/operator-" not in one.name and one.name.endswith("/metadata"):
            micros = metadata.decode_legacy_checkpoint(one.data, one.name).finish_time_micros
        else:
            continue
        finished[at[1], at[2]] = max(finished.get((at[1], at[2]), 0), micros / 1e6)
    oldest = min(finished.values())

    def time_of(one: Member) -> float:
        at = _EPOCH.match(one.name)
        return oldest if at is None else finished.get((at[1], at[2]), oldest)

    return [replace(one, mtime=time_of(one)) for one in found]


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
