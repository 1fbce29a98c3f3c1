"""A pipeline: sources, operators and sinks, and the streams of rows between them.

flights = Pipeline("flights", parallelism=2)
rows = flights.source("departures", ParquetReplay(path), timestamp="scheduled")
rows.key_by("tailnum").apply("aircraft", AircraftTotals())
rows.key_by("origin").apply("hourly", HourlyDepartures()).sink("output", ParquetSink(url))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from arroyo_dagster.engine.operators import Operator, Sink, Source, registered
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.schema import TIMESTAMP_TYPE, without_views
from arroyo_dagster.state.model.ids import JobId, OperatorId, PipelineId, checked_name
from arroyo_dagster.state.model.keys import MOST_SUBTASKS
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.model.tables import TIMESTAMP_COLUMN

EpochCheck = Callable[[bool, Mapping[OperatorId, Sequence[Any]]], None]
"""Called before an epoch is published, with whether it is the last of its run, and what
`Operator.epoch_report` returned in the subtasks of each operator. To refuse the epoch, it raises an
error: the run ends, and nothing of the epoch exists."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A connection on which one node reads the rows of another.

    Attributes:
        index: the number of the edge, counted over the whole pipeline.
        input_index: the number of the reading node's input.
        keys: the columns whose hash determines the subtask; None = rows stay in their subtask.
        side: whether it carries the side output of its origin.
    """

    index: int
    origin: OperatorId
    target: OperatorId
    input_index: int
    keys: tuple[str, ...] | None
    side: bool = False


@dataclass(frozen=True, slots=True)
class SourceNode:
    """A source in a pipeline.

    Attributes:
        schema: of its rows in the pipeline, without views and with `_timestamp`.
        timestamp: the column that contains event time.
        lateness_micros: how far the watermark stays behind the latest event time.
    """

    operator_id: OperatorId
    source: Source
    timestamp: str
    lateness_micros: int
    schema: pa.Schema


@dataclass(frozen=True, slots=True)
class OperatorNode:
    """An operator in a pipeline. `level`: the number of exchanges of rows before it."""

    operator_id: OperatorId
    operator: Operator
    inputs: tuple[Edge, ...]
    level: int


@dataclass(slots=True)
class Pipeline:
    """A graph of operators that runs as one job.

    Args:
        name: the pipeline's id, the first directory of its state.
        job: the job's id, the second directory; by default `main`.
        parallelism: subtasks of every operator.
        keep_epochs: how many epochs a run keeps; None keeps all (they must then be expired by gc).
        merge_files_after: how many files a global keyed table may list before the run merges them.
        layout: the layout of its state. Use the legacy layout only for tools and releases of Arroyo
            that support no other. It is weaker: no worker generations fence an old run. One run at
            a time holds a lease; another start is refused until the lease is released or has
            expired (a minute after a crash). A run that hangs for longer than its lease, exactly
            between a check and a write, could still overwrite an epoch's metadata. At least the 11
            newest epochs are kept, and there is one directory level: `name` is the job's id.
        epoch_check: makes a check for one run, which may refuse to publish an epoch.

    Raises:
        InputError: a name is not safe in a path, the parallelism is outside 1 … 4096, or a `job` is
            given in the legacy layout.
    """

    name: str
    job: str = "main"
    parallelism: int = 1
    keep_epochs: int | None = None
    merge_files_after: int = 512
    layout: Layout = Layout.PROTOCOL
    epoch_check: Callable[[], EpochCheck] | None = None
    sources: dict[OperatorId, SourceNode] = field(default_factory=dict, init=False)
    operators: dict[OperatorId, OperatorNode] = field(default_factory=dict, init=False)
    renamed_from: dict[OperatorId, OperatorId] = field(default_factory=dict, init=False)
    carries_unclaimed: bool = field(default=False, init=False)
    """Whether epochs go on listing operators that the pipeline does not have, instead of a refused
    start. For dataflows, which check their states themselves."""
    _edges: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        checked_name(self.name, "pipeline")
        checked_name(self.job, "job")
        if not 1 <= self.parallelism <= MOST_SUBTASKS:
            raise InputError(f"parallelism is 1 to {MOST_SUBTASKS}", parallelism=self.parallelism)
        if self.keep_epochs is not None and self.keep_epochs < 2:
            raise InputError(
                "keep_epochs is at least 2: recovery needs the newest epoch and its parent",
                keep_epochs=self.keep_epochs,
            )
        if self.merge_files_after < 2:
            raise InputError("merge_files_after is at least 2", given=self.merge_files_after)
        if self.layout is Layout.LEGACY and self.job != "main":
            raise InputError(
                "the legacy layout has one level of directories: the job's id is the name",
                job=self.job,
                next_step="leave job out, and give the pipeline a name of its own",
            )

    @property
    def paths(self) -> JobPaths:
        """The paths of this pipeline's state below the checkpoint URL."""
        if self.layout is Layout.LEGACY:
            return JobPaths(JobId(self.name))
        return JobPaths(JobId(self.job), PipelineId(self.name))

    @property
    def other_layout(self) -> JobPaths:
        """The paths that its state would have in the other layout."""
        if self.layout is Layout.LEGACY:
            return JobPaths(JobId(self.job), PipelineId(self.name))
        return JobPaths(JobId(self.name))

    def source(
        self,
        operator_id: str,
        source: Source,
        *,
        timestamp: str,
        lateness_micros: int = 0,
        renamed_from: str | None = None,
    ) -> Stream:
        """Add a source.

        Args:
            timestamp: the column of event time, of any timestamp type, never null.
            lateness_micros: how far the watermark stays behind the latest event time.
            renamed_from: its name in earlier epochs, whose position it takes over.

        Raises:
            InputError: the name is taken or invalid, there is no such timestamp column, or the
                source cannot be renamed.
        """
        name = self._new_name(operator_id, renamed_from)
        if renamed_from is not None and not source.renamable:
            raise InputError(
                "rows of this source are stored below its name: it cannot be renamed",
                operator=operator_id,
                next_step=f"call it {renamed_from} again",
            )
        index = source.schema.get_field_index(timestamp)
        if index < 0 or not pa.types.is_timestamp(source.schema.field(index).type):
            raise InputError(
                f"the source has no timestamp column {timestamp!r}",
                operator=operator_id,
                columns=[f"{f.name}: {f.type}" for f in source.schema],
            )
        if TIMESTAMP_COLUMN in source.schema.names:
            raise InputError(f"{TIMESTAMP_COLUMN} is added to a source, not part of it")
        event_time = pa.field(TIMESTAMP_COLUMN, TIMESTAMP_TYPE, nullable=False)
        schema = without_views(source.schema).append(event_time)
        self.sources[name] = SourceNode(name, source, timestamp, lateness_micros, schema)
        return Stream(self, name, None)

    def apply(
        self,
        operator_id: str,
        operator: Operator,
        inputs: Sequence[Stream],
        *,
        renamed_from: str | None = None,
    ) -> Stream:
        """Add an operator that reads several streams; use `Stream.apply` for a single one.

        Args:
            renamed_from: its name in earlier epochs, whose state it takes over. Once an epoch has
                the new name, the argument has no effect any more.

        Raises:
            InputError: the name is taken, a key is not a column, or a stream belongs to another
                pipeline.
        """
        name = self._new_name(operator_id, renamed_from)
        if not inputs:
            raise InputError("an operator takes at least one stream", operator=operator_id)
        registered(operator)
        edges = tuple(self._edge(name, index, stream) for index, stream in enumerate(inputs))
        level = max(self._level_behind(edge) for edge in edges)
        if any(edge.keys is None and self._level_behind(edge) != level for edge in edges):
            raise InputError(
                "a stream without keys is joined with streams of a later operator",
                operator=operator_id,
                next_step="key every input of the operator with key_by",
            )
        self.operators[name] = OperatorNode(name, operator, edges, level)
        return Stream(self, name, None)

    def _edge(self, target: OperatorId, input_index: int, stream: Stream) -> Edge:
        if stream.pipeline is not self:
            raise InputError("a stream of another pipeline", operator=target)
        schema = self.schema_of(stream.origin, side=stream.side)
        for key in stream.keys or ():
            if schema.names.count(key) != 1:
                raise InputError(
                    f"key {key!r} is not exactly one column of {stream.origin}",
                    columns=schema.names,
                )
        self._edges += 1
        return Edge(self._edges - 1, stream.origin, target, input_index, stream.keys, stream.side)

    def schema_of(self, node: OperatorId, *, side: bool = False) -> pa.Schema:
        """Return the schema of the rows that a node emits, or of its side output."""
        if node in self.sources and not side:
            return self.sources[node].schema
        operator = None if node in self.sources else self.operators[node].operator
        name = "side_schema" if side else "output_schema"
        schema: pa.Schema | None = getattr(operator, name, None)
        if schema is None:
            raise InputError(
                "an operator takes rows from one that emits none",
                operator=node,
                next_step=f"set its {name}",
            )
        return schema

    def edge_schema(self, edge: Edge) -> pa.Schema:
        """Return the schema of the rows of an edge."""
        return self.schema_of(edge.origin, side=edge.side)

    def _level(self, node: OperatorId) -> int:
        return 0 if node in self.sources else self.operators[node].level

    def _level_behind(self, edge: Edge) -> int:
        level = self._level(edge.origin)
        exchanged = edge.keys is not None or edge.origin in self.sources
        return level + 1 if exchanged else level

    def _new_name(self, operator_id: str, renamed_from: str | None) -> OperatorId:
        checked_name(operator_id, "operator")
        if operator_id in self.sources or operator_id in self.operators:
            raise InputError("two operators of one name", operator=operator_id)
        name = OperatorId(operator_id)
        if renamed_from is not None:
            checked_name(renamed_from, "operator")
            self.renamed_from[name] = OperatorId(renamed_from)
        return name

    # ---- the shape -------------------------------------------------------------------------------

    @property
    def levels(self) -> int:
        """The number of exchanges of rows in an epoch."""
        return max((node.level for node in self.operators.values()), default=0)

    def at_level(self, level: int) -> list[OperatorNode]:
        """Return the operators of one level, each after those whose rows it reads."""
        return [node for node in self.operators.values() if node.level == level]

    def edges_from(self, node: OperatorId, *, side: bool = False) -> list[Edge]:
        """Return the edges that carry a node's rows, or its side output, to others."""
        return [
            edge
            for operator in self.operators.values()
            for edge in operator.inputs
            if edge.origin == node and edge.side == side
        ]

    def sources_of(self, node: OperatorId) -> set[OperatorId]:
        """Return the sources whose rows can reach a node."""
        if node in self.sources:
            return {node}
        inputs = self.operators[node].inputs
        return set().union(*(self.sources_of(edge.origin) for edge in inputs))

    def sinks(self) -> dict[OperatorId, Sink]:
        """Return the operators that commit."""
        return {
            name: node.operator
            for name, node in self.operators.items()
            if isinstance(node.operator, Sink)
        }

    def check_connectors(self) -> None:
        """Refuse a run in which a source cannot read or a sink cannot commit."""
        for node in self.sources.values():
            node.source.check()
        for name, sink in self.sinks().items():
            for edge in self.operators[name].inputs:
                sink.check(self.edge_schema(edge))

    def check(self) -> None:
        """Refuse a pipeline that cannot run: no source, or no operator."""
        if not self.sources or not self.operators:
            raise InputError(
                "a pipeline needs a source and an operator",
                pipeline=self.name,
                sources=sorted(self.sources),
                operators=sorted(self.operators),
            )
        earlier = [*self.renamed_from.values()]
        for name, before in self.renamed_from.items():
            if before in self.sources or before in self.operators or earlier.count(before) > 1:
                raise InputError(
                    f'renamed_from="{before}" of `{name}` names an operator that the pipeline '
                    "still has, or that another one takes over",
                    pipeline=self.name,
                    next_step="remove the argument from the one that is new",
                )


@dataclass(frozen=True, slots=True)
class Stream:
    """The rows of one node; keyed after `key_by`. `side`: its side output instead."""

    pipeline: Pipeline
    origin: OperatorId
    keys: tuple[str, ...] | None
    side: bool = False

    def key_by(self, *columns: str) -> Stream:
        """Send each row to the subtask that owns the hash of these columns; none = subtask 0."""
        return Stream(self.pipeline, self.origin, tuple(columns), self.side)

    def side_output(self) -> Stream:
        """Return the rows that the operator emits with `ctx.side_output`."""
        return Stream(self.pipeline, self.origin, None, side=True)

    def apply(
        self, operator_id: str, operator: Operator, *, renamed_from: str | None = None
    ) -> Stream:
        """Add an operator that reads this stream. Arguments and errors as `Pipeline.apply`."""
        return self.pipeline.apply(operator_id, operator, [self], renamed_from=renamed_from)

    def sink(self, operator_id: str, sink: Sink, *, renamed_from: str | None = None) -> None:
        """Add a sink that reads this stream. Arguments and errors as `Pipeline.apply`."""
        self.pipeline.apply(operator_id, sink, [self], renamed_from=renamed_from)
