"""Where the heavy part of maintenance runs: Spark, or the process of the step."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from arroyo_dagster.orchestration.resources import SparkSessionResource
from arroyo_dagster.state.model.compaction import CompactionSettings
from arroyo_dagster.state.model.layout import JobPaths

if TYPE_CHECKING:
    from arroyo_dagster.state.model.garbage import GcPlan
    from arroyo_dagster.state.operations.compaction.job import CompactionOutcome
    from arroyo_dagster.state.operations.compaction.rewrite import RunRewrites
    from arroyo_dagster.state.operations.gc.execute import GcOptions, GcOutcome
    from arroyo_dagster.state.operations.gc.plan import GcRequest
    from arroyo_dagster.state.storage.store import ObjectStore


class MaintenanceRunner(dg.ConfigurableResource, ABC):  # type: ignore[type-arg]
    """Compacts jobs and runs gc plans. Two are built in; subclass it to add another engine."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse the method of release 0.1, which is no longer called.

        Raises:
            TypeError: the class defines `collect`.
        """
        super().__init_subclass__(**options)
        if "collect" in vars(cls):
            raise TypeError(
                f"{cls.__name__}.collect is no longer called; implement run_gc(store, paths, "
                "request, options, *, plan)"
            )

    @abstractmethod
    def compact(
        self,
        store: "ObjectStore",
        paths: JobPaths,
        settings: CompactionSettings,
        **options: Any,
    ) -> "CompactionOutcome":
        """Compact a job; `options` as in `state.operations.compaction.job.compact_job`."""

    def run_gc(
        self,
        store: "ObjectStore",
        paths: JobPaths,
        request: "GcRequest",
        options: "GcOptions",
        *,
        plan: "GcPlan",
    ) -> "GcOutcome":
        """Execute a gc plan, in this process unless overridden; see `operations.gc.execute`."""
        from arroyo_dagster.state.operations.gc.execute import run_gc

        return run_gc(store, paths, request, options, plan=plan)

    def rewrites(self) -> "RunRewrites":
        """Return what writes the new files of Arroyo jobs; the process of the step unless
        overridden.
        """
        from arroyo_dagster.state.operations.compaction.rewrite import rewrite_here

        return rewrite_here


class SparkRunner(MaintenanceRunner):
    """Runs on Spark. No session is started if there is little or nothing to do."""

    spark: dg.ResourceDependency[SparkSessionResource]
    in_process_mb: int = Field(
        default=64,
        description="Compactions that read fewer MiB run in the process of the step.",
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

    def run_gc(
        self,
        store: "ObjectStore",
        paths: JobPaths,
        request: "GcRequest",
        options: "GcOptions",
        *,
        plan: "GcPlan",
    ) -> "GcOutcome":
        from arroyo_dagster.spark.gc import run_gc_on_spark

        return run_gc_on_spark(
            lambda: self.spark.session, store, paths, request, options, plan=plan
        )

    def rewrites(self) -> "RunRewrites":
        from arroyo_dagster.spark.rewrite import rewrites_on_spark

        return rewrites_on_spark(lambda: self.spark.session)


class InProcessRunner(MaintenanceRunner):
    """Runs in the process of the step: for small state, and for hosts without Java."""

    def compact(
        self,
        store: "ObjectStore",
        paths: JobPaths,
        settings: CompactionSettings,
        **options: Any,
    ) -> "CompactionOutcome":
        from arroyo_dagster.state.operations.compaction.job import compact_job

        return compact_job(store, paths, settings, **options)
