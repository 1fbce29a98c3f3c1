"""Processes, by their number and when they were started: numbers are used again."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process, by its number and the time it was started at, as numbers are used again."""

    number: int
    started: str

    @classmethod
    def parent(cls) -> ProcessId:
        """Return the parent of this process."""
        return cls.of(os.getppid())

    @classmethod
    def of(cls, number: int) -> ProcessId:
        """Return the process that has a number now."""
        return cls(number, _started(number) or "")

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return _started(self.number) == self.started

    def descriptor(self) -> int | None:
        """Return a descriptor that is ready for reading once the process has ended, if possible."""
        try:
            return os.pidfd_open(self.number)
        except (AttributeError, OSError):
            return None


def _started(number: int) -> str | None:
    """Return when a process was started, in ticks since boot; None = it has ended."""
    try:
        with open(f"/proc/{number}/stat", encoding="utf-8", errors="replace") as file:
            state, *others = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else others[18]
