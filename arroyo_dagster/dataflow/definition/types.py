"""The types of SDF: scalars with their ranges and defaults, rows and composite types, and names.

Source: sdf-states.md 2.3, 2.9, 5.2 (I1) and 7; errors E23, E32.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from arroyo_dagster.dataflow.errors import did_you_mean

if TYPE_CHECKING:
    from arroyo_dagster.dataflow.definition.definition import Document, Package


class ScalarType(enum.Enum):
    """A scalar type, by its canonical name."""

    BOOL = "bool"
    U8 = "u8"
    U16 = "u16"
    U32 = "u32"
    U64 = "u64"
    I8 = "i8"
    I16 = "i16"
    I32 = "i32"
    I64 = "i64"
    F32 = "f32"
    F64 = "f64"
    STRING = "string"
    TIMESTAMP = "timestamp"

    @property
    def is_integer(self) -> bool:
        """Whether it is one of the eight integer types."""
        return self.value[0] in "ui" and self.value[1:].isdigit()

    @property
    def is_float(self) -> bool:
        """Whether it is f32 or f64."""
        return self in (ScalarType.F32, ScalarType.F64)

    @property
    def can_be_key(self) -> bool:
        """Whether a key may be of this type (spec 2.5): text, bool and integers."""
        return self.is_integer or self in (ScalarType.STRING, ScalarType.BOOL)

    @property
    def bounds(self) -> tuple[int, int] | None:
        """The minimum and maximum, both inclusive; None unless it is an integer or a timestamp."""
        if self is ScalarType.TIMESTAMP:
            return ScalarType.I64.bounds
        if not self.is_integer:
            return None
        bits = int(self.value[1:])
        if self.value[0] == "u":
            return 0, 2**bits - 1
        return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1

    @property
    def default(self) -> str | int | float | bool:
        """The value that a read of an absent key returns (spec 6.2)."""
        if self is ScalarType.STRING:
            return ""
        if self is ScalarType.BOOL:
            return False
        return 0.0 if self.is_float else 0


_ALIASES = {"s8": "i8", "s16": "i16", "s32": "i32", "s64": "i64"}
_ALIASES |= {"float32": "f32", "float64": "f64"}
COLUMN_TYPES: dict[str, ScalarType] = {one.value: one for one in ScalarType} | {
    spelled: ScalarType(name) for spelled, name in _ALIASES.items()
}
"""All spellings of column types."""

SCALARS = {name: one for name, one in COLUMN_TYPES.items() if one is not ScalarType.TIMESTAMP}
"""All spellings of scalar types: those of columns except `timestamp` (spec Y6)."""

KEY_TYPES = tuple(name for name, one in SCALARS.items() if one.can_be_key)

COMPOSITES = ("object", "enum", "list", "option", "key-value")
UNSUPPORTED_VALUES = (*COMPOSITES, "bytes", "null", "map")
BUILT_IN = frozenset(
    {*COLUMN_TYPES, *UNSUPPORTED_VALUES, "keyed-state", "arrow-row", "primitive"} - {"map"}
)
"""Names of built-in types. A type in `types` cannot have them, except for `timestamp`, and an alias
cannot refer to a type of such a name."""


def same_name(name: str) -> str:
    """Normalize a type's name for comparison: `-` and `_` are equal (spec L7)."""
    return name.replace("-", "_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a row.

    Attributes:
        attribute: the name of its attribute on a row in Python.
        convert: the SQL expression that makes its values of the columns that were stored before
            the definition changed; None = values of the column of this name.
    """

    name: str
    type: ScalarType
    attribute: str
    convert: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowType:
    """An arrow-row. `columns`: sorted by name; `ttl_ms`: None = rows never expire."""

    columns: tuple[Column, ...]
    ttl_ms: int | None = None


@dataclass(frozen=True, slots=True)
class NamedType:
    """A reference to a type of `types` or of an import, by name."""

    name: str


class PlainType(enum.Enum):
    """Types without members that no column or key can have."""

    BYTES = "bytes"
    NULL = "null"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A field of an object, a variant of an enum, or the inner type of a list, option or key-value.

    Attributes:
        written_as, read_as: the name in written and in read JSON, if it is not `name`.
    """

    name: str
    type: TypeDef
    optional: bool = False
    written_as: str | None = None
    read_as: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompositeType:
    """An object, enum, list, option or key-value.

    Attributes:
        members: of an object, sorted by name; of an enum, as written, since the variants of an
            untagged one are tried in order.
        untagged: of an enum, whether only the shape of a value determines its variant.
        type_name: the name of a type that is declared inside another.
    """

    kind: str
    members: tuple[Member, ...]
    untagged: bool = False
    type_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrimitiveType:
    """A scalar value in its documented long form, `primitive` with a value inside, or with a TTL.

    `ttl_ms`: None = values never expire.
    """

    type: ScalarType
    ttl_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedType:
    """The body of a keyed-state."""

    key: TypeDef
    value: TypeDef


TypeDef: TypeAlias = (
    "ScalarType | PlainType | NamedType | RowType | CompositeType | PrimitiveType | KeyedType"
)


def names_in(declared: TypeDef) -> frozenset[str]:
    """Return every name that a type refers to."""
    if isinstance(declared, NamedType):
        return frozenset({declared.name})
    if isinstance(declared, CompositeType):
        return frozenset().union(*(names_in(member.type) for member in declared.members))
    if isinstance(declared, KeyedType):
        return names_in(declared.key) | names_in(declared.value)
    return frozenset()


# ---- the types that names refer to, in one document ---------------------------------------------


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
            definition = self.own.get(name)
            if definition is None and name in self.imported:
                definition = self.imported[name]
                if definition is None:
                    return Resolved(None)
            if definition is None:
                near = did_you_mean(declared.name, {*self.own, *self.imported, *BUILT_IN})
                return Resolved(None, f"Referenced type `{declared.name}` not found{near}")
            declared = definition
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
