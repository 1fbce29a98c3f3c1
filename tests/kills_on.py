"""Kill the main job on one store: `python -m tests.kills_on local|gofakes3|versitygw KILLS`.

`--clocks` runs it under clocks that are minutes apart, by libfaketime (Debian: `faketime`); the
variable LIBFAKETIME names the library where it lies elsewhere.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import click
import pytest

from tests.kills import CLOCKS, kill_and_finish
from tests.s3_servers import SERVERS

STORES = ("local", *(server.name for server in SERVERS.values() if server.conditional_create))


@click.command()
@click.argument("store", type=click.Choice(STORES))
@click.argument("kills", type=click.IntRange(1))
@click.option("--clocks", is_flag=True, help="Run it under clocks that are minutes apart.")
@click.option("--within", default=0.3, show_default=True, help="Seconds behind an epoch.")
def main(store: str, kills: int, clocks: bool, within: float) -> None:
    """Kill the main job at random moments, let it end, and compare it with a run left alone."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        try:
            kill_and_finish(
                Path(folder),
                "in-process",
                kills=kills,
                within_seconds=within,
                server=None if store == "local" else store,
                clocks=CLOCKS if clocks else (),
            )
        except pytest.skip.Exception as error:
            raise click.ClickException(str(error)) from None
    spent = time.monotonic() - begun
    click.echo(f"{store}: {kills} kills, rows exact, {spent:.0f} s{' (3 clocks)' * clocks}")


if __name__ == "__main__":
    main()
