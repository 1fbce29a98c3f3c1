"""`show` and `rows`: print the content of an epoch. They write nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import click

from arroyo_dagster.cli.common import (
    find_job_and_epoch,
    main,
    open_to_read,
    private_option,
    store_options,
)
from arroyo_dagster.cli.directory import (
    JobAnswers,
    about,
    answer_json,
    ask,
    directory_options,
    notes,
)
from arroyo_dagster.cli.rendering import (
    moment,
    print_json,
    print_table,
    print_text,
    report,
    seconds,
    show_progress,
    terminal_width,
)
from arroyo_dagster.cli.settings import WholeNumber
from arroyo_dagster.errors import ArroyoStateError, FormatError
from arroyo_dagster.state.codec.hashing.ahash import HashVariant
from arroyo_dagster.state.codec.iso_times import iso_micros, parse_moment_nanos
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.keys import MOST_SUBTASKS
from arroyo_dagster.state.model.units import format_bytes, plural
from arroyo_dagster.state.operations.catalog import query
from arroyo_dagster.state.operations.catalog.epoch_summaries import version_error
from arroyo_dagster.state.operations.catalog.hash_variant import HashEvidence, find_hash_variant
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.catalog.jobs import find_job
from arroyo_dagster.state.planning.privacy import PrivateColumns
from arroyo_dagster.state.storage import ObjectStore


@main.command()
@click.argument("job")
@click.argument("epoch", type=WholeNumber(0), required=False)
@click.option(
    "--parallelism",
    type=WholeNumber(1, MOST_SUBTASKS),
    help="Of the restore whose cost is printed. Default: of each operator now.",
)
@directory_options
@store_options
def show(
    job: str,
    epoch: int | None,
    parallelism: int | None,
    url: str | None,
    as_json: bool,
    directory: JobDirectory,
) -> None:
    """Print a job: operators, tables, positions, watermarks, lease, pins, size, cost of a restore.

    The epoch is the newest visible one, or EPOCH. Rows are counted as stored. Rates compare the
    newest ten epochs; with EPOCH there are none. `sql @offsets`, `@watermarks`, `@restore`,
    `@leases` and `@pins` answer the sections one by one.

    With --arroyo-api, --arroyo-db or --assume, also print the pipeline's name and the job's status.

    \b
    Example:
      arroyo-state show orders/main 42 --url s3://bucket/arroyo
    """
    store = open_to_read(url)
    paths = find_job(store, job)
    description = query.describe_epoch(store, paths, epoch)
    hashed, damage = _hashing(store, description.checkpoint)
    asked = ask(directory, [paths], checkpoints=True)
    name = str(paths.root) if epoch is None else f"{paths.root}@{epoch}"
    answers, errors = _answers(store, name, parallelism)
    if as_json:
        hashing = {"key_hash": hashed.variant.value if hashed.variant else None}
        facts = _description_json(description) | hashing | answer_json(asked.answers[0], asked)
        print_json(facts | answers)
    else:
        _print_description(description, hashed, asked)
        _print_answers(answers)
    problems = [*asked.errors, version_error(description.checkpoint), damage]
    texts = {str(error) for error in problems}
    report([*problems, *(error for error in errors if str(error) not in texts)])


_Answers = dict[str, list[dict[str, Any]]]


def _answers(
    store: ObjectStore, name: str, parallelism: int | None
) -> tuple[_Answers, list[ArroyoStateError]]:
    """Return the rows of saved queries about a job, and why some could not be answered."""
    from arroyo_dagster.cli.query.output import plain_frame
    from arroyo_dagster.state.operations.query.sql import SqlCatalog
    from arroyo_dagster.state.operations.query.state import open_state

    catalog = SqlCatalog(open_state(store))
    values = {} if parallelism is None else {"parallelism": str(parallelism)}
    answers: _Answers = {}
    errors: dict[str, ArroyoStateError] = {}
    for part in ("offsets", "watermarks", "restore", "leases", "pins"):
        try:
            answer = catalog.saved(part, name, values if part == "restore" else {})
            answers[part] = plain_frame(answer)
        except ArroyoStateError as error:
            errors.setdefault(str(error), error)
    return answers, list(errors.values())


def _print_answers(answers: _Answers) -> None:
    for part, columns in _COLUMNS.items():
        rows = [row for row in answers.get(part, []) if row.get("state") != "released"]
        if rows:
            click.echo(f"\n{part}")
            cells = [[_section_cell(name, row[name]) for name in columns] for row in rows]
            print_table(columns, cells, narrow=_NARROW)
    restore = answers.get("restore")
    if restore:
        click.echo("\nrestore, about")
        files, size_bytes = (sum(row[name] for row in restore) for name in ("files", "size_bytes"))
        memory = max(row["memory_bytes"] for row in restore)
        print_table(
            ("seconds", "files", "bytes", "subtasks", "memory a subtask"),
            [
                (
                    restore[0]["seconds"],
                    files,
                    format_bytes(size_bytes),
                    len(restore),
                    format_bytes(memory),
                )
            ],
        )


_COLUMNS: dict[str, tuple[str, ...]] = {
    "offsets": ("operator", "connector", "partition", "position", "per_second", "status"),
    "watermarks": ("operator", "watermark", "lag_seconds", "ahead_seconds", "rate"),
    "leases": ("kind", "state", "owner", "age_seconds", "expires_in_seconds"),
    "pins": ("epoch", "pinned_at", "owner", "reason"),
}


_NARROW = ("watermark", "rate", "per_second", "connector", "ahead_seconds", "status", "pinned_at")


def _section_cell(name: str, value: object) -> object:
    if isinstance(value, float):
        return f"{value:.2f}"
    if value is None or name not in ("watermark", "pinned_at"):
        return value
    text = str(value)
    return replace(moment(parse_moment_nanos(text) // 1000), text=text)


def _hashing(
    store: ObjectStore, checkpoint: Checkpoint
) -> tuple[HashEvidence, ArroyoStateError | None]:
    """Return the hash by which rows are routed; a damaged file is skipped."""
    try:
        return find_hash_variant(store, checkpoint), None
    except FormatError as error:
        return HashEvidence(possible=tuple(HashVariant)), error


def _print_description(
    found: query.EpochDescription, hashed: HashEvidence, asked: JobAnswers
) -> None:
    checkpoint = found.checkpoint
    finished = moment(checkpoint.finish_time_micros)
    print_text(
        f"{checkpoint.job}  epoch {checkpoint.epoch}  {checkpoint.state.value}  finished "
        f"{finished.forms[0] if terminal_width() else finished}  in {seconds(checkpoint):.3f} s"
    )
    for line in [*about(asked), *notes(asked)]:
        print_text(line)
    print_text(f"routing keys: {hashed.summary}")
    columns = ["operator", "subtasks", "watermark", "table", "kind", "files", "rows", "bytes", "of"]
    print_table(
        columns,
        [row for operator in found.operators for row in _operator_cells(operator)],
        narrow=("watermark", "subtasks", "watermark", "kind", "rows"),
        notes="of",
    )
    tables = [table for operator in found.operators for table in operator.tables]
    size_bytes = sum(table.size_bytes or 0 for table in tables)
    files = plural(sum(table.files for table in tables), "file")
    click.echo(f"{format_bytes(size_bytes)} in {files}")


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
        moment(operator.watermark_micros),
    ]
    return [
        [
            *(head if index == 0 else [None] * len(head)),
            table.table,
            table.kind.label,
            table.files,
            table.rows,
            format_bytes(table.size_bytes),
            table.owner,
        ]
        for index, table in enumerate(operator.tables)
    ] or [[*head, *[None] * 6]]


@main.command()
@click.argument("job")
@click.argument("operator")
@click.argument("table")
@click.option(
    "--limit",
    type=WholeNumber(0),
    default=20,
    show_default=True,
    help="Print at most this many rows; 0 = all.",
)
@click.option(
    "--history", is_flag=True, help="For generational tables, print every generation of a row."
)
@private_option
@store_options
def rows(
    job: str,
    operator: str,
    table: str,
    limit: int,
    history: bool,
    private: PrivateColumns,
    url: str | None,
    as_json: bool,
) -> None:
    """Print the decoded rows of a table, as a restore of the epoch would load them.

    JOB is JOB or JOB@EPOCH; EPOCH is a number, `latest` or a time. Private columns are masked: see
    --private.

    \b
    Example:
      arroyo-state rows orders/main count counts --url s3://bucket/arroyo --limit 5
    """
    store = open_to_read(url)
    paths, epoch = find_job_and_epoch(store, job)
    with show_progress(as_json=as_json) as on_progress:
        options = query.ReadOptions(
            epoch=epoch,
            limit=limit or None,
            history=history,
            private=private,
            on_progress=on_progress,
        )
        page = query.read_rows(store, paths, operator, table, options)
    if private and page.rows:
        click.echo(f"private columns of this table: {', '.join(page.masked) or 'none'}", err=True)
    if as_json:
        print_json(list(page.rows))
        if page.problem:
            click.echo(page.problem, err=True)
        return
    if page.known:
        click.echo(f"{page.known.owner}: {page.known.holds}")
    if page.rows:
        columns = list(dict.fromkeys(name for row in page.rows for name in row))
        print_table(columns, [[_cell(row.get(name, "")) for name in columns] for row in page.rows])
    more = "" if len(page.rows) == page.count else "; --limit 0 prints all"
    click.echo(f"{len(page.rows)} of {plural(page.count, 'row')} at epoch {page.epoch}{more}")
    for subtask, left in page.commit_data.items():
        click.echo(f"subtask {subtask} has pending data for the commit: {_cell(left)}")
    if page.problem:
        click.echo(page.problem)


def _cell(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
