"""From which amount of work Spark is used: below it, this process is done before Spark starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.compaction import MEBIBYTE
from arroyo_dagster.state.model.settings import Setting
from arroyo_dagster.state.model.units import format_bytes
from arroyo_dagster.state.planning.engines import EngineChoice, StepEngine, WorkAmount


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkThresholds:
    """From which amount of work a step of maintenance runs on Spark: if any threshold is reached.

    A step without work never starts Spark.

    Attributes:
        size_bytes: that the step reads or copies.
        files: that it opens or copies one by one.
        objects: that it lists, or deletes in bulk.

    Raises:
        InputError: a threshold is negative.
    """

    size_bytes: Annotated[
        int,
        Setting(
            option="spark-from-mb",
            config="spark_from_mb",
            scale=MEBIBYTE,
            minimum=0,
            metavar="MIB",
            help="Use Spark for a step that reads or copies this many MiB; 0 = always.",
        ),
    ] = 64 * MEBIBYTE
    files: Annotated[
        int,
        Setting(
            option="spark-from-files",
            config="spark_from_files",
            minimum=0,
            metavar="N",
            help="Use Spark for a step that opens or copies this many files; 0 = always.",
        ),
    ] = 2_000
    objects: Annotated[
        int,
        Setting(
            option="spark-from-objects",
            config="spark_from_objects",
            minimum=0,
            metavar="N",
            help="Use Spark for a step that lists or deletes this many objects; 0 = always.",
        ),
    ] = 20_000

    def __post_init__(self) -> None:
        for name in ("size_bytes", "files", "objects"):
            if getattr(self, name) < 0:
                raise InputError(
                    f"the threshold {name} is negative: expected 0 or more",
                    found=getattr(self, name),
                )

    def choose(
        self, step: str, amount: WorkAmount, *, only_here: str | None = None
    ) -> EngineChoice:
        """Choose the engine of a step.

        Args:
            only_here: why only this process can run the step; None = any engine can.
        """
        measures = [
            (amount.size_bytes, self.size_bytes, _bytes),
            (amount.files, self.files, _files),
            (amount.objects, self.objects, _objects),
        ]
        used = [measure for measure in measures if measure[0] > 0]
        reached = [measure for measure in used if measure[0] >= measure[1]]
        if only_here is not None or not used:
            reason = only_here or "nothing to do"
            return EngineChoice(step=step, engine=StepEngine.IN_PROCESS, reason=reason)
        engine = StepEngine.SPARK if reached else StepEngine.IN_PROCESS
        relation = "at least" if reached else "below"
        reason = ", ".join(
            f"{named(value)}, {relation} {named(least)}" for value, least, named in reached or used
        )
        return EngineChoice(step=step, engine=engine, reason=reason)


def _bytes(count: int) -> str:
    return format_bytes(count)


def _files(count: int) -> str:
    return f"{count:,} files"


def _objects(count: int) -> str:
    return f"{count:,} objects"
