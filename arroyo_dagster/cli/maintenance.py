"""`compact` and `expire`: state kept small. They change nothing until --yes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from arroyo_dagster.cli.grammar import main, open_to_read, open_url, store_options
from arroyo_dagster.cli.shown import bytes_words, print_json, print_table
from arroyo_dagster.state.codec.collecting import gc_plan_to_json
from arroyo_dagster.state.codec.plans import plan_to_json
from arroyo_dagster.state.local.compaction import CompactionOutcome, compact_job
from arroyo_dagster.state.local.gc import expire_job
from arroyo_dagster.state.local.jobs import (
    find_job,
)
from arroyo_dagster.state.model.compaction import CompactionPolicy, CompactionSettings
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.planning.compaction import most_outputs
from arroyo_dagster.state.storage.store import ObjectStore


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
    store = open_url(url) if yes else open_to_read(url)
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
        print_json({**plan, **after, "published": outcome.published, "epoch": outcome.epoch})
        return
    columns = ("operator", "table", "files", "bytes", "at most")
    lines = [
        (one.operator, one.table, len(one.paths), bytes_words(one.size_bytes), most_outputs(one))
        for one in outcome.plan.merges
    ]
    if lines:
        print_table(columns, lines)
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
    sizes = f"{bytes_words(plan.size_bytes_before)} became {bytes_words(outcome.size_bytes_after)}"
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
    store = open_url(url) if yes else open_to_read(url)
    paths = find_job(store, job)
    outcome = expire_job(store, paths, keep_epochs=keep, yes=yes)
    if as_json:
        print_json(
            {
                "plan": gc_plan_to_json(outcome.plan),
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
        f"{bytes_words(outcome.size_bytes)} {went}; {outcome.kept_epochs} epochs stay"
        if outcome.plan.epochs
        else f"{paths.root}: nothing to expire, {outcome.kept_epochs} epochs stay"
    )
