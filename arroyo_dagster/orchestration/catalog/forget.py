"""The job that acknowledges that a vanished job is gone."""

from datetime import timedelta

import dagster as dg
from pydantic import Field

from arroyo_dagster.errors import NotFoundError
from arroyo_dagster.orchestration.catalog.checks import EVERY_JOB_CHECKS, EVERY_JOB_RECENT, RECENT
from arroyo_dagster.orchestration.catalog.fleet_checks import Fleet
from arroyo_dagster.orchestration.directory import ArroyoDirectory
from arroyo_dagster.orchestration.failures import as_failure
from arroyo_dagster.orchestration.partitions import known_keys
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.translator import Naming
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.layout import JobPaths


class ForgetConfig(dg.Config):
    """The job that is gone on purpose."""

    job: str = Field(description="The job that is gone, as `job` or `pipeline/job`.")


def build_forget_job(naming: Naming, *, recent: timedelta = RECENT) -> dg.JobDefinition:
    """Build the job that acknowledges a vanished job, drops its partition and evaluates the fleet
    checks.
    """

    @dg.op(
        name=naming.name("arroyo_forget_job_op"),
        description="Acknowledge that a vanished job is gone. Its history stays in the catalogue.",
    )
    @naming.bind
    def forget_job(
        context: dg.OpExecutionContext,
        config: ForgetConfig,
        arroyo_store: ArroyoStateStore,
        arroyo_directory: ArroyoDirectory,
    ) -> None:
        from arroyo_dagster.state.operations.catalog import known_jobs

        with as_failure():
            catalogue = arroyo_store.catalogue()
            paths = _find(context.instance, naming, arroyo_store, config.job)
            known_jobs.check_gone(arroyo_store.reading(), paths)
            epoch = known_jobs.forget(
                catalogue,
                paths,
                owner=f"dagster run {context.run_id}",
                now_micros=wall_clock(),
            )
            if paths in known_keys(context.instance, naming):
                context.instance.delete_dynamic_partition(str(naming.jobs.name), str(paths.root))
            context.log.info(f"{paths.root} is forgotten; its last epoch was {epoch}")
            fleet = Fleet(naming, context.instance, arroyo_store, arroyo_directory, recent)
            fleet.report([*EVERY_JOB_CHECKS, EVERY_JOB_RECENT])

    @dg.job(
        name=naming.name("arroyo_forget_job"),
        description="Acknowledge that a vanished job is gone, so that the checks over all jobs "
        "no longer fail because of it.",
        executor_def=dg.in_process_executor,
    )
    def arroyo_forget_job() -> None:
        forget_job()

    return arroyo_forget_job


def _find(
    instance: dg.DagsterInstance, naming: Naming, store: ArroyoStateStore, name: str
) -> JobPaths:
    from arroyo_dagster.state.operations.catalog.known_jobs import find_known_job

    try:
        return find_known_job(store.catalogue(), name)
    except NotFoundError:
        of_key = [paths for paths in known_keys(instance, naming) if paths.root == name]
        if not of_key:
            raise
        return of_key[0]
