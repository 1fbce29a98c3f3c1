"""Two writers of one job, in every order that their calls of the store can come in.

Each starts as the next worker generation, finishes a commit that was left, and publishes and
commits epochs, telling the world of each. Whatever the order: an epoch has one owner for ever, what
the world was told of stays, nothing is overwritten but what the format rewrites, nothing deleted,
and whoever starts next, at any moment, goes on from there.
"""

from __future__ import annotations

import pytest

from arroyo_dagster.errors import ConflictError
from arroyo_dagster.state import (
    Checkpoint,
    CheckpointState,
    Epoch,
    JobId,
    JobPaths,
    ObjectStore,
    ParquetBackend,
    PipelineId,
    StatePath,
)
from arroyo_dagster.state.metadata.reader import as_checkpoint
from tests.formats import Manifest, records
from tests.interleavings import Call, Done, Objects, Program, State, every_state

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
