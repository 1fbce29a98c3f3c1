"""Assets of your own: partitioned by the jobs of a deployment, and downstream of its assets."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import dagster as dg

from arroyo_dagster.errors import InputError
from arroyo_dagster.orchestration.failures import as_failure
from arroyo_dagster.orchestration.partitions import jobs_partitions
from arroyo_dagster.orchestration.translator import (
    CHECKPOINT,
    TABLES,
    DagsterArroyoTranslator,
    Naming,
)


def arroyo_assets(
    specs: Sequence[dg.AssetSpec],
    *,
    reads: Sequence[str] = (CHECKPOINT,),
    deployment: str | None = None,
    translator: DagsterArroyoTranslator | None = None,
    **options: Any,
) -> Callable[[Callable[..., Any]], dg.AssetsDefinition]:
    """Make a function the assets `specs`, one partition per job of a deployment.

        @arroyo_assets([dg.AssetSpec("report")])
        def report(context, arroyo_store): ...

    The function may take the deployment's resources, such as `arroyo_store`, by these names. Its
    `context.partition_key` is the job, as `find_job` takes it. An error of this package becomes a
    failure with its next step, and is tried again if it may heal.

    Args:
        reads: the tables of the deployment that each of the assets depends on, as in
            `ArroyoTableProps.table`. A spec may have other dependencies besides.
        deployment: the name given to `build_arroyo_definitions`.
        translator: the one given to `build_arroyo_definitions`, if it changes keys.
        **options: of `dagster.multi_asset`, such as `name`, `pool` or `hooks`.

    Raises:
        InputError: no specs were given, or `reads` names no table.
    """
    if not specs:
        raise InputError("no assets: give at least one spec", next_step="pass dg.AssetSpec(KEY)")
    naming = _naming(deployment, translator)
    upstream = [naming.key(_known(table)) for table in reads]
    partitioned = [
        spec.replace_attributes(deps=[*spec.deps, *upstream], partitions_def=naming.jobs)
        for spec in specs
    ]

    def decorate(function: Callable[..., Any]) -> dg.AssetsDefinition:
        given = {"name": function.__name__, **options}
        return dg.multi_asset(specs=partitioned, **given)(naming.bind(_translated(function)))

    return decorate


def build_arroyo_asset_selection(
    *tables: str,
    deployment: str | None = None,
    translator: DagsterArroyoTranslator | None = None,
) -> dg.AssetSelection:
    """Select assets of a deployment, for a job, schedule or automation sensor of your own.

    Args:
        tables: as in `ArroyoTableProps.table`; none = all of the deployment. States of dataflows
            are not among them.
        deployment, translator: those given to `build_arroyo_definitions`.

    Raises:
        InputError: there is no such table.
    """
    naming = _naming(deployment, translator)
    return dg.AssetSelection.assets(*(naming.key(_known(table)) for table in tables or TABLES))


def _naming(deployment: str | None, translator: DagsterArroyoTranslator | None) -> Naming:
    partitions = jobs_partitions(deployment)
    return Naming(translator or DagsterArroyoTranslator(), partitions, deployment)


def _known(table: str) -> str:
    if table not in TABLES:
        raise InputError("there is no such asset", table=table, tables=list(TABLES))
    return table


def _translated(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its errors as failures. Dagster asks whether it is a generator."""
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def generate(*positional: Any, **arguments: Any) -> Any:
            with as_failure():
                yield from function(*positional, **arguments)

        return generate

    @functools.wraps(function)
    def call(*positional: Any, **arguments: Any) -> Any:
        with as_failure():
            return function(*positional, **arguments)

    return call
