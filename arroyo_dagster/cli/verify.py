"""`verify`: check whether a job can be restored from an epoch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click

from arroyo_dagster.cli.common import EXIT_FINDINGS, main, open_to_read, store_options
from arroyo_dagster.cli.rendering import (
    print_json,
    print_table,
    print_text,
    show_progress,
    terminal_width,
)
from arroyo_dagster.cli.settings import WholeNumber, settings_options
from arroyo_dagster.cli.spark import session_of, spark_options
from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.spark.settings import SparkSettings
from arroyo_dagster.state.codec.derived import plain_values
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.progress import OnProgress
from arroyo_dagster.state.model.settings import settings_from
from arroyo_dagster.state.model.units import format_bytes, plural
from arroyo_dagster.state.model.verify import VerifySettings
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.catalog.jobs import find_job
from arroyo_dagster.state.operations.restore.rollback import way_back
from arroyo_dagster.state.operations.verify.job import JobVerdict, verify_job
from arroyo_dagster.state.planning.restore.rollback import rollback_command
from arroyo_dagster.state.planning.verify.findings import Finding, Severity
from arroyo_dagster.state.planning.verify.restore import SubtaskRestore
from arroyo_dagster.state.storage.store import ObjectStore

_RESTORE_COLUMNS = ("operator", "table", "subtask", "files", "bytes", "rows", "requests")
_LEVELS = (
    "every listed file exists",
    "footers, columns and row counts",
    "statistics match the rows",
    "every value decodes",
    "simulated restore",
)


@main.command()
@click.argument("job")
@click.argument("epoch", type=WholeNumber(0), required=False)
@settings_options(VerifySettings)
@spark_options("Verify files on Spark if they are many or large.")
@store_options
def verify(
    job: str,
    epoch: int | None,
    spark: SparkSettings | None,
    url: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Check whether a job can be restored from an epoch, and print why not.

    Without EPOCH, the newest visible one. Writes nothing.

    Exit codes: 0 restorable; 1 the check could not be carried out; 2 wrong command line; 3 at least
    one finding is an error.

    It cannot see a value that was changed into another value which decodes, for example by a
    flipped bit: data files have no checksums. Below level 4 it sees less: what was not checked is
    printed.

    \b
    Example:
      arroyo-state verify orders/main 42 --url s3://bucket/arroyo --level 2
    """
    store = open_to_read(url)
    with show_progress(as_json=as_json) as on_progress:
        settings = settings_from(VerifySettings, given)
        verdict = _verdict(store, find_job(store, job), epoch, settings, spark, on_progress)
    steps = [] if verdict.passed else [*ways_out(store, verdict.paths, verdict.epoch)]
    if as_json:
        print_json(_verdict_json(verdict, steps))
    else:
        if cells := _restore_cells(verdict):
            print_table(_RESTORE_COLUMNS, cells, narrow=("requests", "rows", "bytes"))
        for choice in verdict.engines:
            print_text(f"{verdict.paths.root}: {choice}")
        _print_findings(verdict.verdict.findings)
        print_text(_format_verdict(verdict))
        for step in steps:
            if terminal_width() is None:
                click.echo(f"{step.purpose}: {step.command}")
            else:  # on a line of its own, so that it can be copied
                print_text(f"{step.purpose}:")
                click.echo(f"  {step.command}")
    if not verdict.passed:
        click.get_current_context().exit(EXIT_FINDINGS)


@dataclass(frozen=True, slots=True)
class WayOut:
    """A command for a job that cannot be restored; `rollback_to` is the epoch of a rollback."""

    purpose: str
    command: str
    rollback_to: Epoch | None = None


def ways_out(store: ObjectStore, paths: JobPaths, epoch: Epoch) -> Iterator[WayOut]:
    """Yield how the job comes back: with its lost metadata, or from its newest whole epoch."""
    from arroyo_dagster.state.operations.surgery.rebuild.execute import plan_rebuild
    from arroyo_dagster.state.operations.surgery.rollback import plan_job_rollback

    with contextlib.suppress(ArroyoStateError):
        plan_rebuild(store, paths, JobDirectory(), epoch)
        command = f"arroyo-state rebuild {paths.root} {epoch}"
        yield WayOut(f"To write the metadata of epoch {epoch} anew", command)
    whole = way_back(store, paths, epoch)
    if whole is None:
        return
    back = whole.epoch
    try:
        if whole.progress is None:
            plan_job_rollback(store, paths, JobDirectory(), back)
        yield WayOut(f"To go back to epoch {back}", rollback_command(paths, back), back)
    except ArroyoStateError:
        purpose = f"Epoch {back} is the newest that can be restored. To give its state to a new job"
        command = f"arroyo-state fork {paths.root}@{back} NEW_JOB"
        yield WayOut(f"{purpose} of the same SQL", command)


def _verdict(
    store: ObjectStore,
    paths: JobPaths,
    epoch: int | None,
    settings: VerifySettings,
    spark: SparkSettings | None,
    on_progress: OnProgress,
) -> JobVerdict:
    if spark is None:
        return verify_job(
            store,
            paths,
            epoch,
            level=settings.level,
            parallelism=settings.parallelism,
            history=settings.history,
            on_progress=on_progress,
        )
    from arroyo_dagster.spark.verify import verify_job_on_spark

    return verify_job_on_spark(
        session_of(spark),
        store,
        paths,
        epoch,
        settings,
        thresholds=spark.thresholds,
        on_progress=on_progress,
    )


# ---- JSON ----------------------------------------------------------------------------------------


def _verdict_json(found: JobVerdict, steps: Sequence[WayOut]) -> dict[str, Any]:
    """Return a verdict as one JSON document."""
    return {
        "job": found.paths.job,
        "pipeline": found.paths.pipeline,
        "epoch": found.epoch,
        "level": found.level,
        "parallelism": found.parallelism,
        "passed": found.passed,
        "looked_at": found.verdict.inspected,
        "epochs": list(found.epochs),
        "findings": plain_values(found.verdict.findings),
        "restore": [_restore_json(restored) for restored in found.restore],
        "engines": plain_values(found.engines),
        "rollback_to": next((step.rollback_to for step in steps if step.rollback_to), None),
        "next_steps": [step.command for step in steps],
    }


def _restore_json(one: SubtaskRestore) -> dict[str, Any]:
    cost = {**plain_values(one), "kind": one.kind.name.lower()}
    return {"operator_id": cost.pop("operator"), "bytes": cost.pop("size_bytes"), **cost}


# ---- for people ----------------------------------------------------------------------------------


def _restore_cells(found: JobVerdict) -> list[list[object]]:
    """Return a line for each subtask and table whose files a restore opens."""
    return [
        [
            restored.operator,
            restored.table,
            restored.subtask,
            len(restored.files),
            format_bytes(restored.size_bytes),
            restored.rows,
            restored.requests,
        ]
        for restored in found.restore
        if restored.files
    ]


def _print_findings(findings: Sequence[Finding]) -> None:
    """Print the findings, errors first; on a terminal a next step that several share once."""
    ordered = [finding for kind in Severity for finding in findings if finding.severity is kind]
    if terminal_width() is None:
        for finding in ordered:
            click.echo(f"{finding.severity.value}: {finding}")
        return
    for index, finding in enumerate(ordered):
        severity = finding.severity.value
        print_text(f"{severity}: {finding.object}: {finding.evidence} ({finding.code})", severity)
        following = ordered[index + 1].next_step if finding is not ordered[-1] else None
        if finding.next_step != following:
            print_text(f"  Next: {finding.next_step}")


def _format_verdict(found: JobVerdict) -> str:
    findings = found.verdict.findings
    counts = {level: sum(f.severity is level for f in findings) for level in Severity}
    summary = ", ".join(plural(count, level.value) for level, count in counts.items() if count)
    rest = ", ".join(_LEVELS[found.level + 1 :])
    verdict = "can be restored" if found.passed else "cannot be restored safely"
    return (
        f"{found.paths.root} epoch {found.epoch} {verdict}: {summary or 'nothing found'}; "
        f"{plural(found.verdict.inspected, 'object')} checked, level {found.level} "
        f"({_LEVELS[found.level]}){f'; not checked: {rest}' if rest else ''}"
    )
