"""The group `compact`, which loads its commands when they are called."""

from __future__ import annotations

from arroyo_dagster.cli.commands import COMPACT
from arroyo_dagster.cli.common import main


@main.group(lazy=COMPACT)
def compact() -> None:
    """Merge small files. A restore loads the same rows. Dry run unless --yes is given."""
