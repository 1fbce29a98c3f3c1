"""`doctor JOB`: from the symptoms of a job to their commands, as in docs/operate/README.md."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from arroyo_dagster.cli.leases import lease_evidence
from arroyo_dagster.cli.verify import ways_out
from arroyo_dagster.errors import ArroyoStateError, FormatError, NotFoundError
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.health import HealthLimits
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.progress import OnProgress
from arroyo_dagster.state.model.units import format_bytes, plural
from arroyo_dagster.state.operations.catalog.health import check_health
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.catalog.leases import list_leases
from arroyo_dagster.state.operations.gc.quarantine import list_quarantines
from arroyo_dagster.state.operations.surgery.managed.execute import plan_managed_undo
from arroyo_dagster.state.operations.surgery.managed.plan import is_managed
from arroyo_dagster.state.operations.undo import changed_since
from arroyo_dagster.state.operations.verify.job import verify_job
from arroyo_dagster.state.operations.verify.store import CheckStatus, StoreCheck
from arroyo_dagster.state.planning.rules import RESTORED, RULE_OF
from arroyo_dagster.state.planning.verify.findings import Finding, Severity, error
from arroyo_dagster.state.storage.store import ObjectStore

_START = "a start fails, or loads other rows", "arroyo-state verify {job}"
_FILES = "files are missing", "arroyo-state sql @fate --param path={job}/"
_LATE = "checkpoints are late, slow or large", "arroyo-state health {job}"
SYMPTOMS = {
    "unreadable": _START,
    "not-restorable": _START,
    "file-missing": _FILES,
    "file-lost": _FILES,
    "damaged": _FILES,
    "edit-unfinished": ("an edit or a rewrite went wrong", "arroyo-state undo {job}"),
    "space-amplification": ("the bucket grows", "arroyo-state gc plan expire {job} --keep 10"),
    "read-amplification": ("starts are slow", "arroyo-state compact plan {job}"),
    "late": _LATE,
    "unusual": _LATE,
    "skewed": _LATE,
    "write-amplification": _LATE,
    "contended": ("a run waits", "arroyo-state show {job}"),
}
"""By the code of a finding, or its kind: what a person sees, and the command for it."""

_STATUS = {
    Severity.ERROR: CheckStatus.ERROR,
    Severity.WARNING: CheckStatus.WARNING,
    Severity.NOTE: CheckStatus.OK,
}


def job_symptoms(
    store: ObjectStore, paths: JobPaths, directory: JobDirectory, on_progress: OnProgress
) -> Iterator[StoreCheck]:
    """Yield the symptoms that a job shows, each with its command; `ok` for what is only to know.

    It verifies the newest epoch as `verify` does, and judges the job as `health` does.

    Args:
        directory: the source of the job's status.
    """
    epochs = ParquetBackend(store, paths).epochs()
    verified = _verified(store, paths, on_progress)
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in (*verified, *_judged(store, paths, directory)):
        kind = RULE_OF.get(finding.code, RESTORED).kind
        symptom, command = SYMPTOMS.get(finding.code, SYMPTOMS[kind])
        step = command.format(job=paths.root)
        key = ("note", finding.next_step) if finding.severity is Severity.NOTE else (symptom, step)
        groups.setdefault(key, []).append(finding)
    for (symptom, command), findings in groups.items():
        worst = min(findings, key=lambda finding: [*Severity].index(finding.severity))
        more = f"; and {len(findings) - 1} more" if len(findings) > 1 else ""
        detail = f"{worst.object}: {worst.evidence} ({worst.code}){more}"
        yield _check(symptom, _STATUS[worst.severity], detail, command)
    if epochs and any(finding.severity is Severity.ERROR for finding in verified):
        for way in ways_out(store, paths, epochs[-1]):
            yield _check("a way back", CheckStatus.OK, way.purpose, way.command)
    yield from _kept(store, paths, directory)


def _check(symptom: str, status: CheckStatus, detail: str, command: str) -> StoreCheck:
    return StoreCheck(name=symptom, status=status, detail=detail, next_step=command)


def _verified(store: ObjectStore, paths: JobPaths, on_progress: OnProgress) -> list[Finding]:
    try:
        return [*verify_job(store, paths, on_progress=on_progress).verdict.findings]
    except (FormatError, NotFoundError) as problem:
        step = f"arroyo-state verify {paths.root}"
        where = str(problem.facts.get("path", paths.root))
        return [error("epoch-not-verified", where, problem.message, step)]


def _judged(store: ObjectStore, paths: JobPaths, directory: JobDirectory) -> Iterator[Finding]:
    for health in check_health(store, [paths], directory, HealthLimits()):
        for verdict in health.verdicts.values():
            yield from verdict.findings


def _kept(store: ObjectStore, paths: JobPaths, directory: JobDirectory) -> Iterator[StoreCheck]:
    """Yield what can be undone or brought back, and who holds a lease."""
    job, known = paths.root, CheckStatus.OK
    with contextlib.suppress(ArroyoStateError):
        changed = _last_change(store, paths, directory)
        if changed is not None:
            undo = f"arroyo-state undo {job}"
            yield _check("an edit or a rewrite went wrong", known, changed, undo)
    with contextlib.suppress(ArroyoStateError):
        sizes = [copy.size_bytes for _, copies in list_quarantines(store, paths) for copy in copies]
        if sizes:
            detail = f"{plural(len(sizes), 'object')}, {format_bytes(sum(sizes))}, can come back"
            yield _check(
                "files are in quarantine", known, detail, f"arroyo-state gc undelete {job}"
            )
    for lease in list_leases(store, [paths]):
        state = lease.state(wall_clock())
        if state not in ("released", "expired"):
            status = known if state == "held" else CheckStatus.WARNING
            detail = f"the {lease.kind} lease is {lease_evidence(lease)}"
            yield _check("a run waits", status, detail, f"arroyo-state show {job}")


def _last_change(store: ObjectStore, paths: JobPaths, directory: JobDirectory) -> str | None:
    """Return the last change of the newest epoch that can be undone; None if it has none."""
    if is_managed(store, paths):
        undo = plan_managed_undo(store, paths, directory)
        return None if undo is None else f"the edit {undo.operation!r} can be undone"
    record = changed_since(store, paths, 0)
    if record is None or record.epoch != ParquetBackend(store, paths).load().epoch:
        return None
    done = record.operation or "compaction"
    return f"the {done} of epoch {record.epoch} can be undone until the job is started"
