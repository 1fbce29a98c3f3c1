"""Two writers of one job, in every order that their calls of the store can come in.

Each starts as the next worker generation, finishes a commit that was left, and publishes and
commits epochs, telling the world of each. Whatever the order: an epoch has one owner for ever, what
the world was told of stays, nothing is overwritten but what the format rewrites, nothing deleted,
and whoever starts next, at any moment, goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from arroyo_dagster.errors import ConflictError, NotFoundError
from arroyo_dagster.state import (
    Checkpoint,
    CheckpointState,
    Epoch,
    JobId,
    JobPaths,
    MemoryStore,
    ObjectStore,
    ParquetBackend,
    PipelineId,
    StatePath,
)
from arroyo_dagster.state.metadata.tree import as_checkpoint
from tests.formats import Manifest, records
from tests.stores import DeleteOutcome, Listing, ObjectInfo, Wrapper

# A program is run again from its beginning for each step, with the answers it has had so far; the
# call after them is the one it waits for. What it waits for depends on its answers only, and states
# in which store and answers are equal have equal futures: all orders are gone through, each state
# once.

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


PATHS = JobPaths(JobId("j"), PipelineId("p"))
TOLD = "told/epoch-"
REWRITTEN = ("current-generation.json", "generation-manifest.json")


def writer(store: ObjectStore, *, epochs: int, needs_commit: bool) -> Epoch:
    """Start, go on for some epochs, and tell the world of each once it is committed."""
    backend = ParquetBackend(store, PATHS, clock=lambda: 7)
    started = backend.start()
    base = started.restored
    if base is not None and started.replay_commit:
        finish(backend, base)
    for _ in range(epochs):
        manifest = next_manifest(backend, base, needs_commit=needs_commit)
        ref = backend.publish(manifest).ref
        base = as_checkpoint(manifest, ref, CheckpointState.READY)
        if needs_commit:
            finish(backend, base)
        else:
            store.put(StatePath(f"{TOLD}{base.epoch}"), ref.encode())
    return base.epoch if base else Epoch(0)


def finish(backend: ParquetBackend, base: Checkpoint) -> None:
    # What a sink does in its second phase, which may come twice, but of one checkpoint only.
    backend.store.put(StatePath(f"{TOLD}{base.epoch}"), base.ref.encode())
    backend.mark_committed(base)


def next_manifest(
    backend: ParquetBackend, base: Checkpoint | None, *, needs_commit: bool
) -> Manifest:
    assert backend.generation is not None
    return Manifest(
        pipeline=PipelineId("p"),
        job=JobId("j"),
        worker_generation=backend.generation,
        epoch=Epoch(base.epoch + 1 if base else 1),
        min_epoch=Epoch(1),
        start_time_micros=1,
        finish_time_micros=2,
        needs_commit=needs_commit,
        operators=(),
        parent_ref=base.ref if base else None,
    )


def program(epochs: int, *, needs_commit: bool) -> Program:
    return Program(lambda store: writer(store, epochs=epochs, needs_commit=needs_commit))


def owners(objects: Objects) -> dict[int, str]:
    found = {}
    for path, data in objects:
        if path.endswith(".record"):
            record = records.decode_epoch_record(data, path)
            found[int(record.epoch)] = str(record.checkpoint_ref)
    return found


def told(objects: Objects) -> dict[int, str]:
    return {
        int(path.removeprefix(TOLD)): data.decode()
        for path, data in objects
        if path.startswith(TOLD)
    }


def check_call(state: State, call: Call) -> None:
    """Only what the format rewrites is ever put, and nobody tells of an epoch twice differently."""
    if call.verb != "put":
        return
    if call.path.startswith(TOLD):
        epoch = int(call.path.removeprefix(TOLD))
        assert owners(state.objects).get(epoch) == call.data.decode(), "told of a lost epoch"
    else:
        assert call.path.endswith(REWRITTEN), call


def check_end(ends: tuple[Done, ...], objects: Objects) -> None:
    errors = [end.error for end in ends if end.error is not None]
    for error in errors:
        assert isinstance(error, ConflictError), error
    if len(errors) == len(ends):
        assert any(e.retryable for e in errors if isinstance(e, ConflictError)), errors
    assert set(told(objects)) <= set(owners(objects))


def begun(epochs: int, *, needs_commit: bool) -> Objects:
    if not epochs:
        return frozenset()
    done, objects = program(abs(epochs), needs_commit=needs_commit).alone(frozenset())
    assert done.error is None
    if epochs < 0:  # its writer died between manifest and record
        newest = f"-{-epochs:07}"
        gone = (f"{newest}.record", f"{newest}/committed.json", f"{TOLD}{-epochs}")
        objects = frozenset(one for one in objects if not one[0].endswith(gone))
    return objects


CASES = [
    pytest.param(0, (2, 1), False, id="from-nothing"),
    pytest.param(0, (1, 1), True, id="from-nothing-committing"),
    pytest.param(1, (2, 1), False, id="from-an-epoch"),
    pytest.param(-2, (1, 1), True, id="from-an-epoch-nobody-has-claimed"),
]


@pytest.mark.parametrize(("before", "epochs", "needs_commit"), CASES)
def test_in_every_order_each_epoch_has_one_owner_and_nothing_is_lost(
    before: int, epochs: tuple[int, int], needs_commit: bool
) -> None:
    start = begun(before, needs_commit=needs_commit)
    programs = [program(count, needs_commit=needs_commit) for count in epochs]
    third = program(1, needs_commit=needs_commit)
    went_on: set[tuple[bool, ...]] = set()
    started_from: set[Objects] = set()
    for state, at in every_state(programs, start):
        for call in at:
            if isinstance(call, Call):
                check_call(state, call)
        assert owners(start).items() <= owners(state.objects).items()
        if state.objects not in started_from:
            started_from.add(state.objects)
            check_next_start(third, state.objects)
        ends = tuple(end for end in at if isinstance(end, Done))
        if len(ends) == len(at):
            check_end(ends, state.objects)
            went_on.add(tuple(end.error is None for end in ends))
    # Either can win; both go on only if one began after the other had ended.
    assert {(True, False), (False, True), (True, True)} <= went_on


def check_next_start(third: Program, objects: Objects) -> None:
    """Whoever starts now, with every other writer dead, keeps what was told, and goes on."""
    known, owned = told(objects), owners(objects)
    done, after = third.alone(objects)
    assert done.error is None, done.error
    assert done.result == max([*owners(after)]), "the newest epoch is not the one it wrote"
    assert done.result > max([0, *owned])
    for epoch, ref in {**owned, **known}.items():
        assert owners(after)[epoch] == ref
