"""Converters from raw records of a topic to Python values and back, by the topic's declared type.

Objects are `Record`s with the member names of the YAML. Converters map them to the names in JSON.

Source: sdf-states.md 2.9, 6.1 and 7; 2.11 for the names of 0.5.0 in JSON.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from json.scanner import make_scanner
from typing import Any

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
from arroyo_dagster.dataflow.runtime.raw_values import (
    Convert,
    kind_of,
    raw_key,
    raw_reader,
    raw_writer,
    scalar_converter,
)
from arroyo_dagster.dataflow.runtime.record import Record, as_record
from arroyo_dagster.dataflow.storage.values import check_of
from arroyo_dagster.errors import InputError

ConvertAll = Callable[[Sequence[Any]], Sequence[Any]]
"""Converts many values, or raises ValueError, KeyError or TypeError: convert them one by one."""


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
        return self.name == "raw" and self.resolved(self.type) is ScalarType.STRING

    def reader(self) -> Convert:
        """Return a function that decodes a value from bytes. ValueError: invalid bytes."""
        if self.name == "raw":
            return raw_reader(self.resolved(self.type))
        if self.type is None:
            return lambda data: _parsed(data, _RECORDS)
        decode = self._decoder(self.type)
        return lambda data: decode(_parsed(data))

    def batch_reader(self) -> ConvertAll:
        """Return a function that decodes values from bytes or text, together.

        It raises ValueError if one is not as usual. `reader` then decodes them one by one.
        """
        if self.name == "raw" or self.type is None:
            return _each(self.reader())
        decode = _batch_decoder(self, self.type)
        return lambda texts: decode([_scanned(text) for text in texts])

    def arrow_reader(self) -> Convert:
        """Return a function that decodes a value from Arrow's Python types (`to_pylist`)."""
        return as_record if self.type is None else self._decoder(self.type)

    def arrow_batch_reader(self) -> ConvertAll:
        """Return `arrow_reader` of values together. Errors as in `batch_reader`."""
        return _each(as_record) if self.type is None else _batch_decoder(self, self.type)

    def writer(self) -> Convert:
        """Return a function that encodes a value as bytes. ValueError: not of the topic's type."""
        if self.name == "raw":
            return raw_writer(self.resolved(self.type))
        convert = self._encoder(self.type) if self.type is not None else _plain
        return lambda value: _json_text(convert(value)).encode()

    def key_reader(self) -> Convert:
        """Return a function that decodes a record's raw key, as text if no type is declared."""
        return raw_reader(self.resolved(self.key_type) or ScalarType.STRING)

    def key_writer(self) -> Convert:
        """Return a function that encodes a record's key."""
        declared = self.resolved(self.key_type)
        return raw_key if declared is None else raw_writer(declared)

    def name_in_json(self, member: Member) -> str:
        """Return the name of a member in JSON that is read."""
        return member.read_as or self._field(member.name)

    def resolved(self, declared: TypeDef | None) -> TypeDef | None:
        """Return a type with its name resolved; None if it is undeclared or unknown."""
        return None if declared is None else self.types.resolve(declared).type

    # ---- from JSON -------------------------------------------------------------------------------

    def _decoder(self, declared: TypeDef) -> Convert:
        if isinstance(declared, NamedType):
            return self._later(declared, Converter._decoder)
        if isinstance(declared, ScalarType):
            return scalar_converter(declared)
        if isinstance(declared, CompositeType):
            return _DECODERS[declared.kind](self, declared)
        if declared is PlainType.BYTES:
            return _bytes_of_list
        return _null if declared is PlainType.NULL else as_record

    def _later(
        self,
        declared: NamedType,
        make: Callable[[Converter, TypeDef], Convert],
        unknown: Convert = as_record,
    ) -> Convert:
        """Return a converter that is built at its first use, since types can be recursive."""
        converters: list[Convert] = []

        def convert(value: Any) -> Any:
            if not converters:
                resolved = self.resolved(declared)
                converters.append(unknown if resolved is None else make(self, resolved))
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
                raise ValueError(f"expected an object, found {kind_of(value)}")
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

        return convert

    def _list_decoder(self, declared: CompositeType) -> Convert:
        decode = self._decoder(declared.members[0].type)

        def convert(value: Any) -> list[Any]:
            if not isinstance(value, list):
                raise ValueError(f"expected a list, found {kind_of(value)}")
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
            return scalar_converter(declared)
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
                raise ValueError(f"expected an object (a dict), found {kind_of(value)}")
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
                raise ValueError(f"expected a list, found {kind_of(value)}")
            return [_inside(str(index), encode, item) for index, item in enumerate(value)]

        return convert

    def _option_encoder(self, declared: CompositeType) -> Convert:
        encode = self._encoder(declared.members[0].type)
        return lambda value: None if value is None else encode(value)

    def _pair_encoder(self, declared: CompositeType) -> Convert:
        members = {member.name: self._encoder(member.type) for member in declared.members}

        def convert(value: Any) -> dict[str, Any]:
            if not isinstance(value, tuple | list) or len(value) != 2:
                raise ValueError(f"expected a pair of key and value, found {kind_of(value)}")
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
        return self.resolved(member.type) is PlainType.NULL

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


# ---- batches of values that are as usual ---------------------------------------------------------
# Each member is checked for all records, which takes less time than all members of each record.


def _batch_decoder(converter: Converter, declared: TypeDef) -> ConvertAll:
    if isinstance(declared, NamedType):
        return converter._later(declared, _batch_decoder, _each(as_record))
    if isinstance(declared, ScalarType):
        return functools.partial(_usual_scalars, declared)
    if isinstance(declared, CompositeType) and declared.kind == "object":
        return _batch_of_objects(converter, declared)
    if isinstance(declared, CompositeType) and declared.kind == "list":
        return _batch_of_lists(_batch_decoder(converter, declared.members[0].type))
    return _each(converter._decoder(declared))


def _batch_of_objects(converter: Converter, declared: CompositeType) -> ConvertAll:
    members = [
        (converter.name_in_json(member), _batch_decoder(converter, member.type), member.optional)
        for member in declared.members
    ]
    names = [member.name for member in declared.members]
    names_in_json = {written for written, _, _ in members}

    def convert(values: Sequence[Any]) -> Sequence[Any]:
        if not set(map(type, values)) <= {dict}:
            raise ValueError
        columns = []
        for written, decode, optional in members:
            if optional:
                column = [value.get(written) for value in values]
                absent = [value for value in values if written not in value]
                if any(_other_spelling(value, written, names_in_json) for value in absent):
                    raise ValueError
                columns.append(_optional(decode, column))
            else:
                columns.append(decode([value[written] for value in values]))
        rows = zip(*columns, strict=True) if columns else itertools.repeat((), len(values))
        return [*map(Record, map(zip, itertools.repeat(names), rows))]

    return convert


def _each(convert: Convert) -> ConvertAll:
    return lambda values: [*map(convert, values)]


def _usual_scalars(scalar: ScalarType, values: Sequence[Any]) -> Sequence[Any]:
    kinds = set(map(type, values))
    if scalar is ScalarType.STRING and kinds <= {str}:
        "".join(values).encode()  # raises for a lone surrogate
        return values
    if scalar is ScalarType.BOOL and kinds <= {bool}:
        return values
    if scalar.bounds is not None and kinds <= {int}:
        low, high = scalar.bounds
        if not values or (low <= min(values) and max(values) <= high):
            return values
    return [*map(check_of(scalar), values)]


def _optional(decode: ConvertAll, values: Sequence[Any]) -> Sequence[Any]:
    if None not in values:
        return decode(values)
    decoded = iter(decode([value for value in values if value is not None]))
    return [None if value is None else next(decoded) for value in values]


def _batch_of_lists(decode: ConvertAll) -> ConvertAll:
    def convert(values: Sequence[Any]) -> Sequence[Any]:
        if not set(map(type, values)) <= {list}:
            raise ValueError
        decoded = iter(decode([item for value in values for item in value]))
        return [[*itertools.islice(decoded, len(value))] for value in values]

    return convert


# ---- JSON ----------------------------------------------------------------------------------------


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


_JSON = json.JSONDecoder(parse_constant=_no_constant)
_RECORDS = json.JSONDecoder(parse_constant=_no_constant, object_hook=Record)
_scan = make_scanner(_JSON)  # type: ignore[arg-type]  # its stub knows no decoder


def _scanned(text: bytes | str) -> Any:
    """Parse JSON that has no white space around it; ValueError: it has, or is no JSON."""
    text = text if isinstance(text, str) else text.decode()
    try:
        value, end = _scan(text, 0)
    except (StopIteration, RecursionError):
        raise ValueError from None
    if end != len(text):
        raise ValueError
    return value


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
        raise ValueError(f"expected bytes, found {kind_of(value)}")
    return list(value)


def _null(value: Any) -> None:
    if value is not None:
        raise ValueError(f"expected null, found {kind_of(value)}")
