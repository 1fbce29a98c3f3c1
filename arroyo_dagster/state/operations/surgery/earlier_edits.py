"""Check that no earlier edit of an Arroyo job's epoch stands in the way of another one."""

from __future__ import annotations

from arroyo_dagster.errors import ConflictError
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.layout import JobPaths, is_rewritten
from arroyo_dagster.state.model.surgery.edits import AnyEdit, SetOffsets
from arroyo_dagster.state.model.tables import GlobalKeyedFiles
from arroyo_dagster.state.operations.verify.edits import EditFacts, read_edits, read_rebuilds
from arroyo_dagster.state.planning.verify.edits import was_applied
from arroyo_dagster.state.storage.store import ObjectStore

_ABSOLUTE = "give absolute positions"


def check_earlier(
    store: ObjectStore, paths: JobPaths, checkpoint: Checkpoint, edit: AnyEdit
) -> None:
    """Check that no earlier edit of this epoch was interrupted, or was this very one."""
    edits = read_edits(store, paths, [checkpoint])
    for path, record in edits.unfinished.items():
        raise ConflictError(
            f"the edit {record.operation!r} was interrupted: some operators have the new state, "
            "and some the old one",
            job=paths.root,
            path=path,
            next_step=f"undo it first: `arroyo-state undo {paths.root} --yes`",
        )
    request = request_of(edit)
    if request is not None:
        _check_first_time(store, paths, checkpoint, request, edits)


def _check_first_time(
    store: ObjectStore, paths: JobPaths, checkpoint: Checkpoint, request: str, edits: EditFacts
) -> None:
    """Check that the epoch was not edited by this very request of relative positions."""
    for path, earlier in edits.records.items():
        if earlier is None and path.name.startswith(f"{checkpoint.epoch:07}-"):
            raise ConflictError(
                f"an edit of epoch {checkpoint.epoch} has a record that does not decode, so it is "
                "unknown whether it was this one",
                job=paths.root,
                path=path,
                next_step=_ABSOLUTE,
            )
        if earlier is None or earlier.request != request:
            continue
        if was_applied(earlier, edits.digests):
            raise ConflictError(
                f"epoch {checkpoint.epoch} was already edited by these relative positions",
                job=paths.root,
                path=path,
                next_step=f"{_ABSOLUTE}, or undo the edit first: `arroyo-state undo "
                f"{paths.root} --yes`",
            )
    if not any(edits.records.values()) and _has_edited_entries(checkpoint):
        rebuilds = read_rebuilds(store, edits).values()
        if not any(record is not None and record.epoch == checkpoint.epoch for record in rebuilds):
            raise ConflictError(
                f"epoch {checkpoint.epoch} has entries that an edit has written, whose record is "
                "not listed, so it is unknown whether it was this one",
                job=paths.root,
                epoch=checkpoint.epoch,
                path=paths.changes,
                retryable=True,
                next_step=f"{_ABSOLUTE}, or run it again once the store lists the record",
            )


def _has_edited_entries(checkpoint: Checkpoint) -> bool:
    """Return whether the epoch lists entries that this package wrote: Arroyo writes all anew."""
    return any(
        isinstance(files, GlobalKeyedFiles) and any(map(is_rewritten, files.files))
        for operator in checkpoint.operators
        for files in operator.tables.values()
    )


def request_of(edit: AnyEdit) -> str | None:
    """Return what identifies an edit that must not be applied twice; None for any other."""
    return edit.request if isinstance(edit, SetOffsets) else None
