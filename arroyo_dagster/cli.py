"""`arroyo-state`: a subcommand per journey.

Exit codes: 0 done, 1 an error of this package (one message on stderr), 2 a wrong command line.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import click

from arroyo_dagster import __version__
from arroyo_dagster.cli_directory import (
    TOKEN_VARIABLE,
    Asked,
    about,
    answer_json,
    ask,
    directory_of,
    directory_options,
    notes,
)
from arroyo_dagster.errors import ArroyoStateError, InputError
from arroyo_dagster.state.codec.plain import iso_micros
from arroyo_dagster.state.codec.plans import plan_to_json
from arroyo_dagster.state.coordinator import request_stop
from arroyo_dagster.state.local import query
from arroyo_dagster.state.local.compaction import CompactionOutcome, compact_job
from arroyo_dagster.state.local.gc import expire_job
from arroyo_dagster.state.local.hashes import HashEvidence, find_hash_variant
from arroyo_dagster.state.local.jobs import (
    EpochSummary,
    JobSummary,
    find_job,
    list_epochs,
    newest_generation,
    summarise_job,
    summarise_jobs,
    version_problem,
)
from arroyo_dagster.state.local.loading import load_pipeline
from arroyo_dagster.state.local.pipeline import OnEpoch, RunOutcome
from arroyo_dagster.state.local.pipeline import run_pipeline as run_in_process
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.compaction import CompactionPolicy, CompactionSettings
from arroyo_dagster.state.model.directory import JobAnswer
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.pipeline import Pipeline
from arroyo_dagster.state.planning.compaction import most_outputs
from arroyo_dagster.state.planning.query import is_at_rest, job_watermark_micros
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.open import configure, get_storage_provider
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.storage.wrappers import WriteProtected

URL_VARIABLES = ["ARROYO__CHECKPOINT_URL", "CHECKPOINT_URL"]
_PIPED_WIDTH = 10_000
_JSON = "arroyo_dagster.json"

_F = TypeVar("_F", bound=Callable[..., Any])


# ---- the grammar ---------------------------------------------------------------------------------


class _Commands(click.Group):
    """Shows the errors of this package as one message on stderr, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ArroyoStateError as error:
            _show_error(error)
            ctx.exit(1)


def _show_error(error: ArroyoStateError) -> None:
    if _wants_json():
        click.echo(json.dumps({"error": _error_json(error)}, ensure_ascii=False), err=True)
    else:
        click.echo(f"{type(error).__name__}: {error}", err=True)


def _error_json(error: ArroyoStateError) -> dict[str, Any]:
    facts = {
        name: value if isinstance(value, str | int | float | bool | None) else str(value)
        for name, value in error.facts.items()
    }
    return {
        "type": type(error).__name__,
        "message": error.message,
        "facts": facts,
        "next_step": error.next_step,
        "retryable": error.retryable,
    }


def _wants_json() -> bool:
    return bool(click.get_current_context().meta.get(_JSON))


def _remember_json(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
    ctx.meta[_JSON] = value  # shared with the group, which shows errors
    return value


def store_options(command: _F) -> _F:
    """Add `--url` and `--json`, as every subcommand has them."""
    json_option = click.option(
        "--json",
        "as_json",
        is_flag=True,
        is_eager=True,
        callback=_remember_json,
        help="Print one JSON document.",
    )
    url_option = click.option(
        "--url",
        envvar=URL_VARIABLES,
        help="The checkpoint URL, in any form Arroyo takes; else from ARROYO__CHECKPOINT_URL.",
    )
    return url_option(json_option(command))


def _open(url: str | None) -> ObjectStore:
    if url is not None:
        if ":" not in url:
            url = os.path.abspath(url)  # what a shell calls a path may be relative
        configure(url)
    return get_storage_provider(url)


def _open_to_read(url: str | None) -> ObjectStore:
    return WriteProtected(_open(url))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="arroyo-state")
def main() -> None:
    """See, keep small and trust the state of streaming jobs.

    JOB is a job's id, or pipeline/job where several pipelines have one of that name.
    """


# ---- jobs, epochs, show, rows --------------------------------------------------------------------


@main.command()
@directory_options
@store_options
def jobs(
    url: str | None, as_json: bool, api: str | None, database: str | None, say: tuple[str, ...]
) -> None:
    """List the jobs below the checkpoint URL, with what Arroyo, if it is asked, knows of them."""
    directory = directory_of(api, database, say, os.environ.get(TOKEN_VARIABLE))
    store = _open_to_read(url)
    found = summarise_jobs(store)
    asked = ask(directory, [job.paths for job in found])
    pairs = list(zip(found, asked.answers, strict=True))
    if as_json:
        _print_json([_job_json(job, answer, asked) for job, answer in pairs])
    elif not found:
        click.echo(f"{store.url} holds no jobs.")
    else:
        columns = ["job", "pipeline", "layout", "epochs", "newest", "state", "watermark", "written"]
        columns[2:2] = ["name", "condition"] if asked.anybody else []
        _print_table(columns, [_job_cells(job, answer, asked) for job, answer in pairs])
        for note in notes(asked):
            click.echo(note)
    _report([*(job.problem for job in found), *asked.problems])


def _job_json(job: JobSummary, answer: JobAnswer, asked: Asked) -> dict[str, Any]:
    newest = job.newest
    return {
        "job": job.paths.job,
        "pipeline": job.paths.pipeline,
        "layout": job.paths.layout.value,
        "epochs": job.epochs,
        "newest_epoch": job.newest_epoch,
        "state": None if newest is None else newest.state.value,
        "watermark": iso_micros(job.watermark_micros),
        "finished_at": None if newest is None else iso_micros(newest.finish_time_micros),
        "problem": None if job.problem is None else str(job.problem),
        **answer_json(answer, asked),
    }


def _job_cells(job: JobSummary, answer: JobAnswer, asked: Asked) -> list[object]:
    newest = job.newest
    facts = answer.facts
    return [
        job.paths.job,
        job.paths.pipeline,
        *([facts.name, facts.condition.value] if asked.anybody else []),
        job.paths.layout.value,
        job.epochs,
        job.newest_epoch,
        _state(None if newest is None else newest.state.value, job.problem),
        _clock(job.watermark_micros),
        None if newest is None else _age(newest.finish_time_micros),
    ]


@main.command()
@click.argument("job")
@click.option(
    "--limit", type=click.IntRange(0), default=0, help="Only so many of the newest; 0 = all."
)
@store_options
def epochs(job: str, limit: int, url: str | None, as_json: bool) -> None:
    """List the epochs of a job, oldest first, with the state of each."""
    store = _open_to_read(url)
    found = list_epochs(store, find_job(store, job), limit or None)
    if as_json:
        _print_json([_epoch_json(one) for one in found])
    elif not found:
        click.echo(f"{job} has no epoch yet.")
    else:
        columns = ["epoch", "generation", "state", "finished", "seconds", "watermark", "files"]
        columns += ["bytes", "new files", "new bytes"]
        _print_table(columns, [_epoch_cells(one) for one in found])
    _report([one.problem for one in found])


def _epoch_json(one: EpochSummary) -> dict[str, Any]:
    checkpoint = one.checkpoint
    return {
        "epoch": one.epoch,
        "generation": one.worker_generation,
        "state": None if one.state is None else one.state.value,
        "started_at": None if checkpoint is None else iso_micros(checkpoint.start_time_micros),
        "finished_at": None if checkpoint is None else iso_micros(checkpoint.finish_time_micros),
        "seconds": None if checkpoint is None else _seconds(checkpoint),
        "watermark": _watermark(checkpoint),
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
        _state(None if one.state is None else one.state.value, one.problem),
        None if checkpoint is None else _clock(checkpoint.finish_time_micros),
        None if checkpoint is None else f"{_seconds(checkpoint):.3f}",
        None if checkpoint is None else _clock(job_watermark_micros(checkpoint)),
        one.files,
        _bytes(one.size_bytes),
        one.new_files,
        _bytes(one.new_size_bytes),
    ]


def _seconds(checkpoint: Checkpoint) -> float:
    return (checkpoint.finish_time_micros - checkpoint.start_time_micros) / 1e6


def _watermark(checkpoint: Checkpoint | None) -> str | None:
    return None if checkpoint is None else iso_micros(job_watermark_micros(checkpoint))


@main.command()
@click.argument("job")
@click.argument("epoch", type=click.IntRange(0), required=False)
@directory_options
@store_options
def show(
    job: str,
    epoch: int | None,
    url: str | None,
    as_json: bool,
    api: str | None,
    database: str | None,
    say: tuple[str, ...],
) -> None:
    """Show what an epoch of a job holds: operators, tables, files, rows, bytes.

    EPOCH is the newest visible one unless given. Rows are counted as stored.
    """
    directory = directory_of(api, database, say, os.environ.get(TOKEN_VARIABLE))
    store = _open_to_read(url)
    paths = find_job(store, job)
    found = query.describe_epoch(store, paths, epoch)
    hashed = find_hash_variant(store, found.checkpoint)
    asked = ask(directory, [paths], checkpoints=True)
    if as_json:
        hashing = {"key_hash": hashed.variant.value if hashed.variant else None}
        _print_json(_description_json(found) | hashing | answer_json(asked.answers[0], asked))
    else:
        _print_description(found, hashed, asked)
    _report([*asked.problems, version_problem(found.checkpoint)])


def _print_description(found: query.EpochDescription, hashed: HashEvidence, asked: Asked) -> None:
    checkpoint = found.checkpoint
    click.echo(
        f"{checkpoint.job}  epoch {checkpoint.epoch}  {checkpoint.state.value}  "
        f"finished {_clock(checkpoint.finish_time_micros)}  in {_seconds(checkpoint):.3f} s"
    )
    for line in [*about(asked), *notes(asked)]:
        click.echo(line)
    click.echo(f"routing keys: {hashed.said}")
    columns = ["operator", "subtasks", "watermark", "table", "kind", "files", "rows", "bytes", "of"]
    _print_table(columns, [row for one in found.operators for row in _operator_cells(one)])


def _description_json(found: query.EpochDescription) -> dict[str, Any]:
    checkpoint = found.checkpoint
    return {
        "job": checkpoint.job,
        "pipeline": checkpoint.pipeline,
        "epoch": checkpoint.epoch,
        "state": checkpoint.state.value,
        "generation": checkpoint.worker_generation,
        "started_at": iso_micros(checkpoint.start_time_micros),
        "finished_at": iso_micros(checkpoint.finish_time_micros),
        "operators": [
            {
                "operator_id": operator.operator,
                "parallelism": operator.parallelism,
                "watermark": iso_micros(operator.watermark_micros),
                "tables": [
                    {
                        "table": table.table,
                        "kind": table.kind.name.lower(),
                        "owner": table.owner,
                        "files": table.files,
                        "rows": table.rows,
                        "bytes": table.size_bytes,
                    }
                    for table in operator.tables
                ],
            }
            for operator in found.operators
        ],
    }


def _operator_cells(operator: query.OperatorSummary) -> list[list[object]]:
    head: list[object] = [
        operator.operator,
        operator.parallelism,
        _clock(operator.watermark_micros),
    ]
    return [
        [
            *(head if at == 0 else [None] * len(head)),
            table.table,
            table.kind.label,
            table.files,
            table.rows,
            _bytes(table.size_bytes),
            table.owner,
        ]
        for at, table in enumerate(operator.tables)
    ] or [[*head, *[None] * 6]]


@main.command()
@click.argument("job")
@click.argument("operator")
@click.argument("table")
@click.option("--epoch", type=click.IntRange(0), help="The newest visible one unless given.")
@click.option("--limit", type=click.IntRange(0), default=20, show_default=True, help="0 = all.")
@store_options
def rows(
    job: str,
    operator: str,
    table: str,
    epoch: int | None,
    limit: int,
    url: str | None,
    as_json: bool,
) -> None:
    """Print the decoded rows of a table, as a restore at the epoch would load them."""
    store = _open_to_read(url)
    paths = find_job(store, job)
    found = query.read_rows(store, paths, operator, table, epoch=epoch, limit=limit or None)
    if as_json:
        _print_json(list(found.rows))
        if found.problem:
            click.echo(found.problem, err=True)
        return
    if found.known:
        click.echo(f"{found.known.owner}: {found.known.holds}")
    if found.rows:
        columns = list(found.rows[0])
        _print_table(columns, [[_cell(row[name]) for name in columns] for row in found.rows])
    more = "" if len(found.rows) == found.count else "; --limit 0 shows all"
    click.echo(f"{len(found.rows)} of {found.count} rows at epoch {found.epoch}{more}")
    for subtask, left in found.commit_data.items():
        click.echo(f"subtask {subtask} left for the commit: {_cell(left)}")
    if found.problem:
        click.echo(found.problem)


def _cell(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# ---- run, stop -----------------------------------------------------------------------------------


@main.command()
@click.argument("pipeline", metavar="MODULE:PIPELINE")
@click.option("--epochs", type=click.IntRange(1), help="Stop, with a checkpoint, after so many.")
@click.option("--follow", is_flag=True, help="Wait for more when the sources have nothing new.")
@click.option(
    "--interval",
    type=click.FloatRange(0),
    default=0.0,
    metavar="SECONDS",
    help="The least time between two epochs.",
)
@click.option("--adopt", is_flag=True, help="Go on from the offsets recorded with the state.")
@click.option("--spark", is_flag=True, help="Run on Spark instead of in this process.")
@click.option("--master", help="With --spark: where it runs; local[*] unless given.")
@click.option("--spark-checkpoint", help="With --spark: where Spark keeps its log of batches.")
@store_options
def run(
    pipeline: str,
    epochs: int | None,
    follow: bool,
    interval: float,
    adopt: bool,
    spark: bool,
    master: str | None,
    spark_checkpoint: str | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Run a pipeline from its newest checkpoint on.

    MODULE:PIPELINE names a Pipeline, or a function without arguments that gives one;
    path/to/file.py:PIPELINE works too. Stop it with `arroyo-state stop JOB`, or kill it: the next
    run goes on where its newest epoch ends.
    """
    if not spark and (master or spark_checkpoint):
        raise click.UsageError("--master and --spark-checkpoint need --spark")
    store = _open(url)
    found = load_pipeline(pipeline)
    with _progress(store, found, as_json=as_json) as on_epoch:
        if spark:
            outcome = _run_on_spark(
                found,
                store,
                master=master,
                checkpoint_location=spark_checkpoint,
                max_epochs=epochs,
                follow=follow,
                interval_seconds=interval,
                adopt=adopt,
                on_epoch=on_epoch,
            )
        else:
            outcome = run_in_process(
                found,
                store,
                max_epochs=epochs,
                follow=follow,
                interval_seconds=interval,
                adopt=adopt,
                on_epoch=on_epoch,
            )
    _print_outcome(found, outcome, as_json=as_json)


def _run_on_spark(pipeline: Pipeline, store: ObjectStore, **options: Any) -> RunOutcome:
    from arroyo_dagster.spark.pipeline import run_pipeline

    return run_pipeline(pipeline, store, **options)


@contextlib.contextmanager
def _progress(store: ObjectStore, pipeline: Pipeline, *, as_json: bool) -> Iterator[OnEpoch]:
    """Show each epoch: a line, and on a terminal what is going on now below it."""
    from rich.console import Console

    console = Console(stderr=as_json, highlight=False)
    write = console.print if console.is_terminal else _plain_line(as_json)

    def on_epoch(checkpoint: Checkpoint) -> None:
        write(_epoch_line(store, pipeline, checkpoint))

    with contextlib.ExitStack() as stack:
        if console.is_terminal:
            stack.enter_context(console.status(f"running {pipeline.paths.root}"))
        yield on_epoch


def _plain_line(to_stderr: bool) -> Callable[[str], None]:
    def write(line: str) -> None:
        click.echo(line, err=to_stderr)
        (sys.stderr if to_stderr else sys.stdout).flush()

    return write


def _epoch_line(store: ObjectStore, pipeline: Pipeline, checkpoint: Checkpoint) -> str:
    # What the epoch itself wrote lies in its own directory; the rest it carries forward.
    own = pipeline.paths.checkpoint(checkpoint.epoch, checkpoint.worker_generation)
    paths = [path for path in dict.fromkeys(checkpoint.paths) if path.startswith(f"{own}/")]
    sizes = [info.size_bytes for info in concurrently(store.head, paths) if info is not None]
    return (
        f"epoch {checkpoint.epoch}: {len(paths)} files, {_bytes(sum(sizes))}, "
        f"{_seconds(checkpoint):.2f} s"
    )


def _print_outcome(pipeline: Pipeline, outcome: RunOutcome, *, as_json: bool) -> None:
    newest = None if outcome.newest is None else outcome.newest.epoch
    if as_json:
        _print_json(
            {
                "job": pipeline.paths.job,
                "pipeline": pipeline.paths.pipeline,
                "epochs": outcome.epochs,
                "newest_epoch": newest,
                "exhausted": outcome.exhausted,
            }
        )
        return
    wrote = f"wrote {outcome.epochs} epoch{'' if outcome.epochs == 1 else 's'}"
    why = "the sources have ended" if outcome.exhausted else "it goes on from there next time"
    click.echo(f"{pipeline.paths.root}: {wrote}, the newest is {newest or 'none'}; {why}")


@main.command()
@click.argument("job")
@store_options
def stop(job: str, url: str | None, as_json: bool) -> None:
    """Ask a running job of ours to stop with a checkpoint."""
    store = _open(url)
    paths = find_job(store, job)
    newest = summarise_job(store, paths)
    theirs = newest.newest is None and paths.layout is Layout.LEGACY
    if theirs or (newest.newest and newest.newest.progress is None):
        raise InputError(
            "this job is Arroyo's, so it cannot be stopped through its state",
            job=paths.root,
            next_step="stop it through Arroyo's UI or REST API, with a checkpoint",
        )
    started = newest_generation(store, paths)
    number: int | None = started
    # In the legacy layout a run leaves no trace before its first epoch: ask, it does no harm.
    at_rest = (
        paths.layout is Layout.PROTOCOL
        and newest.newest is not None
        and is_at_rest(newest.newest, started)
    )
    if not at_rest:
        number = request_stop(store, paths, time.time_ns() // 1000)
    if as_json:
        _print_json(
            {
                "job": paths.job,
                "pipeline": paths.pipeline,
                "at_rest": at_rest,
                "generation": number,
                "newest_epoch": newest.newest_epoch,
            }
        )
    elif at_rest:
        click.echo(f"{paths.root} is at rest: it stopped with epoch {newest.newest_epoch}.")
    else:
        click.echo(
            f"{paths.root}: asked generation {number} to stop. It writes one more epoch, its "
            "last, then ends; `arroyo-state epochs` shows it. If no run is alive, nothing happens, "
            "and the next run is not held up."
        )


# ---- maintenance ---------------------------------------------------------------------------------


@main.command()
@click.argument("job")
@click.option(
    "--policy",
    type=click.Choice([policy.value for policy in CompactionPolicy]),
    default=CompactionPolicy.BIN_PACK.value,
    show_default=True,
    help="Small neighbours only, or all files of every table.",
)
@click.option("--yes", is_flag=True, help="Do it; without it the plan is shown.")
@click.option("--spark", is_flag=True, help="Merge on Spark instead of in this process.")
@click.option(
    "--wait",
    type=click.FloatRange(0),
    default=0.0,
    metavar="SECONDS",
    help="How long to wait for a running job to take over what was merged.",
)
@store_options
def compact(
    job: str, policy: str, yes: bool, spark: bool, wait: float, url: str | None, as_json: bool
) -> None:
    """Merge small files of a job of ours; a restore loads the same. Dry run until --yes."""
    store = _open(url) if yes else _open_to_read(url)
    paths = find_job(store, job)
    settings = CompactionSettings(policy=CompactionPolicy(policy))
    options: dict[str, Any] = {"wait_seconds": wait, "dry_run": not yes}
    if spark and yes:
        outcome = _compact_on_spark(store, paths, settings, options)
    else:
        outcome = compact_job(store, paths, settings, **options)
    if as_json:
        plan = {"plan": plan_to_json(outcome.plan), "done": outcome.changed}
        after = {"files_after": outcome.files_after, "size_bytes_after": outcome.size_bytes_after}
        _print_json({**plan, **after, "published": outcome.published, "epoch": outcome.epoch})
        return
    columns = ("operator", "table", "files", "bytes", "at most")
    lines = [
        (one.operator, one.table, len(one.paths), _bytes(one.size_bytes), most_outputs(one))
        for one in outcome.plan.merges
    ]
    if lines:
        _print_table(columns, lines)
    for left in outcome.plan.left_out if not lines else ():
        click.echo(f"{left.operator or paths.root} {left.table or ''}: {left.reason}")
    click.echo(f"{paths.root}: {_compaction_words(outcome, yes=yes)}")


def _compact_on_spark(
    store: ObjectStore, paths: JobPaths, settings: CompactionSettings, options: Mapping[str, Any]
) -> CompactionOutcome:
    from arroyo_dagster.spark.compaction import compact_job_on_spark
    from arroyo_dagster.spark.session import get_session

    return compact_job_on_spark(lambda: get_session()[0], store, paths, settings, **options)


def _compaction_words(outcome: CompactionOutcome, *, yes: bool) -> str:
    plan = outcome.plan
    if not plan.merges and not outcome.changed:
        return f"nothing to merge at epoch {plan.epoch}"
    if not yes:
        return (
            f"{plan.files_before} files would become {plan.files_after} at most; "
            "nothing was changed, --yes does it"
        )
    sizes = f"{_bytes(plan.size_bytes_before)} became {_bytes(outcome.size_bytes_after)}"
    files = f"{plan.files_before} files became {outcome.files_after}, {sizes}"
    if outcome.epoch is not None:
        return f"{files}; epoch {outcome.epoch} lists them"
    return f"{files}; the job takes them over at its next checkpoint"


@main.command()
@click.argument("job")
@click.option("--keep", type=click.IntRange(2), required=True, help="How many epochs stay.")
@click.option("--yes", is_flag=True, help="Delete; without it the plan is shown.")
@store_options
def expire(job: str, keep: int, yes: bool, url: str | None, as_json: bool) -> None:
    """Remove the oldest epochs of a job of ours, and what only they list. Dry run until --yes."""
    store = _open(url) if yes else _open_to_read(url)
    paths = find_job(store, job)
    outcome = expire_job(store, paths, keep_epochs=keep, yes=yes)
    if as_json:
        _print_json(
            {
                "plan": plan_to_json(outcome.plan),
                "done": outcome.done,
                "kept_epochs": outcome.kept_epochs,
                "files": outcome.files,
                "size_bytes": outcome.size_bytes,
            }
        )
        return
    went = "went" if outcome.done else "would go; nothing was deleted, --yes does it"
    click.echo(
        f"{paths.root}: {len(outcome.plan.epochs)} epochs, {outcome.files} files, "
        f"{_bytes(outcome.size_bytes)} {went}; {outcome.kept_epochs} epochs stay"
        if outcome.plan.epochs
        else f"{paths.root}: nothing to expire, {outcome.kept_epochs} epochs stay"
    )


# ---- showing -------------------------------------------------------------------------------------


def _print_json(document: object) -> None:
    click.echo(json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False))


def _print_table(columns: Sequence[str], lines: Sequence[Sequence[object]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH  # nothing is cut where a program reads along
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    for at, name in enumerate(columns):
        numbers = all(isinstance(line[at], int | None) for line in lines)
        table.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for line in lines:
        table.add_row(*(Text("-" if cell is None else str(cell)) for cell in line))
    console.print(table)


def _report(problems: Sequence[ArroyoStateError | None]) -> None:
    """Say what is wrong with some of what was listed, and end with exit code 1."""
    found = [problem for problem in problems if problem is not None]
    for problem in found:
        _show_error(problem)
    if found:
        click.get_current_context().exit(1)


def _state(state: str | None, problem: ArroyoStateError | None) -> str | None:
    if problem is None:
        return state
    return f"{state}, broken" if state else "unreadable"


def _clock(micros: int | None) -> str | None:
    text = iso_micros(micros)
    return None if text is None else text.replace("T", " ").replace(".000000", "")


def _age(micros: int) -> str:
    import pendulum

    try:
        return pendulum.from_timestamp(micros / 1e6).diff_for_humans()
    except (ValueError, OverflowError):
        return str(_clock(micros))


def _bytes(count: int | None) -> str | None:
    if count is None:
        return None
    size, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


if __name__ == "__main__":
    main()
