"""Events in a topic of Kafka, which end at the offsets where the job continues.

The topic is inspected with Kafka's own client, which comes with Spark's connector, by the options
of the events.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from arroyo_dagster.errors import InputError
from arroyo_dagster.spark.jobs import context_of, failure_reason
from arroyo_dagster.spark.surgery.events import positions_of
from arroyo_dagster.state.model.ids import OperatorId
from arroyo_dagster.state.model.json_fields import parse_json
from arroyo_dagster.state.model.surgery.bootstrap import EventFacts
from arroyo_dagster.state.model.surgery.declared import DeclaredBootstrap, EventSource
from arroyo_dagster.state.model.surgery.edits import NewPosition

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_DESERIALIZER = "org.apache.kafka.common.serialization.ByteArrayDeserializer"
_LEAST_LONG = 2**31
"""py4j passes smaller numbers as Integer. As milliseconds they are in January 1970."""


def cut_topics(
    session: SparkSession, declared: DeclaredBootstrap
) -> tuple[DeclaredBootstrap, EventFacts]:
    """Return a declaration in which each topic of Kafka is read up to an offset of each partition.

    The offsets of a time are looked up: those of the first records at or after it. Offsets that are
    given are compared with the topic, but not over Spark Connect, which has no client of Kafka.

    Returns:
        The declaration, and which records the topics do not hold any more.

    Raises:
        InputError: the topic cannot be read; its partitions are others than those that are given;
            or it ends before an offset. Names the place.
    """
    sources, positions = [], list(declared.positions)
    missing: list[str] = []
    unknown: list[str] = []
    for source in declared.sources:
        if source.format == "kafka":
            if source.until_micros is None:
                ends = positions_of(source, declared)
                if context_of(session) is not None:
                    topic = _topic(session, source)
                    _check(source, ends, topic.ends)
                    missing += _deleted(source, topic, ends)
                else:
                    unknown.append(
                        f"{source.name}: which records the topic has deleted; Spark Connect cannot "
                        "look it up"
                    )
            else:
                topic = _topic(session, source, source.until_micros)
                ends = dict(topic.ends)
                missing += _deleted(source, topic, ends)
                operator = None if source.operator is None else OperatorId(source.operator)
                positions += [
                    (operator, NewPosition(partition=at, position=str(end)))
                    for at, end in ends.items()
                ]
            source = _read_up_to(source, ends)
        sources.append(source)
    facts = EventFacts(missing=tuple(missing), unknown=tuple(unknown))
    return replace(declared, sources=tuple(sources), positions=tuple(positions)), facts


def _read_up_to(source: EventSource, ends: Mapping[str, int]) -> EventSource:
    topic = source.options["subscribe"]
    options = {name: value for name, value in source.options.items() if name != "subscribe"}
    options["assign"] = json.dumps({topic: [int(one) for one in ends]})
    options["endingOffsets"] = json.dumps({topic: dict(ends)})
    return replace(source, options=options)


def _check(source: EventSource, ends: Mapping[str, int], found: Mapping[str, int]) -> None:
    place = f"the events {source.name!r}"
    if ends.keys() != found.keys():
        raise InputError(
            f"{place}: the topic has the partitions {', '.join(found)}, and `positions` has "
            f"{', '.join(ends)}",
            next_step="give a position of each partition",
        )
    for partition, end in ends.items():
        if end > found[partition]:
            raise InputError(
                f"{place}: partition {partition} ends at {found[partition]}, before the position "
                f"{end}",
                next_step="give a position that the topic has reached",
            )


def _deleted(source: EventSource, topic: _Topic, ends: Mapping[str, int]) -> Iterator[str]:
    """Yield what the topic does not hold any more of the records that are asked for by offset."""
    for partition, begin in topic.begins.items():
        asked, end = _asked(source, partition), ends.get(partition, 0)
        lost = min(begin, end) - asked
        if lost > 0:
            yield (
                f"{source.name}: partition {partition} of the topic begins at {begin}, and records "
                f"from {asked} are asked for: {lost} up to the cut are deleted or expired, and the "
                "rows are computed without them"
            )


def _asked(source: EventSource, partition: str) -> int:
    """Return the offset from which a partition is to be read; a large one if it is a time."""
    options = {name.lower(): value for name, value in source.options.items()}
    if any(one.startswith("starting") and one != "startingoffsets" for one in options):
        return _LEAST_LONG << 31
    try:
        given = parse_json(options.get("startingoffsets", "earliest"))
        found = int(given[source.options["subscribe"]][partition])
    except (KeyError, TypeError, ValueError):  # `earliest`; Spark names what is wrong in others
        return 0
    return max(0, found)


# ---- the topic -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Topic:
    """The oldest offset of each partition of a topic, and the one at which to end."""

    begins: Mapping[str, int]
    ends: Mapping[str, int]


def _topic(session: SparkSession, source: EventSource, until_micros: int | None = None) -> _Topic:
    """Return offsets of each partition of a topic.

    Args:
        until_micros: the first record at or after this time; None, or if there is no such record:
            the end of the partition.

    Raises:
        InputError: the topic cannot be read.
    """
    from py4j.protocol import Py4JError

    place, topic = f"the events {source.name!r}", source.options["subscribe"]
    context: Any = context_of(session)
    if context is None:
        raise InputError(
            f"{place}: Spark Connect cannot look up the offsets of a time",
            next_step="give `positions` in place of `until`",
        )
    try:
        with _consumer(context._jvm, source) as consumer:
            found = _offsets_in(context._jvm, consumer, topic, until_micros)
    except Py4JError as error:
        raise InputError(
            f"{place}: the topic {topic!r} cannot be read ({failure_reason(error)})",
            next_step="check the options `kafka.…` and `subscribe`",
        ) from error
    if not found.ends:
        raise InputError(f"{place}: the broker has no topic {topic!r}")
    return found


def _offsets_in(jvm: Any, consumer: Any, topic: str, until_micros: int | None) -> _Topic:
    kind = jvm.org.apache.kafka.common.TopicPartition
    numbers = sorted(int(one.partition()) for one in consumer.partitionsFor(topic) or ())
    partitions = {str(number): kind(topic, number) for number in numbers}
    asked = jvm.java.util.HashMap()
    for one in partitions.values():
        asked.put(one, max(_LEAST_LONG, -(-(until_micros or 0) // 1000)))
    begins, ends = consumer.beginningOffsets(asked.keySet()), consumer.endOffsets(asked.keySet())
    records = {} if until_micros is None else consumer.offsetsForTimes(asked)
    found = {}
    for name, one in partitions.items():
        record = records.get(one)
        found[name] = int(ends.get(one) if record is None else record.offset())
    return _Topic({name: int(begins.get(one)) for name, one in partitions.items()}, found)


@contextmanager
def _consumer(jvm: Any, source: EventSource) -> Iterator[Any]:
    settings = jvm.java.util.Properties()
    settings.put("allow.auto.create.topics", "false")
    for one in ("key.deserializer", "value.deserializer"):
        settings.put(one, _DESERIALIZER)
    for name, value in source.options.items():
        if name.startswith("kafka."):
            settings.put(name.removeprefix("kafka."), value)
    make = jvm.org.apache.kafka.clients.consumer.KafkaConsumer
    if not callable(make):
        raise InputError(
            f"the events {source.name!r}: this Spark has no connector of Kafka",
            next_step="name its package: --spark --packages "
            "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
        )
    consumer = make(settings)
    try:
        yield consumer
    finally:
        consumer.close()
