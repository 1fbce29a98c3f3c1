"""The job whose state `fork` and `evolve` take: its options, and how it is opened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from arroyo_dagster.cli.common import find_job_and_epoch, open_another
from arroyo_dagster.state.operations.surgery.carried_files import StateSource
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.storage.wrappers import WriteProtected

_F = TypeVar("_F", bound=Callable[..., Any])


def source_options(command: _F) -> _F:
    """Add `SOURCE`, `JOB` and `--from-url`."""
    source, job = click.argument("source"), click.argument("job")
    from_url = click.option(
        "--from-url", metavar="URL", help="The checkpoint URL of SOURCE. Default: that of JOB."
    )
    return source(job(from_url(command)))


def open_source(store: ObjectStore, source: str, from_url: str | None) -> StateSource:
    """Return the job whose state is taken, only readable.

    Args:
        store: of the job that takes it.
        source: JOB or JOB@EPOCH.

    Raises:
        NotFoundError: there is no such job, or no epoch of that time.
    """
    source_store = WriteProtected(store if from_url is None else open_another(from_url))
    paths, epoch = find_job_and_epoch(source_store, source)
    return StateSource(store=source_store, paths=paths, epoch=epoch)
