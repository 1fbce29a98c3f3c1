"""Where the heavy part of maintenance runs: Spark, or the process of the step."""

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import dagster as dg
from pydantic import Field

from arroyo_dagster.orchestration.resources import (
    ArroyoDirectory,
    ArroyoStateStore,
    SparkSessionResource,
)
from arroyo_dagster.state.model.compaction import CompactionSettings
from arroyo_dagster.state.model.layout import JobPaths

if TYPE_CHECKING:
    from arroyo_dagster.spark.thresholds import SparkThresholds
    from arroyo_dagster.state.model.garbage import GcPlan
    from arroyo_dagster.state.operations.compaction.job import CompactionOptions
    from arroyo_dagster.state.operations.compaction.publish import CompactionOutcome
    from arroyo_dagster.state.operations.compaction.rewrite import RunRewrites
    from arroyo_dagster.state.operations.gc.execute import GcOptions, GcOutcome
    from arroyo_dagster.state.operations.gc.plan import GcRequest
    from arroyo_dagster.state.storage.store import ObjectStore


_STARTING = threading.Lock()


class MaintenanceRunner(dg.ConfigurableResource):  # type: ignore[type-arg]
    """Compacts jobs and runs gc plans, in the process of the step unless overridden.

    Three are built in; subclass it to add another engine.
    """

    one_job_at_a_time: ClassVar[bool] = False
    """Whether a batch serves its jobs one after the other, in the main thread: the only one that an
    interrupt reaches while it waits for a process."""

    def run_compaction(
        self,
        store: "ObjectStore",
        paths: JobPaths,
        settings: CompactionSettings,
        options: "CompactionOptions",
    ) -> "CompactionOutcome":
        """Compact a job; see `state.operations.compaction.job.run_compaction`."""
        from arroyo_dagster.state.operations.compaction.job import run_compaction

        return run_compaction(store, paths, settings, options)

    def run_gc(
        self,
        store: "ObjectStore",
        paths: JobPaths,
        request: "GcRequest",
        options: "GcOptions",
        *,
        plan: "GcPlan",
    ) -> "GcOutcome":
        """Execute a gc plan; see `state.operations.gc.execute.run_gc`."""
        from arroyo_dagster.state.operations.gc.execute import run_gc

        return run_gc(store, paths, request, options, plan=plan)

    def rewrites(self) -> "RunRewrites":
        """Return what writes the new files of Arroyo jobs."""
        from arroyo_dagster.state.operations.compaction.rewrite import rewrite_here

        return rewrite_here


class SparkThresholdFields(dg.ConfigurableResource):  # type: ignore[type-arg]
    """From which amount of work a runner leaves the process of the step."""

    in_process_mb: int = Field(
        default=64,
        description="Steps that read or copy fewer MiB run in the process of the step.",
    )
    spark_from_files: int = Field(
        default=2_000, description="Steps that open or copy this many files run on Spark."
    )
    spark_from_objects: int = Field(
        default=20_000, description="Steps that list or delete this many objects run on Spark."
    )

    @property
    def thresholds(self) -> "SparkThresholds":
        """From which amount of work a step runs on Spark: if any of them is reached."""
        from arroyo_dagster.spark.thresholds import SparkThresholds

        return SparkThresholds(
            size_bytes=self.in_process_mb << 20,
            files=self.spark_from_files,
            objects=self.spark_from_objects,
        )


class SparkRunner(SparkThresholdFields, MaintenanceRunner):
    """Runs on Spark. No session is started if there is little or nothing to do."""

    spark: dg.ResourceDependency[SparkSessionResource]

    def _session(self) -> Any:
        with _STARTING:  # jobs of a batch are served at the same time, in one session
            return self.spark.session

    def run_compaction(
        self,
        store: "ObjectStore",
        paths: JobPaths,
        settings: CompactionSettings,
        options: "CompactionOptions",
    ) -> "CompactionOutcome":
        from arroyo_dagster.spark.compaction import run_compaction_on_spark

        return run_compaction_on_spark(
            self._session, store, paths, settings, options, thresholds=self.thresholds
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

        thresholds = self.thresholds
        return run_gc_on_spark(
            self._session, store, paths, request, options, plan=plan, thresholds=thresholds
        )

    def rewrites(self) -> "RunRewrites":
        from arroyo_dagster.spark.rewrite import rewrites_on_spark

        return rewrites_on_spark(self._session, self.thresholds)


class InProcessRunner(MaintenanceRunner):
    """Runs in the process of the step: for small state, and for hosts without Java."""


@dataclass(frozen=True)
class Tools:
    """The resources that pipelines are served with."""

    store: ArroyoStateStore
    runner: MaintenanceRunner
    directory: ArroyoDirectory
