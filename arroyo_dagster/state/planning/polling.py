"""How often the sensor polls, and how many requests a poll makes."""

from __future__ import annotations

from dataclasses import dataclass

TURN_SECONDS = 900
"""Each directory of a known job is listed at least this often."""

TICK_SECONDS = 30
"""The shortest default interval between two polls."""

_PAGE = 1000
_INTERVALS = ((100, TICK_SECONDS), (250, 60), (1000, 120))
_LONGEST_INTERVAL_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Requests:
    """A number of requests. A HEAD counts as a GET."""

    lists: int
    gets: int

    def __str__(self) -> str:
        return f"{self.lists:,} LIST, {self.gets:,} GET"


def poll_interval_seconds(jobs: int) -> int:
    """Return the default interval between two polls of so many jobs."""
    return next(
        (seconds for most, seconds in _INTERVALS if jobs <= most), _LONGEST_INTERVAL_SECONDS
    )


def sweep(interval_seconds: int) -> int:
    """Return in how many polls each known directory is listed once."""
    return max(1, TURN_SECONDS // interval_seconds)


def quiet_poll(jobs: int, interval_seconds: int) -> Requests:
    """Return the requests of a poll without a new epoch, of jobs that have a pipeline each."""
    turn = -(-jobs // sweep(interval_seconds))
    return Requests(max(1, -(-jobs // _PAGE)) + turn, 2 * jobs)
