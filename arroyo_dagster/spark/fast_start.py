"""Fast start of local Spark sessions: an archive of the classes that the JVM loads.

A JVM with the archive maps it instead of loading some 15,000 classes one by one. Processor time on
two cores until the first Python task has ended: 6.5 s with the archive, 15 s without, 21 s without
any of the options. Writing it costs 10 s at the start and 18 s after the end of a session, once.
The second session of a machine does so. To prepare an image or a server:

    python -m arroyo_dagster.spark.prepare
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from pathlib import Path

from arroyo_dagster.optional_packages import explained_imports

_LOG = logging.getLogger(__name__)

SETTING = "spark.arroyo.fastStart"
"""The Spark setting that switches the fast start off, if it is `false`."""

_COMPILER = "-XX:TieredStopAtLevel=1"
"""The second compiler costs more than it gains where Arrow and Python do the work."""
_QUIET = "-Xlog:disable -Xlog:all=error:stderr"
"""A class that cannot be archived and an archive that does not fit are no news."""
_VERIFY = "-XX:+VerifySharedSpaces"
"""The JVM compares checksums, 0.1 s, instead of running damaged classes."""


def java_options(cache: Path, java_home: str | None) -> str:
    """Return the options with which a JVM starts fast, or lets later ones.

    The first session leaves an empty file, so that a container that lives for one session never
    writes an archive. An archive is never stale: its name holds the JDK, and the sizes and times of
    Spark's jars, and the JVM ignores an archive that does not fit its class path.

    Args:
        cache: the folder of archives; created if necessary.
        java_home: `JAVA_HOME` of this process, as Spark reads it.
    """
    options = f"{_COMPILER} {_QUIET}"
    try:
        archive = archive_path(cache, java_home)
        if not cache.is_absolute() or '"' in str(archive) or "\\" in str(archive):
            return options  # no home; or Spark could not tell where the option ends
        if is_complete(archive):
            return f'{options} {_VERIFY} "-XX:SharedArchiveFile={archive}"'
        if archive.exists():
            return f'{options} "-XX:ArchiveClassesAtExit={archive}"'
        cache.mkdir(parents=True, exist_ok=True)
        archive.touch()
    except OSError as error:
        _LOG.debug("Spark starts without an archive of its classes: %s", error)
    return options


def discard(cache: Path, java_home: str | None) -> bool:
    """Remove an archive with which a JVM did not start: a truncated one ends it at once.

    Returns:
        Whether there was one, so that a second attempt without it is worth its time.
    """
    try:
        archive = archive_path(cache, java_home)
        if not is_complete(archive):
            return False
        archive.unlink()
    except OSError:
        return False
    _LOG.warning("Spark did not start with %s; removed it, trying again without it", archive)
    return True


def is_complete(archive: Path) -> bool:
    """Whether a JVM has written a whole archive: it writes the first bytes last.

    Raises:
        OSError: another user has written it; an archive holds code.
    """
    try:
        with archive.open("rb") as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                raise PermissionError(f"{archive} belongs to another user")
            return any(file.read(4))
    except FileNotFoundError:
        return False


def archive_path(cache: Path, java_home: str | None) -> Path:
    """Return the path of the archive of this JDK and this Spark.

    Raises:
        InputError: pyspark is not installed.
        OSError: the JDK or Spark's jars cannot be read.
    """
    with explained_imports():
        from pyspark.find_spark_home import _find_spark_home

    java = f"{java_home}/bin/java" if java_home else shutil.which("java") or "java"
    binary = Path(java).resolve(strict=True)
    digest = hashlib.sha256(str(binary).encode())
    digest.update((binary.parent.parent / "release").read_bytes())
    for jar in sorted((Path(_find_spark_home()) / "jars").iterdir()):
        status = jar.stat()
        digest.update(f"{jar} {status.st_size} {status.st_mtime_ns}\n".encode())
    return cache / f"spark-{digest.hexdigest()[:16]}.jsa"
