"""Fill stopped Arroyo jobs with tables that Spark computes from stored events: assets and job."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import dagster as dg

from arroyo_dagster.orchestration.serving import Turn
from arroyo_dagster.orchestration.surgery.state_change import ChangeConfig, build_change
from arroyo_dagster.orchestration.translator import BOOTSTRAPPED_STATE, SPARK, Names
from arroyo_dagster.user_modules import load_function

if TYPE_CHECKING:
    from arroyo_dagster.state.operations.surgery.window import PlannableEdit


class BootstrapConfig(ChangeConfig):
    """How the pipeline of the asset is filled."""


def build_bootstrapped_state(names: Names, function: str) -> dg.Definitions:
    """Build `bootstrapped_state` of each Arroyo pipeline, and the job `arroyo_bootstrap`.

    A run plans only, unless its configuration has `execute: true`.

    Args:
        function: MODULE:FUNCTION; gets the Spark session, and returns a
            `arroyo_dagster.spark.surgery.bootstrap.Bootstrap`. It is loaded by each run.
    """

    @contextmanager
    def edit(turn: Turn, config: BootstrapConfig, context: Any) -> Iterator["PlannableEdit"]:
        called = load_function(function)
        # Only here: a mistake in the name of the function is told without Spark.
        from arroyo_dagster.spark.surgery.bootstrap import computed_bootstrap

        status = turn.tools.directory.directory(turn.tools.store)
        session = getattr(context.resources, names.name(SPARK)).session
        with computed_bootstrap(session, called, function) as computed:
            yield computed.job(turn.pipeline.paths, status).edit()

    text = "Plan or execute a bootstrap of a stopped job from stored events."
    assets, job = build_change(
        names, BOOTSTRAPPED_STATE, "arroyo_bootstrap", text, BootstrapConfig, edit
    )
    return dg.Definitions(assets=assets, jobs=[job]) if assets else dg.Definitions()
