"""Ranges of routing keys, and the subtask that owns each."""

from __future__ import annotations

from dataclasses import dataclass

from arroyo_dagster.errors import InputError

MAX_ROUTING_KEY = 2**64 - 1
"""The greatest routing key; the smallest is 0."""

MAX_PARALLELISM = 2**31 - 1
MOST_SUBTASKS = 4096
"""The largest parallelism that a person may ask for. Metadata may hold a larger one."""
"""The maximum number of subtasks: beyond it the last ranges would be empty or wrong."""


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Routing keys from `start` to `end`, both included.

    Raises:
        InputError: an end is no 64-bit unsigned number, or `start` is greater than `end`.
    """

    start: int
    end: int

    def __post_init__(self) -> None:
        if not (_is_int(self.start) and _is_int(self.end)) or not (
            0 <= self.start <= self.end <= MAX_ROUTING_KEY
        ):
            raise InputError(
                "a key range needs 0 <= start <= end <= 2**64 - 1", start=self.start, end=self.end
            )

    def contains(self, routing_key: int) -> bool:
        """Return whether `routing_key` lies in it."""
        return self.start <= routing_key <= self.end

    def intersects(self, min_routing_key: int, max_routing_key: int) -> bool:
        """Return whether any key from the minimum to the maximum, both included, lies in it."""
        return self.start <= max_routing_key and min_routing_key <= self.end

    def covers(self, min_routing_key: int, max_routing_key: int) -> bool:
        """Return whether every key from the minimum to the maximum, both included, lies in it."""
        return self.start <= min_routing_key and max_routing_key <= self.end


def check_subtasks(parallelism: int) -> None:
    """Refuse a parallelism that a person asks for and no job can have.

    Raises:
        InputError: `parallelism` is not a number from 1 to `MOST_SUBTASKS`.
    """
    _check_parallelism(parallelism, MOST_SUBTASKS)


def key_range_size(parallelism: int) -> int:
    """Return the number of routing keys that each subtask owns; the last one may own fewer.

    Raises:
        InputError: `parallelism` is not a number from 1 to `MAX_PARALLELISM`.
    """
    _check_parallelism(parallelism, MAX_PARALLELISM)
    return MAX_ROUTING_KEY // parallelism + 1


def _check_parallelism(parallelism: int, most: int) -> None:
    if not _is_int(parallelism) or not 1 <= parallelism <= most:
        raise InputError(f"parallelism must be a number from 1 to {most}", parallelism=parallelism)


def range_for_server(index: int, parallelism: int) -> KeyRange:
    """Return the routing keys that subtask `index` of `parallelism` owns.

    The ranges of all subtasks are adjacent and disjoint, and together contain every routing key.

    Raises:
        InputError: `parallelism` is out of its range, or `index` is no subtask's.

    Source: crates/arroyo-types/src/lib.rs, `range_for_server`.
    """
    size = key_range_size(parallelism)
    if not _is_int(index) or not 0 <= index < parallelism:
        raise InputError(
            f"a subtask's index must be a number from 0 to {parallelism - 1}",
            index=index,
            parallelism=parallelism,
        )
    start = index * size
    end = MAX_ROUTING_KEY if index == parallelism - 1 else start + size - 1
    return KeyRange(start, end)


def server_for_hash(routing_key: int, parallelism: int) -> int:
    """Return the index of the subtask that owns `routing_key`.

    Raises:
        InputError: `parallelism` is out of its range, or `routing_key` is no 64-bit unsigned
            number.

    Source: crates/arroyo-types/src/lib.rs, `server_for_hash`.

    Differs: Arroyo's shuffle (crates/arroyo-operator/src/lib.rs) divides without the `+ 1` and
        disagrees for keys within `parallelism` of a boundary; state is filtered by this rule.
    """
    size = key_range_size(parallelism)
    if not _is_int(routing_key) or not 0 <= routing_key <= MAX_ROUTING_KEY:
        raise InputError(
            "a routing key must be a number from 0 to 2**64 - 1", routing_key=routing_key
        )
    return routing_key // size


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
