"""The group `gc`, which loads its commands when they are called."""

from __future__ import annotations

from arroyo_dagster.cli.commands import GC
from arroyo_dagster.cli.common import main


@main.group(lazy=GC)
def gc() -> None:
    """Delete unreferenced state: expired epochs, orphans, dead jobs. Dry run unless --yes is given.

    A plan is refused, with the evidence, if it cannot be proved that nothing that stays refers to
    what would be deleted.
    """
