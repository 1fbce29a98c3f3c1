"""`find-key`: find the rows of one key. Reads only."""

from __future__ import annotations

import click

from arroyo_dagster.cli.common import main, open_to_read, store_options
from arroyo_dagster.cli.rendering import print_json, print_table, show_progress
from arroyo_dagster.state.codec.derived import plain_values
from arroyo_dagster.state.model.units import plural
from arroyo_dagster.state.operations.catalog.jobs import find_job
from arroyo_dagster.state.operations.surgery.find_key import KeyRowsFound, find_key


@main.command("find-key")
@click.argument("job")
@click.argument("key", nargs=-1, required=True)
@store_options
def find_key_command(job: str, key: tuple[str, ...], url: str | None, as_json: bool) -> None:
    """Find the rows of one key in all that a job stores: epochs, unlisted files, quarantine.

    KEY has one value for each key column, as for `arroyo-state get`. Nothing is changed.

    It also names what may hold the key and cannot be searched: remains of interrupted writes on
    local disk, and older versions in a bucket that keeps them.

    \b
    Example:
      arroyo-state find-key job_x 4711 --url s3://bucket/arroyo
    """
    store = open_to_read(url)
    paths = find_job(store, job)
    with show_progress(as_json=as_json, name=paths.root) as on_progress:
        search = find_key(store, paths, key, on_progress)
    if as_json:
        print_json(plain_values(search))
        return
    if search.found:
        columns = ("operator", "table", "rows", "where", "file")
        lines = [(hit.operator, hit.table, hit.rows, _where(hit), hit.path) for hit in search.found]
        print_table(columns, lines)
    for text in search.unknown:
        click.echo(f"not known: {text}")
    rows = sum(hit.rows for hit in search.found)
    click.echo(
        f"{paths.root}: {plural(rows, 'row')} in {len(search.found)} of "
        f"{plural(search.files, 'file')}; "
        f"{len(search.epochs)} epochs were searched"
    )


def _where(found: KeyRowsFound) -> str:
    if not found.epochs:
        return found.place
    return f"epochs {found.epochs[0]} to {found.epochs[-1]}"
