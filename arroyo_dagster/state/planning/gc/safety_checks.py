"""Whether gc may run on a job now, depending on whether it is managed and on its status.

gc refuses an Arroyo job of unknown status.

Source: arroyo-state.md 9.6 and 9.8; docs/decisions/job-directory.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from arroyo_dagster.errors import ConflictError, InputError, ProtocolError
from arroyo_dagster.state.model.checkpoints import CheckpointState
from arroyo_dagster.state.model.garbage import GRACE_FLOOR_MICROS, SKEW_MICROS, Roots
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.model.job_facts import Absence, JobAnswer, JobCondition, JobFacts
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.planning.gc.reachability import refuse

PASS_SOURCE = "pass --arroyo-api, --arroyo-db or --assume JOB=stopped; nothing was deleted"


def at_rest(roots: Roots, answer: JobAnswer | None) -> bool:
    """Return whether no writer of the job is running; always False for a managed job.

    Raises:
        ProtocolError: the status of an Arroyo job is unknown, disputed between sources, or about to
            change; or the job is gone, or the source reports another run than the store.
    """
    if roots.managed:
        return False
    facts = _known(roots.paths, answer)
    if facts.condition is JobCondition.GONE:
        raise refuse(
            "a source reports that its pipeline is gone",
            roots.paths,
            next_step="delete it as a dead job; nothing was deleted",
        )
    if facts.condition is JobCondition.CHANGING or (
        facts.condition.at_rest and facts.action_in_progress
    ):
        raise refuse(
            f"the job is changing its state ({facts.state or facts.condition.value})",
            roots.paths,
            next_step="wait until it runs or has stopped; nothing was deleted",
        )
    stored, run_id = roots.worker_generation, facts.run_id
    if facts.condition.at_rest and None not in (stored, run_id) and stored != run_id:
        raise refuse(
            f"the store knows worker generation {stored}, but {facts.source} reports run {run_id}",
            roots.paths,
            next_step="use the API or database of the cluster that runs this job; nothing was "
            "deleted",
        )
    return facts.condition.at_rest


def check_still(paths: JobPaths, before: JobAnswer | None, now: JobAnswer | None) -> None:
    """Check that the status of a job was the same before and after its state was read.

    Raises:
        ConflictError: it changed; the job may have published objects that were not read.
    """
    status_before, status_now = (_doing(answer) for answer in (before, now))
    if status_before != status_now:
        raise ConflictError(
            f"the job changed during the check: {status_before} is now {status_now}",
            job=paths.root,
            retryable=True,
            next_step="run it again; nothing was deleted",
        )


def _doing(answer: JobAnswer | None) -> tuple[str, int | None]:
    if answer is None:
        return "unknown", None
    return answer.facts.condition.value, answer.facts.run_id


def _known(paths: JobPaths, answer: JobAnswer | None) -> JobFacts:
    if answer is None or answer.facts.condition is JobCondition.UNKNOWN:
        reason = None if answer is None else answer.reason
        raise refuse(
            f"the status of the job is unknown: {reason or 'no job-status source is configured'}",
            paths,
            next_step=PASS_SOURCE,
        )
    for disagreement in answer.disagreements:
        if disagreement.fact in ("condition", "run_id"):
            raise refuse(f"sources disagree on {disagreement}", paths, next_step=PASS_SOURCE)
    return answer.facts


def newest_restorable(roots: Roots, answer: JobAnswer | None) -> Epoch:
    """Return the newest epoch that a start of the job can certainly choose.

    Raises:
        ProtocolError: a commit is not finished, or a source reports an epoch that does not exist.
    """
    if roots.managed or roots.worker_generation is not None:
        if not roots.managed and roots.head.state is not CheckpointState.READY:
            raise refuse(
                "the commit of the newest epoch is not finished", roots.paths, path=roots.head.ref
            )
        return min(roots.head.epoch, roots.restorable or roots.head.epoch)
    facts = None if answer is None else answer.facts
    newest = None if facts is None else facts.newest_ready_epoch
    if newest is None:
        # The database may be one epoch behind the store: either of the two newest may be restored.
        return roots.epochs[min(1, len(roots.epochs) - 1)].epoch
    assert facts is not None
    if newest not in [root.epoch for root in roots.epochs]:
        raise refuse(
            f"{facts.source} reports epoch {newest}, which is not in the store",
            roots.paths,
            newest=roots.head.ref,
            next_step="check that the job writes to this URL; nothing was deleted",
        )
    for checkpoint in facts.checkpoints or ():
        if checkpoint.state == "committing" and checkpoint.epoch >= newest:
            raise refuse(f"the commit of epoch {checkpoint.epoch} is not finished", roots.paths)
    return newest


def check_clock(roots: Roots, now_micros: int, *, live: bool) -> None:
    """Check that the clocks of the writer and of the store agree within a margin.

    Ages are never taken from a writer's clock. But if the clocks disagree, one of them is wrong,
    possibly the store's. An expiry by count uses no clock and does not call this.

    Args:
        now_micros: the time, by the clock of the store; replaces times that the store does not
            report.
        live: whether a writer may be running.

    Raises:
        ProtocolError: by its writer's clock the newest epoch was finished after the object that
            makes it exist was written, or, of a live job, before its oldest object was written.
    """
    head = roots.head
    finished = head.finish_time_micros
    if not finished:
        return  # the writer reports no time
    written = head.written_at_micros or now_micros
    if finished - written > SKEW_MICROS:
        raise _disagreement(roots, finished, written)
    # Without a writer, nothing is compared with the newest epoch: objects that the store calls
    # younger than their writer, as in a copied root, only wait longer.
    oldest = head.oldest_object_micros if live else None
    if oldest and oldest - finished > SKEW_MICROS:
        raise _disagreement(roots, finished, oldest)


def _disagreement(roots: Roots, finished: int, written: int) -> ProtocolError:
    apart = abs(finished - written) // 1_000_000
    likely = "the writer's clock is ahead, or the store's was behind"
    if finished < written:
        likely = "the writer's clock is behind, or the objects were copied here later"
    return refuse(
        f"the newest epoch was finished at {_utc(finished)} by its writer's clock and written at "
        f"{_utc(written)} by the store's, {apart} seconds apart: {likely}",
        roots.paths,
        path=roots.head.ref,
        next_step="correct the wrong clock and let the job write an epoch; until then "
        "`gc plan expire --keep N`, without --keep-for, needs no clock; nothing was deleted",
    )


def _utc(micros: int) -> str:
    try:
        return f"{datetime.fromtimestamp(micros // 1_000_000, UTC):%Y-%m-%dT%H:%M:%SZ}"
    except (ValueError, OverflowError, OSError):
        return f"{micros} microseconds since 1970"


def check_store_clock(paths: JobPaths, store_micros: int | None, here_micros: int) -> int:
    """Return the time by the store's clock, against which ages are measured.

    Args:
        store_micros: the time that the store reports for an object written just now.
        here_micros: the time of this machine when the object was written.

    Raises:
        ProtocolError: the store reports no time, or the two differ too much.
    """
    if not store_micros:
        raise refuse("the store does not report when objects were written", paths)
    apart = store_micros - here_micros
    if abs(apart) > SKEW_MICROS:
        raise refuse(
            f"the clocks of the store and of this machine are {abs(apart) // 1_000_000} seconds "
            "apart",
            paths,
            next_step="correct the wrong clock; nothing was deleted",
        )
    return store_micros


# ---- dead jobs -----------------------------------------------------------------------------------

_PROVEN = (Absence.NO_JOB, Absence.NO_PIPELINE)


def why_dead(
    paths: JobPaths, answer: JobAnswer, others: Sequence[JobAnswer], *, managed: bool
) -> str:
    """Return the evidence that a job will never run again.

    Args:
        answer: the status of the job.
        others: the status of the other jobs below the same URL.
        managed: whether the job is a managed job, which no Arroyo server knows.

    Raises:
        ProtocolError: there is no such evidence.
    """
    facts = answer.facts
    if facts.condition is JobCondition.GONE:
        conflict = next((item for item in answer.disagreements if item.fact == "condition"), None)
        if conflict is not None:
            raise refuse(f"sources disagree on {conflict}", paths, next_step=PASS_SOURCE)
        return f"{facts.source} reports that it is gone"
    if facts.condition is not JobCondition.UNKNOWN:
        raise refuse(
            f"the job exists: {facts.source} reports {facts.condition.value}",
            paths,
            next_step="delete its pipeline first, or --assume JOB=gone; nothing was deleted",
        )
    if answer.problems:
        raise refuse(
            f"a source could not answer: {answer.problems[0]}", paths, next_step=PASS_SOURCE
        )
    if managed:
        raise refuse(
            "no Arroyo server knows a managed job",
            paths,
            next_step="--assume JOB=gone if it will never run again; nothing was deleted",
        )
    for word in answer.answers:
        if word.absence in _PROVEN and _knows_another(word.source, others):
            assert word.absence is not None
            return f"{word.source}: {word.absence.value}"
    raise refuse(
        f"nothing proves that its pipeline is gone: {answer.reason}",
        paths,
        next_step=_how_to_prove(paths),
    )


def _how_to_prove(paths: JobPaths) -> str:
    """Return how to prove that a job is gone; the API lists no jobs of the legacy layout."""
    if paths.layout is Layout.LEGACY:
        return (
            "pass --arroyo-db with the database of the cluster that ran it: in the legacy layout "
            "only the database can prove it; or --assume JOB=gone; nothing was deleted"
        )
    return (
        "use the API or database of the cluster that ran it, which must know another job of this "
        "URL, or --assume JOB=gone; nothing was deleted"
    )


def _knows_another(source: str, others: Sequence[JobAnswer]) -> bool:
    """Return whether a source knows another job of this URL, so that it is of this cluster."""
    return any(
        word.source == source and word.facts is not None and word.facts.knows_state
        for other in others
        for word in other.answers
    )


# ---- ages ----------------------------------------------------------------------------------------


def checked_grace(grace_micros: int) -> int:
    """Return the grace period of unreferenced objects, if it is valid.

    Raises:
        InputError: it is negative, or below the floor of an hour.
    """
    if grace_micros < 0:
        raise InputError(
            "the age is negative: the time before which objects are deleted lies in the future",
            grace_seconds=grace_micros // 1_000_000,
            next_step="give an age, for example 3 days",
        )
    if grace_micros < GRACE_FLOOR_MICROS:
        raise InputError(
            "the age is below an hour: younger objects may be about to be referenced",
            grace_seconds=grace_micros // 1_000_000,
            floor_seconds=GRACE_FLOOR_MICROS // 1_000_000,
            next_step="give an age of an hour or more; 3 days is the default",
        )
    return grace_micros


def checked_purge_age(micros: int) -> int:
    """Return the age at which quarantines are purged, if it is valid.

    Raises:
        InputError: it is less than an hour.
    """
    if micros < GRACE_FLOOR_MICROS:
        raise InputError(
            "the age is below an hour: younger quarantines are not purged",
            seconds=micros // 1_000_000,
            next_step="give an hour or more; 7 days is the default",
        )
    return micros
