"""The last verdict of each check on each job, stored in the catalogue: one small object for each
pair.

Verdicts of different jobs, or of different checks, are different objects, so concurrent writers
never overwrite each other's verdicts.
"""

from __future__ import annotations

from collections.abc import Iterable

from arroyo_dagster.errors import FormatError, NotFoundError
from arroyo_dagster.state.codec.records import OWN_VERSION, encode_json, known_fields
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.planning.verify.findings import Finding, Severity, Verdict
from arroyo_dagster.state.planning.verify.fleet import CheckedJob
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore

VERSION = 1
FINDINGS_KEPT = 50


def verdict_path(kind: str, paths: JobPaths) -> StatePath:
    """Return the path of the last verdict of a check on a job, in the catalogue."""
    return StatePath(f"verdicts/{kind}/{paths.layout.value}/{paths.root}.json")


def write_verdict(catalogue: ObjectStore, kind: str, paths: JobPaths, found: CheckedJob) -> None:
    """Store a verdict in place of the last one, with at most 50 findings, errors first.

    Args:
        kind: the name of the check.
    """
    findings = sorted(found.verdict.findings, key=lambda one: one.severity is not Severity.ERROR)
    document = {
        "version": OWN_VERSION,
        "job": found.job,
        "at_micros": found.at_micros,
        "epoch": found.epoch,
        **({} if found.level is None else {"level": found.level}),
        "looked_at": found.verdict.inspected,
        "findings": [
            {
                "severity": one.severity.value,
                "code": one.code,
                "object": one.object,
                "evidence": one.evidence,
                "next_step": one.next_step,
            }
            for one in findings[:FINDINGS_KEPT]
        ],
    }
    catalogue.put(verdict_path(kind, paths), encode_json(document))


def read_verdicts(
    catalogue: ObjectStore, kind: str, jobs: Iterable[JobPaths]
) -> dict[JobPaths, CheckedJob]:
    """Return the last verdict of a check on each of `jobs` that was ever checked.

    A verdict that does not decode is left out: the next check of the job overwrites it.
    """
    wanted = list(jobs)

    def one(paths: JobPaths) -> CheckedJob | None:
        path = verdict_path(kind, paths)
        try:
            return _decoded(catalogue.read(path), path, paths)
        except (NotFoundError, FormatError):
            return None

    found = zip(wanted, concurrently(one, wanted), strict=True)
    return {paths: verdict for paths, verdict in found if verdict is not None}


def _decoded(data: bytes, path: StatePath, paths: JobPaths) -> CheckedJob:
    with known_fields(data, path) as fields:
        epoch = fields.optional_number("epoch")
        return CheckedJob(
            job=paths.root,
            at_micros=fields.number("at_micros"),
            epoch=None if epoch is None else Epoch(epoch),
            level=fields.optional_number("level"),
            verdict=Verdict(
                findings=tuple(
                    Finding(
                        severity=Severity(one.text("severity")),
                        code=one.text("code"),
                        object=one.text("object"),
                        evidence=one.text("evidence"),
                        next_step=one.text("next_step"),
                    )
                    for one in fields.objects("findings")
                ),
                inspected=fields.number("looked_at"),
            ),
        )
