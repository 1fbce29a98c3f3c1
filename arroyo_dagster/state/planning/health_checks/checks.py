"""All health checks: their names, what each expects, and the verdicts over the jobs of a fleet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from arroyo_dagster.state.model.health import HealthLimits
from arroyo_dagster.state.planning.health_checks import epochs, storage, tables
from arroyo_dagster.state.planning.health_checks.facts import Found, HealthFacts
from arroyo_dagster.state.planning.verify.findings import Severity, Verdict, error
from arroyo_dagster.state.planning.verify.fleet import (
    NOT_JUDGED,
    FleetVerdict,
    JobAge,
    JobLine,
    by_urgency,
    job_line,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheck:
    """A check that the catalogue and the newest epoch of a job suffice for.

    Attributes:
        expects: what a passing check means, as one sentence.
        judge: returns the findings on one job; None if its facts do not suffice.
        example: the evidence of a finding.
        limits: the fields of `HealthLimits` that it obeys.
        severity: of its worst findings.
    """

    name: str
    expects: str
    judge: Callable[[HealthFacts, HealthLimits], Found]
    example: str
    limits: tuple[str, ...] = ()
    severity: Severity = Severity.WARNING


HEALTH_CHECKS = (
    HealthCheck(
        name="newest_epoch_readable",
        expects="Every job's newest epoch, pins and catalogue can be read.",
        judge=epochs.newest_epoch_readable,
        example="it does not decode",
        severity=Severity.ERROR,
    ),
    HealthCheck(
        name="epochs_on_time",
        expects="No running job's next epoch is overdue by its usual interval.",
        judge=epochs.epochs_on_time,
        example="epoch 30 is 6 min old; usually there is one every 1 min",
        limits=("overdue_intervals", "overdue_micros"),
    ),
    HealthCheck(
        name="watermark_advances",
        expects="No running job's watermark stands still or falls further behind than usual.",
        judge=epochs.watermark_advances,
        example="its watermark has not moved for 30 epochs, 29 min",
        limits=("stalled_micros", "unusual_factor"),
    ),
    HealthCheck(
        name="no_epoch_missing",
        expects="No epoch is missing between two that are present, apart from pinned ones.",
        judge=epochs.no_epoch_missing,
        example="missing between epochs that are present: 7 to 8",
    ),
    HealthCheck(
        name="durations_usual",
        expects="No job's latest checkpoints all took much longer than usual.",
        judge=epochs.durations_usual,
        example="each of its last 3 checkpoints took 20 s or more; usually 1 s",
        limits=("slow_micros", "unusual_factor"),
    ),
    HealthCheck(
        name="commits_finish",
        expects="No newest epoch waits for its commit for long.",
        judge=epochs.commits_finish,
        example="epoch 30 has been committing for 11 min",
        limits=("commit_micros",),
    ),
    HealthCheck(
        name="sizes_usual",
        expects="No table is much larger than at every epoch before.",
        judge=tables.sizes_usual,
        example="table sum.t has 419.4 MB; at the 29 epochs before at most 104.9 MB",
        limits=("small_table_bytes", "unusual_factor"),
    ),
    HealthCheck(
        name="row_counts_usual",
        expects="No table has much fewer rows than at every epoch before.",
        judge=tables.row_counts_usual,
        example="table sum.t has 20000 rows; at the 29 epochs before at least 80000",
        limits=("small_table_rows", "unusual_factor"),
    ),
    HealthCheck(
        name="file_counts_low",
        expects="No table of a newest epoch has too many files.",
        judge=tables.file_counts_low,
        example="table sum.t has 501 files; expected at most 500",
        limits=("files",),
    ),
    HealthCheck(
        name="file_sizes_useful",
        expects="No table with many files consists of small ones.",
        judge=tables.file_sizes_useful,
        example="60 of 60 files of table sum.t are smaller than 1.0 MB",
        limits=("small_file_bytes", "small_file_percent"),
    ),
    HealthCheck(
        name="routing_keys_balanced",
        expects="No subtask holds far more rows of a table than the others.",
        judge=tables.routing_keys_balanced,
        example="subtask 0 of sum holds 200000 rows of table t; the other 3 hold 20000 on average",
        limits=("skew", "small_table_rows"),
    ),
    HealthCheck(
        name="columns_unchanged",
        expects="All files of a table have the same columns.",
        judge=tables.columns_unchanged,
        example="files of table sum.t have 2 different lists of columns; oldest: k: int32; newest: "
        "k: int64",
    ),
    HealthCheck(
        name="retention_kept",
        expects="Few bytes of each table are past its retention.",
        judge=tables.retention_kept,
        example="78.6 MB of 104.9 MB of table sum.t are past its retention of 1 d",
        limits=("expired_percent", "small_table_bytes"),
    ),
    HealthCheck(
        name="timestamps_plausible",
        expects="No table has event times in the future.",
        judge=tables.timestamps_plausible,
        example="1 files of table sum.t have event times up to 3 d ahead of epoch 30",
        limits=("future_micros",),
    ),
    HealthCheck(
        name="read_amplification_low",
        expects="A restore reads each byte of a table in few subtasks.",
        judge=storage.reads_once,
        example="a restore reads 419.4 MB of table sum.t, which has 104.9 MB: its files overlap "
        "the key ranges of many subtasks",
        limits=("read_amplification", "small_table_bytes"),
    ),
    HealthCheck(
        name="write_amplification_low",
        expects="No job writes most of its state again with every epoch.",
        judge=storage.writes_changes_only,
        example="each epoch writes 90% of the state of 104.9 MB again",
        limits=("small_table_bytes", "write_percent"),
    ),
    HealthCheck(
        name="space_amplification_low",
        expects="No job stores many times the bytes of its newest epoch.",
        judge=storage.stores_little_more,
        example="its 30 epochs list 2.1 GB; the newest one 104.9 MB",
        limits=("small_table_bytes", "space_amplification"),
    ),
    HealthCheck(
        name="epochs_expire",
        expects="No job has very many unpinned epochs.",
        judge=storage.epochs_expire,
        example="has 1001 unpinned epochs; expected at most 1000",
        limits=("epochs",),
    ),
    HealthCheck(
        name="pins_small",
        expects="No pin is old, and pins and quarantines keep few bytes.",
        judge=storage.pins_small,
        example="11.8 GB are listed by pinned epochs only",
        limits=("pin_micros", "pinned_bytes"),
    ),
    HealthCheck(
        name="journal_complete",
        expects="No record of a run of gc is missing, was changed, or cannot be read.",
        judge=storage.journal_complete,
        example="this run is missing: 01764328872000000-5d41402abc4b follows it",
    ),
)
"""The checks that read no data file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHealth:
    """The results of all health checks of one job.

    Attributes:
        job: the root of its paths.
        verdicts: by the name of the check, without notes; None where the facts do not suffice.
        stored_bytes: the size of all files that its present epochs list.
        quarantined_bytes: the size of what was moved to quarantine.
    """

    job: str
    epoch: int | None
    at_micros: int
    verdicts: Mapping[str, Verdict | None]
    stored_bytes: int = 0
    quarantined_bytes: int = 0


def judge_job(facts: HealthFacts, limits: HealthLimits) -> JobHealth:
    """Apply all health checks to one job."""
    return JobHealth(
        job=facts.job,
        epoch=facts.age.epoch,
        at_micros=facts.now_micros,
        verdicts={check.name: _verdict(check.judge(facts, limits)) for check in HEALTH_CHECKS},
        stored_bytes=facts.stored_bytes,
        quarantined_bytes=facts.quarantined_bytes,
    )


def not_judged(age: JobAge, now_micros: int, problem: str) -> JobHealth:
    """Return the results of a job whose catalogue or pins cannot be read."""
    step = "verify the job with `arroyo-state verify`; if its catalogue is damaged, delete its rows"
    found = Verdict(findings=(error("health-unknown", age.job, problem, step),))
    verdicts: dict[str, Verdict | None] = dict.fromkeys(check.name for check in HEALTH_CHECKS)
    verdicts[HEALTH_CHECKS[0].name] = found
    return JobHealth(job=age.job, epoch=age.epoch, at_micros=now_micros, verdicts=verdicts)


def _verdict(found: Found) -> Verdict | None:
    if found is None:
        return None
    return Verdict(findings=tuple(f for f in found if f.severity is not Severity.NOTE))


def fleet_verdict(check: str, jobs: Iterable[JobHealth]) -> FleetVerdict:
    """Return the results of one check for all jobs, those with findings first."""
    lines = []
    for one in jobs:
        verdict, epoch, at = one.verdicts[check], one.epoch, one.at_micros
        lines.append(
            JobLine(job=one.job, label=NOT_JUDGED, epoch=epoch, at_micros=at)
            if verdict is None
            else job_line(one.job, verdict, epoch=epoch, at_micros=at)
        )
    return FleetVerdict(lines=tuple(sorted(lines, key=by_urgency)))
