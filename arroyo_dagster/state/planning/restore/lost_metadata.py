"""Which metadata objects must exist, and which of them are lost or damaged. Reads nothing.

An object that decodes need not be whole: protobuf that was cut at the end of a field decodes, and
so does an empty object. Three rules find what decoding does not:

* `identity_mismatch`: the ids in an object are those of its path;
* `cut_metadata`: an epoch names every operator and table that has objects in the epoch's directory;
* `lost_metadata`: no epoch that a cleanup has not reached yet lacks an object.

Source: crates/arroyo-state/src/parquet.rs, `cleanup_checkpoint`; arroyo-state.md 2.1, 9.4 and 9.6.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from arroyo_dagster.errors import ProtocolError
from arroyo_dagster.state.model.changes import ChangeKind, is_change_of
from arroyo_dagster.state.model.checkpoints import Checkpoint, LostObject
from arroyo_dagster.state.model.ids import Epoch, OperatorId, StatePath, WorkerGeneration
from arroyo_dagster.state.model.layout import (
    JobPaths,
    Layout,
    is_rewritten,
    parse_metadata_path,
    parse_operator_object,
)

# ---- is an object what its path says -------------------------------------------------------------


def ids_of_path(paths: JobPaths, path: str) -> dict[str, object]:
    """Return the ids that a metadata object at a path of the job must have, by field.

    Records of maintenance have rules of their own, and none here.
    """
    if path.startswith(f"{paths.maintenance}/"):
        return {}
    ids: dict[str, object] = {"job": paths.job}
    if paths.pipeline is not None:
        ids["pipeline"] = paths.pipeline
    address = parse_metadata_path(paths, path)
    if address.epoch is not None:
        ids["epoch"] = address.epoch
    if address.operator is not None:
        ids |= {"operator": address.operator, "subtask": None}
    elif address.worker_generation is not None:
        ids["worker_generation"] = address.worker_generation
    return ids


def identity_mismatch(paths: JobPaths, path: str, value: object, **more: object) -> str | None:
    """Say how the ids in a metadata object differ from those of its path; None if they agree.

    Data files are not checked: a run that ignored its state writes them into directories of other
    epochs (arroyo-state.md 1.5).

    Args:
        value: the decoded object; fields that it does not have are not compared.
        more: values that other objects than the path require, by field.
    """
    wrong = [
        f"{name.replace('_', ' ')} {getattr(value, name)!r}, expected {expected!r}"
        for name, expected in {**ids_of_path(paths, path), **more}.items()
        if hasattr(value, name) and getattr(value, name) != expected
    ]
    return f"belongs to another object: {'; '.join(wrong)}" if wrong else None


def is_of_another_job(paths: JobPaths, value: object) -> bool:
    """Return whether an object has the ids of another job, and not merely none."""
    job, pipeline = getattr(value, "job", None), getattr(value, "pipeline", None)
    return bool(job) and (job, pipeline or paths.pipeline) != (paths.job, paths.pipeline)


# ---- does an epoch name all that it has ----------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTables:
    """What the metadata of an epoch names.

    Attributes:
        worker_generation: None in the legacy layout.
        tables: the tables of each operator.
        unchecked: operators, or tables as `operator/table`, of which nothing is expected: their
            metadata is missing, or a managed job dropped them on purpose.
        directory: the number of the directory of its data files, where a run that ignored its state
            counts from 1 (arroyo-state.md 1.5); None = the epoch's own.
        managed: whether it is a managed job, whose files have names of their own.
    """

    epoch: Epoch
    worker_generation: WorkerGeneration | None = None
    tables: Mapping[OperatorId, Collection[str]]
    unchecked: Collection[str] = ()
    directory: Epoch | None = None
    managed: bool = False


def cut_metadata(
    paths: JobPaths, named: NamedTables, names: Iterable[StatePath]
) -> Iterator[LostObject]:
    """Yield the metadata objects of an epoch that do not name what lies in its directory.

    An epoch whose state was edited lists less than its directory holds: with a record of an edit
    nothing is found. Files that this package wrote into an Arroyo job do not count, nor do names of
    no writer, nor what lies in directories below that of an operator.

    Args:
        names: objects in the epoch's directory, where one file of each table is enough, and the
            records of edits.
    """
    from arroyo_dagster.state.model.aliases import fold  # most commands need no gc

    epoch, generation, tables = named.epoch, named.worker_generation, named.tables
    unchecked = named.unchecked
    legacy = paths.layout is Layout.LEGACY
    legacy_ref = paths.legacy_metadata(epoch)
    whole = legacy_ref if generation is None else paths.manifest(generation, epoch)
    number = epoch if named.directory is None else named.directory
    place = paths.checkpoint(number, generation)
    cut: dict[StatePath, LostObject] = {}
    folded = {fold(operator) for operator in tables}  # some disks keep the first spelling
    for path in names:
        if is_change_of(paths, path, ChangeKind.EDIT, epoch):
            return
        address = parse_operator_object(paths, path)
        if address is None or address.checkpoint != place or is_rewritten(path):
            continue
        operator, table = address.operator, address.table
        if table is not None and named.managed and (legacy or not address.managed):
            # No writer of the job gives such a name; or the attempt of another run may have left
            # it, as all runs of the legacy layout share the directory.
            continue
        if operator in unchecked or (table is None and not (legacy and number == epoch)):
            continue
        if operator not in tables and "/" not in operator and fold(operator) not in folded:
            reason = f"it does not name operator {operator}, which has {path}"
            cut.setdefault(whole, LostObject(epoch, whole, reason, operator))
        elif operator in tables and table is not None:
            if {table, f"{operator}/{table}"} & {*tables[operator], *unchecked}:
                continue
            holder = paths.operator_metadata(operator, epoch) if legacy else whole
            reason = f"it does not name table {table} of operator {operator}, which has {path}"
            cut.setdefault(holder, LostObject(epoch, holder, reason))
    yield from cut.values()


def cut_checkpoint(
    paths: JobPaths, checkpoint: Checkpoint, names: Iterable[StatePath]
) -> Iterator[LostObject]:
    """Yield as `cut_metadata`, of a checkpoint that was read whole."""
    progress = checkpoint.progress
    named = NamedTables(
        epoch=checkpoint.epoch,
        worker_generation=checkpoint.worker_generation,
        tables={op.operator: (*op.tables, *op.configs) for op in checkpoint.operators},
        unchecked=() if progress is None else progress.dropped,
        managed=progress is not None,
    )
    yield from cut_metadata(paths, named, names)


# ---- which objects are lost ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EpochObjects:
    """The metadata of one existing epoch that was not rolled back.

    Attributes:
        min_epoch: the oldest epoch that it says is kept; 0 = none was deleted yet.
        objects: the objects that must exist beside the one that makes the epoch exist. Objects of
            several epochs that a cleanup deletes in order, older epochs first, share a name.
        missing: those of them that do not exist.
        directories: returns the numbers of the directories of the files that it lists.
    """

    epoch: Epoch
    min_epoch: Epoch
    objects: Mapping[str, StatePath]
    missing: Collection[str] = ()
    directories: Callable[[], Collection[Epoch]] = frozenset


def lost_metadata(
    epochs: Sequence[EpochObjects],
    *,
    whole_from: Epoch,
    kept: Collection[Epoch] = (),
) -> Iterator[LostObject]:
    """Yield the missing objects that no cleanup explains. The others are partially collected.

    A cleanup, Arroyo's or ours, deletes the objects of older epochs first, and never those of the
    newest epochs. An interrupted one leaves incomplete epochs older than all that are complete.

    Args:
        epochs: newest first.
        whole_from: the oldest epoch that no cleanup can have touched.
        kept: epochs that are older than what a cleanup deleted, because they were pinned.
    """
    present: set[str] = set()
    lost: list[LostObject] = []
    for epoch in reversed(epochs):
        for name in epoch.missing:
            if name in present or epoch.epoch >= whole_from:
                lost.append(LostObject(epoch.epoch, epoch.objects[name], "it is missing"))
        if epoch.epoch not in kept:
            present.update(epoch.objects.keys() - set(epoch.missing))
    yield from reversed(lost)


def lost_epochs(
    epochs: Sequence[EpochObjects],
    min_epoch: Epoch,
    whole_from: Epoch,
    kept: Collection[Epoch] = (),
) -> Iterator[Epoch]:
    """Yield the epochs of an Arroyo job of the legacy layout that were complete and do not exist.

    Epochs have consecutive numbers. Only a run that ignored the state leaves numbers out: it sets
    `min_epoch` to the last number before its own, at which an attempt may have failed. Such a
    number, and one below a `min_epoch` that was not set yet, is proven complete by the next epoch,
    if that lists files of its directory (arroyo-state.md 1.5 and 9.6).

    The newest epoch may be of a later run. Those of a run before it were complete from its own
    `min_epoch` on, if an older one of these exists whole: a cleanup deletes the older ones first.

    Args:
        epochs: the existing ones, newest first.
        min_epoch: the oldest epoch that the newest one says is kept.
        whole_from, kept: as in `lost_metadata`; numbers missing above these only have expired.
    """
    unpinned = [epoch.epoch for epoch in epochs if epoch.epoch not in kept]
    oldest = next((epoch for epoch in epochs if epoch.epoch in unpinned[-1:]), None)
    if oldest is not None and max(oldest.directories(), default=None) == oldest.epoch:
        # It has taken over files of those before, which no cleanup has reached.
        before = range(max(whole_from, min_epoch + 1), oldest.epoch)
        yield from (number for number in sorted(oldest.directories()) if number in before)
    for newer, older in itertools.pairwise(epochs):
        expired = not unpinned or older.epoch < unpinned[-1]
        same_run = newer.min_epoch <= older.epoch and not older.missing
        least = newer.min_epoch if same_run else min_epoch
        absent = range(max(older.epoch + 1, least), newer.epoch)
        if expired or not absent:
            continue
        directories = newer.directories()
        own_numbers = max(directories, default=None) == newer.epoch
        for number in absent:
            if 0 < least < number or (own_numbers and number in directories):
                yield Epoch(number)


# ---- copies under another name, whose metadata names the original's objects ----------------------


def check_own(
    paths: JobPaths,
    what: str,
    named: Iterable[StatePath],
    *,
    next_step: str,
    below: StatePath | None = None,
    **facts: object,
) -> None:
    """Check that metadata of a job names objects of this job only.

    Args:
        what: what names them; the message begins with it.
        named: the objects that it names.
        below: the directory that must contain them; None = the job's own.
        facts: further facts of the error.

    Raises:
        ProtocolError: one of them lies elsewhere.
    """
    prefix = f"{below or paths.root}/"
    other = next((path for path in named if not path.startswith(prefix)), None)
    if other is not None:
        evidence: dict[str, object] = {"job": paths.root, "found": other, **facts}
        raise ProtocolError(
            f"{what} names objects of another job, from which this one was copied",
            next_step=next_step,
            **evidence,  # type: ignore[arg-type]
        )
