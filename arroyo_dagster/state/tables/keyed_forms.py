"""Tables of keyed state as a table manager sees them: which form each has, and its open view.

The columns of a form, and the views, are in `engine.keyed`.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable
from typing import ClassVar, Protocol

from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.model.tables import NOTE_PREFIX, ExpiringTimeKeyConfig, TableConfig
from arroyo_dagster.state.tables.expiring_time_key import ExpiringTimeKeyTable
from arroyo_dagster.state.tables.live_rows import StoredRows
from arroyo_dagster.state.tables.messages import RecordBatch

KEYED_FORM = f"{NOTE_PREFIX}keyed_form"
"""The note of a table's stored schema that names its form."""


class KeyedForm(enum.Enum):
    """What the rows of a keyed table are."""

    VALUE = "value"
    """One row for each key."""

    LIST = "list"
    """One row for each item of each key."""

    MAP = "map"
    """One row for each entry of each key."""

    EVENT_TIMERS = "event-time timers"
    """One row for each timer; they fire by the watermark."""

    PROCESSING_TIMERS = "processing-time timers"
    """One row for each timer; they fire by the engine's clock."""

    @property
    def is_timers(self) -> bool:
        """Whether the rows are timers."""
        return self in (KeyedForm.EVENT_TIMERS, KeyedForm.PROCESSING_TIMERS)

    @classmethod
    def of(cls, config: TableConfig) -> KeyedForm | None:
        """Return the form of a table; None if it does not hold keyed state."""
        stored = config.config
        if not isinstance(stored, ExpiringTimeKeyConfig):
            return None
        notes = json.loads(stored.schema.arrow_schema).get("metadata") or {}
        return cls(notes[KEYED_FORM]) if KEYED_FORM in notes else None


class OpenKeyedState(Protocol):
    """The rows of a keyed table in memory, those of one subtask's keys.

    Attributes:
        forms: the forms of the tables that it opens.
    """

    forms: ClassVar[frozenset[KeyedForm]]

    def __init__(self, table: ExpiringTimeKeyTable) -> None: ...

    def begin_epoch(self, clock_micros: int) -> None:
        """Handle the begin of an epoch, at this time by the engine's clock."""

    def changes(self, epoch: Epoch) -> list[RecordBatch]:
        """Return the changes since the last barrier; again the same."""

    def written(self, epoch: Epoch, *, then_stop: bool) -> None:
        """Handle the end of a barrier: the changes are in the files of `epoch`. After the last
        barrier (`then_stop`) changes are refused.
        """

    def replay(self, stored: Iterable[StoredRows]) -> None:
        """Apply the rows of files, in replay order, to the present rows."""

    def forget(self) -> None:
        """Drop every row from memory, before a replay of all files."""
