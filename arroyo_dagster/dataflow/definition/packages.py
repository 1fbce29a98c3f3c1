"""Read the imports of a document: types, states and functions of packages.

Source: sdf-states.md 5.1 and 5.2; errors E06, E31 to E35.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from arroyo_dagster.dataflow.definition.definition import (
    FunctionDef,
    FunctionImport,
    ImportDef,
    Package,
    ServiceDef,
    StateDef,
    StateForm,
)
from arroyo_dagster.dataflow.definition.grammar import PACKAGE_ID
from arroyo_dagster.dataflow.definition.names import engine_table_error
from arroyo_dagster.dataflow.definition.reading_services import names_of
from arroyo_dagster.dataflow.definition.scope import Scope
from arroyo_dagster.dataflow.definition.shapes import text_of
from arroyo_dagster.dataflow.definition.types import TypeDef, names_in, same_name
from arroyo_dagster.dataflow.definition.yaml_tree import Node


@dataclass(slots=True)
class Imported:
    """The result of reading the imports.

    Attributes:
        types: by name; None if the package was not loaded.
        states: the names of the imported states.
        functions: by the name that steps use; None if the package was not loaded.
    """

    imports: list[ImportDef] = field(default_factory=list)
    types: dict[str, TypeDef | None] = field(default_factory=dict)
    states: set[str] = field(default_factory=set)
    functions: dict[str, tuple[FunctionDef, Package] | None] = field(default_factory=dict)


class ImportReader:
    """Reads `imports` and resolves the imported names in the packages.

    Args:
        packages: by id; None = packages were not loaded, and imported names are not checked.
        local: the types that the document itself defines, by name.
    """

    def __init__(
        self,
        packages: Mapping[str, Package] | None,
        local: Mapping[str, TypeDef | None],
    ) -> None:
        self._packages = packages
        self._local = {same_name(name): one for name, one in local.items()}
        self._imported = Imported()

    def read(self, nodes: Sequence[Node]) -> Imported:
        """Read all imports of a document."""
        for node in nodes:
            one = self._import(node)
            if one is not None:
                self._imported.imports.append(one)
                self._import_package(node, one)
        return self._imported

    def _import(self, node: Node) -> ImportDef | None:
        pkg = node.get("pkg")
        if pkg is None or pkg.text is None:
            return None
        if not re.match(PACKAGE_ID, pkg.text):
            message = f"pkg `{pkg.text}` is not of the form <namespace>/<name>@<version>"
            pkg.report("E06", message)
            return None
        functions = node.get("functions")
        return ImportDef(
            package=pkg.text,
            path=text_of(node, "path"),
            types=names_of(node, "types"),
            states=names_of(node, "states"),
            functions=tuple(
                FunctionImport(name=text_of(one, "name") or "", alias=text_of(one, "alias"))
                for one in (functions.items if functions else ())
            ),
        )

    def _import_package(self, node: Node, one: ImportDef) -> None:
        package = None if self._packages is None else self._packages.get(one.package)
        if package is None:
            if self._packages is not None:
                node.report(
                    "E35",
                    f"package `{one.package}` not found: name its folder in `path` of the import "
                    "or in the `dev` section; no hub is supported",
                )
            for name in (*one.types, *one.states):
                self._imported.types.setdefault(name, None)
            self._imported.states.update(one.states)
            for function in one.functions:
                self._imported.functions[function.alias or function.name] = None
            return
        for name in one.types:
            self._type(node, package, name)
        for name in one.states:
            self._state(node, package, name)
        for function in one.functions:
            self._function(node, package, function)

    def _type(self, node: Node, package: Package, name: str) -> None:
        found = _type_of(package, name)
        if found is None:
            node.report("E23", f"Referenced type `{name}` not found in package `{package.id}`")
            return
        self._bind(node, package, name, found)
        for inner in sorted(names_in(found)):
            # Types that this type refers to are imported too, whether listed or not.
            if (needed := _type_of(package, inner)) is not None and not self._has(inner, needed):
                self._type(node, package, inner)

    def _has(self, name: str, declared: TypeDef) -> bool:
        return self._imported.types.get(name) == declared

    def _bind(self, node: Node, package: Package, name: str, declared: TypeDef) -> None:
        local = self._local.get(same_name(name), declared)
        before = self._imported.types.get(name) or declared
        if local != declared or before != declared:
            node.report(
                "E32",
                f"`{name}` of package `{package.id}` conflicts with another definition of the "
                "name; rename one",
            )
        self._imported.types[name] = declared

    def _state(self, node: Node, package: Package, name: str) -> None:
        state = package.states.get(name)
        if state is None:
            node.report("E31", f"state `{name}` not found in package `{package.id}`")
            return
        self._imported.states.add(name)
        if state.declared is not None:
            self._bind(node, package, name, state.declared)
            for inner in sorted(names_in(state.declared)):
                if _type_of(package, inner) is not None:
                    self._type(node, package, inner)

    def _function(self, node: Node, package: Package, wanted: FunctionImport) -> None:
        found = package.functions.get(wanted.name)
        if found is None:
            node.report(
                "E33",
                f"function `{wanted.name}` not found in package `{package.id}`; it has "
                f"{', '.join(sorted(package.functions)) or 'none'}",
            )
            return
        if found.operator == "flush":
            node.report("E34", f"function `{wanted.name}`: an imported flush is not yet supported")
        self._imported.functions[wanted.alias or wanted.name] = (found, package)


def _type_of(package: Package, name: str) -> TypeDef | None:
    return Scope.of(package.types, {}).own.get(same_name(name))


def visible_states(package: Package, packages: Mapping[str, Package]) -> dict[str, StateDef]:
    """Return the states of a package, and those that it imports."""
    found: dict[str, StateDef] = {}
    for one in package.imports:
        other = packages.get(one.package)
        if other is not None:
            inner = visible_states(other, packages)
            found |= {name: inner[name] for name in one.states if name in inner}
    return {**found, **package.states}


def states_of_imports(service: ServiceDef, imported: Imported) -> dict[str, StateDef] | None:
    """Return the states that a service's imported functions add to it (spec I2).

    The service is their owner. None if they are unknown because a package was not loaded.
    """
    found: dict[str, StateDef] = {}
    for step in service.steps:
        if step.target not in imported.functions:
            continue
        used = imported.functions[step.target]
        if used is None:
            return None
        function, package = used
        for name in function.states:
            if (brought := package.states.get(name)) is not None:
                found.setdefault(name, _owned(brought, service, package))
    return found


def inject_states(service: ServiceDef, imported: Imported, node: Node) -> ServiceDef:
    """Return the service with the states that its imported functions add (spec I2 to I4).

    A state that the service itself declares takes precedence; another schema is an error (E22).
    """
    states: dict[str, StateDef] = dict(service.states)
    for name, brought in (states_of_imports(service, imported) or {}).items():
        declared = states.setdefault(name, brought)
        if declared.schema != brought.schema:
            message = (
                f"state `{name}` is already defined by `{service.name}`, with another shape than "
                f"a function of package `{brought.package}` needs"
            )
            node.report("E22", message, key="states")
        taken = engine_table_error(name, windowed=brought.window is not None)
        if taken is not None and declared is brought:
            message = f"a function of package `{brought.package}` adds it: {taken}"
            node.report("E21", message)
    return replace(service, states=states)


def check_one_owner(services: Mapping[str, ServiceDef], nodes: Mapping[str, Node]) -> None:
    """Report states that imported functions add to a service if another service owns the table.

    `link` checks the states that services declare themselves.
    """
    owned = [
        state
        for service in services.values()
        for state in service.states.values()
        if state.form is StateForm.TYPED
    ]
    first: dict[str, StateDef] = {}
    for state in sorted(owned, key=lambda one: one.package is not None):  # stable
        owner = first.setdefault(state.table, state)
        if state.package is None or owner.owner == state.owner:
            continue
        message = (
            f"state `{state.name}`, which a function of package `{state.package}` adds to "
            f"service `{state.owner}`, is already defined by `{owner.owner}`: both are the table "
            f"`{state.table}`; declare `{state.name}: {{ from: {owner.owner}.{owner.name} }}` in "
            f"`{state.owner}` to read that one, or use the function in one service"
        )
        nodes[state.owner].report("E22", message, key="states")


def _owned(state: StateDef, service: ServiceDef, package: Package) -> StateDef:
    window = None if service.windowed is None else service.windowed.window
    return replace(state, owner=service.name, window=window, package=package.id)
