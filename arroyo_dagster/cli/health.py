"""`health | audit`: the checks of all jobs: how their state develops, and whether it is whole."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import click

from arroyo_dagster.cli.common import (
    EXIT_FINDINGS,
    main,
    open_catalogue,
    open_to_read,
    store_options,
)
from arroyo_dagster.cli.directory import directory_of_environment, directory_options
from arroyo_dagster.cli.rendering import (
    finding_json,
    print_json,
    print_no_jobs,
    print_table,
    report,
    show_progress,
)
from arroyo_dagster.cli.settings import NamedSetting, WholeNumber
from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.health import HealthLimits
from arroyo_dagster.state.model.settings import settings_from
from arroyo_dagster.state.model.verify import AuditSettings
from arroyo_dagster.state.operations.catalog.health import EPOCHS, HealthOptions, check_health
from arroyo_dagster.state.operations.catalog.jobs import jobs_or_all
from arroyo_dagster.state.operations.catalog.owner import check_apart
from arroyo_dagster.state.operations.verify.audit import (
    AuditOptions,
    AuditRun,
    audit_jobs,
    last_audits,
)
from arroyo_dagster.state.planning.health_checks.checks import HEALTH_CHECKS, fleet_verdict
from arroyo_dagster.state.planning.verify.audit_checks import (
    AUDIT_CHECKS,
    RECENCY_CHECK,
    audit_verdict,
    recency_verdict,
)
from arroyo_dagster.state.planning.verify.fleet import FleetVerdict
from arroyo_dagster.state.storage.memory import MemoryStore
from arroyo_dagster.state.storage.store import ObjectStore

_F = TypeVar("_F", bound=Callable[..., Any])
_Checked = Sequence[tuple[str, str, FleetVerdict]]
"""The name of each check, what it expects, and its result for all jobs."""


def _limit_option(settings: type[Any], example: str) -> Callable[[_F], _F]:
    return click.option(
        "--limit",
        "limits",
        multiple=True,
        type=NamedSetting(settings),
        metavar="NAME=VALUE",
        help=f"Change a limit, for example {example}. May be repeated. A wrong name prints all "
        "limits.",
    )


@main.command()
@click.argument("job", required=False)
@click.option(
    "--epochs",
    type=WholeNumber(1),
    default=EPOCHS,
    show_default=True,
    help="Compare the newest epochs of each job, at most this many.",
)
@_limit_option(HealthLimits, "files=1000")
@directory_options
@store_options
def health(
    job: str | None,
    epochs: int,
    limits: tuple[tuple[str, Any], ...],
    url: str | None,
    as_json: bool,
    api: str | None,
    database: str | None,
    assume: tuple[str, ...],
) -> None:
    """Find jobs that are late, growing or fragmented.

    Without JOB, all jobs below the checkpoint URL. What is usual for a job is learned from its own
    epochs; a check that needs more of them does not judge. Reads metadata and the footers of data
    files; writes nothing.

    Exit codes: 0 no findings; 1 the check could not be carried out; 2 wrong command line; 3 at
    least one finding.

    \b
    Example:
      arroyo-state health orders/main --url s3://bucket/arroyo --limit files=1000
    """
    directory = directory_of_environment(api, database, assume)
    store = open_to_read(url)
    jobs, unreadable = jobs_or_all(store, [job] if job else [])
    if not jobs and not unreadable and not as_json:
        print_no_jobs(store)
        return
    with show_progress(as_json=as_json) as on_progress:
        checked = check_health(
            store,
            _no_catalogue(),
            jobs,
            directory,
            settings_from(HealthLimits, dict(limits)),
            HealthOptions(epochs=epochs, on_progress=on_progress, unreadable=unreadable),
        )
    _print_checks(
        [(one.name, one.expects, fleet_verdict(one.name, checked)) for one in HEALTH_CHECKS],
        as_json,
    )


@main.command()
@click.argument("job", required=False)
@click.option(
    "--catalogue",
    metavar="URL",
    help="Keep what was found and how the files look in this folder, for example in Dagster's "
    "catalogue. The next audit compares the files, and begins with the jobs that wait longest. "
    "Default: every audit starts afresh.",
)
@_limit_option(AuditSettings, "budget_minutes=10 or level=2")
@store_options
def audit(
    job: str | None,
    catalogue: str | None,
    limits: tuple[tuple[str, Any], ...],
    url: str | None,
    as_json: bool,
) -> None:
    """Verify each job's newest epoch in full, and compare its older epochs with the store.

    Without JOB, all jobs below the checkpoint URL, as many as `budget_minutes` allows. Reads every
    data file of the newest epochs. Writes nothing below the checkpoint URL.

    Exit codes: 0 no findings; 1 a job could not be audited; 2 wrong command line; 3 at least one
    finding.

    \b
    Example:
      arroyo-state audit orders/main --url s3://bucket/arroyo --limit budget_minutes=10
    """
    store = open_to_read(url)
    jobs, unreadable = jobs_or_all(store, [job] if job else [])
    if not jobs and not unreadable and not as_json:
        print_no_jobs(store)
        return
    settings = settings_from(AuditSettings, dict(limits))
    kept = _no_catalogue() if catalogue is None else open_catalogue(catalogue)
    check_apart(kept, store)
    with show_progress(as_json=as_json) as on_progress:
        run = audit_jobs(store, kept, jobs, settings, AuditOptions(on_progress=on_progress))
    names, audited = [paths.root for paths in jobs], last_audits(kept, jobs)
    recent = recency_verdict(names, audited, wall_clock(), settings.recent_micros)
    _print_checks(
        [
            *((one.name, one.expects, audit_verdict(one, names, audited)) for one in AUDIT_CHECKS),
            (RECENCY_CHECK.name, RECENCY_CHECK.expects, recent),
        ],
        as_json,
        run,
        unreadable.values(),
    )


def _no_catalogue() -> ObjectStore:
    return MemoryStore(f"catalogue-{uuid.uuid4().hex}")


def _print_checks(
    checked: _Checked,
    as_json: bool,
    run: AuditRun | None = None,
    unreadable: Iterable[ArroyoStateError] = (),
) -> None:
    """Print the results; exit with 1 if a job could not be audited, 3 if there is a finding."""
    if as_json:
        print_json([_check_json(*one) for one in checked])
    else:
        print_table(
            ("check", "result", "expects"),
            [(name, _result(verdict), expects) for name, expects, verdict in checked],
        )
        for _, _, verdict in checked:
            for finding in verdict.verdict.findings:
                click.echo(f"{finding.severity.value}: {finding}")
        if run is not None and run.left:
            click.echo(f"the budget ended before {len(run.left)} of the jobs")
    if run is not None:
        report([*run.failed.values(), *unreadable])
    if any(verdict.offenders for _, _, verdict in checked):
        click.get_current_context().exit(EXIT_FINDINGS)


def _result(verdict: FleetVerdict) -> str:
    counts: dict[str, int] = {}
    for line in verdict.lines:
        counts[line.label] = counts.get(line.label, 0) + 1
    return ", ".join(f"{count} {label}" for label, count in counts.items())


def _check_json(name: str, expects: str, verdict: FleetVerdict) -> Mapping[str, Any]:
    return {
        "check": name,
        "expects": expects,
        "jobs": [
            {
                "job": line.job,
                "result": line.label,
                "epoch": line.epoch,
                "finding": None if line.finding is None else finding_json(line.finding),
            }
            for line in verdict.lines
        ],
    }
