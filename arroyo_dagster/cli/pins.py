"""`pin | unpin`: keep epochs that would expire. `sql @pins` lists them."""

from __future__ import annotations

from dataclasses import asdict

import click

from arroyo_dagster.cli.common import leased, main, open_url, store_options
from arroyo_dagster.cli.rendering import clock, print_json, print_table, wait_for_deletions
from arroyo_dagster.cli.settings import WholeNumber, settings_options
from arroyo_dagster.state.model.garbage import JobPins
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.model.leases import LeaseSettings
from arroyo_dagster.state.operations.catalog.jobs import find_any_job
from arroyo_dagster.state.operations.gc.pins import pin_epoch, unpin_epochs


@main.command("pin")
@click.argument("job")
@click.argument("epoch", type=WholeNumber(0))
@click.option("--reason", default="", help="A note for people.")
@settings_options(LeaseSettings)
@store_options
def pin_command(
    job: str,
    epoch: int,
    reason: str,
    lease_wait_seconds: float,
    url: str | None,
    as_json: bool,
) -> None:
    """Keep an epoch until it is unpinned, and check that it is restorable.

    Waits ten seconds if the epoch is outside its job's retention, because the job may be deleting
    it now.

    \b
    Example:
      arroyo-state pin orders/main 42 --reason "before the upgrade" --url s3://bucket/arroyo
    """
    store = open_url(url)
    paths = find_any_job(store, job)
    with leased(store, paths, "arroyo-state pin", lease_wait_seconds) as held:
        pins = pin_epoch(held, paths, Epoch(epoch), reason=reason, sleep=wait_for_deletions)
    _print_pins(pins, as_json)


@main.command("unpin")
@click.argument("job")
@click.argument("epoch", type=WholeNumber(0))
@settings_options(LeaseSettings)
@store_options
def unpin_command(
    job: str, epoch: int, lease_wait_seconds: float, url: str | None, as_json: bool
) -> None:
    """Let an epoch expire with the others again.

    \b
    Example:
      arroyo-state unpin orders/main 42 --url s3://bucket/arroyo
    """
    store = open_url(url)
    paths = find_any_job(store, job)
    with leased(store, paths, "arroyo-state unpin", lease_wait_seconds) as held:
        pins = unpin_epochs(held, paths, [Epoch(epoch)])
    _print_pins(pins, as_json)


def _print_pins(found: JobPins, as_json: bool) -> None:
    pins = [pin for pin in found.pins if not pin.released]
    if as_json:
        documents = [asdict(pin) for pin in pins]
        for document in documents:
            del document["released"]
        print_json(documents)
        return
    if not pins:
        click.echo("no epoch is pinned")
        return
    print_table(
        ("epoch", "pinned", "by", "reason"),
        [(pin.epoch, clock(pin.pinned_at_micros), pin.owner, pin.reason) for pin in pins],
    )
