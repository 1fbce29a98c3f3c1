"""Messages to and from bytes, whatever they mean: errors of one kind, unknown fields kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from arroyo_dagster.errors import FormatError, InputError

_M = TypeVar("_M", bound=Message)
_T = TypeVar("_T")


def decoded(data: bytes, path: str, kind: type[_M], convert: Callable[[_M], _T]) -> _T:
    """Parse a message and turn it into a value.

    Raises:
        FormatError: it does not parse, or `convert` refuses what it holds. Names `path`.
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
    """Parse a message, `table`'s if one is given. Raises FormatError."""
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


def encoded(message: Message) -> bytes:
    """The bytes of a message, the same for the same fields."""
    # Deterministic: equal values must give equal bytes, for retries to recognise their own object.
    return message.SerializeToString(deterministic=True)


def unknown_of(message: Message) -> bytes:
    """The fields of this very message that our text of it does not know, encoded."""
    if not len(UnknownFieldSet(message)):
        return b""
    rest = type(message)()
    rest.CopyFrom(message)
    for field in rest.DESCRIPTOR.fields:
        rest.ClearField(field.name)
    return rest.SerializeToString()


def with_unknown(message: _M, unknown: bytes) -> _M:
    """Put back what `unknown_of` gave."""
    if unknown:
        message.MergeFromString(unknown)
    return message


@contextmanager
def fitting(**facts: object) -> Iterator[None]:
    """Turn what protobuf says of a value that its field cannot hold into an InputError."""
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
