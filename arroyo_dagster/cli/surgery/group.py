"""The group `edit`, which loads its commands when they are called."""

from __future__ import annotations

from arroyo_dagster.cli.commands import EDIT
from arroyo_dagster.cli.common import main


@main.group(lazy=EDIT)
def edit() -> None:
    """Change the state of a stopped job: offsets, watermark, keys, old rows, entries.

    Each command is a dry run unless --yes is given. An edit deletes no file, and `undo` undoes
    it until the job is started.
    """
