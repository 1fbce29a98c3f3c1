"""JSON messages between a run of Dagster and the process that works for it elsewhere.

A document goes in chunks: log streams, which some Pipes clients read messages from, cut long lines.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import arroyo_dagster.errors as errors
from arroyo_dagster.errors import ArroyoStateError, FormatError

REQUEST = "arroyo/request"
"""Under this key of the extras of Pipes is what a run asks for."""
CHUNK_CHARACTERS = 8_000
_CHUNK = "arroyo/chunk"

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
