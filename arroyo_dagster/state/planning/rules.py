"""The registry of rules: every finding about a job, its kind, and the depth that finds it.

`verify` shows the findings of one job by their codes. `health` shows those of all jobs by the ten
kinds: what a person acts on. This module reads nothing; `health_checks` and `verify` hold the
conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from arroyo_dagster.state.model.health import EpochFigures, HealthLimits
from arroyo_dagster.state.planning.health_checks import checks
from arroyo_dagster.state.planning.health_checks.facts import Found, HealthFacts
from arroyo_dagster.state.planning.verify.findings import (
    Finding,
    Severity,
    Verdict,
    error,
    merged,
    warning,
)
from arroyo_dagster.state.planning.verify.fleet import (
    NOT_JUDGED,
    CheckedJob,
    JobAge,
    JobLine,
    by_urgency,
    job_line,
)

KINDS: Mapping[str, str] = {
    "unreadable": "Each job's newest epoch and pins can be read.",
    "not-restorable": "A restore of each job's newest epoch loads every row that was written.",
    "damaged": "No older epoch is missing or incomplete, and the journal of gc is complete.",
    "late": "Epochs, commits and watermarks come as often as expected.",
    "contended": "One generation writes each job, and few attempts are left behind.",
    "unusual": "No table's size, rows, columns or event times are unusual.",
    "skewed": "No subtask or key has far more rows of a table than the others.",
    "read-amplification": "A restore reads few files, and each byte in few subtasks.",
    "write-amplification": "No job writes most of its state again with every epoch.",
    "space-amplification": "Few bytes are stored that no restore of the newest epoch needs.",
}
"""The kinds of finding that `health` shows, and what a job without them is like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What is expected of each job, and which findings say that a job is otherwise.

    Attributes:
        name: of the check in Dagster.
        kind: one of `KINDS`.
        codes: of its findings; each code has one rule.
        expects: what a job without findings is like, as one sentence.
        example: the evidence of a finding.
        level: the least level of verification that finds them; None = metadata and footers
            suffice.
        judge: returns the findings on one job, or why its facts do not suffice; None if a
            verification finds them.
        limits: the fields of `HealthLimits`, or with a level of `AuditSettings`, that it obeys.
        severity: of its worst findings.
    """

    name: str
    kind: str
    codes: frozenset[str]
    expects: str
    example: str
    level: int | None = None
    judge: Callable[[HealthFacts, HealthLimits], Found] | None = None
    limits: tuple[str, ...] = ()
    severity: Severity = Severity.WARNING


def _codes(text: str) -> frozenset[str]:
    return frozenset(text.split())


REACHED = "verified_within_budget"
"""The rule of the jobs that a verification of many did not reach."""

RULES = (
    Rule(
        name="newest_epoch_readable",
        kind="unreadable",
        codes=_codes("newest-epoch-unreadable health-unknown"),
        expects="Every job's newest epoch and pins can be read.",
        judge=checks.newest_epoch_readable,
        example="it does not decode",
        severity=Severity.ERROR,
    ),
    Rule(
        name="epochs_on_time",
        kind="late",
        codes=_codes("epoch-overdue job-failed job-stands-still"),
        expects="No job failed, and no running job's next epoch is overdue by its usual interval.",
        judge=checks.epochs_on_time,
        example="epoch 30 is 24 min old; usually there is one every 4 min",
        limits=("overdue_intervals", "overdue_micros"),
    ),
    Rule(
        name="watermark_advances",
        kind="late",
        codes=_codes("watermark-stalled watermark-behind"),
        expects="No running job's watermark stands still or falls further behind than usual.",
        judge=checks.watermark_advances,
        example="its watermark has not moved for 30 epochs, 1.9 h",
        limits=("stalled_micros", "unusual_factor"),
    ),
    Rule(
        name="no_epoch_missing",
        kind="damaged",
        codes=_codes("epoch-gap"),
        expects="No epoch is missing between two that are present, apart from pinned ones.",
        judge=checks.no_epoch_missing,
        example="missing between epochs that are present: 7 to 8",
    ),
    Rule(
        name="journal_complete",
        kind="damaged",
        codes=_codes("journal-changed journal-unreadable"),
        expects="No record of a run of gc is missing, was changed, or cannot be read.",
        judge=checks.journal_complete,
        example="this run is missing: 01764328872000000-5d41402abc4b follows it",
    ),
    Rule(
        name="durations_usual",
        kind="late",
        codes=_codes("checkpoint-slow"),
        expects="No job's latest checkpoints all took much longer than usual.",
        judge=checks.durations_usual,
        example="each of its last 3 checkpoints took 20 s or more; usually 1 s",
        limits=("slow_micros", "unusual_factor"),
    ),
    Rule(
        name="commits_finish",
        kind="late",
        codes=_codes("commit-overdue"),
        expects="No newest epoch waits for its commit for long.",
        judge=checks.commits_finish,
        example="epoch 30 has been committing for 11 min",
        limits=("commit_micros",),
    ),
    Rule(
        name="sizes_usual",
        kind="unusual",
        codes=_codes("table-grows"),
        expects="No table is much larger than at every epoch before.",
        judge=checks.sizes_usual,
        example="table sum.t has 419.4 MB; at the 29 epochs before at most 104.9 MB",
        limits=("small_table_bytes", "unusual_factor"),
    ),
    Rule(
        name="row_counts_usual",
        kind="unusual",
        codes=_codes("rows-dropped"),
        expects="No table has much fewer rows than at every epoch before.",
        judge=checks.row_counts_usual,
        example="table sum.t has 20000 rows; at the 29 epochs before at least 80000",
        limits=("small_table_rows", "unusual_factor"),
    ),
    Rule(
        name="file_counts_low",
        kind="read-amplification",
        codes=_codes("too-many-files"),
        expects="No table of a newest epoch has too many files.",
        judge=checks.file_counts_low,
        example="table sum.t has 501 files; expected at most 500",
        limits=("files",),
    ),
    Rule(
        name="file_sizes_useful",
        kind="read-amplification",
        codes=_codes("small-files"),
        expects="No table with many files consists of small ones.",
        judge=checks.file_sizes_useful,
        example="60 of 60 files of table sum.t are smaller than 1.0 MB",
        limits=("small_file_bytes", "small_file_percent"),
    ),
    Rule(
        name="routing_keys_balanced",
        kind="skewed",
        codes=_codes("routing-keys-skewed"),
        expects="No subtask holds far more rows of a table than the others.",
        judge=checks.routing_keys_balanced,
        example="subtask 0 of sum holds 200000 rows of table t; the other 3 hold 20000 on average",
        limits=("skew", "small_table_rows"),
    ),
    Rule(
        name="columns_unchanged",
        kind="unusual",
        codes=_codes("columns-changed"),
        expects="All files of a table have the same columns.",
        judge=checks.columns_unchanged,
        example="files of table sum.t have 2 different lists of columns; oldest: k: int32; newest: "
        "k: int64",
    ),
    Rule(
        name="retention_kept",
        kind="space-amplification",
        codes=_codes("rows-past-retention"),
        expects="Few bytes of each table are past its retention.",
        judge=checks.retention_kept,
        example="78.6 MB of 104.9 MB of table sum.t are past its retention of 1 d",
        limits=("expired_percent", "small_table_bytes"),
    ),
    Rule(
        name="timestamps_plausible",
        kind="unusual",
        codes=_codes("timestamps-in-future"),
        expects="No table has event times in the future.",
        judge=checks.timestamps_plausible,
        example="1 files of table sum.t have event times up to 3 d ahead of epoch 30",
        limits=("future_micros",),
    ),
    Rule(
        name="read_amplification_low",
        kind="read-amplification",
        codes=_codes("read-amplification"),
        expects="A restore reads each byte of a table in few subtasks.",
        judge=checks.reads_once,
        example="a restore reads 419.4 MB of table sum.t, which has 104.9 MB: its files overlap "
        "the key ranges of many subtasks",
        limits=("read_amplification", "small_table_bytes"),
    ),
    Rule(
        name="write_amplification_low",
        kind="write-amplification",
        codes=_codes("write-amplification"),
        expects="No job writes most of its state again with every epoch.",
        judge=checks.writes_changes_only,
        example="each epoch writes 90% of the state of 104.9 MB again",
        limits=("small_table_bytes", "write_percent"),
    ),
    Rule(
        name="space_amplification_low",
        kind="space-amplification",
        codes=_codes("space-amplification"),
        expects="No job stores many times the bytes of its newest epoch.",
        judge=checks.stores_little_more,
        example="its 30 epochs store 2.1 GB; the newest one lists 104.9 MB",
        limits=("small_table_bytes", "space_amplification"),
    ),
    Rule(
        name="epochs_expire",
        kind="space-amplification",
        codes=_codes("gc-behind"),
        expects="No job has very many unpinned epochs.",
        judge=checks.epochs_expire,
        example="has 1001 unpinned epochs; expected at most 1000",
        limits=("epochs",),
    ),
    Rule(
        name="pins_small",
        kind="space-amplification",
        codes=_codes("pins-large pin-old"),
        expects="No pin is old, and pins and quarantines keep few bytes.",
        judge=checks.pins_small,
        example="11.8 GB are listed by pinned epochs only",
        limits=("pin_micros", "pinned_bytes"),
    ),
    Rule(
        name="restore_dry_run",
        kind="not-restorable",
        expects="A restore of each job's newest epoch was simulated and loads every row.",
        codes=_codes(
            "file-missing file-empty file-broken file-listed-twice file-elsewhere file-lost "
            "file-doubled columns-differ position-absurd position-backwards compaction-unreadable "
            "compaction-outputs-gone edit-unfinished epoch-rebuilt "
            "record-unreadable key-written-twice rows-not-opened unkeyed-aggregate "
            "operator-without-subtasks operator-vanished time-before-1970 metadata-only no-epoch "
            "not-restorable-state epoch-not-verified cleanup-trap"
        ),
        example="listed by table sum.t, but does not exist",
        limits=("level",),
        level=0,
        severity=Severity.ERROR,
    ),
    Rule(
        name="older_epochs_complete",
        kind="damaged",
        expects="Every file of the epochs before the newest one exists.",
        codes=_codes("older-epoch-incomplete"),
        example="epoch 3 lists 1 files that do not exist, first orders/main/a",
        level=0,
        severity=Severity.ERROR,
    ),
    Rule(
        name="names_used_once",
        kind="damaged",
        expects="No name of a data file is used again while an epoch lists it.",
        codes=_codes("name-reused"),
        example="epochs 3 and 9 list it, one between them does not: its name was used again",
        level=0,
    ),
    Rule(
        name="metadata_chain_whole",
        kind="not-restorable",
        expects="Each epoch leads to its metadata, and to the epoch before it.",
        codes=_codes(
            "record-missing record-version manifest-missing leads-elsewhere parents-differ "
            "parent-orphaned parent-expired chain-broken epoch-missing epoch-unfinished "
            "operator-metadata-missing metadata-unreadable hint-stale generation-manifest-missing "
            "not-compared"
        ),
        example="the manifest it names does not exist",
        level=0,
        severity=Severity.ERROR,
    ),
    Rule(
        name="epochs_owned",
        kind="not-restorable",
        expects="All metadata belongs to its job, and the next start restores the newest epoch.",
        codes=_codes(
            "metadata-of-another epoch-unclaimed epoch-published start-contradicted start-fails "
            "fence-stale fence-missing"
        ),
        example="it belongs to job 'payments'",
        level=0,
        severity=Severity.ERROR,
    ),
    Rule(
        name="commits_whole",
        kind="not-restorable",
        expects="Each epoch with output in two phases is committed.",
        codes=_codes("commit-pending commit-missing commit-flag commit-undecodable"),
        example="its commit marker does not exist",
        level=0,
        severity=Severity.ERROR,
    ),
    Rule(
        name="generations_fenced",
        kind="contended",
        expects="No generation writes after it was replaced, and few attempts are left.",
        codes=_codes("fenced-generation-writes attempts-abandoned"),
        example="101 checkpoints belong to no epoch; expected at most 100",
        limits=("abandoned_attempts",),
        level=0,
    ),
    Rule(
        name="statistics_true",
        kind="not-restorable",
        expects="Row counts, key ranges and event times in metadata match the rows.",
        codes=_codes(
            "rows-differ routing-keys-outside timestamps-outside footer-statistics bounds-too-wide"
        ),
        level=2,
        example="it has 9 rows; its footer says 10",
        severity=Severity.ERROR,
    ),
    Rule(
        name="values_decode",
        kind="not-restorable",
        expects="Every key, value and operation decodes with its table's types.",
        codes=_codes("value-undecodable operation-unknown table-unknown table-configuration"),
        level=3,
        example="value 7 does not decode",
        severity=Severity.ERROR,
    ),
    Rule(
        name="state_versions_match",
        kind="not-restorable",
        expects="All files of a table have a version of its values that a restore can migrate.",
        codes=_codes("state-version"),
        level=3,
        example="its values have version 3; the table has version 2",
        severity=Severity.ERROR,
    ),
    Rule(
        name="routing_keys_true",
        kind="not-restorable",
        expects="The stored routing key of every row is the hash of its key.",
        codes=_codes("routing-key-wrong hash-not-checked keys-unordered"),
        level=4,
        example="the routing keys of 3 rows are not the hashes of their keys",
        severity=Severity.ERROR,
    ),
    Rule(
        name="orphans_small",
        kind="space-amplification",
        expects="Few bytes are in files that no epoch lists.",
        codes=_codes("orphans-large"),
        example="2.1 GB in 400 files are older than a day and in the list of no epoch",
        limits=("orphan_bytes",),
        level=0,
    ),
    Rule(
        name="no_hot_key",
        kind="skewed",
        expects="No key has a large share of a table's rows.",
        codes=_codes("hot-key"),
        level=1,
        example="one key has 60% of the 200000 rows of table sum.t",
        limits=("hot_key_percent", "hot_key_rows"),
    ),
    Rule(
        name=REACHED,
        kind="not-restorable",
        expects="The budget sufficed to verify each job.",
        codes=_codes("not-verified"),
        example="was not verified: the budget ended before",
        limits=("budget_micros",),
        level=0,
    ),
)
"""Each rule, in the order in which findings are shown."""

RESTORED = next(rule for rule in RULES if rule.name == "restore_dry_run")
"""The rule of the findings that have no other."""

RULE_OF = {code: rule for rule in RULES for code in rule.codes}
"""The rule of each code."""

HEALTH_RULES = tuple(rule for rule in RULES if rule.level is None)
"""The rules that metadata and footers suffice for."""

AUDIT_RULES = tuple(rule for rule in RULES if rule.level is not None)
"""The rules that need a verification of the newest epoch, and a listing of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHealth:
    """What the rules say of one job.

    Attributes:
        job: the root of its paths.
        verdicts: by the name of the rule, without notes; of the rules that judge the job.
        not_judged: why the other rules do not judge it, by their names.
        figures: of its newest epoch; None if it cannot be read.
        stored_bytes: the size of all data files below its directory.
    """

    job: str
    epoch: int | None
    at_micros: int | None
    verdicts: Mapping[str, Verdict]
    not_judged: Mapping[str, str] = field(default_factory=dict)
    figures: EpochFigures | None = None
    stored_bytes: int = 0

    def with_verified(self, verified: JobHealth) -> JobHealth:
        """Return this with the verdicts of `judge_verified` in addition."""
        verdicts = {**self.verdicts, **verified.verdicts}
        reasons = {**self.not_judged, **verified.not_judged}
        left = {name: why for name, why in reasons.items() if name not in verdicts}
        return replace(self, verdicts=verdicts, not_judged=left)


def judge_job(facts: HealthFacts, limits: HealthLimits) -> JobHealth:
    """Apply the rules that metadata and footers suffice for to one job."""
    answers = {rule.name: rule.judge(facts, limits) for rule in RULES if rule.judge is not None}
    return JobHealth(
        job=facts.job,
        epoch=facts.age.epoch,
        at_micros=facts.now_micros,
        verdicts={
            name: _verdict(found) for name, found in answers.items() if not isinstance(found, str)
        },
        not_judged={name: why for name, why in answers.items() if isinstance(why, str)}
        | _not_verified(None),
        figures=facts.newest,
        stored_bytes=facts.stored_bytes,
    )


def _not_verified(level: int | None) -> dict[str, str]:
    """Return the rules that need more than a verification at a level; None = no verification."""
    return {
        rule.name: f"needs a verification at level {rule.level} or higher"
        for rule in AUDIT_RULES
        if rule.level is not None and (level is None or rule.level > level)
    }


def unreadable_job(age: JobAge, now_micros: int, problem: str) -> JobHealth:
    """Return the result for a job that cannot be judged, because the store denies it or its pins
    cannot be read."""
    step = "verify the job: `arroyo-state verify` says what cannot be read"
    verdict = Verdict(findings=(error("health-unknown", age.job, problem, step),))
    first, *others = HEALTH_RULES
    return JobHealth(
        job=age.job,
        epoch=age.epoch,
        at_micros=now_micros,
        verdicts={first.name: verdict},
        not_judged=dict.fromkeys((rule.name for rule in others), problem) | _not_verified(None),
    )


def judge_verified(checked: CheckedJob) -> JobHealth:
    """Return what a verification of a job says; rules that need a higher level do not judge."""
    by_rule: dict[str, list[Finding]] = {}
    for finding in checked.verdict.findings:
        by_rule.setdefault(RULE_OF.get(finding.code, RESTORED).name, []).append(finding)
    verdicts = {
        rule.name: _verdict(by_rule.get(rule.name, []))
        for rule in AUDIT_RULES
        if rule.name in by_rule or (rule.level or 0) <= (checked.level or 0)
    }
    left = {name: why for name, why in _not_verified(checked.level).items() if name not in verdicts}
    return JobHealth(
        job=checked.job,
        epoch=checked.epoch,
        at_micros=checked.at_micros,
        verdicts=verdicts,
        not_judged=left,
    )


def not_reached(job: str, now_micros: int) -> JobHealth:
    """Return the result for a job that a verification of many jobs did not reach."""
    evidence = "was not verified: the budget ended before"
    step = "raise `budget_minutes`, lower the level, or verify the job by its name"
    verdict = Verdict(findings=(warning("not-verified", job, evidence, step),))
    return JobHealth(job=job, epoch=None, at_micros=now_micros, verdicts={REACHED: verdict})


def _verdict(found: Iterable[Finding]) -> Verdict:
    return Verdict(findings=tuple(one for one in found if one.severity is not Severity.NOTE))


def job_lines(rules: Collection[Rule], jobs: Iterable[JobHealth]) -> tuple[JobLine, ...]:
    """Return the results of rules for all jobs, those with findings first.

    A job that none of the rules judges is not judged.
    """
    lines = []
    for job in jobs:
        judged = [job.verdicts[rule.name] for rule in rules if rule.name in job.verdicts]
        line = (
            job_line(job.job, merged(judged), epoch=job.epoch, at_micros=job.at_micros)
            if judged
            else JobLine(job=job.job, label=NOT_JUDGED, epoch=job.epoch, at_micros=job.at_micros)
        )
        reasons = {
            rule.name: job.not_judged[rule.name] for rule in rules if rule.name in job.not_judged
        }
        lines.append(replace(line, not_judged=reasons))
    return tuple(sorted(lines, key=by_urgency))
