"""Descriptions of types: how a Python value is encoded in bytes, in a form that can be stored."""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime as dt
import enum
import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NewType, TypeAlias, Union, get_args, get_origin

from arroyo_dagster.errors import FormatError, InputError

PRIMITIVES = (
    *("u8", "u16", "u32", "u64", "u128", "usize"),
    *("i8", "i16", "i32", "i64", "i128", "isize"),
    *("f32", "f64", "bool", "char", "string", "bytes", "unit"),
)
"""The names of the primitive types; in JSON each is represented by its name."""

MAX_DEPTH = 64
"""The maximum nesting depth of types, refused before Python's recursion limit is reached."""

_TIMES = ("duration", "system_time")
_MAX_ARRAY = 2**32

TypeJson: TypeAlias = str | dict[str, Any]


@dataclass(frozen=True, slots=True)
class Primitive:
    """A number, text, bytes, a truth value, or `unit`: the value None, encoded in no bytes."""

    name: str

    def __post_init__(self) -> None:
        if self.name not in PRIMITIVES:
            raise InputError(f"no primitive type {self.name!r}; there are {', '.join(PRIMITIVES)}")


@dataclass(frozen=True, slots=True)
class TimeOf:
    """A duration, or a point in time not before 1970, counted in nanoseconds.

    With `as_nanos` the Python value is an int of nanoseconds; otherwise it is a `timedelta` or an
    aware `datetime`, which have microsecond resolution. The bytes and the JSON form are the same.
    """

    name: Literal["duration", "system_time"]
    as_nanos: bool = True

    def __post_init__(self) -> None:
        if self.name not in _TIMES:
            raise InputError(f"no type of time {self.name!r}; there are {', '.join(_TIMES)}")


@dataclass(frozen=True, slots=True)
class OptionOf:
    """A value that may be missing; None in Python."""

    item: Type

    def __post_init__(self) -> None:
        if isinstance(self.item, OptionOf) or self.item == UNIT:
            raise InputError(
                "an option of an option or of unit cannot be told apart in Python, "
                "where both are None",
                next_step="put the inner one into a dataclass with one field",
            )


@dataclass(frozen=True, slots=True)
class ListOf:
    """Any number of items in order: a list, or a tuple if `as_tuple`."""

    item: Type
    as_tuple: bool = False


@dataclass(frozen=True, slots=True)
class SetOf:
    """Any number of different items, unordered: a set, or a frozenset if `frozen`."""

    item: Type
    frozen: bool = False


@dataclass(frozen=True, slots=True)
class MapOf:
    """Values by key."""

    key: Type
    value: Type


@dataclass(frozen=True, slots=True)
class ArrayOf:
    """Exactly `length` items; a list in Python."""

    item: Type
    length: int

    def __post_init__(self) -> None:
        if type(self.length) is not int or not 0 <= self.length <= _MAX_ARRAY:
            raise InputError(
                f"the length of an array must be a number from 0 to {_MAX_ARRAY}",
                length=self.length,
            )


@dataclass(frozen=True, slots=True)
class TupleOf:
    """One value of each type, in order."""

    items: tuple[Type, ...]


@dataclass(frozen=True, slots=True)
class Field:
    """A named part of a struct."""

    name: str
    type: Type


@dataclass(frozen=True, slots=True)
class StructOf:
    """Named fields in order: instances of the dataclass `python`, or dicts if it is None.

    The class takes part in comparisons, since the Python values differ; use `same_layout` or
    compare `to_json` to compare the bytes.
    """

    name: str
    fields: tuple[Field, ...]
    python: type[Any] | None = None

    def __post_init__(self) -> None:
        _check_distinct([field.name for field in self.fields], "fields", self.name)


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant of an enum; `payload` is `UNIT` if it has no value."""

    name: str
    payload: Type


@dataclass(frozen=True, slots=True)
class EnumOf:
    """One of several variants, stored by its index in `variants`.

    In Python, a variant whose payload is a struct with a class is an instance of that class. A
    variant without a value is its name, or the member of `python` if that is set. Any other variant
    is the dict `{name: payload}`.
    """

    name: str
    variants: tuple[Variant, ...]
    python: type[enum.Enum] | None = None

    def __post_init__(self) -> None:
        if not self.variants:
            raise InputError("an enum needs at least one variant", enum=self.name)
        _check_distinct([variant.name for variant in self.variants], "variants", self.name)
        classes = [v.payload.python for v in self.variants if isinstance(v.payload, StructOf)]
        present = [python for python in classes if python is not None]
        if len(set(present)) != len(present):
            raise InputError("two variants of an enum have the same class", enum=self.name)


def _check_distinct(names: list[str], what: str, owner: str) -> None:
    if len(set(names)) != len(names):
        raise InputError(f"two {what} have the same name", type=owner, names=names)


Type: TypeAlias = (
    Primitive | TimeOf | OptionOf | ListOf | SetOf | MapOf | ArrayOf | TupleOf | StructOf | EnumOf
)
"""How a value is encoded; frozen, comparable, and with a JSON form."""

UNIT = Primitive("unit")
BOOL = Primitive("bool")
BYTES = Primitive("bytes")
STRING = Primitive("string")

U8 = Annotated[int, Primitive("u8")]
U16 = Annotated[int, Primitive("u16")]
U32 = Annotated[int, Primitive("u32")]
U64 = Annotated[int, Primitive("u64")]
U128 = Annotated[int, Primitive("u128")]
USize = Annotated[int, Primitive("usize")]
I8 = Annotated[int, Primitive("i8")]
I16 = Annotated[int, Primitive("i16")]
I32 = Annotated[int, Primitive("i32")]
I64 = Annotated[int, Primitive("i64")]
I128 = Annotated[int, Primitive("i128")]
ISize = Annotated[int, Primitive("isize")]
F32 = Annotated[float, Primitive("f32")]
F64 = Annotated[float, Primitive("f64")]
Char = Annotated[str, Primitive("char")]
DurationNanos = Annotated[int, TimeOf("duration")]
SystemTimeNanos = Annotated[int, TimeOf("system_time")]

_SIMPLE: dict[Any, Type] = {
    str: STRING,
    int: Primitive("i64"),
    bool: BOOL,
    float: Primitive("f64"),
    bytes: BYTES,
    None: UNIT,
    type(None): UNIT,
    dt.timedelta: TimeOf("duration", as_nanos=False),
    dt.datetime: TimeOf("system_time", as_nanos=False),
}

_ALLOWED = (
    "str, int (64 bits), bool, float, bytes, None, X | None, tuple[A, B], tuple[X, ...], list[X], "
    "Sequence[X], dict[K, V], Mapping[K, V], set[X], frozenset[X], dataclasses, enum.Enum, "
    "datetime.datetime, datetime.timedelta, and the names of arroyo_dagster.state.model.types "
    "such as U32, Char, SystemTimeNanos or enum_of"
)


def describe(python_type: Any) -> Type:
    """Describe how values of a Python type are encoded.

    `int` has 64 bits and a sign, `float` 64 bits; `U8` to `I128`, `F32` and `Char` select other
    encodings. A dataclass is a struct of its fields in order. An `enum.Enum` is an enum of variants
    without values, in the order of its members; their Python values are ignored. For an enum whose
    variants have values see `enum_of`. A description is returned unchanged.

    Raises:
        InputError: no description exists for the type or for a type within it; a dataclass
            contains itself or a name that is not defined.
    """
    return _describe(python_type, ())


def _describe(python_type: Any, within: tuple[Any, ...]) -> Type:
    if len(within) > MAX_DEPTH:
        raise InputError(f"more than {MAX_DEPTH} types lie within each other", type=within[0])
    if isinstance(python_type, Type):
        return python_type
    inside = (*within, python_type)
    origin, args = get_origin(python_type), get_args(python_type)
    if origin is Annotated:
        plain, *marks = get_args(python_type)
        for mark in reversed(marks):
            # `Annotated[int, U32]` means the same as `U32`.
            if isinstance(mark, Type) or get_origin(mark) is Annotated:
                return _describe(mark, inside)
        return _describe(plain, inside)
    if origin is not None:
        described = _describe_generic(origin, args, inside)
        if described is not None:
            return described
    elif isinstance(python_type, NewType):
        return _describe(python_type.__supertype__, inside)
    elif dataclasses.is_dataclass(python_type) and isinstance(python_type, type):
        return _describe_dataclass(python_type, within, inside)
    elif isinstance(python_type, type) and issubclass(python_type, enum.Enum):
        return _describe_enum(python_type)
    elif isinstance(python_type, type | None) and python_type in _SIMPLE:
        return _SIMPLE[python_type]
    raise InputError(
        f"values of the type {_type_text(python_type)} cannot be encoded",
        next_step=f"use {_ALLOWED}",
    )


def _describe_generic(origin: Any, args: tuple[Any, ...], inside: tuple[Any, ...]) -> Type | None:
    if origin in (Union, types.UnionType):
        return _describe_union(args, inside)
    if origin is tuple and Ellipsis not in args:
        return TupleOf(tuple(_describe(arg, inside) for arg in args))
    if origin in (tuple, list, collections.abc.Sequence):
        return ListOf(_describe(args[0], inside), as_tuple=origin is tuple)
    if origin in (set, frozenset):
        return SetOf(_describe(args[0], inside), frozen=origin is frozenset)
    if origin in (dict, collections.abc.Mapping):
        return MapOf(_describe(args[0], inside), _describe(args[1], inside))
    return None


def _describe_union(args: tuple[Any, ...], inside: tuple[Any, ...]) -> Type | None:
    rest = [arg for arg in args if arg is not type(None)]
    if len(rest) == 1 and len(args) == 2:
        return OptionOf(_describe(rest[0], inside))
    if all(dataclasses.is_dataclass(arg) for arg in rest):
        # Python treats A | B and B | A as the same type, but their bytes differ.
        names = ", ".join(arg.__qualname__ for arg in rest)
        raise InputError(
            "a union does not say in which order its variants are counted",
            next_step=f"write Annotated[…, enum_of(name, {names})], in the order they are stored",
        )
    return None


def _describe_enum(cls: type[enum.Enum]) -> Type:
    if issubclass(cls, enum.Flag):
        raise InputError(
            f"{cls.__qualname__} holds several flags at once, so it is no enum of one variant",
            next_step="declare the number it is stored as, such as U32",
        )
    return EnumOf(cls.__name__, tuple(Variant(member.name, UNIT) for member in cls), cls)


def enum_of(name: str, *variants: type[Any]) -> EnumOf:
    """Describe an enum whose variants have values: one dataclass each, in the order of their index.

    ```python
    Progress = Annotated[Finished | RecordsRead, enum_of("Progress", Finished, RecordsRead)]
    ```

    Raises:
        InputError: a variant is no dataclass, occurs twice, or cannot be described.
    """
    for cls in variants:
        if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
            raise InputError(
                "a variant of an enum must be a dataclass",
                enum=name,
                found=_type_text(cls),
                next_step="put what it holds into a dataclass; one without fields holds nothing",
            )
    return EnumOf(name, tuple(Variant(cls.__name__, describe(cls)) for cls in variants))


def _describe_dataclass(cls: type[Any], within: tuple[Any, ...], inside: tuple[Any, ...]) -> Type:
    if cls in within:
        raise InputError(f"the dataclass {cls.__qualname__} contains itself")
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError as error:
        raise InputError(
            f"the dataclass {cls.__qualname__} names a type that is not defined: {error}",
            next_step="define it at the top level of the module of the dataclass",
        ) from error
    if any(isinstance(hint, dataclasses.InitVar) for hint in hints.values()):
        raise InputError(
            f"the dataclass {cls.__qualname__} cannot be decoded: its constructor has an argument "
            "that is no field"
        )
    fields = []
    for field in dataclasses.fields(cls):
        if not field.init:
            raise InputError(
                f"the dataclass {cls.__qualname__} cannot be decoded: its field {field.name!r} "
                "is not an argument of its constructor"
            )
        fields.append(Field(field.name, _describe_field(cls, field.name, hints, inside)))
    return StructOf(cls.__name__, tuple(fields), cls)


def _describe_field(
    cls: type[Any], name: str, hints: dict[str, Any], inside: tuple[Any, ...]
) -> Type:
    try:
        return _describe(hints[name], inside)
    except InputError as error:
        # The innermost dataclass is the most precise location.
        error.facts.setdefault("field", f"{cls.__qualname__}.{name}")
        raise


def _type_text(python_type: Any) -> str:
    return python_type.__qualname__ if type(python_type) is type else repr(python_type)


def to_json(description: Type) -> TypeJson:
    """Return the JSON form of a description: the encoding of its values, without Python classes."""
    match description:
        case Primitive(name=name) | TimeOf(name=name):
            return name
        case OptionOf(item=item):
            return {"option": to_json(item)}
        case ListOf(item=item):
            return {"list": to_json(item)}
        case SetOf(item=item):
            return {"set": to_json(item)}
        case MapOf(key=key, value=value):
            return {"map": {"key": to_json(key), "value": to_json(value)}}
        case ArrayOf(item=item, length=length):
            return {"array": {"item": to_json(item), "length": length}}
        case TupleOf(items=items):
            return {"tuple": [to_json(item) for item in items]}
        case StructOf(name=name, fields=fields):
            pairs = [[field.name, to_json(field.type)] for field in fields]
            return {"struct": {"name": name, "fields": pairs}}
        case EnumOf(name=name, variants=variants):
            pairs = [[variant.name, to_json(variant.payload)] for variant in variants]
            return {"enum": {"name": name, "variants": pairs}}


def without_classes(description: Type) -> Type:
    """Return the description that a reader without the Python classes has.

    Structs are dicts and times are nanoseconds; the bytes are the same.
    """
    return from_json(to_json(description))


def same_layout(one: Type, other: Type) -> bool:
    """Return whether both encode values as the same bytes by field; type names may differ."""
    return bool(_unnamed(to_json(one)) == _unnamed(to_json(other)))


def _unnamed(form: Any) -> Any:
    if isinstance(form, list):
        return [_unnamed(part) for part in form]
    if isinstance(form, dict):
        return {kind: _unnamed(body) for kind, body in form.items() if kind != "name"}
    return form


def from_json(form: object) -> Type:
    """Parse the JSON form of a description.

    Raises:
        FormatError: it is no description, or one that this release does not know.
    """
    try:
        return _from_json(form, 0)
    except InputError as error:
        raise FormatError(f"not the description of a type: {error}") from error


def _from_json(form: object, depth: int) -> Type:
    if depth > MAX_DEPTH:
        raise FormatError(f"more than {MAX_DEPTH} types lie within each other")
    if isinstance(form, str):
        return _named(form)
    if not isinstance(form, dict) or len(form) != 1:
        raise _broken(form, "a name, or an object with one member")
    ((kind, body),) = form.items()
    depth += 1
    match kind:
        case "option":
            return OptionOf(_from_json(body, depth))
        case "list":
            return ListOf(_from_json(body, depth))
        case "set":
            return SetOf(_from_json(body, depth))
        case "map":
            key, value = _members(body, "key", "value")
            return MapOf(_from_json(key, depth), _from_json(value, depth))
        case "array":
            item, length = _members(body, "item", "length")
            return ArrayOf(_from_json(item, depth), length)
        case "tuple" if isinstance(body, list):
            return TupleOf(tuple(_from_json(item, depth) for item in body))
        case "struct":
            name, pairs = _members(body, "name", "fields")
            return StructOf(_text(name), tuple(Field(n, t) for n, t in _pairs(pairs, depth)))
        case "enum":
            name, pairs = _members(body, "name", "variants")
            return EnumOf(_text(name), tuple(Variant(n, t) for n, t in _pairs(pairs, depth)))
    raise _broken(form, "a kind of type this release knows")


def _named(name: str) -> Type:
    match name:
        case "duration" | "system_time":
            return TimeOf(name)
        case _:
            return Primitive(name)


def _members(body: object, *names: str) -> list[Any]:
    if not isinstance(body, dict) or set(body) != set(names):
        raise _broken(body, f"an object with the members {', '.join(names)}")
    return [body[name] for name in names]


def _pairs(body: object, depth: int) -> list[tuple[str, Type]]:
    if not isinstance(body, list):
        raise _broken(body, "a list of pairs of a name and a type")
    pairs = []
    for pair in body:
        if not isinstance(pair, list) or len(pair) != 2:
            raise _broken(pair, "a pair of a name and a type")
        pairs.append((_text(pair[0]), _from_json(pair[1], depth)))
    return pairs


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _broken(value, "a name")
    return value


def _broken(form: object, expected: str) -> FormatError:
    text = repr(form)
    return FormatError(
        f"not the description of a type: expected {expected}",
        found=text if len(text) <= 200 else text[:200] + "…",
    )
