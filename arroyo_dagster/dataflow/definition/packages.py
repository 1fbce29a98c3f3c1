"""Read the imports of a document: types, states and functions of packages.

Source: sdf-states.md 5.1 and 5.2; errors E06, E31 to E35.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from arroyo_dagster.dataflow.definition.definition import (
    FunctionDef,
    FunctionImport,
    ImportDef,
    Package,
    ServiceDef,
    StateDef,
)
from arroyo_dagster.dataflow.definition.grammar import PACKAGE_ID
from arroyo_dagster.dataflow.definition.names import engine_table_error
from arroyo_dagster.dataflow.definition.reading_services import names_of
from arroyo_dagster.dataflow.definition.shapes import text_of
from arroyo_dagster.dataflow.definition.types import Scope, TypeDef, names_in, same_name
from arroyo_dagster.dataflow.definition.yaml_tree import Node


@dataclass(slots=True)
class Imported:
    """The result of reading the imports.

    Attributes:
        local: the types that the document itself defines, by `same_name`.
        types: by name; None if the package was not loaded.
        states: the names of the imported states.
        functions: by the name that steps use; None if the package was not loaded.
    """

    local: Mapping[str, TypeDef | None]
    imports: list[ImportDef] = field(default_factory=list)
    types: dict[str, TypeDef | None] = field(default_factory=dict)
    states: set[str] = field(default_factory=set)
    functions: dict[str, tuple[FunctionDef, Package] | None] = field(default_factory=dict)

    def read(self, node: Node, packages: Mapping[str, Package] | None) -> None:
        """Read one import, and resolve the imported names in its package.

        Args:
            node: an entry of `imports`.
            packages: by id; None = they were not loaded, and imported names are not checked.
        """
        pkg = text_of(node, "pkg")
        if pkg is None:
            return
        if not re.match(PACKAGE_ID, pkg):
            message = f"pkg `{pkg}` is not of the form <namespace>/<name>@<version>"
            (node.get("pkg") or node).report("E06", message)
            return
        functions = tuple(
            FunctionImport(name=text_of(item, "name") or "", alias=text_of(item, "alias"))
            for item in node.listed("functions")
        )
        types, states = names_of(node, "types"), names_of(node, "states")
        path = text_of(node, "path")
        self.imports.append(
            ImportDef(package=pkg, path=path, types=types, states=states, functions=functions)
        )
        package = None if packages is None else packages.get(pkg)
        if package is None:
            if packages is not None:
                message = (
                    f"package `{pkg}` not found: name its folder in `path` of the import "
                    "or in the `dev` section; no hub is supported"
                )
                node.report("E35", message)
            self.types = {**dict.fromkeys((*types, *states)), **self.types}
            self.states.update(states)
            self.functions |= {function.alias or function.name: None for function in functions}
            return
        for name in types:
            self._add_type(node, package, name)
        for name in states:
            self._add_state(node, package, name)
        for function in functions:
            self._add_function(node, package, function)

    def _add_type(self, node: Node, package: Package, name: str) -> None:
        declared = _type_of(package, name)
        if declared is None:
            message = f"Referenced type `{name}` not found in package `{package.id}`"
            node.report("E23", message)
            return
        self._bind(node, package, name, declared)
        for inner in sorted(names_in(declared)):
            # Types that this type refers to are imported too, whether listed or not.
            needed = _type_of(package, inner)
            if needed is not None and self.types.get(inner) != needed:
                self._add_type(node, package, inner)

    def _bind(self, node: Node, package: Package, name: str, declared: TypeDef) -> None:
        local = self.local.get(same_name(name), declared)
        before = self.types.get(name) or declared
        if local != declared or before != declared:
            message = (
                f"`{name}` of package `{package.id}` conflicts with another definition of the "
                "name; rename one"
            )
            node.report("E32", message)
        self.types[name] = declared

    def _add_state(self, node: Node, package: Package, name: str) -> None:
        state = package.states.get(name)
        if state is None:
            node.report("E31", f"state `{name}` not found in package `{package.id}`")
            return
        self.states.add(name)
        if state.declared is not None:
            self._bind(node, package, name, state.declared)
            for inner in sorted(names_in(state.declared)):
                if _type_of(package, inner) is not None:
                    self._add_type(node, package, inner)

    def _add_function(self, node: Node, package: Package, wanted: FunctionImport) -> None:
        function = package.functions.get(wanted.name)
        if function is None:
            message = (
                f"function `{wanted.name}` not found in package `{package.id}`; it has "
                f"{', '.join(sorted(package.functions)) or 'none'}"
            )
            node.report("E33", message)
            return
        if function.operator == "flush":
            message = f"function `{wanted.name}`: an imported flush is not yet supported"
            node.report("E34", message)
        self.functions[wanted.alias or wanted.name] = (function, package)


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
    states: dict[str, StateDef] = {}
    window = None if service.windowed is None else service.windowed.window
    for step in service.steps:
        if step.target not in imported.functions:
            continue
        used = imported.functions[step.target]
        if used is None:
            return None
        function, package = used
        for name in function.states:
            if name in package.states and name not in states:
                state = package.states[name]
                states[name] = replace(state, owner=service.name, window=window, package=package.id)
    return states


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
