"""Format the plans, outcomes, reasons and journals of gc."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from arroyo_dagster.cli.rendering import print_table, print_text
from arroyo_dagster.state.codec.derived import plain_values
from arroyo_dagster.state.codec.gc import gc_plan_to_json
from arroyo_dagster.state.model.garbage import GcPlan, PlanKind
from arroyo_dagster.state.model.units import format_bytes, plural

if TYPE_CHECKING:
    from arroyo_dagster.state.operations.gc.execute import GcOutcome
    from arroyo_dagster.state.operations.gc.explain import Explained, Reasons
    from arroyo_dagster.state.planning.gc.orphans import Reason


def outcome_json(outcome: GcOutcome) -> dict[str, Any]:
    return {
        "plan": gc_plan_to_json(outcome.plan),
        "done": outcome.done,
        "deleted": outcome.deleted,
        "size_bytes": outcome.size_bytes,
        "run": outcome.run,
        "quarantine": outcome.quarantine,
        "purged": list(outcome.purged),
        "remains": outcome.remains,
        "engines": plain_values(outcome.engines),
    }


def print_outcome(outcome: GcOutcome, *, yes: bool, why: str | None = None) -> None:
    """Print what was deleted, or would be.

    Args:
        why: why nothing is deleted, if that is known.
    """
    plan = outcome.plan
    root = plan.paths.root
    if plan.stays:
        print_table(
            ("stays because", "objects", "bytes"),
            [(reason, count, format_bytes(size)) for reason, (count, size) in plan.stays.items()],
        )
    proof = plan.proof
    print_text(
        f"{root}: {plural(len(proof.roots), 'root')} of {plural(proof.epochs, 'epoch')} read; "
        f"{plural(proof.referenced, 'file')} referenced by what stays, digest {proof.digest}"
    )
    for path in plan.foreign[:5]:
        click.echo(f"unknown file, never deleted: {path}")
    for file in plan.remains[:5]:
        click.echo(f"remains of an interrupted write: {file.name}")
    for choice in outcome.engines:
        print_text(f"{root}: {choice}")
    if plan.purges:
        gone = "purged" if yes else "old enough, to be purged first"
        print_text(
            f"{root}: {plural(len(plan.purges), 'quarantine')} {gone}: {', '.join(plan.purges)}"
        )
    if plan.remains:
        size = format_bytes(sum(file.size_bytes for file in plan.remains))
        end = "were deleted" if yes else "would be deleted"
        print_text(f"{root}: {outcome.remains} remains of interrupted writes, {size}, {end}")
    print_text(f"{root}: {_format_collection(plan, outcome, yes=yes, why=why)}")


def _format_collection(plan: GcPlan, outcome: GcOutcome, *, yes: bool, why: str | None) -> str:
    if not plan.objects:
        rest = "nothing else to delete" if plan.remains else "nothing to delete"
        rest += f": {why}" if why else ""
        return f"{rest}; plan {plan.digest}" if plan.remains and not yes else rest
    epochs = f"{plural(len(plan.epochs), 'epoch')}, " if plan.kind is PlanKind.EXPIRE else ""
    amount = f"{epochs}{plural(outcome.deleted, 'object')}, {format_bytes(outcome.size_bytes)}"
    if not yes:
        return (
            f"{amount} would be deleted; plan {plan.digest}; nothing was deleted, add --yes to "
            "execute"
        )
    if outcome.quarantine is not None:
        return f"{amount} moved to {outcome.quarantine}; `gc undelete` restores them"
    return f"{amount} deleted; journal {outcome.run}"


def reasons_json(reasons: Reasons) -> dict[str, Any]:
    return {
        "reasons": {
            reason.name.lower(): {
                "objects": count,
                "size_bytes": size,
                "deletable": reason.goes,
            }
            for reason, (count, size) in reasons.counts.items()
        },
        "reclaimable_bytes": reasons.reclaimable_bytes,
        "undecided": reasons.undecided,
    }


def print_reasons(reasons: Reasons) -> None:
    print_table(
        ("", "objects", "bytes", "why"),
        [
            (_verdict(reason), count, format_bytes(size), reason.value)
            for reason, (count, size) in reasons.counts.items()
        ],
    )
    if reasons.undecided:
        click.echo(f"not decided: {reasons.undecided}")


def explained_lines(found: Explained) -> Iterator[str]:
    """Yield whether an object stays or may be deleted, why, and what refers to it."""
    yield f"{_verdict(found.reason)}: {found.undecided or found.reason.value}"
    if found.by:
        yield f"referenced by {', '.join(found.by)}"


def _verdict(reason: Reason) -> str:
    return "may be deleted" if reason.goes else "stays"
