"""What a command keeps other packages from loading and starting, because it never uses it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_THREADS = "OPENBLAS_NUM_THREADS"


@contextmanager
def light_imports(*, user_code: bool = False) -> Iterator[None]:
    """Save the processor time that other packages spend for nothing, while a command runs.

    - pyarrow loads pandas with its first array, if it is installed, as Spark requires: more than
      the rest of a short command. Only other packages that import pandas get it, for example Spark
      and functions of the user; pyarrow knows of it from then on.
    - numpy starts a thread per core to multiply matrices. A setting of the user's stays.

    Args:
        user_code: whether functions of the user run, for which numpy keeps its threads.
    """
    finder, threads = _WithoutPandas(), os.environ.get(_THREADS)
    sys.meta_path.insert(0, finder)
    if not user_code:
        os.environ.setdefault(_THREADS, "1")
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        if threads is None:
            os.environ.pop(_THREADS, None)


class _WithoutPandas:
    """A finder to which pandas is not installed if pyarrow asks, or this package through it."""

    def find_spec(self, name: str, *args: Any) -> ModuleSpec | None:
        """Return pandas as others find it, for those that may have it; else find nothing."""
        if name != "pandas":
            return None
        if _importer() in ("pyarrow", "arroyo_dagster"):
            raise ModuleNotFoundError("pyarrow needs no pandas here", name=name)
        others = (one.find_spec(name, *args) for one in sys.meta_path if one is not self)
        found = next((spec for spec in others if spec is not None), None)
        if found is not None and found.loader is not None:
            found.loader = _TellingPyarrow(found.loader)
        return found


class _TellingPyarrow(Loader):
    """Loads pandas, then has pyarrow look again: it notes that there is none, and asks once."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        if (pyarrow := sys.modules.get("pyarrow")) is not None:
            pyarrow.nulls(0).to_pandas()


def _importer() -> str:
    """Return the package of the innermost code that is not Python's import machinery."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(_MACHINERY):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


_MACHINERY = ("importlib.", "_frozen_importlib")
