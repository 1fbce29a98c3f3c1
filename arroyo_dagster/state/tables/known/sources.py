"""State of Arroyo's sources: how far each has read. Loaded when such state is decoded.

Fields have Arroyo's names and order, because the order is the format.

Source: crates/arroyo-connectors/src/, the file named in the comment beside each table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

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
