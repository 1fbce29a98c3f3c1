"""Maintenance window: stop a running Arroyo job with a checkpoint, rewrite its state, start it
again.
"""

from __future__ import annotations

from dataclasses import dataclass

from arroyo_dagster.state.model.compaction import CompactionSettings
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.maintenance_window import WindowOutcome
from arroyo_dagster.state.model.rewrite import RewriteOutcome, RewritePlan
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.compaction.controlled_job import JobControl
from arroyo_dagster.state.operations.compaction.job_window import JobWindow, WorkOptions
from arroyo_dagster.state.operations.compaction.rewrite import (
    RewriteOptions,
    RunRewrites,
    plan_rewrite,
    rewrite_here,
    run_rewrite,
)
from arroyo_dagster.state.operations.compaction.window_recovery import JobWindowOptions
from arroyo_dagster.state.storage.store import ObjectStore

RewriteWindow = WindowOutcome[RewritePlan, RewriteOutcome]
"""What a maintenance window did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowOptions(JobWindowOptions):
    """Options of a maintenance window.

    Attributes:
        settings: which files are rewritten, and how.
        run: executes the parts of the rewrite.
    """

    settings: CompactionSettings | None = None
    run: RunRewrites = rewrite_here


def run_window(
    store: ObjectStore,
    paths: JobPaths,
    control: JobControl,
    options: WindowOptions | None = None,
    *,
    dry_run: bool = False,
) -> RewriteWindow:
    """Stop a running Arroyo job with a checkpoint, rewrite its state, and start it again.

    A job that was stopped before is rewritten and stays stopped. A job that an earlier window left
    stopped is started again, and nothing else is done. A job with nothing to rewrite is not
    touched. If the job does not run from the rewritten state, the original metadata is restored.

    Args:
        control: Arroyo's own API; no other source is accepted here.
        dry_run: plan only, and change nothing.

    Returns:
        The outcome. `started` is False if it is not certain that the job runs; its record then
        stays, and `recover_window` starts the job later.

    Raises:
        InputError: the job is neither running nor at rest, or the window closes too soon.
        LeaseHeldError: another process maintains the job, or holds its window; the job was not
            touched.
        NotFoundError, FormatError, StorageError: before the job was touched.
    """
    run_options = options or WindowOptions()
    work = _Rewrite(paths, run_options.settings, run_options.run)
    return JobWindow(store, paths, control, run_options, work).open(dry_run=dry_run)


@dataclass(frozen=True, slots=True)
class _Rewrite:
    """The rewrite of a job's files, as the work of a window."""

    paths: JobPaths
    settings: CompactionSettings | None
    parts: RunRewrites
    edits: bool = False
    """Rewritten in part, the state holds the same rows."""

    def plan(self, store: ObjectStore, directory: JobDirectory) -> RewritePlan:
        return plan_rewrite(store, self.paths, directory, self.settings)

    def is_empty(self, plan: RewritePlan) -> bool:
        return not plan.tables

    def run(
        self,
        store: ObjectStore,
        directory: JobDirectory,
        planned: RewritePlan,
        options: WorkOptions,
    ) -> RewriteOutcome:
        how = options.into(RewriteOptions, run=self.parts)
        return run_rewrite(store, self.paths, directory, self.settings, how)

    def parallelism(self, store: ObjectStore, change: RewriteOutcome) -> None:
        return None

    def summarize(self, change: RewriteOutcome) -> str:
        if not change.published:
            return "nothing was rewritten"
        return f"rewritten: {change.plan.before.files} files became {change.after.files}"
