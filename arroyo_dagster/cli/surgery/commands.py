"""`edit offsets`, `watermark`, `set`, `delete-key`, `retain` and `rescale`. Without --yes nothing
changes.
"""

from __future__ import annotations

import re
from typing import Any, BinaryIO

import click

from arroyo_dagster.cli.common import print_lease_event
from arroyo_dagster.cli.rendering import print_json, sleep_until_quiet
from arroyo_dagster.cli.settings import WholeNumber
from arroyo_dagster.cli.surgery.group import edit
from arroyo_dagster.cli.surgery.options import edit_options, opened
from arroyo_dagster.cli.surgery.rendering import outcome_json, print_outcome, print_plan
from arroyo_dagster.cli.surgery.window import check_window, run_in_window, window_options
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.iso_times import parse_moment_nanos
from arroyo_dagster.state.model.ids import OperatorId, TableName
from arroyo_dagster.state.model.keys import MOST_SUBTASKS
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.settings import check_time
from arroyo_dagster.state.model.surgery.edits import (
    Edit,
    KeyDeletion,
    NewPosition,
    Rescale,
    RetainRows,
    SetEntry,
    SetOffsets,
    SetWatermark,
)
from arroyo_dagster.state.model.surgery.plans import EditOutcome
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.surgery.execute import EditOptions, run_edit
from arroyo_dagster.state.operations.surgery.managed.execute import run_managed_edit
from arroyo_dagster.state.operations.surgery.managed.plan import is_managed, plan_managed_edit
from arroyo_dagster.state.operations.surgery.plan import plan_edit
from arroyo_dagster.state.operations.surgery.window import PlannableEdit
from arroyo_dagster.state.planning.surgery.overrides import parse_lookup
from arroyo_dagster.state.storage.local_documents import read_stream
from arroyo_dagster.state.storage.store import ObjectStore

_RELATIVE = re.compile(r"[+-]\d{1,19}")


_operator_option = click.option(
    "--operator", metavar="ID", help="Only this operator, as `arroyo-state show` names it."
)


@edit.command()
@click.argument("job")
@click.argument("positions", nargs=-1, metavar="[PARTITION=POSITION]...")
@_operator_option
@click.option(
    "--time",
    "time_text",
    metavar="TIME",
    help="In place of positions: continue at the first records at or after TIME. Needs --lookup.",
)
@click.option(
    "--lookup",
    type=click.File("rb"),
    metavar="FILE",
    help="With --time: the offset of each partition at TIME, as `kafka-get-offsets.sh --time` "
    "prints them, or a JSON object. `-` reads standard input.",
)
@window_options
@edit_options
def offsets(
    job: str,
    positions: tuple[str, ...],
    operator: str | None,
    time_text: str | None,
    lookup: BinaryIO | None,
    **given: Any,
) -> None:
    """Set where the sources of a stopped job continue.

    PARTITION is a partition, file, shard or subtask as `arroyo-state sql @offsets JOB` prints it,
    or `all`.
    POSITION is a number; with a sign it is added to the stored position. With --time the positions
    are those that a client of the broker has found for a time.

    \b
    Examples:
      arroyo-state edit offsets job_x 0=120000 1=+500 --assume job_x=stopped
      arroyo-state edit offsets job_x all=-1000 --operator source_orders_0 --assume job_x=stopped
      arroyo-state edit offsets job_x --time 2026-11-24T10:00:00Z --lookup -
    """
    named = None if operator is None else OperatorId(operator)
    if bool(positions) == (time_text is not None) or (lookup is not None and time_text is None):
        raise click.UsageError("expected PARTITION=POSITION, or --time with --lookup")
    if time_text is None:
        change = SetOffsets(positions=tuple(map(_position, positions)), operator=named)
    else:
        at_micros = _micros(time_text)
        if lookup is None:
            raise click.UsageError(
                "--time needs --lookup FILE with what this prints: kafka-get-offsets.sh "
                f"--bootstrap-server HOST:9092 --topic TOPIC --time {-(-at_micros // 1000)}"
            )
        looked_up = parse_lookup(read_stream(lookup, "the lookup"))
        change = SetOffsets(positions=looked_up, operator=named, at_micros=at_micros)
    _run(job, change, given)


def _position(text: str) -> NewPosition:
    partition, equals, position = text.rpartition("=")
    if not equals or not partition or not position:
        raise click.UsageError(f"{text}: expected PARTITION=POSITION")
    relative = _RELATIVE.fullmatch(position) is not None
    return NewPosition(partition=partition, position=position, relative=relative)


@edit.command()
@click.argument("job")
@click.argument("time_text", metavar="TIME")
@window_options
@edit_options
def watermark(job: str, time_text: str, **given: Any) -> None:
    """Set the watermark of a stopped job, at every operator that has one.

    TIME is in ISO 8601, in UTC if it has no offset. The plan counts the rows that a restore drops
    at the new watermark.

    \b
    Example:
      arroyo-state edit watermark job_x 2026-11-24T10:00:00Z --assume job_x=stopped
    """
    _run(job, SetWatermark(at_micros=_micros(time_text)), given)


@edit.command("set")
@click.argument("job")
@click.argument("operator")
@click.argument("table")
@click.argument("key")
@click.argument("value")
@window_options
@edit_options
def set_entry(job: str, operator: str, table: str, key: str, value: str, **given: Any) -> None:
    """Replace the value of one entry of a table.

    KEY and VALUE are JSON, in the form in which `arroyo-state rows --json` prints them. Only global
    keyed tables have entries.

    \b
    Example:
      arroyo-state edit set job_x source_in_0 f '"in.json"' 401 --assume job_x=stopped
    """
    change = SetEntry(operator=OperatorId(operator), table=TableName(table), key=key, value=value)
    _run(job, change, given)


@edit.command("delete-key")
@click.argument("job")
@click.argument("key", nargs=-1, required=True)
@_operator_option
@window_options
@edit_options
def delete_key(job: str, key: tuple[str, ...], operator: str | None, **given: Any) -> None:
    """Delete the rows of one key from every table of a stopped job.

    KEY has one value for each key column, as for `arroyo-state get`. Rows that were delivered
    downstream stay there. Older epochs and files that are no longer listed hold the key until they
    expire: `find-key` lists them.

    \b
    Example:
      arroyo-state edit delete-key job_x 4711 --assume job_x=stopped
    """
    named = None if operator is None else OperatorId(operator)
    _run(job, KeyDeletion(values=key, operator=named), given)


@edit.command()
@click.argument("job")
@click.argument("time_text", metavar="SINCE")
@_operator_option
@window_options
@edit_options
def retain(job: str, time_text: str, operator: str | None, **given: Any) -> None:
    """Drop rows of windows, sessions and joins that are older than a time.

    Rows at SINCE and younger stay. SINCE is in ISO 8601, in UTC if it has no offset. Aggregates
    keep one state a key and are left as they are.

    \b
    Example:
      arroyo-state edit retain job_x 2026-11-24T10:00:00Z --assume job_x=stopped
    """
    named = None if operator is None else OperatorId(operator)
    _run(job, RetainRows(since_micros=_micros(time_text), operator=named), given)


@edit.command()
@click.argument("job")
@click.argument("parallelism", type=WholeNumber(1, MOST_SUBTASKS))
@window_options
@edit_options
def rescale(job: str, parallelism: int, **given: Any) -> None:
    """Split the state of a stopped Arroyo job for a start at another parallelism, with proof.

    Arroyo assigns rows to subtasks by key range when it starts. This command proves that
    PARALLELISM subtasks load the rows that the present ones load, and splits the files that several
    of them would read. Change the parallelism of the pipeline in Arroyo, then start it. With
    --window the running job is stopped, and started at PARALLELISM.

    \b
    Examples:
      arroyo-state edit rescale job_x 8 --assume job_x=stopped
      arroyo-state edit rescale job_x 8 --window --arroyo-api http://HOST:5115
    """
    _run(job, Rescale(parallelism=parallelism), given)


def _micros(text: str) -> int:
    micros = parse_moment_nanos(text) // 1000
    check_time(micros)
    return micros


# ---- all edits -----------------------------------------------------------------------------------


def _run(job: str, wanted: Edit, given: dict[str, Any]) -> None:
    check_window(given)
    store, paths, directory = opened(job, given)
    if is_managed(store, paths):
        plan, run = plan_managed_edit, run_managed_edit
        if given["in_window"]:
            raise InputError(
                "this is a managed job: no Arroyo can stop it",
                job=paths.root,
                next_step="stop its runtime, and call this without --window",
            )
    else:
        plan, run = plan_edit, run_edit
    planned = PlannableEdit(
        paths,
        plan=lambda target, status: plan(target, paths, status, wanted),
        run=lambda target, status, options: run(target, paths, status, wanted, options),
        parallelism=wanted.parallelism if isinstance(wanted, Rescale) else None,
    )
    carry_out(planned, store, directory, given)


def carry_out(
    planned: PlannableEdit, store: ObjectStore, directory: JobDirectory, given: dict[str, Any]
) -> None:
    """Plan an edit, execute it, or execute it in a window, as the options say, and print what
    was done.

    Args:
        given: of a command with `edit_options` and `window_options`.
    """
    if not given["yes"]:
        plan = planned.plan(store, directory)
        if given["as_json"]:
            print_json(outcome_json(EditOutcome(plan=plan)))
        else:
            print_plan(plan, in_full=True, in_window=given["in_window"])
    elif given["in_window"]:
        run_in_window(store, planned, given)
    else:
        outcome = planned.run(store, directory, options_of(planned.paths, given))
        as_json = given["as_json"]
        if as_json:
            print_json(outcome_json(outcome))
        else:
            print_outcome(outcome)


def options_of(paths: JobPaths, given: dict[str, Any]) -> EditOptions:
    """Return the options of an edit from those of a command with `edit_options`."""
    return EditOptions(
        approved=given["approve"],
        lease_wait_seconds=given["lease_wait_seconds"],
        on_lease=print_lease_event(paths),
        quiet_seconds=given["quiet_seconds"],
        sleep=sleep_until_quiet(paths),
    )
