"""What is noticed about checkpoints and jobs: files missing or broken, jobs that stand still.

Every check is one pure function from facts that somebody else has gathered to a `Verdict`. A
verdict with no error passes; each finding says what to do.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.compaction import MergeOutcome
from arroyo_dagster.state.model.ids import OperatorId, StatePath, TableName
from arroyo_dagster.state.model.tables import ExpiringTimeKeyFiles, TimeFile
from arroyo_dagster.state.planning.query import RestorePlan

BRING_BACK = "bring the object back, or restore an epoch that does not list it"
KEEP_AND_REPORT = "keep the object and report it; restore an epoch that does not list it"


class Severity(enum.Enum):
    """What a finding means for a run that depends on what was checked."""

    ERROR = "error"
    """It must not go on."""

    WARNING = "warning"
    """It may go on; somebody should look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing noticed.

    Attributes:
        code: what kind of thing, the same in every release (`file-missing`…).
        object: the path or the job concerned.
        evidence: what was found, and what was expected where that says more.
        next_step: what the reader should do now.
    """

    severity: Severity
    code: str
    object: str
    evidence: str
    next_step: str

    def __str__(self) -> str:
        return f"{self.object}: {self.evidence} ({self.code}). Next: {self.next_step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer of one check.

    Attributes:
        findings: in the order of what was looked at, errors and warnings mixed.
        looked_at: how many files, or jobs, were looked at: a pass over nothing is no proof.
    """

    findings: tuple[Finding, ...] = ()
    looked_at: int = 0

    @property
    def passed(self) -> bool:
        """Whether nothing found is an error."""
        return not self.errors

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(one for one in self.findings if one.severity is Severity.ERROR)


def merged(verdicts: Iterable[Verdict]) -> Verdict:
    """One verdict over several objects: it passes if each does."""
    all_of_them = list(verdicts)
    return Verdict(
        findings=tuple(finding for verdict in all_of_them for finding in verdict.findings),
        looked_at=sum(verdict.looked_at for verdict in all_of_them),
    )


def unreadable(at: str, problem: str) -> Verdict:
    """The verdict on what cannot even be read."""
    step = "choose another epoch; `arroyo-state epochs` lists them"
    return Verdict(findings=(_error("metadata-unreadable", at, problem, step),), looked_at=1)


def _error(code: str, at: str, evidence: str, next_step: str) -> Finding:
    return Finding(
        severity=Severity.ERROR, code=code, object=at, evidence=evidence, next_step=next_step
    )


def _warning(code: str, at: str, evidence: str, next_step: str) -> Finding:
    return Finding(
        severity=Severity.WARNING, code=code, object=at, evidence=evidence, next_step=next_step
    )


# ---- the files of a checkpoint -------------------------------------------------------------------


def files_exist(checkpoint: Checkpoint, present: Mapping[StatePath, int]) -> Verdict:
    """Tell whether every data file that an epoch lists is there, and is not empty.

    Args:
        present: the files found, with their sizes in bytes; those of other epochs do no harm.
    """
    findings: list[Finding] = []
    listed = _listed(checkpoint)
    for path, operator in listed.items():
        size = present.get(path)
        if size is None:
            evidence = f"listed by operator {operator} at epoch {checkpoint.epoch}, but not there"
            findings.append(_error("file-missing", path, evidence, BRING_BACK))
        elif size == 0:
            findings.append(_error("file-empty", path, "holds no bytes", BRING_BACK))
    return Verdict(findings=tuple(findings), looked_at=len(listed))


def _listed(checkpoint: Checkpoint) -> dict[StatePath, OperatorId]:
    return {path: operator.operator for operator in checkpoint.operators for path in operator.paths}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a data file, its type as Arrow spells it."""

    name: str
    type: str
    nullable: bool = True

    def __str__(self) -> str:
        return f"{self.name}: {self.type}{'' if self.nullable else ' not null'}"


Columns = tuple[Column, ...]
TableKey = tuple[OperatorId, TableName]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """What the footer of a data file says; read without its rows.

    Attributes:
        problem: why the footer does not decode; the rest is then unknown.
        min_routing_key, max_routing_key: bounds of `_key_hash`; None where there are no statistics.
        max_timestamp_micros: the largest `_timestamp`, floored; None likewise.
    """

    size_bytes: int
    rows: int = 0
    columns: Columns = ()
    min_routing_key: int | None = None
    max_routing_key: int | None = None
    max_timestamp_micros: int | None = None
    problem: str | None = None


def restorable(
    checkpoint: Checkpoint,
    plan: RestorePlan,
    files: Mapping[StatePath, StoredFile],
    expected: Mapping[TableKey, Sequence[Columns]],
) -> Verdict:
    """Tell whether a restore of this epoch would find everything it opens, as it expects it.

    The epoch is ready, or its commit is replayed first; every file that a subtask opens is there,
    has a footer that decodes, has the columns of its table, and no row outside of the bounds by
    which readers skip files.

    Args:
        plan: what the restore opens.
        files: the facts of every file that is there.
        expected: the columns a file of a table may have, one or several forms.
    """
    findings = list(_state_findings(checkpoint))
    opened = {(read.operator, read.table, path): None for read in plan.reads for path in read.files}
    bounds = _bounds(checkpoint)
    for operator, table, path in opened:
        stored = files.get(path)
        if stored is None:
            evidence = f"a restore of epoch {checkpoint.epoch} opens it for {operator}.{table}"
            findings.append(_error("file-missing", path, f"{evidence}; not there", BRING_BACK))
            continue
        findings.extend(_file_findings(path, stored, expected[operator, table], bounds.get(path)))
    return Verdict(findings=tuple(findings), looked_at=len(opened))


def _state_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    if not checkpoint.state.canonical:
        evidence = f"epoch {checkpoint.epoch} is {checkpoint.state.value}; ready was expected"
        step = "restore the epoch before it; `arroyo-state epochs` lists them"
        yield _error("not-restorable-state", checkpoint.ref, evidence, step)
    for operator in checkpoint.operators:
        yield from _config_findings(checkpoint, operator)


def _config_findings(checkpoint: Checkpoint, operator: OperatorCheckpoint) -> Iterator[Finding]:
    for name, files in operator.tables.items():
        config = operator.configs.get(name)
        if config is None or config.kind is not files.kind:
            has = "no configuration" if config is None else f"a configuration of {config.kind.name}"
            evidence = f"table {name} of operator {operator.operator} has {has}"
            yield _error("table-configuration", checkpoint.ref, evidence, KEEP_AND_REPORT)


def _bounds(checkpoint: Checkpoint) -> dict[StatePath, TimeFile]:
    return {
        file.path: file
        for operator in checkpoint.operators
        for files in operator.tables.values()
        if isinstance(files, ExpiringTimeKeyFiles)
        for file in files.files
    }


def _file_findings(
    path: StatePath, stored: StoredFile, forms: Sequence[Columns], listed: TimeFile | None
) -> Iterator[Finding]:
    if stored.problem is not None:
        yield _error("file-broken", path, stored.problem, KEEP_AND_REPORT)
        return
    if stored.columns not in forms:
        found = ", ".join(map(str, stored.columns))
        wanted = " or ".join(", ".join(map(str, form)) for form in forms)
        evidence = f"has the columns {found}; expected {wanted}"
        yield _error("columns-differ", path, evidence, KEEP_AND_REPORT)
    elif listed is not None and stored.rows:
        yield from _bound_findings(path, stored, listed)


def _bound_findings(path: StatePath, stored: StoredFile, listed: TimeFile) -> Iterator[Finding]:
    low, high = stored.min_routing_key, stored.max_routing_key
    # Wider bounds than the rows need only cost time; narrower ones hide rows from a restore.
    below = low is not None and low < listed.min_routing_key
    if below or (high is not None and high > listed.max_routing_key):
        evidence = (
            f"has routing keys {low} to {high}, listed as {listed.min_routing_key} to "
            f"{listed.max_routing_key}: some subtasks would not open it"
        )
        yield _error("routing-keys-outside", path, evidence, KEEP_AND_REPORT)
    newest = stored.max_timestamp_micros
    if newest is not None and newest > listed.max_timestamp_micros:
        evidence = (
            f"has rows up to {newest} µs, listed as up to {listed.max_timestamp_micros} µs: it "
            "would be dropped too early"
        )
        yield _error("timestamps-outside", path, evidence, KEEP_AND_REPORT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """How much an epoch lists, in all and new since the epoch before it.

    Attributes:
        size_bytes, rows: None if a file is missing, broken or was not looked at.
        new_files, new_size_bytes: None if the epoch before is not known.
    """

    files: int
    new_files: int | None
    size_bytes: int | None
    new_size_bytes: int | None
    rows: int | None


def figures(
    checkpoint: Checkpoint,
    earlier: Collection[str] | None,
    files: Mapping[StatePath, StoredFile],
) -> Figures:
    """Add up what an epoch lists.

    Args:
        earlier: the data files that the epoch before it lists; None = not known.
        files: the facts of the files that were looked at.
    """
    own = list(dict.fromkeys(checkpoint.paths))
    if earlier is None and checkpoint.epoch == 1:
        earlier = ()
    new = None if earlier is None else [path for path in own if path not in earlier]
    broken = any(path not in files or files[path].problem is not None for path in own)
    return Figures(
        files=len(own),
        new_files=None if new is None else len(new),
        size_bytes=_size(own, files),
        new_size_bytes=None if new is None else _size(new, files),
        rows=None if broken else sum(files[path].rows for path in own),
    )


def _size(paths: Sequence[StatePath], files: Mapping[StatePath, StoredFile]) -> int | None:
    if any(path not in files for path in paths):
        return None
    return sum(files[path].size_bytes for path in paths)


# ---- the jobs of a deployment --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAge:
    """How a job stands, as far as its newest epoch tells.

    Attributes:
        job: the root of its paths.
        finished_micros: when its newest epoch was finished; None without an epoch.
        at_rest: it stopped with a checkpoint and was not started since.
        epochs, files: how many epochs it has, and files the newest lists.
        problem: why its newest epoch cannot be read.
    """

    job: str
    epoch: int | None = None
    epochs: int = 0
    files: int = 0
    finished_micros: int | None = None
    at_rest: bool = False
    problem: str | None = None

    def age_micros(self, now_micros: int) -> int | None:
        """The time since its newest epoch; None without one."""
        return None if self.finished_micros is None else max(0, now_micros - self.finished_micros)


def every_job_recent(jobs: Sequence[JobAge], *, now_micros: int, limit_micros: int) -> Verdict:
    """Tell which jobs stand still: no newer epoch for longer than the limit, though not at rest.

    Whether a job of Arroyo's was stopped on purpose cannot be told from its state: warnings all.
    """
    findings = [
        finding
        for job in jobs
        for finding in _recency_findings(job, job.age_micros(now_micros), limit_micros)
    ]
    return Verdict(findings=tuple(findings), looked_at=len(jobs))


def _recency_findings(job: JobAge, age_micros: int | None, limit_micros: int) -> Iterator[Finding]:
    if job.problem is not None:
        step = "look at it with `arroyo-state epochs`"
        yield _error("newest-epoch-unreadable", job.job, job.problem, step)
    elif age_micros is None:
        step = "wait for its first checkpoint, or look at its logs"
        yield _warning("no-epoch", job.job, "has no epoch yet", step)
    elif age_micros > limit_micros and not job.at_rest:
        evidence = (
            f"epoch {job.epoch} is {age_micros // 1_000_000} s old; "
            f"at most {limit_micros // 1_000_000} s were expected"
        )
        step = "start it again if it should run; nothing to do if it was stopped on purpose"
        yield _warning("job-stands-still", job.job, evidence, step)


# ---- maintenance ---------------------------------------------------------------------------------


def row_parity(merges: Sequence[MergeOutcome]) -> Verdict:
    """Tell whether a restore would load of merged files what it would of their inputs.

    Not a comparison of row counts: the multisets of what is loaded are the same, and every row
    that is in no output is accounted for.
    """
    findings = [
        _error(
            "merge-differs",
            outcome.merged.input_paths[0],
            f"{len(outcome.merged.input_paths)} files of table {outcome.merged.table} of operator "
            f"{outcome.merged.operator} hold {outcome.rows_in} rows, of which a restore loads "
            f"{outcome.before.rows}; merged they hold {outcome.rows_out}, of which it loads "
            f"{outcome.after.rows} ({'other' if outcome.before != outcome.after else 'the same'} "
            f"values); dropped: {dict(outcome.dropped)}",
            "keep the files and report it; nothing was published",
        )
        for outcome in merges
        if not outcome.same
    ]
    return Verdict(findings=tuple(findings), looked_at=len(merges))
