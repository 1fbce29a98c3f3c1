"""The same Spark, begun in less time: tests start some thirty, and each lives a minute."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

_QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""What a second compiler or collector would gain comes too late."""
_ARCHIVE = "pyspark.zip"


def begin() -> Path | None:
    """Let all Sparks that this process and its children start begin quickly.

    Spark's Python processes find pyspark in an archive, which holds no bytecode: each compiles all
    that it imports, a second for each of the several that a query starts. Below a home of links
    they find the folder that the archive was made of.

    Returns:
        What to `end`; None where somebody has said which Spark is used, or a parent has begun.
    """
    os.environ.setdefault("JDK_JAVA_OPTIONS", _QUICK_JVM)
    found = importlib.util.find_spec("pyspark")
    if "SPARK_HOME" in os.environ or found is None or found.origin is None:
        return None
    installed = Path(found.origin).parent
    home = Path(tempfile.mkdtemp(prefix="arroyo-spark-"))
    _link_all(installed, home, but="python")
    library = home / "python" / "lib"
    library.mkdir(parents=True)
    _link_all(installed / "python" / "lib", library, but=_ARCHIVE)
    (library / _ARCHIVE).symlink_to(installed.parent)
    os.environ["SPARK_HOME"] = str(home)
    return home


def _link_all(folder: Path, to: Path, *, but: str) -> None:
    for path in folder.iterdir():
        if path.name != but:
            (to / path.name).symlink_to(path)


def end(home: Path) -> None:
    """Remove a home of links."""
    os.environ.pop("SPARK_HOME", None)
    shutil.rmtree(home, ignore_errors=True)
