"""The tables of Arroyo's own operators and connectors. Their types are loaded when they are needed.

Source: crates/arroyo-connectors/src/ and crates/arroyo-worker/src/arrow/, the file named in the
comment beside each table.
"""

from __future__ import annotations

from collections.abc import Iterator

from arroyo_dagster.state.model.tables import TableKind
from arroyo_dagster.state.model.types import I32, U32, U64, SystemTimeNanos, USize
from arroyo_dagster.state.tables.known.tables import KnownTable, LaterType

# ---- sources -------------------------------------------------------------------------------------

SOURCES = (
    # kafka/source/mod.rs
    KnownTable(
        owner="Kafka source",
        holds="the next offset by partition; only of partitions read from since the last start",
        table="k",
        description="kafka offsets",
        key=I32,
        value=LaterType("sources", "KafkaState"),
    ),
    # kinesis/source.rs
    KnownTable(
        owner="Kinesis source",
        holds="how far each shard is read",
        table="k",
        description="kinesis source state",
        key=str,
        value=LaterType("sources", "ShardState"),
    ),
    # filesystem/source.rs
    KnownTable(
        owner="filesystem source",
        holds="how far each file is read; several subtasks may write one file, any of them wins",
        table="a",
        description="fs",
        key=str,
        value=LaterType("sources", "FileSourceEntry"),
    ),
    # single_file/source.rs
    KnownTable(
        owner="single-file source",
        holds="lines read, by file",
        table="f",
        description="file_source",
        key=str,
        value=USize,
    ),
    # impulse/operator.rs
    KnownTable(
        owner="impulse source",
        holds="events made, by subtask",
        table="i",
        description="impulse source state",
        key=U32,
        value=LaterType("sources", "ImpulseSourceState"),
    ),
    # nexmark/operator.rs
    KnownTable(
        owner="Nexmark source",
        holds="events made, by subtask; restored only at the same parallelism",
        table="s",
        description="nexmark source state",
        key=USize,
        value=LaterType("sources", "NexmarkSourceState"),
    ),
    # sse/operator.rs
    KnownTable(
        owner="SSE source",
        holds="the last event's id; subtasks write one key, any of them wins",
        table="e",
        description="sse source state",
        key=tuple[()],
        value=LaterType("sources", "SSESourceState"),
    ),
    # polling_http/operator.rs
    KnownTable(
        owner="polling HTTP source",
        holds="the last answer; subtasks write one key, any of them wins",
        table="s",
        description="polling http source state",
        key=tuple[()],
        value=LaterType("sources", "PollingHttpSourceState"),
    ),
    # websocket/operator.rs
    KnownTable(
        owner="WebSocket source",
        holds="one entry without content",
        table="e",
        description="websocket source state",
        key=tuple[()],
        value=LaterType("sources", "WebsocketSourceState"),
    ),
    # mqtt/source/mod.rs
    KnownTable(owner="MQTT source", holds="nothing", table="m", description="mqtt source state"),
    # nats/source/mod.rs
    KnownTable(
        owner="NATS source",
        holds="the last message read, by operator; subtasks write one key, any of them wins",
        table="n",
        description="NATS source state",
        key=str,
        value=LaterType("sources", "NatsState"),
    ),
    # rabbitmq/source.rs
    KnownTable(
        owner="RabbitMQ stream source",
        holds="the last offset read, by stream",
        table="s",
        description="rabbitmq stream source state",
        key=str,
        value=LaterType("sources", "RabbitmqStreamState"),
    ),
    # fluvio/source.rs
    KnownTable(
        owner="Fluvio source",
        holds="the next offset by partition",
        table="f",
        description="fluvio source state",
        key=U32,
        value=LaterType("sources", "FluvioState"),
    ),
)
"""The tables of sources, one entry each."""

# ---- operators -----------------------------------------------------------------------------------

_GLOBAL = (
    # watermark_generator.rs
    KnownTable(
        owner="watermark generator",
        holds="the watermark, by subtask",
        table="s",
        description="expression watermark state",
        key=U32,
        value=LaterType("operators", "ExpressionWatermarkState"),
    ),
    # async_udf.rs
    KnownTable(
        owner="async UDF",
        holds="calls begun and not yet sent on, by subtask",
        table="a",
        description="AsyncMapOperator state",
        key=USize,
        value=LaterType("operators", "AsyncUdfState"),
    ),
    # session_aggregating_window.rs
    KnownTable(
        owner="session window",
        holds="the start of the earliest open session, by subtask; null = none is open",
        table="e",
        description="earliest start time of all active batches.",
        key=U32,
        value=SystemTimeNanos | None,
    ),
)

_INCREMENTS = "what came in since the last checkpoint, by group and window start, not yet emitted"
_INPUT = "input rows not yet emitted"
_SIDE = "input rows of one side that may still be matched"
_STATES = "a group's aggregates at a flush; the largest _generation of a group counts"
_COUNTS = (
    "how often a group has a tuple of arguments; the largest _generation of a tuple counts, and "
    "a count of 0 = gone"
)
_ROWS = (
    # tumbling_aggregating_window.rs
    ("tumbling or instant window", "t", "tumbling_intermediate", _INCREMENTS, ""),
    # sliding_aggregating_window.rs
    ("sliding window", "t", "Sliding_intermediate", _INCREMENTS, ""),
    # session_aggregating_window.rs
    ("session window", "s", "session", _INPUT, ""),
    # window_fn.rs
    ("window function", "input", "window function input", _INPUT, ""),
    # instant_join.rs, join_with_expiration.rs
    ("join", "left", "left join data", _SIDE, ""),
    ("join", "right", "right join data", _SIDE, ""),
    # incremental_aggregator.rs
    ("updating aggregate", "a", "accumulator_state", _STATES, "v0.14 and newer"),
    ("updating aggregate", "b", "batch_state", _COUNTS, "v0.14 and newer"),
)


def _row_tables() -> Iterator[KnownTable]:
    for owner, table, description, holds, releases in _ROWS:
        yield KnownTable(
            owner=owner,
            holds=holds,
            table=table,
            description=description,
            kind=TableKind.EXPIRING_TIME_KEY,
            releases=releases,
        )


OPERATORS = (*_GLOBAL, *_row_tables())
"""The tables of operators, one entry each; tables of rows need no types."""

# ---- sinks ---------------------------------------------------------------------------------------

_OLD = "v0.14 and older"
_RECOVERY = "what each subtask was writing"
_PENDING = "files to be committed with this checkpoint, by their name"

SINKS = (
    # kafka/sink/mod.rs
    KnownTable(
        owner="Kafka sink, exactly once",
        holds="the number of the next transaction, by subtask; never read back",
        table="i",
        description="index for transactional ids",
        key=U32,
        value=USize,
    ),
    # filesystem/sink/v2/
    KnownTable(
        owner="filesystem, Delta or Iceberg sink, version 2",
        holds=_RECOVERY,
        table="r",
        description="recovery data",
        state_version=1,
        key=USize,
        value=LaterType("sinks", "FilesCheckpointV2"),
    ),
    KnownTable(
        owner="filesystem, Delta or Iceberg sink, version 2",
        holds="nothing; files to be committed are in the commit data",
        table="p",
        description="pre-commit data",
        state_version=1,
        key=str,
        value=LaterType("sinks", "FileToCommit"),
        commit=LaterType("sinks", "FilesToCommit"),
    ),
    # filesystem/sink/local.rs
    KnownTable(
        owner="filesystem sink on local disk",
        holds=_RECOVERY,
        table="r",
        description="recovery data",
        state_version=0,
        key=USize,
        value=LaterType("sinks", "LocalFileDataRecovery"),
    ),
    KnownTable(
        owner="filesystem sink on local disk",
        holds=_PENDING,
        table="p",
        description="pre-commit data",
        state_version=0,
        key=str,
        value=LaterType("sinks", "FilePreCommit"),
    ),
    # filesystem/sink/mod.rs, two_phase_committer.rs
    KnownTable(
        owner="filesystem, Delta or Iceberg sink, version 1",
        holds=_RECOVERY,
        table="r",
        description="recovery data",
        state_version=0,
        key=USize,
        value=LaterType("sinks", "FileSystemDataRecovery"),
    ),
    KnownTable(
        owner="filesystem, Delta or Iceberg sink, version 1",
        holds=_PENDING,
        table="p",
        description="pre-commit data",
        state_version=0,
        key=str,
        value=LaterType("sinks", "FileToFinish"),
        commit=LaterType("sinks", "FilesToFinish"),
    ),
    KnownTable(
        owner="filesystem sink on local disk",
        holds=_RECOVERY,
        table="r",
        description="recovery data",
        state_version=0,
        key=USize,
        value=LaterType("sinks", "OLD_LOCAL_FILE_DATA_RECOVERY"),
        releases=_OLD,
    ),
    KnownTable(
        owner="filesystem or Delta sink, version 1",
        holds=_RECOVERY,
        table="r",
        description="recovery data",
        state_version=0,
        key=USize,
        value=LaterType("sinks", "OLD_FILE_SYSTEM_DATA_RECOVERY"),
        releases=_OLD,
    ),
    KnownTable(
        owner="filesystem or Delta sink, version 1",
        holds=_PENDING,
        table="p",
        description="pre-commit data",
        state_version=0,
        key=str,
        value=LaterType("sinks", "OLD_FILE_TO_FINISH"),
        releases=_OLD,
    ),
    # single_file/sink.rs
    KnownTable(
        owner="single-file sink",
        holds="the length of the file; subtasks write one key, any of them wins",
        table="f",
        description="file_sink",
        key=str,
        value=U64,
    ),
    # webhook/operator.rs
    KnownTable(owner="webhook sink", holds="nothing", table="s", description="webhook sink state"),
    # preview/operator.rs
    KnownTable(
        owner="preview sink",
        holds="rows shown, by subtask",
        table="s",
        description="Number of rows of output produced by this preview sink",
        key=U32,
        value=USize,
    ),
)
"""The tables of sinks; if several have one name and description, the likelier ones come first."""

BUILT_IN: tuple[KnownTable, ...] = (*SOURCES, *OPERATORS, *SINKS)
"""The tables of Arroyo's own operators and connectors."""
