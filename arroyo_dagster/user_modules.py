"""Import of the user's modules that are not installed, by explicit name; which function runs.

No folder is added to `sys.path`, where any import of a module could find a file beside a definition
by its name. Modules in the folders opened here are found only by explicit imports (`import_named`,
`import_file`) and by their neighbours, the modules in the same folders. The standard library and
installed modules are searched first, so that no such module replaces them.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType
from typing import Any

from arroyo_dagster.errors import ArroyoStateError, InputError

INLINE = "sdf."
"""Prefix of the `__name__` of Python code inside a definition, which may import modules beside the
definition."""

_INSTALLED = tuple(
    form for path in sysconfig.get_paths().values() for form in {path, os.path.realpath(path)}
)


class _LastFinder:
    """The last entry of `sys.meta_path`: finds modules in open folders for permitted importers."""

    def __init__(self) -> None:
        self.folders: list[str] = []
        self._named = threading.local()

    @contextmanager
    def naming(self, module: str) -> Iterator[None]:
        """Permit every import of a module, by its first name, in this thread."""
        before = getattr(self._named, "module", None)
        self._named.module = module.partition(".")[0]
        try:
            yield
        finally:
            self._named.module = before

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module for `sys.meta_path`; submodules are found by their package."""
        if path is not None or not self.folders:
            return None
        if fullname == getattr(self._named, "module", None) or self._is_neighbour(_importer()):
            return PathFinder.find_spec(fullname, self.folders)
        return None

    def _is_neighbour(self, frame: FrameType | None) -> bool:
        if frame is None:
            return False
        file = frame.f_globals.get("__file__")
        if file is None:
            return str(frame.f_globals.get("__name__", "")).startswith(INLINE)
        path = os.path.abspath(file)
        return _lies_in(path, self.folders) and not _lies_in(path, _INSTALLED)


_FINDER = _LastFinder()


def parse_python(source: str | bytes) -> ast.Module:
    """Parse Python source; errors as `ast.parse`.

    CPython 3.11 fails if a finalizer that runs meanwhile parses as well, as one that logs a
    traceback does.
    """
    try:
        return ast.parse(source)
    except SystemError:
        return ast.parse(source)


def open_folders(*folders: str) -> None:
    """Permit imports of modules in these folders; the first folder that contains one is used.

    Closes folders opened before, because a process works on one definition at a time.
    """
    _FINDER.folders = [os.path.realpath(folder) for folder in folders]
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
    importlib.invalidate_caches()


def import_named(module: str) -> ModuleType:
    """Import a module that is installed, or lies in an open folder. Errors as of `import`."""
    with _FINDER.naming(module):
        return importlib.import_module(module)


def import_file(path: str) -> ModuleType:
    """Import a file as a module; it may import the modules beside it.

    Afterwards the module is imported under its name, as required for sending it to Spark's workers.

    Raises:
        InputError: there is no such file, or another module has its name.
    """
    folder, base = os.path.split(os.path.abspath(path))
    file = os.path.join(os.path.realpath(folder), base)
    name = base.removesuffix(".py")
    if not os.path.isfile(file):
        raise InputError("there is no such file", path=path)
    open_folders(folder)
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == file:
        return known
    if known is not None or _found_elsewhere(name, file):
        raise InputError(
            f"another module is called {name!r} already", path=path, next_step="rename the file"
        )
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _found_elsewhere(name: str, file: str) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is not None and os.path.realpath(spec.origin or "") != os.path.realpath(file)


def _importer() -> FrameType | None:
    """Return the frame of the import statement: the first one outside of the import system."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name != __name__ and not name.startswith(("importlib", "_frozen_importlib")):
            return frame
        frame = frame.f_back
    return None


def _lies_in(path: str, folders: Sequence[str]) -> bool:
    return any(path.startswith(folder.rstrip("/") + "/") for folder in folders)


def defines(module: str, name: str, folders: Sequence[str] = ()) -> bool | None:
    """Return whether a module defines a name at its top level. No code is run.

    Args:
        module: the module.
        name: the name.
        folders: where the module is searched if it is not installed.

    Returns:
        None: there is no such module. True also where that cannot be told without running it.
    """
    spec = _spec_of(module, folders)
    if spec is None:
        return None
    if not spec.origin or not spec.origin.endswith(".py"):
        return True
    try:
        with open(spec.origin, "rb") as file:
            tree = parse_python(file.read())
    except (OSError, SyntaxError, ValueError):
        return True  # the import says what is wrong
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return bool({name, "*", "__getattr__"} & names)


def _spec_of(module: str, folders: Sequence[str]) -> ModuleSpec | None:
    """Find a module as an import would, without importing the packages that hold it."""
    if module in sys.modules:
        return sys.modules[module].__spec__
    found: ModuleSpec | None = None
    path: Sequence[str] | None = None
    parts = module.split(".")
    for at in range(len(parts)):
        name = ".".join(parts[: at + 1])
        specs = (finder.find_spec(name, path) for finder in sys.meta_path)
        found = next((spec for spec in specs if spec is not None), None)
        if found is None and path is None:
            found = PathFinder.find_spec(name, [os.path.realpath(one) for one in folders])
        if found is None:
            return None
        path = found.submodule_search_locations
        if path is None and at + 1 < len(parts):
            return None
    return found


# ---- what a user has written, by its place: `module:name`, or `path/to/file.py:name` -----------


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
    function = load_attribute(
        target, "a function is named MODULE:FUNCTION or path/to/file.py:FUNCTION", next_step
    )
    if not callable(function):
        message = f"it is of type {type(function).__name__}, not a function"
        raise InputError(message, given=target, next_step=next_step)
    return function


def load_attribute(
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


# ---- which function runs, for those who survive it -----------------------------------------------

_listeners: list[Callable[[str], None]] = []
_running: ContextVar[str] = ContextVar("arroyo_step", default="")


@contextmanager
def step_listener(listener: Callable[[str], None]) -> Iterator[None]:
    """Call `listener` with the names of the functions that begin to run within the block, as text;
    with an empty text when none runs.
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def begin_step(*names: str) -> None:
    """Note that one of these functions of the user runs from now on; none = no more."""
    step = " or ".join(f"`{name}`" for name in names)
    _running.set(step)
    for listener in _listeners:
        listener(step)


def running_step() -> str:
    """Return the names that `begin_step` noted last, as text; empty = no function runs."""
    return _running.get()
