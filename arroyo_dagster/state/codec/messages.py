"""JSON messages between a run of Dagster and the process that works for it elsewhere.

A document goes in chunks: log streams, which some Pipes clients read messages from, cut long lines.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import functools
import json
import types
import typing
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import arroyo_dagster.errors as errors
from arroyo_dagster.errors import ArroyoStateError, FormatError

T = TypeVar("T")
REQUEST = "arroyo/request"
"""Under this key of the extras of Pipes is what a run asks for."""
CHUNK_CHARACTERS = 8_000
_CHUNK = "arroyo/chunk"

# ---- values --------------------------------------------------------------------------------------


def value_from_json(kind: type[T], document: Any) -> T:
    """Convert JSON values back into a dataclass; the inverse of `plain_values`.

    Fields that hold bytes have their defaults.

    Raises:
        FormatError: the document has no such fields.
    """
    try:
        found: T = _value(kind, document)
    except (ArroyoStateError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"not a {kind.__name__}: {error!r}") from error
    return found


def _value(kind: Any, document: Any) -> Any:
    if isinstance(kind, typing.NewType):
        return _value(kind.__supertype__, document)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _one_of(arguments, document)
    if origin is tuple:
        return tuple(_value(arguments[0], one) for one in document)
    if origin is not None and issubclass(origin, Mapping):
        return {_value(arguments[0], key): _value(arguments[1], document[key]) for key in document}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(document, Mapping):
            raise TypeError(f"expected an object, found {document!r}")
        hints = _hints(kind)
        return kind(**{name: _value(hints[name], one) for name, one in document.items()})
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(document)
    if kind is float and type(document) is int:
        return float(document)
    if kind in (str, int, float, bool) and type(document) is not kind:
        raise TypeError(f"expected {kind.__name__}, found {document!r}")
    return document if kind in (str, int, float, bool) else kind(document)


@functools.cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _one_of(kinds: Iterable[Any], document: Any) -> Any:
    """Return a value of a union: the dataclass with these fields, or the one that is no None."""
    if document is None:
        return None
    known = [one for one in kinds if one is not types.NoneType]
    for kind in known[:-1]:
        names = {field.name for field in dataclasses.fields(kind)}
        if isinstance(document, Mapping) and document.keys() <= names:
            try:
                return _value(kind, document)
            except (KeyError, TypeError, ValueError):
                continue
    return _value(known[-1], document)


# ---- errors --------------------------------------------------------------------------------------


def error_from_json(document: Mapping[str, Any]) -> ArroyoStateError:
    """Return the error that another process raised, of the same class."""
    kind = getattr(errors, str(document["type"]), None)
    if not (isinstance(kind, type) and issubclass(kind, ArroyoStateError)):
        kind = ArroyoStateError
    return kind(
        str(document["message"]),
        next_step=document["next_step"],
        retryable=bool(document["retryable"]),
        **document["facts"],
    )


# ---- chunks --------------------------------------------------------------------------------------


def split_document(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages of one document, each shorter than 9,000 characters."""
    data = zlib.compress(json.dumps(document).encode())
    text = base64.b64encode(data).decode()
    starts = range(0, len(text), CHUNK_CHARACTERS)
    for number, start in enumerate(starts):
        yield {_CHUNK: [number, len(starts), text[start : start + CHUNK_CHARACTERS]]}


def join_documents(messages: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield the documents in messages that `split_document` made; others are ignored.

    Raises:
        FormatError: a chunk is missing.
    """
    texts: list[str] = []
    for message in messages:
        if not isinstance(message, Mapping) or _CHUNK not in message:
            continue
        number, count, text = message[_CHUNK]
        if number != len(texts):
            raise FormatError(f"chunk {len(texts)} of a message is missing, chunk {number} came")
        texts.append(text)
        if len(texts) == count:
            yield json.loads(zlib.decompress(base64.b64decode("".join(texts))))
            texts = []
    if texts:
        raise FormatError(f"the last chunks of a message are missing, after chunk {len(texts) - 1}")
