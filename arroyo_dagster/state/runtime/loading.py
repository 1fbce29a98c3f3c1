"""Load a pipeline by the place of its definition: `module:name`, or `path/to/file.py:name`."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable
from typing import Any

from arroyo_dagster.errors import ArroyoStateError, InputError
from arroyo_dagster.state.runtime.pipeline import Pipeline
from arroyo_dagster.user_modules import import_file, import_named, open_folders


def load_pipeline(target: str) -> Pipeline:
    """Load the pipeline that `MODULE:ATTRIBUTE` or `path/to/file.py:ATTRIBUTE` names.

    Raises:
        InputError: the target is not a pipeline, or its module cannot be imported.
    """
    where, _, attribute = target.rpartition(":")
    if not where or not attribute:
        raise InputError(
            "a pipeline is named MODULE:PIPELINE or path/to/file.py:PIPELINE", given=target
        )
    found: object = _import(where)
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise InputError(
                f"there is no {name!r} in it",
                given=target,
                pipelines=_pipelines_in(found) or "none",
                next_step="name a Pipeline, or a function without arguments that returns one",
            )
        found = getattr(found, name)
    if callable(found) and not isinstance(found, Pipeline):
        found = _called(found, target)
    if not isinstance(found, Pipeline):
        raise InputError(
            f"it is of type {type(found).__name__}, not a Pipeline",
            given=target,
            next_step="name a Pipeline, or a function without arguments that returns one",
        )
    return found


def _pipelines_in(module: object) -> str:
    return ", ".join(name for name, one in vars(module).items() if _gives_pipeline(one))


def _gives_pipeline(one: object) -> bool:
    if not inspect.isfunction(one):
        return isinstance(one, Pipeline)
    signature = inspect.signature(one)
    given = all(p.default is not p.empty for p in signature.parameters.values())
    return given and signature.return_annotation in (Pipeline, "Pipeline")


def _called(function: Callable[..., Any], target: str) -> object:
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError) as error:
        raise InputError(
            f"it cannot be called without arguments ({error})",
            given=target,
            next_step="name a Pipeline, or a function without arguments that returns one",
        ) from error
    return function()


def _import(where: str) -> object:
    try:
        if where.endswith(".py"):
            return import_file(where)
        open_folders(os.getcwd())
        return import_named(where)
    except ArroyoStateError:
        raise
    except Exception as error:
        raise _not_imported(where, error) from error


def _not_imported(where: str, error: Exception) -> InputError:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and f"{where}.".startswith(f"{missing}."):
        return InputError(
            f"there is no module {missing!r}",
            given=where,
            next_step="run it where the module can be imported, or give the path of its file",
        )
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    return InputError(
        f"the module cannot be imported ({type(error).__name__}: {error})",
        given=where,
        at=None if last is None else f"{last.filename}:{last.lineno}",
        next_step="repair the module; nothing was written",
    )
