"""The holder that belongs to a Python worker of Spark: find it, start it, end it."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import json
import os
import pickle
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa

from arroyo_dagster.errors import StorageError
from arroyo_dagster.spark.daemon import without_archive
from arroyo_dagster.spark.engine.chunks import ChunkStream, chunk_batches, decode_stream
from arroyo_dagster.spark.engine.holders.conversation import Conversation, HungError, Request
from arroyo_dagster.spark.engine.holders.messages import (
    ALIVE,
    CHUNKS,
    DONE,
    ERROR,
    ROWS,
    STEP,
    WORK,
    Channel,
    HolderAddress,
    Meeting,
    RemoteFailure,
    Secret,
    Work,
    bound_loss,
    can_listen,
    listen_here,
    own_host,
    welcome,
)
from arroyo_dagster.spark.engine.holders.subtasks import HeldSubtasks, LevelWork
from arroyo_dagster.spark.jobs import ENDED_STEP, WorkerEndedError
from arroyo_dagster.user_modules import step_listener

_STARTS = 2
_START_AGAIN_SECONDS = 60.0
_ALIVE_SHARE = 60
_ENDING_SECONDS, _POLL_SECONDS = 2.0, 0.02
"""How long a task waits for the exit code of a holder whose connection has ended."""
_START = (
    "import json, sys; given = json.loads(sys.stdin.buffer.readline()); "
    "sys.path[:] = given['path']; "
    "from arroyo_dagster.spark.engine.holders.slot import main; main(given)"
)


class WorkerSlot:
    """The place of one Python worker on its executor, and the holder that belongs to it.

    A worker takes the first place that no living worker of the same executor has. So holders are
    as many as workers at a time, and outlive them: Spark ends workers that are idle for a minute.
    """

    def __init__(self, meeting: Meeting, owner: ProcessId, name: str, claim: socket.socket) -> None:
        self._meeting = meeting
        self._owner = owner
        self._claim = claim  # bound as long as this process lives
        self._process: int | None = None
        self._address: HolderAddress | None = None
        self._next_start = 0.0
        self.name = name

    @classmethod
    def claim(cls, meeting: Meeting, owner: ProcessId) -> WorkerSlot:
        """Take the first place that is free.

        Args:
            owner: the process with which holders end; workers that have it share the places.

        Raises:
            OSError: the system does not allow it.
        """
        token = meeting.secret.token(f"{owner.number} {owner.started}")
        for number in count():
            name = f"arroyo-{token}-{number}"
            try:
                return cls(meeting, owner, name, _bound(f"{name}-claim"))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        raise AssertionError("there is always a next number")

    def address(self) -> HolderAddress | None:
        """Return the address of the holder; start it if there is none. None = impossible."""
        if self._address is None and time.monotonic() >= self._next_start:
            with contextlib.suppress(OSError):
                self._address = self._find() or self._start()
        return self._address

    def known_address(self) -> HolderAddress | None:
        """Return the address of the holder, if this worker has used it."""
        return self._address

    def forget(self, *, hung: bool = False) -> None:
        """Let the next call of `address` look for the holder again, and start one if need be."""
        if hung and self._process is not None:
            with contextlib.suppress(OSError):
                os.kill(self._process, signal.SIGKILL)
        if self._process is not None:
            with contextlib.suppress(ChildProcessError):  # another worker's child
                os.waitpid(self._process, 0 if hung else os.WNOHANG)
        self._address = self._process = None

    def begin(self) -> Conversation | None:
        """Begin a conversation with the holder; start it if there is none. None = impossible."""
        for _ in range(_STARTS):
            address = self.address()
            if address is None:
                return None
            try:
                return Conversation.begin(address, self._meeting)
            except OSError as error:
                self.forget(hung=isinstance(error, HungError))
        self._next_start = time.monotonic() + _START_AGAIN_SECONDS
        return None

    def run(
        self, conversation: Conversation, request: Request
    ) -> list[pa.RecordBatch] | RemoteFailure:
        """Run as `Conversation.run`.

        Raises:
            WorkerEndedError: the holder ended while it ran a function of the user.
            StorageError: the holder ended while it worked otherwise, or hung.
        """
        try:
            return conversation.run(request)
        except OSError as error:
            hung = isinstance(error, HungError)
            how = "" if hung else self._ending()
            self.forget(hung=hung)
            if conversation.step and not hung:
                job = pickle.loads(pickle.loads(request.work).level_work).run_id.job
                raise WorkerEndedError(
                    f"job `{job}`: the process of a Spark worker ended{how} while it ran "
                    f"{conversation.step}",
                    retryable=True,
                    next_step=ENDED_STEP,
                ) from error
            raise StorageError(
                f"the process that held a subtask ended{how} while it worked ({error})",
                retryable=True,
                next_step="check the log of the worker for crashes and for a lack of memory",
            ) from error

    def _ending(self) -> str:
        """Return how the holder ended, as a part of a sentence; empty = it is not known."""
        until = time.monotonic() + _ENDING_SECONDS
        while self._process is not None and time.monotonic() < until:
            try:
                process, status = os.waitpid(self._process, os.WNOHANG)
            except ChildProcessError:  # another worker's child
                return ""
            if process:
                self._process = None
                code = os.waitstatus_to_exitcode(status)
                return f" with exit code {code}" if code >= 0 else f" by signal {-code}"
            time.sleep(_POLL_SECONDS)
        return ""

    def _find(self) -> HolderAddress | None:
        try:
            conversation = Conversation.begin(HolderAddress("", self.name), self._meeting)
        except OSError:
            return None
        conversation.close()
        self._process = conversation.process
        return conversation.address

    def _start(self) -> HolderAddress:
        host = None if self._meeting.driver_host is None else own_host(self._meeting.driver_host)
        with contextlib.ExitStack() as open_here:
            listeners = [open_here.enter_context(listen_here(self.name))]
            port = None
            if host is not None:
                with contextlib.suppress(OSError):
                    listeners.append(open_here.enter_context(socket.create_server((host, 0))))
                    port = listeners[1].getsockname()[1]
            address = HolderAddress(uuid.uuid4().hex, self.name, host if port else None, port)
            numbers = [listener.fileno() for listener in listeners]
            config = {
                "path": without_archive(sys.path),
                "secret": self._meeting.secret.value.hex(),
                "owner": astuple(self._owner),
                "address": asdict(address),
                "listeners": numbers,
                "alive_seconds": self._meeting.silence_seconds / _ALIVE_SHARE,
            }
            pa.array([])  # imports pandas, if it is there: before a fork, not in both processes
            start = _fork if may_fork() else _spawn
            self._process = start(config)
        return address


def may_fork() -> bool:
    """Whether a fork of this process is safe, which saves a second of imports.

    A library whose threads are missing in the child may hang there. jemalloc, which comes with
    pyarrow, starts its own again.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    own = str(os.getpid())
    tasks = Path("/proc/self/task")
    names = [(task / "comm").read_text() for task in tasks.iterdir() if task.name != own]
    return all(name.strip() == "jemalloc_bg_thd" for name in names)


def _fork(given: Mapping[str, Any]) -> int:
    process = os.fork()
    if process:
        return process
    try:
        # Nothing of Spark's may stay open here. Numbers stay taken: objects of frames below, which
        # never end, would close others.
        null = os.open(os.devnull, os.O_RDONLY)
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number not in given["listeners"]:
                os.dup2(null, number)
        gc.freeze()
        main(given)
    finally:
        os._exit(1)


def _spawn(given: Mapping[str, Any]) -> int:
    line = [sys.executable, "-c", _START]
    # Through a pipe: arguments and variables of a process can be read by others.
    child = subprocess.Popen(line, stdin=subprocess.PIPE, pass_fds=given["listeners"])
    assert child.stdin is not None
    with child.stdin:
        child.stdin.write(json.dumps(given).encode() + b"\n")
    child.returncode = 0  # `forget` waits for it
    return child.pid


def _bound(name: str) -> socket.socket:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(f"\0{name}")
    except OSError:
        claim.close()
        raise
    return claim


_SLOTS: dict[Secret, WorkerSlot | None] = {}


def own_slot(meeting: Meeting) -> WorkerSlot | None:
    """Return the place of this worker; None where holders cannot run."""
    if meeting.secret not in _SLOTS:
        _SLOTS[meeting.secret] = None
        if can_listen():
            with contextlib.suppress(OSError):
                _SLOTS[meeting.secret] = WorkerSlot.claim(meeting, ProcessId.parent())
    return _SLOTS[meeting.secret]


def start_early(meeting: Meeting) -> None:
    """Start the holder of this worker, which then loads its modules while the epoch is read."""
    if meeting.start and (slot := own_slot(meeting)) is not None:
        slot.address()


# ---- the process that holds subtasks: it writes their epochs for the tasks that ask it -----------
# User code runs in the main thread, one epoch of one subtask at a time, as in a Python worker of
# Spark. Spark ends workers that are idle for a minute; a holder stays. It ends with the daemon of
# Spark's workers, when the task that it works for is cancelled, and when no task came for a while.

_IDLE_POLL_SECONDS = 1.0
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
                ready, _, _ = select.select(self._watched, [], [], _IDLE_POLL_SECONDS)
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
                            time.sleep(_IDLE_POLL_SECONDS)
                            continue
                        bound_loss(connection)
                        attend = threading.Thread(
                            target=self._attend, args=(Channel(connection),), daemon=True
                        )
                        attend.start()
        finally:
            os._exit(1)  # deaf

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


# ---- processes, by their number and when they were started: numbers are used again ---------------


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process, by its number and the time it was started at, as numbers are used again."""

    number: int
    started: str

    @classmethod
    def parent(cls) -> ProcessId:
        """Return the parent of this process."""
        return cls.of(os.getppid())

    @classmethod
    def of(cls, number: int) -> ProcessId:
        """Return the process that has a number now."""
        return cls(number, _started(number) or "")

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return _started(self.number) == self.started

    def descriptor(self) -> int | None:
        """Return a descriptor that is ready for reading once the process has ended, if possible."""
        try:
            return os.pidfd_open(self.number)
        except (AttributeError, OSError):
            return None


def _started(number: int) -> str | None:
    """Return when a process was started, in ticks since boot; None = it has ended."""
    try:
        with open(f"/proc/{number}/stat", encoding="utf-8", errors="replace") as file:
            state, *others = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else others[18]
