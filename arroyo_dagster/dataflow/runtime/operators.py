"""The operators a service is made of, and what they have in common.

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
    """A topic as one end of a service: how its records are read or written, and its steps."""

    name: str
    converter: Converter
    transforms: tuple[FunctionPlan, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionPlan:
    """What is done key by key."""

    assign_key: FunctionPlan
    transforms: tuple[FunctionPlan, ...] = ()
    update_state: FunctionPlan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePlan:
    """All of a service that its operators need; a value that pickles.

    Attributes:
        states: as the service sees them, by name.
        paths: the job of each owner of one, its own included.
        owners: the other jobs whose epochs records name, in order.
        fatal: whether a failing function ends the run.
        migrate: whether stored states may get columns.
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
        """The states it owns."""
        return {name: state for name, state in self.states.items() if state.form is StateForm.TYPED}

    @property
    def key_types(self) -> tuple[ScalarType, ...]:
        """The declared types of its keys, each once."""
        found = [state.key_type for state in self.owned.values() if state.key_type is not None]
        return tuple(dict.fromkeys(found))

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics it reads, in order."""
        return tuple(source.name for source in self.sources)


class ServiceOperator(Operator):
    """Runs functions of one service. What is made in `on_start` is never stored or pickled."""

    def __init__(self, plan: ServicePlan) -> None:
        self.plan = plan

    def tables(self) -> Sequence[TableConfig]:
        """What it counts."""
        return (METRICS_CONFIG,)

    def on_start(self, ctx: OperatorContext) -> None:
        """Begin anew, on whatever the tables hold."""
        plan = self.plan
        self.metrics = Metrics(ctx)
        self.failures = Failures(plan.name, self.metrics, fatal=plan.fatal)
        self.readers = Readers(plan.store, plan.paths, plan.states)
        self.now_ms = 0

    def see(self, batch: pa.RecordBatch, ctx: OperatorContext) -> None:
        """Take from a batch what time it is, and which epochs its records see."""
        self.now_ms = clock_in(batch)
        epochs: dict[str, Any] = epochs_in(batch, self.plan.owners)
        before = Epoch(ctx.epoch - 1)
        epochs[self.plan.name] = before if before > 0 else None
        self.readers.pin(epochs, self.now_ms)

    def finish_epoch(self) -> None:
        """Write what was counted."""
        self.failures.epoch_done()
        self.metrics.write()

    # ---- functions -------------------------------------------------------------------------------

    def invocation(self, accessors: Mapping[str, Accessor] | None = None) -> Invocation:
        """A place for functions: every state whole, but for those that are given otherwise."""
        found: dict[str, Accessor] = {}
        for name, state in self.plan.states.items():
            access = (accessors or {}).get(name) or self._whole(name)
            found[mangled(name)] = found[state.accessor] = access
        return Invocation(found, lambda: self.readers.tables(), self.plan.env)

    def _whole(self, name: str) -> Accessor:
        return lambda: self.readers.whole(name)

    def function(self, plan: FunctionPlan, place: Invocation) -> Function:
        """A function in its place. Errors as `functions.load`."""
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
        """Transforms in their place."""
        return [Step(self.function(plan, place)) for plan in plans]
