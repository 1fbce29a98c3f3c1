"""Build pipelines from SDF services and their bindings.

    pipelines = build_dataflow(
        load_document("dataflow.yaml"),
        store,
        bindings=Bindings(
            sources={"words": JsonLines("words.jsonl")},       # topic -> Source of topic_schema()
            sinks={"counts": JsonLinesSink("file:///out")},    # topic -> Sink of SINK_SCHEMA
            functions={"increment-hits": "app:increment"},     # name -> callable or module:function
        ),
    )
    for service in pipelines:                                  # owners before their readers
        run_pipeline(service, store)

Every service is one managed job, `{namespace}.{dataflow}` / `{service}`, with the same exactly-once
processing, fencing, compaction and gc as any other. Its operators, by their ids:

`topics`: all sources of the service as one source, with the engine's clock (`service_source`);
    table `offsets`, which the runtime writes.
`records`: the sources' transforms, transforms, windows, assign-key; table `metrics`, with windows
    also `watermark` and `windows`.
`states`: keyed by `_key`, the partition's transforms and update-state; one table per state,
    `metrics`, `schemas`, with windows also `watermark`.
`flush`: one subtask, flush once per closed window; tables `<state>.flushed`, `windows`, `metrics`.
`to.<topic>`: the transforms and converter of a sink; table `metrics`.
`sink.<topic>`: the bound sink, with its own tables.
`sink.dead-letters`: with `on_error=DEAD_LETTER`, the records that failed in all of these; one
    subtask. They are published with the epoch in which they failed.

A topic must have a source if a service reads it, and may have a sink if a service writes it.
Records for a topic without a sink are dropped. The caller who binds them connects one service's
sink with another's source.

States can be read while services run: `view.view(store, dataflow, "service.state")`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from arroyo_dagster.dataflow.definition.definition import (
    Dataflow,
    Endpoint,
    Package,
    PartitionDef,
    ServiceDef,
    StateDef,
    StateForm,
    StepDef,
    ValueKind,
)
from arroyo_dagster.dataflow.definition.types import scope_of
from arroyo_dagster.dataflow.errors import OperatorError, StateSchemaError, Unsupported
from arroyo_dagster.dataflow.runtime.converters import Converter
from arroyo_dagster.dataflow.runtime.failures import ErrorLimit
from arroyo_dagster.dataflow.runtime.flush_operator import FlushOperator
from arroyo_dagster.dataflow.runtime.functions import FunctionPlan, Library, load
from arroyo_dagster.dataflow.runtime.keyed_states import StatesOperator
from arroyo_dagster.dataflow.runtime.letters import DEAD_LETTERS
from arroyo_dagster.dataflow.runtime.operators import PartitionPlan, ServicePlan, TopicPlan
from arroyo_dagster.dataflow.runtime.records_operator import RecordsOperator
from arroyo_dagster.dataflow.runtime.service_source import (
    CLOCK,
    ServiceSource,
    WindowTicks,
    common_value_type,
)
from arroyo_dagster.dataflow.runtime.sink_operator import DeliverOperator
from arroyo_dagster.dataflow.storage.boundary import VALUE
from arroyo_dagster.dataflow.storage.columns import KEY
from arroyo_dagster.dataflow.storage.engine_tables import (
    DROPPED,
    check_states,
    has_unflushed,
    read_schemas,
)
from arroyo_dagster.dataflow.storage.state_tables import flushed_config, state_config
from arroyo_dagster.dataflow.topics.sinks import BothSinks, KeptSink, takes_one_subtask
from arroyo_dagster.dataflow.views.snapshots import FLUSH, STATES
from arroyo_dagster.dataflow.views.view import OwnerJob, service_paths
from arroyo_dagster.engine.operators import Sink, Source
from arroyo_dagster.engine.pipeline import Pipeline, Stream
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.checkpoints import OperatorCheckpoint
from arroyo_dagster.state.model.clock import Clock, wall_clock_ms
from arroyo_dagster.state.model.ids import TableName, checked_name
from arroyo_dagster.state.model.tables import GlobalKeyedConfig
from arroyo_dagster.state.storage.store import ObjectStore

SKIP, FAIL, DEAD_LETTER = "skip", "fail", "dead-letter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bindings:
    """What a dataflow needs besides its YAML.

    Attributes:
        sources: by topic; each yields rows of `boundary.topic_schema(...)`.
        sinks: by topic; each accepts rows of `boundary.SINK_SCHEMA`. That of `dead-letters` gets
            the records that failed, besides the service's own job.
        functions: by the name of a step's function (`-` and `_` are equal): a callable, or
            `module:function`. Needed for bodies in other languages and functions of packages.
        packages: loaded packages by id, for the inline bodies in their YAML.
        env: the environment that user code sees as `env`.
    """

    sources: Mapping[str, Source] = field(default_factory=dict)
    sinks: Mapping[str, Sink] = field(default_factory=dict)
    functions: Mapping[str, Callable[..., Any] | str] = field(default_factory=dict)
    packages: Mapping[str, Package] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How services run.

    Attributes:
        parallelism, keep_epochs: settings of every pipeline.
        on_error: if a function fails on a record, `skip` the record, `fail` the run, or keep the
            record in the topic `dead-letters` of the service.
        max_errors: how many failures of one run of a service are accepted before the run stops,
            without publishing the epoch. None: see `ErrorLimit`; unlimited with dead letters.
        migrate: whether a state may have more columns than it was stored with.
        flush_open: whether to close open windows when every source has ended.
        clock: the engine's clock, in epoch milliseconds; called once per epoch.
    """

    parallelism: int = 1
    keep_epochs: int | None = None
    on_error: str = SKIP
    max_errors: int | None = None
    migrate: bool = False
    flush_open: bool = False
    clock: Clock = wall_clock_ms

    def __post_init__(self) -> None:
        choices = (SKIP, FAIL, DEAD_LETTER)
        if self.on_error not in choices:
            raise InputError(
                f"on_error is not {self.on_error!r}; expected one of {', '.join(choices)}",
                next_step="choose one of these",
            )
        if self.max_errors is not None and self.max_errors < 0:
            raise InputError("max_errors is not below 0", max_errors=self.max_errors)


def build_dataflow(
    dataflow: Dataflow,
    store: ObjectStore,
    *,
    bindings: Bindings,
    options: RunOptions | None = None,
) -> list[Pipeline]:
    """Build a pipeline for every service of a dataflow, owners of states before their readers.

    Args:
        dataflow: the definition.
        store: the object store of the states; services also read each other's states from it.
        bindings: sources, sinks, functions and environment.
        options: None = the defaults.

    Raises:
        InputError: a topic that a service reads has no source, or the source has other columns; a
            function is not bound (E26), cannot be loaded or does not fit (E27); a name cannot be
            used in paths; a state was stored with another schema (E50).
        CheckpointError: the newest checkpoint of a service cannot be read (E51).
    """
    return [
        build_service(dataflow, service, store, bindings=bindings, options=options)
        for service in service_order(dataflow)
    ]


def build_service(
    dataflow: Dataflow,
    service: str,
    store: ObjectStore,
    *,
    bindings: Bindings,
    options: RunOptions | None = None,
) -> Pipeline:
    """Build the pipeline of one service. Arguments and errors as in `build_dataflow`."""
    run_options = options or RunOptions()
    if service not in dataflow.services:
        raise InputError(
            f"the dataflow has no service `{service}`", services=sorted(dataflow.services)
        )
    plan = _Planning(dataflow, dataflow.services[service], store, bindings, run_options).plan()
    paths = service_paths(dataflow, checked_name(service, "service"))
    pipeline = Pipeline(
        str(paths.pipeline),
        job=service,
        parallelism=run_options.parallelism,
        keep_epochs=run_options.keep_epochs,
        epoch_check=_error_limit(plan, run_options),
    )
    # Its operators are the engine's; states that are not declared any more are refused (E50).
    pipeline.carries_unclaimed = True
    _connect(pipeline, plan, bindings, run_options)
    for name, sink in pipeline.sinks().items():
        if run_options.parallelism > 1 and takes_one_subtask(sink):
            raise InputError(
                f"the sink of topic `{name.removeprefix('sink.')}` takes the records of one "
                f"subtask, and the parallelism is {run_options.parallelism}",
                service=service,
                next_step="bind it to a directory (a path that ends with '/'), or run it with "
                "--parallelism 1",
            )
    return pipeline


def _error_limit(plan: ServicePlan, options: RunOptions) -> Callable[[], ErrorLimit] | None:
    if options.on_error == FAIL or (options.on_error == DEAD_LETTER and options.max_errors is None):
        return None
    return functools.partial(ErrorLimit, plan.name, plan.topics, options.max_errors)


def _connect(
    pipeline: Pipeline, plan: ServicePlan, bindings: Bindings, options: RunOptions
) -> None:
    source = ServiceSource(
        {topic.name: bindings.sources[topic.name] for topic in plan.sources},
        owners={owner: OwnerJob(plan.store, plan.paths[owner]) for owner in plan.owners},
        raw={topic.name for topic in plan.sources if topic.converter.name == "raw"},
        ticks=_ticks(plan, options),
        files=plan.letters is not None,
        clock=options.clock,
    )
    rows = pipeline.source("topics", source, timestamp=CLOCK)
    if plan.window is not None:
        rows = rows.key_by()  # one subtask: the order of all records decides which are late
    rows = rows.apply("records", RecordsOperator(plan))
    letters = [rows]
    if plan.partition is not None or plan.window is not None:
        rows = rows.key_by(KEY).apply(STATES, StatesOperator(plan))
        letters.append(rows)
    if plan.window is not None:
        rows = rows.key_by().apply(FLUSH, FlushOperator(plan))
    for topic in plan.sinks:
        letters.append(_deliver(rows, plan, topic, bindings.sinks.get(topic.name)))
    if plan.letters is not None:
        kept = KeptSink(plan.store.url, DEAD_LETTERS)
        bound = bindings.sinks.get(DEAD_LETTERS)
        # One subtask: a service has one sequence of letters, which may go to one file.
        streams = [stream.side_output().key_by() for stream in letters]
        sink = kept if bound is None else BothSinks(bound, kept)
        pipeline.apply(f"sink.{DEAD_LETTERS}", sink, streams)


def _ticks(plan: ServicePlan, options: RunOptions) -> WindowTicks | None:
    if plan.window is None:
        return None
    return WindowTicks(
        idleness_ms=plan.window.idleness_ms,
        flush_open=options.flush_open,
        unflushed=UnflushedWindows(plan.store, OwnerJob(plan.store, plan.paths[plan.name])),
    )


def _deliver(rows: Stream, plan: ServicePlan, topic: TopicPlan, sink: Sink | None) -> Stream:
    name = checked_name(topic.name, "topic")
    written = rows.apply(f"to.{name}", DeliverOperator(plan, topic))
    if sink is not None:
        written.sink(f"sink.{name}", sink)
    return written


def service_order(dataflow: Dataflow) -> list[str]:
    """Return the services: owners of states and writers of topics before their readers.

    In a cycle of topics, the first service by name comes after its writers.
    """
    writers: dict[str, list[str]] = {}
    for name, service in sorted(dataflow.services.items()):
        for sink in service.sinks:
            if sink.id is not None:
                writers.setdefault(sink.id, []).append(name)
    ordered: dict[str, None] = {}
    entered: set[str] = set()

    def visit(name: str) -> None:
        if name in entered:
            return
        entered.add(name)
        service = dataflow.services[name]
        owners = (state.owner for state in service.states.values() if state.ref is not None)
        upstream = (w for source in service.sources for w in writers.get(source.id or "", ()))
        for before in (*sorted(owners), *sorted(upstream)):
            visit(before)
        ordered[name] = None

    for name in sorted(dataflow.services):
        visit(name)
    return list(ordered)


def converter_of(dataflow: Dataflow, topic: str) -> str:
    """Return the converter of a topic's values: the topic's, else the dataflow's, else `json`."""
    config, definition = dataflow.kept.get("config"), dataflow.topics.get(topic)
    default = None if config is None else config.value.get("converter")
    settings = {} if definition is None else definition.settings.value
    value = (settings.get("schema") or {}).get(VALUE) or {}
    return str(value.get("converter") or settings.get("converter") or default or "json")


def _is_stored_as_pairs(state: StateDef, operator: OperatorCheckpoint | None) -> bool:
    if state.value_kind is not ValueKind.SCALAR or state.window is not None or operator is None:
        return False
    config = operator.configs.get(TableName(state.name))
    if config is None or not isinstance(config.config, GlobalKeyedConfig):
        return False
    if state.ttl_ms is not None:
        raise StateSchemaError(
            f"state `{state.name}` was stored without the update times that its ttl needs",
            number="E50",
            path=state.path,
            next_step="remove the ttl, or give the state another name; the stored state is kept",
        )
    return True


@dataclass(frozen=True, slots=True)
class UnflushedWindows:
    """Whether the newest epoch of a service has windows whose flush failed. Can be pickled."""

    store: ObjectStore
    job: OwnerJob

    def __call__(self) -> bool:
        head = self.job.newest()
        return bool(head and has_unflushed(self.store, head.operator(FLUSH)))


class _Planning:
    """Makes the plan of one service, and checks its functions, sources and tables."""

    def __init__(
        self,
        dataflow: Dataflow,
        service: ServiceDef,
        store: ObjectStore,
        bindings: Bindings,
        options: RunOptions,
    ) -> None:
        self._dataflow = dataflow
        self._service = service
        self._store = store
        self._bindings = bindings
        self._options = options
        self._library = Library(
            dataflow=dataflow, functions=bindings.functions, packages=bindings.packages
        )
        self._types = scope_of(dataflow, bindings.packages)

    def plan(self) -> ServicePlan:
        """Return the plan."""
        service = self._service
        self._check_sources()
        keeps = self._options.on_error == DEAD_LETTER
        if keeps:
            self._check_letters()
        read = [self._bindings.sources[source.id] for source in service.sources if source.id]
        windowed = service.windowed
        partition = service.partition if windowed is None else windowed.partition
        states = dict(service.states)
        owners = {state.owner for state in states.values() if state.ref is not None}
        plan = ServicePlan(
            name=service.name,
            store=self._store,
            sources=tuple(self._topic(source) for source in service.sources),
            sinks=tuple(self._topic(sink) for sink in service.sinks if sink.id is not None),
            transforms=self._functions(service.transforms),
            window=None if windowed is None else windowed.window,
            assign_timestamp=None
            if windowed is None
            else self._function(windowed.assign_timestamp),
            window_transforms=() if windowed is None else self._functions(windowed.transforms),
            flush=None
            if windowed is None or windowed.flush is None
            else self._function(windowed.flush),
            partition=None if partition is None else self._partition(partition),
            states=states,
            paths={
                owner: service_paths(self._dataflow, owner) for owner in {service.name, *owners}
            },
            owners=tuple(sorted(owners)),
            env=dict(self._bindings.env),
            fatal=self._options.on_error == FAIL,
            letters=common_value_type(read) if keeps else None,
            migrate=self._options.migrate,
        )
        self._check_states(plan)
        return replace(plan, as_pairs=self._check_stored(plan))

    def _check_sources(self) -> None:
        for source in self._service.sources:
            if source.id not in self._bindings.sources:
                raise InputError(
                    f"service `{self._service.name}` reads the {source.kind} `{source.id}`, "
                    "which has no source",
                    bound=sorted(self._bindings.sources),
                    next_step=f"bind one: --source {source.id}=jsonl:PATH",
                )

    def _check_letters(self) -> None:
        ends = (*self._service.sources, *self._service.sinks)
        if any(end.id == DEAD_LETTERS for end in ends):
            raise InputError(
                f"service `{self._service.name}` uses a topic `{DEAD_LETTERS}`, the name of the "
                "topic of records that fail",
                next_step="rename the topic, or run with another --on-error",
            )

    def _check_states(self, plan: ServicePlan) -> None:
        for state in plan.states.values():
            if state.form is StateForm.SYSTEM:
                raise Unsupported(
                    f"state `{state.name}` is a system state, which is not supported",
                    number="E17",
                    path=state.path,
                    next_step="remove it, or declare a state of your own",
                )
            if state.value_kind is None:
                raise Unsupported(
                    f"the values of state `{state.name}` are of a package that is not loaded",
                    number="E13",
                    path=state.path,
                    next_step="load the package",
                )
            if state.value_kind is ValueKind.SCALAR and state.window and state.ttl_ms is not None:
                raise Unsupported(
                    f"ttl of the primitive state `{state.name}` in a service with windows: its "
                    "values live as long as their window",
                    number="E18",
                    path=state.path,
                    next_step="remove the ttl",
                )
            state_config(state)
            if state.window is not None:
                flushed_config(state)

    def _check_stored(self, plan: ServicePlan) -> frozenset[str]:
        """Check the stored states; return the primitive ones that are stored as pairs.

        Raises:
            StateSchemaError: a state was stored with another schema, or without the update times
                that its ttl needs (E50).
        """
        head = OwnerJob(self._store, plan.paths[plan.name]).newest()
        if head is not None:
            check_states(
                read_schemas(self._store, head.operator(STATES)),
                plan.owned.values(),
                migrate=plan.migrate,
                service=plan.name,
                dropped=read_schemas(self._store, head.operator(DROPPED)),
                every=True,
            )
        states = None if head is None else head.operator(STATES)
        return frozenset(
            state.name for state in plan.owned.values() if _is_stored_as_pairs(state, states)
        )

    def _topic(self, endpoint: Endpoint) -> TopicPlan:
        assert endpoint.id is not None
        topic = self._dataflow.topics.get(endpoint.id)
        return TopicPlan(
            name=endpoint.id,
            converter=Converter(
                name=converter_of(self._dataflow, endpoint.id),
                type=None if topic is None else topic.value,
                key_type=None if topic is None else topic.key,
                types=self._types,
                snake_case=self._dataflow.api_version == "0.5.0",
            ),
            transforms=self._functions(endpoint.transforms),
        )

    def _partition(self, partition: PartitionDef) -> PartitionPlan:
        update = partition.update_state
        update_plan = None if update is None else self._function(update)
        if update_plan is not None and update_plan.form and partition.transforms:
            raise OperatorError(
                f"function `{update_plan.name}` cannot serve update-state: it takes a frame, and "
                "transforms of a partition run per record",
                number="E27",
                path=update_plan.path,
                next_step="move the transforms before the partition, or take a record",
            )
        return PartitionPlan(
            assign_key=self._function(partition.assign_key),
            transforms=tuple(map(self._per_record, self._functions(partition.transforms))),
            update_state=update_plan,
        )

    @staticmethod
    def _per_record(plan: FunctionPlan) -> FunctionPlan:
        if plan.form:
            raise OperatorError(
                f"function `{plan.name}` cannot serve {plan.operator} in a partition: it takes a "
                "frame, and transforms of a partition run per record",
                number="E27",
                path=plan.path,
                next_step="move it before the partition, or take a record",
            )
        return plan

    def _functions(self, steps: Iterable[StepDef]) -> tuple[FunctionPlan, ...]:
        return tuple(self._function(step) for step in steps)

    def _function(self, step: StepDef) -> FunctionPlan:
        plan = self._library.plan(self._service.name, step)
        loaded = load(plan, {})  # raises before anything runs
        if plan.target is not None:
            # Spark's workers may not have the module installed: send the function itself.
            plan = replace(plan, target=loaded.body)
        return replace(plan, form=loaded.form)
