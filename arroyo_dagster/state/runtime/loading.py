"""Load what a user has written, by its place: `module:name`, or `path/to/file.py:name`."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from arroyo_dagster.errors import ArroyoStateError, InputError
from arroyo_dagster.state.runtime.pipeline import Pipeline
from arroyo_dagster.user_modules import import_file, import_named, open_folders


def load_pipeline(target: str) -> Pipeline:
    """Load the pipeline that `MODULE:ATTRIBUTE` or `path/to/file.py:ATTRIBUTE` names.

    Raises:
        InputError: the target is not a pipeline, or its module cannot be imported.
    """
    pipeline = _named(
        target,
        "a pipeline is named MODULE:PIPELINE or path/to/file.py:PIPELINE",
        "name a Pipeline, or a function without arguments that returns one",
        lambda module: {"pipelines": _pipelines_in(module) or "none"},
    )
    if callable(pipeline) and not isinstance(pipeline, Pipeline):
        try:
            inspect.signature(pipeline).bind()
        except (TypeError, ValueError) as error:
            raise InputError(
                f"it cannot be called without arguments ({error})",
                given=target,
                next_step="name a Pipeline, or a function without arguments that returns one",
            ) from error
        pipeline = pipeline()
    if not isinstance(pipeline, Pipeline):
        raise InputError(
            f"it is of type {type(pipeline).__name__}, not a Pipeline",
            given=target,
            next_step="name a Pipeline, or a function without arguments that returns one",
        )
    return pipeline


def call_function(function: Callable[..., Any], target: str, *given: Any) -> Any:
    """Call a function that `load_function` has loaded.

    Raises:
        InputError: it raised an error; names the line. Errors of this package are raised as they
            are.
    """
    try:
        return function(*given)
    except ArroyoStateError:
        raise
    except Exception as error:
        raise _failed("the function failed", target, error, 1) from error


def load_function(target: str) -> Callable[..., Any]:
    """Load the function that `MODULE:FUNCTION` or `path/to/file.py:FUNCTION` names.

    Raises:
        InputError: there is no such function, or its module cannot be imported.
    """
    next_step = "name a function"
    function = _named(
        target, "a function is named MODULE:FUNCTION or path/to/file.py:FUNCTION", next_step
    )
    if not callable(function):
        raise InputError(
            f"it is of type {type(function).__name__}, not a function",
            given=target,
            next_step=next_step,
        )
    return function


def _named(
    target: str,
    form: str,
    next_step: str,
    listed: Callable[[object], Mapping[str, Any]] = lambda _: {},
) -> object:
    """Return the attribute of a module that a target names.

    Args:
        form: what a target is, for messages.
        listed: returns the facts of a module that lacks the attribute.

    Raises:
        InputError: the target has another form, or there is no such module or attribute.
    """
    where, _, attribute = target.rpartition(":")
    if not where or not attribute:
        raise InputError(form, given=target)
    value: object = _import(where)
    for name in attribute.split("."):
        if not hasattr(value, name):
            raise InputError(
                f"there is no {name!r} in it", given=target, next_step=next_step, **listed(value)
            )
        value = getattr(value, name)
    return value


def _pipelines_in(module: object) -> str:
    return ", ".join(name for name, value in vars(module).items() if _gives_pipeline(value))


def _gives_pipeline(one: object) -> bool:
    if not inspect.isfunction(one):
        return isinstance(one, Pipeline)
    signature = inspect.signature(one)
    optional = all(p.default is not p.empty for p in signature.parameters.values())
    return optional and signature.return_annotation in (Pipeline, "Pipeline")


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
    return _failed("the module cannot be imported", where, error)


def _failed(what: str, given: str, error: Exception, frame: int = -1) -> InputError:
    """Return the error of a user's code.

    Args:
        frame: which frame of the traceback is the user's.
    """
    frames = traceback.extract_tb(error.__traceback__)
    place = frames[frame] if len(frames) > max(frame, 0) else None
    reason = str(error).strip().partition("\n")[0]
    return InputError(
        f"{what} ({type(error).__name__}: {reason})",
        given=given,
        at=None if place is None else f"{place.filename}:{place.lineno}",
        next_step="repair the module; nothing was written",
    )
