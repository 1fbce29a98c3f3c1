"""The entry points of installed packages, found without `importlib.metadata` where there are none.

Loading that module takes as much processor time as the work of a short command, and hardly any
package names tables.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection
    from importlib.metadata import EntryPoint

_METADATA = (".dist-info", ".egg-info", "egg-info")


def entry_points(*, group: str) -> Collection[EntryPoint]:
    """Return the entry points of a group, of all packages that this process can import."""
    foreign = (finder for finder in sys.meta_path if finder is not PathFinder)
    if not any(hasattr(finder, "find_distributions") for finder in foreign) and not any(
        _may_mention(group, Path(folder)) for folder in sys.path
    ):
        return ()
    import importlib.metadata

    return importlib.metadata.entry_points(group=group)


def _may_mention(group: str, folder: Path) -> bool:
    """Whether the metadata of a package below an entry of `sys.path` mentions a group; True for
    what is no folder, for example an archive, and for what cannot be read.
    """
    try:
        if not folder.is_dir():
            return folder.exists()
        names = [name for name in os.listdir(folder) if name.lower().endswith(_METADATA)]
        texts = (folder / name / "entry_points.txt" for name in names)
        return any(group in text.read_text("utf-8") for text in texts if text.is_file())
    except (OSError, ValueError):
        return True
