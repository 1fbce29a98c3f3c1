"""The plan of a service, and the base class of its operators.

Source: sdf-states.md 3.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from arroyo_dagster.dataflow.definition.definition import StateDef, StateForm
from arroyo_dagster.dataflow.definition.names import mangled
from arroyo_dagster.dataflow.definition.types import ScalarType
from arroyo_dagster.dataflow.definition.windows import WindowDef
from arroyo_dagster.dataflow.runtime.context import CONTEXT, Accessor, Invocation
from arroyo_dagster.dataflow.runtime.converters import Converter
from arroyo_dagster.dataflow.runtime.functions import Function, FunctionPlan, load
from arroyo_dagster.dataflow.runtime.readers import Readers
from arroyo_dagster.dataflow.runtime.record_batches import clock_in, epochs_in
from arroyo_dagster.dataflow.runtime.steps import Failures, Step
from arroyo_dagster.dataflow.storage.engine_tables import METRICS_CONFIG, Metrics
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.tables import TableConfig
from arroyo_dagster.state.runtime.operators import Operator, OperatorContext
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
        migrate: whether stored states may get additional columns.
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
    migrate: bool = False

    @property
    def owned(self) -> dict[str, StateDef]:
        """The states that it owns."""
        return {name: state for name, state in self.states.items() if state.form is StateForm.TYPED}

    @property
    def key_types(self) -> tuple[ScalarType, ...]:
        """The distinct key types of its owned states."""
        found = [state.key_type for state in self.owned.values() if state.key_type is not None]
        return tuple(dict.fromkeys(found))

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that it reads, in order."""
        return tuple(source.name for source in self.sources)


class ServiceOperator(Operator):
    """Runs functions of one service. What `on_start` sets is never stored or pickled."""

    def __init__(self, plan: ServicePlan) -> None:
        self.plan = plan

    def tables(self) -> Sequence[TableConfig]:
        """Return the table of its metrics."""
        return (METRICS_CONFIG,)

    def on_start(self, ctx: OperatorContext) -> None:
        """Initialize from the tables."""
        plan = self.plan
        self.metrics = Metrics(ctx)
        self.failures = Failures(plan.name, self.metrics, fatal=plan.fatal)
        self.readers = Readers(plan.store, plan.paths, plan.states)
        self.now_ms = 0

    def see(self, batch: pa.RecordBatch, ctx: OperatorContext) -> None:
        """Read the clock and the epochs of the owners from a batch, and pin the readers to them."""
        self.now_ms = clock_in(batch)
        epochs: dict[str, Any] = epochs_in(batch, self.plan.owners)
        before = Epoch(ctx.epoch - 1)
        epochs[self.plan.name] = before if before > 0 else None
        self.readers.pin(epochs, self.now_ms)

    def finish_epoch(self) -> None:
        """Write the metrics of the epoch."""
        self.failures.epoch_done()
        self.metrics.write()

    # ---- functions -------------------------------------------------------------------------------

    def invocation(self, accessors: Mapping[str, Accessor] | None = None) -> Invocation:
        """Return a context for functions.

        Args:
            accessors: by the name of the state; states without one are read as a whole.
        """
        found: dict[str, Accessor] = {}
        for name, state in self.plan.states.items():
            access = (accessors or {}).get(name) or self._whole(name)
            found[mangled(name)] = found[state.accessor] = access
        return Invocation(found, lambda: self.readers.tables(), self.plan.env)

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
            allowed = {name: one for name, one in allowed.items() if name in listed}
        return load(plan, {**CONTEXT, **allowed})

    def steps(self, plans: Iterable[FunctionPlan], place: Invocation) -> list[Step]:
        """Load transforms."""
        return [Step(self.function(plan, place)) for plan in plans]
