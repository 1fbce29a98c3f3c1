"""The engine of a step as values: how much work it is, and where it runs with the reason."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class StepEngine(enum.StrEnum):
    """What runs a step."""

    IN_PROCESS = "in process"
    SPARK = "Spark"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkAmount:
    """How much work a step is; 0 = the step has none of this kind.

    Attributes:
        size_bytes: read or copied.
        files: opened or copied one by one.
        objects: listed, or deleted in bulk.
    """

    size_bytes: int = 0
    files: int = 0
    objects: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """Which engine runs a step, and why.

    Attributes:
        step: what is done, for example `verify files`.
        reason: the numbers that decided, for people.
    """

    step: str
    engine: StepEngine
    reason: str

    def __str__(self) -> str:
        return f"{self.step}: {self.engine.value} ({self.reason})"
