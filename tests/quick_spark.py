"""The same Spark, begun in less time: tests start some thirty, and each lives a minute.

python -m tests.quick_spark     writes the archive of classes that all of them map
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""What a second compiler or collector would gain comes too late."""
_ARCHIVE = "pyspark.zip"


def begin() -> None:
    """Let all Sparks that this process and its children start begin quickly.

    Spark's Python processes find pyspark in an archive, which holds no bytecode: each compiles all
    that it imports, a second for each of the several that a query starts. Below a home of links
    they find the folder that the archive was made of. The home stays: an archive of classes holds
    its path.
    """
    os.environ.setdefault("JDK_JAVA_OPTIONS", _QUICK_JVM)
    found = importlib.util.find_spec("pyspark")
    if "SPARK_HOME" in os.environ or found is None or found.origin is None:
        return
    installed = Path(found.origin).parent
    folder = Path.home() / ".cache" / "arroyo_dagster"
    home = folder / f"tests-spark-{hashlib.sha256(str(installed).encode()).hexdigest()[:16]}"
    if not home.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=folder))
        _link_all_but_the_archive(installed, fresh)
        try:
            fresh.rename(home)
        except OSError:  # another process was faster
            shutil.rmtree(fresh)
    os.environ["SPARK_HOME"] = str(home)


def _link_all_but_the_archive(installed: Path, home: Path) -> None:
    library = home / "python" / "lib"
    library.mkdir(parents=True)
    _link_all(installed, home, but="python")
    _link_all(installed / "python" / "lib", library, but=_ARCHIVE)
    (library / _ARCHIVE).symlink_to(installed.parent)


def _link_all(folder: Path, to: Path, *, but: str) -> None:
    for path in folder.iterdir():
        if path.name != but:
            (to / path.name).symlink_to(path)


if __name__ == "__main__":
    begin()
    subprocess.run([sys.executable, "-m", "arroyo_dagster.spark.prepare"], check=True)
