"""Checks of this machine: whether Spark can run here, and how fast it starts. Starts no Spark."""

from __future__ import annotations

from importlib import metadata

from arroyo_dagster.optional_packages import lacking_for_spark, missing_package
from arroyo_dagster.spark.fast_start import is_complete
from arroyo_dagster.spark.session import JAVA_STEP, local_archive, local_java
from arroyo_dagster.state.operations.verify.store import CheckStatus, StoreCheck


def check_spark() -> tuple[StoreCheck, ...]:
    """Check Java, pyspark, and the archive with which local sessions start fast."""
    if (lacking := lacking_for_spark()) is not None:
        detail = "not installed" if lacking == "pyspark" else f"{lacking} is not installed"
        step = f"for --spark: {missing_package(lacking).next_step}"
        return (
            check_java(),
            StoreCheck(name="pyspark", status=CheckStatus.WARNING, detail=detail, next_step=step),
        )
    return (
        check_java(),
        StoreCheck(name="pyspark", status=CheckStatus.OK, detail=_pyspark_version()),
        _check_archive(),
    )


def _pyspark_version() -> str:
    try:
        return metadata.version("pyspark")
    except metadata.PackageNotFoundError:  # that of a platform, which is no installed package
        import pyspark

        return pyspark.__version__


def check_java() -> StoreCheck:
    """Check that the Java that Spark would start exists and is new enough."""
    java = local_java()
    if java.problem is None and java.number is not None:
        detail = f"{java.command}, Java {java.number}"
        return StoreCheck(name="java", status=CheckStatus.OK, detail=detail)
    detail = java.problem or f"{java.command} is of an unknown version"
    return StoreCheck(
        name="java",
        status=CheckStatus.WARNING,
        detail=detail,
        next_step=f"for --spark: {JAVA_STEP}",
    )


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
