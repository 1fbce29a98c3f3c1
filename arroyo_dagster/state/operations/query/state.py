"""The state below a checkpoint URL, job by job and epoch by epoch, for programs.

```python
from arroyo_dagster import open_state

state = open_state("s3://bucket/arroyo")
for job in state.jobs():
    epoch = job.epoch()
    print(job.name, epoch.number, [str(table.name) for table in epoch.tables()])
```

Nothing is written, and jobs may run meanwhile.
"""

from __future__ import annotations

import bisect
import datetime as dt
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from arroyo_dagster.errors import ArroyoStateError, InputError, NotFoundError
from arroyo_dagster.state.codec.iso_times import iso_micros, nanos_of
from arroyo_dagster.state.metadata.tree import CheckpointTree
from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.ids import Epoch, TableName
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.numbers import parse_number
from arroyo_dagster.state.model.tables import GlobalKeyedFiles, TableConfig
from arroyo_dagster.state.operations.catalog.jobs import find_job, list_jobs, list_readable_jobs
from arroyo_dagster.state.operations.catalog.metadata_only import metadata_only_epochs
from arroyo_dagster.state.operations.query.names import (
    QueryName,
    not_found,
    parse_name,
    split_epoch,
)
from arroyo_dagster.state.planning.privacy import NOTHING_PRIVATE, PrivateColumns
from arroyo_dagster.state.planning.restore.reads import config_of, ordered_operators
from arroyo_dagster.state.storage import open_store
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.storage.wrappers import WriteProtected

if TYPE_CHECKING:
    from arroyo_dagster.state.operations.query.expiring_scan import ExpiringScan
    from arroyo_dagster.state.operations.query.global_scan import GlobalScan
    from arroyo_dagster.state.operations.query.table import EpochTable
    from arroyo_dagster.state.tables.known.catalogue import Catalogue

LATEST, ALL, NEWEST = "latest", "all", "newest "
Moment = int | str | dt.datetime
"""A point in time: microseconds since 1970, ISO 8601 text, or a datetime; UTC if it has no zone."""


def open_state(
    url: str | ObjectStore,
    *,
    options: Mapping[str, Any] | None = None,
    private: PrivateColumns = NOTHING_PRIVATE,
    catalogue: Catalogue | None = None,
) -> StateCatalog:
    """Open the state below a checkpoint URL for queries; nothing is read yet.

    Args:
        url: as Arroyo takes it, or an open store.
        options: of the store's client; see `open_store`.
        private: columns whose values are masked; see `PrivateColumns`.
        catalogue: decodes entries whose types the job did not store; None = the tables registered
            in this process, see `register_table`.

    Raises:
        InputError: `url` is no checkpoint URL.
    """
    store = open_store(url, options=options) if isinstance(url, str) else url
    return StateCatalog(WriteProtected(store), private, catalogue)


OnUnreadable: TypeAlias = Callable[[str, ArroyoStateError], None]
"""Called with a job, or a directory of jobs, that cannot be read, and the error."""


@dataclass(frozen=True)
class StateCatalog:
    """All jobs below a checkpoint URL; created by `open_state`.

    Attributes:
        described: decodes entries; None = as `catalogue` says.
        parallelism: of the restores and subtasks that queries show; None = of each operator.
    """

    store: ObjectStore
    private: PrivateColumns = field(repr=False)
    described: Catalogue | None = field(repr=False)
    parallelism: int | None = None

    @property
    def catalogue(self) -> Catalogue:
        """What decodes entries whose types the job did not store."""
        from arroyo_dagster.state.tables.known.catalogue import default_catalogue

        return self.described or default_catalogue()

    def jobs(self) -> list[StateJob]:
        """Return the jobs, ordered by path.

        Raises:
            NotFoundError: the root does not exist.
            InputError: the root is not empty, but contains no job.
        """
        return [StateJob(self, paths) for paths in list_jobs(self.store)]

    def readable_jobs(self, on_unreadable: OnUnreadable | None) -> list[StateJob]:
        """Return the jobs as `jobs`; a directory that cannot be listed hides no other.

        Args:
            on_unreadable: called with the directory and the error; None = raise the error.
        """
        if on_unreadable is None:
            return self.jobs()
        listing = list_readable_jobs(self.store)
        for path, error in listing.unreadable.items():
            on_unreadable(path, error)
        return [StateJob(self, paths) for paths in listing.jobs]

    def job(self, name: str) -> StateJob:
        """Return a job by `job`, or `pipeline/job` where several pipelines have a job of that name.

        Raises:
            NotFoundError: no such job; names the nearest.
            InputError: the name is ambiguous.
        """
        try:
            return StateJob(self, find_job(self.store, name))
        except NotFoundError as error:
            if "job" not in error.facts:
                raise
            roots = [str(paths.root) for paths in list_jobs(self.store)]
            raise not_found("job", name, roots, url=self.store.url) from error

    def table(self, name: str | QueryName) -> EpochTable:
        """Return a table by its name in queries, such as `"pl_1/job_1@12".join_2.left`.

        Raises:
            InputError: not the name of a table of an operator.
            NotFoundError: there is no such job, epoch, operator or table; names the nearest.
        """
        parsed = parse_name(name) if isinstance(name, str) else name
        if parsed.job is None or parsed.operator is None:
            raise InputError(
                f"{parsed} does not name a table of an operator",
                expected='"pipeline/job".operator.table',
                next_step="name the job and the operator, too",
            )
        try:
            epoch = self.epoch(parsed.job)
        except NotFoundError:
            table = self._of_dataflow(parsed)
            if table is None:
                raise
            return table
        return epoch.table(parsed.operator, parsed.table)

    def _of_dataflow(self, name: QueryName) -> EpochTable | None:
        """Return the state that is named as `dataflow.service.state`; None = there is none.

        A dataflow with a namespace has it before its name, which may be left out.
        """
        dataflow, epoch = split_epoch(name.job or "")
        for job in self.jobs():
            pipeline = job.paths.pipeline or ""
            named = f".{pipeline}".endswith(f".{dataflow}")
            if job.paths.job != name.operator or not named:
                continue
            state_epoch = self.epoch(job.name if epoch is None else f"{job.name}@{epoch}")
            tables = [table for table in state_epoch.tables() if table.name.table == name.table]
            if len(tables) == 1:
                return tables[0]
        return None

    def find(self, name: str) -> tuple[StateJob, str | None]:
        """Return the job that `job` or `job@epoch` names, and the text that names the epoch.

        The name of a job may contain an @. Errors as `job`.
        """
        job, epoch = split_epoch(name)
        if epoch is not None:
            try:
                return self.job(name), None
            except NotFoundError:
                pass
        return self.job(job), epoch

    def epoch(self, job: str) -> StateEpoch:
        """Return an epoch by `job`, the newest, or by `job@epoch`; as `table`."""
        state_job, epoch = self.find(job)
        epochs = state_job.epochs_named(epoch)
        if len(epochs) != 1:
            raise InputError(
                f"one epoch is needed here, not {len(epochs)}",
                job=job,
                next_step="name one by its number, a time, or `latest`",
            )
        return epochs[0]


@dataclass(frozen=True)
class StateJob:
    """One job."""

    catalog: StateCatalog = field(repr=False)
    paths: JobPaths

    @property
    def name(self) -> str:
        """The name in queries: `job` or `pipeline/job`."""
        return str(self.paths.root)

    def epochs(self) -> list[Epoch]:
        """Return the numbers of the visible epochs, ascending, without those of which only the
        metadata is left.
        """
        numbers = CheckpointTree(self.catalog.store, self.paths).epochs()
        held = metadata_only_epochs(self.catalog.store, self.paths) if len(numbers) > 1 else ()
        return [number for number in numbers if number not in held]

    def epoch(self, epoch: int | str | None = None, *, at: Moment | None = None) -> StateEpoch:
        """Return an epoch, with its metadata read.

        Args:
            epoch: its number; None or `latest` = the newest visible one.
            at: the newest epoch that was finished at this time, by the writer's clock.

        Raises:
            NotFoundError: no such epoch, or none at that time; lists the existing ones.
            InputError: both are given, or the time is not one.
            FormatError: an object of the epoch is missing or does not decode.
        """
        if at is not None:
            if epoch is not None:
                raise InputError("an epoch is chosen by its number or by a time", job=self.name)
            return StateEpoch(self, self._at(_micros(at)))
        if isinstance(epoch, str) and epoch != LATEST:
            raise InputError(f"not an epoch: {epoch!r}", expected="a number or 'latest'")
        from arroyo_dagster.state.operations.catalog.query import load_epoch

        number = None if epoch is None or isinstance(epoch, str) else epoch
        return StateEpoch(self, load_epoch(self.catalog.store, self.paths, number))

    def epochs_named(self, text: str | None = None) -> list[StateEpoch]:
        """Return the epochs that a text names: a number, a time, `latest` (also None), `all`, or
        `newest 10`: so many of the newest.

        Raises:
            NotFoundError, InputError, FormatError: as `epoch`.
        """
        if text == ALL:
            return self.epoch_range()
        if text is None or text == LATEST:
            return [self.epoch()]
        count = parse_number(text.removeprefix(NEWEST)) if text.startswith(NEWEST) else None
        if count:
            return self.newest_epochs(count)
        number = parse_number(text)
        return [self.epoch(number) if number is not None else self.epoch(at=text)]

    def epoch_range(self, first: int | None = None, last: int | None = None) -> list[StateEpoch]:
        """Return the visible epochs from `first` to `last`, both inclusive; None = no bound."""
        numbers = (
            number
            for number in self.epochs()
            if (first is None or number >= first) and (last is None or number <= last)
        )
        return [self._read(number) for number in numbers]

    def newest_epochs(self, most: int) -> list[StateEpoch]:
        """Return the newest visible epochs, oldest first.

        Raises:
            NotFoundError: the job has no epoch.
            FormatError: an object of an epoch is missing or does not decode.
        """
        numbers = self.epochs()[-most:]
        return concurrently(self._read, numbers) if numbers else [self.epoch()]

    def _read(self, number: Epoch) -> StateEpoch:
        return StateEpoch(self, self._checkpoint(number))

    def _checkpoint(self, number: Epoch) -> Checkpoint:
        from arroyo_dagster.state.operations.catalog.query import read_epoch

        return read_epoch(self.catalog.store, self.paths, number)

    def _at(self, micros: int) -> Checkpoint:
        """Find the newest epoch finished at a time: a few reads, however many epochs there are."""
        numbers = self.epochs()
        checkpoints: dict[Epoch, Checkpoint] = {}

        def finished(number: Epoch) -> int:
            checkpoints[number] = self._checkpoint(number)
            return checkpoints[number].finish_time_micros

        place = bisect.bisect_right(numbers, micros, key=finished)
        if not place:
            raise NotFoundError(
                "no epoch of the job that is left was finished at that time",
                job=self.name,
                at=iso_micros(micros),
                oldest=iso_micros(finished(numbers[0])) if numbers else None,
                next_step="choose a later time",
            )
        number = numbers[place - 1]
        return checkpoints.get(number) or self._checkpoint(number)


_MOST_NAMES = 30


@dataclass(frozen=True)
class StateEpoch:
    """One epoch of a job. `checkpoint` is its metadata."""

    job: StateJob = field(repr=False)
    checkpoint: Checkpoint = field(repr=False)

    @property
    def number(self) -> Epoch:
        """The number of the epoch."""
        return self.checkpoint.epoch

    @cached_property
    def operators(self) -> tuple[OperatorCheckpoint, ...]:
        """The operators, from source to sink."""
        return ordered_operators(self.checkpoint)

    def tables(self) -> list[EpochTable]:
        """Return the tables, operator by operator."""
        return [self._table(operator, name) for operator, name, _ in self.listed_tables()]

    def listed_tables(self) -> Iterator[tuple[OperatorCheckpoint, TableName, TableConfig]]:
        """Yield operator, name and configuration of each of `tables`; no row can be read by it.

        Raises:
            FormatError: the configuration of a table is one of the other kind.
        """
        for operator in self.operators:
            for name in sorted(operator.tables.keys() & operator.configs.keys()):
                yield operator, name, config_of(self.checkpoint, operator, name)

    def table(self, operator: str, table: str) -> EpochTable:
        """Return a table of an operator.

        Raises:
            NotFoundError: there is no such operator or table; names the tables of the job.
            FormatError: the table has no configuration, or one of the other kind.
        """
        state = self.checkpoint.operator(operator)
        where = {"job": self.job.name, "epoch": self.number}
        if state is None:
            names = [existing.operator for existing in self.operators]
            raise self.with_tables(not_found("operator", operator, names, **where))
        if table not in state.tables:
            error = not_found("table", table, state.tables, operator=operator, **where)
            raise self.with_tables(error)
        return self._table(state, TableName(table))

    def with_tables(self, error: NotFoundError) -> NotFoundError:
        """Return an error about a table's name whose next step names up to thirty tables."""
        names = [
            str(QueryName(name, operator.operator, self.job.name))
            for operator, name, _ in self.listed_tables()
        ]
        more = len(names) - _MOST_NAMES
        listed = ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
        error.next_step = f"the tables of the job: {listed or 'none'}; {error.next_step}"
        return error

    def _table(self, operator: OperatorCheckpoint, name: TableName) -> EpochTable:
        from arroyo_dagster.state.operations.query.global_scan import GlobalScan
        from arroyo_dagster.state.operations.query.table import EpochTable

        config_of(self.checkpoint, operator, name)  # refuses one that is missing or of another kind
        files, catalog = operator.tables[name], self.job.catalog
        scan: ExpiringScan | GlobalScan
        if isinstance(files, GlobalKeyedFiles):
            scan = GlobalScan(catalog.store, operator, name, catalog.catalogue)
        else:
            from arroyo_dagster.state.operations.query.expiring_scan import ExpiringScan

            alone = replace(self.checkpoint, operators=(operator,))
            scan = ExpiringScan(catalog.store, alone, name)
        return EpochTable(
            name=QueryName(name, operator.operator, self.job.name),
            paths=self.job.paths,
            epoch=self.number,
            scan=scan,
            mask=catalog.private.table(self.job.paths, operator.operator, name),
        )


def _micros(moment: Moment) -> int:
    if isinstance(moment, int):
        return moment
    if isinstance(moment, str):
        try:
            moment = dt.datetime.fromisoformat(moment)
        except ValueError as error:
            raise InputError(
                f"not a point in time: {moment!r}",
                expected="ISO 8601, such as 2026-01-31T12:00:00Z",
            ) from error
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC)
    return nanos_of(aware) // 1000
