"""Windows of time in a time zone: `02:00-04:00` in Europe/Berlin, every day.

A window that ends before it begins passes midnight. When clocks change, a time that does not exist
means the time that follows, and a time that occurs twice means the first.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arroyo_dagster.errors import InputError

if TYPE_CHECKING:
    import pendulum

_BETWEEN = re.compile(r"(\d{1,2}):(\d{2})\s*-\s*(\d{1,2}):(\d{2})")


@dataclass(frozen=True, slots=True)
class DailyWindow:
    """A window of time that recurs every day.

    Attributes:
        begins, ends: minutes since midnight; a window that ends before it begins passes midnight.
        time_zone: its name in the tz database.
    """

    begins: int
    ends: int
    time_zone: str

    @classmethod
    def parse(cls, between: str, time_zone: str) -> "DailyWindow":
        """Parse `HH:MM-HH:MM`.

        Raises:
            InputError: the text has another form, the window is empty, or there is no such time
                zone.
        """
        import pendulum

        match = _BETWEEN.fullmatch(between.strip())
        numbers = [int(text) for text in match.groups()] if match else []
        if not numbers or max(numbers[0], numbers[2]) > 23 or max(numbers[1], numbers[3]) > 59:
            raise InputError(
                "a window has the form HH:MM-HH:MM, from 00:00 to 23:59",
                between=between,
                next_step="write it as 02:00-04:00; one that passes midnight as 23:00-01:30",
            )
        try:
            pendulum.timezone(time_zone)
        except Exception as error:
            raise InputError(
                "there is no such time zone",
                time_zone=time_zone,
                next_step="use a name of the tz database, such as Europe/Berlin or UTC",
            ) from error
        begins, ends = numbers[0] * 60 + numbers[1], numbers[2] * 60 + numbers[3]
        if begins == ends:
            raise InputError("the window is empty: it ends when it begins", between=between)
        return cls(begins, ends, time_zone)

    @property
    def cron(self) -> str:
        """Return the opening time as cron in its time zone."""
        return f"{self.begins % 60} {self.begins // 60} * * *"

    def closes_at(self, now: "pendulum.DateTime | None" = None) -> "pendulum.DateTime | None":
        """Return when the window that is open now closes; None if none is open.

        Args:
            now: the time to check; default: this machine's time.
        """
        return next(
            (ends for begins, ends, time in self._around(now) if begins <= time < ends), None
        )

    def opens_next(self, now: "pendulum.DateTime | None" = None) -> "pendulum.DateTime":
        """Return when the window opens next."""
        return next(begins for begins, _, time in self._around(now) if begins > time)

    def _around(self, now: "pendulum.DateTime | None") -> "Iterator[tuple[pendulum.DateTime, ...]]":
        """Yield when each of four windows opens and closes, and the time, in its time zone."""
        import pendulum

        time = (now or pendulum.now("UTC")).in_timezone(self.time_zone)
        for day in (time.start_of("day").add(days=days) for days in (-1, 0, 1, 2)):
            last = day.add(days=1) if self.ends <= self.begins else day
            yield self._at(day, self.begins), self._at(last, self.ends), time

    def _at(self, day: "pendulum.DateTime", minutes: int) -> "pendulum.DateTime":
        import pendulum

        return pendulum.datetime(
            day.year, day.month, day.day, minutes // 60, minutes % 60, tz=self.time_zone
        )


def micros_of(time: "pendulum.DateTime") -> int:
    """Return a time as microseconds since the Unix epoch."""
    return int(time.int_timestamp * 1_000_000 + time.microsecond)
