"""Who carries out the heavy part of maintenance: Spark, or the process of the step."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from arroyo_dagster.orchestration.resources import SparkSessionResource
from arroyo_dagster.state.model.compaction import CompactionSettings
from arroyo_dagster.state.model.layout import JobPaths

if TYPE_CHECKING:
    from arroyo_dagster.state.local.compaction import CompactionOutcome
    from arroyo_dagster.state.local.gc import ExpireOutcome
    from arroyo_dagster.state.storage.store import ObjectStore


class MaintenanceRunner(dg.ConfigurableResource, ABC):  # type: ignore[type-arg]
    """Compacts and expires jobs. Two are built in; subclass it to bring another engine."""

    @abstractmethod
    def compact(
        self,
        store: "ObjectStore",
        paths: JobPaths,
        settings: CompactionSettings,
        **options: Any,
    ) -> "CompactionOutcome":
        """Compact a job; `options` as of `state.local.compaction.compact_job`."""

    @abstractmethod
    def expire(self, store: "ObjectStore", paths: JobPaths, **options: Any) -> "ExpireOutcome":
        """Expire epochs of a job; `options` as of `state.local.gc.expire_job`."""


class SparkRunner(MaintenanceRunner):
    """On Spark. No session is started where there is nothing, or little, to do."""

    spark: dg.ResourceDependency[SparkSessionResource]
    in_process_mb: int = Field(
        default=64,
        description="Compactions that read fewer MiB are carried out in the process of the step.",
    )

    def compact(
        self,
        store: "ObjectStore",
        paths: JobPaths,
        settings: CompactionSettings,
        **options: Any,
    ) -> "CompactionOutcome":
        from arroyo_dagster.spark.compaction import compact_job_on_spark

        return compact_job_on_spark(
            lambda: self.spark.session,
            store,
            paths,
            settings,
            in_process_bytes=self.in_process_mb << 20,
            **options,
        )

    def expire(self, store: "ObjectStore", paths: JobPaths, **options: Any) -> "ExpireOutcome":
        from arroyo_dagster.spark.gc import expire_job_on_spark

        return expire_job_on_spark(lambda: self.spark.session, store, paths, **options)


class InProcessRunner(MaintenanceRunner):
    """In the process of the step: for small state, and where no Java is."""

    def compact(
        self,
        store: "ObjectStore",
        paths: JobPaths,
        settings: CompactionSettings,
        **options: Any,
    ) -> "CompactionOutcome":
        from arroyo_dagster.state.local.compaction import compact_job

        return compact_job(store, paths, settings, **options)

    def expire(self, store: "ObjectStore", paths: JobPaths, **options: Any) -> "ExpireOutcome":
        from arroyo_dagster.state.local.gc import expire_job

        return expire_job(store, paths, **options)
