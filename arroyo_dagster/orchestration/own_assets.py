"""Assets of your own: partitioned by the jobs of a deployment, and downstream of its assets."""

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dagster as dg

from arroyo_dagster.errors import InputError
from arroyo_dagster.orchestration.directory import ArroyoDirectory
from arroyo_dagster.orchestration.failures import as_failure
from arroyo_dagster.orchestration.partitions import jobs_partitions
from arroyo_dagster.orchestration.resources import ArroyoStateStore, SparkSessionResource
from arroyo_dagster.orchestration.runners import MaintenanceRunner
from arroyo_dagster.orchestration.translator import (
    ALL_TABLES,
    CHECKPOINT,
    TABLES,
    DagsterArroyoTranslator,
    Naming,
    specified_assets,
)

_RESOURCES: Mapping[str, Any] = {
    "arroyo_store": ArroyoStateStore,
    "arroyo_directory": ArroyoDirectory,
    "arroyo_runner": MaintenanceRunner,
    "arroyo_spark": SparkSessionResource,
}
"""By the names under which functions take them."""


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

    The function may take the deployment's resources, such as `arroyo_store`, by these names, with
    or without annotations. Its `context.partition_key` is the job, as `find_job` takes it. An error
    of this package becomes a failure with its next step, and is tried again if it may heal.

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
        return specified_assets(specs=partitioned, **given)(naming.bind(user_step(function)))

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
    if table not in ALL_TABLES:
        raise InputError("there is no such asset", table=table, tables=list(ALL_TABLES))
    return table


def _with_known_resources(function: Callable[..., Any], wrapper: Any) -> Callable[..., Any]:
    """Return a wrapper of a user's function with annotations by which Dagster knows resources.

    Parameters without an annotation that have the name of a resource of this package get its type,
    and texts are replaced by the types that they name in the function's module.
    """
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError:  # Dagster says which name it is, and how to write it
        hints = dict(function.__annotations__)
    signature = inspect.signature(function)
    hints = {**_RESOURCES, **hints}
    parameters = [
        one.replace(annotation=hints.get(one.name, one.annotation))
        for one in signature.parameters.values()
    ]
    returns = hints.get("return", signature.return_annotation)
    names = {*signature.parameters, "return"}
    wrapper.__annotations__ = {name: hint for name, hint in hints.items() if name in names}
    wrapper.__signature__ = signature.replace(parameters=parameters, return_annotation=returns)
    found: Callable[..., Any] = wrapper
    return found


def user_step(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a user's function with its errors as failures, and its resources by their names."""
    if inspect.isgeneratorfunction(function):  # Dagster asks the function, not its result

        @functools.wraps(function)
        def generate(*positional: Any, **arguments: Any) -> Any:
            with as_failure():
                yield from function(*positional, **arguments)

        return _with_known_resources(function, generate)

    @functools.wraps(function)
    def call(*positional: Any, **arguments: Any) -> Any:
        with as_failure():
            return function(*positional, **arguments)

    return _with_known_resources(function, call)
