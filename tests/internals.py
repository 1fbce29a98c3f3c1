"""Operations, leases and runs that are not public, in one place for all tests."""

from __future__ import annotations

from arroyo_dagster.engine.coordinator import JobRun
from arroyo_dagster.engine.in_process import LocalRun
from arroyo_dagster.engine.operators import Offset
from arroyo_dagster.state.metadata.lease import LeaseOptions, lease, newest_lease
from arroyo_dagster.state.operations.catalog.changes import FleetCursor
from arroyo_dagster.state.operations.catalog.job_directory import (
    AssumedJobs,
    JobDirectory,
    open_directory,
)
from arroyo_dagster.state.operations.catalog.query import load_epoch
from arroyo_dagster.state.operations.compaction import controlled_job
from arroyo_dagster.state.operations.compaction.rewrite import rewrite_here
from arroyo_dagster.state.operations.gc.journal import read_journal
from arroyo_dagster.state.operations.gc.pins import read_pins
from arroyo_dagster.state.operations.gc.quarantine import list_quarantines, purge
from arroyo_dagster.state.operations.gc.roots import read_roots
from arroyo_dagster.state.operations.gc.steps import Pace
from arroyo_dagster.state.operations.gc.undelete import UndeleteOptions, run_undelete
from arroyo_dagster.state.operations.query.diff import CHANGE, Change
from arroyo_dagster.state.operations.query.sql import SqlCatalog
from arroyo_dagster.state.operations.surgery.carried_files import StateSource
from arroyo_dagster.state.operations.surgery.evolve import plan_evolve, run_evolve
from arroyo_dagster.state.operations.surgery.execute import EditOptions, run_edit
from arroyo_dagster.state.operations.surgery.fork import plan_fork, run_fork
from arroyo_dagster.state.operations.surgery.managed.execute import run_managed_edit
from arroyo_dagster.state.operations.surgery.plan import plan_edit
from arroyo_dagster.state.operations.surgery.rebuild.execute import run_rebuild
from arroyo_dagster.state.operations.surgery.rollback import plan_job_rollback, run_job_rollback
from arroyo_dagster.state.planning.restore.checkpoint import merge_operator
from arroyo_dagster.state.planning.restore.reads import restore_plan
from arroyo_dagster.state.planning.restore.recovery import Claim, Restore, StartEmpty
from arroyo_dagster.state.planning.surgery.overrides import parse_overrides
from arroyo_dagster.state.tables.known.operators import ExpressionWatermarkState
from arroyo_dagster.state.tables.merge.rewrite import RewriteTask
from arroyo_dagster.state.tables.restoring import restored_rows

__all__ = [
    "CHANGE", "AssumedJobs", "Change", "Claim", "EditOptions", "ExpressionWatermarkState",
    "FleetCursor", "JobDirectory", "JobRun", "LeaseOptions", "LocalRun", "Offset", "Pace",
    "Restore", "RewriteTask", "SqlCatalog", "StartEmpty", "StateSource", "UndeleteOptions",
    "controlled_job", "lease", "list_quarantines", "load_epoch", "merge_operator",
    "newest_lease", "open_directory", "parse_overrides", "plan_edit", "plan_evolve",
    "plan_fork", "plan_job_rollback", "purge", "read_journal", "read_pins", "read_roots",
    "restore_plan", "restored_rows", "rewrite_here", "run_edit", "run_evolve", "run_fork",
    "run_job_rollback", "run_managed_edit", "run_rebuild", "run_undelete",
]  # fmt: skip
