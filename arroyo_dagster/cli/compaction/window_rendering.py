"""Print what a maintenance window did, for people and as JSON."""

from __future__ import annotations

from typing import Any

import click

from arroyo_dagster.cli.common import print_error
from arroyo_dagster.cli.rendering import clock
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.maintenance_window import WindowOutcome, WindowStep


def print_step(step: WindowStep) -> None:
    """Print one step, beside the output."""
    click.echo(f"{clock(step.at_micros)}  {step.did}", err=True)


def print_window(paths: JobPaths, outcome: WindowOutcome[Any, Any], changed: str | None) -> None:
    """Print how a window ended.

    Args:
        changed: what was changed, in a few words; None if nothing was.
    """
    if outcome.problem is not None:
        print_error(outcome.problem)
    words = [outcome.end.value]
    if changed is not None:
        words.append(changed)
    if outcome.downtime_seconds:
        words.append(f"down for {outcome.downtime_seconds:.0f} s")
    click.echo(f"{paths.root}: {'; '.join(words)}")


def window_json(outcome: WindowOutcome[Any, Any]) -> dict[str, Any]:
    """Return the JSON form of a window, without what was changed in it."""
    facts, problem = outcome.facts, outcome.problem
    return {
        "end": outcome.end.value,
        "started": outcome.started,
        "problem": None if problem is None else str(problem),
        "downtime_seconds": round(outcome.downtime_seconds, 3),
        "state": None if facts is None else facts.state,
        "run_id": None if facts is None else facts.run_id,
        "steps": [{"at_micros": step.at_micros, "did": step.did} for step in outcome.steps],
    }


def exit_after(outcome: WindowOutcome[Any, Any]) -> None:
    """End the command with exit code 1 if a step failed, or the job may be down."""
    if outcome.problem is not None or not outcome.started:
        click.get_current_context().exit(1)
