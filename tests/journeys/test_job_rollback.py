"""A stopped Arroyo job goes back to an older epoch, in place. Whatever goes wrong, it has its own
state or the older one, says which, and can be put back; nobody's file is gone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from arroyo_dagster import (
    JobPaths,
    Layout,
    MemoryStore,
    ObjectStore,
    ParquetBackend,
    WriteProtected,
    open_store,
    run_undo,
)
from arroyo_dagster.errors import FormatError, InputError, NotFoundError
from tests.arroyo_jobs import stopped
from tests.commands import run as command
from tests.formats import EditOutcome, KeyDeletion, is_rewritten, metadata
from tests.internals import (
    EditOptions,
    LeaseOptions,
    lease,
    plan_job_rollback,
    run_edit,
    run_job_rollback,
)
from tests.jobs import copy_into, listing, run_word_job, word_job
from tests.journeys.test_surgery import errors_of, others, state_of
from tests.shares import LAYOUTS
from tests.surgery_jobs import SurgeryJob, global_config, surgery_job

pytestmark = pytest.mark.usefixtures("one_at_a_time")


def run(store: ObjectStore, job: SurgeryJob, epoch: int, **options: Any) -> EditOutcome:
    directory = options.pop("directory", stopped(job.paths))
    chosen = EditOptions(**{"quiet_seconds": 0.0, **options})
    return run_job_rollback(store, job.paths, directory, epoch, chosen)


def then(layout: Layout, epoch: int) -> dict[str, Any]:
    """What the job held at an epoch; rows, entries and watermarks, without the number."""
    job = surgery_job(layout, epochs=epoch)
    return unnumbered(state_of(job.store, job.paths))


def unnumbered(state: dict[str, Any]) -> dict[str, Any]:
    return {name: (head[:3], rows, pairs) for name, (head, rows, pairs) in state.items()}


# ---- what it does --------------------------------------------------------------------------------


@LAYOUTS
def test_the_newest_epoch_holds_the_older_state_and_the_job_goes_on_from_it(
    layout: Layout,
) -> None:
    job = surgery_job(layout, epochs=4)
    was = others(job.store)
    plan = plan_job_rollback(WriteProtected(job.store), job.paths, stopped(job.paths), 2)
    assert listing(job.store).keys() == was.keys()
    outcome = run(job.store, job, 2, approved=plan.digest)
    assert (outcome.plan, outcome.plan.epoch) == (plan, 4)
    assert unnumbered(state_of(job.store, job.paths)) == then(layout, 2)
    assert {p for p in was if others(job.store)[p] != was[p]} == set(outcome.objects)
    assert errors_of(job.store, job.paths) == set()
    # Arroyo's cleanup deletes what an older epoch lists, even if a newer one lists it again.
    assert all(map(is_rewritten, ParquetBackend(job.store, job.paths).load().paths))
    job.start()
    for _ in range(3):
        job.write({})
    found = unnumbered(state_of(job.store, job.paths))
    for name in ("window_3", "join_4", "agg_5"):
        assert found[name] == then(layout, 2)[name]
    assert errors_of(job.store, job.paths) == set()


@LAYOUTS
def test_the_plan_says_how_far_sources_go_back(layout: Layout) -> None:
    job = surgery_job(layout, epochs=4)
    plan = plan_job_rollback(job.store, job.paths, stopped(job.paths), 1)
    (partition,) = (text for text in plan.duplicate_outputs if "kafka_1 partition 3" in text)
    assert "3000 records from position 1000 to 4000 are read again" in partition
    assert not [text for text in plan.duplicate_outputs if "partition 5" in text]


@LAYOUTS
def test_rollbacks_and_edits_are_undone_one_by_one(layout: Layout) -> None:
    job = surgery_job(layout, epochs=4)
    states, was = [state_of(job.store, job.paths)], others(job.store)
    for act in (
        partial(run, job.store, job, 3),
        partial(
            run_edit,
            job.store,
            job.paths,
            stopped(job.paths),
            KeyDeletion(values=("k1",)),
            EditOptions(quiet_seconds=0),
        ),
        partial(run, job.store, job, 1),
        partial(run, job.store, job, 3),
    ):
        act()
        states.append(state_of(job.store, job.paths))
        planned = plan_job_rollback(job.store, job.paths, stopped(job.paths), 1)
        assert "what edits of epochs 4 have changed or removed is as it was" in str(planned.unknown)
        assert errors_of(job.store, job.paths) == set()
    assert states[4] == states[1]
    for expected in reversed(states[:-1]):
        assert run_undo(job.store, job.paths, stopped(job.paths)).done
        assert state_of(job.store, job.paths) == expected
    assert others(job.store) == was


@LAYOUTS
def test_a_damaged_newest_epoch_is_no_hindrance(layout: Layout, tmp_path: Path) -> None:
    job = surgery_job(layout, epochs=3)
    *_, lost = (p for p in ParquetBackend(job.store, job.paths).load().paths if "table-k-" in p)
    job.store.delete_many([lost])
    job.store = copy_into(MemoryStore(f"rollback-{tmp_path.name}"), job.store)
    step = f"arroyo-state rollback {job.paths.root} 2"
    told = command(job.store.url, "verify", job.job)
    assert (told.exit_code, f"To go back to epoch 2: {step}" in told.stdout) == (3, True)
    assert json.loads(command(job.store.url, "verify", job.job, "--json").stdout)["next_steps"] == [
        step
    ]
    run(job.store, job, 2)
    assert unnumbered(state_of(job.store, job.paths)) == then(layout, 2)
    assert errors_of(job.store, job.paths) == set()
    with pytest.raises(FormatError, match=r"1 of .* files of the original lists are missing"):
        run_undo(job.store, job.paths, stopped(job.paths))


# ---- refusals ------------------------------------------------------------------------------------


def lose_a_file(job: SurgeryJob) -> None:
    (lost,) = (p for p in ParquetBackend(job.store, job.paths).load().paths if "table-i-000" in p)
    job.store.delete_many([lost.replace("checkpoint-0000003", "checkpoint-0000002")])  # type: ignore[list-item]


def commit_later(epoch: int, job: SurgeryJob) -> None:
    """An epoch's sinks have still to commit it, and no marker says that they have."""
    ref = job.paths.manifest(job.generation, epoch)  # type: ignore[arg-type]
    manifest = metadata.decode_manifest(job.store.read(ref), ref)
    job.store.put(ref, metadata.encode_manifest(replace(manifest, needs_commit=True)))


def add_operator(job: SurgeryJob) -> None:
    job.keep("sink_9", global_config("f", "file_sink"), {"/out/more": 1})
    job.write({})


Damage = Callable[[SurgeryJob], object]
REFUSED: dict[str, tuple[Layout, Damage, int, type[Exception], str]] = {
    "no such epoch": (Layout.LEGACY, id, 9, NotFoundError, "the job has no such epoch"),
    "the newest epoch": (Layout.LEGACY, id, 3, InputError, "this is the newest epoch"),
    "a missing file": (Layout.LEGACY, lose_a_file, 2, FormatError, "cannot be restored: .*missing"),
    "an epoch to commit": (
        Layout.PROTOCOL, partial(commit_later, 2), 2, Exception, "its commit is not finished",
    ),
    "a newest epoch to commit": (
        Layout.PROTOCOL, partial(commit_later, 3), 2, InputError, "the next start finishes it",
    ),
    "other operators": (Layout.LEGACY, add_operator, 3, InputError, "other operators than the job"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_is_refused_and_changes_nothing(name: str) -> None:
    layout, damage, epoch, kind, message = REFUSED[name]
    job = surgery_job(layout)
    damage(job)
    before = listing(job.store)
    with pytest.raises(kind, match=message) as refused:
        run(job.store, job, epoch)
    assert refused.value.next_step  # type: ignore[attr-defined]
    assert listing(job.store) == before


# ---- the command ---------------------------------------------------------------------------------


@LAYOUTS
def test_the_command_lists_plans_and_executes_the_approved_plan(
    layout: Layout, tmp_path: Path
) -> None:
    made = surgery_job(layout, epochs=4)
    store, url = copy_into(open_store(str(tmp_path)), made.store), str(tmp_path)
    assert "can go back to epochs: 1-3" in command(url, "rollback", "job_x").stdout
    words = ("rollback", "job_x", "3", "--assume", "job_x=stopped")
    dry = command(url, *words)
    assert "carried" in dry.stdout
    assert "of epoch 3" in dry.stdout
    digest = dry.stdout.partition("plan ")[2].split()[0]
    other = command(url, *words[:2], "2", *words[3:], "--yes", "--approve", digest)
    assert (other.exit_code, "was approved, but the current plan is" in other.stderr) == (1, True)
    with lease(store, made.paths, "somebody", LeaseOptions()):
        waits = command(url, *words, "--yes", "--quiet", "0", "--lease-wait", "0")
        assert (waits.exit_code, "the job is leased by" in waits.stderr) == (4, True)
    done = command(url, *words, "--yes", "--quiet", "0", "--approve", digest)
    assert "rollback done at epoch 4" in done.stdout
    assert unnumbered(state_of(store, made.paths)) == then(layout, 3)


def test_a_managed_job_has_no_digest_to_approve(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    run_word_job(store, max_epochs=3)
    paths: JobPaths = word_job(store).paths
    refused = command(str(tmp_path), "rollback", paths.root, "2", "--yes", "--approve", "x")
    assert "has no digest to approve" in refused.stderr
