"""`rebuild`: write lost or damaged metadata of an epoch anew. Without --yes nothing changes."""

from __future__ import annotations

from typing import Any

import click

from arroyo_dagster.cli.common import main
from arroyo_dagster.cli.rendering import print_json
from arroyo_dagster.cli.settings import WholeNumber
from arroyo_dagster.cli.surgery.commands import options_of
from arroyo_dagster.cli.surgery.options import edit_options, opened
from arroyo_dagster.state.codec.derived import plain_values
from arroyo_dagster.state.model.surgery.rebuild import RebuildOutcome
from arroyo_dagster.state.model.units import plural
from arroyo_dagster.state.operations.surgery.rebuild.execute import (
    find_damaged_job,
    plan_rebuild,
    run_rebuild,
)


@main.command()
@click.argument("job")
@click.argument("epoch", type=WholeNumber(1), required=False)
@edit_options
def rebuild(job: str, epoch: int | None, **given: Any) -> None:
    """Write lost or damaged metadata of a stopped Arroyo job anew, from its data files.

    Without EPOCH it is the newest visible one. The plan starts from the nearest older epoch,
    adds the files of the epoch itself, and names every doubt. Readable metadata is never
    overwritten. What cannot be known is refused, and so is an epoch that would not pass
    verification. `undo` undoes it until the job is started. Name a job whose
    current-generation.json is lost as PIPELINE/JOB.

    \b
    Example:
      arroyo-state rebuild job_x --assume job_x=stopped
    """
    store, paths, directory = opened(job, given, find_damaged_job)
    if given["yes"]:
        outcome = run_rebuild(store, paths, directory, epoch, options_of(paths, given))
    else:
        outcome = RebuildOutcome(plan=plan_rebuild(store, paths, directory, epoch))
    if given["as_json"]:
        print_json(_as_json(outcome))
    else:
        _print(outcome)


def _print(outcome: RebuildOutcome) -> None:
    plan = outcome.plan
    name = plan.paths.root
    for path, data in plan.before.items():
        click.echo(f"{'missing' if data is None else 'damaged'}: {path}")
    for operator, source in plan.source.items():
        click.echo(f"{operator}: as in epoch {source}, with the files of epoch {plan.epoch}")
    for one in plan.tables:
        click.echo(
            f"{one.operator}.{one.table}: {len(one.carried)} files stay, {len(one.added)} are added"
        )
    for text in plan.doubts:
        click.echo(f"doubt: {text}")
    if outcome.record is not None:
        click.echo(
            f"{name}: {plural(len(plan.after), 'object')} of epoch {plan.epoch} rebuilt; "
            "`arroyo-state undo` undoes it until the job is started"
        )
        return
    step = f"not now: {plan.why_not}" if plan.why_not else "add --yes to execute"
    click.echo(
        f"{name}: rebuild {plan.digest} of {plural(len(plan.after), 'object')} of epoch "
        f"{plan.epoch}; nothing was changed, {step}"
    )


def _as_json(outcome: RebuildOutcome) -> dict[str, object]:
    plan = outcome.plan
    return {
        "job": plan.paths.root,
        "digest": plan.digest,
        "epoch": plan.epoch,
        "why_not": plan.why_not,
        "source_epochs": dict(plan.source),
        "objects": {
            path: "missing" if data is None else "damaged" for path, data in plan.before.items()
        },
        "tables": plain_values(plan.tables),
        "doubts": list(plan.doubts),
        "done": outcome.record is not None,
        "record": outcome.record,
    }
