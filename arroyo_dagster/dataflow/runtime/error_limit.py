"""Decide whether an epoch may be published, given the records that failed in a run so far.

A run that consumes its records in vain must not publish their offsets: the corrected dataflow
would not read them again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.state.model.ids import OperatorId

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
