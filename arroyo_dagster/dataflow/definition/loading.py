"""Load definitions from files, with the packages that they import.

Source: sdf-states.md 5.2 (I6), 5.4; error E35.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from arroyo_dagster.dataflow.definition.definition import Dataflow, Package
from arroyo_dagster.dataflow.definition.diagnostics import Diagnostic, InvalidDefinition
from arroyo_dagster.dataflow.definition.reading import DefinitionReader
from arroyo_dagster.dataflow.definition.shapes import text_of
from arroyo_dagster.dataflow.definition.yaml_tree import MOST_CHARACTERS, Node
from arroyo_dagster.errors import InputError, NotFoundError

PACKAGE_FILE = "sdf-package.yaml"


def load_document(
    path: str | Path, *, legacy: bool = False, extended: bool = False, dev: bool = True
) -> Dataflow | Package:
    """Read a dataflow.yaml or sdf-package.yaml, and the packages it imports from folders.

    Args:
        path: the file, or the folder of a package.
        legacy, extended: as in `parse_document`.
        dev: whether the folders of `dev.imports` replace those of `imports`.

    Raises:
        NotFoundError: there is no such file.
        InputError: the file cannot be read.
        InvalidDefinition: it, or a package that it imports, has errors.
    """
    document, _ = load_with_packages(path, legacy=legacy, extended=extended, dev=dev)
    return document


def load_with_packages(
    path: str | Path, *, legacy: bool = False, extended: bool = False, dev: bool = True
) -> tuple[Dataflow | Package, dict[str, Package]]:
    """Read a definition as `load_document` does, and return it with its packages.

    Returns:
        The definition, and by id every package that it imports, directly or indirectly.
    """
    file = Path(path)
    loading = _Loading(legacy, extended, dev)
    return loading.load(file / PACKAGE_FILE if file.is_dir() else file), loading.packages


def load_dataflow(
    path: str | Path, *, legacy: bool = False, extended: bool = False, dev: bool = True
) -> tuple[Dataflow, dict[str, Package]]:
    """Read a dataflow.yaml, and return it with its packages as `load_with_packages` does.

    Raises:
        InputError: it is a package. Other errors as in `load_document`.
    """
    document, packages = load_with_packages(path, legacy=legacy, extended=extended, dev=dev)
    if not isinstance(document, Dataflow):
        raise InputError(
            "expected a dataflow, found a package, which has no services",
            path=str(path),
            next_step="name the dataflow.yaml that imports it, or test the package with "
            f"`arroyo-state sdf test {path}`",
        )
    return document, packages


def load_package(path: str | Path) -> tuple[Package, dict[str, Package]]:
    """Read an sdf-package.yaml, or that of a folder, and return it with the packages it imports.

    Raises:
        InputError: it is a dataflow. Other errors as in `load_document`.
    """
    document, packages = load_with_packages(path)
    if not isinstance(document, Package):
        raise InputError(
            "expected a package, found a dataflow, which is not tested function by function",
            path=str(path),
            next_step="name an sdf-package.yaml, or test the complete dataflow with "
            f"`arroyo-state sdf test {path}` or `sdf_testing.dataflow_tests`",
        )
    return document, packages


class _Loading:
    def __init__(self, legacy: bool, extended: bool, dev: bool) -> None:
        self._legacy, self._extended, self._dev = legacy, extended, dev
        self._loading: list[Path] = []
        self.packages: dict[str, Package] = {}

    def load(self, file: Path) -> Dataflow | Package:
        text = _text(file)
        self._loading.append(file.resolve())
        try:
            packages = partial(self._packages, file)
            reader = DefinitionReader(text, packages, legacy=self._legacy, extended=self._extended)
            return reader.document()
        except InvalidDefinition as error:
            raise (error if "file" in error.facts else error.with_file(str(file))) from None
        finally:
            self._loading.pop()

    def _packages(self, file: Path, root: Node) -> dict[str, Package]:
        folders = _folders(root.get("imports"))
        if self._dev:
            dev = root.get("dev")
            folders |= _folders(None if dev is None else dev.get("imports"))
        found: dict[str, Package] = {}
        for package, folder in folders.items():
            inner = file.parent / folder / PACKAGE_FILE
            if inner.resolve() in self._loading or not inner.is_file():
                continue  # the reader reports it as not found, with the import's line
            document = self.load(inner)
            if isinstance(document, Package):
                found[package] = document
        self.packages |= found
        return found


def _folders(imports: Node | None) -> dict[str, str]:
    pairs = (
        (text_of(one, "pkg"), text_of(one, "path")) for one in (imports.items if imports else ())
    )
    return {package: folder for package, folder in pairs if package and folder}


def _text(file: Path) -> str:
    try:
        data = file.read_bytes() if file.stat().st_size <= 4 * MOST_CHARACTERS else None
    except FileNotFoundError as error:
        raise NotFoundError("there is no such definition", path=str(file)) from error
    except OSError as error:
        raise InputError(
            f"the definition cannot be read: {error.strerror}", path=str(file)
        ) from error
    if data is None:
        raise _unreadable(file, f"the file is longer than {4 * MOST_CHARACTERS} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _unreadable(file, "the file is not UTF-8", line) from error


def _unreadable(file: Path, message: str, line: int = 1) -> InvalidDefinition:
    diagnostic_at = Diagnostic(line=line, column=1, path="", number="E04", message=message)
    return InvalidDefinition("document", [diagnostic_at], file=str(file))
