"""A model of an Arroyo that runs one job, behind its REST API on 127.0.0.1.

The job goes through the states that a real one was seen in, takes its time for each by a clock of
the test's, writes an epoch when it is stopped with a checkpoint, and loads what the store says when
it is started: what was done to its state meanwhile is what it goes on from.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from arroyo_dagster.state import ArroyoControl
from tests.arroyo_jobs import ArroyoJob
from tests.faulty_stores import Crash
from tests.loopback import Loopback, Reply, serving

PIPELINE = "pl_x"
_AFTER = {
    "CheckpointStopping": "Stopping",
    "Stopping": "Stopped",
    "Compiling": "Scheduling",
    "Scheduling": "Running",
}
_SECONDS = {"CheckpointStopping": 2.0, "Stopping": 1.0, "Compiling": 1.0, "Scheduling": 3.0}
_AT_REST = ("Stopped", "Failed", "Finished")


@dataclass
class ModelArroyo:
    """One job and its controller.

    Attributes:
        now_micros: the time; `sleep` lets it go by.
        stuck: states that the job does not leave.
        fails: states in which it fails.
        will_not_restore: whether the job fails while it loads its state, given the job.
        starts: how often a run has come up.
        log: the states it went through.
        slots: how many subtasks there is room for.
        wanted: the parallelism that a request has set for the next start.
        seconds_a_request: how much time goes by with each request, where nobody else lets it.
    """

    job: ArroyoJob
    now_micros: int = 1_800_000_000_000_000
    state: str = "Running"
    stop: str = "none"
    failure: str | None = None
    finished_micros: int | None = None
    due_micros: int = 0
    stuck: set[str] = field(default_factory=set)
    fails: set[str] = field(default_factory=set)
    will_not_restore: Callable[[ArroyoJob], bool] = lambda job: False
    starts: int = 0
    log: list[str] = field(default_factory=list)
    seconds_a_request: float = 0.0
    slots: int = 100
    wanted: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def clock(self) -> int:
        return self.now_micros

    def sleep(self, seconds: float) -> None:
        """Let time go by."""
        with self.lock:
            self._wait(seconds)

    def _wait(self, seconds: float) -> None:
        until = self.now_micros + int(seconds * 1e6)
        while self.now_micros < until:
            self.now_micros = min(until, self.now_micros + 500_000)
            self._advance()

    # ---- the controller --------------------------------------------------------------------------

    def _advance(self) -> None:
        while True:
            before = self.state
            self._step()
            if self.state == before:
                return

    def _step(self) -> None:
        if self.state == "Running" and self.stop == "checkpoint":
            self._enter("CheckpointStopping")
        elif self.state == "Stopped" and self.stop == "none":
            self._enter("Compiling")
        elif self.state in _AFTER and self.now_micros >= self.due_micros:
            if self.state in self.stuck:
                return
            if self.state in self.fails:
                self._fail(f"failed in {self.state}")
                return
            self._leave(self.state)

    def _leave(self, state: str) -> None:
        if state == "CheckpointStopping":
            self.job.write({})  # the last checkpoint
        if state == "Scheduling":
            self.job.start()
            self.job.parallelism = self.wanted or self.job.parallelism
            if self.job.parallelism > self.slots:
                self._fail("timed out while waiting for task slots")
                return
            if self.will_not_restore(self.job):
                self._fail("a task could not load its state")
                return
            self.starts += 1
        self._enter(_AFTER[state])

    def _fail(self, failure: str) -> None:
        self._enter("Failed")
        self.failure = failure

    def _enter(self, state: str) -> None:
        self.state = state
        self.log.append(state)
        self.failure = None
        self.due_micros = self.now_micros + int(_SECONDS.get(state, 0) * 1e6)
        self.finished_micros = self.now_micros if state in _AT_REST else None

    # ---- its API ---------------------------------------------------------------------------------

    def answer(self, path: str, query: dict[str, str]) -> Reply:
        """GET, as api_types of the real one have it."""
        with self.lock:
            self._wait(self.seconds_a_request)
            short = path.removeprefix("/api/v1")
            if short == "/jobs" or short == f"/pipelines/{PIPELINE}/jobs":
                return Reply(body={"data": [self._job()]})
            if short == "/pipelines":
                return Reply(body={"data": [self._pipeline()], "hasMore": False})
            if short == f"/pipelines/{PIPELINE}":
                return Reply(body=self._pipeline())
            if short.endswith("/checkpoints"):
                return Reply(body={"data": []})
            return Reply(404, {"error": "Route not found"})

    def change(self, method: str, path: str, document: Any) -> Reply:
        """PATCH and restart."""
        with self.lock:
            if (method, path) == ("PATCH", f"/api/v1/pipelines/{PIPELINE}"):
                assert set(document) <= {"stop", "parallelism"}
                assert self.state != "Running" or document.get("parallelism") is None
                self.wanted = document.get("parallelism", self.wanted)
                self.stop = document["stop"]
            elif (method, path) == ("POST", f"/api/v1/pipelines/{PIPELINE}/restart"):
                if self.state == "Failed":
                    self.stop = "none"
                    self._enter("Compiling")
            else:
                return Reply(404, {"error": "Route not found"})
            self._advance()
            return Reply(body=self._pipeline())

    def _job(self) -> dict[str, Any]:
        return {
            "id": self.job.paths.job,
            "pipeline_id": PIPELINE,
            "running_desired": self.stop == "none",
            "state": self.state,
            "run_id": self.job.run,
            "start_time": 1,
            "finish_time": self.finished_micros,
            "tasks": 4,
            "failure_reason": self.failure,
            "created_at": 1,
            "scheduler_config": {},
            "env_vars": {},
        }

    def _pipeline(self) -> dict[str, Any]:
        running = self.stop == "none"
        return {
            "id": PIPELINE,
            "name": "orders",
            "query": "",
            "udfs": [],
            "checkpoint_interval_micros": 10_000_000,
            "stop": self.stop,
            "created_at": 1,
            "action": "checkpoint" if running else "none",
            "action_text": "Stop" if running else "Start",
            "action_in_progress": self.state not in ("Running", *_AT_REST),
            "preview": False,
            "state_url": None,
            "tags": {},
        }


@dataclass
class Faults:
    """What goes wrong on the way to the server, request by request, counted from 1.

    Attributes:
        at: the request that fails; `until` the last one that does.
        done: whether the server does what it was asked all the same.
        methods: of the requests that came.
    """

    at: int | None = None
    until: int | None = None
    done: bool = False
    methods: list[str] = field(default_factory=list)

    @property
    def asked(self) -> int:
        """How many requests came."""
        return len(self.methods)

    def hits(self, method: str) -> bool:
        self.methods.append(method)
        return self.at is not None and self.at <= self.asked <= (self.until or self.at)


@contextlib.contextmanager
def arroyo(model: ModelArroyo, faults: Faults | None = None) -> Iterator[Loopback]:
    """Serve a model; what `faults` hits is answered with 503."""
    wrong = faults or Faults()

    def through(method: str, do: Callable[[], Reply]) -> Reply:
        if not wrong.hits(method):
            return do()
        if wrong.done:
            do()
        return Reply(503, {"error": "upstream connect error"})

    with serving(
        lambda path, query: through("GET", lambda: model.answer(path, query)),
        lambda method, path, body: through(method, lambda: model.change(method, path, body)),
    ) as server:
        yield server


class DyingControl(ArroyoControl):
    """A client whose process dies at its k-th request, or with the store."""

    def __init__(self, url: str, *, dies_at: int | None = None, dead: Callable[[], bool]) -> None:
        super().__init__(url)
        inner = self._server
        self.requests = 0

        def get(path: str, query: Any = None) -> Any:
            self._count(dies_at, dead)
            return type(inner).get(inner, path, query)

        def send(method: Any, path: str, body: Any) -> Any:
            self._count(dies_at, dead)
            return type(inner).send(inner, method, path, body)

        self._server = _Replaced(inner.url, get, send)  # type: ignore[assignment]

    def _count(self, dies_at: int | None, dead: Callable[[], bool]) -> None:
        self.requests += 1
        if dead() or (dies_at is not None and self.requests >= dies_at):
            raise Crash(f"request {self.requests}")


@dataclass
class _Replaced:
    url: str
    get: Callable[..., Any]
    send: Callable[..., Any]
