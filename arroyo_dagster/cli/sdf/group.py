"""The group `sdf`, which loads its commands when they are called."""

from __future__ import annotations

from arroyo_dagster.cli.commands import SDF
from arroyo_dagster.cli.common import main


@main.group(lazy=SDF)
def sdf() -> None:
    """SDF keyed states: declared in YAML, written by one service, read by others."""
