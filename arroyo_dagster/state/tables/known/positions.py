"""Positions of Arroyo's sources: which field of a source's state they are, and how to set it.

Source: docs/spec/arroyo-state.md, 8.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.tables import TableConfig
from arroyo_dagster.state.tables.known.sources import (
    Earliest,
    Finished,
    FluvioState,
    ImpulseSourceState,
    KafkaState,
    Latest,
    NatsState,
    NexmarkSourceState,
    RabbitmqStreamState,
    RecordsRead,
    SequenceNumber,
    ShardState,
    SSESourceState,
)

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
