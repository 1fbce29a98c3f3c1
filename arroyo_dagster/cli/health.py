"""`health`: the rules applied to all jobs, at the depth that is asked."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import click

from arroyo_dagster.cli.common import EXIT_FINDINGS, main, open_to_read, store_options
from arroyo_dagster.cli.directory import directory_options
from arroyo_dagster.cli.rendering import (
    print_json,
    print_no_jobs,
    print_table,
    print_text,
    show_progress,
)
from arroyo_dagster.cli.settings import NamedSetting, WholeNumber, named_settings
from arroyo_dagster.state.codec.derived import plain_values
from arroyo_dagster.state.model.health import HealthLimits
from arroyo_dagster.state.model.settings import settings_from
from arroyo_dagster.state.model.verify import MAX_LEVEL, AuditSettings
from arroyo_dagster.state.operations.catalog.health import HealthOptions, check_health
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.catalog.jobs import jobs_or_all
from arroyo_dagster.state.planning.rules import AUDIT_RULES, KINDS, REACHED, RULES, job_lines
from arroyo_dagster.state.planning.verify.fleet import PASSED, JobLine


@main.command()
@click.argument("job", required=False)
@click.option(
    "--level",
    type=WholeNumber(0, MAX_LEVEL),
    help="Also verify each job's newest epoch at this level of `verify`, and compare its older "
    "epochs and files with the store. Default: read only metadata and footers.",
)
@named_settings(
    NamedSetting(HealthLimits, AuditSettings, without={"level"}),
    "a limit",
    "files=1000 or budget_minutes=10",
)
@directory_options
@store_options
def health(
    job: str | None,
    level: int | None,
    limits: tuple[tuple[str, Any], ...],
    url: str | None,
    as_json: bool,
    directory: JobDirectory,
) -> None:
    """Find jobs that are damaged, late, growing or fragmented.

    Without JOB, all jobs below the checkpoint URL; with --level, as many are verified as
    `budget_minutes` allows. What is usual for a job is learned from the epochs that the store has,
    if they are 20 or more, of an hour or more; --json says why a rule does not judge. Writes
    nothing.

    Exit codes: 0 no findings; 1 the check could not be carried out; 2 wrong command line; 3 at
    least one finding.

    \b
    Example:
      arroyo-state health orders/main --url s3://bucket/arroyo --level 2 --limit files=1000
    """
    store = open_to_read(url)
    jobs, unreadable = jobs_or_all(store, [job] if job else [])
    if not jobs and not unreadable and not as_json:
        print_no_jobs(store)
        return
    changed = dict(limits)
    limit, depth = settings_from(HealthLimits, changed), None
    if level is not None:
        depth = settings_from(AuditSettings, changed | {"level": level})
    with show_progress(as_json=as_json) as on_progress:
        options = HealthOptions(depth=depth, unreadable=unreadable, on_progress=on_progress)
        checked = check_health(store, jobs, directory, limit, options)
    kinds = {
        kind: job_lines([rule for rule in RULES if rule.kind == kind], checked) for kind in KINDS
    }
    partial = {kind for kind in KINDS if _is_partial(kind, level)}
    if as_json:
        print_json([_kind_json(kind, lines, kind in partial) for kind, lines in kinds.items()])
    else:
        _print_kinds(kinds, partial)
    if any(line.finding for lines in kinds.values() for line in lines):
        click.get_current_context().exit(EXIT_FINDINGS)


def _is_partial(kind: str, level: int | None) -> bool:
    """Return whether a rule of the kind needs a higher level than the one that was asked."""
    asked = -1 if level is None else level
    deep = [rule for rule in AUDIT_RULES if rule.kind == kind and rule.name != REACHED]
    return any((rule.level or 0) > asked for rule in deep)


def _label(line: JobLine, partial: bool) -> str:
    return f"{PASSED} in part" if partial and line.label == PASSED else line.label


def _print_kinds(kinds: Mapping[str, Sequence[JobLine]], partial: Collection[str]) -> None:
    columns = ("check", "result", "expects")
    print_table(
        columns,
        [(kind, _result(lines, kind in partial), KINDS[kind]) for kind, lines in kinds.items()],
    )
    if partial:
        print_text(f"In part: a higher --level, of 0 to {MAX_LEVEL}, checks more.")
    for kind, lines in kinds.items():
        for line in lines:
            for finding in line.findings:
                severity = finding.severity.value
                print_text(f"{severity}: {kind}: {finding}", severity)


def _result(lines: Sequence[JobLine], partial: bool) -> str:
    labels = [_label(line, partial) for line in lines]
    return ", ".join(f"{labels.count(label)} {label}" for label in dict.fromkeys(labels))


def _kind_json(kind: str, lines: Sequence[JobLine], partial: bool) -> Mapping[str, Any]:
    return {
        "check": kind,
        "expects": KINDS[kind],
        "jobs": [
            {
                "job": line.job,
                "result": _label(line, partial),
                "epoch": line.epoch,
                "finding": plain_values(line.finding),
                "findings": plain_values(line.findings),
                "not_judged": dict(line.not_judged),
            }
            for line in lines
        ],
    }
