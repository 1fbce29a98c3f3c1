"""What the inspection of jobs costs in requests and money, and how often the sensor polls.

Prices are public list prices of S3 in most regions. Inspection costs requests only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from arroyo_dagster.state.model.settings import Setting

DAYS_OF_A_MONTH = 30

_MICROS = 1_000_000


def _price(what: str) -> Setting:
    return Setting(fractions=True, scale=_MICROS, minimum=0, help=f"The price of {what}, in USD.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What a store charges, in millionths of a US dollar. The defaults are those of S3 Standard in
    most regions.
    """

    gb_month: Annotated[int, _price("a gigabyte (10^9 bytes) stored for a month")] = 23_000
    thousand_puts: Annotated[int, _price("1,000 PUT, COPY or POST requests")] = 5_000
    thousand_lists: Annotated[int, _price("1,000 LIST requests")] = 5_000
    thousand_gets: Annotated[int, _price("1,000 GET or HEAD requests")] = 400

    def storage_usd(self, size_bytes: float) -> float:
        """Return the price of bytes stored for a month, in US dollars."""
        return size_bytes / 1e9 * self.gb_month / _MICROS

    def requests_usd(self, *, puts: float = 0, lists: float = 0, gets: float = 0) -> float:
        """Return the price of requests, in US dollars."""
        thousands = (
            puts * self.thousand_puts + lists * self.thousand_lists + gets * self.thousand_gets
        )
        return thousands / 1000 / _MICROS


LIST_PRICES = Prices()

TURN_SECONDS = 900
"""Each directory of a known job is listed at least this often."""

TICK_SECONDS = 30
"""The shortest default interval between two polls."""

_DAY_SECONDS = 86_400
_PAGE = 1000
_INTERVALS = ((100, TICK_SECONDS), (250, 60), (1000, 120))
_LONGEST_INTERVAL_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Requests:
    """A number of requests. A HEAD costs the same as a GET and counts as one."""

    lists: int
    gets: int

    @property
    def usd(self) -> float:
        """The price, in US dollars."""
        return LIST_PRICES.requests_usd(lists=self.lists, gets=self.gets)

    def times(self, count: int) -> Requests:
        """Return the requests of so many runs."""
        return Requests(self.lists * count, self.gets * count)

    def __add__(self, other: Requests) -> Requests:
        return Requests(self.lists + other.lists, self.gets + other.gets)

    def __str__(self) -> str:
        return f"{self.lists:,} LIST, {self.gets:,} GET"


PER_JOB = {
    "fleet": (96, Requests(6, 4)),
    "refresh": (48, Requests(11, 14)),
    "sync": (24, Requests(2, 0)),
    "compaction": (24, Requests(4, 2)),
    "gc": (1, Requests(3, 0)),
}
"""Runs a day of each schedule with its default times, and the requests of a run for each job.

A refresh reads the new epochs of a job besides; compaction and gc the jobs that have enough to do.
"""


# ---- the sensor ----------------------------------------------------------------------------------


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


def polls_a_day(jobs: int, interval_seconds: int) -> Requests:
    """Return the requests of all quiet polls of a day."""
    return quiet_poll(jobs, interval_seconds).times(_DAY_SECONDS // interval_seconds)


# ---- the schedules -------------------------------------------------------------------------------


def schedules_a_day(jobs: int) -> Requests:
    """Return the requests of a day of all schedules that inspect, with their default times."""
    per_job = sum((one.times(runs) for runs, one in PER_JOB.values()), Requests(0, 0))
    return per_job.times(jobs)


def inspection_a_day(jobs: int) -> Requests:
    """Return the requests of a day of the sensor and of all schedules, with their defaults."""
    return polls_a_day(jobs, poll_interval_seconds(jobs)) + schedules_a_day(jobs)
