"""The checks of all pipelines, the job that evaluates those that are due, and its schedule."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import dagster as dg
from pydantic import Field

from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.orchestration.check_results import (
    LastResult,
    is_reportable,
    last_results,
    report,
    yield_and_report,
)
from arroyo_dagster.orchestration.failures import as_failure
from arroyo_dagster.orchestration.pipelines.model import ListedPipeline
from arroyo_dagster.orchestration.requests import BACKGROUND_TAGS, due_schedule
from arroyo_dagster.orchestration.runners import Tools
from arroyo_dagster.orchestration.serving import BoundsConfig, Turn, Work, serve
from arroyo_dagster.orchestration.translator import (
    CHECKPOINT,
    HEALTHY,
    RESTORABLE,
    Names,
    in_layers,
)
from arroyo_dagster.orchestration.verify.verdict import (
    LISTING,
    VerifyOptions,
    audited_at,
    verify_pipeline,
)
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.model.verify import MAX_LEVEL
from arroyo_dagster.state.planning.rules import KINDS

JOB = "arroyo_verify"
_EVENTS_A_DAY = 38_400
_FEWEST_MINUTES = 15

Verdicts = Mapping[tuple[ListedPipeline, str], LastResult]
"""The last result of each check of checkpoints, by pipeline and name of the check."""
OnVerified = Callable[[Any, Sequence[ListedPipeline], Verdicts], None]

_TEXTS = {
    RESTORABLE: "A restore of the newest epoch finds every file that it opens, with the expected "
    "content: level 1 of `arroyo-state verify`, once a day level 4. If it is red, run "
    "`arroyo-state verify PIPELINE`: each finding names the object and the next step.",
    HEALTHY: "The state develops as expected. Each row is a kind of finding, with its next step.",
}


class VerifyConfig(BoundsConfig):
    """Which pipelines to verify."""

    pipelines: list[str] = Field(
        default_factory=list,
        description="The jobs, as job or pipeline/job. Empty: those that are due.",
    )


def verify_cron(pipelines: int) -> str:
    """Return how often pipelines are verified: every 15 minutes up to 100 of them, less often for
    more, so that all checks together stay below 50,000 events a day.
    """
    minutes = max(_FEWEST_MINUTES, -(-pipelines * 2 * 1440 // _EVENTS_A_DAY))
    if minutes <= 30:
        return f"*/{15 if minutes <= 15 else 20 if minutes <= 20 else 30} * * * *"
    hours = -(-minutes // 60)
    return f"7 */{hours} * * *" if hours > 1 else "7 * * * *"


def build_verify(
    names: Names,
    options: VerifyOptions,
    on_verified: OnVerified,
    *,
    cron: str | None,
    timezone: str,
    running: bool,
) -> dg.Definitions:
    """Build the checks `restorable` and `healthy` of each pipeline, the job and its schedule.

    Args:
        on_verified: called by a step with its context, the pipelines that it has verified, and the
            verdicts that they had before.
    """

    def due(tools: Tools, instance: dg.DagsterInstance) -> list[ListedPipeline]:
        return due_pipelines(names, tools, instance, options)

    @dg.op(
        name=f"{names.name(JOB)}_op",
        description="Verify the pipelines that are due, and record each verdict.",
        required_resource_keys=names.resources,
        out=dg.Out(dg.Nothing),
    )
    def verify(context: dg.OpExecutionContext, config: VerifyConfig) -> Iterator[Any]:
        tools = names.tools(context)
        with as_failure():
            selected = [*map(names.find, config.pipelines)] or due(tools, context.instance)
            last = last_verdicts(names, context.instance, selected)
        # Every pipeline that is due comes first; a level that reads all rows takes what is left.
        passed: list[ListedPipeline] = []
        failures: list[str] = []

        def serve_level(level: int, pipelines: Sequence[ListedPipeline]) -> Iterator[Any]:
            work = _work(names, context, options, last, level, passed)
            try:
                yield from serve(context, pipelines, work, config, tools)
            except dg.Failure as failure:
                failures.append(str(failure.description))

        yield from serve_level(1, selected)
        audits = [one for one in passed if audit_is_due(last.get((one, RESTORABLE)), options)]
        yield from serve_level(MAX_LEVEL, audits)
        on_verified(context, selected, last)
        if failures:
            raise dg.Failure("; ".join(failures), allow_retries=False)
        yield dg.Output(
            None, metadata={"arroyo/verified": len(selected), "arroyo/audited": len(audits)}
        )

    @dg.job(
        name=names.name(JOB),
        description="Verify the pipelines with new epochs or other changes, and those that wait "
        "longest. Fails if one cannot be restored.",
        executor_def=dg.in_process_executor,
        tags=BACKGROUND_TAGS,
    )
    def job() -> None:
        verify()

    checks = [
        (pipeline, names.spec(CHECKPOINT, pipeline)) for pipeline in names.pipelines.pipelines
    ]
    schedule = due_schedule(
        names,
        job,
        cron or verify_cron(len(checks)),
        due=due,
        request=lambda due: dg.RunRequest(
            run_config=dg.RunConfig(
                {verify.name: VerifyConfig(pipelines=[pipeline.root for pipeline in due])}
            )
        ),
        timezone=timezone,
        running=running,
    )
    return dg.Definitions(
        asset_checks=in_layers(
            names.name("arroyo_checks"),
            checks,
            lambda op, layer: _checks(names, op, layer, options, on_verified),
        ),
        jobs=[job],
        schedules=[schedule],
    )


def _checks(
    names: Names,
    op: str,
    layer: Sequence[tuple[ListedPipeline, dg.AssetSpec]],
    options: VerifyOptions,
    on_verified: OnVerified,
) -> dg.AssetChecksDefinition:
    """Build the checks as one step, which a user runs from a page of Dagster."""
    by_key = {spec.key: pipeline for pipeline, spec in layer}
    details = {HEALTHY: [f"`{kind}`: {text}" for kind, text in KINDS.items()]}
    specs = [
        names.check_spec(
            name,
            spec.key,
            text.replace("PIPELINE", pipeline.root),
            details=details.get(name, ()),
            blocking=name == RESTORABLE,
        )
        for pipeline, spec in layer
        for name, text in _TEXTS.items()
    ]

    @dg.multi_asset_check(
        name=op, specs=specs, can_subset=True, required_resource_keys=names.resources
    )
    def checks(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        selected: dict[ListedPipeline, list[str]] = {}
        for check in context.selected_asset_check_keys:
            selected.setdefault(by_key[check.asset_key], []).append(check.name)
        instance = context.instance
        with as_failure():
            last = last_verdicts(names, instance, list(selected))

        def work(turn: Turn) -> Iterator[dg.AssetCheckResult]:
            before, wanted = last.get((turn.pipeline, RESTORABLE)), selected[turn.pipeline]
            results, _ = verify_pipeline(names, turn, before, options, instance, wanted=wanted)
            yield from results

        results = serve(context, list(selected), work, BoundsConfig(), names.tools(context))
        yield from yield_and_report(context, results)
        on_verified(context, list(selected), last)

    return checks


def _work(
    names: Names,
    context: dg.OpExecutionContext,
    options: VerifyOptions,
    last: Verdicts,
    level: int,
    passed: list[ListedPipeline],
) -> Work:
    """Return what verifies one pipeline of a run, and records the verdicts to report.

    Args:
        passed: receives the pipelines without an error.
    """
    checks = (RESTORABLE,) if level == MAX_LEVEL else (RESTORABLE, HEALTHY)

    def work(turn: Turn) -> Iterator[Any]:
        pipeline, instance = turn.pipeline, context.instance
        before = last.get((pipeline, RESTORABLE))
        results, alarm = verify_pipeline(
            names, turn, before, options, instance, level=level, wanted=checks
        )
        for result in results:
            earlier = last.get((pipeline, str(result.check_name)))
            reportable = is_reportable(earlier, result, options.report_every)
            if result.check_name == RESTORABLE:
                reportable |= level == MAX_LEVEL or alarm is not None
                passed.extend([pipeline] * result.passed)
            if reportable:
                report(instance, result, context.run.run_id)
        if alarm is not None:
            raise dg.Failure(alarm, allow_retries=False)
        yield from ()

    return work


def last_verdicts(
    names: Names, instance: dg.DagsterInstance, pipelines: Sequence[ListedPipeline]
) -> Verdicts:
    """Return the last result of each check of checkpoints that was ever evaluated."""
    keys = {
        dg.AssetCheckKey(names.key(CHECKPOINT, pipeline), name): (pipeline, name)
        for pipeline in pipelines
        for name in (RESTORABLE, HEALTHY)
    }
    return {keys[key]: last for key, last in last_results(instance, list(keys)).items()}


def audit_is_due(last: LastResult | None, options: VerifyOptions) -> bool:
    """Return whether a pipeline was not verified at level 4 for `audit_after`."""
    return not 0 <= time.time() - audited_at(last) < options.audit_after


def due_pipelines(
    names: Names, tools: Tools, instance: dg.DagsterInstance, options: VerifyOptions
) -> list[ListedPipeline]:
    """Return the pipelines to verify now, those that wait longest first: without a verdict, with
    another listing than at the last one, or not verified at level 4 for `audit_after`.

    A pipeline that cannot be listed is due: its verdict says why.
    """
    from arroyo_dagster.state.operations.verify.fingerprint import list_objects, listing_digest
    from arroyo_dagster.state.storage.concurrency import concurrently

    store, now = tools.store.reading(), wall_clock() / 1e6
    last = last_verdicts(names, instance, names.pipelines.pipelines)

    def age(pipeline: ListedPipeline) -> float | None:
        """The age of the verdict; None if it is not due."""
        before = last.get((pipeline, RESTORABLE))
        if before is None:
            return float("inf")
        seconds = now - before.at
        if (before.is_error and 0 <= seconds < options.audit_after) or not audit_is_due(
            before, options
        ):
            with suppress(ArroyoStateError):
                digest = listing_digest(list_objects(store, pipeline.paths))
                return None if digest == before.metadata.get(LISTING) else seconds
        return seconds

    ages = zip(names.pipelines.pipelines, concurrently(age, names.pipelines.pipelines), strict=True)
    due = [(seconds, pipeline) for pipeline, seconds in ages if seconds is not None]
    return [pipeline for _, pipeline in sorted(due, key=lambda pair: (-pair[0], pair[1].root))]
