"""Pickles with user code, for processes that may lack the user's modules."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from arroyo_dagster.spark.versions import cloudpickle

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
