"""`ownership set | clear | list`: mark prefixes that nobody maintains from here."""

from __future__ import annotations

import click

from arroyo_dagster.cli.common import main, open_to_read, open_url, store_options
from arroyo_dagster.cli.rendering import print_json, print_table
from arroyo_dagster.state.metadata.ownership import delete_mark, read_ownership, write_mark
from arroyo_dagster.state.planning.ownership import Mark, Ownership, check_prefix


@main.group("ownership")
def ownership() -> None:
    """Mark prefixes whose state is seen, and never compacted, rewritten or deleted."""


@ownership.command("set")
@click.argument("prefix")
@click.argument("kind", type=click.Choice([one.value for one in Ownership]))
@click.option("--note", default="", help="A note for people.")
@click.option("--yes", is_flag=True, help="Write the mark. Without it, print what would be marked.")
@store_options
def set_command(
    prefix: str, kind: str, note: str, yes: bool, url: str | None, as_json: bool
) -> None:
    """Mark PREFIX as other (somebody else maintains it) or borrowed.

    PREFIX is pipeline, pipeline/job, or . for everything below the URL. The mark is an object below
    the URL. Every Dagster deployment and every command respects it.

    \b
    Example:
      arroyo-state ownership set payments other --note "team billing" --url s3://bucket/arroyo
    """
    mark = Mark(prefix=check_prefix(prefix), ownership=Ownership(kind), note=note, stored=True)
    store = open_url(url) if yes else open_to_read(url)
    if yes:
        write_mark(store, mark)
    if as_json:
        print_json({"done": yes, "prefix": mark.prefix, "ownership": kind, "note": note})
    else:
        done = "is marked" if yes else "would be marked; nothing was changed, add --yes to mark it"
        click.echo(f"{mark.prefix}: {done} as {kind}" if yes else f"{mark.prefix}: {done}")


@ownership.command("clear")
@click.argument("prefix")
@click.option("--yes", is_flag=True, help="Delete the mark. Without it, print it only.")
@store_options
def clear_command(prefix: str, yes: bool, url: str | None, as_json: bool) -> None:
    """Delete the mark of exactly PREFIX, so that it is maintained again.

    \b
    Example:
      arroyo-state ownership clear payments --url s3://bucket/arroyo
    """
    wanted = check_prefix(prefix)
    store = open_url(url) if yes else open_to_read(url)
    found = any(mark.prefix == wanted for mark in read_ownership(store))
    done = found and yes and delete_mark(store, wanted)
    if as_json:
        print_json({"done": done, "prefix": wanted, "marked": found and not done})
    elif not found:
        click.echo(f"{wanted}: there is no mark")
    else:
        rest = "the mark was deleted" if done else "nothing was changed, add --yes to delete it"
        click.echo(f"{wanted}: {rest}")


@ownership.command("list")
@store_options
def list_command(url: str | None, as_json: bool) -> None:
    """List the marks below the URL. Writes nothing.

    \b
    Example:
      arroyo-state ownership list --url s3://bucket/arroyo
    """
    marks = read_ownership(open_to_read(url))
    if as_json:
        print_json(
            [
                {"prefix": one.prefix, "ownership": one.ownership.value, "note": one.note}
                for one in marks
            ]
        )
    elif marks:
        rows = [(one.prefix, one.ownership.value, one.note) for one in marks]
        print_table(("prefix", "ownership", "note"), rows)
    else:
        click.echo("no prefix is marked")
