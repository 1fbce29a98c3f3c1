"""Resolve names of types in one document, and aliases to the types that they finally refer to.

Source: sdf-states.md 2.9, 5.2 (I1); errors E23, E32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from arroyo_dagster.dataflow.definition.types import BUILT_IN, NamedType, TypeDef, same_name
from arroyo_dagster.dataflow.errors import did_you_mean

if TYPE_CHECKING:
    from arroyo_dagster.dataflow.definition.definition import Document, Package


@dataclass(frozen=True, slots=True)
class Resolved:
    """The type that a name refers to.

    Attributes:
        type: None if it is unknown.
        problem: the reason why it is unknown; None if its package was not loaded, or if the
            error of its declaration was reported.
    """

    type: TypeDef | None
    problem: str | None = None


@dataclass(slots=True)
class Scope:
    """Types by name; `-` and `_` in names are equal."""

    own: dict[str, TypeDef] = field(default_factory=dict)
    imported: dict[str, TypeDef | None] = field(default_factory=dict)

    @classmethod
    def of(
        cls, types: Mapping[str, TypeDef | None], imported: Mapping[str, TypeDef | None]
    ) -> Scope:
        """Return a scope. A type of None exists but is unknown."""
        scope = cls(imported={same_name(name): one for name, one in imported.items()})
        for name, one in types.items():
            if one is None:
                scope.imported[same_name(name)] = None  # its error is reported at its declaration
            else:
                scope.own[same_name(name)] = one
        return scope

    def resolve(self, declared: TypeDef) -> Resolved:
        """Follow aliases to a type that is not an alias."""
        seen: dict[str, str] = {}
        while isinstance(declared, NamedType):
            name = same_name(declared.name)
            if name in seen:
                chain = " → ".join([*seen.values(), declared.name])
                return Resolved(
                    None, f"Referenced type `{declared.name}` not found: the aliases {chain} circle"
                )
            seen[name] = declared.name
            found = self.own.get(name)
            if found is None and name in self.imported:
                found = self.imported[name]
                if found is None:
                    return Resolved(None)
            if found is None:
                near = did_you_mean(declared.name, {*self.own, *self.imported, *BUILT_IN})
                return Resolved(None, f"Referenced type `{declared.name}` not found{near}")
            declared = found
        return Resolved(declared)


def scope_of(document: Document, packages: Mapping[str, Package]) -> Scope:
    """Return the types of a document: its own, and those of the packages that it imports.

    Args:
        document: a dataflow or a package.
        packages: by id; the types of an absent package are unknown.
    """
    imported: dict[str, TypeDef | None] = {}
    for one in document.imports:
        package = packages.get(one.package)
        if package is None:
            imported |= {name: None for name in one.types if name not in imported}
        else:
            inner = scope_of(package, packages)
            imported |= {**inner.imported, **inner.own}
    return Scope.of(document.types, imported)
