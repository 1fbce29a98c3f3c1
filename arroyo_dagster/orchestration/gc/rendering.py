"""Format a gc run for people: its plan, its proof, its outcome and its journal."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from arroyo_dagster.orchestration import rendering as shown
from arroyo_dagster.state.model.garbage import GcPlan, PlanKind
from arroyo_dagster.state.model.objects import StoredObject

if TYPE_CHECKING:
    from arroyo_dagster.state.operations.gc.execute import GcOutcome
    from arroyo_dagster.state.operations.gc.journal import JournalEntry, JournalRun


def format_plan(plan: GcPlan) -> str:
    """Format the plan as one line for the log of a run."""
    epochs = f"{len(plan.epochs)} epochs, " if plan.kind is PlanKind.EXPIRE else ""
    return (
        f"{epochs}{plan.objects} objects, {plan.size_bytes} bytes would be deleted; plan "
        f"{plan.digest}"
    )


def format_outcome(outcome: "GcOutcome") -> str:
    """Format the outcome as one line for the log of a run."""
    aside = f", moved to {outcome.quarantine}" if outcome.quarantine else ""
    return f"{outcome.deleted} objects, {outcome.size_bytes} bytes deleted{aside}"


def plan_metadata(plan: GcPlan) -> dict[str, Any]:
    """Return what a plan would delete; Dagster plots the numbers over time."""
    return shown.known(
        {
            "arroyo/plan": plan.digest,
            "arroyo/reclaimable_bytes": plan.size_bytes,
            "arroyo/reclaimable_objects": plan.objects,
            "arroyo/epochs": len(plan.epochs),
            "arroyo/keep_from": plan.keep_from,
            "arroyo/rule": {name: value for name, value in plan.rule.items() if value is not None},
            "what goes first": shown.table(_objects(plan.data)),
            "why the rest stays": shown.table(_stays(plan)),
            "foreign": shown.table({"object": str(path)} for path in plan.foreign),
            **proof_metadata(plan),
        }
    )


def _objects(objects: Iterable[StoredObject]) -> Iterable[Mapping[str, Any]]:
    return (
        {"object": str(one.path), "bytes": one.size_bytes, "etag": one.etag}
        for one in islice(objects, shown.TABLE_ROWS)
    )


def _stays(plan: GcPlan) -> Iterable[Mapping[str, Any]]:
    return (
        {"because": reason, "objects": count, "bytes": size}
        for reason, (count, size) in plan.stays.items()
    )


def proof_metadata(plan: GcPlan) -> dict[str, Any]:
    """Return the proof that nothing that stays needs what would be deleted."""
    proof = plan.proof
    return shown.known(
        {
            "arroyo/roots_read": len(proof.roots),
            "arroyo/epochs_read": proof.epochs,
            "arroyo/files_referenced": proof.referenced,
            "arroyo/digest_of_referenced": proof.digest,
            "arroyo/head": proof.head,
            "arroyo/condition": proof.condition,
            "arroyo/objects_listed": proof.listed,
        }
    )


def outcome_metadata(outcome: "GcOutcome") -> dict[str, Any]:
    """Return what a run deleted, as read back; Dagster plots the numbers over time."""
    plan = outcome.plan
    return shown.known(
        {
            "arroyo/plan": plan.digest,
            "arroyo/reclaimed_bytes": outcome.size_bytes,
            "arroyo/reclaimed_objects": outcome.deleted,
            "arroyo/journal": outcome.run,
            "arroyo/quarantine": outcome.quarantine,
            "arroyo/kept_epochs": plan.proof.epochs - len(plan.epochs),
            "arroyo/oldest_epoch": plan.keep_from,
            "arroyo/removed_epochs": len(plan.epochs),
            "arroyo/removed_files": len(plan.data),
            "arroyo/removed_bytes": plan.data.size_bytes,
        }
    )


def journal_metadata(
    runs: Sequence["JournalRun"], entries: Sequence["JournalEntry"]
) -> dict[str, Any]:
    """Return what was ever deleted from a job, run by run, and what the newest run did."""
    return shown.known(
        {
            "arroyo/runs": len(runs),
            "arroyo/reclaimed_bytes_ever": sum(run.size_bytes for run in runs),
            "arroyo/newest_run": runs[-1].name,
            "runs": shown.table(map(_run, reversed(runs))),
            "newest run": shown.table(map(_entry, entries)),
            "bytes, run by run": shown.sparkline([float(run.size_bytes) for run in runs]),
        }
    )


def _run(run: "JournalRun") -> Mapping[str, Any]:
    return {
        "run": run.name,
        "who": run.owner,
        "what": run.kind,
        "objects": run.objects,
        "bytes": run.size_bytes,
        "plan": run.plan,
        "quarantine": run.quarantine,
        "ended": run.ended,
    }


def _entry(entry: "JournalEntry") -> Mapping[str, Any]:
    return {
        "object": str(entry.path),
        "bytes": entry.size_bytes,
        "etag": entry.etag,
        "outcome": entry.outcome,
    }
