"""Whether a restore could open what an epoch lists: its metadata whole, its data files readable.

What a start would choose is in `planning.restore.recovery`; what a verification says, in
`operations.verify`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from arroyo_dagster.errors import FormatError, NotFoundError
from arroyo_dagster.state.model.checkpoints import Checkpoint, LostObject, OperatorCheckpoint
from arroyo_dagster.state.model.ids import StatePath, TableName
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.tables import ExpiringTimeKeyFiles
from arroyo_dagster.state.planning.restore.lost_metadata import cut_checkpoint
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

if TYPE_CHECKING:
    import pyarrow as pa


def cut_objects(
    store: ObjectStore, paths: JobPaths, checkpoint: Checkpoint
) -> Iterator[LostObject]:
    """List an epoch's directory, and yield the metadata that does not name all that lies there."""
    directory = paths.checkpoint(checkpoint.epoch, checkpoint.worker_generation)
    listed = (*store.list_dir(paths.changes).objects, *store.list(directory))
    names = [info.path for info in listed if info.addressable]
    yield from cut_checkpoint(paths, checkpoint, names)


def check_whole(store: ObjectStore, paths: JobPaths, checkpoint: Checkpoint) -> None:
    """Check that the metadata of an epoch names all that lies in its directory; lists it.

    Raises:
        FormatError: an object was cut, for example by an interrupted copy.
    """
    cut = next(cut_objects(store, paths, checkpoint), None)
    if cut is not None:
        raise FormatError(
            f"epoch {checkpoint.epoch} cannot be restored: its metadata is damaged: {cut.reason}",
            job=paths.job,
            epoch=checkpoint.epoch,
            path=cut.path,
            next_step=restore_or_roll_back(paths, checkpoint, "object"),
        )


def check_files(store: ObjectStore, paths: JobPaths, checkpoint: Checkpoint) -> None:
    """Prove that every data file of an epoch is there and gives rows of its table.

    Raises:
        FormatError: a listed file is missing or broken; names the first, and how many.
    """
    listed = [
        (operator, name, path)
        for operator in checkpoint.operators
        for name, files in operator.tables.items()
        for path in dict.fromkeys(files.paths)
    ]
    problems = [p for p in concurrently(lambda at: file_error(store, *at), listed) if p]
    if problems:
        facts: dict[str, Any] = {"job": paths.job, "epoch": checkpoint.epoch} | problems[0].facts
        raise FormatError(
            f"epoch {checkpoint.epoch} cannot be restored: {len(problems)} of {len(listed)} data "
            f"files are missing or broken; the first: {problems[0].message}",
            next_step=restore_or_roll_back(paths, checkpoint, "file"),
            **facts,
        ) from problems[0]


def file_error(
    store: ObjectStore, operator: OperatorCheckpoint, name: TableName, path: StatePath
) -> NotFoundError | FormatError | None:
    """Say why a file does not give rows of its table; None = it does."""
    from arroyo_dagster.state.codec.parquet import read_facts

    try:
        with store.open_input(path) as file:
            facts = read_facts(file, path)
        problem = _misfit(operator, name, path, facts.schema)
    except NotFoundError:
        return NotFoundError("a data file is missing", operator=operator.operator, path=path)
    except FormatError as error:
        return error
    if problem is None:
        return None
    return FormatError(
        f"a data file does not belong to its table: {problem}",
        operator=operator.operator,
        table=name,
        path=path,
    )


def _misfit(
    operator: OperatorCheckpoint, name: TableName, path: StatePath, found: pa.Schema
) -> str | None:
    """Return why a file cannot be read as rows of its table; None = it can."""
    from arroyo_dagster.state.planning.verify.checks import reading_of
    from arroyo_dagster.state.tables.forms import columns_of, stored_form, table_forms

    config, files = operator.configs.get(name), operator.tables[name]
    if config is None or config.kind is not files.kind:
        return f"table {name} has no configuration of its kind"
    entries = files.files if isinstance(files, ExpiringTimeKeyFiles) else ()
    listed = next((entry for entry in entries if entry.path == path), None)
    columns, stored = columns_of(found), stored_form(found)
    return reading_of(config, table_forms(config), columns, stored, listed).problem


def restore_or_roll_back(paths: JobPaths, checkpoint: Checkpoint, what: str) -> str:
    """Return the next step for an epoch with a missing or broken object."""
    if checkpoint.progress is None:
        return f"restore another epoch, or restore the {what}"
    command = f"arroyo-state rollback {paths.root}"
    return f"restore the {what}, or go back to an older epoch: `{command}` lists them"
