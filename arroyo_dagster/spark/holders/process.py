"""The process that holds subtasks: it writes their epochs for the tasks that ask it.

User code runs in the main thread, one epoch of one subtask at a time, as in a Python worker of
Spark. Spark ends workers that are idle for a minute; a holder stays. It ends with the daemon of
Spark's workers, when the task that it works for is cancelled, and when no task came for a while.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import queue
import select
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from arroyo_dagster.spark.chunks import ChunkStream, chunk_batches, decode_stream
from arroyo_dagster.spark.holders.channel import (
    ALIVE,
    CHUNKS,
    DONE,
    ERROR,
    ROWS,
    STEP,
    WORK,
    Channel,
    HolderAddress,
    Secret,
    bound_loss,
    welcome,
)
from arroyo_dagster.spark.holders.messages import RemoteFailure, Work
from arroyo_dagster.spark.holders.process_id import ProcessId
from arroyo_dagster.spark.holders.subtasks import HeldSubtasks, LevelWork
from arroyo_dagster.user_modules import step_listener

_POLL_SECONDS = 1.0
_FIRST_IDLE_SECONDS = 60.0
_TRANSFER_SECONDS = 300.0


class _Phase(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True)
class _Request:
    channel: Channel
    work: bytearray
    rows: bytearray
    phase: _Phase = _Phase.WAITING
    changed: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def advance(self, before: _Phase, after: _Phase) -> bool:
        """Change the phase; False if it is another one already."""
        with self.lock:
            if self.phase is not before:
                return False
            self.phase, self.changed = after, time.monotonic()
            return True

    def seconds_in_phase(self) -> float:
        """Return the time since the last change of the phase."""
        return time.monotonic() - self.changed


class Holder:
    """Serves requests until the process that owns it ends.

    Args:
        listeners: the sockets at which tasks connect.
        owner: the process with which this one ends.
        about: what it says about itself to tasks; see `HolderAddress.about`.
        alive_seconds: how often a task that waits hears that this process is alive.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        secret: Secret,
        owner: ProcessId,
        about: bytes,
        alive_seconds: float,
    ) -> None:
        self._listeners = listeners
        self._secret = secret
        self._owner = owner
        self._about = about
        self._alive_seconds = alive_seconds
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._subtasks = HeldSubtasks()
        self._open = 0
        self._asked = time.monotonic()
        self._idle_seconds = _FIRST_IDLE_SECONDS
        self._counting = threading.Lock()
        for listener in listeners:
            listener.setblocking(False)  # a peer may be gone before it is accepted
        descriptor = owner.descriptor()
        self._watched: list[Any] = [*listeners, *([] if descriptor is None else [descriptor])]

    def serve(self) -> None:
        """Run requests one after the other, in this thread. Does not return."""
        threading.Thread(target=self._accept, name="arroyo-accept", daemon=True).start()
        while True:
            request = self._requests.get()
            if request.advance(_Phase.WAITING, _Phase.RUNNING):
                self._run(request)

    # ---- the main thread -------------------------------------------------------------------------

    def _run(self, request: _Request) -> None:
        channel = request.channel
        try:
            asked: Work = pickle.loads(request.work)
            self._idle_seconds = asked.idle_seconds
            rows, request.rows = decode_stream(request.rows), bytearray()
            work: LevelWork = pickle.loads(asked.level_work)
            with step_listener(functools.partial(_report_step, channel)):
                output = self._subtasks.run(work, asked.subtask, rows, asked.idle_seconds)
                for batch in chunk_batches(output):
                    stream = ChunkStream()
                    stream.write(batch)
                    channel.send(CHUNKS, memoryview(stream.close()))
        except BaseException as error:
            kind, payload = ERROR, RemoteFailure.of(error).dumps()
        else:
            kind, payload = DONE, b""
        # First: the task closes the connection as soon as it has read the last frame.
        request.advance(_Phase.RUNNING, _Phase.ENDED)
        with contextlib.suppress(OSError):
            channel.send(kind, payload)

    # ---- the other threads -----------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            while True:
                self._accept_next()
        finally:
            os._exit(1)  # deaf

    def _accept_next(self) -> None:
        ready, _, _ = select.select(self._watched, [], [], _POLL_SECONDS)
        with self._counting:
            idle = not self._open and time.monotonic() - self._asked > self._idle_seconds
        if not self._owner.is_alive() or (idle and not ready):
            os._exit(0)
        for listener in self._listeners:
            if listener in ready:
                try:
                    connection, _ = listener.accept()
                except BlockingIOError:  # the peer is gone
                    continue
                except OSError:  # too many open files
                    time.sleep(_POLL_SECONDS)
                    continue
                bound_loss(connection)
                attend = threading.Thread(
                    target=self._attend, args=(Channel(connection),), daemon=True
                )
                attend.start()

    def _attend(self, channel: Channel) -> None:
        with self._counting:
            self._open += 1
        try:
            with channel, contextlib.suppress(OSError):
                welcome(channel, self._secret, self._about)
                channel.connection.settimeout(_TRANSFER_SECONDS)
                _, work = _expected(channel, WORK)
                _, rows = _expected(channel, ROWS)
                request = _Request(channel, work, rows)
                self._requests.put(request)
                self._watch(request)
        finally:
            with self._counting:
                self._open -= 1
                self._asked = time.monotonic()

    def _watch(self, request: _Request) -> None:
        """Wait until the task is gone, and tell it meanwhile that this process is alive."""
        while not select.select([request.channel.connection], [], [], self._alive_seconds)[0]:
            if request.phase is _Phase.ENDED:
                if request.seconds_in_phase() > _TRANSFER_SECONDS:
                    return
                continue
            with contextlib.suppress(OSError):
                request.channel.send(ALIVE)
        request.advance(_Phase.WAITING, _Phase.ENDED)
        if request.advance(_Phase.RUNNING, _Phase.ENDED):
            # Spark ends a worker whose task is cancelled, and user code in it. So does this.
            os._exit(1)


def _report_step(channel: Channel, step: str) -> None:
    """Tell the task which function runs: it cannot be asked if the function ends the process."""
    with contextlib.suppress(OSError):
        channel.send(STEP, step.encode())


def _expected(channel: Channel, kind: bytes) -> tuple[bytes, bytearray]:
    received, payload = channel.receive()
    if received != kind:
        raise ConnectionAbortedError(f"a frame {received!r} in place of {kind!r}")
    return received, payload


# ---- the process ---------------------------------------------------------------------------------


def main(given: Mapping[str, Any]) -> None:
    """Serve as the process that `WorkerSlot` started. Does not return."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    listeners = [socket.socket(fileno=number) for number in given["listeners"]]
    secret, owner = Secret(bytes.fromhex(given["secret"])), ProcessId(*given["owner"])
    about = HolderAddress(**given["address"]).about(os.getpid())
    Holder(listeners, secret, owner, about, given["alive_seconds"]).serve()
