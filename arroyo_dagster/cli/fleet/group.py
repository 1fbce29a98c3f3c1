"""The group `fleet`, which loads its commands when they are called."""

from __future__ import annotations

from arroyo_dagster.cli.commands import FLEET
from arroyo_dagster.cli.common import main


@main.group(lazy=FLEET)
def fleet() -> None:
    """Inspect all jobs at once: abandoned prefixes.

    Its commands write nothing. They print the commands that would.
    """
