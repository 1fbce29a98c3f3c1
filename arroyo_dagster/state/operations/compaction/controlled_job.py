"""Control of one Arroyo job: ask for its status, stop it, start it, and log every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from arroyo_dagster.errors import ArroyoStateError, ConflictError, InputError
from arroyo_dagster.state.model.ids import PipelineId
from arroyo_dagster.state.model.job_facts import JobCondition, JobFacts
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.maintenance_window import WindowStep
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory, JobSource

POLL_SECONDS = 1.0


class JobControl(JobSource, Protocol):
    """A source of job status that can also stop and start jobs: `ArroyoControl`."""

    def stop_with_checkpoint(self, pipeline: PipelineId) -> None:
        """Request a last checkpoint and a stop."""

    def start(self, pipeline: PipelineId, parallelism: int | None = None) -> None:
        """Request a stopped job to run again, at a new parallelism if one is given; this also
        cancels a pending stop.
        """

    def restart(self, pipeline: PipelineId) -> None:
        """Request a failed job to run again."""


class ControlledJob:
    """The job of a maintenance window: its requests, with time limits, and Arroyo's answers.

    Attributes:
        steps: the steps done so far.
        problem: the first error.
        facts: Arroyo's last answer.
    """

    def __init__(
        self,
        paths: JobPaths,
        control: JobControl,
        *,
        clock: Callable[[], int],
        sleep: Callable[[float], None],
        on_step: Callable[[WindowStep], None],
    ) -> None:
        self.paths = paths
        self.clock = clock
        self.directory = JobDirectory([control])
        self.steps: list[WindowStep] = []
        self.problem: ArroyoStateError | None = None
        self.facts: JobFacts | None = None
        self._control = control
        self._sleep = sleep
        self._on_step = on_step

    def did(self, what: str) -> None:
        """Log a step."""
        step = WindowStep(at_micros=self.clock(), did=what)
        self.steps.append(step)
        self._on_step(step)

    def failed(self, at: str, error: ArroyoStateError) -> None:
        """Log an error and keep the first one; does not raise, so that the job is still started."""
        self.did(f"{at}: {error}")
        self.problem = self.problem or error

    def seconds_left(self, until_micros: int) -> float:
        """Return the seconds until a time; negative afterwards."""
        return (until_micros - self.clock()) / 1e6

    def after(self, seconds: float) -> int:
        """Return the time in this many seconds, in microseconds."""
        return self.clock() + int(seconds * 1e6)

    def ask(self) -> JobFacts:
        """Ask Arroyo for the job's current status.

        Raises:
            StorageError…: Arroyo cannot be asked.
            InputError: Arroyo has no such job, or reports an unknown status.
        """
        answer = self.directory.find(self.paths, checkpoints=False)
        if answer.facts.condition is JobCondition.UNKNOWN:
            raise InputError(
                f"Arroyo does not report the job's status: {answer.reason}",
                job=self.paths.root,
                next_step="check that this is the API of the cluster that runs it",
            )
        self.facts = answer.facts
        return answer.facts

    def asked(self, until_micros: int) -> Iterator[JobFacts]:
        """Poll the job's status until a time; a failed request is repeated.

        Raises:
            ArroyoStateError: the last request failed when the time was over.
        """
        while True:
            error: ArroyoStateError | None = None
            try:
                facts = self.ask()
            except ArroyoStateError as caught:
                error = caught
            else:
                yield facts
            if self.seconds_left(until_micros) <= 0:
                if error is not None:
                    raise error
                return
            self._sleep(POLL_SECONDS)

    def stop(self, pipeline: PipelineId, seconds: float) -> JobFacts:
        """Stop the job with a checkpoint, and return its status at rest.

        Raises:
            ConflictError: it did not stop in time.
        """
        asked = False
        for facts in self.asked(self.after(seconds)):
            if facts.condition.at_rest:
                self.did(f"the job's status is {facts.state}")
                return facts
            if not asked or facts.stop_requested == "none":
                asked = self.tried(lambda: self._control.stop_with_checkpoint(pipeline), "stop")
        raise ConflictError(
            f"the job did not stop within {seconds:g} s",
            job=self.paths.root,
            retryable=True,
            next_step="increase the stop limit; the job's state was not touched",
        )

    def tried(self, request: Callable[[], None], what: str) -> bool:
        """Send a request, and return whether Arroyo certainly accepted it."""
        try:
            request()
        except ArroyoStateError as error:
            self.did(f"requested Arroyo to {what} the job, without an answer: {error}")
            return False
        self.did(f"requested Arroyo to {what} the job")
        return True

    def start(
        self, pipeline: PipelineId, seconds: float, *, parallelism: int | None = None
    ) -> bool:
        """Start or restart the job until the time limit; return whether it certainly runs.

        A request to start is sent even to a running job, because an earlier request to stop may
        still arrive.

        Args:
            parallelism: the new one of all its operators; None = as it was.
        """
        what = "start" if parallelism is None else f"start, at parallelism {parallelism},"
        asked = False
        restarted: int | None = None
        until = self.after(seconds)

        def restart() -> None:
            self._control.restart(pipeline)

        def start() -> None:
            self._control.start(pipeline, parallelism)

        try:
            for facts in self.asked(until):
                if facts.condition is JobCondition.FINISHED:
                    self.did("the job has finished: there is nothing to start")
                    return True
                if asked and facts.condition is JobCondition.RUNNING and means_to_run(facts):
                    self.did(f"the job runs, as {facts.run_id}")
                    return True
                if facts.condition is JobCondition.FAILED and asked:
                    if restarted not in (None, facts.run_id):
                        break  # it was restarted once, and failed again
                    if restarted is None and self.tried(restart, "restart"):
                        restarted = facts.run_id
                elif not asked or not means_to_run(facts):
                    asked = self.tried(start, what) or asked
        except ArroyoStateError as error:
            self.failed("it is unknown whether the job runs", error)
            return False
        self.failed(
            "not started",
            ConflictError(
                f"the job was asked to run, but its status is {self.facts and self.facts.state}",
                job=self.paths.root,
                next_step="check it in Arroyo, and start it by hand",
            ),
        )
        return False


def means_to_run(facts: JobFacts) -> bool:
    """Whether a running job is not about to stop."""
    return facts.stop_requested in (None, "none") and facts.running_desired is not False
