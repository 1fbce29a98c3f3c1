"""The facts about one job that its health checks need."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from statistics import median

from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.garbage import JobPins
from arroyo_dagster.state.model.health import EpochFigures, TableFigures
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.tables import ExpiringTimeKeyFiles
from arroyo_dagster.state.model.units import format_micros
from arroyo_dagster.state.planning.restore.reads import job_watermark_micros, ordered_operators
from arroyo_dagster.state.planning.verify.checks import StoredFile
from arroyo_dagster.state.planning.verify.findings import Finding
from arroyo_dagster.state.planning.verify.fleet import JobAge

Found = list[Finding] | str
"""The findings of a rule on one job; a text says why the facts do not suffice for a judgement."""

LEAST_EPOCHS = 20
LEAST_MICROS = 3_600_000_000
"""What is usual for a job shows in so many epochs, finished within this time or longer: an hour."""

_HALF = 100
_SECOND = 1_000_000

NO_EPOCH = "no epoch of the job can be read"
NO_FILES = "the newest epoch of the job lists no files, or cannot be read"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileAtEpoch:
    """A data file in the list of one table of one operator, with the facts of its footer.

    Attributes:
        parallelism: of the operator.
        expiring: whether the table is an expiring time-key table, whose files have key ranges.
        rows, size_bytes, columns: None if its footer cannot be read.
        columns: name and type of each, in order.
    """

    operator: str
    parallelism: int
    table: str
    expiring: bool
    path: StatePath
    rows: int | None = None
    size_bytes: int | None = None
    columns: str | None = None
    min_routing_key: int | None = None
    max_routing_key: int | None = None
    max_timestamp_micros: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthFacts:
    """What the store and the given history show of a job.

    Attributes:
        now_micros: the time of the check.
        epochs: the numbers of epochs, ascending by epoch; some may have expired.
        present: the epochs that the store has, ascending.
        files: of the newest epoch, in replay order.
        checkpoint: the newest epoch; None if it cannot be read.
        stored_bytes: the size of all data files below the job's directory.
        pinned_bytes: the size of the files that only pinned epochs list.
        quarantined_bytes: the size of what was moved to quarantine.
        journal: the findings on its newest runs of gc.
    """

    age: JobAge
    now_micros: int
    epochs: Sequence[EpochFigures] = ()
    present: Sequence[int] = ()
    files: Sequence[FileAtEpoch] = ()
    checkpoint: Checkpoint | None = None
    pins: JobPins = field(default_factory=JobPins)
    stored_bytes: int = 0
    pinned_bytes: int = 0
    quarantined_bytes: int = 0
    journal: Sequence[Finding] = ()

    @property
    def job(self) -> str:
        """The root of the job's paths."""
        return self.age.job

    @property
    def idle(self) -> str | None:
        """Why the job need not write epochs; None if it should, as far as known."""
        if self.age.finished_micros is None:
            return NO_EPOCH
        return None if self.age.resting is None else f"the job is {self.age.resting}"

    @property
    def newest(self) -> EpochFigures | None:
        """The numbers of the newest epoch; None if it cannot be read."""
        if self.checkpoint is None or not self.epochs:
            return None
        last = self.epochs[-1]
        return last if last.epoch == self.checkpoint.epoch else None

    @property
    def managed(self) -> bool:
        """Whether this package wrote the newest epoch."""
        return self.checkpoint is not None and self.checkpoint.progress is not None

    @property
    def sizes(self) -> Mapping[StatePath, int]:
        """The sizes of the newest epoch's files, in bytes; 0 if unknown."""
        return {file.path: file.size_bytes or 0 for file in self.files}

    @property
    def interval_micros(self) -> float:
        """The usual time between two epochs, of two or more."""
        return _interval(pairwise(self.epochs))

    def files_by_table(self) -> Mapping[tuple[str, str], list[FileAtEpoch]]:
        """Return the files of the newest epoch by operator and table."""
        tables: dict[tuple[str, str], list[FileAtEpoch]] = {}
        for file in self.files:
            tables.setdefault((file.operator, file.table), []).append(file)
        return tables

    def history_by_table(self) -> Iterator[tuple[str, TableFigures, list[TableFigures]]]:
        """Yield each table of the newest epoch with its name, and itself at the epochs before.

        Tables without enough earlier epochs are left out.
        """
        newest = self.newest
        for table in () if newest is None else newest.tables:
            key = (table.operator, table.table)
            earlier = [
                (epoch, before)
                for epoch in self.epochs[:-1]
                for before in epoch.tables
                if (before.operator, before.table) == key
            ]
            if missing_evidence([epoch for epoch, _ in earlier]) is None:
                yield f"{table.operator}.{table.table}", table, [before for _, before in earlier]


def missing_evidence(epochs: Sequence[EpochFigures]) -> str | None:
    """Return why epochs do not show what is usual; None if they do.

    The times in their metadata count: those of objects change with every copy. A rest between two
    epochs counts as ten intervals at most.

    Args:
        epochs: ascending.
    """
    pairs = list(pairwise(epochs))
    most = 10 * _interval(pairs) if pairs else 0
    span = sum(
        min(later.finished_micros - epoch.finished_micros, most * (later.epoch - epoch.epoch))
        for epoch, later in pairs
    )
    if len(epochs) >= LEAST_EPOCHS and span >= LEAST_MICROS:
        return None
    return (
        f"{len(epochs)} epochs are known, of {format_micros(span)}; what is usual shows in "
        f"{LEAST_EPOCHS} epochs of an hour or more"
    )


def _interval(pairs: Iterable[tuple[EpochFigures, EpochFigures]]) -> float:
    """Return the usual time between two epochs."""
    return median(
        (later.finished_micros - epoch.finished_micros) / (later.epoch - epoch.epoch)
        for epoch, later in pairs
    )


def epochs_to_read(present: Sequence[Epoch]) -> list[Epoch]:
    """Return the epochs of a store that show what is usual, ascending: 200 at most.

    These are the newest hundred, and fifty pairs spread over the others: 200 epochs in a row may be
    of less than an hour, and what an epoch writes shows beside the one before it.
    """
    if len(present) <= 2 * _HALF:
        return list(present)
    older = present[:-_HALF]
    step = -(-len(older) // (_HALF // 2))
    spread = [epoch for index in range(0, len(older), step) for epoch in older[index : index + 2]]
    return [*spread, *present[-_HALF:]]


def suffices(history: Sequence[EpochFigures]) -> bool:
    """Return whether a history shows what is usual without the epochs that the store has."""
    return missing_evidence([epoch for epoch in history if epoch.tables]) is None


def history_of(
    history: Iterable[EpochFigures], finished: Mapping[Epoch, int]
) -> list[EpochFigures]:
    """Return the epochs of a history that are of this job, ascending.

    A job that began anew under its name counts from 1 again: then the history is of its predecessor
    where the epochs of the store are older, or were finished at another time.

    Args:
        finished: when epochs of the store were finished, the newest among them.
    """
    newest = max(finished, default=None)
    latest = {
        epoch.epoch: epoch
        for epoch in sorted(history, key=lambda epoch: epoch.finished_micros)
        if newest is None or epoch.epoch <= newest
    }
    differ = any(
        number in latest and abs(latest[number].finished_micros - micros) > _SECOND
        for number, micros in finished.items()
    )
    return [] if differ else [epoch for _, epoch in sorted(latest.items())]


def known_epochs(
    stored: Iterable[EpochFigures], history: Iterable[EpochFigures]
) -> list[EpochFigures]:
    """Return the epochs of both, ascending; of an epoch in both that of the store."""
    by_epoch = {epoch.epoch: epoch for epoch in (*history, *stored)}
    return [epoch for _, epoch in sorted(by_epoch.items())]


def files_of(
    checkpoint: Checkpoint, stored: Mapping[StatePath, StoredFile]
) -> Iterator[FileAtEpoch]:
    """Yield the files that an epoch lists, by operator and table, in replay order.

    Args:
        stored: the facts of the files that exist.
    """
    for operator in ordered_operators(checkpoint):
        for table, files in sorted(operator.tables.items()):
            listed = files.files if isinstance(files, ExpiringTimeKeyFiles) else ()
            ranges = {file.path: file for file in listed}
            for path in files.paths:
                footer, entry = stored.get(path), ranges.get(path)
                whole = None if footer is None or footer.problem is not None else footer
                yield FileAtEpoch(
                    operator=operator.operator,
                    parallelism=operator.parallelism,
                    table=table,
                    expiring=entry is not None,
                    path=path,
                    size_bytes=None if footer is None else footer.size_bytes,
                    rows=None if whole is None else whole.rows,
                    columns=None if whole is None else ", ".join(map(str, whole.columns)),
                    min_routing_key=None if entry is None else entry.min_routing_key,
                    max_routing_key=None if entry is None else entry.max_routing_key,
                    max_timestamp_micros=None if entry is None else entry.max_timestamp_micros,
                )


def epoch_figures(
    checkpoint: Checkpoint,
    earlier: Collection[StatePath] | None,
    stored: Mapping[StatePath, StoredFile],
) -> EpochFigures:
    """Add up the files that an epoch lists.

    Args:
        earlier: the data files that the epoch before it lists; None = unknown.
        stored: the facts of the files that exist.
    """
    files = list(files_of(checkpoint, stored))
    paths = list(dict.fromkeys(file.path for file in files))
    if earlier is None and checkpoint.epoch == 1:
        earlier = ()
    new = None if earlier is None else [path for path in paths if path not in earlier]
    rows = {file.path: file.rows for file in files}
    return EpochFigures(
        epoch=checkpoint.epoch,
        worker_generation=checkpoint.worker_generation,
        started_micros=checkpoint.start_time_micros,
        finished_micros=checkpoint.finish_time_micros,
        watermark_micros=job_watermark_micros(checkpoint),
        files=len(paths),
        size_bytes=_size(paths, stored),
        rows=_sum(rows.values()),
        new_files=None if new is None else len(new),
        new_size_bytes=None if new is None else _size(new, stored),
        tables=tuple(_tables(files)),
    )


def _tables(files: Iterable[FileAtEpoch]) -> Iterator[TableFigures]:
    for (operator, table), group in groupby(files, lambda file: (file.operator, file.table)):
        listed = list(group)
        yield TableFigures(
            operator=operator,
            table=table,
            files=len(listed),
            size_bytes=sum(file.size_bytes or 0 for file in listed),
            rows=_sum(file.rows for file in listed),
        )


def _sum(counts: Iterable[int | None]) -> int | None:
    listed = list(counts)
    numbers = [count for count in listed if count is not None]
    return sum(numbers) if len(numbers) == len(listed) else None


def _size(paths: Sequence[StatePath], stored: Mapping[StatePath, StoredFile]) -> int | None:
    return _sum(stored[path].size_bytes if path in stored else None for path in paths)
