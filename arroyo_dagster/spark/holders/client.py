"""What a task does to have an epoch of its subtask written where the subtask is held."""

from __future__ import annotations

import contextlib
import pickle

import pyarrow as pa

from arroyo_dagster.spark.chunks import PLACE, chunk_batches, decode_stream
from arroyo_dagster.spark.holders.channel import HolderAddress
from arroyo_dagster.spark.holders.conversation import (
    BlockedError,
    Conversation,
    HungError,
    Request,
)
from arroyo_dagster.spark.holders.messages import (
    Meeting,
    Placed,
    RemoteFailure,
    RemoteTraceback,
    Work,
)
from arroyo_dagster.spark.holders.slot import own_slot
from arroyo_dagster.spark.holders.subtasks import HeldSubtasks
from arroyo_dagster.state.runtime.exchange import ExchangeChunk

_HERE = HeldSubtasks()
"""Of a worker that cannot start a process."""


def run_level(
    level: int,
    work: bytes,
    subtask: int,
    rows: pa.Buffer,
    placed: HolderAddress | None,
    meeting: Meeting,
) -> list[pa.RecordBatch]:
    """Write one epoch of a subtask where it is held; return its output, its report, and its place.

    If the holder is gone, the holder of this worker takes the subtask over. What a holder sent
    before it ended half way is not used.

    Args:
        work: a pickled `LevelWork`.
        rows: the chunks of this level and subtask, as a `ChunkStream`.
        placed: the holder of the subtask; None = none yet.

    Raises:
        StorageError: the holder of this worker ended while it worked.
        Exception: user code or the store failed; the text is that of the original error.
    """
    request = Request(pickle.dumps(Work(work, subtask, meeting.idle_seconds)), rows)
    slot, lost, blocked = own_slot(meeting), None, False
    holder: HolderAddress | None = None
    output: list[pa.RecordBatch] | RemoteFailure | None = None
    if slot is not None and placed is not None:
        try:
            with contextlib.closing(Conversation.begin(placed, meeting)) as conversation:
                holder, output = conversation.address, conversation.run(request)
            if holder != placed:
                lost = placed  # another process has its place
        except OSError as error:
            lost, blocked = placed, isinstance(error, BlockedError)
            if slot.name == placed.name:
                slot.forget(hung=isinstance(error, HungError))
    if slot is not None and output is None:
        opened = slot.begin()
        if opened is not None:
            with contextlib.closing(opened):
                holder, output = opened.address, slot.run(opened, request)
    if output is None:
        holder, chunks = None, decode_stream(rows)
        output = list(
            chunk_batches(_HERE.run(pickle.loads(work), subtask, chunks, meeting.idle_seconds))
        )
    if isinstance(output, RemoteFailure):
        raise output.as_error() from RemoteTraceback(output.text)
    if slot is not None and meeting.start:
        slot.address()
    own = None if slot is None else slot.known_address()
    place = Placed(level, subtask, holder, own, lost, blocked)
    chunk = ExchangeChunk(0, subtask, PLACE, level, pickle.dumps(place))
    return [*output, *chunk_batches([chunk])]
