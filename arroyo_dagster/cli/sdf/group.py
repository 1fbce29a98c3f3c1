"""The group `sdf`, which loads its commands when they are called."""

from __future__ import annotations

from arroyo_dagster.cli.commands import SDF, SDF_SHOW
from arroyo_dagster.cli.common import main


@main.group(lazy=SDF)
def sdf() -> None:
    """SDF keyed states: declared in YAML, written by one service, read by others."""


@sdf.group(lazy=SDF_SHOW)
def show() -> None:
    """List the states of a dataflow, or the functions and states of a package."""
