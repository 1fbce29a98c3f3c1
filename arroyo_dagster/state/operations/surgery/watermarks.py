"""A new watermark: at the generators that make it, and at every operator that has one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.iso_times import iso_micros
from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.ids import OperatorId
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.surgery.edits import SetWatermark
from arroyo_dagster.state.model.surgery.graphs import PipelineGraph
from arroyo_dagster.state.model.surgery.plans import WatermarkStep
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig
from arroyo_dagster.state.operations.query.operator_state import sessions, windows
from arroyo_dagster.state.operations.query.state import StateCatalog, StateEpoch, StateJob
from arroyo_dagster.state.operations.surgery.entries import (
    ChangedEntries,
    GlobalTable,
    changed_entries,
)
from arroyo_dagster.state.planning.privacy import NOTHING_PRIVATE
from arroyo_dagster.state.planning.surgery.columns import JOIN_SIDES
from arroyo_dagster.state.planning.surgery.places import operator_number
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.known.catalogue import default_catalogue

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
    generators = [table for table in tables if table.config.config.description == GENERATOR]
    if not any(file.pairs for table in generators for file in table.files):
        raise InputError(
            "no watermark generator of the job has a watermark yet",
            job=checkpoint.job,
            next_step="let the job run until `arroyo-state sql @watermarks JOB` shows one",
        )
    at_nanos = edit.at_micros * _NANOS_PER_MICRO

    def moved(key: Any, value: Any) -> Any:
        # The time of the last emission is of the same events: it moves along, or the generator
        # would stay silent until events reach it.
        emitted = value.last_watermark_emitted_at + at_nanos - value.max_watermark
        return replace(value, max_watermark=at_nanos, last_watermark_emitted_at=max(0, emitted))

    operators = tuple(with_watermark(operator, edit.at_micros) for operator in checkpoint.operators)
    steps = tuple(watermark_steps(checkpoint, edit.at_micros))
    return WatermarkChanges(
        tables=tuple(changed_entries(table, moved) for table in generators),
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
            inner = config.config
            if (
                isinstance(inner, ExpiringTimeKeyConfig)
                and inner.retention_micros > edit.at_micros
                and operator.min_watermark_micros is not None
            ):
                raise InputError(
                    "the new watermark is smaller than the retention of a table: Arroyo's cutoff "
                    "would wrap, and every file would be dropped",
                    operator=operator.operator,
                    table=name,
                    retention_seconds=inner.retention_micros // 1_000_000,
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
    before = [step.before_micros for step in steps if step.before_micros is not None]
    after = max((step.after_micros or 0 for step in steps), default=0)
    if before and after < max(before):
        yield (
            f"windows that end after {iso_micros(after)} and until {iso_micros(max(before))} were "
            "emitted; they are emitted once more if rows come for them, without the rows that had "
            "expired"
        )


# ---- windows -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenWindow:
    """A window, or a session of a key, that a restore emits once the watermark has passed its end.

    Attributes:
        key: of a session, as JSON; None = the window of all keys.
    """

    starts_at_micros: int
    ends_at_micros: int
    key: str | None = None


@dataclass(frozen=True, slots=True)
class EmittedWindows:
    """The windows of an operator that a restore emits, at the watermark before and at the new one.

    Attributes:
        slide_micros: of sliding windows the largest one that its bins allow; else None.
    """

    operator: OperatorId
    before: frozenset[OpenWindow]
    after: frozenset[OpenWindow]
    slide_micros: int | None = None

    @property
    def never(self) -> int:
        """How many open windows are never emitted."""
        return len(self.before - self.after)

    @property
    def again(self) -> int:
        """How many windows that were emitted are emitted once more."""
        return len(self.after - self.before)

    @property
    def summary(self) -> str:
        """How many are never emitted, for people."""
        slide = ""
        if self.slide_micros is not None:
            slide = f", by the slide of {self.slide_micros / 1e6:g} s that its bins show,"
        return f"{self.never} of {len(self.before)} open windows{slide} are never emitted"


def emitted_windows(
    store: ObjectStore, checkpoint: Checkpoint, operators: tuple[OperatorCheckpoint, ...]
) -> dict[OperatorId, EmittedWindows]:
    """Compare the windows that a restore emits, at the watermarks of an epoch and at new ones.

    Args:
        operators: those of the epoch, with their new watermarks.

    Raises:
        FormatError, NotFoundError: a file is broken, or missing.

    Source: docs/spec/arroyo-state.md 5.4 and 5.6; tumbling_aggregating_window.rs,
        sliding_aggregating_window.rs and session_aggregating_window.rs, `on_start`.
    """
    catalog = StateCatalog(store, NOTHING_PRIVATE, default_catalogue())
    job = StateJob(catalog, JobPaths(checkpoint.job, checkpoint.pipeline))
    epochs = [
        StateEpoch(job, epoch) for epoch in (checkpoint, replace(checkpoint, operators=operators))
    ]
    bins = [_bins(epoch) for epoch in epochs]
    sides: list[dict[OperatorId, frozenset[OpenWindow]]] = [
        {name: frozenset(ends) for name, ends in kinds["tumbling"].items()} for kinds in bins
    ]
    slides: dict[OperatorId, int] = {}
    for operator in dict.fromkeys((*bins[0]["sliding"], *bins[1]["sliding"])):
        both = [kinds["sliding"].get(operator, []) for kinds in bins]
        # Bins begin at multiples of the slide, and so does each window.
        numbers = [end for window in (*both[0], *both[1]) for end in _ends_of(window)]
        slides[operator] = math.gcd(*numbers)
        for idx, epoch in enumerate(epochs):
            sides[idx][operator] = frozenset(_sliding(epoch, operator, both[idx], slides[operator]))
    for idx, epoch in enumerate(epochs):
        of_keys: dict[OperatorId, list[OpenWindow]] = defaultdict(list)
        for row in sessions(epoch):
            session = OpenWindow(row.starts_at_micros, row.closes_at_micros, row.key)
            of_keys[OperatorId(row.operator)].append(session)
        sides[idx] |= {operator: frozenset(opened) for operator, opened in of_keys.items()}
    return {
        operator: EmittedWindows(
            operator,
            sides[0].get(operator, frozenset()),
            sides[1].get(operator, frozenset()),
            slides.get(operator),
        )
        for operator in dict.fromkeys((*sides[0], *sides[1]))
    }


def _bins(epoch: StateEpoch) -> dict[str, dict[OperatorId, list[OpenWindow]]]:
    """Return the stored windows by kind and operator; of sliding windows their bins, each of which
    ends with the last window that has it.
    """
    by_kind: dict[str, dict[OperatorId, list[OpenWindow]]] = {"tumbling": {}, "sliding": {}}
    for window in windows(epoch):
        open_windows = by_kind[window.kind].setdefault(OperatorId(window.operator), [])
        open_windows.append(OpenWindow(window.starts_at_micros, window.ends_at_micros))
    return by_kind


def _ends_of(window: OpenWindow) -> tuple[int, int]:
    return window.starts_at_micros, window.ends_at_micros


def _sliding(
    epoch: StateEpoch, operator: OperatorId, bins: Sequence[OpenWindow], slide: int
) -> Iterator[OpenWindow]:
    """Yield the sliding windows that end after the watermark and have a bin."""
    state = epoch.checkpoint.operator(operator)
    watermark = 0 if state is None else state.min_watermark_micros or 0
    for window in bins:
        width = window.ends_at_micros - window.starts_at_micros
        for end in range(window.starts_at_micros + slide, window.ends_at_micros + 1, slide):
            if end > watermark:
                yield OpenWindow(end - width, end)


def check_joins(
    edit: SetWatermark,
    checkpoint: Checkpoint,
    changes: Collection[EmittedWindows],
    dropped: Mapping[OperatorId, int],
    graph: PipelineGraph | None,
) -> None:
    """Refuse a watermark that passes the end of an open window of a join of windows.

    Such a join fails at rows from before its watermark, at each start.

    Args:
        dropped: rows by operator that a restore no longer loads at the new watermark.
        graph: of the job's pipeline; a join without rows does not show whether it joins windows.

    Raises:
        InputError: it passes one, and the job joins windows, or may.
    """
    ends = sorted(
        window.ends_at_micros
        for change in changes
        for window in change.before
        if window.ends_at_micros <= edit.at_micros
    )
    for operator in checkpoint.operators:
        joins = _joins_windows(operator, graph)
        waiting = dropped.get(operator.operator, 0)
        if joins is False or not (ends or (joins and waiting)):
            continue
        passed = f"the end of {len(ends)} open windows" if ends else f"{waiting} waiting rows"
        step = f"give a time before {iso_micros(ends[0])}" if ends else "give an earlier time"
        reason = "joins windows: it would fail at each start, at rows from before its watermark"
        step += "; nothing was changed"
        if joins is None:
            reason = (
                "has no rows that show whether it joins windows: such a join would fail at each "
                "start"
            )
            step += ". Or pass --arroyo-db, whose program says which join it is"
        raise InputError(
            f"the new watermark passes {passed}, and {operator.operator} {reason}",
            job=JobPaths(checkpoint.job, checkpoint.pipeline).root,
            operator=operator.operator,
            next_step=step,
        )


def _joins_windows(operator: OperatorCheckpoint, graph: PipelineGraph | None) -> bool | None:
    """Return whether an operator is a join of windows; None = its state does not show it."""
    for config in operator.configs.values():
        if config.config.description in JOIN_SIDES:
            kept = config.config
            return isinstance(kept, ExpiringTimeKeyConfig) and kept.retention_micros == 0
    if operator_number(operator.operator)[0] != "join":
        return False
    program = None if graph is None else graph.programmed(operator.operator)
    return None if program is None else program.kind == "InstantJoin"


def has_unknown_join(checkpoint: Checkpoint) -> bool:
    """Whether only the graph shows of some join whether it joins windows."""
    return any(_joins_windows(operator, None) is None for operator in checkpoint.operators)
