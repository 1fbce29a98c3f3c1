"""`copy`: copy a job to another checkpoint URL. Without --yes nothing is copied."""

from __future__ import annotations

import click

from arroyo_dagster.cli.common import (
    find_job_and_epoch,
    main,
    open_another,
    open_to_read,
    open_url,
    print_lease_event,
    store_options,
)
from arroyo_dagster.cli.rendering import print_json, show_progress
from arroyo_dagster.cli.settings import settings_options
from arroyo_dagster.cli.surgery.options import approval_options
from arroyo_dagster.state.model.leases import LeaseSettings
from arroyo_dagster.state.model.surgery.copies import CopyOutcome
from arroyo_dagster.state.model.units import format_bytes, plural
from arroyo_dagster.state.operations.surgery.copy_job import CopyOptions, plan_copy, run_copy
from arroyo_dagster.state.planning.restore.rollback import ranges
from arroyo_dagster.state.storage.wrappers import WriteProtected


@main.command()
@click.argument("job")
@click.argument("to_url", metavar="URL")
@approval_options("Copy. Without it, print the plan.")
@settings_options(LeaseSettings)
@store_options
def copy(
    job: str,
    to_url: str,
    yes: bool,
    approve: str | None,
    lease_wait_seconds: float,
    url: str | None,
    as_json: bool,
) -> None:
    """Copy a whole job, or one epoch of it, to another checkpoint URL.

    JOB@EPOCH copies that epoch and its parent; JOB, all epochs that lead to the newest. The job is
    only read, and may run. The copy has the same names, is verified at URL, and only
    then a start can find it. URL must not have a job of that name. An interrupted copy is continued
    by the next call.

    \b
    Example:
      arroyo-state copy orders/main s3://other/arroyo --url s3://bucket/arroyo
    """
    source = open_url(url) if yes else open_to_read(url)
    target = open_another(to_url)
    paths, epoch = find_job_and_epoch(source, job)
    if yes:
        with show_progress(as_json=as_json, name=paths.root) as on_progress:
            options = CopyOptions(
                approved=approve,
                lease_wait_seconds=lease_wait_seconds,
                on_lease=print_lease_event(paths),
                on_progress=on_progress,
            )
            outcome = run_copy(source, paths, target, epoch, options)
    else:
        outcome = CopyOutcome(plan=plan_copy(source, paths, WriteProtected(target), epoch))
    if as_json:
        print_json(_as_json(outcome))
    else:
        _print(outcome)


def _print(outcome: CopyOutcome) -> None:
    plan = outcome.plan
    name = plan.paths.root
    click.echo(
        f"{name}: epochs {ranges(plan.epochs)}, {plural(plan.objects, 'object')}, "
        f"{format_bytes(plan.size_bytes)}, from {plan.source} to {plan.target}"
    )
    if plan.left_out:
        click.echo(f"{name}: not copied: epochs {ranges(plan.left_out)}")
    for text in plan.warnings:
        click.echo(f"warning: {text}")
    if outcome.done:
        click.echo(
            f"{name}: {outcome.copied} objects were copied and {outcome.present} were there; the "
            f"copy is verified, and a start continues from epoch {plan.epoch}"
        )
    else:
        click.echo(f"{name}: copy {plan.digest}; nothing was changed, add --yes to execute")


def _as_json(outcome: CopyOutcome) -> dict[str, object]:
    plan = outcome.plan
    return {
        "job": plan.paths.root,
        "digest": plan.digest,
        "source": plan.source,
        "target": plan.target,
        "epoch": plan.epoch,
        "epochs": list(plan.epochs),
        "left_out": list(plan.left_out),
        "objects": plan.objects,
        "size_bytes": plan.size_bytes,
        "warnings": list(plan.warnings),
        "done": outcome.done,
        "copied": outcome.copied,
        "present": outcome.present,
        "digests": {str(path): digest for path, digest in outcome.digests.items()},
    }
