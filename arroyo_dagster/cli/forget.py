"""`forget`: acknowledge that a vanished job is gone."""

from __future__ import annotations

import click

from arroyo_dagster.cli.common import main, open_catalogue, open_to_read, store_options
from arroyo_dagster.cli.rendering import print_json
from arroyo_dagster.state.metadata.lease_records import owner_here
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.operations.catalog.known_jobs import check_gone, find_known_job, forget


@main.command("forget")
@click.argument("job")
@click.option(
    "--catalogue",
    required=True,
    metavar="URL",
    help="Where Dagster keeps the catalogue. The failed check names it.",
)
@store_options
def forget_command(job: str, catalogue: str, url: str | None, as_json: bool) -> None:
    """Acknowledge that JOB is gone, so that Dagster's checks no longer fail because of it.

    Writes one object to the catalogue and deletes nothing; the job's history stays. With a
    checkpoint URL, it refuses if the job still exists. If the job comes back and vanishes again,
    the checks fail again.

    \b
    Example:
      arroyo-state forget orders/main --catalogue s3://bucket/catalogue
    """
    store = open_catalogue(catalogue)
    paths = find_known_job(store, job)
    if url is not None:
        check_gone(open_to_read(url), paths)
    epoch = forget(store, paths, owner=owner_here("arroyo-state"), now_micros=wall_clock())
    if as_json:
        print_json({"job": paths.root, "last_epoch": epoch, "catalogue": store.url})
    else:
        last = "none of its epochs was known" if epoch is None else f"its last epoch was {epoch}"
        click.echo(f"{paths.root} is forgotten; {last}")
