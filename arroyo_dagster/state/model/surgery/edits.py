"""Requests to change the state of a stopped job: offsets, watermarks, keys, old rows, entries."""

from __future__ import annotations

from dataclasses import dataclass

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.ids import Epoch, OperatorId, StatePath, TableName
from arroyo_dagster.state.model.numbers import LONGEST_POSITION
from arroyo_dagster.state.model.settings import check_time
from arroyo_dagster.state.model.surgery.bootstrap import BootstrapRequest
from arroyo_dagster.state.model.surgery.evolve import Evolve

ALL_PARTITIONS = "all"
"""Names every partition of the sources that are edited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPosition:
    """Where a source continues to read one of its partitions.

    Attributes:
        partition: as `arroyo-state sql @offsets JOB` prints it; `ALL_PARTITIONS` = each of them.
        position: the new position; if `relative`, a signed number that is added to the stored one.
    """

    partition: str
    position: str
    relative: bool = False

    def __post_init__(self) -> None:
        if len(self.position) > LONGEST_POSITION:
            raise InputError(
                f"the position has {len(self.position)} characters: expected at most "
                f"{LONGEST_POSITION}",
                partition=f"{self.partition:.80}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SetOffsets:
    """Set the positions of sources.

    Attributes:
        operator: the source; None = all sources that have the named partitions.
        at_micros: the time of which the positions were looked up, of all partitions of one source;
            None = they were named one by one.
    """

    positions: tuple[NewPosition, ...]
    operator: OperatorId | None = None
    at_micros: int | None = None

    name = "offsets"

    def __post_init__(self) -> None:
        if self.at_micros is not None:
            check_time(self.at_micros)

    @property
    def request(self) -> str | None:
        """Identifies the request if applying it twice differs from applying it once; else None."""
        if not any(position.relative for position in self.positions):
            return None
        return f"{self.operator}: " + ", ".join(
            f"{position.partition}={position.position}" for position in self.positions
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SetWatermark:
    """Set event time, at the watermark generators and at every operator that has a watermark."""

    at_micros: int

    name = "watermark"

    def __post_init__(self) -> None:
        check_time(self.at_micros)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetEntry:
    """Replace the value of one entry of a global keyed table.

    Attributes:
        key, value: JSON texts, in the form in which `arroyo-state rows` prints them.
    """

    operator: OperatorId
    table: TableName
    key: str
    value: str

    name = "set"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDeletion:
    """Delete the rows of one key from every table whose key has that form.

    Attributes:
        values: the values of the key columns as texts, in their order.
        operator: only from the tables of this operator; None = from all.
    """

    values: tuple[str, ...]
    operator: OperatorId | None = None

    name = "delete-key"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainRows:
    """Drop rows of windows, sessions and joins whose event time lies before a time.

    Attributes:
        since_micros: the oldest event time that stays.
        operator: only from the tables of this operator; None = from all.
    """

    since_micros: int
    operator: OperatorId | None = None

    name = "retain"

    def __post_init__(self) -> None:
        check_time(self.since_micros)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescale:
    """Split the files of every table for a restart with this number of subtasks."""

    parallelism: int

    name = "rescale"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Take over the state of another job of the same SQL.

    Attributes:
        source: the path of the other job, and `epoch` its epoch.
    """

    source: StatePath
    epoch: Epoch

    name = "fork"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """Go back to the state that the job had at an older epoch."""

    epoch: Epoch

    name = "rollback"


Edit = SetOffsets | SetWatermark | SetEntry | KeyDeletion | RetainRows | Rescale

AnyEdit = Edit | Fork | Rollback | Evolve | BootstrapRequest
"""Every change of the state of a stopped job that has a plan and an undo."""
