"""Functions of users as steps: their errors are failures, their resources known by name."""

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from arroyo_dagster.orchestration.directory import ArroyoDirectory
from arroyo_dagster.orchestration.failures import as_failure
from arroyo_dagster.orchestration.resources import ArroyoStateStore, SparkSessionResource
from arroyo_dagster.orchestration.runners import MaintenanceRunner

_RESOURCES: Mapping[str, Any] = {
    "arroyo_store": ArroyoStateStore,
    "arroyo_directory": ArroyoDirectory,
    "arroyo_runner": MaintenanceRunner,
    "arroyo_spark": SparkSessionResource,
}
"""By the names under which functions take them."""


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
