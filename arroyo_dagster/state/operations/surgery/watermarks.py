"""A new watermark: at the generators that make it, and at every operator that has one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.iso_times import iso_micros
from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.surgery.edits import SetWatermark
from arroyo_dagster.state.model.surgery.plans import WatermarkStep
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig
from arroyo_dagster.state.operations.surgery.entries import (
    ChangedEntries,
    GlobalTable,
    changed_entries,
)

GENERATOR = "expression watermark state"
"""The description of the table of a watermark generator."""

_NANOS_PER_MICRO = 1000


@dataclass(frozen=True, slots=True)
class WatermarkChanges:
    """The changes of a new watermark, and what outputs will show."""

    tables: tuple[ChangedEntries, ...]
    steps: tuple[WatermarkStep, ...]
    operators: tuple[OperatorCheckpoint, ...]
    duplicate_outputs: tuple[str, ...]
    unknown: tuple[str, ...]


def watermark_changes(
    edit: SetWatermark, checkpoint: Checkpoint, tables: Sequence[GlobalTable]
) -> WatermarkChanges:
    """Compute the new watermark of generators and operators.

    Raises:
        InputError: the job has no watermark yet; or the new one lies within a table's retention
            of 1970, where Arroyo's cutoff would wrap and drop every file.
        FormatError: the entries of a generator do not decode.
    """
    _check_retention(edit, checkpoint)
    generators = [one for one in tables if one.config.config.description == GENERATOR]
    if not any(file.pairs for one in generators for file in one.files):
        raise InputError(
            "no watermark generator of the job has a watermark yet",
            job=checkpoint.job,
            next_step="let the job run until `arroyo-state watermarks` shows one",
        )
    at_nanos = edit.at_micros * _NANOS_PER_MICRO

    def moved(key: Any, value: Any) -> Any:
        # The time of the last emission is of the same events: it moves along, or the generator
        # would stay silent until events reach it.
        emitted = value.last_watermark_emitted_at + at_nanos - value.max_watermark
        return replace(value, max_watermark=at_nanos, last_watermark_emitted_at=max(0, emitted))

    operators = tuple(with_watermark(one, edit.at_micros) for one in checkpoint.operators)
    steps = tuple(watermark_steps(checkpoint, edit.at_micros))
    return WatermarkChanges(
        tables=tuple(changed_entries(one, moved) for one in generators),
        steps=steps,
        operators=operators,
        duplicate_outputs=tuple(_duplicate_outputs(steps)),
        unknown=(
            "an edited watermark was not tried on a real Arroyo; a fork, which copies operators' "
            "watermarks together with the generator's, was",
        ),
    )


def _check_retention(edit: SetWatermark, checkpoint: Checkpoint) -> None:
    for operator in checkpoint.operators:
        for name, config in operator.configs.items():
            found = config.config
            if (
                isinstance(found, ExpiringTimeKeyConfig)
                and found.retention_micros > edit.at_micros
                and operator.min_watermark_micros is not None
            ):
                raise InputError(
                    "the new watermark is smaller than the retention of a table: Arroyo's cutoff "
                    "would wrap, and every file would be dropped",
                    operator=operator.operator,
                    table=name,
                    retention_seconds=found.retention_micros // 1_000_000,
                    next_step="give a later watermark: event time, in ISO 8601",
                )


def with_watermark(operator: OperatorCheckpoint, micros: int) -> OperatorCheckpoint:
    if operator.min_watermark_micros is None or operator.max_watermark_micros is None:
        return operator  # before the generator, where there is none
    return replace(operator, min_watermark_micros=micros, max_watermark_micros=micros)


def watermark_steps(checkpoint: Checkpoint, micros: int) -> Iterator[WatermarkStep]:
    for operator in checkpoint.operators:
        if operator.min_watermark_micros is not None and operator.max_watermark_micros is not None:
            yield WatermarkStep(
                operator=operator.operator,
                before_micros=operator.min_watermark_micros,
                after_micros=micros,
            )


def _duplicate_outputs(steps: Sequence[WatermarkStep]) -> Iterator[str]:
    before = [one.before_micros for one in steps if one.before_micros is not None]
    after = max((one.after_micros or 0 for one in steps), default=0)
    if before and after < max(before):
        yield (
            f"windows that end after {iso_micros(after)} and until {iso_micros(max(before))} were "
            "emitted; they are emitted once more if rows come for them, without the rows that had "
            "expired"
        )
