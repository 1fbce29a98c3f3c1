"""What all changes of stopped jobs take: approval, the job's status, the lease and the store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from arroyo_dagster.cli.common import open_to_read, open_url, store_options
from arroyo_dagster.cli.compaction.rewrite import arroyo_options
from arroyo_dagster.cli.settings import settings_options
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.leases import LeaseSettings
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.catalog.jobs import find_job
from arroyo_dagster.state.storage.store import ObjectStore

_F = TypeVar("_F", bound=Callable[..., Any])


def edit_options(command: _F) -> _F:
    """Add what all edits take: approval, sources of the job's status, the lease and the store."""
    shared = store_options(arroyo_options(settings_options(LeaseSettings)(command)))
    return approval_options("Execute the plan. Without it, print it only.")(shared)


def approval_options(text: str) -> Callable[[_F], _F]:
    """Add `--yes`, whose help is `text`, and `--approve`, which goes with it only."""

    def check(ctx: click.Context, _: click.Parameter, digest: str | None) -> str | None:
        if digest is not None and not ctx.params["yes"]:
            raise click.UsageError("--approve needs --yes")
        return digest

    yes = click.option("--yes", is_flag=True, is_eager=True, help=text)
    approve = click.option(
        "--approve",
        metavar="DIGEST",
        callback=check,
        help="With --yes: execute only the plan with this digest, which the dry run printed.",
    )
    return lambda command: yes(approve(command))


def opened(
    job: str,
    given: dict[str, Any],
    find: Callable[[ObjectStore, str], JobPaths] = find_job,
) -> tuple[ObjectStore, JobPaths, JobDirectory]:
    """Return the store of a command with `edit_options`, its job, and what reports its status.

    Args:
        find: finds the job by its name.
    """
    store = open_url(given["url"]) if given["yes"] else open_to_read(given["url"])
    return store, find(store, job), given["directory"]
