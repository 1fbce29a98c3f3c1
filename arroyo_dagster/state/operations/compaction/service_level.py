"""Propose the cheapest compaction that meets a service level, for each job. Reads only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.progress import OnProgress, ProgressUnit, no_progress
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.compaction.plan import compaction_facts
from arroyo_dagster.state.operations.compaction.rewrite import rewrite_planner
from arroyo_dagster.state.operations.compaction.rewrite_preconditions import is_arroyo_job
from arroyo_dagster.state.operations.progress import counter
from arroyo_dagster.state.planning.fleet.service_level import (
    DEFAULT_RATES,
    Planner,
    Proposal,
    RestoreRates,
    ServiceLevel,
    propose,
)
from arroyo_dagster.state.storage.store import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProposal:
    """The proposal for one job; None with the reason if it cannot be planned.

    Attributes:
        rates: those of the estimate, by the kind of the job.
    """

    paths: JobPaths
    rates: RestoreRates
    proposal: Proposal | None = None
    problem: ArroyoStateError | None = None


def propose_maintenance(
    store: ObjectStore,
    jobs: Sequence[JobPaths],
    level: ServiceLevel,
    directory: JobDirectory,
    rates: RestoreRates = DEFAULT_RATES,
    on_progress: OnProgress = no_progress,
) -> list[JobProposal]:
    """Propose for each job the cheapest compaction that meets a service level.

    A job that cannot be planned has a `problem` and does not stop the others. Sizes after a
    compaction are upper bounds: those of the inputs.

    Args:
        on_progress: called after each job.
    """
    found = []
    count = counter(on_progress, "planned jobs", len(jobs), ProgressUnit.JOBS)
    for paths in jobs:
        its = rates.of_job(managed=True)
        try:
            managed = not is_arroyo_job(store, paths)
            its = rates.of_job(managed=managed)
            plan: Planner = (
                compaction_facts(store, paths).plan
                if managed
                else rewrite_planner(store, paths, directory)
            )
            proposal = propose(plan, level, its)
        except ArroyoStateError as problem:
            found.append(JobProposal(paths=paths, rates=its, problem=problem))
        else:
            found.append(JobProposal(paths=paths, rates=its, proposal=proposal))
        count()
    return found
