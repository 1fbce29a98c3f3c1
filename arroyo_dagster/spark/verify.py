"""Verify one job with its files read by Spark's workers: the same findings in the same order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from arroyo_dagster.spark.items import SparkItems
from arroyo_dagster.spark.thresholds import SparkThresholds
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.progress import OnProgress, no_progress
from arroyo_dagster.state.model.verify import VerifySettings
from arroyo_dagster.state.operations.verify.job import JobVerdict, verify_job
from arroyo_dagster.state.storage.store import ObjectStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def verify_job_on_spark(
    session: Callable[[], SparkSession],
    store: ObjectStore,
    paths: JobPaths,
    epoch: int | None = None,
    settings: VerifySettings | None = None,
    *,
    thresholds: SparkThresholds | None = None,
    on_progress: OnProgress = no_progress,
) -> JobVerdict:
    """Verify an epoch as `operations.verify.job.verify_job`, at every level, in both layouts.

    Metadata is read by this process.

    Args:
        session: returns the session; called only for a step that reaches a threshold.
        store: the store of the job; workers must be able to open it too.
        paths: the paths of the job.
        epoch: None = the newest visible epoch.
        settings: None = the defaults.
        thresholds: from which amount of work a step runs on Spark; None = the defaults.
        on_progress: called as files are verified.

    Returns:
        The verdict; `engines` says where each step ran.

    Raises:
        InputError, NotFoundError, ConflictError, StorageError: as in `verify_job`.
    """
    resolved = settings or VerifySettings()
    items = SparkItems(session, store, thresholds or SparkThresholds())
    verdict = verify_job(
        store,
        paths,
        epoch,
        level=resolved.level,
        parallelism=resolved.parallelism,
        history=resolved.history,
        on_progress=on_progress,
        items=items,
    )
    return replace(verdict, engines=tuple(items.choices))
