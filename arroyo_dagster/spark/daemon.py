"""Spark's daemon of Python workers, with compiled modules.

Spark lets workers import pyspark from an archive. An archive holds no bytecode, so that each daemon
compiles all that it imports: about a second of processor time. Where pyspark is installed as a
folder of the same Spark, the folder serves. Spark runs this module: `spark.python.daemon.module`.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path

_ARCHIVE = "pyspark.zip"


def without_archive(path: list[str]) -> list[str]:
    """Return the module search path without the archive, if the same pyspark is installed."""
    archives = [Path(entry) for entry in path if Path(entry).name == _ARCHIVE]
    others = [entry for entry in path if Path(entry).name != _ARCHIVE]
    spec = PathFinder.find_spec("pyspark", others)
    if spec is None or spec.origin is None:
        return path
    home = Path(spec.origin).resolve().parent
    installed = (home / "python" / "lib" / _ARCHIVE).resolve()
    return others if all(archive.resolve() == installed for archive in archives) else path


if __name__ == "__main__":
    sys.path[:] = without_archive(sys.path)
    from pyspark.daemon import manager

    manager()
