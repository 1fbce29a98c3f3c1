"""Any message to and from bytes, with uniform errors; unknown fields are preserved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from arroyo_dagster.errors import FormatError, InputError

_M = TypeVar("_M", bound=Message)
_T = TypeVar("_T")


def decoded(data: bytes, path: str, kind: type[_M], convert: Callable[[_M], _T]) -> _T:
    """Parse a message and convert it to a value.

    Raises:
        FormatError: it does not parse, or `convert` refuses its content. Names `path`.
    """
    try:
        return convert(parse_message(kind, data, None))
    except (FormatError, InputError) as error:
        facts: dict[str, Any] = {"path": path} | error.facts
        if "path" in error.facts and error.facts["path"] != path:
            facts = error.facts | {"path": path, "reference": error.facts["path"]}
        raise FormatError(
            f"metadata does not match its format: {error.message}",
            next_step=error.next_step or "keep the object and report it; restore another epoch",
            **facts,
        ) from error


def parse_message(kind: type[_M], data: bytes, table: str | None = None) -> _M:
    """Parse a message; `table` is the table it belongs to, for errors. Raises FormatError."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise FormatError(
            f"{len(data)} bytes do not decode as {kind.DESCRIPTOR.name}; "
            "the object may be truncated",
            table=table,
        ) from error
    return message


def fields_of_message(data: bytes) -> list[tuple[int, int | bytes]]:
    """Return the fields of a message of any kind, by their numbers, in order.

    Raises:
        FormatError: it does not parse, or has a field that is neither a number nor bytes.
    """
    unknown = UnknownFieldSet(parse_message(Empty, data))
    fields = [(unknown[index].field_number, unknown[index].data) for index in range(len(unknown))]
    for number, value in fields:
        if not isinstance(value, int | bytes):
            raise FormatError(f"field {number} is neither a number nor bytes")
    return fields


def encoded(message: Message) -> bytes:
    """Return the bytes of a message; equal fields have equal bytes."""
    # Deterministic, so that a retry recognises its own object by its bytes.
    return message.SerializeToString(deterministic=True)


def unknown_of(message: Message) -> bytes:
    """Return the encoded fields of this message, not of nested ones, that are unknown here."""
    if not len(UnknownFieldSet(message)):
        return b""
    rest = type(message)()
    rest.CopyFrom(message)
    for field in rest.DESCRIPTOR.fields:
        rest.ClearField(field.name)
    return rest.SerializeToString()


def with_unknown(message: _M, unknown: bytes) -> _M:
    """Add the fields that `unknown_of` returned."""
    if unknown:
        message.MergeFromString(unknown)
    return message


@contextmanager
def fitting(**facts: object) -> Iterator[None]:
    """Convert protobuf's errors about values that do not fit their fields to InputError."""
    try:
        yield
    except InputError:
        raise
    except (TypeError, ValueError) as error:
        raise InputError(
            f"a value does not fit the field it is written to: {error}",
            next_step="check the numbers and texts that were given; nothing was written",
            **facts,  # type: ignore[arg-type]
        ) from error
