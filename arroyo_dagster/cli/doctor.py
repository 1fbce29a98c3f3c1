"""`doctor`: check whether a store gives the guarantees that jobs and maintenance need."""

from __future__ import annotations

import click

from arroyo_dagster.cli.common import EXIT_FINDINGS, main, open_to_read, open_url, store_options
from arroyo_dagster.cli.rendering import print_json
from arroyo_dagster.state.operations.verify.store import CheckStatus, StoreCheck, check_store


@main.command()
@click.option("--read-only", is_flag=True, help="Write nothing; skip the checks that need a write.")
@store_options
def doctor(read_only: bool, url: str | None, as_json: bool) -> None:
    """Check whether this machine and the store are ready for jobs and maintenance.

    Writes one object with a fresh name twice below _arroyo_dagster/ at the URL's root, and deletes
    it. --read-only skips that.

    Exit codes: 0 no problem; 1 the check could not be carried out; 2 wrong command line; 3 a
    problem was found.

    \b
    Example:
      arroyo-state doctor --url s3://bucket/arroyo --read-only
    """
    store = open_to_read(url) if read_only else open_url(url)
    checks = check_store(store, read_only=read_only)
    healthy = all(check.status is not CheckStatus.PROBLEM for check in checks)
    if as_json:
        document = {"url": store.url, "healthy": healthy, "checks": [*map(_json, checks)]}
        print_json(document)
    else:
        for check in checks:
            click.echo(f"{check.name}: {check.status.value} ({check.detail})")
            if check.next_step:
                click.echo(f"  next: {check.next_step}")
    if not healthy:
        click.get_current_context().exit(EXIT_FINDINGS)


def _json(check: StoreCheck) -> dict[str, str | None]:
    return {
        "check": check.name,
        "status": check.status.value,
        "detail": check.detail,
        "next_step": check.next_step,
    }
