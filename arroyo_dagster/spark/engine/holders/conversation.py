"""The side of a task in a conversation with a holder."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import pyarrow as pa

from arroyo_dagster.spark.engine.holders.messages import (
    ALIVE,
    CHUNKS,
    ERROR,
    ROWS,
    STEP,
    WORK,
    Channel,
    HolderAddress,
    Meeting,
    RemoteFailure,
    connect,
    greet,
)


class HungError(TimeoutError):
    """A holder did not say for a while that it is alive."""


class BlockedError(TimeoutError):
    """A holder on another host was not reached, and did not refuse either."""


@dataclass(frozen=True, slots=True)
class Request:
    """A pickled `Work`, and its rows."""

    work: bytes
    rows: pa.Buffer


class Conversation:
    """A connection with a holder that knows the secret.

    Attributes:
        step: the functions of the user one of which ran when the holder was last heard of; empty =
            none.
    """

    def __init__(self, channel: Channel, address: HolderAddress, process: int) -> None:
        self._channel = channel
        self.address = address
        self.process = process
        self.step = ""

    @classmethod
    def begin(cls, address: HolderAddress, meeting: Meeting) -> Conversation:
        """Connect to a holder.

        Raises:
            BlockedError: see the class.
            OSError: the holder is gone.
        """
        try:
            channel = Channel(connect(address, across=meeting.driver_host is not None))
        except TimeoutError as error:
            raise BlockedError(f"no answer from {address.host}") from error
        try:
            # The first word comes late if user code blocks all threads of the process.
            channel.connection.settimeout(meeting.silence_seconds)
            about = greet(channel, meeting.secret)
        except TimeoutError as error:
            channel.close()
            raise HungError("a holder does not answer") from error
        except OSError:
            channel.close()
            raise
        return cls(channel, *HolderAddress.read(about))

    def close(self) -> None:
        """End it."""
        self._channel.close()

    def run(self, request: Request) -> list[pa.RecordBatch] | RemoteFailure:
        """Have an epoch written; return its output and its report, or what failed there.

        Raises:
            HungError: see the class.
            OSError: the holder ended.
        """
        output: list[pa.RecordBatch] = []
        try:
            self._channel.send(WORK, request.work)
            self._channel.send(ROWS, memoryview(request.rows))
            while True:
                kind, payload = self._channel.receive()
                if kind == CHUNKS:
                    output += pa.ipc.open_stream(pa.py_buffer(payload))
                elif kind == STEP:
                    self.step = payload.decode()
                elif kind == ERROR:
                    failure: RemoteFailure = pickle.loads(payload)
                    return failure
                elif kind != ALIVE:
                    return output
        except TimeoutError as error:
            raise HungError("a holder does not answer") from error
