"""Building the roots of epochs, from their metadata or, if it does not decode, from names alone."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from arroyo_dagster.errors import FormatError
from arroyo_dagster.state.model.checkpoints import CheckpointState, LegacyCheckpoint
from arroyo_dagster.state.model.garbage import EpochRoot, References, Root
from arroyo_dagster.state.model.ids import Epoch, OperatorId, StatePath
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.model.objects import NOTHING, Packed
from arroyo_dagster.state.planning.restore.recovery import marker_path

_Names = TypeVar("_Names", bound=Hashable)


def epoch_root(
    paths: JobPaths,
    ref: StatePath,
    found: References,
    state: CheckpointState,
    roots: tuple[Root, ...] = (),
    gone: tuple[StatePath, ...] = (),
    *,
    rolled_back: bool = False,
) -> EpochRoot:
    """Build the root of an epoch, or of an attempt at one, from what its metadata refers to."""
    root = f"{paths.root}/"
    return EpochRoot(
        epoch=found.epoch,
        worker_generation=found.worker_generation,
        ref=ref,
        parent_ref=found.parent_ref,
        state=state,
        min_epoch=found.min_epoch,
        start_time_micros=found.start_time_micros,
        finish_time_micros=found.finish_time_micros,
        needs_commit=found.needs_commit,
        operators=_shared(found.operators),
        tables=_shared(found.tables),
        dropped=found.dropped,
        managed=found.managed,
        files=Packed.of_paths(found.files),
        outside=next((path for path in found.files if not path.startswith(root)), None),
        gone=gone,
        rolled_back_to=found.rolled_back_to,
        rolled_back=rolled_back,
        roots=roots,
    )


def legacy_root(
    paths: JobPaths, head: LegacyCheckpoint, operators: Mapping[OperatorId, References | None]
) -> EpochRoot:
    """Build the root of an epoch of the legacy layout.

    Args:
        operators: the decoded metadata of each operator, in the order of the epoch; None = missing.
    """
    epoch = head.epoch
    names = {name: paths.operator_metadata(name, epoch) for name in operators}
    decoded = {name: refs for name, refs in operators.items() if refs is not None}
    merged = References(
        job=head.job,
        epoch=epoch,
        min_epoch=head.min_epoch,
        start_time_micros=head.start_time_micros,
        finish_time_micros=head.finish_time_micros,
        needs_commit=any(refs.needs_commit for refs in decoded.values()),
        operators=tuple(
            (name, decoded[name].operators[0][1] if name in decoded else 0) for name in operators
        ),
        tables=tuple(table for refs in decoded.values() for table in refs.tables),
        managed=head.progress is not None,
        rolled_back_to=None if head.progress is None else head.progress.rolled_back_to,
        dropped=() if head.progress is None else head.progress.dropped,
        files=tuple(dict.fromkeys(path for refs in decoded.values() for path in refs.files)),
    )
    gone = tuple(path for name, path in names.items() if name not in decoded)
    return epoch_root(paths, paths.legacy_metadata(epoch), merged, CheckpointState.READY, (), gone)


def check_inside_job(paths: JobPaths, epoch: Epoch, found: References) -> None:
    """Check that a manifest lists no file outside of its job.

    Raises:
        FormatError: it lists such a file.
    """
    if not all(map(paths.contains, found.files)):
        raise FormatError("it lists a file outside of its job", job=paths.job, epoch=epoch)


def rolled_back_root(paths: JobPaths, one: EpochRoot, head: EpochRoot) -> EpochRoot:
    """Mark an epoch of the legacy layout as rolled back; as unreadable if metadata is missing.

    Args:
        head: the newest epoch.
    """
    if one.gone:
        reason = f"{one.gone[0]} is missing"
        return replace(damaged_legacy_root(paths, one.epoch, reason, head, one), roots=one.roots)
    return replace(one, state=CheckpointState.ROLLED_BACK, rolled_back=True)


def damaged_legacy_root(
    paths: JobPaths, epoch: Epoch, reason: str, head: EpochRoot, known: EpochRoot | None = None
) -> EpochRoot:
    """Build the root of a rolled-back epoch of the legacy layout that cannot be read.

    Args:
        head: the newest epoch, which may have the same operators.
        known: the readable part of the damaged epoch.
    """
    names = dict.fromkeys(name for root in (known, head) if root for name, _ in root.operators)
    by_name = unreadable_objects(paths, epoch, None, names)
    return unreadable_root(epoch, reason, by_name, finish_time_micros=head.finish_time_micros)


def unreadable_root(
    epoch: Epoch,
    reason: str,
    by_name: tuple[StatePath, ...],
    *,
    roots: tuple[Root, ...] = (),
    finish_time_micros: int,
) -> EpochRoot:
    """Build the root of a rolled-back epoch whose file list cannot be read.

    Args:
        by_name: the objects to delete with it; the one that makes it exist comes last.
        finish_time_micros: an upper bound of the time when it was finished.
    """
    return EpochRoot(
        epoch=epoch,
        worker_generation=None,
        ref=by_name[-1],
        parent_ref=None,
        state=CheckpointState.ROLLED_BACK,
        min_epoch=Epoch(0),
        start_time_micros=finish_time_micros,
        finish_time_micros=finish_time_micros,
        needs_commit=False,
        operators=(),
        managed=True,
        files=NOTHING,
        rolled_back=True,
        unreadable=reason,
        by_name=by_name,
        roots=roots,
    )


def unreadable_objects(
    paths: JobPaths, epoch: Epoch, ref: StatePath | None, operators: Iterable[OperatorId] = ()
) -> tuple[StatePath, ...]:
    """Return the metadata paths of an epoch that does not decode, the one that makes it exist last.

    Args:
        ref: its manifest, in the protocol layout; None if unknown.
        operators: the operators that it may have, in the legacy layout.
    """
    if paths.layout is Layout.LEGACY:
        metadata = [paths.operator_metadata(name, epoch) for name in operators]
        return (*metadata, paths.commit_note(epoch), paths.legacy_metadata(epoch))
    named = () if ref is None else (marker_path(ref), ref)
    return (*named, paths.epoch_record(epoch))


@functools.lru_cache(maxsize=64)
def _shared(names: _Names) -> _Names:
    """Return equal operators as one shared object, since all epochs of a job have the same."""
    return names
