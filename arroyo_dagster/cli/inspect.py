"""`jobs` and `epochs`: list and print state. They write nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from arroyo_dagster.cli.common import main, open_to_read, store_options
from arroyo_dagster.cli.directory import JobAnswers, answer_json, ask, directory_options, notes
from arroyo_dagster.cli.rendering import (
    age,
    format_state,
    moment,
    print_beside_progress,
    print_json,
    print_no_jobs,
    print_table,
    report,
    seconds,
    show_progress,
)
from arroyo_dagster.cli.settings import WholeNumber
from arroyo_dagster.cli.tables import TableCell
from arroyo_dagster.state.codec.iso_times import iso_micros
from arroyo_dagster.state.model.job_facts import JobAnswer, merge_answers
from arroyo_dagster.state.model.units import format_bytes, plural
from arroyo_dagster.state.operations.catalog.epoch_summaries import EpochSummary, list_epochs
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.catalog.jobs import (
    JobSummary,
    find_abandoned,
    find_job,
    list_prefixes,
    paths_of,
    summarise_listing,
    unlisted,
)
from arroyo_dagster.state.planning.abandoned import AbandonedPrefix
from arroyo_dagster.state.planning.compaction.availability import maintenance_of
from arroyo_dagster.state.planning.restore.reads import check_root, job_watermark_micros


@main.command()
@directory_options
@store_options
def jobs(url: str | None, as_json: bool, directory: JobDirectory) -> None:
    """List the jobs below the checkpoint URL.

    The column `maintenance` says when a job can be compacted: at any time, at rest (it is now), in
    a window that stops and starts it, or not at all (only inspected); and why. Abandoned prefixes
    are listed too, with the bytes that can be reclaimed: remains of jobs, and jobs that a source of
    status proves to be dead.

    With --arroyo-api, --arroyo-db or --assume, also print each job's pipeline name and status.

    \b
    Example:
      arroyo-state jobs --url s3://bucket/arroyo --arroyo-api http://localhost:5115
    """
    store = open_to_read(url)
    with show_progress(as_json=as_json) as on_progress:
        listing = list_prefixes(store)
        if left_out := unlisted(listing.levels):
            # Print which directories are left out; control characters are escaped.
            text = "no store can write these names, so the directories are not listed as jobs"
            if as_json:
                click.echo(json.dumps({"warning": text, "names": list(left_out)}), err=True)
            else:
                print_beside_progress(f"warning: {text}: {', '.join(map(repr, left_out))}")
        summaries = summarise_listing(store, listing, on_progress)
        asked = ask(directory, [job.paths for job in summaries])
        abandoned, failed = find_abandoned(store, listing, summaries, asked.answers, on_progress)
    if not abandoned and not listing.unreadable:
        check_root(listing.levels, listing.jobs, store.url)
    of_jobs = {str(job.paths.root) for job in summaries}
    remains = [
        JobSummary(paths=paths_of(path), listed=False, epochs=None)
        for path in sorted(abandoned.keys() - of_jobs)
    ]
    pairs = [*zip(summaries, asked.answers, strict=True)]
    pairs += [(job, merge_answers(job.paths, ())) for job in remains]
    if as_json:
        print_json([_job_json(job, answer, asked, abandoned) for job, answer in pairs])
    elif not pairs:
        print_no_jobs(store)
    else:
        columns = ["job", "pipeline", "layout", "epochs", "newest", "state", "watermark", "written"]
        columns[2:2] = ["name", "condition"] if asked.anybody else []
        print_table(
            [*columns, "maintenance", "why"],
            [_job_cells(job, answer, asked, abandoned) for job, answer in pairs],
            narrow=_NARROW,
            notes="why",
        )
        for note in notes(asked):
            click.echo(note)
    report([*(job.problem for job in summaries), *asked.errors, *failed])


_NARROW = (
    *("pipeline", "maintenance", "layout", "watermark", "written", "watermark", "epochs"),
    *("name", "written", "newest"),
)


def _job_json(
    job: JobSummary,
    answer: JobAnswer,
    asked: JobAnswers,
    abandoned: Mapping[str, AbandonedPrefix],
) -> dict[str, Any]:
    newest = job.newest
    possible = maintenance_of(newest, job.problem, answer)
    dead = abandoned.get(job.paths.root)
    return {
        "job": job.paths.job,
        "pipeline": job.paths.pipeline,
        "layout": job.paths.layout.value if job.listed else None,
        "epochs": job.epochs,
        "newest_epoch": job.newest_epoch,
        "state": None if newest is None else newest.state.value,
        "watermark": iso_micros(job.watermark_micros),
        "finished_at": None if newest is None else iso_micros(newest.finish_time_micros),
        "problem": None if job.problem is None else str(job.problem),
        "maintenance": {"possible": possible.availability.value, "reason": possible.reason},
        "abandoned": None
        if dead is None
        else {
            "bytes": dead.size_bytes,
            "objects": dead.objects,
            "written_at": iso_micros(dead.last_write_micros),
            "why": dead.why,
            "next_step": dead.next_step,
        },
        **answer_json(answer, asked),
    }


def _job_cells(
    job: JobSummary,
    answer: JobAnswer,
    asked: JobAnswers,
    abandoned: Mapping[str, AbandonedPrefix],
) -> list[object]:
    newest = job.newest
    facts = answer.facts
    possible = maintenance_of(newest, job.problem, answer)
    kind, reason = possible.availability.value, possible.reason
    if (dead := abandoned.get(job.paths.root)) is not None:
        size = f"{format_bytes(dead.size_bytes)} in {plural(dead.objects, 'object')}"
        kind, reason = "abandoned", f"{size}; {dead.why}. Next: {dead.next_step}"
    sentence = f"{kind}: {reason}".replace(f"--assume {job.paths.job}=", "--assume JOB=")
    return [
        TableCell(job.paths.job, (job.paths.root,)),
        TableCell(job.paths.pipeline),
        *([facts.name, facts.condition.value] if asked.anybody else []),
        job.paths.layout.value if job.listed else None,
        job.epochs,
        job.newest_epoch,
        format_state(None if newest is None else newest.state.value, job.problem),
        moment(job.watermark_micros),
        None if newest is None else moment(newest.finish_time_micros, age),
        TableCell(kind),
        TableCell(reason, (sentence,)),
    ]


@main.command()
@click.argument("job")
@click.option(
    "--limit",
    type=WholeNumber(0),
    default=0,
    help="List only this many of the newest epochs; 0 = all.",
)
@store_options
def epochs(job: str, limit: int, url: str | None, as_json: bool) -> None:
    """List the epochs of a job, oldest first, with the state of each.

    \b
    Example:
      arroyo-state epochs orders/main --url s3://bucket/arroyo --limit 10
    """
    store = open_to_read(url)
    with show_progress(as_json=as_json) as on_progress:
        summaries = list_epochs(store, find_job(store, job), limit or None, on_progress)
    if as_json:
        print_json([_epoch_json(epoch) for epoch in summaries])
    elif not summaries:
        click.echo(f"{job} has no epoch yet.")
    else:
        columns = ["epoch", "generation", "state", "finished", "seconds", "watermark", "files"]
        columns += ["bytes", "new files", "new bytes"]
        narrow = ["generation", "watermark", "watermark", "new files", "seconds", "finished"]
        narrow += ["new bytes", "files"]
        print_table(columns, [_epoch_cells(epoch) for epoch in summaries], narrow=narrow)
    report([epoch.problem for epoch in summaries])


def _epoch_json(one: EpochSummary) -> dict[str, Any]:
    checkpoint = one.checkpoint
    return {
        "epoch": one.epoch,
        "generation": one.worker_generation,
        "state": None if one.state is None else one.state.value,
        "started_at": None if checkpoint is None else iso_micros(checkpoint.start_time_micros),
        "finished_at": None if checkpoint is None else iso_micros(checkpoint.finish_time_micros),
        "seconds": None if checkpoint is None else seconds(checkpoint),
        "watermark": None if checkpoint is None else iso_micros(job_watermark_micros(checkpoint)),
        "operators": None if checkpoint is None else len(checkpoint.operators),
        "files": one.files,
        "bytes": one.size_bytes,
        "new_files": one.new_files,
        "new_bytes": one.new_size_bytes,
        "missing": one.missing,
        "final": bool(checkpoint and checkpoint.progress and checkpoint.progress.final),
        "problem": None if one.problem is None else str(one.problem),
    }


def _epoch_cells(one: EpochSummary) -> list[object]:
    checkpoint = one.checkpoint
    return [
        one.epoch,
        one.worker_generation,
        format_state(None if one.state is None else one.state.value, one.problem),
        None if checkpoint is None else moment(checkpoint.finish_time_micros),
        None if checkpoint is None else f"{seconds(checkpoint):.3f}",
        None if checkpoint is None else moment(job_watermark_micros(checkpoint)),
        one.files,
        format_bytes(one.size_bytes),
        one.new_files,
        format_bytes(one.new_size_bytes),
    ]
