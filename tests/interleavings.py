"""Every order in which the store calls of two programs can come, without threads.

A program is run again from its beginning for each step, with the answers it has had so far; the
call after them is the one it waits for. What a program waits for depends on its answers only, and
states in which store and answers are equal have equal futures: so all orders are gone through, each
state once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from arroyo_dagster.errors import NotFoundError
from arroyo_dagster.state import MemoryStore, ObjectStore, StatePath
from tests.stores import DeleteOutcome, Listing, ObjectInfo, Wrapper

T = TypeVar("T")
Objects = frozenset[tuple[str, bytes]]
Answer = bytes | bool | None | tuple[str, ...]
Log = tuple[Answer, ...]
ABSENT: Answer = None


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the store that a program waits for."""

    verb: str
    path: str
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class Done:
    """A program has ended: with what it gave, or with an error."""

    result: Any = None
    error: BaseException | None = None


class _Waits(BaseException):
    def __init__(self, call: Call) -> None:
        self.call = call


class _Replaying(Wrapper):
    """Answers from a log; behind it the program waits."""

    def __init__(self, log: Log) -> None:
        super().__init__(MemoryStore())
        self._log = log
        self._at = 0

    def _call(self, verb: str, path: str, action: Callable[[], T], data: bytes = b"") -> T:
        if self._at == len(self._log):
            raise _Waits(Call(verb, str(path), data))
        answer: Any = self._log[self._at]
        self._at += 1
        if verb == "read" and answer is ABSENT:
            raise NotFoundError("there is no such object", path=path)
        return _as_given(verb, path, answer)


def _as_given(verb: str, path: str, answer: Any) -> Any:
    if verb == "head":
        return answer and ObjectInfo(
            path=StatePath(path), size_bytes=len(answer), modified_micros=0, etag="e"
        )
    if verb == "list_dir":
        objects = [name for name in answer if not name.endswith("/")]
        return Listing(
            objects=tuple(
                ObjectInfo(path=StatePath(name), size_bytes=0, modified_micros=0, etag="e")
                for name in objects
            ),
            prefixes=tuple(StatePath(name[:-1]) for name in answer if name.endswith("/")),
        )
    return DeleteOutcome(deleted=(StatePath(path),)) if verb == "delete_many" else answer


def answered(call: Call, objects: Objects) -> tuple[Answer, Objects]:
    """What a store that holds `objects` says to a call, and what it holds then."""
    there = dict(objects)
    if call.verb in ("read", "head"):
        return there.get(call.path, ABSENT), objects
    if call.verb == "list_dir":
        below = f"{call.path}/"
        names = {name.removeprefix(below) for name in there if name.startswith(below)}
        level = {name.partition("/")[0] + ("/" if "/" in name else "") for name in names}
        return tuple(sorted(below + name for name in level)), objects
    if call.verb == "create" and call.path in there:
        return False, objects
    if call.verb in ("put", "create"):
        return (True if call.verb == "create" else ABSENT), frozenset(
            {**there, call.path: call.data}.items()
        )
    raise AssertionError(f"a writer that deletes nothing called {call}")


@dataclass
class Program:
    """What one process does with a store; it must depend on nothing but the answers."""

    run: Callable[[ObjectStore], Any]
    _known: dict[Log, Call | Done] = field(default_factory=dict)

    def after(self, log: Log) -> Call | Done:
        """What it waits for once it has had these answers, or how it ended."""
        if log not in self._known:
            try:
                self._known[log] = Done(result=self.run(_Replaying(log)))
            except _Waits as waits:
                self._known[log] = waits.call
            except Exception as error:
                self._known[log] = Done(error=error)
        return self._known[log]

    def alone(self, objects: Objects) -> tuple[Done, Objects]:
        """Run it to its end while nobody else does anything."""
        log: Log = ()
        while isinstance(at := self.after(log), Call):
            answer, objects = answered(at, objects)
            log = (*log, answer)
        return at, objects


@dataclass(frozen=True, slots=True)
class State:
    """What the store holds, and what each program has been told."""

    objects: Objects
    logs: tuple[Log, ...]


def every_state(
    programs: Sequence[Program], objects: Objects
) -> Iterator[tuple[State, tuple[Call | Done, ...]]]:
    """Go through every state that any order of the programs' calls leads to, each once."""
    first = State(objects, tuple(() for _ in programs))
    seen, waiting = {first}, [first]
    while waiting:
        state = waiting.pop()
        at = tuple(p.after(log) for p, log in zip(programs, state.logs, strict=True))
        yield state, at
        for index, call in enumerate(at):
            if isinstance(call, Done):
                continue
            answer, after = answered(call, state.objects)
            logs = list(state.logs)
            logs[index] = (*logs[index], answer)
            following = State(after, tuple(logs))
            if following not in seen:
                seen.add(following)
                waiting.append(following)
