"""Checks over all jobs: each shows the last verdict of every job, and the jobs that vanished.

The fleet job evaluates them, and every refresh evaluates them again at its end, so that the run of
one healthy job never hides a problem of another.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import dagster as dg
from dagster._core.definitions.asset_checks.asset_check_evaluation import (
    AssetCheckEvaluationTargetMaterializationData,
)

from arroyo_dagster.errors import InputError, NotFoundError
from arroyo_dagster.orchestration.catalog.checks import (
    EVERY_JOB_CHECKS,
    EVERY_JOB_RECENT,
    RECENT,
    check_result,
)
from arroyo_dagster.orchestration.directory import ArroyoDirectory
from arroyo_dagster.orchestration.partitions import known_keys
from arroyo_dagster.orchestration.rendering import TABLE_ROWS, table, time_of_day
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.translator import CHECKPOINT, FLEET, Naming
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.health import HealthLimits
from arroyo_dagster.state.model.job_facts import JobCondition
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.settings import find_setting
from arroyo_dagster.state.model.verify import AuditSettings
from arroyo_dagster.state.planning.rules import Rule
from arroyo_dagster.state.planning.verify import fleet as fleet_health
from arroyo_dagster.state.planning.verify.findings import Finding
from arroyo_dagster.state.planning.verify.fleet import (
    FleetVerdict,
    GoneJob,
    JobAge,
    JobLine,
)

if TYPE_CHECKING:
    from arroyo_dagster.state.operations.catalog.jobs import JobListing
    from arroyo_dagster.state.storage.store import ObjectStore


@dataclass(frozen=True)
class FleetFacts:
    """The jobs that exist, and those that existed.

    Attributes:
        unreadable: directories that cannot be listed, each as a job with a `problem`.
        gone: jobs that vanished and that no user has acknowledged as gone.
        root: what is wrong with the root; None = nothing.
    """

    present: tuple[JobPaths, ...]
    unreadable: tuple[JobAge, ...]
    gone: tuple[GoneJob, ...]
    root: Finding | None


class Fleet:
    """All jobs of a deployment, as input of its checks.

    Args:
        recent: the maximum age of the newest epoch of a job that is not at rest.
    """

    def __init__(
        self,
        naming: Naming,
        instance: dg.DagsterInstance,
        store: ArroyoStateStore,
        directory: ArroyoDirectory,
        recent: timedelta = RECENT,
    ) -> None:
        self._naming = naming
        self._instance = instance
        self._store = store
        self._directory = directory
        self._recent = recent

    def results(
        self, names: Collection[str], facts: FleetFacts | None = None
    ) -> Iterator[dg.AssetCheckResult]:
        """Evaluate checks, by their names.

        Args:
            facts: as `facts()` returns them; gathered here by default.

        Raises:
            StorageError: a store failed.
        """
        facts = facts or self.facts()
        for name in names:
            yield _as_result(self._verdict(name, facts), name, self._naming.key(FLEET))

    def report(self, names: Collection[str]) -> None:
        """Evaluate checks and record them with the instance. Errors as `results`."""
        results = list(self.results(names))
        target = self._newest_overview()
        for result in results:
            self._instance.report_runless_asset_event(
                dg.AssetCheckEvaluation(
                    asset_key=self._naming.key(FLEET),
                    check_name=str(result.check_name),
                    passed=result.passed,
                    severity=result.severity,
                    description=result.description,
                    metadata=result.metadata,
                    target_materialization_data=target,
                )
            )

    def _newest_overview(self) -> AssetCheckEvaluationTargetMaterializationData | None:
        """What the checks are of. Dagster shows only those of the newest materialisation of their
        asset, and would else compare times, which SQLite keeps in seconds."""
        found = self._instance.fetch_materializations(self._naming.key(FLEET), limit=1).records
        if not found:
            return None
        return AssetCheckEvaluationTargetMaterializationData(
            storage_id=found[0].storage_id,
            run_id=found[0].event_log_entry.run_id,
            timestamp=found[0].timestamp,
        )

    def _verdict(self, name: str, facts: FleetFacts) -> FleetVerdict:
        if name == EVERY_JOB_RECENT:
            return self._recency(facts)
        return self._last_verdicts(EVERY_JOB_CHECKS[name], facts)

    def _last_verdicts(self, kind: str, facts: FleetFacts) -> FleetVerdict:
        from arroyo_dagster.state.operations.catalog.verdicts import read_verdicts

        found = read_verdicts(self._store.catalogue(), kind, facts.present)
        checked = {one.job: one for one in found.values()}
        jobs = [str(paths.root) for paths in facts.present]
        return fleet_health.every_job_checked(
            jobs,
            checked,
            facts.gone,
            root=facts.root,
            forget=self._naming.name("arroyo_forget_job"),
            refresh=self._naming.name("arroyo_refresh"),
        )

    def _recency(self, facts: FleetFacts) -> FleetVerdict:
        return fleet_health.fleet_recent(
            [*self.ages(facts.present), *facts.unreadable],
            facts.gone,
            root=facts.root,
            forget=self._naming.name("arroyo_forget_job"),
            now_micros=wall_clock(),
            limit_micros=int(self._recent.total_seconds() * 1_000_000),
        )

    def ages(self, jobs: Iterable[JobPaths]) -> list[JobAge]:
        """Return the age and status of each job, including the job directory's answer. Errors as
        `results`.
        """
        from arroyo_dagster.state.operations.catalog.footers import job_ages

        return job_ages(self._store.reading(), jobs, self._directory.directory(self._store))

    def broken(self, jobs: Iterable[JobPaths]) -> set[str]:
        """Return the roots of the jobs for which the last verdict of a check is an error."""
        from arroyo_dagster.state.operations.catalog.verdicts import read_verdicts

        wanted = list(jobs)
        found = (
            read_verdicts(self._store.catalogue(), kind, wanted)
            for kind in EVERY_JOB_CHECKS.values()
        )
        return {
            str(paths.root)
            for verdicts in found
            for paths, one in verdicts.items()
            if not one.verdict.passed
        }

    # ---- which jobs there are and were -----------------------------------------------------------

    def facts(self) -> FleetFacts:
        """Gather the jobs that exist and those that existed, and remember the new ones.

        Raises:
            StorageError: a store failed.
        """
        from arroyo_dagster.state.operations.catalog import known_jobs

        catalogue, reading = self._store.catalogue(), self._store.reading()
        layout = self._store.chosen_layout()
        # What is known comes first: a job that appears in between must not look vanished.
        catalogued = known_jobs.known_jobs(catalogue)
        keys = set(known_keys(self._instance, self._naming))
        known = {p for p in catalogued | keys if layout is None or p.layout is layout}
        acknowledged = known_jobs.forgotten(catalogue)
        listing, problem = self._listing()
        present = set() if listing is None else set(listing.jobs)
        now = wall_clock()
        known_jobs.remember(catalogue, [(p, None) for p in {*present, *keys} - catalogued], now)
        known_jobs.take_back(catalogue, acknowledged & present)
        expected = known - acknowledged
        gone = set() if problem else expected - present
        gone = {paths for paths in gone if listing is None or not listing.hides(paths)}
        gone -= known_jobs.removed_on_purpose(reading, gone)
        gone -= self._assumed_gone(gone)
        return FleetFacts(
            present=tuple(sorted(present, key=_root)),
            unreadable=tuple(
                JobAge(job=path, problem=str(error))
                for path, error in ({} if listing is None else listing.unreadable).items()
            ),
            gone=tuple(
                GoneJob(job=str(paths.root), epoch=self._last_epoch(catalogue, paths))
                for paths in sorted(gone, key=_root)
            ),
            root=fleet_health.root_finding(
                reading.url, len(expected if problem else gone), problem, len(present)
            ),
        )

    def _listing(self) -> "tuple[JobListing | None, str | None]":
        """The jobs there are, or why the root holds none."""
        try:
            return self._store.listing(), None
        except (NotFoundError, InputError) as error:
            return None, error.message

    def _assumed_gone(self, jobs: Collection[JobPaths]) -> set[JobPaths]:
        """Those of the jobs of which the user's own word says that they are gone."""
        if not jobs:
            return set()
        answers = self._directory.directory(self._store).look_up(list(jobs))
        return {one.paths for one in answers if one.facts.condition is JobCondition.GONE}

    def _last_epoch(self, catalogue: "ObjectStore", paths: JobPaths) -> int | None:
        """The last epoch of a job that the catalogue or an event of the sensor knows of."""
        from arroyo_dagster.state.operations.catalog.known_jobs import last_epoch

        found = self._instance.fetch_materializations(
            dg.AssetRecordsFilter(self._naming.key(CHECKPOINT), asset_partitions=[paths.root]),
            limit=1,
        )
        events = [record.asset_materialization for record in found.records]
        told = [one.metadata.get("arroyo/epoch") for one in events if one is not None]
        epochs = [one.value for one in told if isinstance(one, dg.IntMetadataValue)]
        epochs.append(last_epoch(catalogue, paths))
        return max((one for one in epochs if one is not None), default=None)


def _root(paths: JobPaths) -> str:
    return paths.root


# ---- as Dagster shows it -------------------------------------------------------------------------


def fleet_check_result(
    found: FleetVerdict,
    name: str,
    asset: dg.AssetKey,
    *,
    when: str = "checked at",
    metadata: Mapping[str, Any] | None = None,
) -> dg.AssetCheckResult:
    """Return the result of one check over all jobs; it passes without a finding.

    Args:
        when: what the times of the jobs are.
        metadata: additional metadata.
    """
    verdict = found.verdict
    return check_result(
        verdict,
        name,
        asset,
        passed=not verdict.findings,
        description=str(found),
        metadata={
            "arroyo/jobs_passed": found.passed,
            "arroyo/jobs_not_judged": found.not_judged or None,
            **(metadata or {}),
            "arroyo/found": None,  # what is said of the offenders
            "offenders": _offenders(found),
            "jobs": table(_line(one, when) for one in found.lines),
        },
    )


def judged_check_spec(
    check: Rule,
    naming: Naming,
    table: str,
    settings: HealthLimits | AuditSettings,
) -> dg.AssetCheckSpec:
    """Return the spec of a check that shows one rule for all jobs: what it expects, its
    limits in the units of users, the severity of its worst findings, and the text of a finding."""
    fields = (find_setting(type(settings), name) for name in check.limits)
    limits = {one.config: one.in_units(getattr(settings, one.name)) for one in fields}
    listed = ", ".join(f"`{name}: {value:g}`" for name, value in limits.items())
    severity = f"{check.severity.value} at worst"
    details = [
        f"Found from level {check.level} on" if check.level else "",
        f"Limits: {listed}" if listed else "",
        f"Severity: {severity}",
        f"Example: `{check.example}`",
    ]
    return naming.check_spec(
        check.name,
        table,
        check.expects,
        details=[*filter(None, details)],
        metadata={
            **{f"arroyo/{name}": value for name, value in limits.items()},
            "severity": severity,
            "example": check.example,
        },
    )


def _as_result(found: FleetVerdict, name: str, asset: dg.AssetKey) -> dg.AssetCheckResult:
    vanished = sum(line.label == "vanished" for line in found.lines)
    return fleet_check_result(
        found,
        name,
        asset,
        when="epoch finished at" if name == EVERY_JOB_RECENT else "checked at",
        metadata={"arroyo/jobs_vanished": vanished},
    )


def _line(line: JobLine, when: str) -> dict[str, Any]:
    """A row. Few and short columns: Dagster makes the page as wide as the table, and the
    description above it as wide as the page."""
    return {
        "job": line.job,
        "verdict": line.label,
        "epoch": line.epoch,
        when: time_of_day(line.at_micros),
    }


def _offenders(found: FleetVerdict) -> Any:
    """Of up to 50 jobs what was found, and what to do; None for none."""
    told = [
        f"- **{line.job}** ({line.label}): {line.finding}" for line in found.offenders[:TABLE_ROWS]
    ]
    return dg.MetadataValue.md("\n".join(told)) if told else None


def fleet_check_specs(naming: Naming, recent: timedelta = RECENT) -> list[dg.AssetCheckSpec]:
    """Return the checks over all jobs: the last verdict of each, and whether each wrote an epoch
    recently.

    A vanished job fails all of them until a user acknowledges that it is gone. They are checks of
    `fleet`: Dagster shows a check as not evaluated once its asset is newer, as `checkpoint` is
    after every tick of the sensor.
    """
    verdicts = [
        naming.check_spec(
            name, FLEET, f"No job vanished, and the last verdict of {kind} on each job is a pass."
        )
        for name, kind in EVERY_JOB_CHECKS.items()
    ]
    recency = (
        f"No job vanished, and every job that is not at rest wrote an epoch in the last {recent}."
    )
    return [*verdicts, naming.check_spec(EVERY_JOB_RECENT, FLEET, recency)]
