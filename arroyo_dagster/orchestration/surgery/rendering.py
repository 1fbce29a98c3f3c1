"""Metadata of a planned or executed change of a job's state."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from arroyo_dagster.orchestration import rendering as shown
from arroyo_dagster.redaction import without_secrets

if TYPE_CHECKING:
    from arroyo_dagster.state.model.surgery.plans import EditOutcome, EditPlan


def plan_metadata(plan: "EditPlan") -> dict[str, Any]:
    """Return what becomes of each table, what outputs will show, and the digest to approve."""
    return shown.known(
        {
            "arroyo/plan": plan.digest,
            "job": str(plan.paths.root),
            "epoch": int(plan.epoch),
            "operation": plan.edit.name,
            "why not": None if plan.why_not is None else without_secrets(plan.why_not),
            "tables": shown.table(
                {
                    "operator": table.operator,
                    "table": table.table,
                    "action": table.action.value,
                    "files": len(table.files),
                    "takes the state of": table.source,
                    "reason": table.reason,
                }
                for table in plan.tables
            ),
            "seen twice": _texts(plan.duplicate_outputs),
            "never seen": _texts(plan.missing_outputs),
            "not known": _texts(plan.unknown),
            "preconditions": shown.table(
                {
                    "precondition": precondition.name,
                    "met": precondition.met,
                    "evidence": without_secrets(precondition.evidence),
                }
                for precondition in plan.preconditions
            ),
        }
    )


def outcome_metadata(outcome: "EditOutcome") -> dict[str, Any]:
    """Return what was done, and the record that undoes it."""
    return {
        **plan_metadata(outcome.plan),
        "arroyo/record": str(outcome.record),
        "metadata objects": shown.table(
            {"object": path, "sha256 before": before, "sha256 after": after}
            for path, (before, after) in outcome.objects.items()
        ),
        "unlisted files": len(outcome.unlisted),
        "undo": f"arroyo-state undo {outcome.plan.paths.root} --yes",
    }


def _texts(texts: Iterable[str]) -> Any:
    return shown.table({"what": text} for text in texts)
