"""`edit undo`: restore the metadata from before the last edit or compaction."""

from __future__ import annotations

import click

from arroyo_dagster.cli.common import ownership_option, store_options
from arroyo_dagster.cli.compaction.rewrite import run_undo_command, token_option
from arroyo_dagster.cli.directory import directory_options
from arroyo_dagster.cli.settings import settings_options
from arroyo_dagster.cli.surgery.group import edit
from arroyo_dagster.state.model.leases import LeaseSettings


@edit.command()
@click.argument("job")
@click.option(
    "--yes", is_flag=True, help="Restore the metadata. Without it, print the objects only."
)
@directory_options
@token_option
@settings_options(LeaseSettings)
@ownership_option
@store_options
def undo(
    job: str,
    yes: bool,
    api: str | None,
    database: str | None,
    assume: tuple[str, ...],
    token: str | None,
    lease_wait_seconds: float,
    url: str | None,
    as_json: bool,
) -> None:
    """Restore the metadata from before the last edit or compaction.

    Only possible until the job is started again. Each call undoes one edit or compaction, the
    newest first.

    \b
    Example:
      arroyo-state edit undo job_x --url s3://bucket/arroyo --assume job_x=stopped
    """
    run_undo_command(
        job,
        (api, database, assume, token),
        lease_wait_seconds=lease_wait_seconds,
        url=url,
        yes=yes,
        as_json=as_json,
    )
