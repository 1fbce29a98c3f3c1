"""Checks of this machine: whether Spark can run here, and how fast it starts. Starts no Spark."""

from __future__ import annotations

import re
import subprocess
from importlib import metadata

from arroyo_dagster.spark.fast_start import is_complete
from arroyo_dagster.spark.session import local_archive, local_java
from arroyo_dagster.state.operations.verify.store import CheckStatus, StoreCheck

OLDEST_JAVA = 17
_NUMBER = re.compile(r'version "(?:1\.)?(\d+)')


def check_spark() -> tuple[StoreCheck, ...]:
    """Check Java, pyspark, and the archive with which local sessions start fast."""
    try:
        version = metadata.version("pyspark")
    except metadata.PackageNotFoundError:
        detail, step = "pyspark is not installed", "install it for --spark: pip install pyspark"
        return (
            check_java(),
            StoreCheck(name="pyspark", status=CheckStatus.WARNING, detail=detail, next_step=step),
        )
    return (
        check_java(),
        StoreCheck(name="pyspark", status=CheckStatus.OK, detail=version),
        _check_archive(),
    )


def check_java() -> StoreCheck:
    """Check that the Java that Spark would start exists and is new enough."""
    java = local_java()
    step = f"install Java {OLDEST_JAVA} or newer for --spark, or set JAVA_HOME"
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        detail = f"{java} does not run ({error})"
        return StoreCheck(name="java", status=CheckStatus.WARNING, detail=detail, next_step=step)
    found = _NUMBER.search(done.stderr + done.stdout)
    number = int(found[1]) if found else None
    detail = f"{java} is of an unknown version" if number is None else f"{java}, Java {number}"
    if number is not None and number >= OLDEST_JAVA:
        return StoreCheck(name="java", status=CheckStatus.OK, detail=detail)
    return StoreCheck(name="java", status=CheckStatus.WARNING, detail=detail, next_step=step)


def _check_archive() -> StoreCheck:
    name, step = "fast start", "prepare it once: python -m arroyo_dagster.spark.prepare"
    try:
        archive = local_archive()
        complete = is_complete(archive)
    except (OSError, ImportError) as error:
        return StoreCheck(name=name, status=CheckStatus.NOT_CHECKED, detail=str(error))
    if complete:
        return StoreCheck(name=name, status=CheckStatus.OK, detail=str(archive))
    detail = f"{archive} is not written yet: a local session takes about 8 s longer to start"
    return StoreCheck(name=name, status=CheckStatus.WARNING, detail=detail, next_step=step)
