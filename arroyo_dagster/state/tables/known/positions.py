"""Positions of Arroyo's sources: which field of a source's state they are, and how to set it.

Source: docs/spec/arroyo-state.md, 8.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.tables import TableConfig
from arroyo_dagster.state.model.types import (
    F64,
    I32,
    I64,
    U32,
    U64,
    DurationNanos,
    SystemTimeNanos,
    USize,
    enum_of,
)

# ---- state of Arroyo's sources: how far each has read. Loaded when such state is decoded ---------
# Fields have Arroyo's names and order, because the order is the format.
#
# Source: crates/arroyo-connectors/src/, the file named in the comment beside each table.


@dataclass(frozen=True, slots=True)
class KafkaState:
    """The next offset to read of a partition: the last one read, plus one."""

    partition: I32
    offset: I64


@dataclass(frozen=True, slots=True)
class Earliest:
    """From the oldest existing record."""


@dataclass(frozen=True, slots=True)
class Latest:
    """From the next new record."""


@dataclass(frozen=True, slots=True)
class SequenceNumber:
    """After the record with this number."""

    number: str


@dataclass(frozen=True, slots=True)
class Timestamp:
    """From the first record at or after a time, in nanoseconds since 1970."""

    at: SystemTimeNanos


KinesisOffset = Annotated[
    Earliest | Latest | SequenceNumber | Timestamp,
    enum_of("KinesisOffset", Earliest, Latest, SequenceNumber, Timestamp),
]


@dataclass(frozen=True, slots=True)
class ShardState:
    """How far a shard of a Kinesis stream has been read."""

    stream_name: str
    shard_id: str
    offset: KinesisOffset
    closed: bool


@dataclass(frozen=True, slots=True)
class Finished:
    """A file read to its end."""


@dataclass(frozen=True, slots=True)
class RecordsRead:
    """A file from which this many records have been read."""

    count: USize


FileReadState = Annotated[Finished | RecordsRead, enum_of("FileReadState", Finished, RecordsRead)]


@dataclass(frozen=True, slots=True)
class ImpulseSourceState:
    """The number of generated events, and the time of the first."""

    counter: USize
    start_time: SystemTimeNanos


@dataclass(frozen=True, slots=True)
class NexmarkConfig:
    """The settings of a whole Nexmark run."""

    num_events: U64 | None
    num_event_generators: U64
    first_event_rate: F64
    next_event_rate: U64
    rate_period_seconds: U64
    preload_seconds: U64
    stream_timeout: U64
    is_rate_limited: bool
    use_wallclock_event_time: bool
    person_proportion: U64
    auction_proportion: U64
    bid_proportion: U64
    avg_person_byte_size: U64
    avg_auction_byte_size: U64
    avg_bid_byte_size: U64
    hot_auction_ratio: U64
    hot_seller_ratio: U64
    hot_bidders_ratio: U64
    window_size_seconds: U64
    window_period_seconds: U64
    watermark_holdback_seconds: U64
    num_inflight_auctions: U64
    num_active_people: U64
    occasional_delay_seconds: U64
    prob_delayed_event: F64
    out_of_order_group_size: U64


@dataclass(frozen=True, slots=True)
class GeneratorConfig:
    """The share of one subtask in a Nexmark run."""

    configuration: NexmarkConfig
    person_proportion: U64
    auction_proportion: U64
    _bid_proportion: U64
    total_proportion: U64
    inter_event_delay: DurationNanos
    _step_length_second: U64
    base_time: SystemTimeNanos
    first_event_id: U64
    max_events: U64
    first_event_number: U64
    _epoch_period_ms: U64
    _events_per_epoch: U64


@dataclass(frozen=True, slots=True)
class NexmarkSourceState:
    """The number of events a subtask has generated, and its settings."""

    config: GeneratorConfig
    event_count: USize


@dataclass(frozen=True, slots=True)
class SSESourceState:
    """The id of the last server-sent event."""

    last_id: str | None


@dataclass(frozen=True, slots=True)
class PollingHttpSourceState:
    """The last response, for comparison with the next one."""

    last_message: bytes | None


@dataclass(frozen=True, slots=True)
class WebsocketSourceState:
    """Empty: a WebSocket cannot be read again."""


@dataclass(frozen=True, slots=True)
class NatsState:
    """The last message read of a JetStream stream."""

    stream_name: str
    stream_sequence_number: U64


@dataclass(frozen=True, slots=True)
class RabbitmqStreamState:
    """The last offset read; 0 until something has been read since the start."""

    offset: U64


@dataclass(frozen=True, slots=True)
class FluvioState:
    """The next offset to read of a partition."""

    partition: U32
    offset: I64


FileSourceEntry = tuple[str, FileReadState]
"""The name of a file, and how far it is read."""


# ---- positions -----------------------------------------------------------------------------------

__all__ = [
    "Earliest",
    "FileReadState",
    "FileSourceEntry",
    "Finished",
    "FluvioState",
    "GeneratorConfig",
    "ImpulseSourceState",
    "KafkaState",
    "KinesisOffset",
    "Latest",
    "NatsState",
    "NexmarkConfig",
    "NexmarkSourceState",
    "PollingHttpSourceState",
    "PositionRule",
    "RabbitmqStreamState",
    "RecordsRead",
    "SSESourceState",
    "SequenceNumber",
    "ShardState",
    "Timestamp",
    "WebsocketSourceState",
    "rule_of",
]

_MOST = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionRule:
    """How the position of one connector's source is read and set.

    Attributes:
        table, description: as the source registers its table.
        partition: the name of an entry's partition, as `arroyo-state sql @offsets JOB` prints it.
        position: the position in a value; None = it has none that counts.
        moved: the value with another position, from a text.
        tried: whether a source of this connector was seen to continue from an edited position.
    """

    table: str
    description: str
    partition: Callable[[Any, Any], str]
    position: Callable[[Any], int | None]
    moved: Callable[[Any, str], Any]
    tried: bool = False

    def is_of(self, config: TableConfig) -> bool:
        """Whether a table is one that this rule is for."""
        return config.table == self.table and config.config.description == self.description


def rule_of(config: TableConfig) -> PositionRule | None:
    """Return the rule for a table of a source; None = its positions cannot be set."""
    return next((rule for rule in _RULES if rule.is_of(config)), None)


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) > _MOST:
        raise InputError(
            f"not a position: {text!r:.40}", expected="a number from 0 to 9223372036854775807"
        )
    return int(text)


def _key(key: Any, value: Any) -> str:
    return str(key)


def _field(name: str) -> tuple[Callable[[Any], int | None], Callable[[Any, str], Any]]:
    def moved(value: Any, text: str) -> Any:
        return replace(value, **{name: _number(text)})

    return (lambda value: int(getattr(value, name))), moved


def _rule(
    table: str,
    description: str,
    kind: type[Any],
    field: str,
    partition: Callable[[Any, Any], str] = _key,
    *,
    tried: bool = False,
) -> PositionRule:
    assert field in kind.__dataclass_fields__
    position, moved = _field(field)
    return PositionRule(
        table=table,
        description=description,
        partition=partition,
        position=position,
        moved=moved,
        tried=tried,
    )


def _of_partition(key: Any, value: KafkaState | FluvioState) -> str:
    return str(value.partition)


def _shard_moved(value: ShardState, text: str) -> ShardState:
    if value.closed:
        raise InputError(
            "the shard is closed: its source does not read it any more", shard=value.shard_id
        )
    named: dict[str, Any] = {"earliest": Earliest(), "latest": Latest()}
    if text not in named and not text.isdecimal():
        raise InputError(
            f"not a position of a shard: {text!r:.60}",
            expected="earliest, latest, or the sequence number of the last record read",
        )
    return replace(value, offset=named.get(text) or SequenceNumber(text))


def _shard_position(value: ShardState) -> int | None:
    return None  # numbers of a shard have gaps: nothing can be added to one


def _file_position(value: tuple[str, Any]) -> int | None:
    return value[1].count if isinstance(value[1], RecordsRead) else None


def _file_moved(value: tuple[str, Any], text: str) -> tuple[str, Any]:
    return value[0], (Finished() if text == "finished" else RecordsRead(_number(text)))


def _event_moved(value: SSESourceState, text: str) -> SSESourceState:
    return replace(value, last_id=text)


_RULES = (
    _rule("k", "kafka offsets", KafkaState, "offset", _of_partition),
    PositionRule(
        table="k",
        description="kinesis source state",
        partition=lambda key, value: f"{value.stream_name}/{value.shard_id}",
        position=_shard_position,
        moved=_shard_moved,
    ),
    PositionRule(
        table="a",
        description="fs",
        partition=_key,
        position=_file_position,
        moved=_file_moved,
    ),
    PositionRule(
        table="f",
        description="file_source",
        partition=_key,
        position=lambda value: int(value),
        moved=lambda value, text: _number(text),
        tried=True,
    ),
    _rule("i", "impulse source state", ImpulseSourceState, "counter", tried=True),
    _rule("s", "nexmark source state", NexmarkSourceState, "event_count"),
    PositionRule(
        table="e",
        description="sse source state",
        partition=lambda key, value: "all",
        position=lambda value: None,
        moved=_event_moved,
    ),
    _rule("n", "NATS source state", NatsState, "stream_sequence_number"),
    _rule("s", "rabbitmq stream source state", RabbitmqStreamState, "offset"),
    _rule("f", "fluvio source state", FluvioState, "offset", _of_partition),
)
