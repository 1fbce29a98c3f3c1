"""`sdf clean`: remove stored states of a dataflow, and read topics again. Dry run without --yes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from arroyo_dagster.cli.common import open_to_read, open_url, store_options
from arroyo_dagster.cli.rendering import print_json, print_table
from arroyo_dagster.cli.sdf.files import loading_options
from arroyo_dagster.cli.sdf.group import sdf
from arroyo_dagster.dataflow.definition.definition import Dataflow
from arroyo_dagster.dataflow.definition.loading import load_dataflow
from arroyo_dagster.dataflow.revisions.clean import (
    CleanOptions,
    ServiceClean,
    plan_clean,
    plan_restore,
    run_clean,
    run_restore,
)
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.storage.store import ObjectStore


@sdf.command()
@click.argument("file", type=click.Path())
@click.option("--service", metavar="NAME", help="Only this service. Default: all services.")
@click.option(
    "--state",
    "states",
    multiple=True,
    metavar="[SERVICE/]STATE",
    help="Remove the rows of this state, which need not be declared any more. Repeatable.",
)
@click.option(
    "--offsets",
    "topics",
    multiple=True,
    metavar="TOPIC|all",
    help="Read this topic from its beginning again. Repeatable.",
)
@click.option("--undo", is_flag=True, help="Bring back what the last clean or migration changed.")
@click.option("--yes", is_flag=True, help="Carry it out. Without it, print what would be removed.")
@loading_options
@store_options
def clean(
    file: str,
    service: str | None,
    states: Sequence[str],
    topics: Sequence[str],
    undo: bool,
    yes: bool,
    reading: Mapping[str, bool],
    url: str | None,
    as_json: bool,
) -> None:
    """Remove stored states of a dataflow, and read its topics again. Dry run unless --yes is given.

    Without --state and --offsets: everything that is stored of the services, so that the next run
    begins anew. Output that sinks have written stays.

    Nothing is deleted: the rows stay in the epoch before, which is pinned. --undo brings them back
    until the service runs again; `arroyo-state rows JOB@N states STATE` shows them, and
    `arroyo-state unpin JOB N` lets them go.

    \b
    Example:
      arroyo-state sdf clean dataflow.yaml --state count-words/hits --offsets all
    """
    if undo and (states or topics):
        raise click.UsageError("--undo: not with --state or --offsets")
    dataflow, _ = load_dataflow(file, **reading)
    store = open_url(url) if yes else open_to_read(url)
    if undo:
        _undo(dataflow, store, service, yes=yes, as_json=as_json)
        return
    options = CleanOptions(service=service, states=tuple(states), topics=tuple(topics))
    plans = plan_clean(dataflow, store, options)
    if not as_json:
        _print_plans(dataflow, plans)
    epochs = {plan.service: run_clean(dataflow, store, plan) for plan in plans} if yes else {}
    if as_json:
        print_json(
            {"plan": [_plan_json(plan) for plan in plans], "done": yes, "epochs": dict(epochs)}
        )
        return
    for plan in plans if yes else ():
        job = f"{dataflow.pipeline}/{plan.service}"
        click.echo(
            f"{job}: cleaned in epoch {epochs[plan.service]}. Epoch {plan.stored.head.epoch}, "
            "which has what was removed, stays pinned"
        )
    found = bool(plans)
    if not found:
        click.echo("There is nothing to remove.")
    elif yes:
        click.echo("To bring it back, before the next run: the same command with --undo")
    else:
        click.echo("Nothing was changed. To carry it out: add --yes")


def _print_plans(dataflow: Dataflow, plans: Sequence[ServiceClean]) -> None:
    cells: list[list[object]] = []
    for plan in plans:
        for state in plan.states:
            dropped = "no longer declared" if state.dropped else None
            cells.append([plan.service, f"state {state.name}", state.rows, dropped])
        for topic in plan.topics:
            cells.append([plan.service, f"topic {topic}", None, "read from its beginning"])
        if plan.everything:
            cells.append([plan.service, "windows, counters", None, None])
    if cells:
        print_table(["service", "removes", "rows", "note"], cells)
    for plan in plans:
        job = f"{dataflow.pipeline}/{plan.service}"
        if plan.may_be_running:
            click.echo(
                f"warning: {job}: its last run may still be alive, and ends with a ConflictError "
                f"then; `arroyo-state stop {job}` ends it with a checkpoint first"
            )
        for warning in plan.warnings:
            click.echo(f"warning: {job}: {warning}")


def _plan_json(plan: ServiceClean) -> dict[str, Any]:
    return {
        "service": plan.service,
        "epoch": plan.stored.head.epoch,
        "states": [
            {"name": one.name, "rows": one.rows, "declared": not one.dropped} for one in plan.states
        ],
        "topics": list(plan.topics),
        "everything": plan.everything,
        "may_be_running": plan.may_be_running,
        "warnings": list(plan.warnings),
    }


def _undo(
    dataflow: Dataflow, store: ObjectStore, service: str | None, *, yes: bool, as_json: bool
) -> None:
    plans = plan_restore(dataflow, store, service)
    epochs: dict[str, Epoch] = {}
    for plan in plans:
        job = f"{dataflow.pipeline}/{plan.service}"
        if not as_json:
            click.echo(f"{job}: gets back the content of epoch {plan.restores}")
        if yes:
            epochs[plan.service] = run_restore(dataflow, store, plan)
    if as_json:
        documents = [{"service": plan.service, "restores": plan.restores} for plan in plans]
        print_json({"plan": documents, "done": yes, "epochs": dict(epochs)})
    elif not yes:
        click.echo("Nothing was changed. To carry it out: add --yes")
