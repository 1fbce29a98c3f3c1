"""Print the plans and outcomes of edits, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from arroyo_dagster.cli.rendering import print_json, print_table
from arroyo_dagster.state.codec.derived import plain_values
from arroyo_dagster.state.codec.iso_times import iso_micros
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.surgery.plans import EditOutcome, EditPlan
from arroyo_dagster.state.model.units import plural
from arroyo_dagster.state.operations.surgery.managed.execute import ManagedUndo
from arroyo_dagster.state.operations.undo import UndoOutcome

ENTRIES_PRINTED = 20
"""The maximum number of changed entries that are printed."""


def print_plan(plan: EditPlan, *, in_full: bool, in_window: bool = False) -> None:
    """Print what becomes of each table, the evidence, and what outputs will show.

    Args:
        in_full: tables that stay and met preconditions as well, and how to execute the plan.
        in_window: it would be executed in a window, so that the job may run.
    """
    steps = plan.tables if in_full else plan.changed
    lines = [(step.operator, step.table, step.action.value, step.reason) for step in steps]
    if lines:
        print_table(("operator", "table", "action", "reason"), lines, notes="reason")
    if in_full and plan.matches:
        print_table(
            ("operator", "takes the state of", "because"),
            [(match.operator, match.source, match.why) for match in plan.matches],
            notes="because",
        )
    for line in _entry_lines(plan):
        click.echo(line)
    for change in plan.watermarks:
        click.echo(
            f"watermark of {change.operator}: {iso_micros(change.before_micros)} becomes "
            f"{iso_micros(change.after_micros)}"
        )
    for precondition in plan.preconditions:
        if in_full or not precondition.met:
            met = "met" if precondition.met else "not met"
            click.echo(f"precondition {met}: {precondition.name} ({precondition.evidence})")
    for title, texts in (
        ("seen twice", plan.duplicate_outputs),
        ("never seen", plan.missing_outputs),
        ("not known", plan.unknown),
    ):
        for text in texts:
            click.echo(f"{title}: {text}")
    for text in plan.afterwards:
        by_hand = "to do by hand, if the job is stopped already" if in_window else "to do by hand"
        click.echo(f"{by_hand}: {text}")
    if in_full:
        click.echo(f"{plan.paths.root}: {_last_line(plan, in_window=in_window)}")


def _entry_lines(plan: EditPlan) -> Iterator[str]:
    changes = [(step, entry) for step in plan.tables for entry in step.entries]
    for step, entry in changes[:ENTRIES_PRINTED]:
        where = f"{step.operator}.{step.table}"
        yield f"entry {entry.key} of {where}: {entry.before} becomes {entry.after}"
    if len(changes) > ENTRIES_PRINTED:
        yield f"and {len(changes) - ENTRIES_PRINTED} more entries; --json prints all"


def _last_line(plan: EditPlan, *, in_window: bool) -> str:
    if plan.empty:
        return f"nothing to change at epoch {plan.epoch}"
    step = "add --yes to execute"
    if in_window:
        step = "--yes stops the job, executes the plan at the epoch then, and starts it again"
    elif plan.why_not:
        step = f"not now: {plan.why_not}"
    new = "" if plan.publishes is None else f", as epoch {plan.publishes}"
    if plan.creates:
        new = ", which it creates"
    return (
        f"plan {plan.digest} changes {plural(len(plan.changed), 'table')} at epoch "
        f"{plan.epoch}{new}; nothing was changed, {step}"
    )


def print_outcome(outcome: EditOutcome) -> None:
    """Print what an edit did, and what still holds the old state."""
    plan = outcome.plan
    print_plan(plan, in_full=False)
    name = plan.paths.root
    if not outcome.published:
        click.echo(f"{name}: nothing to change at epoch {plan.epoch}")
        return
    if outcome.unlisted:
        older = ", ".join(map(str, outcome.older_epochs)) or "none"
        click.echo(
            f"{name}: {plural(len(outcome.unlisted), 'file')} no longer listed, and no file was "
            f"deleted; older epochs: {older}"
        )
    for text in outcome.evidence:
        click.echo(f"evidence: {text}")
    for path, (before, after) in outcome.objects.items():
        became = "is new" if before is None else f"{before} became"
        click.echo(f"{path}: sha256 {became} {after}")
    done = f"{plural(len(outcome.objects), 'metadata object')} "
    done += "created" if plan.creates else "overwritten"
    if plan.publishes is not None:
        done = f"published as epoch {plan.publishes}, epoch {plan.epoch} stays pinned"
    click.echo(
        f"{name}: {plan.edit.name} done at epoch {plan.epoch}, {done}; "
        "`arroyo-state undo` undoes it until the job is started"
    )


def outcome_json(outcome: EditOutcome) -> dict[str, Any]:
    """Return the JSON form of an edit; the plan alone if nothing was done."""
    plan = outcome.plan
    document: dict[str, Any] = plain_values(plan)
    return {
        "plan": {**document, "operation": plan.edit.name, "digest": plan.digest},
        "done": outcome.published,
        "epoch": plan.epoch if plan.publishes is None else plan.publishes,
        "objects": {
            path: {"before": before, "after": after}
            for path, (before, after) in outcome.objects.items()
        },
        "unlisted_files": list(outcome.unlisted),
        "older_epochs": list(outcome.older_epochs),
        "evidence": list(outcome.evidence),
        "undo_record": outcome.record,
    }


def show_managed_undo(
    paths: JobPaths, found: ManagedUndo | None, *, done: bool, as_json: bool
) -> None:
    """Print which edit of a managed job was undone, or would be."""
    if as_json:
        print_json(
            {
                "done": done and found is not None,
                "operation": None if found is None else found.operation,
                "restores_epoch": None if found is None else found.rollback.epoch,
                "epoch": None if found is None else found.rollback.publishes,
                "why_not": None if found is None else found.why_not,
            }
        )
    elif found is None:
        click.echo(f"{paths.root}: there is nothing to undo")
    elif done:
        click.echo(
            f"{paths.root}: epoch {found.rollback.publishes} has the state of epoch "
            f"{found.rollback.epoch}, from before the edit {found.operation!r}; no file was deleted"
        )
    else:
        step = f"not now: {found.why_not}" if found.why_not else "add --yes to execute"
        click.echo(
            f"{paths.root}: the state of epoch {found.rollback.epoch}, from before the edit "
            f"{found.operation!r}, would be published as epoch {found.rollback.publishes}; nothing "
            f"was changed, {step}"
        )


def show_undo(paths: JobPaths, outcome: UndoOutcome, *, as_json: bool) -> None:
    """Print which objects got their bytes from before, or would get them."""
    if as_json:
        print_json(
            {
                "done": outcome.done,
                "operation": outcome.operation,
                "epoch": outcome.epoch,
                "objects": [*outcome.objects, *outcome.deleted],
                "restored": list(outcome.objects),
                "deleted": list(outcome.deleted),
            }
        )
        return
    if outcome.record is None:
        click.echo(f"{paths.root}: there is nothing to undo")
        return
    for path in outcome.objects:
        click.echo(f"restored: {path}" if outcome.done else f"would be restored: {path}")
    for path in outcome.deleted:
        click.echo(f"deleted: {path}" if outcome.done else f"would be missing again: {path}")
    undone = outcome.operation or "compaction"
    if outcome.done:
        click.echo(
            f"{paths.root}: the {undone} of epoch {outcome.epoch} was undone; no data file was "
            "deleted"
        )
    else:
        click.echo(
            f"{paths.root}: the {undone} of epoch {outcome.epoch} would be undone; nothing was "
            "changed, add --yes to execute"
        )
