"""The plan of a service, and the base class of its operators.

Source: sdf-states.md 3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from arroyo_dagster.dataflow.definition.definition import StateDef, StateForm, ValueKind
from arroyo_dagster.dataflow.definition.names import mangled
from arroyo_dagster.dataflow.definition.types import ScalarType
from arroyo_dagster.dataflow.definition.windows import WindowDef
from arroyo_dagster.dataflow.runtime.context import CONTEXT, Accessor, Invocation
from arroyo_dagster.dataflow.runtime.converters import Converter
from arroyo_dagster.dataflow.runtime.failures import Failures, StepCounts
from arroyo_dagster.dataflow.runtime.functions import Function, FunctionPlan, load
from arroyo_dagster.dataflow.runtime.letters import letter_rows
from arroyo_dagster.dataflow.runtime.record_batches import clock_in, epochs_in
from arroyo_dagster.dataflow.runtime.steps import Transform
from arroyo_dagster.dataflow.storage.boundary import SINK_SCHEMA
from arroyo_dagster.dataflow.storage.engine_tables import (
    LOG_CONFIG,
    METRICS_CONFIG,
    Metrics,
    StepLog,
)
from arroyo_dagster.dataflow.views.frames import Frame, Pairs
from arroyo_dagster.dataflow.views.snapshots import SnapshotReader
from arroyo_dagster.dataflow.views.sql import Tables
from arroyo_dagster.dataflow.views.view import OwnerJob, StateView
from arroyo_dagster.engine.operators import Operator, OperatorContext
from arroyo_dagster.errors import NotFoundError
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.tables import TableConfig
from arroyo_dagster.state.storage.store import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicPlan:
    """A topic as a source or sink of a service: its converter and its steps."""

    name: str
    converter: Converter
    transforms: tuple[FunctionPlan, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionPlan:
    """The steps that run per key."""

    assign_key: FunctionPlan
    transforms: tuple[FunctionPlan, ...] = ()
    update_state: FunctionPlan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePlan:
    """Everything that the operators of a service need. Can be pickled.

    Attributes:
        states: the states as the service sees them, by name.
        paths: the jobs of the states' owners, including this service, by name.
        owners: the other services that own states, sorted; records carry their epochs.
        fatal: whether a failing function ends the run.
        letters: the type of raw values, which records carry for dead letters; None = no letters.
        migrate: whether stored states may get additional columns.
        as_pairs: the owned primitive states that are stored as pairs; see `state_config`.
    """

    name: str
    store: ObjectStore = field(repr=False, compare=False)
    sources: tuple[TopicPlan, ...]
    sinks: tuple[TopicPlan, ...] = ()
    transforms: tuple[FunctionPlan, ...] = ()
    window: WindowDef | None = None
    assign_timestamp: FunctionPlan | None = None
    window_transforms: tuple[FunctionPlan, ...] = ()
    flush: FunctionPlan | None = None
    partition: PartitionPlan | None = None
    states: Mapping[str, StateDef] = field(default_factory=dict)
    paths: Mapping[str, JobPaths] = field(default_factory=dict)
    owners: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    fatal: bool = False
    letters: pa.DataType | None = None
    migrate: bool = False
    as_pairs: frozenset[str] = frozenset()

    @property
    def owned(self) -> dict[str, StateDef]:
        """The states that it owns."""
        return {name: state for name, state in self.states.items() if state.form is StateForm.TYPED}

    @property
    def key_types(self) -> tuple[ScalarType, ...]:
        """The distinct key types of its owned states."""
        types = [state.key_type for state in self.owned.values() if state.key_type is not None]
        return tuple(dict.fromkeys(types))

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that it reads, in order."""
        return tuple(source.name for source in self.sources)

    # ---- which steps a record may reach in parts; see `Letter` -----------------------------------

    @property
    def partial_after_sources(self) -> bool:
        return any(_splits(source.transforms) for source in self.sources)

    @property
    def partial_before_window(self) -> bool:
        return self.partial_after_sources or _splits(self.transforms)

    @property
    def partial_in_windows(self) -> bool:
        window = self.window
        overlap = window is not None and window.slide_ms < window.duration_ms
        return self.partial_before_window or overlap

    @property
    def partial_before_key(self) -> bool:
        return self.partial_in_windows or _splits(self.window_transforms)

    @property
    def partial_before_update(self) -> bool:
        steps = () if self.partition is None else self.partition.transforms
        return self.partial_before_key or _splits(steps) or bool(steps and self.owned)

    @property
    def partial_before_sinks(self) -> bool:
        return self.partial_before_update or len(self.sinks) > 1


def _splits(steps: Iterable[FunctionPlan]) -> bool:
    return any(step.operator == "flat-map" for step in steps)


class ServiceOperator(Operator):
    """Runs functions of one service. What `on_start` sets is never stored or pickled.

    Its side output are dead letters.
    """

    side_schema = SINK_SCHEMA

    def __init__(self, plan: ServicePlan) -> None:
        self.plan = plan

    def tables(self) -> Sequence[TableConfig]:
        """Return the tables of its metrics and its log."""
        return (METRICS_CONFIG, LOG_CONFIG)

    def on_start(self, ctx: OperatorContext) -> None:
        """Initialize from the tables."""
        plan = self.plan
        self.metrics = Metrics(ctx)
        self._log = StepLog(ctx)
        self.failures = Failures(
            plan.name,
            self.metrics,
            self._log,
            fatal=plan.fatal,
            keeps=plan.letters is not None,
        )
        self._counts: StepCounts = {}
        self.readers = Readers(plan.store, plan.paths, plan.states)
        self.now_ms = 0

    def see(self, batch: pa.RecordBatch, ctx: OperatorContext) -> None:
        """Read the clock and the epochs of the owners from a batch, and pin the readers to them."""
        self.now_ms = clock_in(batch)
        epochs: dict[str, Any] = epochs_in(batch, self.plan.owners)
        before = Epoch(ctx.epoch - 1)
        epochs[self.plan.name] = before if before > 0 else None
        self.readers.pin(epochs, self.now_ms)

    def finish_epoch(self, ctx: OperatorContext) -> None:
        """Write the metrics and the log of the epoch, and emit its dead letters."""
        self.failures.epoch_done()
        if letters := self.failures.take_letters():
            ctx.side_output.collect(letter_rows(letters))
        self._counts = self.metrics.take_epoch()
        self.metrics.write()
        self._log.write(ctx.epoch, self.now_ms)

    def epoch_report(self) -> StepCounts:
        """Return how often each step succeeded and failed, for `ErrorLimit`."""
        return self._counts

    # ---- functions -------------------------------------------------------------------------------

    def invocation(
        self,
        accessors: Mapping[str, Accessor] | None = None,
        tables_in: Callable[[Collection[str]], Tables] | None = None,
    ) -> Invocation:
        """Return a context for functions.

        Args:
            accessors: by the name of the state; states without one are read as a whole.
            tables_in: see `Invocation`; None = all states as published.
        """
        by_name: dict[str, Accessor] = {}
        for name, state in self.plan.states.items():
            access = (accessors or {}).get(name) or self._whole(name)
            by_name[mangled(name)] = by_name[state.accessor] = access
        place = Invocation(
            by_name,
            lambda: self.readers.tables(),
            self.plan.env,
            tables_in or (lambda words: self.readers.tables_in(words)),
        )
        place.service, place.log = self.plan.name, self._log.add_message
        return place

    def _whole(self, name: str) -> Accessor:
        return lambda: self.readers.whole(name)

    def function(self, plan: FunctionPlan, place: Invocation) -> Function:
        """Load a function with the accessors of its states. Errors as in `functions.load`."""
        allowed = place.accessors
        if plan.states is not None:
            listed = {mangled(name) for name in plan.states}
            listed |= {
                state.accessor
                for name, state in self.plan.states.items()
                if mangled(name) in listed
            }
            allowed = {name: accessor for name, accessor in allowed.items() if name in listed}
        return load(plan, {**CONTEXT, **allowed})

    def steps(
        self,
        plans: Iterable[FunctionPlan],
        place: Invocation,
        *,
        partial: bool,
        keeps: bool = False,
    ) -> list[Transform]:
        """Load transforms.

        Args:
            plans: the transforms in order.
            place: the context of their functions.
            partial: whether records may reach the first in parts; see `Letter`.
            keeps: whether each may change a state.
        """
        steps: list[Transform] = []
        for plan in plans:
            function = self.function(plan, place)
            steps.append(Transform(function, place, self.failures, self.metrics, partial))
            partial = partial or keeps or plan.operator == "flat-map"
        return steps


# ---- complete states for user code: those of other services, and its own as last published -------
# Source: sdf-states.md 1.9, 3.2, 4.1, 8.3.


class Readers:
    """Snapshots of the states that one service sees. A state is read at its first use.

    Args:
        store: the object store of the states.
        paths: the jobs of the states' owners, by name.
        states: the states as the service sees them: owned ones and references.
    """

    def __init__(
        self, store: ObjectStore, paths: Mapping[str, JobPaths], states: Mapping[str, StateDef]
    ) -> None:
        self._states = dict(states)
        self._owners = {owner: OwnerJob(store, where) for owner, where in paths.items()}
        self._readers = {name: SnapshotReader(store, state) for name, state in states.items()}
        self._epochs: dict[str, Epoch | None] = {}
        self._now_ms = 0
        self._views: dict[str, StateView] = {}
        self._wholes: dict[str, Frame | Pairs] = {}
        self._tables: Tables | None = None

    def pin(self, epochs: Mapping[str, Epoch | None], now_ms: int) -> None:
        """Set the epoch of each owner to read, and the time at which TTLs are checked."""
        if epochs != self._epochs or now_ms != self._now_ms:
            self._epochs, self._now_ms = dict(epochs), now_ms
            self._views.clear()
            self._wholes.clear()
            self._tables = None

    @property
    def epochs(self) -> Mapping[str, Epoch | None]:
        """The pinned epoch of each owner; None if it has none yet."""
        return self._epochs

    def tables_in(self, words: Collection[str], *, without: Collection[str] = ()) -> Tables:
        """Return the arrow-row states that a query may name as tables, and read no others.

        Args:
            words: the words of the query in lower case.
            without: states to leave out.
        """
        tables = []
        for name, state in self._states.items():
            if state.value_kind is not ValueKind.ROW or name in without:
                continue
            spelled = (alias.replace("-", "_").lower() for alias in (state.table, *state.aliases))
            if any({*alias.split("_")} <= {*words} or alias in words for alias in spelled):
                tables.append(self._view(name).table())
        return Tables(tables)

    def tables(self) -> Tables:
        """Return every arrow-row state as a table for `sql`."""
        if self._tables is None:
            rows = [
                name for name, state in self._states.items() if state.value_kind is ValueKind.ROW
            ]
            others = {state.table for name, state in self._states.items() if name not in rows}
            self._tables = Tables(
                [self._view(name).table() for name in rows], primitives=frozenset(others)
            )
        return self._tables

    def whole(self, name: str) -> Frame | Pairs:
        """Return a state as a whole: a frame, or all pairs of key and value.

        The same object for all records of an epoch, so that its look-up by key is made once.
        """
        contents = self._wholes.get(name)
        if contents is None:
            view = self._view(name)
            is_row = self._states[name].value_kind is ValueKind.ROW
            contents = self._wholes[name] = view.whole(self.tables() if is_row else Tables(()))
        return contents

    def _view(self, name: str) -> StateView:
        view = self._views.get(name)
        if view is None:
            state = self._states[name]
            head = self._head(state.owner)
            frame = self._readers[name].at(head)
            now_ms = self._now_ms
            view = StateView(state, head.epoch if head else None, frame, lambda: now_ms)
            self._views[name] = view
        return view

    def _head(self, owner: str) -> Checkpoint | None:
        epoch = self._epochs.get(owner)
        if epoch is None:
            return None
        try:
            return self._owners[owner].load(epoch)
        except NotFoundError:
            return self._owners[owner].newest()  # deleted by gc since this epoch began
