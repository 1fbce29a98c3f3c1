"""Offsets of the partitions of a topic at a time, as a client of the broker has looked them up."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.json_fields import parse_json
from arroyo_dagster.state.model.surgery.edits import NewPosition

_PAIRS = json.JSONDecoder(object_pairs_hook=list)
"""Of equal names a dict would keep the last."""
_LINE = re.compile(r"([^:]+):(\d{1,10}):(\d{0,19})")
_FORMS = (
    "give what `kafka-get-offsets.sh --bootstrap-server HOST:9092 --topic TOPIC --time MILLIS` "
    'prints, or a JSON object such as {"0": 120000, "1": 118500}'
)


def parse_lookup(data: bytes) -> tuple[NewPosition, ...]:
    """Return the offset of each partition of one topic.

    Args:
        data: lines `TOPIC:PARTITION:OFFSET`, as Kafka's own tool prints them, or a JSON object of
            offsets by partition; in UTF-8.

    Raises:
        InputError: it has another form; it is of several topics; or no record of a partition is at
            or after the time.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"the lookup is no text in UTF-8 ({error})", next_step=_FORMS) from error
    pairs = list(_of_json(text) if text.lstrip().startswith("{") else _of_lines(text))
    partitions = [partition for partition, _ in pairs]
    if not pairs or len(set(partitions)) < len(partitions):
        raise InputError(
            "the lookup has no partition" if not pairs else "the lookup has a partition twice",
            next_step=_FORMS,
        )
    return tuple(NewPosition(partition=partition, position=offset) for partition, offset in pairs)


def _of_json(text: str) -> Iterator[tuple[str, str]]:
    try:
        pairs = parse_json(text, _PAIRS)
    except ValueError as error:
        raise InputError(f"the lookup is no JSON ({error})", next_step=_FORMS) from error
    for partition, offset in pairs:
        if isinstance(offset, bool) or not isinstance(offset, int) or offset < 0:
            raise InputError(
                f"the lookup has no offset of partition {partition}", found=f"{offset!r:.40}"
            )
        yield partition, str(offset)


def _of_lines(text: str) -> Iterator[tuple[str, str]]:
    topics: set[str] = set()
    for line in filter(None, map(str.strip, text.splitlines())):
        match = _LINE.fullmatch(line)
        if match is None:
            raise InputError(
                f"not a line of a lookup: {line:.80}",
                expected="TOPIC:PARTITION:OFFSET",
                next_step=_FORMS,
            )
        topic, partition, offset = match.groups()
        if not offset:
            raise InputError(
                f"no record of partition {partition} of topic {topic} is at or after the time",
                next_step="give the end of the partition in its line, which `--time latest` prints",
            )
        topics.add(topic)
        if len(topics) > 1:
            raise InputError(
                f"the lookup is of several topics: {', '.join(sorted(topics))}",
                next_step="look up the topic of one source",
            )
        yield partition, offset
