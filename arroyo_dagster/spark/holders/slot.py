"""The holder that belongs to a Python worker of Spark: find it, start it, end it."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, astuple
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa

from arroyo_dagster.errors import StorageError
from arroyo_dagster.spark.daemon import without_archive
from arroyo_dagster.spark.holders.channel import (
    HolderAddress,
    Secret,
    can_listen,
    listen_here,
    own_host,
)
from arroyo_dagster.spark.holders.conversation import Conversation, HungError, Request
from arroyo_dagster.spark.holders.messages import (
    ENDED_STEP,
    Meeting,
    RemoteFailure,
    WorkerEndedError,
)
from arroyo_dagster.spark.holders.process import main
from arroyo_dagster.spark.holders.process_id import ProcessId

_STARTS = 2
_START_AGAIN_SECONDS = 60.0
_ALIVE_SHARE = 60
_ENDING_SECONDS, _POLL_SECONDS = 2.0, 0.02
"""How long a task waits for the exit code of a holder whose connection has ended."""
_START = (
    "import json, sys; given = json.loads(sys.stdin.buffer.readline()); "
    "sys.path[:] = given['path']; "
    "from arroyo_dagster.spark.holders.process import main; main(given)"
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
