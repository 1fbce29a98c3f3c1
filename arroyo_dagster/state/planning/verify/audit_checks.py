"""The checks that show the findings of all jobs' last audits, sorted by what they mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from arroyo_dagster.state.model.units import format_micros
from arroyo_dagster.state.planning.verify.findings import Finding, Severity, Verdict, warning
from arroyo_dagster.state.planning.verify.fleet import (
    NOT_JUDGED,
    FleetVerdict,
    JobLine,
    by_urgency,
    job_line,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditCheck:
    """A check that shows some of the findings of the last audit of each job.

    Attributes:
        expects: what a passing check means, as one sentence.
        codes: of its findings; empty = all that no other check shows.
        level: the least level of an audit that finds them.
        example: the evidence of a finding.
        limits: the fields of `AuditSettings` that it obeys.
        severity: of its worst findings.
    """

    name: str
    expects: str
    codes: frozenset[str]
    level: int = 0
    example: str
    limits: tuple[str, ...] = ()
    severity: Severity = Severity.ERROR


def _codes(text: str) -> frozenset[str]:
    return frozenset(text.split())


AUDIT_CHECKS = (
    AuditCheck(
        name="restore_dry_run",
        expects="A restore of each job's newest epoch was simulated and loads every row.",
        codes=frozenset(),
        example="listed by table sum.t, but does not exist",
        limits=("level",),
    ),
    AuditCheck(
        name="older_epochs_complete",
        expects="Every file of the epochs before the newest one exists.",
        codes=_codes("older-epoch-incomplete"),
        example="epoch 3 lists 1 files that do not exist, first orders/main/a",
    ),
    AuditCheck(
        name="files_unchanged",
        expects="No data file changed after an epoch listed it.",
        codes=_codes("file-changed directory-copied name-reused"),
        example="it had 10 bytes and has 11 after an epoch listed it",
    ),
    AuditCheck(
        name="metadata_chain_whole",
        expects="Each epoch leads to its metadata, and to the epoch before it.",
        codes=_codes(
            "record-missing record-version manifest-missing leads-elsewhere parents-differ "
            "parent-orphaned parent-expired chain-broken epoch-missing epoch-unfinished "
            "operator-metadata-missing metadata-unreadable hint-stale generation-manifest-missing "
            "not-compared"
        ),
        example="the manifest it names does not exist",
    ),
    AuditCheck(
        name="epochs_owned",
        expects="All metadata belongs to its job, and the next start restores the newest epoch.",
        codes=_codes(
            "metadata-of-another epoch-unclaimed epoch-published start-contradicted start-fails "
            "fence-stale fence-missing"
        ),
        example="it belongs to job 'payments'",
    ),
    AuditCheck(
        name="commits_whole",
        expects="Each epoch with output in two phases is committed.",
        codes=_codes("commit-pending commit-missing commit-flag commit-undecodable"),
        example="its commit marker does not exist",
    ),
    AuditCheck(
        name="generations_fenced",
        expects="No generation writes after it was replaced, and few attempts are left.",
        codes=_codes("fenced-generation-writes attempts-abandoned"),
        example="101 checkpoints belong to no epoch; expected at most 100",
        limits=("abandoned_attempts",),
        severity=Severity.WARNING,
    ),
    AuditCheck(
        name="statistics_true",
        expects="Row counts, key ranges and event times in metadata match the rows.",
        codes=_codes(
            "rows-differ routing-keys-outside timestamps-outside footer-statistics bounds-too-wide"
        ),
        level=2,
        example="it has 9 rows; its footer says 10",
    ),
    AuditCheck(
        name="values_decode",
        expects="Every key, value and operation decodes with its table's types.",
        codes=_codes("value-undecodable operation-unknown table-unknown table-configuration"),
        level=3,
        example="value 7 does not decode",
    ),
    AuditCheck(
        name="state_versions_match",
        expects="All files of a table have a version of its values that a restore can migrate.",
        codes=_codes("state-version"),
        level=3,
        example="its values have version 3; the table has version 2",
    ),
    AuditCheck(
        name="routing_keys_true",
        expects="The stored routing key of every row is the hash of its key.",
        codes=_codes("routing-key-wrong hash-not-checked keys-unordered"),
        level=4,
        example="the routing keys of 3 rows are not the hashes of their keys",
    ),
    AuditCheck(
        name="orphans_small",
        expects="Few bytes are in files that no epoch lists.",
        codes=_codes("orphans-large"),
        example="2.1 GB in 400 files are older than a day and in the list of no epoch",
        limits=("orphan_bytes",),
        severity=Severity.WARNING,
    ),
    AuditCheck(
        name="no_hot_key",
        expects="No key has a large share of a table's rows.",
        codes=_codes("hot-key"),
        level=1,
        example="one key has 60% of the 200000 rows of table sum.t",
        limits=("hot_key_percent", "hot_key_rows"),
        severity=Severity.WARNING,
    ),
)
"""The checks that show findings of audits."""

RECENCY_CHECK = AuditCheck(
    name="audited_recently",
    expects="Each job was audited lately.",
    codes=_codes("never-audited audit-overdue"),
    example="was audited 9 d ago; expected at most 7 d",
    limits=("recent_micros",),
    severity=Severity.WARNING,
)
"""The check of when each job was audited, which `recency_verdict` evaluates."""

_OWNED = frozenset().union(*(check.codes for check in AUDIT_CHECKS))


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedJob:
    """The last audit of a job.

    Attributes:
        level: of its verification.
    """

    job: str
    at_micros: int
    epoch: int | None
    level: int
    verdict: Verdict


def audit_verdict(
    check: AuditCheck, jobs: Iterable[str], audited: Mapping[str, AuditedJob]
) -> FleetVerdict:
    """Return the results of one check for all jobs, those with findings first. Notes do not count.

    Jobs that were not audited, or at too low a level, are not judged.
    """
    lines = []
    for job in jobs:
        last = audited.get(job)
        if last is None or last.level < check.level:
            lines.append(JobLine(job=job, label=NOT_JUDGED))
            continue
        found = [
            one
            for one in last.verdict.findings
            if one.severity is not Severity.NOTE
            and (one.code in check.codes if check.codes else one.code not in _OWNED)
        ]
        verdict = Verdict(findings=tuple(found), inspected=last.verdict.inspected)
        lines.append(job_line(job, verdict, epoch=last.epoch, at_micros=last.at_micros))
    return FleetVerdict(lines=tuple(sorted(lines, key=by_urgency)))


def recency_verdict(
    jobs: Iterable[str], audited: Mapping[str, AuditedJob], now_micros: int, limit_micros: int
) -> FleetVerdict:
    """Find the jobs that no audit reached for longer than the limit."""
    lines = []
    step = "raise `budget_minutes`, or lower `level`, or run the audit more often"
    for job in jobs:
        last = audited.get(job)
        found: tuple[Finding, ...] = ()
        if last is None:
            found = (warning("never-audited", job, "was never audited", step),)
        elif now_micros - last.at_micros > limit_micros:
            age = format_micros(now_micros - last.at_micros)
            evidence = f"was audited {age} ago; expected at most {format_micros(limit_micros)}"
            found = (warning("audit-overdue", job, evidence, step),)
        at, epoch = (None, None) if last is None else (last.at_micros, last.epoch)
        verdict = Verdict(findings=found, inspected=1)
        lines.append(job_line(job, verdict, epoch=epoch, at_micros=at))
    return FleetVerdict(lines=tuple(sorted(lines, key=by_urgency)))
