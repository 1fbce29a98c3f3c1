"""The error of a package that is not installed, with the command that installs it.

An installation has all of them but those of the extras. The state package and `arroyo-state`
without `--spark` need only the packages of `requirements/core.txt`. The commands name packages, not
extras: an extra of this package brings Dagster and Spark, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NamedTuple

from arroyo_dagster.errors import InputError


class OptionalPackage(NamedTuple):
    """A package that an installation may lack.

    Attributes:
        purpose: what needs it.
        install: what to give to `pip install`.
        otherwise: what works without it, or an empty text.
    """

    purpose: str
    install: str
    otherwise: str = ""


_OBSTORE = "or leave out client='fsspec': obstore needs no package"

_DAGSTER = OptionalPackage("Dagster", "'dagster>=1.12,<2'")
_CONNECT = OptionalPackage(
    "Spark Connect",
    "'pandas>=2.2,<3' 'googleapis-common-protos>=1.71' 'grpcio>=1.76' 'grpcio-status>=1.76' "
    "'zstandard>=0.25'",
)
_SPARK = OptionalPackage("Spark", "'pyspark>=3.5,<5' 'pandas>=2.2,<3'")
PACKAGES: Mapping[str, OptionalPackage] = {
    "adlfs": OptionalPackage("Azure through fsspec", "'adlfs>=2024.7'", _OBSTORE),
    "dagster": _DAGSTER,
    "dagster_pipes": OptionalPackage("Dagster Pipes", "dagster-pipes"),
    "deltalake": OptionalPackage("Delta", "'deltalake>=1.5'"),
    "google.rpc": _CONNECT,
    "grpc": _CONNECT,
    "grpc_status": _CONNECT,
    "zstandard": _CONNECT,
    "gcsfs": OptionalPackage("GCS through fsspec", "'gcsfs>=2024.10'", _OBSTORE),
    "psycopg": OptionalPackage("postgresql://", "'psycopg[binary]>=3.2'"),
    "pydantic": _DAGSTER,
    "pyiceberg": OptionalPackage("Iceberg", "'pyiceberg>=0.10'"),
    "pandas": OptionalPackage("Spark", "'pandas>=2.2,<3'"),
    "py4j": _SPARK,
    "pyspark": _SPARK,
}
"""By the name under which it is imported."""


def missing_package(name: str, *, url: str | None = None) -> InputError:
    """Return the error that says that a package of `PACKAGES` is not installed.

    Args:
        name: the package, as it is imported.
        url: what could not be opened.
    """
    package = PACKAGES[name]
    step = f"install it: pip install {package.install}"
    return InputError(
        f"{package.purpose} needs the package {name}, which is not installed",
        url=url,
        next_step=f"{step}, {package.otherwise}" if package.otherwise else step,
    )


def check_spark() -> None:
    """Check that the packages that Spark needs are installed; import none.

    Raises:
        InputError: one is not; names the command that installs it.
    """
    if (name := lacking_for_spark()) is not None:
        raise missing_package(name)


def lacking_for_spark() -> str | None:
    """Return the first package that Spark needs and that is not installed."""
    return next((name for name in ("pyspark", "pandas") if not _is_installed(name)), None)


def _is_installed(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    return PathFinder.find_spec(name) is not None  # a command hides pandas from `importlib.util`


def explain_import(error: BaseException, *, url: str | None = None) -> InputError | None:
    """Return the error of the package that was not found.

    Args:
        error: the error of an import, or one that such an error caused.
        url: what could not be opened.

    Returns:
        None if the import failed for another reason, or the package is not in `PACKAGES`.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ModuleNotFoundError) and (cause.name or "") in PACKAGES:
            return missing_package(str(cause.name), url=url)
        cause = cause.__cause__
    return None


@contextmanager
def explained_imports() -> Iterator[None]:
    """Raise the error of a package that is not found within the context.

    Raises:
        InputError: a package of `PACKAGES` is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        found = explain_import(error)
        if found is None:
            raise
        raise found from error


def explained(load: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap a module's `__getattr__`, so that it raises the error of a missing package.

    Raises:
        InputError: by the function returned, if a package of `PACKAGES` is not installed.
    """

    def get_attribute(name: str) -> Any:
        with explained_imports():
            return load(name)

    return get_attribute


class _ExplainedModules:
    """Finds modules whose imports raise the error of a missing package.

    It is a finder without its base class: importing `importlib.abc` takes long. The loader stays
    Python's own, which tools ask for the source.
    """

    def __init__(self, packages: tuple[str, ...]) -> None:
        self._packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(self._packages):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                with explained_imports():
                    execute(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def explain_imports_of(*packages: str) -> None:
    """Let modules of these packages raise the error of a missing package when they are imported."""
    if not any(isinstance(one, _ExplainedModules) for one in sys.meta_path):
        sys.meta_path.insert(0, _ExplainedModules(tuple(f"{one}." for one in packages)))
