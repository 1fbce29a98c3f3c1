"""Load a pipeline by its place: `module:name`, or `path/to/file.py:name`."""

from __future__ import annotations

import inspect

from arroyo_dagster.engine.pipeline import Pipeline
from arroyo_dagster.errors import InputError
from arroyo_dagster.user_modules import load_attribute


def load_pipeline(target: str) -> Pipeline:
    """Load the pipeline that `MODULE:ATTRIBUTE` or `path/to/file.py:ATTRIBUTE` names.

    Raises:
        InputError: the target is not a pipeline, or its module cannot be imported.
    """
    next_step = "name a Pipeline, or a function without arguments that returns one"
    pipeline = load_attribute(
        target,
        "a pipeline is named MODULE:PIPELINE or path/to/file.py:PIPELINE",
        next_step,
        lambda module: {"pipelines": _pipelines_in(module) or "none"},
    )
    if callable(pipeline) and not isinstance(pipeline, Pipeline):
        try:
            inspect.signature(pipeline).bind()
        except (TypeError, ValueError) as error:
            message = f"it cannot be called without arguments ({error})"
            raise InputError(message, given=target, next_step=next_step) from error
        pipeline = pipeline()
    if not isinstance(pipeline, Pipeline):
        message = f"it is of type {type(pipeline).__name__}, not a Pipeline"
        raise InputError(message, given=target, next_step=next_step)
    return pipeline


def _pipelines_in(module: object) -> str:
    return ", ".join(name for name, value in vars(module).items() if _gives_pipeline(value))


def _gives_pipeline(one: object) -> bool:
    if not inspect.isfunction(one):
        return isinstance(one, Pipeline)
    signature = inspect.signature(one)
    optional = all(p.default is not p.empty for p in signature.parameters.values())
    return optional and signature.return_annotation in (Pipeline, "Pipeline")
