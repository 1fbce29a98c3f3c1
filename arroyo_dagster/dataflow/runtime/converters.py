"""Converters from raw records of a topic to Python values and back, by the topic's declared type.

Objects are `Record`s with the member names of the YAML. Converters map them to the names in JSON.

Source: sdf-states.md 2.9, 6.1 and 7; 2.11 for the names of 0.5.0 in JSON.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from json.scanner import make_scanner
from typing import Any, cast

from arroyo_dagster.dataflow.definition.types import (
    CompositeType,
    Member,
    NamedType,
    PlainType,
    ScalarType,
    Scope,
    TypeDef,
)
from arroyo_dagster.dataflow.errors import did_you_mean
from arroyo_dagster.dataflow.runtime.record import Record, as_record
from arroyo_dagster.dataflow.storage.values import check_of, value_error
from arroyo_dagster.errors import InputError

Convert = Callable[[Any], Any]
"""Converts one value into another, or raises ValueError (InputError is one) with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converter:
    """Reads and writes the keys and values of one topic.

    Attributes:
        name: `json` or `raw`.
        type, key_type: the declared types; None = undeclared.
        types: the scope that resolves named types.
        snake_case: whether names in JSON are those of 0.5.0: fields in snake_case, variants in
            UpperCamelCase. A `rename` takes precedence.
    """

    name: str = "json"
    type: TypeDef | None = None
    key_type: TypeDef | None = None
    types: Scope
    snake_case: bool = False

    def __post_init__(self) -> None:
        if self.name not in ("json", "raw"):
            raise InputError(
                f"there is no converter {self.name!r}", next_step="choose `json` or `raw`"
            )

    @property
    def is_text(self) -> bool:
        """Whether a value is the text of its record, without conversion."""
        return self.name == "raw" and self._resolved(self.type) is ScalarType.STRING

    def reader(self) -> Convert:
        """Return a function that decodes a value from bytes. ValueError: invalid bytes."""
        if self.name == "raw":
            return _raw_reader(self._resolved(self.type))
        if self.type is None:
            return lambda data: _parsed(data, _RECORDS)
        # A function that decodes JSON, fastest without white space around it.
        convert = self._decoder(self.type)

        def read(data: bytes | str) -> Any:
            text = data if isinstance(data, str) else data.decode()
            try:
                value, end = _scan(text, 0)
            except (StopIteration, ValueError, RecursionError):
                end = -1  # white space at the beginning, or an error, which `_parsed` raises
            return convert(value if end == len(text) else _parsed(text))

        return read

    def arrow_reader(self) -> Convert:
        """Return a function that decodes a value from Arrow's Python types (`to_pylist`)."""
        return as_record if self.type is None else self._decoder(self.type)

    def writer(self) -> Convert:
        """Return a function that encodes a value as bytes. ValueError: not of the topic's type."""
        if self.name == "raw":
            return _raw_writer(self._resolved(self.type))
        convert = self._encoder(self.type) if self.type is not None else _plain
        return lambda value: _json_text(convert(value)).encode()

    def key_reader(self) -> Convert:
        """Return a function that decodes a record's raw key, as text if no type is declared."""
        return _raw_reader(self._resolved(self.key_type) or ScalarType.STRING)

    def key_writer(self) -> Convert:
        """Return a function that encodes a record's key."""
        declared = self._resolved(self.key_type)
        return _raw_key if declared is None else _raw_writer(declared)

    def resolved(self, declared: TypeDef | None) -> TypeDef | None:
        """Return a type with its name resolved; None if it is undeclared or unknown."""
        return self._resolved(declared)

    def name_in_json(self, member: Member) -> str:
        """Return the name of a member in JSON that is read."""
        return member.read_as or self._field(member.name)

    def _resolved(self, declared: TypeDef | None) -> TypeDef | None:
        return None if declared is None else self.types.resolve(declared).type

    # ---- from JSON -------------------------------------------------------------------------------

    def _decoder(self, declared: TypeDef) -> Convert:
        if isinstance(declared, NamedType):
            return self._later(declared, Converter._decoder)
        if isinstance(declared, ScalarType):
            return _scalar(declared)
        if isinstance(declared, CompositeType):
            return _DECODERS[declared.kind](self, declared)
        if declared is PlainType.BYTES:
            return _bytes_of_list
        return _null if declared is PlainType.NULL else as_record

    def _later(self, declared: NamedType, make: Callable[[Converter, TypeDef], Convert]) -> Convert:
        """Return a converter that is built at its first use, since types can be recursive."""
        converters: list[Convert] = []

        def convert(value: Any) -> Any:
            if not converters:
                resolved = self._resolved(declared)
                converters.append(as_record if resolved is None else make(self, resolved))
            return converters[0](value)

        return convert

    def _object_decoder(self, declared: CompositeType) -> Convert:
        members = [
            (member.name, self.name_in_json(member), self._decoder(member.type), member.optional)
            for member in declared.members
        ]
        names = {written for _, written, _, _ in members}

        def convert(value: Any) -> Record:
            if not isinstance(value, dict):
                raise ValueError(f"expected an object, found {_kind(value)}")
            values: dict[str, Any] = {}
            for name, written, decode, optional in members:
                item = value.get(written)
                if item is None and written not in value:
                    other = _other_spelling(value, written, names)
                    if other is not None or not optional:
                        raise ValueError(self._missing(written, other))
                if item is None and optional:
                    values[name] = None
                else:
                    values[name] = _inside(name, decode, item)
            return Record(values)

        return _usual_object(members, [member.type for member in declared.members], convert)

    def _list_decoder(self, declared: CompositeType) -> Convert:
        decode = self._decoder(declared.members[0].type)

        def convert(value: Any) -> list[Any]:
            if not isinstance(value, list):
                raise ValueError(f"expected a list, found {_kind(value)}")
            return [_inside(str(index), decode, item) for index, item in enumerate(value)]

        return convert

    def _option_decoder(self, declared: CompositeType) -> Convert:
        decode = self._decoder(declared.members[0].type)
        return lambda value: None if value is None else decode(value)

    def _pair_decoder(self, declared: CompositeType) -> Convert:
        members = {member.name: self._decoder(member.type) for member in declared.members}

        def convert(value: Any) -> tuple[Any, ...]:
            if not isinstance(value, dict) or not members.keys() <= value.keys():
                raise ValueError("expected an object with `key` and `value`")
            return tuple(_inside(name, members[name], value[name]) for name in ("key", "value"))

        return convert

    def _enum_decoder(self, declared: CompositeType) -> Convert:
        if declared.untagged:
            return _first_fitting([self._decoder(member.type) for member in declared.members])
        units = {
            member.read_as or self._variant(member.name): member.name
            for member in declared.members
            if self._is_unit(member)
        }
        others = {
            member.read_as or self._variant(member.name): (member.name, self._decoder(member.type))
            for member in declared.members
            if not self._is_unit(member)
        }

        def convert(value: Any) -> Any:
            if isinstance(value, str) and value in units:
                return units[value]
            if isinstance(value, dict) and len(value) == 1:
                ((written, inner),) = value.items()
                if written in others:
                    name, decode = others[written]
                    return Record({name: _inside(name, decode, inner)})
            raise ValueError(f"expected one of the variants {', '.join([*units, *others])}")

        return convert

    # ---- to JSON ---------------------------------------------------------------------------------

    def _encoder(self, declared: TypeDef) -> Convert:
        if isinstance(declared, NamedType):
            return self._later(declared, Converter._encoder)
        if isinstance(declared, ScalarType):
            return _scalar(declared)
        if isinstance(declared, CompositeType):
            return _ENCODERS[declared.kind](self, declared)
        if declared is PlainType.BYTES:
            return _list_of_bytes
        return _null if declared is PlainType.NULL else _plain

    def _object_encoder(self, declared: CompositeType) -> Convert:
        members = [
            (
                member.name,
                member.name.replace("-", "_"),
                member.written_as or self._field(member.name),
                self._encoder(member.type),
                member.optional,
            )
            for member in declared.members
        ]
        names = {name for entry in members for name in entry[:2]}

        def convert(value: Any) -> dict[str, Any]:
            if not isinstance(value, Mapping):
                raise ValueError(f"expected an object (a dict), found {_kind(value)}")
            value = {**value}  # a record has no methods
            if unknown := [str(name) for name in value if name not in names]:
                hint = did_you_mean(unknown[0], names)
                raise ValueError(f"the type has no member `{unknown[0]}`{hint}")
            document: dict[str, Any] = {}
            for name, attribute, written, encode, optional in members:
                item = value.get(name, value.get(attribute))
                if item is None and optional:
                    continue
                if item is None and name not in value and attribute not in value:
                    raise ValueError(f"member `{name}` is missing")
                document[written] = _inside(name, encode, item)
            return document

        return convert

    def _list_encoder(self, declared: CompositeType) -> Convert:
        encode = self._encoder(declared.members[0].type)

        def convert(value: Any) -> list[Any]:
            if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
                raise ValueError(f"expected a list, found {_kind(value)}")
            return [_inside(str(index), encode, item) for index, item in enumerate(value)]

        return convert

    def _option_encoder(self, declared: CompositeType) -> Convert:
        encode = self._encoder(declared.members[0].type)
        return lambda value: None if value is None else encode(value)

    def _pair_encoder(self, declared: CompositeType) -> Convert:
        members = {member.name: self._encoder(member.type) for member in declared.members}

        def convert(value: Any) -> dict[str, Any]:
            if not isinstance(value, tuple | list) or len(value) != 2:
                raise ValueError(f"expected a pair of key and value, found {_kind(value)}")
            pair = zip(("key", "value"), value, strict=True)
            return {name: _inside(name, members[name], part) for name, part in pair}

        return convert

    def _enum_encoder(self, declared: CompositeType) -> Convert:
        if declared.untagged:
            return _first_fitting([self._encoder(member.type) for member in declared.members])
        variants = {
            member.name: (
                member.written_as or self._variant(member.name),
                None if self._is_unit(member) else self._encoder(member.type),
            )
            for member in declared.members
        }

        def convert(value: Any) -> Any:
            name, inner = value, None
            if isinstance(value, Mapping) and len(value) == 1:
                ((name, inner),) = {**value}.items()
            written, encode = (
                variants.get(name, ("", None)) if isinstance(name, str) else ("", None)
            )
            if not written or (encode is None) != isinstance(value, str):
                raise ValueError(f"expected one of the variants {', '.join(variants)}")
            return written if encode is None else {written: _inside(str(name), encode, inner)}

        return convert

    def _is_unit(self, member: Member) -> bool:
        return self._resolved(member.type) is PlainType.NULL

    def _missing(self, written: str, other: str | None) -> str:
        text = f"member `{written}` is missing"
        if other is None:
            return text
        rule = "with underscores" if self.snake_case else "as the YAML spells them"
        version = "0.5.0" if self.snake_case else "0.6.0"
        return (
            f"{text}, and the record has `{other}`: with apiVersion {version}, names in JSON are "
            f"{rule}; to read `{other}`, add `deserialize: {{ rename: {other} }}` to the member"
        )

    def _field(self, name: str) -> str:
        return name.replace("-", "_") if self.snake_case else name

    def _variant(self, name: str) -> str:
        if not self.snake_case:
            return name
        return "".join(part[:1].upper() + part[1:] for part in name.replace("_", "-").split("-"))


_DECODERS: dict[str, Callable[[Converter, CompositeType], Convert]] = {
    "object": Converter._object_decoder,
    "list": Converter._list_decoder,
    "option": Converter._option_decoder,
    "key-value": Converter._pair_decoder,
    "enum": Converter._enum_decoder,
}
_ENCODERS: dict[str, Callable[[Converter, CompositeType], Convert]] = {
    "object": Converter._object_encoder,
    "list": Converter._list_encoder,
    "option": Converter._option_encoder,
    "key-value": Converter._pair_encoder,
    "enum": Converter._enum_encoder,
}


def _usual_object(
    members: Sequence[tuple[str, str, Convert, bool]], types: Sequence[TypeDef], general: Convert
) -> Convert:
    """Return `general`, a decoder of an object, with a fast path for objects that are as usual.

    The fast path is one function without calls for text, bools and whole numbers. An object with a
    missing member, or a value that needs a conversion or an error, goes to `general`.

    Args:
        members: name, name in JSON, decoder and whether it is optional, of each.
        types: the type of each member.
    """
    names: dict[str, Any] = {"Record": Record, "general": general, "__name__": __name__}
    taken, tests, made = [], ["type(value) is dict"], []
    for i, ((name, written, decode, optional), kind) in enumerate(zip(members, types, strict=True)):
        m = f"m{i}"
        taken.append(f"{m} = value[{written!r}]")
        test = _usual_value(kind, m)
        if test is None:
            names[f"decode{i}"] = decode
            taken.append(f"{m} = {f'None if {m} is None else ' if optional else ''}decode{i}({m})")
        else:
            tests.append(f"({m} is None or {test})" if optional else test)
        made.append(f"{name!r}: {m}")
    lines = [
        "def convert(value):",
        "    try:",
        *(f"        {line}" for line in taken),
        f"        if {' and '.join(tests)}:",
        f"            return Record({{{', '.join(made)}}})",
        "    except (LookupError, TypeError, ValueError):",
        "        pass",
        "    return general(value)",
    ]
    exec("\n".join(lines), names)
    return cast(Convert, names["convert"])


def _usual_value(kind: TypeDef, name: str) -> str | None:
    """Return the test of whether a variable is a value of a type as it is; None = call its decoder.

    Text that UTF-8 cannot encode raises ValueError.
    """
    if kind is ScalarType.STRING:
        return f"type({name}) is str and ({name}.isascii() or {name}.encode())"
    if kind is ScalarType.BOOL:
        return f"type({name}) is bool"
    if isinstance(kind, ScalarType) and kind.bounds is not None:
        low, high = kind.bounds
        return f"type({name}) is int and {low} <= {name} <= {high}"
    return None


# ---- JSON ----------------------------------------------------------------------------------------


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


_JSON = json.JSONDecoder(parse_constant=_no_constant)
_RECORDS = json.JSONDecoder(parse_constant=_no_constant, object_hook=Record)
_scan = make_scanner(_JSON)  # type: ignore[arg-type]  # its stub knows no decoder


def _parsed(data: bytes | str, decoder: json.JSONDecoder = _JSON) -> Any:
    try:
        return decoder.decode(data if isinstance(data, str) else data.decode())
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def json_bytes(value: Any) -> bytes:
    """Encode a value of an undeclared type as JSON. ValueError: JSON cannot represent it."""
    return _json_text(_plain(value)).encode()


def _scalar(scalar: ScalarType) -> Convert:
    check = check_of(scalar)

    def convert(value: Any) -> Any:
        try:
            return check(value)
        except ValueError:
            raise ValueError(value_error(scalar, value).message) from None

    return convert


def _plain(value: Any) -> Any:
    """Return a value of an undeclared type in JSON's types."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is no JSON number")
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in {**value}.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise ValueError(f"a {type(value).__name__} has no form in JSON")


def _other_spelling(value: dict[str, Any], written: str, known: Set[str]) -> str | None:
    """Return the member of a value that is `written`, but for dashes and underscores."""
    plain = written.replace("-", "_")
    return next((key for key in value if key.replace("-", "_") == plain and key not in known), None)


def _inside(name: str, convert: Convert, value: Any) -> Any:
    try:
        return convert(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _first_fitting(tries: list[Convert]) -> Convert:
    def convert(value: Any) -> Any:
        reasons: list[str] = []
        for attempt in tries:
            try:
                return attempt(value)
            except ValueError as error:
                reasons.append(str(error))
        raise ValueError(f"no variant fits: {'; '.join(reasons)}")

    return convert


def _bytes_of_list(value: Any) -> bytes:
    try:
        return value if isinstance(value, bytes) else bytes(value)
    except (TypeError, ValueError):
        raise ValueError("expected bytes, a list of numbers from 0 to 255") from None


def _list_of_bytes(value: Any) -> list[int]:
    if not isinstance(value, bytes | bytearray):
        raise ValueError(f"expected bytes, found {_kind(value)}")
    return list(value)


def _null(value: Any) -> None:
    if value is not None:
        raise ValueError(f"expected null, found {_kind(value)}")


_KINDS = {dict: "an object", Record: "an object", list: "a list", str: "text", bool: "a bool"}


def _kind(value: Any) -> str:
    return "null" if value is None else _KINDS.get(type(value), f"a {type(value).__name__}")


# ---- raw -----------------------------------------------------------------------------------------

_FORMATS = {ScalarType.F32: ">f", ScalarType.F64: ">d"}


def _raw_reader(declared: TypeDef | None) -> Convert:
    if declared in (None, PlainType.BYTES):
        return lambda data: data
    if declared is ScalarType.STRING:
        return lambda data: data if isinstance(data, str) else data.decode()
    if declared is ScalarType.BOOL:
        return lambda data: bool(data[-1] & 1) if data else False
    if not isinstance(declared, ScalarType):
        raise InputError(
            "the raw converter takes text, bool, numbers and bytes only",
            next_step="use the converter `json`",
        )
    if declared.is_float:
        return _number_reader(struct.Struct(_FORMATS[declared]))
    width, signed = _width(declared)

    def convert(data: bytes) -> int:
        if len(data) != width:
            raise ValueError(f"expected {width} bytes, found {len(data)}")
        return int.from_bytes(data, "big", signed=signed)

    return convert


def _number_reader(form: struct.Struct) -> Convert:
    def convert(data: bytes) -> Any:
        if len(data) != form.size:
            raise ValueError(f"expected {form.size} bytes, found {len(data)}")
        return form.unpack(data)[0]

    return convert


def _width(declared: ScalarType) -> tuple[int, bool]:
    low, high = declared.bounds or (0, 0)
    return (high - low).bit_length() // 8, low < 0


def _raw_writer(declared: TypeDef | None) -> Convert:
    if declared in (None, PlainType.BYTES):
        return _raw_key
    if not isinstance(declared, ScalarType):
        raise InputError(
            "the raw converter writes text, bool, numbers and bytes only",
            next_step="use the converter `json`",
        )
    check = _scalar(declared)
    if declared is ScalarType.STRING:
        return lambda value: check(value).encode()
    if declared is ScalarType.BOOL:
        return lambda value: b"\x01" if check(value) else b"\x00"
    if declared.is_float:
        form = struct.Struct(_FORMATS[declared])
        return lambda value: form.pack(check(value))
    width, signed = _width(declared)
    return lambda value: check(value).to_bytes(width, "big", signed=signed)


def _raw_key(value: Any) -> bytes:
    """Encode text, bytes, an int or a bool of an undeclared type."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool):
        return b"true" if value else b"false"
    if isinstance(value, str | int):
        return str(value).encode()
    raise ValueError(f"expected text, bytes, an int or a bool, found {_kind(value)}")
