"""What a command keeps other packages from loading and starting, because it never uses it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_THREADS = "OPENBLAS_NUM_THREADS"


@contextmanager
def light_imports() -> Iterator[None]:
    """Save the processor time that other packages spend for nothing, while a command runs.

    - pyarrow loads pandas with its first array, if it is installed, as Spark requires: more than
      the rest of a short command. Only other packages that import pandas get it, for example Spark.
    - numpy starts a thread per core to multiply matrices. A setting of the user's stays.
    """
    finder, threads = _WithoutPandas(), os.environ.get(_THREADS)
    sys.meta_path.insert(0, finder)
    os.environ.setdefault(_THREADS, "1")
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        if threads is None:
            os.environ.pop(_THREADS, None)


class _WithoutPandas:
    """A finder to which pandas is not installed if pyarrow asks, or this package through it."""

    def find_spec(self, name: str, *_: object) -> None:
        """Find nothing, so that the next finder is asked."""
        if name == "pandas" and _importer() in ("pyarrow", "arroyo_dagster"):
            raise ModuleNotFoundError("pyarrow needs no pandas here", name=name)


def _importer() -> str:
    """Return the package of the innermost code that is not Python's import machinery."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(_MACHINERY):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


_MACHINERY = ("importlib.", "_frozen_importlib")
