"""Records on which a step failed: counted, logged and kept as dead letters, or the end of the run.

They also decide whether an epoch may be published: a run that consumes its records in vain must not
publish their offsets, as the corrected dataflow would not read them again.

Source: sdf-states.md 3.2 (f), 8.2, 9.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from arroyo_dagster.dataflow.errors import StepFailed
from arroyo_dagster.dataflow.runtime.letters import Letter
from arroyo_dagster.dataflow.runtime.reasons import next_step_of, reason_of
from arroyo_dagster.dataflow.runtime.records import Place
from arroyo_dagster.dataflow.storage.engine_tables import Metrics, StepLog
from arroyo_dagster.errors import ArroyoStateError, StorageError
from arroyo_dagster.state.model.ids import OperatorId

_LOG = logging.getLogger("arroyo_dagster.sdf")
_MOST_LOGGED = 20
"""The maximum number of failures per step and epoch that are logged individually."""


class Failures:
    """Counts and logs records with a failing function or converter, or ends the run.

    Args:
        service: the name of the service, for the log.
        metrics: where failures are counted.
        log: keeps the last failures of each step.
        fatal: whether the first failure ends the run.
        keeps: whether failed records become dead letters.
    """

    def __init__(
        self,
        service: str,
        metrics: Metrics,
        log: StepLog,
        *,
        fatal: bool,
        keeps: bool = False,
    ) -> None:
        self._service = service
        self._metrics = metrics
        self._log = log
        self._fatal = fatal
        self._keeps = keeps
        self._letters: list[Letter] = []
        self._logged: dict[str, int] = {}

    def note(
        self,
        step: str,
        error: Exception,
        record: Any,
        place: Place | None,
        *,
        topic: bool = False,
        partial: bool = False,
    ) -> None:
        """Count and log one failure, and keep a dead letter of the record.

        Args:
            step: the function, topic or sink.
            error: why it failed.
            record: the value that the step was given.
            place: the position of the record that it comes from; None = no single one.
            topic: whether the step is a topic or a sink, which counts offsets.
            partial: whether other parts of the record have effects; see `Letter`.

        Raises:
            StepFailed: failures are fatal.
            StorageError: the store failed, so the epoch must be run again.
        """
        if isinstance(error, StorageError):
            raise error
        offset = place.offset if topic and place is not None else None
        self._metrics.count(step, failed=1, error_offset=offset)
        reason = reason_of(error, in_topic=topic)
        names = () if place is None else ("topic", "partition", "offset")
        where: dict[str, Any] = {name: getattr(place, name) for name in names}
        if self._fatal:
            raise StepFailed(
                f"{step} failed on a record: {reason}",
                service=self._service,
                record=short_text(record),
                next_step=f"{next_step_of(error, in_topic=topic)}, or run with --on-error skip",
                **where,
            ) from error
        file = None if place is None else place.file
        kept = {**where, "file": file, "reason": reason}
        self._log.add_failure(step, self._metrics.failed(step), kept)
        if self._keeps and place is not None:
            self._letters.append(self._letter(step, reason, record, place, partial))
        count = self._logged[step] = self._logged.get(step, 0) + 1
        if count <= _MOST_LOGGED:
            text = ", ".join(f"{name} {value}" for name, value in where.items())
            next_step = f"{next_step_of(error, in_topic=topic)}; {self._after(place)}"
            advice = f". Next: {next_step}" if count == 1 else ""
            _LOG.warning(
                "service %s: %s %s (%s): %s; record %s%s",
                self._service,
                step,
                self._outcome(place),
                text or "no place",
                reason,
                short_text(record),
                advice,
            )

    def _letter(self, step: str, reason: str, value: Any, place: Place, partial: bool) -> Letter:
        return Letter(
            service=self._service,
            step=step,
            topic=place.topic,
            partition=place.partition,
            offset=place.offset,
            file=place.file,
            key=place.key,
            record=place.record,
            time_ms=place.time_ms,
            value=value,
            reason=reason,
            partial=partial,
        )

    def _outcome(self, place: Place | None) -> str:
        if place is None:
            return "failed; its window is kept, to be flushed again"
        return "put a record into the dead letters" if self._keeps else "skipped a record"

    def _after(self, place: Place | None) -> str:
        if place is None:
            return "the next run flushes the window again"
        if self._keeps:
            return "then `sdf replay` processes the record again"
        return "--on-error dead-letter keeps such records for `sdf replay`"

    def take_letters(self) -> list[Letter]:
        """Return the dead letters since the last call."""
        letters, self._letters = self._letters, []
        return letters

    def epoch_done(self) -> None:
        """Log the numbers of failures that were not logged individually, and reset the counts."""
        for step, count in self._logged.items():
            if count > _MOST_LOGGED:
                _LOG.warning(
                    "service %s: %s failed on %d more records in this epoch",
                    self._service,
                    step,
                    count - _MOST_LOGGED,
                )
        self._logged.clear()


def short_text(record: Any) -> str:
    """Return the text of a value for a message."""
    try:
        text = repr(record)
    except Exception:
        text = f"a {type(record).__name__}"
    return text if len(text) <= 200 else f"{text[:197]}..."


# ---- whether an epoch may be published -----------------------------------------------------------

FIRST_RECORDS = 1000
"""If a step fails on this many records of a run and succeeds on none, the step is at fault."""

FIRST_READ = 10
"""If a step fails on each record that the run has read, and the run has read this many, the step is
at fault. Epochs may be as small as a record: those before were published.
"""

StepCounts = Mapping[str, tuple[int, int]]
"""How often each step of a subtask succeeded and failed in an epoch."""


class TooManyErrors(ArroyoStateError):
    """More records failed than the run may skip. The epoch was not published."""


@dataclass(slots=True)
class ErrorLimit:
    """The limit of one run of a service; see `Pipeline.epoch_check`.

    Args:
        service: the name of the service.
        topics: the topics that it reads, which count the records.
        max_errors: how many failures of a run are accepted. None: a step must not fail on each of
            the first `FIRST_READ` records of a run, on each record of a run that reads fewer, nor
            on each of the first `FIRST_RECORDS` records that reach it.
    """

    service: str
    topics: Sequence[str]
    max_errors: int | None = None
    _counts: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __call__(self, last: bool, reports: Mapping[OperatorId, Sequence[StepCounts]]) -> None:
        """Add the counts of an epoch.

        Raises:
            TooManyErrors: the epoch must not be published.
        """
        failing = set()
        for counts in (subtask for subtasks in reports.values() for subtask in subtasks):
            for step, (succeeded, failed) in counts.items():
                before = self._counts.get(step, (0, 0))
                self._counts[step] = (before[0] + succeeded, before[1] + failed)
                if failed:
                    failing.add(step)
        if not failing:
            return
        if self.max_errors is not None:
            self._check_total(self.max_errors)
        else:
            self._check_steps(sorted(failing), last=last)

    def _check_total(self, max_errors: int) -> None:
        failed = {step: count for step, (_, count) in self._counts.items() if count}
        total = sum(failed.values())
        if total <= max_errors:
            return
        raise TooManyErrors(
            f"{total} records failed in this run, and --max-errors is {max_errors}: the run stops "
            "before it publishes the epoch, so that its records are read again",
            service=self.service,
            failed=", ".join(f"{step} {count}" for step, count in sorted(failed.items())),
            next_step="correct the dataflow or the records and run again, raise --max-errors, or "
            "keep failed records with --on-error dead-letter",
        )

    def _check_steps(self, failing: Sequence[str], *, last: bool) -> None:
        read = sum(sum(self._counts.get(topic, (0, 0))) for topic in self.topics)
        for step in failing:
            succeeded, failed = self._counts[step]
            every = failed >= read > 0 and (last or read >= FIRST_READ)
            if succeeded or not (failed >= FIRST_RECORDS or every):
                continue
            raise TooManyErrors(
                f"{step} failed on each of the {failed} records that reached it in this run: the "
                "run stops before it publishes the epoch, so that its records are read again",
                service=self.service,
                step=step,
                next_step="correct the function or its names and run again; if the records are at "
                f"fault, skip them with --max-errors {failed}, or keep them with --on-error "
                "dead-letter",
            )
