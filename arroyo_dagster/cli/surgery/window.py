"""`--window` of edits, forks and evolves: stop the running job, change its state, start it
again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import click

from arroyo_dagster.cli.common import if_interrupted
from arroyo_dagster.cli.compaction.window_rendering import (
    exit_after,
    print_step,
    print_window,
    window_json,
)
from arroyo_dagster.cli.directory import token_of_environment
from arroyo_dagster.cli.rendering import print_json
from arroyo_dagster.cli.settings import NamedSetting, named_settings
from arroyo_dagster.cli.surgery.rendering import outcome_json, print_plan
from arroyo_dagster.state.model.maintenance_window import WindowEnd, WindowLimits
from arroyo_dagster.state.model.settings import settings_from
from arroyo_dagster.state.operations.compaction.window_recovery import JobWindowOptions
from arroyo_dagster.state.operations.surgery.window import PlannableEdit, run_edit_window
from arroyo_dagster.state.storage.arroyo.api import ArroyoControl
from arroyo_dagster.state.storage.store import ObjectStore

_F = TypeVar("_F", bound=Callable[..., Any])


def window_options(command: _F) -> _F:
    """Add `--window`, and how long each step of a window may take."""
    limits = named_settings(
        NamedSetting(WindowLimits),
        "how long a step of the window may take",
        "stop_seconds=600",
        only_for="With --window",
    )
    flag = click.option(
        "--window",
        "in_window",
        is_flag=True,
        help="Stop the running job with a checkpoint through --arroyo-api, execute, and start it "
        "again, whatever happens.",
    )
    return flag(limits(command))


def check_window(given: dict[str, Any]) -> None:
    """Check the options of a command with `window_options`.

    Raises:
        click.UsageError: options that do not go together.
    """
    if not given["in_window"]:
        return
    if _api() is None:
        raise click.UsageError("--window needs --arroyo-api: it stops and starts the job")
    if given["approve"] is not None:
        raise click.UsageError(
            "--approve does not go with --window: the stop writes an epoch, so the plan gets "
            "another digest; it is executed only if it changes the same tables"
        )


def run_in_window(store: ObjectStore, edit: PlannableEdit, given: dict[str, Any]) -> None:
    """Carry out an edit in a window, and print what was done."""
    if_interrupted("the job may be down; the same command starts it again")
    options = JobWindowOptions(
        owner="arroyo-state edit",
        limits=settings_from(
            WindowLimits, {"quiet": given["quiet_seconds"], **dict(given["limits"])}
        ),
        lease_wait_seconds=given["lease_wait_seconds"],
        on_step=(lambda step: None) if given["as_json"] else print_step,
    )
    address = _api()
    assert address is not None  # `check_window` refuses the options else
    control = ArroyoControl(address, token=token_of_environment())
    outcome = run_edit_window(store, control, edit, options)
    change = outcome.change
    if change is not None and outcome.end is not WindowEnd.AT_REST:  # the window has done it
        change = replace(change, plan=replace(change.plan, afterwards=()))
    if given["as_json"]:
        edited = None if change is None else outcome_json(change)
        print_json({**window_json(outcome), "edit": edited})
    else:
        done = None
        if change is not None:
            print_plan(change.plan, in_full=False)
            done = f"{change.plan.edit.name} done at epoch {change.plan.epoch}"
        print_window(edit.paths, outcome, done if change and change.published else None)
    exit_after(outcome)


def _api() -> str | None:
    """Return the address of Arroyo's API, of which `directory_options` makes the directory."""
    address: str | None = click.get_current_context().params["api"]
    return address
