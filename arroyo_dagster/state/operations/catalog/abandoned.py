"""Find the prefixes below a checkpoint URL that no job uses. Writes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from arroyo_dagster.errors import ArroyoStateError, StorageError
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.job_facts import JobAnswer, JobCondition
from arroyo_dagster.state.model.objects import ObjectKind
from arroyo_dagster.state.model.progress import OnProgress, ProgressUnit, no_progress
from arroyo_dagster.state.operations.catalog.jobs import JobListing, JobSummary
from arroyo_dagster.state.operations.progress import counter
from arroyo_dagster.state.planning.abandoned import (
    CHECK_FIRST,
    REMAINS,
    AbandonedPrefix,
    kind_of_remains,
    prefixes_without_job,
    removal_command,
    why_abandoned,
)
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore


def find_abandoned(
    store: ObjectStore,
    listing: JobListing,
    summaries: Sequence[JobSummary],
    answers: Sequence[JobAnswer],
    on_progress: OnProgress = no_progress,
) -> tuple[dict[str, AbandonedPrefix], list[StorageError]]:
    """Return the dead jobs and the remains of jobs by path, and why prefixes cannot be listed.

    The proofs are those of gc, which judges again before it deletes. A living job is not listed,
    nor more of a directory than the first name that neither Arroyo nor this package creates.

    Args:
        summaries: the jobs of the listing; `answers` the status of each.
    """
    dead: dict[StatePath, tuple[str, str]] = {}
    for job, answer in zip(summaries, answers, strict=True):
        if job.listed and (proof := _why_dead(store, job, answer, answers)) is not None:
            dead[job.paths.root] = proof
    others_below = prefixes_without_job(listing.levels, listing.jobs)
    unowned = [path for path in others_below if path not in listing.unreadable]
    count = counter(on_progress, "listed prefixes", len(dead) + len(unowned), ProgressUnit.PREFIXES)

    def judge(path: StatePath) -> AbandonedPrefix | StorageError | None:
        try:
            return _judge(store, path, dead.get(path))
        except StorageError as error:
            return error
        finally:
            count()

    judged = list(concurrently(judge, [*dead, *unowned]))
    return (
        {prefix.path: prefix for prefix in judged if isinstance(prefix, AbandonedPrefix)},
        [error for error in judged if isinstance(error, StorageError)],
    )


def _why_dead(
    store: ObjectStore, job: JobSummary, answer: JobAnswer, answers: Sequence[JobAnswer]
) -> tuple[str, str] | None:
    """Return the proof that a job is dead, and the command; None without a source of status."""
    if not answer.answers and answer.facts.condition is not JobCondition.GONE:
        return None
    others = [other for other in answers if other.paths != job.paths]
    managed = job.newest is not None and job.newest.progress is not None
    why = why_abandoned(job.paths, answer, others, managed=managed)
    if why is None:
        return None
    from arroyo_dagster.state.operations.gc.roots import newest_root

    readable = True
    try:
        newest_root(store, job.paths)
    except ArroyoStateError:
        readable = False
    return why, removal_command(job.paths, readable=readable)


def _judge(
    store: ObjectStore, path: StatePath, proof: tuple[str, str] | None
) -> AbandonedPrefix | None:
    """Add up a dead job, of which there is a proof, or judge a directory that is no job.

    The latter is judged by the names and times of its objects. What was written within the grace
    period may belong to a job that starts now. Objects that only this package keeps are the records
    of a removed job, for example its journal.
    """
    from arroyo_dagster.state.model.garbage import GRACE_MICROS

    objects = size_bytes = last_write = 0
    only_ours, grace = True, wall_clock() - GRACE_MICROS
    for info in store.list(path):
        modified = info.modified_micros or 0
        if proof is None:
            kind = kind_of_remains(info.path) if info.addressable else ObjectKind.FOREIGN
            if kind is ObjectKind.FOREIGN or not 0 < modified <= grace:
                return None
            only_ours &= kind is ObjectKind.MAINTENANCE
        objects += 1
        size_bytes += info.size_bytes
        last_write = max(last_write, modified)
    if proof is None and only_ours:
        return None
    why, next_step = proof or (REMAINS, CHECK_FIRST)
    return AbandonedPrefix(
        path=path,
        why=why,
        next_step=next_step,
        objects=objects,
        size_bytes=size_bytes,
        last_write_micros=last_write or None,
    )
