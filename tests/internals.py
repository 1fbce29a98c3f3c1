"""Operations, leases and runs that are not public, in one place for all tests."""

from __future__ import annotations

from arroyo_dagster.engine.coordinator import JobRun
from arroyo_dagster.engine.in_process import LocalRun
from arroyo_dagster.engine.operators import Offset
from arroyo_dagster.state.metadata.lease import LeaseOptions, lease, newest_lease
from arroyo_dagster.state.model.maintenance_window import WindowEnd
from arroyo_dagster.state.operations.catalog.changes import FleetCursor
from arroyo_dagster.state.operations.catalog.job_directory import (
    AssumedJobs,
    JobDirectory,
    open_directory,
)
from arroyo_dagster.state.operations.catalog.leases import break_lease
from arroyo_dagster.state.operations.catalog.query import load_epoch
from arroyo_dagster.state.operations.compaction import controlled_job
from arroyo_dagster.state.operations.compaction.rewrite import rewrite_here
from arroyo_dagster.state.operations.compaction.window_recovery import interrupted_windows
from arroyo_dagster.state.operations.gc.inventory import read_inventory
from arroyo_dagster.state.operations.gc.journal import list_runs, read_journal
from arroyo_dagster.state.operations.gc.pins import forget_changes, read_pins
from arroyo_dagster.state.operations.gc.quarantine import list_quarantines, purge
from arroyo_dagster.state.operations.gc.roots import read_roots
from arroyo_dagster.state.operations.gc.steps import Pace
from arroyo_dagster.state.operations.gc.undelete import UndeleteOptions, run_undelete
from arroyo_dagster.state.operations.query.diff import CHANGE, Change
from arroyo_dagster.state.operations.query.sql import SqlCatalog
from arroyo_dagster.state.operations.surgery.carried_files import StateSource
from arroyo_dagster.state.operations.surgery.evolve import plan_evolve, run_evolve
from arroyo_dagster.state.operations.surgery.execute import EditOptions, run_edit
from arroyo_dagster.state.operations.surgery.find_key import find_key
from arroyo_dagster.state.operations.surgery.fork import plan_fork, run_fork
from arroyo_dagster.state.operations.surgery.managed.execute import (
    plan_managed_undo,
    run_managed_edit,
    run_managed_undo,
)
from arroyo_dagster.state.operations.surgery.managed.plan import plan_managed_edit
from arroyo_dagster.state.operations.surgery.plan import plan_edit
from arroyo_dagster.state.operations.surgery.rebuild.execute import plan_rebuild, run_rebuild
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
    "WindowEnd", "break_lease", "controlled_job", "find_key", "forget_changes",
    "interrupted_windows", "lease", "list_quarantines", "list_runs", "load_epoch",
    "merge_operator", "newest_lease", "open_directory", "parse_overrides", "plan_edit",
    "plan_evolve", "plan_fork", "plan_job_rollback", "plan_managed_edit", "plan_managed_undo",
    "plan_rebuild", "purge", "read_inventory", "read_journal", "read_pins", "read_roots",
    "restore_plan", "restored_rows", "rewrite_here", "run_edit", "run_evolve", "run_fork",
    "run_job_rollback", "run_managed_edit", "run_managed_undo", "run_rebuild", "run_undelete",
]  # fmt: skip
