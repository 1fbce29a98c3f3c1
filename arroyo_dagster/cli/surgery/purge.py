"""Print the purge of a key: the plan for people, and the certificate as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from arroyo_dagster.cli.rendering import print_table
from arroyo_dagster.cli.surgery.rendering import outcome_json, print_plan
from arroyo_dagster.state.codec.plans import plain_values
from arroyo_dagster.state.model.surgery.plans import EditOutcome
from arroyo_dagster.state.model.surgery.purge import CatalogueRows, PurgeOutcome, PurgePlan
from arroyo_dagster.state.planning.restore.rollback import ranges


def print_purge(outcome: PurgeOutcome) -> None:
    """Print what holds a key, what is deleted for it, and what was."""
    plan = outcome.plan
    print_plan(plan.edit, in_full=False)
    lines = [
        (one.operator, one.table, one.rows, one.place, ranges(one.epochs), one.path)
        for one in plan.objects
    ]
    if lines:
        print_table(("operator", "table", "rows", "where", "epochs", "object"), lines)
    for line in _lines(plan):
        click.echo(line)
    name = plan.paths.root
    if not outcome.done:
        click.echo(f"{name}: {_last_line(plan)}")
        return
    for path in outcome.remaining:
        click.echo(f"still holds the key: {path}")
    state = "purged as far as it was searched" if outcome.unsearched else "purged"
    state = "NOT purged" if outcome.remaining else state
    click.echo(
        f"{name}: the key is {state}: {len(outcome.deleted)} of {len(plan.objects)} objects that "
        f"held it are deleted; the newest epoch is {outcome.epoch}; journal: "
        + (", ".join(outcome.journal_runs) or "nothing was deleted")
    )


def _lines(plan: PurgePlan) -> Iterator[str]:
    if plan.expires:
        yield f"deleted: epochs {ranges(plan.expires)}, with the files that no later epoch lists"
    if plan.releases:
        yield f"no longer undone: the edits of epochs {ranges(plan.releases)}, which were pinned"
    for name in plan.quarantines:
        yield f"deleted: quarantine {name}, as a whole"
    for one in plan.delivered:
        files = "unknown files" if one.files is None else ", ".join(one.files) or "no files"
        yield f"delivered downstream, and stays: sink {one.operator}, epoch {one.epoch}: {files}"
    for operator, targets in plan.sinks.items():
        yield f"delivered downstream, and stays: sink {operator}: {', '.join(targets)}"
    if plan.catalogue is not None:
        yield from _catalogue_lines(plan.catalogue)
    for text in plan.unknown:
        yield f"not known: {text}"


def _catalogue_lines(rows: CatalogueRows) -> Iterator[str]:
    known = "no source lists them (--arroyo-db does)"
    if rows.states is not None:
        known = ", ".join(f"epoch {epoch} {state}" for epoch, state in rows.states.items())
    yield (
        "stays in Arroyo's database, without a value of the state: rows of checkpoints below "
        f"epoch {rows.below}: {known}"
    )
    yield f"to do by hand: once the purge is done: {rows.statement}"


def _last_line(plan: PurgePlan) -> str:
    if plan.empty:
        return "nothing holds the key"
    step = f"not now: {plan.why_not}" if plan.why_not else "add --yes to execute"
    return f"purge {plan.digest} of {len(plan.objects)} objects; nothing was changed, {step}"


def purge_json(outcome: PurgeOutcome) -> dict[str, Any]:
    """Return the certificate of a deletion; the plan alone if nothing was done."""
    plan = outcome.plan
    edited = outcome.edit or EditOutcome(plan=plan.edit)
    deleted = {*outcome.deleted}
    return {
        "digest": plan.digest,
        "job": plan.paths.root,
        "done": outcome.done,
        "complete": outcome.done and not outcome.remaining and not outcome.unsearched,
        "why_not": plan.why_not,
        "epoch": outcome.epoch,
        "objects": [{**plain_values(one), "deleted": one.path in deleted} for one in plan.objects],
        "remaining": list(outcome.remaining),
        "expired_epochs": list(plan.expires),
        "released_pins": list(plan.releases),
        "quarantines": list(plan.quarantines),
        "journal_runs": list(outcome.journal_runs),
        "delivered": [plain_values(one) for one in plan.delivered],
        "catalogue": _catalogue_json(plan.catalogue),
        "sinks": {operator: list(targets) for operator, targets in plan.sinks.items()},
        "not_known": list(plan.unknown),
        "edit": outcome_json(edited),
    }


def _catalogue_json(rows: CatalogueRows | None) -> dict[str, Any] | None:
    if rows is None:
        return None
    return {
        "table": "checkpoints",
        "below_epoch": rows.below,
        "states": None if rows.states is None else dict(rows.states),
        "statement": rows.statement,
    }
