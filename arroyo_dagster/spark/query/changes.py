"""The changes of a table, epoch by epoch, as a stream of Spark: a source with `changes=true`.

```python
changes = (
    spark.readStream.format("arroyo")
    .options(table='"shop/main".join_2."left"', changes="true")
    .load("s3://bucket/arroyo")
)
```

The rows have two more columns: `_change`, as of `Change`, and `_epoch`, in which they changed. The
first batch holds all rows of the newest epoch as inserted; with the option `epoch`, the changes
behind that epoch. Each batch ends at the newest visible epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (  # noqa: TID253 - the classes below extend these
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)

from arroyo_dagster.errors import InputError, NotFoundError
from arroyo_dagster.spark.query.columns import AskedColumns
from arroyo_dagster.state.codec.common_types import TypeOptions
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.operations.query.diff import CHANGE, Change, diff_tables
from arroyo_dagster.state.operations.query.scans import WRITTEN_EPOCH, ScanRequest
from arroyo_dagster.state.operations.query.state import StateCatalog, StateJob
from arroyo_dagster.state.operations.query.table import EpochTable

EPOCH = WRITTEN_EPOCH
_NOTHING = Epoch(0)
"""The epoch before the first one: it has no rows."""


@dataclass(frozen=True)
class TableChanges:
    """The changes of one table of a job.

    Attributes:
        newest_table: the table at the epoch that was the newest when the read was planned.
        first: the epoch before the first changes; None = none: all rows of the newest epoch are
            inserted.
        partitions: into how many partitions those rows are divided.
    """

    state: StateCatalog
    newest_table: EpochTable
    first: Epoch | None
    types: TypeOptions
    partitions: int

    @property
    def job(self) -> StateJob:
        """The job."""
        return StateJob(self.state, self.newest_table.paths)

    def table(self, epoch: Epoch) -> EpochTable:
        """Return the table at an epoch.

        Raises:
            NotFoundError: the epoch was collected, or has no such table.
        """
        name = self.newest_table.name
        assert name.operator is not None
        try:
            state_epoch = self.job.epoch(epoch)
        except NotFoundError as error:
            error.next_step = (
                "pin the epochs that a stream has not read yet, or begin anew: with another "
                "checkpoint location, which reads the newest epoch whole"
            )
            raise
        return state_epoch.table(name.operator, name.table)

    def newest(self) -> Epoch:
        """Return the newest visible epoch; 0 = there is none."""
        return max(self.job.epochs(), default=_NOTHING)

    @property
    def schema(self) -> pa.Schema:
        """The columns of the newest epoch, and `_change` and `_epoch`."""
        columns = self.newest_table.schema
        for name in (CHANGE, EPOCH):
            if name in columns.names:
                raise InputError(
                    f"the table has a column {name} of its own", table=str(self.newest_table.name)
                )
        return columns.append(pa.field(CHANGE, pa.string(), nullable=False)).append(
            pa.field(EPOCH, pa.int64(), nullable=False)
        )

    def steps(self, after: Epoch, until: Epoch) -> list[EpochStep]:
        """Return the steps from epoch to epoch that lead from one to another."""
        if after == until:
            return []
        if after == _NOTHING:
            requests = self.table(until).splits(self.partitions)
            return [EpochStep(_NOTHING, until, request) for request in requests]
        numbers = [number for number in self.job.epochs() if after < number < until]
        return [EpochStep(*pair) for pair in pairwise([after, *numbers, until])]

    def rows(self, step: EpochStep) -> Iterator[pa.Table]:
        """Yield the changes of a step, with all columns.

        Raises:
            NotFoundError: an epoch was collected.
            InputError: the columns of the table changed.
        """
        after = self.table(step.after)
        if step.request is None:
            changes = diff_tables(self.table(step.before), after).changes
            yield changes.append_column(EPOCH, pa.repeat(int(step.after), changes.num_rows))
            return
        for rows in after.read(step.request):
            kind = pa.repeat(Change.INSERTED.value, rows.num_rows)
            with_kind = rows.append_column(CHANGE, kind)
            yield with_kind.append_column(EPOCH, pa.repeat(int(step.after), rows.num_rows))


class EpochStep(InputPartition):
    """From one epoch to the next; with a request, a share of the rows of the second."""

    def __init__(self, before: Epoch, after: Epoch, request: ScanRequest | None = None) -> None:
        super().__init__(None)
        self.before = before
        self.after = after
        self.request = request


class _StepReader:
    """Reads the steps of a table's changes."""

    def __init__(self, changes: TableChanges, asked: Mapping[str, bool]) -> None:
        self._changes = changes
        self._columns = AskedColumns(changes.schema, changes.types, asked)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a step."""
        assert isinstance(partition, EpochStep)
        for rows in self._changes.rows(partition):
            yield from self._columns.batches(rows.select(list(self._columns.places)))


class ChangesReader(_StepReader, DataSourceReader):
    """Reads the changes up to the newest epoch once."""

    def partitions(self) -> Sequence[InputPartition]:
        """Return the steps."""
        changes = self._changes
        return changes.steps(changes.first or _NOTHING, changes.newest())


class ChangesStream(_StepReader, DataSourceStreamReader):
    """Reads changes as epochs come. An offset is the last epoch that was read: `{"epoch": 12}`."""

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        """Return where a new query begins."""
        return {"epoch": int(self._changes.first or _NOTHING)}

    def latestOffset(  # noqa: N802 - Spark's name
        self, start: dict[str, int], limit: Any
    ) -> dict[str, int]:
        """Return the newest visible epoch: a batch reads all epochs that are there."""
        return {"epoch": max(start["epoch"], int(self._changes.newest()))}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """Return the steps between two offsets."""
        return self._changes.steps(Epoch(start["epoch"]), Epoch(end["epoch"]))
