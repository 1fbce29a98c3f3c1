"""Fill a stopped Arroyo job with tables that Spark computes from stored events: the asset and its
job.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from arroyo_dagster.orchestration.directory import ArroyoDirectory
from arroyo_dagster.orchestration.partitions import jobs_partitions
from arroyo_dagster.orchestration.resources import ArroyoStateStore, SparkSessionResource
from arroyo_dagster.orchestration.surgery.state_change import (
    ChangeConfig,
    ChangeRun,
    change_asset,
    change_job,
)
from arroyo_dagster.orchestration.translator import (
    BOOTSTRAPPED_STATE,
    DagsterArroyoTranslator,
    Naming,
)
from arroyo_dagster.state.model.layout import JobPaths

if TYPE_CHECKING:
    from arroyo_dagster.state.operations.surgery.window import PlannableEdit

OP = "arroyo_bootstrapped_state"


class BootstrapConfig(ChangeConfig):
    """Which job to fill."""

    job: str = Field(
        description="The stopped job of this deployment, as job or pipeline/job.",
        examples=["staging/main"],
    )


def build_bootstrapped_state(
    function: str,
    *,
    deployment: str | None = None,
    translator: DagsterArroyoTranslator | None = None,
) -> dg.Definitions:
    """Build the asset of a bootstrapped state, and the job `arroyo_bootstrap`.

    Merge the result with that of `build_arroyo_definitions`, whose resources it uses: its Spark
    computes the tables. A run plans only, unless its configuration has `execute: true`.

    Args:
        function: MODULE:FUNCTION; gets the Spark session, and returns a
            `arroyo_dagster.spark.surgery.bootstrap.Bootstrap`. It is loaded by each run.
        deployment, translator: those given to `build_arroyo_definitions`.
    """
    naming = Naming(
        translator or DagsterArroyoTranslator(), jobs_partitions(deployment), deployment
    )
    asset = _build_asset(naming, function)
    description = "Plan or execute a bootstrap of a stopped job from stored events."
    job = change_job(naming, "arroyo_bootstrap", asset, description)
    return dg.Definitions(assets=[asset], jobs=[job])


def _build_asset(naming: Naming, function: str) -> dg.AssetsDefinition:
    @change_asset(naming, BOOTSTRAPPED_STATE, OP)
    def arroyo_bootstrapped_state(
        context: dg.AssetExecutionContext,
        config: BootstrapConfig,
        arroyo_store: ArroyoStateStore,
        arroyo_directory: ArroyoDirectory,
        arroyo_spark: SparkSessionResource,
    ) -> Any:
        @contextmanager
        def edit(paths: JobPaths) -> Iterator["PlannableEdit"]:
            from arroyo_dagster.state.runtime.loading import load_function

            called = load_function(function)
            # Only here: a mistake in the name of the function is told without Spark.
            from arroyo_dagster.spark.surgery.bootstrap import computed_bootstrap

            status = arroyo_directory.directory(arroyo_store)
            with computed_bootstrap(arroyo_spark.session, called, function) as computed:
                yield computed.job(paths, status).edit()

        yield from ChangeRun(
            context=context,
            key=naming.key(BOOTSTRAPPED_STATE),
            job=config.job,
            config=config,
            store=arroyo_store,
            directory=arroyo_directory,
            edit=edit,
        ).events()

    return arroyo_bootstrapped_state
