"""A pipeline by the name of where it is defined: `module:name`, or `path/to/file.py:name`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from arroyo_dagster.errors import ArroyoStateError, InputError
from arroyo_dagster.state.pipeline import Pipeline


def load_pipeline(target: str) -> Pipeline:
    """Find the pipeline that `MODULE:ATTRIBUTE` or `path/to/file.py:ATTRIBUTE` names.

    Raises:
        InputError: it does not name one, or its module cannot be imported.
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
                next_step="name a Pipeline, or a function without arguments that gives one",
            )
        found = getattr(found, name)
    if callable(found) and not isinstance(found, Pipeline):
        found = _called(found, target)
    if not isinstance(found, Pipeline):
        raise InputError(
            f"it is of type {type(found).__name__}, not a Pipeline",
            given=target,
            next_step="name a Pipeline, or a function without arguments that gives one",
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
            next_step="name a Pipeline, or a function without arguments that gives one",
        ) from error
    return function()


def _import(where: str) -> object:
    directory, name = os.getcwd(), where
    if where.endswith(".py"):
        directory, name = os.path.split(os.path.abspath(where))
        name = name.removesuffix(".py")
        if not os.path.isfile(where):
            raise InputError("there is no such file", path=where)
        known = sys.modules.get(name)
        if known is not None and getattr(known, "__file__", None) != os.path.abspath(where):
            raise InputError(
                f"another module is called {name!r} already",
                path=where,
                next_step="rename the file",
            )
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        module = importlib.import_module(name)
    except ArroyoStateError:
        raise
    except Exception as error:
        raise _not_imported(where, name, error) from error
    return module


def _not_imported(where: str, name: str, error: Exception) -> InputError:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and f"{name}.".startswith(f"{missing}."):
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
        next_step="mend the module; nothing was written",
    )
