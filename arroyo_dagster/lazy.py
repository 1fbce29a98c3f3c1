"""Public names of a package, each loaded from its module when first asked for.

Naming one thing of a package does not load all of it: `import arroyo_dagster` costs nothing.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the `__getattr__` and `__dir__` of a package.

    Args:
        package: its `__name__`.
        modules: for each public name the module below the package that holds it.
    """
    loaded = vars(sys.modules[package])

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        loaded[name] = value
        return value

    def names() -> list[str]:
        return sorted({*loaded, *modules})

    return get, names
