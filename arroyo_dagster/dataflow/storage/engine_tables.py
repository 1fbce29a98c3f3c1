"""The engine's own tables of a service: metrics, log, watermark, windows and stored schemas.

Source: sdf-states.md 4.5, 8.4; error E50.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from arroyo_dagster.dataflow.definition.definition import StateDef
from arroyo_dagster.dataflow.definition.names import LOG, METRICS, SCHEMAS, WATERMARK
from arroyo_dagster.dataflow.definition.windows import Window
from arroyo_dagster.dataflow.errors import StateSchemaError
from arroyo_dagster.dataflow.storage.state_changes import advice, state_changes
from arroyo_dagster.engine.operators import OperatorContext
from arroyo_dagster.state.codec.bincode.codec import Codec, codec_for
from arroyo_dagster.state.model.checkpoints import OperatorCheckpoint
from arroyo_dagster.state.model.ids import OperatorId, TableName
from arroyo_dagster.state.model.tables import GlobalKeyedFiles
from arroyo_dagster.state.model.types import I64, U32, U64
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.global_keyed import GlobalKeyedTable, global_table_config

WINDOWS = "windows"
MOST_LOGGED = 20
"""How many of its last failures, and of its last messages, each subtask keeps of a step."""
DROPPED = OperatorId("dropped")
"""The operator whose tables are those of states that are no longer declared. No service runs it, so
that every epoch carries its tables over.
"""


@dataclass(frozen=True, slots=True)
class MetricKey:
    """The key of a metric: the name of a step, topic or state, and the subtask that counts."""

    name: str
    subtask: U32


@dataclass(frozen=True, slots=True)
class Metric:
    """Counters since the start of the job.

    Attributes:
        succeeded, failed: the records that a step processed, and those on which it failed; for a
            topic, the records that were decoded, and those that were not.
        dropped_late: the records that all their windows rejected as late.
        expired: the rows of a state whose TTL expired.
        last_error_offset: for a topic, the offset of the last record that failed; -1 = none.
    """

    succeeded: U64 = 0
    failed: U64 = 0
    dropped_late: U64 = 0
    expired: U64 = 0
    last_error_offset: I64 = -1


METRICS_CONFIG = global_table_config(METRICS, "SDF metrics", key=MetricKey, value=Metric)


@dataclass(frozen=True, slots=True)
class LogKey:
    """The key of a failure or message: the step, the subtask, and a place that later ones take
    again: failures those below `MOST_LOGGED`, messages as many after them.
    """

    name: str
    subtask: U32
    place: U32


LOG_CONFIG = global_table_config(
    LOG, "SDF last failures and messages of each step, as JSON", key=LogKey, value=str
)
SCHEMAS_CONFIG = global_table_config(SCHEMAS, "SDF schemas of states", key=str, value=str)
WATERMARK_CONFIG = global_table_config(
    WATERMARK, "SDF event time in milliseconds", key=U32, value=I64
)


@dataclass(frozen=True, slots=True)
class WindowBounds:
    """A window as a key: start (inclusive) and end (exclusive) in epoch milliseconds."""

    start_ms: I64
    end_ms: I64

    @property
    def window(self) -> Window:
        return Window(self.start_ms, self.end_ms)


WINDOWS_CONFIG = global_table_config(
    WINDOWS, "SDF open windows, and how many records each took", key=WindowBounds, value=U64
)


@dataclass(frozen=True, slots=True)
class UnflushedKey:
    """The key of a closed window whose flush failed: its bounds, and a state.

    The value is the content of the state as an Arrow IPC stream. Without a state (an empty text),
    it is JSON: the engine's clock and the owners' epochs when the window closed.
    """

    start_ms: I64
    end_ms: I64
    state: str

    @property
    def window(self) -> Window:
        return Window(self.start_ms, self.end_ms)


UNFLUSHED = "unflushed"
UNFLUSHED_CONFIG = global_table_config(
    UNFLUSHED, "SDF closed windows whose flush failed", key=UnflushedKey, value=bytes
)
LAST_WINDOW_CONFIG = global_table_config(
    WINDOWS, "SDF window that closed last", key=str, value=WindowBounds
)


def has_unflushed(store: ObjectStore, operator: OperatorCheckpoint | None) -> bool:
    """Return whether an epoch of the operator `flush` has windows whose flush failed."""
    files = None if operator is None else operator.tables.get(TableName(UNFLUSHED))
    if not isinstance(files, GlobalKeyedFiles) or not files.files:
        return False
    return bool(GlobalKeyedTable(UNFLUSHED_CONFIG, store).load(files.files))


class Metrics:
    """The counters of one subtask. Changed ones are written at the barrier."""

    def __init__(self, ctx: OperatorContext) -> None:
        self._subtask = ctx.task_info.task_index
        self._view = ctx.table_manager.get_global_keyed_state(METRICS, MetricKey, Metric)
        self._known: dict[str, Metric] = {}
        self._changed: set[str] = set()
        self._epoch: dict[str, tuple[int, int]] = {}

    def count(self, name: str, *, error_offset: int | None = None, **more: int) -> None:
        """Add to the counters of a step, topic or state.

        Args:
            name: the step, topic or state.
            error_offset: the new `last_error_offset`; None = unchanged.
            more: increments by the name of the counter.
        """
        if not any(more.values()):
            return
        succeeded, failed = self._epoch.get(name, (0, 0))
        self._epoch[name] = (succeeded + more.get("succeeded", 0), failed + more.get("failed", 0))
        if name not in self._known:
            stored = self._view.get(MetricKey(name, self._subtask))
            self._known[name] = stored if stored is not None else Metric()
        metric = self._known[name]
        values: dict[str, Any] = {one: getattr(metric, one) + by for one, by in more.items()}
        if error_offset is not None:
            values["last_error_offset"] = error_offset
        self._known[name] = replace(metric, **values)
        self._changed.add(name)

    def failed(self, name: str) -> int:
        """Return how often a step has failed since the start of the job, in this subtask."""
        return self._known[name].failed if name in self._known else 0

    def write(self) -> None:
        """Write the changed counters to the table."""
        self._view.insert_many(
            (MetricKey(name, self._subtask), self._known[name]) for name in sorted(self._changed)
        )
        self._changed.clear()

    def take_epoch(self) -> dict[str, tuple[int, int]]:
        """Return what was counted since the last call: succeeded and failed, by name."""
        counted, self._epoch = self._epoch, {}
        return counted


class StepLog:
    """The last failures and messages of each step of one subtask, written at the barrier."""

    def __init__(self, ctx: OperatorContext) -> None:
        self._subtask = ctx.task_info.task_index
        self._view = ctx.table_manager.get_global_keyed_state(LOG, LogKey, str)
        self._fresh: dict[LogKey, dict[str, Any]] = {}
        self._messages: dict[str, int] = {}

    def add_failure(self, step: str, number: int, failure: dict[str, Any]) -> None:
        """Keep a failure in the place of the one that was `MOST_LOGGED` before it.

        Args:
            step: the step.
            number: the number of its failures so far, this one included.
            failure: values of JSON.
        """
        key = LogKey(step, self._subtask, number % MOST_LOGGED)
        self._fresh[key] = {**failure, "number": number}

    def add_message(self, step: str, text: str) -> None:
        """Keep a message of a function in the place of the one that was `MOST_LOGGED` before it."""
        if step not in self._messages:
            places = range(MOST_LOGGED, 2 * MOST_LOGGED)
            stored = (self._view.get(LogKey(step, self._subtask, place)) for place in places)
            numbers = (0 if text is None else int(json.loads(text)["number"]) for text in stored)
            self._messages[step] = max(numbers)
        number = self._messages[step] = self._messages[step] + 1
        key = LogKey(step, self._subtask, MOST_LOGGED + number % MOST_LOGGED)
        self._fresh[key] = {"message": text, "number": number}

    def write(self, epoch: int, now_ms: int) -> None:
        """Write the entries of an epoch to the table, with the epoch and its clock."""
        self._view.insert_many(
            (key, json.dumps({**one, "epoch": epoch, "at_ms": now_ms}, ensure_ascii=False))
            for key, one in self._fresh.items()
        )
        self._fresh.clear()


def total(metrics: Iterable[Metric]) -> Metric:
    """Sum the counters of several subtasks; `last_error_offset` is their maximum."""
    sums = {"succeeded": 0, "failed": 0, "dropped_late": 0, "expired": 0}
    last = -1
    for one in metrics:
        sums = {name: value + getattr(one, name) for name, value in sums.items()}
        last = max(last, one.last_error_offset)
    return Metric(**sums, last_error_offset=last)


# ---- stored schemas ------------------------------------------------------------------------------


def stored_schemas(states: Iterable[StateDef]) -> dict[str, str]:
    """Return the stored form of each state's schema: JSON with sorted keys, including its hash."""
    return {
        state.name: json.dumps(
            {**state.schema, "hash": state.schema_hash, "windowed": state.window is not None},
            sort_keys=True,
        )
        for state in states
    }


def read_schemas(store: ObjectStore, operator: OperatorCheckpoint | None) -> dict[str, str]:
    """Read the schemas from an epoch of the operator `states` or `dropped`, in the form of
    `stored_schemas`; None = the epoch has no such operator.
    """
    files = None if operator is None else operator.tables.get(TableName(SCHEMAS))
    if not isinstance(files, GlobalKeyedFiles):
        return {}
    text: Codec[str] = codec_for(str)
    pairs = GlobalKeyedTable(SCHEMAS_CONFIG, store).load(files.files)
    return {text.decode(key): text.decode(value) for key, value in pairs.items()}


def check_states(
    stored: Mapping[str, str],
    states: Iterable[StateDef],
    *,
    migrate: bool,
    service: str,
    dropped: Mapping[str, str] | None = None,
    every: bool = False,
) -> None:
    """Check that the stored states match the definitions; new states do.

    Args:
        stored, dropped: the stored schemas by state, and those of dropped states, as
            `stored_schemas` returns them.
        states: the definitions.
        migrate: whether to accept added columns; older rows then have their defaults.
        service: the name of the service, for the error.
        every: whether `states` are all states of the service, so that others were dropped.

    Raises:
        StateSchemaError: E50, with what was added, removed and changed.
    """
    owned = list(states)
    changes = state_changes(stored, dropped or {}, owned)
    refused = [
        change
        for change in changes
        if (change.state is not None or every)
        and (change.needs_revision or (change.differences.only_added and not migrate))
    ]
    if not refused:
        return
    taking = [change.state for change in changes]
    free = [state for state in owned if state not in taking]
    state = next((change.state for change in refused if change.state is not None), None)
    raise StateSchemaError(
        "; ".join(text for change in refused for text in change.texts),
        number="E50",
        service=service,
        path=None if state is None else state.path,
        line=None if state is None else state.line,
        next_step=advice(refused[0], free, service),
    )
