"""Pipelines with their user code, packed for processes that may lack the user's modules."""

from __future__ import annotations

import hashlib
import pickle
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from arroyo_dagster.errors import InputError
from arroyo_dagster.spark.versions import cloudpickle
from arroyo_dagster.state.runtime.pipeline import Pipeline

_REMEMBERED_PIPELINES = 64
_PIPELINES: dict[str, Pipeline] = {}
_PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages"})
_PACKING = threading.Lock()
"""Guards cloudpickle's registry, which is global to the process, against concurrent runs."""


def pickled(work: Any) -> bytes:
    """Pickle what a task is told; the class of its store may be one of the program itself."""
    data: bytes = cloudpickle().dumps(work)
    return data


@contextmanager
def user_code_by_value() -> Iterator[None]:
    """Pickle the code of modules that are not installed, which Spark's workers may lack."""
    with _PACKING, ExitStack() as registered:
        for module in _modules_not_installed():
            cloudpickle().register_pickle_by_value(module)
            registered.callback(cloudpickle().unregister_pickle_by_value, module)
        yield


@dataclass(frozen=True, slots=True)
class PackedPipeline:
    """A pipeline with its user code, pickled once per run and unpickled once per process."""

    data: bytes
    digest: str

    @classmethod
    def pack(cls, pipeline: Pipeline) -> PackedPipeline:
        """Pickle a pipeline, including the code of modules that are not installed.

        Raises:
            InputError: a part of it cannot be pickled.
        """
        try:
            with user_code_by_value():
                data = pickled(pipeline)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise InputError(
                f"the pipeline cannot be sent to Spark's workers ({error})",
                pipeline=pipeline.name,
                next_step="open files, connections and locks in on_start, not earlier",
            ) from error
        return cls(data, hashlib.sha256(data).hexdigest())

    def unpack(self) -> Pipeline:
        """Return the pipeline; in one process, repeated calls return the same object."""
        pipeline = _PIPELINES.pop(self.digest, None) or pickle.loads(self.data)
        _PIPELINES[self.digest] = pipeline  # keeps the order of use, oldest first
        while len(_PIPELINES) > _REMEMBERED_PIPELINES:
            del _PIPELINES[next(iter(_PIPELINES))]
        return pipeline


def _modules_not_installed() -> list[ModuleType]:
    """Return the loaded modules that workers may be unable to import: the user's own files."""
    installed = tuple(sysconfig.get_paths().values())
    return [
        module
        for name, module in sorted(sys.modules.items())
        # spark-submit puts its own pyspark and py4j on the path, as zip files.
        if not name.startswith(("__main__", "arroyo_dagster", "pyspark.", "py4j."))
        and name not in ("pyspark", "py4j")
        and isinstance(module, ModuleType)
        and module.__name__ == name
        and (file := getattr(module, "__file__", None))
        and not file.startswith(installed)
        # A virtual environment may see the packages of another one, as notebooks of Databricks do.
        and _PACKAGE_FOLDERS.isdisjoint(Path(file).parts)
    ]
