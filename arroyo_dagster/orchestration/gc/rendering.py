"""Format a gc run for people: its plan, its proof, its outcome and its journal."""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from arroyo_dagster.orchestration import rendering as shown
from arroyo_dagster.state.model.garbage import GcPlan, PlanKind
from arroyo_dagster.state.model.objects import StoredObject
from arroyo_dagster.state.model.units import format_bytes

if TYPE_CHECKING:
    from arroyo_dagster.state.operations.gc.execute import GcOutcome

_OBJECTS_LISTED = 20
"""How many objects a page lists; `arroyo-state gc plan` and `sql @journal` list all."""


def format_plan(plan: GcPlan) -> str:
    """Format the plan as one line for the log of a run."""
    epochs = f"{shown.counted(len(plan.epochs), 'epoch')}, " if plan.kind is PlanKind.EXPIRE else ""
    objects = _format_objects(plan.objects, plan.size_bytes)
    return f"{epochs}{objects} would be deleted; plan {plan.digest}"


def format_outcome(outcome: "GcOutcome") -> str:
    """Format the outcome as one line for the log of a run."""
    aside = f", moved to {outcome.quarantine}" if outcome.quarantine else ""
    return f"{_format_objects(outcome.deleted, outcome.size_bytes)} deleted{aside}"


def _format_objects(count: int, size_bytes: int) -> str:
    return f"{shown.counted(count, 'object')}, {shown.size(size_bytes)}"


def plan_metadata(plan: GcPlan) -> dict[str, Any]:
    """Return what a plan would delete, and why the rest stays."""
    rule = {name: value for name, value in plan.rule.items() if value is not None}
    return shown.known(
        {
            "would be deleted": _format_objects(plan.objects, plan.size_bytes),
            "epochs": _format_epochs(plan),
            "arroyo/plan": plan.digest,
            "rule": ", ".join(f"{name}: {value}" for name, value in rule.items()) or None,
            "why the rest stays": shown.table(_stays(plan)),
            "what goes first": shown.table(_objects(plan.data)),
            "foreign": shown.table({"object": str(path)} for path in plan.foreign),
            "remains of interrupted writes": len(plan.remains) or None,
            **proof_metadata(plan),
        }
    )


def _format_epochs(plan: GcPlan) -> str | None:
    """Format which epochs go and which stay; None if no epoch goes."""
    if not plan.epochs:
        return None
    from_epoch = "" if plan.keep_from is None else f", from epoch {plan.keep_from} on"
    kept = plan.proof.epochs - len(plan.epochs)
    return f"{len(plan.epochs):,} removed, {kept:,} kept{from_epoch}"


def _objects(objects: Iterable[StoredObject]) -> Iterable[Mapping[str, Any]]:
    return (
        {"object": str(file.path), "size": format_bytes(file.size_bytes)}
        for file in islice(objects, _OBJECTS_LISTED)
    )


def _stays(plan: GcPlan) -> Iterable[Mapping[str, Any]]:
    return (
        {"because": reason, "objects": f"{count:,}", "size": format_bytes(size)}
        for reason, (count, size) in plan.stays.items()
    )


def proof_metadata(plan: GcPlan) -> dict[str, Any]:
    """Return the proof that nothing that stays needs what would be deleted."""
    proof = plan.proof
    read = {
        "root": len(proof.roots),
        "epoch": proof.epochs,
        "referenced file": proof.referenced,
        "listed object": proof.listed or 0,
    }
    counts = (shown.counted(count, noun) for noun, count in read.items())
    return shown.known(
        {
            "proof": f"read {', '.join(counts)}",
            "arroyo/digest_of_referenced": proof.digest,
            "arroyo/head": proof.head,
            "arroyo/condition": proof.condition,
        }
    )


def outcome_metadata(outcome: "GcOutcome") -> dict[str, Any]:
    """Return what a run deleted, as read back; Dagster plots the numbers over time."""
    plan = outcome.plan
    return shown.known(
        {
            "deleted": _format_objects(outcome.deleted, outcome.size_bytes),
            "epochs": _format_epochs(plan),
            "data files": _format_files(plan),
            "engine": "; ".join(map(str, outcome.engines)) or None,
            "arroyo/plan": plan.digest,
            "arroyo/journal": outcome.run and f"{plan.paths.journal}/{outcome.run}",
            "arroyo/quarantine": outcome.quarantine,
        }
    )


def _format_files(plan: GcPlan) -> str:
    return f"{shown.counted(len(plan.data), 'file')}, {shown.size(plan.data.size_bytes)}"
