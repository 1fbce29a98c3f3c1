"""Jobs as dynamic partitions: their keys, and the synchronization with existing jobs.

A key is the root of a job's paths: `job` in the legacy layout, `pipeline/job` in the protocol
layout. Epochs are never partitions.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import dagster as dg

from arroyo_dagster.errors import InputError, ProtocolError
from arroyo_dagster.orchestration.failures import as_failure
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.translator import Naming, deployment_identifier
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.ids import JobId, PipelineId, path_error
from arroyo_dagster.state.model.layout import JobPaths

ALWAYS_MAY_DROP = 5
MAY_DROP_ONE_OF = 10
# What Dagster's command line and multi-dimensional partitions read as something else.
_SEPARATORS = {"...": "a range", "|": "several dimensions", "\n": "the next line"}


def jobs_partitions(deployment: str | None = None) -> dg.DynamicPartitionsDefinition:
    """Return the partitions of a deployment. Their name is global to a Dagster instance."""
    if deployment is None:
        return dg.DynamicPartitionsDefinition(name="arroyo_jobs")
    return dg.DynamicPartitionsDefinition(name=f"arroyo_{deployment_identifier(deployment)}_jobs")


def key_error(key: str) -> str | None:
    """Return why a job's root cannot be a partition key; None if it can."""
    meaning = next((kind for mark, kind in _SEPARATORS.items() if mark in key), None)
    if meaning is not None:
        return f"Dagster would read it as {meaning}"
    if any(ord(letter) < 32 for letter in key):
        return "it holds a control character"
    return path_error(key)


def usable_keys(keys: Iterable[str]) -> list[str]:
    """Return those of `keys` that may be partition keys, in order."""
    return sorted(key for key in keys if key_error(key) is None)


def job_of(key: str) -> JobPaths:
    """Return the job of a partition key.

    Raises:
        InputError: it is no job's root.
    """
    problem = key_error(key)
    if problem is not None:
        raise _no_job(problem, key)
    return job_at(key)


def job_at(root: str) -> JobPaths:
    """Return the job with this root, which need not be usable as a partition key.

    Raises:
        InputError: it is no job's root.
    """
    problem = path_error(root) or ("it has more than two parts" if root.count("/") > 1 else None)
    if problem is not None:
        raise _no_job(problem, root)
    pipeline, _, job = root.rpartition("/")
    return JobPaths(JobId(job), PipelineId(pipeline) if pipeline else None)


def _no_job(problem: str, name: str) -> InputError:
    return InputError(
        f"not the key of a job: {problem}",
        partition=name,
        next_step="use `job`, or `pipeline/job`, as `arroyo-state jobs` prints them",
    )


def known_keys(instance: dg.DagsterInstance, naming: Naming) -> list[JobPaths]:
    """Return the jobs that have a partition; a key that is no job's root is left out."""
    keys = usable_keys(instance.get_dynamic_partitions(_name(naming)))
    return [job_of(key) for key in keys if key.count("/") <= 1]


# ---- keeping them in step ------------------------------------------------------------------------


@dataclass(frozen=True)
class SyncPlan:
    """Which keys to add and which to drop, in order."""

    add: tuple[str, ...]
    drop: tuple[str, ...]


def plan_sync(
    have: Collection[str], want: Collection[str], forget_job: str = "arroyo_forget_job"
) -> SyncPlan:
    """Choose the keys to add and to drop.

    Args:
        forget_job: the Dagster job that acknowledges that a job is gone.

    Raises:
        ProtocolError: more than a tenth of the keys, and more than five, would be dropped, which
            indicates an outage or a wrong prefix.
    """
    usable = usable_keys(want)
    plan = SyncPlan(tuple(sorted({*usable} - {*have})), tuple(sorted({*have} - {*usable})))
    if len(plan.drop) > max(ALWAYS_MAY_DROP, len(have) // MAY_DROP_ONE_OF):
        raise ProtocolError(
            f"{len(plan.drop)} of {len(have)} partition keys would be dropped, which indicates "
            "an outage or a wrong URL; none was dropped",
            first=plan.drop[0],
            next_step="check the checkpoint URL; if the jobs are really gone, acknowledge each "
            f"with the job {forget_job}, which deletes its key",
        )
    return plan


def build_sync_job(naming: Naming) -> dg.JobDefinition:
    """Build a job that adds the keys of new jobs and drops those of jobs that are gone."""

    @dg.op(
        name=naming.name("arroyo_sync_partitions_op"),
        description="Add partition keys of new jobs, drop those of jobs that are gone.",
    )
    @naming.bind
    def sync_partitions(context: dg.OpExecutionContext, arroyo_store: ArroyoStateStore) -> None:
        from arroyo_dagster.state.operations.catalog import known_jobs

        with as_failure():
            listing = arroyo_store.listing()
            have = context.instance.get_dynamic_partitions(_name(naming))
            want: list[str] = [job.root for job in listing.jobs]
            # A job in a directory that cannot be listed is not gone.
            want += [key for key in usable_keys(have) if listing.hides(job_of(key))]
            plan = plan_sync(have, want, naming.name("arroyo_forget_job"))
            # A job without a key is still missed, until somebody acknowledges that it is gone.
            catalogue, gone = arroyo_store.catalogue(), map(job_of, usable_keys(plan.drop))
            new = set(gone) - known_jobs.known_jobs(catalogue)
            known_jobs.remember(catalogue, [(paths, None) for paths in new], wall_clock())
        context.instance.add_dynamic_partitions(_name(naming), list(plan.add))
        for key in plan.drop:
            context.instance.delete_dynamic_partition(_name(naming), key)
        context.log.info(f"{len(plan.add)} jobs added, {len(plan.drop)} dropped")

    @dg.job(
        name=naming.name("arroyo_sync_partitions"),
        description="Add partition keys of new jobs, drop those of jobs that are gone.",
        executor_def=dg.in_process_executor,
    )
    def arroyo_sync_partitions() -> None:
        sync_partitions()

    return arroyo_sync_partitions


def _name(naming: Naming) -> str:
    assert naming.jobs.name is not None
    return naming.jobs.name
