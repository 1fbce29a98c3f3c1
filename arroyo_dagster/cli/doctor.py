"""`doctor`: check the store, this machine and the Dagster instance, or one job; one verdict a
line.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

import click

from arroyo_dagster.cli.common import EXIT_FINDINGS, main, open_to_read, open_url, store_options
from arroyo_dagster.cli.config import check_config, find_config
from arroyo_dagster.cli.directory import directory_flags, directory_of_environment
from arroyo_dagster.cli.rendering import print_json, show_progress
from arroyo_dagster.errors import InputError
from arroyo_dagster.optional_packages import missing_package
from arroyo_dagster.state.operations.verify.store import CheckStatus, StoreCheck, check_store


@main.command()
@click.argument("job", required=False)
@click.option("--read-only", is_flag=True, help="Write nothing; skip the checks that need a write.")
@click.option("--store-only", is_flag=True, help="Check the store, not this machine.")
@directory_flags
@store_options
def doctor(
    job: str | None,
    read_only: bool,
    store_only: bool,
    url: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Check this machine and the store; with JOB, print what is wrong with a job.

    Prints one verdict a line (ok, warning, error, not checked), and the next step below it:
    conditional creation, what the credentials may do, the clocks, the layout, the configuration
    file, Java, Spark and its fast start. Of the Dagster instance of DAGSTER_HOME: what is on,
    whether its daemons run, and how often its checkpoint sensor polls.

    Writes objects with fresh names below _arroyo_dagster/ at the URL's root, and deletes them.
    --read-only skips that. Credentials that may only read are a warning.

    With JOB it writes nothing. It verifies the newest epoch, applies the rules of `health`, and
    prints each symptom with the command for it.

    Exit codes: 0 no error, and no finding about JOB; 1 the check could not be carried out; 2 wrong
    command line; 3 an error or a finding.

    \b
    Examples:
      arroyo-state doctor --url s3://bucket/arroyo --read-only
      arroyo-state doctor orders/main --url s3://bucket/arroyo
    """
    if job is not None:
        if store_only:
            raise click.UsageError("--store-only checks no job")
        _check_job(job, url, given, as_json=as_json)
        return
    store = open_to_read(url) if read_only else open_url(url)
    checks = [*check_store(store, read_only=read_only)]
    if not store_only:
        checks += _machine()
    healthy = all(check.status is not CheckStatus.ERROR for check in checks)
    _print(checks, {"url": store.url, "healthy": healthy}, as_json=as_json)


def _check_job(job: str, url: str | None, given: dict[str, Any], *, as_json: bool) -> None:
    from arroyo_dagster.cli.symptoms import job_symptoms
    from arroyo_dagster.state.operations.surgery.rebuild.execute import find_damaged_job

    store = open_to_read(url)
    directory = directory_of_environment(given["api"], given["database"], given["assume"])
    paths = find_damaged_job(store, job)
    with show_progress(as_json=as_json, name=paths.root) as on_progress:
        checks = [*job_symptoms(store, paths, directory, on_progress)]
    healthy = all(check.status is CheckStatus.OK for check in checks)
    if healthy and not as_json:
        click.echo(
            f"{paths.root}: nothing found. If its state is wrong all the same, `arroyo-state "
            f"rollback {paths.root}` lists the epochs that it can go back to."
        )
    _print(checks, {"url": store.url, "job": paths.root, "healthy": healthy}, as_json=as_json)


def _print(checks: Sequence[StoreCheck], verdict: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json({**verdict, "checks": [*map(_json, checks)]})
    else:
        for check in checks:
            click.echo(f"{check.name}: {check.status.value} ({check.detail})")
            if check.next_step:
                click.echo(f"  next: {check.next_step}")
    if not verdict["healthy"]:
        click.get_current_context().exit(EXIT_FINDINGS)


def _machine() -> Iterator[StoreCheck]:
    from arroyo_dagster.spark.readiness import check_spark

    yield _configuration()
    yield from check_spark()
    if importlib.util.find_spec("dagster") is None:
        step = missing_package("dagster").next_step
        status = CheckStatus.NOT_CHECKED
        yield StoreCheck(name="dagster", status=status, detail="not installed", next_step=step)
        return
    from arroyo_dagster.orchestration.readiness import check_instance

    yield from check_instance()


def _configuration() -> StoreCheck:
    name, path = "configuration", find_config()
    if path is None:
        return StoreCheck(name=name, status=CheckStatus.OK, detail="no file: defaults apply")
    try:
        count = check_config(path, main)
    except InputError as error:
        return StoreCheck(
            name=name, status=CheckStatus.ERROR, detail=str(error), next_step=error.next_step
        )
    return StoreCheck(name=name, status=CheckStatus.OK, detail=f"{path}: {count} keys")


def _json(check: StoreCheck) -> dict[str, str | None]:
    return {
        "check": check.name,
        "status": check.status.value,
        "detail": check.detail,
        "next_step": check.next_step,
    }
