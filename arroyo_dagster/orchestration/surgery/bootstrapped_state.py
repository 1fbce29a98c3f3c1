"""Fill stopped Arroyo jobs with tables that Spark computes from stored events: assets and job."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import dagster as dg

from arroyo_dagster.orchestration.pipelines.model import Pipeline
from arroyo_dagster.orchestration.surgery.state_change import (
    ChangeConfig,
    ChangeRun,
    change_assets,
    change_job,
)
from arroyo_dagster.orchestration.translator import BOOTSTRAPPED_STATE, SPARK, Names
from arroyo_dagster.state.model.layout import JobPaths

if TYPE_CHECKING:
    from arroyo_dagster.state.operations.surgery.window import PlannableEdit

OP = "arroyo_bootstrapped_state"


class BootstrapConfig(ChangeConfig):
    """How the pipeline of the asset is filled."""


def build_bootstrapped_state(names: Names, function: str) -> dg.Definitions:
    """Build `bootstrapped_state` of each Arroyo pipeline, and the job `arroyo_bootstrap`.

    A run plans only, unless its configuration has `execute: true`.

    Args:
        function: MODULE:FUNCTION; gets the Spark session, and returns a
            `arroyo_dagster.spark.surgery.bootstrap.Bootstrap`. It is loaded by each run.
    """

    def run(pipeline: Pipeline, context: Any, config: ChangeConfig) -> ChangeRun:
        tools = names.tools(context)

        @contextmanager
        def edit(paths: JobPaths) -> Iterator["PlannableEdit"]:
            from arroyo_dagster.state.runtime.loading import load_function

            called = load_function(function)
            # Only here: a mistake in the name of the function is told without Spark.
            from arroyo_dagster.spark.surgery.bootstrap import computed_bootstrap

            status = tools.directory.directory(tools.store)
            session = getattr(context.resources, names.name(SPARK)).session
            with computed_bootstrap(session, called, function) as computed:
                yield computed.job(paths, status).edit()

        return ChangeRun(
            context=context,
            key=names.key(BOOTSTRAPPED_STATE, pipeline),
            pipeline=pipeline,
            config=config,
            tools=tools,
            edit=edit,
        )

    assets = change_assets(names, BOOTSTRAPPED_STATE, OP, run, BootstrapConfig)
    if not assets:
        return dg.Definitions()
    description = "Plan or execute a bootstrap of a stopped job from stored events."
    job = change_job(names, "arroyo_bootstrap", assets, description)
    return dg.Definitions(assets=assets, jobs=[job])
