"""`fleet`: all pipelines in one table, the worst first, and the check that none is overlooked."""

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import dagster as dg

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.orchestration import rendering as shown
from arroyo_dagster.orchestration.check_results import check_result, format_verdict, report
from arroyo_dagster.orchestration.failures import as_failure
from arroyo_dagster.orchestration.pipelines.model import ListedPipeline
from arroyo_dagster.orchestration.requests import BACKGROUND_TAGS, asset_job, clock_schedule
from arroyo_dagster.orchestration.runners import Tools
from arroyo_dagster.orchestration.serving import (
    FAILED,
    SINCE,
    WAITING,
    last_note,
    unlisted_pipeline,
)
from arroyo_dagster.orchestration.translator import (
    CHECKPOINT,
    EVERY_PIPELINE,
    FLEET,
    HEALTHY,
    RESTORABLE,
    Names,
)
from arroyo_dagster.orchestration.verify.definitions import Verdicts, last_verdicts
from arroyo_dagster.redaction import without_secrets
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.job_facts import JobCondition
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.units import format_bytes, format_micros
from arroyo_dagster.state.planning.verify.findings import Finding, Verdict, error, warning

if TYPE_CHECKING:
    from arroyo_dagster.state.planning.verify.fleet import JobAge

JOB = "arroyo_fleet"
FLEET_CRON = "*/15 * * * *"
WAITING_LIMIT = 86_400.0
_RELOAD = "reload the definitions (`dg utils refresh-defs-state`, or a restart of the code server)"
_TEXT = (
    "Every pipeline below the checkpoint URL is known to the definitions, none vanished, the last "
    "verdict on each is no error, and none waits for longer than a day."
)


@dataclass(frozen=True)
class _Row:
    """What is known of one pipeline.

    Attributes:
        finding: what is wrong; None = nothing.
        note: what else there is to say.
        files, size_bytes: of its newest reported epoch, as far as they are known.
    """

    age: "JobAge"
    state: str
    finding: Finding | None
    note: str | None = None
    files: int | None = None
    size_bytes: int | None = None

    @functools.cached_property
    def age_micros(self) -> int | None:
        """The time since its newest epoch; None without one."""
        return self.age.age_micros(wall_clock())

    @property
    def rank(self) -> tuple[int, bool, int, str]:
        """The worst first: errors, warnings, then the oldest epochs."""
        severities = {None: 2, "warning": 1, "error": 0}
        severity = None if self.finding is None else self.finding.severity.value
        resting, age = self.age.resting is not None, self.age_micros or 0
        return severities[severity], resting, -age, self.age.job

    def cells(self) -> dict[str, Any]:
        """The row of the table, with few and short columns: Dagster makes the page as wide."""
        finding = self.finding
        return {
            "pipeline": self.age.job,
            "state": self.state,
            "what": self.note if finding is None else f"{finding.evidence}. {finding.next_step}",
            "epoch": self.age.epoch,
            "age": None if self.age_micros is None else format_micros(self.age_micros),
            "files": shown.number(self.age.files if self.files is None else self.files),
            "size": None if self.size_bytes is None else format_bytes(self.size_bytes),
        }


def build_fleet(
    names: Names,
    maintained: Mapping[dg.AssetKey, ListedPipeline],
    waiting_limit: float,
    *,
    cron: str,
    timezone: str,
    running: bool,
) -> dg.Definitions:
    """Build the asset of all pipelines with its check, its job and schedule.

    Args:
        maintained: the assets whose runs may have left a pipeline waiting.
        waiting_limit: a pipeline that waits for more seconds is an error.
    """
    spec = names.spec(FLEET)

    @dg.multi_asset(
        name=f"{names.name(JOB)}_overview",
        specs=[spec],
        check_specs=[names.check_spec(EVERY_PIPELINE, spec.key, _TEXT)],
        can_subset=True,
        required_resource_keys=names.resources,
    )
    def fleet(context: dg.AssetExecutionContext) -> Any:
        with as_failure():
            overview = _Overview(names, names.tools(context), context.instance, maintained)
            made, checked = overview.results(waiting_limit)
        if context.selected_asset_keys:
            yield made
        if context.selected_asset_check_keys:
            yield checked

    text = "Show all pipelines, and find those that the definitions do not know."
    job = asset_job(names, JOB, [fleet], text, tags=BACKGROUND_TAGS)
    schedule = clock_schedule(job, cron, timezone=timezone, running=running)
    return dg.Definitions(assets=[fleet], jobs=[job], schedules=[schedule])


def report_fleet(
    names: Names,
    maintained: Mapping[dg.AssetKey, ListedPipeline],
    waiting_limit: float,
    context: Any,
    verified: Sequence[ListedPipeline],
    last: Verdicts,
) -> None:
    """Report the asset and its check outside of the events of the run that verified pipelines, if
    others of them are broken than at the `last` verdicts. If the store fails, its next run does it.
    """
    now = last_verdicts(names, context.instance, verified)
    before, after = ({key for key in known if known[key].is_error} for known in (last, now))
    if before == after:
        return
    overview = _Overview(names, names.tools(context), context.instance, maintained)
    try:
        made, checked = overview.results(waiting_limit)
    except ArroyoStateError as problem:
        context.log.warning(without_secrets(f"`fleet` is made by its next run: {problem}"))
        return
    event = dg.AssetMaterialization(names.key(FLEET), metadata=made.metadata)
    context.instance.report_runless_asset_event(event)
    report(context.instance, checked, context.run.run_id)


@dataclass
class _Overview:
    """Looks at the store, and at what the instance knows, for one run.

    Attributes:
        root: what is wrong with the listing.
    """

    names: Names
    tools: Tools
    instance: dg.DagsterInstance
    maintained: Mapping[dg.AssetKey, ListedPipeline]
    root: list[Finding] = field(default_factory=list)

    def _find(self, problem: str, meaning: str) -> None:
        step = f"check the checkpoint URL, the store and its credentials; then {_RELOAD}"
        self.root.append(
            error("not-listed", self.names.pipelines.url, f"{problem}: {meaning}", step)
        )

    def results(
        self, waiting_limit: float
    ) -> "tuple[dg.MaterializeResult[Any], dg.AssetCheckResult]":
        """Return the asset with its table, and its check; errors as `rows`."""
        key, rows = self.names.key(FLEET), self.rows(waiting_limit)
        findings = [row.finding for row in rows if row.finding is not None]
        verdict = Verdict(findings=(*self.root, *findings), inspected=max(1, len(rows)))
        pipelines = shown.counted(len(rows), "pipeline")
        findings_text = shown.counted(len(verdict.findings), "finding")
        checked = check_result(
            verdict,
            EVERY_PIPELINE,
            key,
            passed=not verdict.findings,
            description=f"{findings_text}, {pipelines}: {format_verdict(verdict)}"
            if verdict.findings
            else f"{pipelines}, nothing to do",
        )
        return dg.MaterializeResult(asset_key=key, metadata=_metadata(rows)), checked

    def rows(self, waiting_limit: float) -> list[_Row]:
        """Return a row for each pipeline, the worst first.

        Raises:
            StorageError: the store failed.
        """
        pipelines, problem = self.names.pipelines.pipelines, self.names.pipelines.problem
        if problem is not None:
            self._find(problem, "the definitions may not show what there is")
        listed, hidden = self._listed()
        roots = {pipeline.root for pipeline in pipelines}
        ages = {age.job: age for age in self._ages([pipeline.paths for pipeline in pipelines])}
        last = last_verdicts(self.names, self.instance, pipelines)
        waiting = self._waiting(waiting_limit)
        amounts = self._amounts()
        rows = []
        for pipeline in pipelines:
            gone = listed is not None and pipeline.root not in listed and not hidden(pipeline.paths)
            finding, state = self._judge(pipeline, ages[pipeline.root], gone, last)
            waits, note = waiting.get(pipeline.root, (None, None))
            amount = amounts.get(pipeline.root, (None, None))
            rows.append(_Row(ages[pipeline.root], state, finding or waits, note, *amount))
        rows += [self._unknown(root) for root in sorted((listed or set()) - roots)]
        return sorted(rows, key=lambda row: row.rank)

    def _listed(self) -> tuple[set[str] | None, Any]:
        """Return the roots of the jobs there are, and what tells whether a job may be hidden.

        None: the store could not be listed.
        """
        try:
            listing = self.tools.store.listing()
        except ArroyoStateError as problem:
            self._find(problem.message, "which pipelines there are is not known")
            return None, lambda paths: True
        for path, reason in listing.unreadable.items():
            self._find(f"{path} cannot be listed ({reason.message})", "pipelines may be hidden")
        return {str(paths.root) for paths in listing.jobs}, listing.hides

    def _ages(self, jobs: Sequence[JobPaths]) -> "list[JobAge]":
        from arroyo_dagster.state.operations.catalog.footers import job_ages

        store = self.tools.store
        return job_ages(store.reading(), jobs, self.tools.directory.directory(store))

    def _judge(
        self,
        pipeline: ListedPipeline,
        age: "JobAge",
        gone: bool,
        last: Verdicts,
    ) -> tuple[Finding | None, str]:
        """Return what is wrong with a pipeline, if anything, and its state in one word."""
        root = pipeline.root
        restorable, healthy = last.get((pipeline, RESTORABLE)), last.get((pipeline, HEALTHY))
        if gone:
            step = "restore its objects; if it was deleted on purpose, name it under `gone`"
            return error("vanished", root, "it is not below the checkpoint URL", step), "vanished"
        if age.problem is not None:
            step = f"`arroyo-state verify {root}` says which object is wrong"
            return error("unreadable", root, age.problem, step), "unreadable"
        if restorable is not None and restorable.is_error:
            step = f"`arroyo-state verify {root}` lists every finding with its next step"
            return error("broken", root, restorable.description, step), "broken"
        if age.condition is JobCondition.FAILED:
            step = "read its error in Arroyo, and start it again"
            return warning(
                "failed", root, age.failure or "Arroyo reports it failed", step
            ), "failed"
        state = "no epoch" if age.epoch is None else age.resting or "ready"
        if restorable is None:
            step = f"run the job {self.names.name('arroyo_verify')}, or switch its schedule on"
            return warning("not-evaluated", root, "it was never verified", step), state
        if healthy is not None and not healthy.passed:
            step = "the check `healthy` of its checkpoint lists each finding"
            return warning("not-healthy", root, healthy.description, step), state
        return None, state

    def _waiting(self, limit: float) -> dict[str, tuple[Finding | None, str | None]]:
        """Return why pipelines wait for maintenance, or why it failed, by root."""
        rows: dict[str, tuple[Finding | None, str | None]] = {}
        for key, pipeline in self.maintained.items():
            note = last_note(self.instance, key)
            reason = note.get(FAILED) or note.get(WAITING)
            if reason is None:
                continue
            seconds = max(0.0, time.time() - float(note.get(SINCE) or time.time()))
            text = f"{key.path[-1]} waits for {format_micros(int(seconds * 1e6))}, because {reason}"
            if FAILED in note:
                rows[pipeline.root] = error("failed", pipeline.root, reason, "run it again"), None
            elif seconds > limit:
                finding = error(
                    "waits", pipeline.root, text, "let it be maintained, or leave it out"
                )
                rows[pipeline.root] = finding, None
            else:
                rows.setdefault(pipeline.root, (None, text))
        return rows

    def _amounts(self) -> dict[str, tuple[int | None, int | None]]:
        """Return the files and bytes of the newest reported epoch of each pipeline, by root."""
        pipelines = self.names.pipelines.pipelines
        roots = {self.names.key(CHECKPOINT, listed): listed.root for listed in pipelines}
        records = self.instance.get_asset_records(list(roots)) if roots else []
        amounts: dict[str, tuple[Any, Any]] = {}
        for record in records:
            event = record.asset_entry.last_materialization
            made = None if event is None else event.asset_materialization
            if made is not None:
                values = (made.metadata.get(f"arroyo/{name}") for name in ("files", "bytes"))
                files, size_bytes = (None if entry is None else entry.value for entry in values)
                amounts[roots[record.asset_entry.asset_key]] = (files, size_bytes)
        return amounts

    def _unknown(self, root: str) -> _Row:
        """Verify a pipeline that the definitions do not know, as closely as the others."""
        from arroyo_dagster.state.operations.verify.job import verify_job

        pipeline = unlisted_pipeline(root)
        (age,) = self._ages([pipeline.paths])
        try:
            verdict = verify_job(self.tools.store.reading(), pipeline.paths, level=1).verdict
        except ArroyoStateError as problem:
            verdict = Verdict(findings=(warning("no-epoch", root, problem.message, _RELOAD),))
        evidence, step = "the definitions do not know it", _RELOAD
        if root in self.names.pipelines.keys:
            evidence = "it left the definitions, and is there"
            step = f"take it out of `gone` if it is in use, or delete its objects; then {_RELOAD}"
        if verdict.errors:
            evidence = f"{evidence}; {verdict.errors[0]}"
            return _Row(age, "broken", error("unknown", root, evidence, step))
        return _Row(age, "unknown", warning("unknown", root, evidence, step))


def _metadata(rows: Sequence[_Row]) -> dict[str, Any]:
    """Return the totals as numbers, which Dagster plots, and the table."""
    sizes = [row.size_bytes for row in rows if row.size_bytes is not None]
    moving = [row.age_micros for row in rows if row.age_micros is not None and not row.age.resting]
    states = [row.state for row in rows]
    return shown.known(
        {
            "pipelines": shown.table(row.cells() for row in rows),
            "arroyo/pipelines": len(rows),
            "arroyo/broken": states.count("broken"),
            "arroyo/vanished": states.count("vanished"),
            "arroyo/unknown": states.count("unknown"),
            "arroyo/unreadable": states.count("unreadable"),
            "arroyo/warnings": sum(
                row.finding is not None and row.finding.severity.value == "warning" for row in rows
            ),
            "arroyo/at_rest": sum(row.age.resting is not None for row in rows),
            "arroyo/files": sum(row.files or 0 for row in rows),
            "arroyo/bytes": sum(sizes) if sizes else None,
            "arroyo/max_seconds_since_epoch": max(moving) / 1e6 if moving else None,
        }
    )
