"""JSON of records, plans and messages, derived from the annotations of their classes. No I/O.

| annotation | JSON |
|---|---|
| dataclass | an object of its fields, `version` first; a list of their values with `json_as_list` |
| `str`, `int`, `float`, `bool`, enum | the value; an int is from 0 to 2**64 - 1 |
| tuple, `Packed` | a list |
| mapping with keys of text | an object |
| `bytes` | Base64 |
| `X | None` | null; a missing field is read as null |
| union of dataclasses | the object of the first one that has these fields, of these types |

A field of `bytes` is left out and has its default when it is read, but for `unknown`: it keeps, as
one JSON object, the fields that this release does not know. A class without it refuses them.
`Annotated` gives a field another name in JSON, or leaves it out: see `json_fields`.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import enum
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from arroyo_dagster.errors import ArroyoStateError, FormatError, InputError
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.model.json_fields import (
    KEEP,
    MAX_U64,
    NOT_STORED,
    JsonName,
    is_unicode,
    parse_json,
    shortened,
    whole_number,
)

T = TypeVar("T")
OWN_VERSION = 1
"""The version of this package's own records, and of Arroyo's."""

_Read = Callable[[Any], Any]


class _Wrong(Exception):
    """A value that its field may not have.

    Attributes:
        place: the names of the fields, and the numbers in lists, that lead to it.
    """

    def __init__(self, expected: str, value: object) -> None:
        self.expected, self.value, self.place = expected, value, ""

    def below(self, step: str) -> _Wrong:
        """Return it with one step more at the beginning of its place."""
        dot = "." if self.place and not self.place.startswith("[") else ""
        self.place = f"{step}{dot}{self.place}"
        return self

    def __str__(self) -> str:
        place = f"field {self.place}" if self.place else "the value"
        return f"{place} should be {self.expected}, found {shortened(self.value)}"


# ---- records -------------------------------------------------------------------------------------


def encode(record: object) -> bytes:
    """Encode a record.

    Raises:
        InputError: its reader would refuse it, for example a negative number; or this release
            cannot write its version.
    """
    kind: Any = type(record)
    version = getattr(record, "version", OWN_VERSION)
    if version != OWN_VERSION:
        raise InputError(
            f"records of version {version} can be read but not written, only {OWN_VERSION}",
            next_step="use a release of arroyo-dagster that knows this version",
        )
    data = encode_json({"version": version, **plain_values(record)})
    unknown: bytes = getattr(record, "unknown", b"")
    data = data[:-1] + b"," + unknown[1:] if unknown else data
    left_out = {
        field.name: getattr(record, field.name) for field in _fields(kind) if not field.stored
    }
    try:
        same = decode(kind, data, "the new record", **left_out) == record
    except FormatError as error:
        raise InputError(f"a record cannot be written: {error.message}") from error
    if not same:  # a merge without any file may be one of pairs, or of rows
        raise InputError("a record cannot be written: it would be read as another one")
    return data


def decode(kind: type[T], data: bytes, path: str, /, **left_out: object) -> T:
    """Decode a record.

    Args:
        left_out: the fields that are not stored.

    Raises:
        FormatError: the bytes are no JSON, a field is missing, unknown, or not of its type, or a
            later release wrote the record. Names the object and the field.
    """
    return decode_values(kind, decode_json(data, path), path, **left_out)


def decode_values(
    kind: type[T], document: Mapping[str, Any], path: str, /, **left_out: object
) -> T:
    """Decode a record of which the JSON is decoded. Errors as in `decode`."""
    values, fields = dict(document), _fields(kind)
    if not any(field.name == "unknown" for field in fields):
        check_version(values, path)
        if not any(field.name == "version" for field in fields):
            del values["version"]
    try:
        record: T = _object(kind, left_out, values)
    except _Wrong as error:
        raise FormatError(str(error), path=path, next_step=KEEP) from error
    return record


def decoder(kind: type[T]) -> Callable[[bytes, str], T]:
    """Return the function that decodes a record of this class from bytes, by its path."""
    return functools.partial(decode, kind)


def check_version(values: Mapping[str, Any], path: str) -> None:
    """Refuse a record of this package that a later release wrote. Raises FormatError."""
    version = values.get("version")
    if version != OWN_VERSION or isinstance(version, bool):
        raise FormatError(
            f"an object of version {version!r:.20}: this release knows version {OWN_VERSION}",
            path=path,
            next_step="use the release that wrote it, or a later one; nothing was changed",
        )


# ---- values to JSON ------------------------------------------------------------------------------


def plain_values(value: Any) -> Any:
    """Convert a value to JSON values."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {str(key): plain_values(item) for key, item in value.items()}
    if not dataclasses.is_dataclass(value):
        return [plain_values(item) for item in value]
    fields = [field for field in _fields(type(value)) if field.stored and not field.is_bytes]
    if getattr(value, "json_as_list", False):
        return [plain_values(getattr(value, field.name)) for field in fields]
    return {field.json: plain_values(getattr(value, field.name)) for field in fields}


# ---- JSON to values ------------------------------------------------------------------------------


def value_from_json(kind: type[T], document: Any) -> T:
    """Convert JSON values back into a value; the inverse of `plain_values`.

    Raises:
        FormatError: a field is missing, unknown, or not of its type.
    """
    try:
        value: T = _reader(kind)(document)
    except _Wrong as error:
        raise FormatError(f"not a {kind.__name__}: {error}") from error
    return value


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    """A field of a class: its name, that in JSON, and how it is read."""

    name: str
    json: str
    kind: Any
    stored: bool
    is_bytes: bool

    def read(self, document: Any) -> Any:
        try:
            return _reader(self.kind)(document)
        except _Wrong as error:
            raise error.below(self.json) from None


def _derived_fields(kind: Any) -> tuple[_Field, ...]:
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = [_field(field.name, hints[field.name]) for field in dataclasses.fields(kind)]
    return tuple(sorted(fields, key=lambda field: field.name != "version"))


_fields: Callable[[Any], tuple[_Field, ...]] = functools.cache(_derived_fields)


def _field(name: str, hint: Any) -> _Field:
    extras = typing.get_args(hint)[1:] if typing.get_origin(hint) is typing.Annotated else ()
    json_name = next((extra.name for extra in extras if isinstance(extra, JsonName)), name)
    bare = typing.get_args(hint)[0] if extras else hint
    return _Field(name, json_name, bare, NOT_STORED not in extras, bare is bytes)


def _object(kind: Any, left_out: Mapping[str, object], document: Any) -> Any:
    if not isinstance(document, Mapping):
        raise _Wrong("an object", document)
    values, read, unknown = dict(left_out), set(), False
    for field in _fields(kind):
        unknown = unknown or field.name == "unknown"
        if field.stored and not field.is_bytes:
            values[field.name] = field.read(document.get(field.json))
            read.add(field.json)
    more = {name: value for name, value in document.items() if name not in read}
    if more and not unknown:
        name, value = next(iter(more.items()))
        raise _Wrong("absent: this release does not know it", value).below(name)
    if more:
        values["unknown"] = _kept(more)
    return _made(kind, values, document)


def _kept(more: Mapping[str, Any]) -> bytes:
    try:
        return encode_json(more)
    except InputError:
        raise _Wrong("text in Unicode", more).below("of a later release") from None


def _made(kind: Any, values: Mapping[str, Any], document: Any) -> Any:
    try:
        return kind(**values)
    except (ArroyoStateError, KeyError, TypeError, ValueError) as error:
        raise _Wrong(f"a valid {kind.__name__} ({error!s:.200})", document) from error


def _derived_reader(kind: Any) -> _Read:
    """Return the function that reads a value of an annotation."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, typing.NewType) or origin is typing.Annotated:
        return _reader(kind.__supertype__ if origin is None else arguments[0])
    if origin in (types.UnionType, typing.Union):
        return functools.partial(
            _one_of, tuple(kind for kind in arguments if kind is not type(None))
        )
    if origin is tuple:
        last = arguments[-1] is Ellipsis
        item = functools.partial(_items, _reader(arguments[0]))
        return item if last else functools.partial(_fixed, tuple(map(_reader, arguments)))
    if origin is not None and issubclass(origin, Mapping):
        return functools.partial(_mapping, *map(_reader, arguments))
    if dataclasses.is_dataclass(kind):
        if getattr(kind, "json_as_list", False):
            names = tuple(field.name for field in _fields(kind))
            return functools.partial(_listed, kind, names, tuple(f.read for f in _fields(kind)))
        return functools.partial(_object, kind, {})
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return functools.partial(_enum, kind)
    return _SCALARS[kind] if kind in _SCALARS else _packed(kind)


_reader: Callable[[Any], _Read] = functools.cache(_derived_reader)


def _packed(kind: Any) -> _Read:
    from arroyo_dagster.state.model.objects import Packed, StoredObject

    if kind is not Packed:
        raise TypeError(f"{kind} has no form in JSON")
    return lambda document: Packed(_items(_reader(StoredObject), document))


def _one_of(kinds: tuple[Any, ...], document: Any) -> Any:
    """Read null, or the first class that has the fields and types of the document."""
    if document is None:
        return None
    if len(kinds) == 1:
        return _reader(kinds[0])(document)
    errors = [_Wrong("an object with other fields", document)]
    for kind in kinds:
        if isinstance(document, Mapping) and document.keys() == {
            field.json for field in _fields(kind)
        }:
            try:
                return _reader(kind)(document)
            except _Wrong as error:
                errors.append(error)
    raise max(errors, key=lambda error: len(error.place))


def _items(read: _Read, document: Any) -> tuple[Any, ...]:
    if not isinstance(document, list):
        raise _Wrong("a list", document)
    values = []
    for number, item in enumerate(document):
        try:
            values.append(read(item))
        except _Wrong as error:
            raise error.below(f"[{number}]") from None
    return tuple(values)


def _fixed(readers: tuple[_Read, ...], document: Any) -> tuple[Any, ...]:
    if not isinstance(document, list) or len(document) != len(readers):
        raise _Wrong(f"a list of {len(readers)}", document)
    return tuple(read(item) for read, item in zip(readers, document, strict=True))


def _listed(kind: Any, names: tuple[str, ...], readers: tuple[_Read, ...], document: Any) -> Any:
    return _made(kind, dict(zip(names, _fixed(readers, document), strict=True)), document)


def _mapping(key: _Read, value: _Read, document: Any) -> dict[Any, Any]:
    if not isinstance(document, Mapping):
        raise _Wrong("an object", document)
    entries = {}
    for name, item in document.items():
        try:
            entries[key(name)] = value(item)
        except _Wrong as error:
            raise error.below(f"[{shortened(name)}]") from None
    return entries


def _enum(kind: type[enum.Enum], document: Any) -> Any:
    for member in kind:
        if member.value == document and type(member.value) is type(document):
            return member
    raise _Wrong("one of " + ", ".join(str(member.value) for member in kind), document)


def _text(document: Any) -> str:
    if not isinstance(document, str) or not is_unicode(document):
        raise _Wrong("a string", document)
    return document


def _path(document: Any) -> StatePath:
    try:
        return StatePath(_text(document))
    except InputError as error:
        raise _Wrong("a path below the checkpoint URL", error.message) from error


def _number(document: Any) -> int:
    try:
        return whole_number(document)
    except ValueError:
        raise _Wrong(f"a whole number from 0 to {MAX_U64}", document) from None


def _float(document: Any) -> float:
    if isinstance(document, bool) or not isinstance(document, int | float):
        raise _Wrong("a number", document)
    return float(document)


def _flag(document: Any) -> bool:
    if not isinstance(document, bool):
        raise _Wrong("true or false", document)
    return document


def _bytes(document: Any) -> bytes:
    try:
        return base64.b64decode(_text(document), validate=True)
    except binascii.Error:
        raise _Wrong("Base64", document) from None


_SCALARS: Mapping[Any, _Read] = {
    str: _text,
    StatePath: _path,
    int: _number,
    float: _float,
    bool: _flag,
    bytes: _bytes,
    object: lambda document: document,
    Any: lambda document: document,
}


# ---- JSON ----------------------------------------------------------------------------------------


def encode_json(value: object) -> bytes:
    """Encode compact JSON, fields in the order given, without a final newline.

    Raises:
        InputError: a text is not valid Unicode, or a number has more than 4,300 digits.
    """
    try:
        return _ENCODER.encode(value).encode()
    except ValueError as error:
        raise InputError(f"a record cannot be written ({error!s:.200})") from error


def decode_json(data: bytes, path: str) -> dict[str, Any]:
    """Decode an object.

    Raises:
        FormatError: the bytes are no JSON object in UTF-8, or contain NaN or an infinity.
    """
    try:
        value = parse_json(data, _DECODER)
    except ValueError as error:
        raise FormatError(
            f"{len(data)} bytes that should be JSON are not; the object may be truncated",
            path=path,
            next_step="keep the object and report it",
        ) from error
    if not isinstance(value, Mapping):
        raise FormatError("JSON, but not an object", path=path)
    return dict(value)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number in JSON")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text)


_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
_DECODER = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite)
