"""Checkpoints that a real Arroyo wrote, unpacked, and what an independent reader says of them."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
ARCHIVES = ("legacy", "leader", "flights")


def unpack(archive: str, directory: Path) -> str:
    """Unpack one archive into an empty directory and give its checkpoint URL."""
    with tarfile.open(DATA / f"arroyo-{archive}.tar.gz") as file:
        file.extractall(directory, filter="data")
    return str(directory)


def description(archive: str) -> dict[str, Any]:
    """What `arroyo-{archive}.json` says: by job (`pipeline/job` in leader mode)."""
    described: dict[str, Any] = json.loads((DATA / f"arroyo-{archive}.json").read_text())
    return described
