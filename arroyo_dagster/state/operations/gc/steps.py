"""Execute a plan in steps: data files, then records, then the metadata that refers to them, oldest
first.

Each step is journalled, and read back from the store before the next begins. If it is interrupted
at any point, every remaining epoch is complete, and the next run finishes the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from arroyo_dagster.errors import StorageError
from arroyo_dagster.state.metadata.lease import Leased, Precondition
from arroyo_dagster.state.model.aliases import PathsDigest
from arroyo_dagster.state.model.garbage import GcPlan
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.job_facts import JobFacts
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.model.objects import BATCH, Packed, StoredObject
from arroyo_dagster.state.model.progress import OnProgress, Progress
from arroyo_dagster.state.operations.gc.journal import GONE, Journal
from arroyo_dagster.state.operations.gc.plan import GcRequest
from arroyo_dagster.state.operations.gc.quarantine import QuarantineWriter
from arroyo_dagster.state.operations.gc.roots import newest_root
from arroyo_dagster.state.planning.gc.expiry import in_safe_groups
from arroyo_dagster.state.planning.gc.reachability import refuse
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.failures import delete_step, lasts
from arroyo_dagster.state.storage.store import DeleteOutcome, ObjectStore

Delete = Callable[[ObjectStore, Sequence[Sequence[StatePath]]], list[DeleteOutcome]]
"""Deletes batches of up to 1000 objects; returns the outcome of each batch, in order."""

HEADS = 64
"""Up to this number, objects are checked one by one after a delete; above, by a listing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The rate of deletes, and their retries.

    Attributes:
        in_flight: how many batches of 1000 objects are deleted concurrently.
        batches_per_second: the maximum rate; None = as fast as the store answers.
        tries: how often a temporary failure is tried, key by key.
        sleep: waits; replaceable in tests.
    """

    in_flight: int = 8
    batches_per_second: float | None = None
    tries: int = 5
    sleep: Callable[[float], None] = time.sleep


def delete_here(store: ObjectStore, batches: Sequence[Sequence[StatePath]]) -> list[DeleteOutcome]:
    """Delete batches in this process, concurrently."""
    return concurrently(store.delete_many, batches)


@dataclass(frozen=True, slots=True)
class StatusCheck(Precondition):
    """Asks what a job is doing, and refuses if that is no longer what the plan was made for."""

    plan_of: JobPaths
    condition: str | None
    run_id: int | None
    asked: GcRequest

    @classmethod
    def of_plan(cls, plan: GcPlan, asked: GcRequest) -> StatusCheck:
        """Return the check for a plan."""
        return cls(plan.paths, plan.proof.condition, plan.proof.run_id, asked)

    @property
    def from_anywhere(self) -> bool:
        """Whether workers on other machines get the same answers."""
        return self.asked.directory.from_anywhere

    def __call__(self) -> JobFacts | None:
        """Return the job's status from its source; None if the plan does not depend on it.

        Raises:
            ProtocolError: the status has changed.
        """
        if self.condition is None:
            return None
        answer = self.asked.answer(self.plan_of)
        facts = None if answer is None else answer.facts
        status = None if facts is None else f"{facts.condition.value} ({facts.source})"
        run_id = None if facts is None else facts.run_id
        if (status, run_id) != (self.condition, self.run_id):
            raise refuse(
                f"the job was {self.condition} and is now {status}",
                self.plan_of,
                run=run_id,
                next_step="let it continue, then make a new plan; run it again for the rest",
            )
        return facts


@dataclass(slots=True)
class GcRun:
    """The execution of one plan."""

    store: Leased
    plan: GcPlan
    asked: GcRequest
    journal: Journal
    quarantine: QuarantineWriter | None
    delete: Delete
    pace: Pace
    on_progress: OnProgress
    deleted: int = 0
    size_bytes: int = 0
    _number: int = 0
    _done: int = 0
    _last: float = 0.0

    def carry_out(self) -> None:
        plan = self.plan
        again = plan.paths.layout is Layout.LEGACY and plan.proof.condition is not None
        if again:
            # The job's next run may write the same names; all of them, if it ignores the state.
            self.store.before_deleting = StatusCheck.of_plan(plan, self.asked)
        self._step("data", plan.data, self.delete)
        self.store.before_deleting = None
        # A worker that was given up may send its request when the names are in use again.
        delete = delete_here if again else self.delete
        self._step("records", plan.records, delete)
        self._step("metadata", plan.metadata, delete)

    def _step(self, name: str, step: Packed, delete: Delete) -> None:
        if not step:
            return
        for wave in _waves(step, 1 if name == "metadata" else self.pace.in_flight):
            # Check again, just before acting, the facts that must not have changed.
            facts = StatusCheck.of_plan(self.plan, self.asked)()
            if facts is not None and facts.condition.at_rest:
                # Check that the newest epoch is unchanged: a job at rest publishes nothing.
                plan = self.plan
                newest = newest_root(self.store, plan.paths)
                if newest is None or newest.ref != plan.proof.head:
                    raise refuse(
                        "the job is reported to be at rest, but its newest epoch is now "
                        f"{(None if newest is None else newest.epoch)}",
                        plan.paths,
                        path=plan.proof.head,
                        next_step="find out what runs it, then make a new plan",
                    )
            self._wave(wave, delete, in_order=name == "metadata")
            self._done += sum(map(len, wave))
            self._report(name)
        left = self._read_back(step)
        if left:
            self._wave([left], delete, in_order=name == "metadata")
            left = self._read_back(Packed(left))
        self.deleted += len(step) - len(left)
        self.size_bytes += step.size_bytes - sum(file.size_bytes or 0 for file in left)
        if left:
            raise StorageError(
                f"{len(left)} objects still exist although the store reported them as deleted",
                path=left[0].path,
                url=self.store.url,
                next_step="run it again: the objects that refer to them still exist",
            )

    # ---- a wave of batches -----------------------------------------------------------------------

    def _wave(self, wave: list[list[StoredObject]], delete: Delete, *, in_order: bool) -> None:
        numbered = [(self._next_number(), batch) for batch in wave]
        self.journal.write(numbered, {})
        outcomes: dict[StatePath, str] = {}
        if self.quarantine is not None:
            gone = self.quarantine.copy(numbered)
            outcomes = dict.fromkeys(gone, GONE)
            wave = [[file for file in batch if file.path not in outcomes] for batch in wave]
        paths = [[file.path for file in batch] for batch in wave if batch]
        together = [paths] if paths else []
        all_paths = (path for batch in paths for path in batch)
        groups = ([group] for group in in_safe_groups(self.plan.paths, all_paths))
        for batches in groups if in_order else together:
            outcomes |= self._deleted(batches, delete)
            if _kept(outcomes):
                break
        self.journal.write(numbered, outcomes)
        failed = _kept(outcomes)
        if failed:
            path, error = next(iter(failed.items()))
            raise StorageError(
                f"{len(failed)} objects could not be deleted; the first is {error}",
                path=path,
                url=self.store.url,
                retryable=not lasts(error),
                next_step=delete_step(error, self.store.url, path),
            )

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _deleted(
        self, waiting: Sequence[Sequence[StatePath]], delete: Delete
    ) -> dict[StatePath, str]:
        """Delete batches; retry temporary failures key by key.

        Returns:
            For each path `deleted`, `moved`, or `there: ` and the reason.
        """
        word = "deleted" if self.quarantine is None else "moved"
        results: dict[StatePath, str] = {}
        for attempt in range(1, self.pace.tries + 1):
            outcomes = self._asked_of_store(waiting, delete)
            for outcome in outcomes:
                results |= dict.fromkeys(outcome.deleted, word)
                results |= {path: f"there: {error}" for path, error in outcome.failed.items()}
            failed = [
                path
                for outcome in outcomes
                for path, error in outcome.failed.items()
                if not lasts(error)
            ]
            if not failed or attempt == self.pace.tries:
                break
            self.pace.sleep(min(10.0, 0.1 * 2**attempt))
            waiting = [failed[start : start + BATCH] for start in range(0, len(failed), BATCH)]
        return results

    def _asked_of_store(
        self, batches: Sequence[Sequence[StatePath]], delete: Delete
    ) -> list[DeleteOutcome]:
        if self.pace.batches_per_second:
            self.pace.sleep(len(batches) / self.pace.batches_per_second)
        try:
            return delete(self.store, batches)
        except StorageError as error:
            # It is unknown what was deleted: every key counts as failed and is tried again.
            reason = f"{error.message}"
            if not error.retryable and not lasts(reason):
                reason = f"the store refused the request: {reason}"
            return [DeleteOutcome(failed=dict.fromkeys(batch, reason)) for batch in batches]

    # ---- reading back ----------------------------------------------------------------------------

    def _read_back(self, step: Packed) -> list[StoredObject]:
        """Return which objects of a step still exist, by requests to the store."""
        if len(step) <= HEADS:
            objects = list(step)
        else:  # a listed object may be deleted all the same
            objects = self._still_listed(PathsDigest(_same(file.path, file.etag) for file in step))
        infos = concurrently(self.store.head, [file.path for file in objects])
        pairs = zip(objects, infos, strict=True)
        return [file for file, info in pairs if info is not None and info.etag == file.etag]

    def _still_listed(self, wanted: PathsDigest) -> list[StoredObject]:
        left, listed = [], 0
        for info in self.store.list(self.plan.paths.root):
            listed += 1
            if info.addressable and _same(info.path, info.etag) in wanted:
                left.append(
                    StoredObject(info.path, info.size_bytes, info.modified_micros, info.etag)
                )
        if not listed:
            # The lease and the journal exist: an empty listing proves nothing about the others.
            raise StorageError(
                "the store lists nothing below the job, but the lease on it exists",
                path=self.plan.paths.root,
                url=self.store.url,
                next_step="run it again: the objects that refer to the deleted ones still exist",
            )
        return left

    def _report(self, name: str) -> None:
        now = time.monotonic()
        total = self.plan.objects
        if now - self._last < 1.0 and self._done < total:
            return
        self._last = now
        self.on_progress(Progress(step=name, done=self._done, total=total))


def _same(path: StatePath, etag: str | None) -> str:
    """Return a text that distinguishes an object from one that was written at its path later."""
    return f"{path}\0{etag or ''}"


def _waves(step: Packed, in_flight: int) -> Iterator[list[list[StoredObject]]]:
    """Group batches by as many as may be in flight at a time."""
    wave: list[list[StoredObject]] = []
    for batch in step.batches():
        wave.append(batch)
        if len(wave) == in_flight:
            yield wave
            wave = []
    if wave:
        yield wave


def _kept(outcomes: dict[StatePath, str]) -> dict[StatePath, str]:
    return {path: outcome for path, outcome in outcomes.items() if outcome.startswith("there")}
