"""Edits and rebuilds of an Arroyo job: which lists of files they explain, and edits half done.

Source: docs/decisions/editing-state.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from arroyo_dagster.state.model.changes import ChangeRecord
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import JobPaths, is_rewritten
from arroyo_dagster.state.model.surgery.edits import Rescale
from arroyo_dagster.state.model.units import plural
from arroyo_dagster.state.planning.verify.findings import Finding, either, note

Digests = Mapping[StatePath, str]
"""SHA-256 of metadata objects as they are, in hex; objects that do not exist are left out."""

Explained = Mapping[Epoch, frozenset[StatePath]]
"""By epoch, the files that an edit took from its lists on purpose."""


def concerns(record: ChangeRecord, checkpoint: Checkpoint) -> bool:
    """Return whether a record is of this very epoch, and of no other attempt at its number."""
    return (
        record.job == checkpoint.job
        and record.pipeline == checkpoint.pipeline
        and record.epoch == checkpoint.epoch
        and record.worker_generation == checkpoint.worker_generation
        and record.finish_time_micros == checkpoint.finish_time_micros
    )


def is_unfinished(record: ChangeRecord, digests: Digests) -> bool:
    """Return whether only some of the edit's metadata objects were written, and that matters.

    A rescale changes no row: each operator may be started, and the next rescale does the rest.
    """
    if record.operation == Rescale.name:
        return False
    states = {digests.get(path) == before for path, (before, _) in record.objects.items()}
    return len(states) == 2


def current_edits(
    records: Mapping[StatePath, ChangeRecord | None],
) -> dict[StatePath, ChangeRecord]:
    """Return the newest edit of each epoch; only these can be unfinished.

    A further edit is refused while one is unfinished, and it may give an object the bytes that it
    had before an earlier one. Names sort by epoch, then by the lease that the edit was done under.
    """
    present = sorted(
        ((path, edit) for path, edit in records.items() if edit is not None), key=lambda row: row[0]
    )
    newest = {record.epoch: (path, record) for path, record in present}
    return dict(newest.values())


def was_applied(record: ChangeRecord, digests: Digests) -> bool:
    """Return whether the edit's metadata was written, at least in part.

    An object that a later compaction has changed counts as written.
    """
    return any(digests.get(path) != before for path, (before, _) in record.objects.items())


def explained_files(
    history: Sequence[Checkpoint], edits: Sequence[ChangeRecord], digests: Digests
) -> Explained:
    """Return the files that edits took from the lists of these epochs.

    An undo that meets a start may come too late: the next epoch goes on from the edit.
    """
    explained: dict[Epoch, frozenset[StatePath]] = {}
    for before, checkpoint in zip([None, *history], history, strict=False):
        own = [edit for edit in edits if concerns(edit, checkpoint) and was_applied(edit, digests)]
        if before is not None and _took_new_files(checkpoint, before):
            # The job was started from the edited epoch, and then the edit was undone.
            own += [edit for edit in edits if concerns(edit, before)]
        if own:
            explained[checkpoint.epoch] = frozenset(path for edit in own for path in edit.unlisted)
    return explained


def undone_files(history: Sequence[Checkpoint], edits: Sequence[ChangeRecord]) -> Explained:
    """Return, by epoch, files of edits of the epoch before of which it lists none.

    Where the record of an undone edit is left, its undo met a start, which may have taken the
    edited lists. An edit that only takes files away leaves nothing that would prove it.
    """
    undone: dict[Epoch, frozenset[StatePath]] = {}
    for before, checkpoint in itertools.pairwise(history):
        files = {path for edit in edits if concerns(edit, before) for path in edit.unlisted}
        if checkpoint.epoch == before.epoch + 1 and files.isdisjoint(checkpoint.paths):
            undone[checkpoint.epoch] = frozenset(files)
    return undone


def _took_new_files(checkpoint: Checkpoint, before: Checkpoint) -> bool:
    """Return whether an epoch lists files of this package that the one before does not list."""
    earlier = {path for operator in before.operators for path in operator.paths}
    return checkpoint.epoch == before.epoch + 1 and any(
        path not in earlier and is_rewritten(path)
        for operator in checkpoint.operators
        for path in operator.paths
    )


def edit_findings(
    history: Sequence[Checkpoint],
    edits: Mapping[StatePath, ChangeRecord | None],
    digests: Digests,
) -> Iterator[Finding]:
    """Find edits that were interrupted.

    Args:
        history: consecutive visible epochs; the last is the one that is verified.
        edits: by path; None if a record does not decode.
    """
    for path, record in current_edits(edits).items():
        for checkpoint in history:
            if concerns(record, checkpoint) and is_unfinished(record, digests):
                job = JobPaths(record.job, record.pipeline).root
                evidence = (
                    f"the edit {record.operation!r} of epoch {record.epoch} was interrupted: some "
                    "operators have the new state, and some the old one"
                )
                step = f"undo it before the job is started: `arroyo-state undo {job} --yes`"
                is_last = checkpoint is history[-1]
                yield either(is_last, "edit-unfinished", path, evidence, step)


def rebuild_findings(
    history: Sequence[Checkpoint], rebuilds: Mapping[StatePath, ChangeRecord | None]
) -> Iterator[Finding]:
    """Find epochs whose metadata this package wrote anew: what is doubtful about them.

    Args:
        history: as of `edit_findings`.
        rebuilds: by path; None if a record does not decode.
    """
    epochs = {checkpoint.epoch for checkpoint in history}
    for path, record in rebuilds.items():
        if record is not None and record.epoch in epochs:
            doubts = "; ".join(record.doubts) or "none"
            written = plural(len(record.objects), "metadata object")
            evidence = f"{record.operation!r} wrote {written} of epoch {record.epoch}"
            step = "nothing; `arroyo-state undo` undoes it until the job is started"
            yield note("epoch-rebuilt", path, f"{evidence}; doubts: {doubts}", step)
