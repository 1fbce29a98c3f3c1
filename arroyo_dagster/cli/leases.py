"""`lease break`: end a lease that hangs. `sql @leases` lists who holds the leases."""

from __future__ import annotations

import time
from typing import Any

import click

from arroyo_dagster.cli.common import main, open_to_read, open_url, store_options
from arroyo_dagster.cli.rendering import clock, print_json
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.operations.catalog.jobs import find_job
from arroyo_dagster.state.operations.catalog.leases import KINDS, JobLease, break_lease, list_leases


@main.group("lease")
def lease_group() -> None:
    """End the lease of a process that hangs."""


@lease_group.command("break")
@click.argument("job")
@click.option("--kind", type=click.Choice(KINDS), default="maintenance", show_default=True)
@click.option("--yes", is_flag=True, help="End the lease. Without it, print the evidence only.")
@store_options
def break_command(job: str, kind: str, yes: bool, url: str | None, as_json: bool) -> None:
    """End the current lease on JOB. Dry run unless --yes is given.

    Not needed after a crash: a lease that is not renewed expires within 61 seconds. This command
    takes the next lease, so that the holder stops with a ConflictError at its next change, waits
    ten seconds for writes that the holder had already sent, and releases the lease.

    \b
    Example:
      arroyo-state lease break orders/main --url s3://bucket/arroyo
    """
    store = open_url(url) if yes else open_to_read(url)
    paths = find_job(store, job)
    lease = next(iter(list_leases(store, [paths], [kind])), None)
    name = f"{paths.root}: the {kind} lease"
    released = lease is not None and lease.record is not None and lease.record.released
    document: dict[str, Any] = {
        "done": False,
        "lease": None if lease is None else _json(lease, wall_clock()),
    }
    if lease is None or released:
        text = f"{name} is free ({('released' if released else 'never taken')}): nothing to break"
    elif not yes:
        text = f"{name} is {lease_evidence(lease)}\nnothing was changed, add --yes to break it"
    else:
        click.echo(f"{name} is {lease_evidence(lease)}", err=True)
        micros = break_lease(store, paths, kind, sleep=_wait)
        age = None if micros is None else micros / 1e6
        document |= {"done": True, "age_seconds_by_the_store": age}
        ago = "" if age is None else f"; it was renewed {age:.0f} s before (store's clock)"
        text = f"{name} was broken and is free{ago}"
    if as_json:
        print_json(document)
    else:
        click.echo(text)


def _wait(seconds: float) -> None:
    click.echo(
        f"taken over: its holder can no longer change anything; waiting {seconds:.0f} seconds "
        "for writes that it has already sent",
        err=True,
    )
    time.sleep(seconds)


def lease_evidence(one: JobLease) -> str:
    """Return who holds a lease that is not released, since when, and whether it is alive."""
    record, now = one.record, wall_clock()
    if record is None:
        return f"broken, its record cannot be decoded: {one.problem}"
    state = one.state(now)
    alive = {
        "held": "its holder is alive, or died less than a minute ago",
        "expired": (
            "its holder is dead or cut off, and the next process that asks for the lease gets it"
        ),
        "unknown": (
            "the clock of this machine or of the store is wrong, so the lease's age is not known"
        ),
    }[state]
    renewed = clock(record.renewed_at_micros) or "at a time that the store does not report"
    age = one.age_seconds(now)
    ago = "" if age is None else f" ({age:.0f} s ago by this machine's clock)"
    return f"{state} by {record.owner}, lease {record.token}, renewed {renewed}{ago}: {alive}"


def _json(one: JobLease, now: int) -> dict[str, Any]:
    record = one.record
    document: dict[str, Any] = {
        "job": one.paths.root,
        "kind": one.kind,
        "state": one.state(now),
        "problem": None if one.problem is None else one.problem.message,
    }
    if record is not None:
        document |= {
            "token": record.token,
            "owner": record.owner,
            "description": record.description,
            "host": record.host,
            "pid": record.pid,
            "renewed_at_micros": record.renewed_at_micros,
            "duration_micros": record.duration_micros,
            "age_seconds": one.age_seconds(now),
            "expires_in_seconds": one.expires_in_seconds(now),
        }
    return document
