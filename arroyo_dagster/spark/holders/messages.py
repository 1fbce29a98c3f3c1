"""What the driver, tasks and holders tell each other."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass, replace

from arroyo_dagster.errors import ArroyoStateError, StorageError
from arroyo_dagster.spark.holders.channel import HolderAddress, Secret

SILENCE_SECONDS = 300.0
"""User code that blocks all threads of its process for longer, in one call into C, is ended."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """What tasks of a run need to meet holders.

    Attributes:
        driver_host: for the address of a holder to tasks on other hosts; None = it gets none, and
            tasks reach the holders of their own host.
        idle_seconds: how long a holder waits for the next epoch.
        silence_seconds: a holder that does not say for this long that it is alive hangs.
        start: whether a task starts the holder of its worker even if it does not need it.
    """

    secret: Secret
    driver_host: str | None
    idle_seconds: float
    start: bool
    silence_seconds: float = SILENCE_SECONDS


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a task had its subtask run.

    Attributes:
        holder: the process that holds the subtask now; None = none does.
        own: the holder of the worker that ran the task; None = it has none.
        lost: the holder that the subtask was placed at, if it is gone.
        blocked: whether `lost` may run, behind a network that drops packets.
    """

    level: int
    subtask: int
    holder: HolderAddress | None
    own: HolderAddress | None
    lost: HolderAddress | None = None
    blocked: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """The request of one task: an epoch of one subtask. Its rows follow as a `ChunkStream`.

    Attributes:
        level_work: a pickled `LevelWork`, which the task passes on as the driver made it.
        idle_seconds: how long the process waits for the next request before it ends.
    """

    level_work: bytes
    subtask: int
    idle_seconds: float


@dataclass(frozen=True, slots=True)
class RemoteFailure:
    """An error of user code. Its class may not be known to the task, and cannot be sent.

    Attributes:
        error: an error of this package as it is; None for others.
        text: the traceback.
    """

    module: str
    name: str
    message: str
    text: str
    error: ArroyoStateError | None = None

    @classmethod
    def of(cls, error: BaseException) -> RemoteFailure:
        """Describe an error that was raised here."""
        kind = type(error)
        typed = error if isinstance(error, ArroyoStateError) else None
        text = "".join(traceback.format_exception(error))
        return cls(kind.__module__, kind.__qualname__, str(error), text, typed)

    def as_error(self) -> BaseException:
        """Return an error that reads as the one that was raised there."""
        if self.error is not None:
            return self.error
        name = self.name.rpartition(".")[2]
        kind: type[Exception] = type(
            name, (Exception,), {"__module__": self.module, "__qualname__": self.name}
        )
        return kind(self.message)

    def dumps(self) -> bytes:
        """Pickle it, without the error if that cannot be pickled."""
        try:
            return pickle.dumps(self)
        except Exception:
            return pickle.dumps(replace(self, error=None))


ENDED_STEP = (
    "a function that calls `os._exit`, a native library that crashes, or a lack of memory "
    "(signal 9) ends a process: correct the function, or give the workers more memory; nothing of "
    "the epoch was published"
)


class WorkerEndedError(StorageError):
    """The process that held a subtask ended while it ran a function of the user."""


class RemoteTraceback(Exception):
    """The traceback of a holder, as the cause of the error that a task raises for it."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"
