"""Protects `sdf clean`: it removes exactly what it says, and all of it can be brought back."""

from __future__ import annotations

from typing import Any

import pytest

from arroyo_dagster.dataflow.revisions.clean import (
    CleanOptions,
    plan_clean,
    plan_restore,
    run_clean,
    run_restore,
)
from arroyo_dagster.errors import ConflictError, InputError
from arroyo_dagster.state import (
    Epoch,
    GcRequest,
    JobPaths,
    ParquetBackend,
    PlanKind,
    Retention,
    run_gc,
    verify_job,
)
from tests.dataflows import Flow, builder, definition

TWO = builder("counts().increment(1)\nother().increment(10)").replace(
    "    partition:\n",
    "      other:\n        type: keyed-state\n        properties:\n"
    "          key: {type: string}\n          value: {type: u32}\n    partition:\n",
)


def flow_of(services: str, before: Flow | None = None, **more: Any) -> Flow:
    text = definition(services, converter="raw", topics={"middle": "string"})
    if before is None:
        return Flow(text, **more)
    return Flow(text, store=before.store, topics=before.topics, clock=before.clock, **more)


def cleaned(flow: Flow, **options: Any) -> Flow:
    for plan in plan_clean(flow.dataflow, flow.store, CleanOptions(**options)):
        run_clean(flow.dataflow, flow.store, plan)
    flow.restart()
    return flow


def undone(flow: Flow) -> Flow:
    for plan in plan_restore(flow.dataflow, flow.store):
        run_restore(flow.dataflow, flow.store, plan)
    flow.restart()
    return flow


def findings(flow: Flow, service: str = "build") -> tuple[Any, ...]:
    return verify_job(flow.store, JobPaths(service, "test.flow")).verdict.findings


def test_undo_brings_rows_and_offsets_back_until_the_service_runs() -> None:
    flow = flow_of(TWO).send("words", ["a", "b"])
    undone(cleaned(flow))
    assert flow.cells("build.counts") == {"a": 1, "b": 1}
    assert findings(flow) == ()
    with pytest.raises(InputError, match="nothing to undo"):
        plan_restore(flow.dataflow, flow.store)
    flow.send("words", ["a"])
    assert flow.cells("build.counts") == {"a": 2, "b": 1}
    cleaned(flow, states=("counts",)).send("words", ["c"])
    with pytest.raises(InputError, match="nothing to undo"):
        plan_restore(flow.dataflow, flow.store)


def test_gc_keeps_what_a_clean_removed() -> None:
    flow = flow_of(TWO, keep_epochs=2).send("words", ["a"]).send("words", ["b"])
    (plan,) = plan_clean(flow.dataflow, flow.store, CleanOptions(states=("counts",)))
    before = plan.stored.head
    cleaned(flow, states=("counts",))
    for word in "cdefghijkl":
        flow.send("words", [word])
    paths = JobPaths("build", "test.flow")
    backend = ParquetBackend(flow.store, paths)
    assert before.epoch in backend.epochs()
    assert before.epoch + 2 not in backend.epochs()
    for kind, kept in ((PlanKind.EXPIRE, Retention(keep_epochs=2)), (PlanKind.ORPHANS, None)):
        run_gc(flow.store, paths, GcRequest(kind=kind, retention=kept))
    backend.prepare_checkpoint_load(Epoch(before.epoch))
    assert findings(flow) == ()


def test_a_run_that_writes_meanwhile_stays_as_it_is() -> None:
    flow = flow_of(TWO).send("words", ["a"])
    (plan,) = plan_clean(flow.dataflow, flow.store, CleanOptions())
    flow.send("words", ["b"])
    with pytest.raises(ConflictError):
        run_clean(flow.dataflow, flow.store, plan)
    assert flow.cells("build.counts") == {"a": 1, "b": 1}


def test_dead_letters_of_records_that_are_read_again_are_not_replayed() -> None:
    body = "if record == env.get('bad'): raise ValueError('bad')\ncounts().increment(1)"
    flow = flow_of(builder(body), env={"bad": "b"}, on_error="dead-letter")
    flow.send("words", ["a", "b"])
    assert len(flow.letters("build")) == 1
    right = flow_of(builder(body), flow, env={"bad": ""}, on_error="dead-letter")
    cleaned(right)
    assert right.letters("build") == []
    assert right.run().cells("build.counts") == {"a": 1, "b": 1}
