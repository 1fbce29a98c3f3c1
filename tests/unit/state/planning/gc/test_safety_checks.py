"""Protects the safety checks before anything of a job is deleted: who knows what it is doing, which
epoch a start may choose, whose clock counts, and how it is known that a job is dead."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from arroyo_dagster.errors import ConflictError, InputError, ProtocolError
from arroyo_dagster.state import CheckpointState, Epoch, JobId, JobPaths
from arroyo_dagster.state.model.job_facts import JobAnswer, merge_answers
from arroyo_dagster.state.planning.gc.safety_checks import (
    at_rest,
    check_clock,
    check_still,
    check_store_clock,
    checked_grace,
    checked_purge_age,
    newest_restorable,
    why_dead,
)
from tests.formats import (
    GRACE_FLOOR_MICROS,
    SKEW_MICROS,
    Absence,
    CheckpointFacts,
    JobCondition,
    JobFacts,
    Roots,
    SourceAnswer,
)
from tests.unit.state.planning.gc.test_orphans import LEGACY, NOW, PROTOCOL, answer, roots_of

THEIRS = roots_of(PROTOCOL, managed=False)
LEGACYS = roots_of(LEGACY, managed=False)
AT_REST = [one for one in JobCondition if one.at_rest]
JOBS = pytest.mark.parametrize("roots", [THEIRS, LEGACYS], ids=["protocol", "legacy"])


def said(source: str, condition: JobCondition, **known: Any) -> SourceAnswer:
    facts = JobFacts(job=JobId("j"), source=source, condition=condition, **known)
    return SourceAnswer(source=source, facts=facts)


def words(*said: SourceAnswer, job: str = "j") -> JobAnswer:
    return merge_answers(JobPaths(JobId(job)), list(said))


def knows(source: str, job: str = "other") -> JobAnswer:
    facts = JobFacts(job=JobId(job), source=source, condition=JobCondition.RUNNING, state="Running")
    return words(SourceAnswer(source=source, facts=facts), job=job)


# ---- what the job is doing -----------------------------------------------------------------------


@pytest.mark.parametrize("condition", list(JobCondition))
def test_a_managed_job_is_never_taken_to_be_at_rest(condition: JobCondition) -> None:
    """Its writer may be anywhere, and no server of Arroyo's knows it."""
    assert at_rest(roots_of(PROTOCOL), answer(condition)) is False
    assert at_rest(roots_of(PROTOCOL), None) is False


@JOBS
def test_a_job_is_at_rest_only_where_somebody_says_so(roots: Roots) -> None:
    for condition in AT_REST:
        assert at_rest(roots, answer(condition)) is True
    assert at_rest(roots, answer(JobCondition.RUNNING)) is False
    # A request that a running job is still at changes what it does only once it has ended.
    assert at_rest(roots, answer(JobCondition.RUNNING, action_in_progress=True)) is False


@JOBS
def test_a_job_that_nobody_knows_is_refused(roots: Roots) -> None:
    with pytest.raises(ProtocolError, match="no job-status source is configured") as caught:
        at_rest(roots, None)
    assert caught.value.facts["job"] == roots.paths.root
    assert "--assume" in str(caught.value.next_step)
    silent = words(SourceAnswer(source="api", problem=ProtocolError("timed out")))
    with pytest.raises(ProtocolError, match="unknown: api: timed out"):
        at_rest(roots, silent)
    strange = words(said("api", JobCondition.UNKNOWN, state="Draining"))
    with pytest.raises(ProtocolError, match="unknown state 'Draining'"):
        at_rest(roots, strange)


@JOBS
def test_a_state_that_nobody_understands_outranks_what_the_user_remembers(roots: Roots) -> None:
    strange = said("api", JobCondition.UNKNOWN, state="Draining")
    with pytest.raises(ProtocolError, match="is unknown"):
        at_rest(roots, words(strange, said("the user", JobCondition.STOPPED)))


@JOBS
def test_sources_that_disagree_on_the_condition_or_the_run_are_not_believed(roots: Roots) -> None:
    stopped = said("api", JobCondition.STOPPED, run_id=2)
    for other in (
        said("database", JobCondition.RUNNING, run_id=2),
        said("database", JobCondition.STOPPED, run_id=3),
    ):
        with pytest.raises(ProtocolError, match="sources disagree on"):
            at_rest(roots, words(stopped, other))
    # Two names of a pipeline are no danger.
    named = (replace(stopped.facts, name=name) for name in ("a", "b"))  # type: ignore[type-var]
    both = [SourceAnswer(source=str(at), facts=facts) for at, facts in enumerate(named)]
    assert merge_answers(roots.paths, both).disagreements
    assert at_rest(roots, merge_answers(roots.paths, both)) is True


@JOBS
def test_a_job_that_is_about_to_change_is_refused(roots: Roots) -> None:
    with pytest.raises(ProtocolError, match=r"changing its state \(Stopping\)"):
        at_rest(roots, answer(JobCondition.CHANGING, state="Stopping"))
    with pytest.raises(ProtocolError, match=r"changing its state \(changing\)"):
        at_rest(roots, answer(JobCondition.CHANGING))
    for condition in AT_REST:
        with pytest.raises(ProtocolError, match="changing its state"):
            at_rest(roots, answer(condition, action_in_progress=True))
        assert at_rest(roots, answer(condition, action_in_progress=False)) is True
    with pytest.raises(ProtocolError, match="a source reports that its pipeline is gone"):
        at_rest(roots, answer(JobCondition.GONE))


def test_who_speaks_of_another_run_than_the_store_is_not_believed() -> None:
    """A copied database, or a server of another cluster."""
    for condition in AT_REST:
        with pytest.raises(ProtocolError, match=r"generation 2, but s reports run 3"):
            at_rest(THEIRS, answer(condition, run_id=3))
        assert at_rest(THEIRS, answer(condition, run_id=2)) is True
        assert at_rest(THEIRS, answer(condition)) is True
        assert at_rest(LEGACYS, answer(condition, run_id=3)) is True  # the store names no run
    # A run that was started just now has not raised the fence yet.
    assert at_rest(THEIRS, answer(JobCondition.RUNNING, run_id=3)) is False


def test_a_job_has_to_do_one_thing_all_the_while_it_is_looked_at() -> None:
    running = answer(JobCondition.RUNNING, run_id=2)
    check_still(PROTOCOL, running, answer(JobCondition.RUNNING, run_id=2))
    check_still(PROTOCOL, None, None)
    stopped = answer(JobCondition.STOPPED, run_id=2)
    changes: tuple[tuple[JobAnswer | None, JobAnswer | None], ...] = (
        (running, stopped),
        (stopped, answer(JobCondition.STOPPED, run_id=3)),
        (None, running),
        (running, None),
        (None, answer(JobCondition.UNKNOWN, state="Draining", run_id=2)),
    )
    for before, now in changes:
        with pytest.raises(ConflictError, match="changed during the check:") as caught:
            check_still(PROTOCOL, before, now)
        assert caught.value.retryable
        assert caught.value.facts["job"] == PROTOCOL.root
    # Nobody asked is as good as nobody who knows.
    check_still(PROTOCOL, None, answer(JobCondition.UNKNOWN))


# ---- the epoch that a start may choose -----------------------------------------------------------


def test_the_store_alone_names_the_epoch_of_the_protocol_layout() -> None:
    """Whatever a source says: only epochs below the oldest one that a start may choose go."""
    for roots in (roots_of(PROTOCOL), THEIRS):
        assert newest_restorable(roots, None) == 9
        assert newest_restorable(roots, answer(JobCondition.STOPPED, newest_ready_epoch=7)) == 9
        assert newest_restorable(replace(roots, restorable=Epoch(7)), None) == 7
        assert newest_restorable(replace(roots, restorable=Epoch(12)), None) == 9
    # A managed job of the legacy layout decides by the store, too.
    managed = roots_of(LEGACY)
    assert newest_restorable(managed, None) == 9
    assert newest_restorable(managed, answer(JobCondition.STOPPED, newest_ready_epoch=7)) == 9


def test_an_unfinished_commit_of_the_newest_epoch_is_refused() -> None:
    def committing(roots: Roots) -> Roots:
        head = replace(roots.head, state=CheckpointState.COMMITTING)
        return replace(roots, epochs=(head, *roots.epochs[1:]))

    with pytest.raises(ProtocolError, match="commit of the newest epoch") as caught:
        newest_restorable(committing(THEIRS), None)
    assert caught.value.facts == {"job": PROTOCOL.root, "path": THEIRS.head.ref}
    assert newest_restorable(committing(roots_of(PROTOCOL)), None) == 9


def test_where_no_source_names_an_epoch_the_older_of_the_two_newest_counts() -> None:
    """The database may be one behind the store."""
    for said_of_it in (None, answer(JobCondition.STOPPED, LEGACY)):
        assert newest_restorable(LEGACYS, said_of_it) == 8
        two = replace(LEGACYS, epochs=LEGACYS.epochs[:2])
        assert newest_restorable(two, said_of_it) == 8
        one = replace(LEGACYS, epochs=LEGACYS.epochs[:1])
        assert newest_restorable(one, said_of_it) == 9


def test_the_epoch_that_a_source_names_counts_if_it_is_there() -> None:
    for epoch in (7, 8, 9):
        named = answer(JobCondition.STOPPED, LEGACY, newest_ready_epoch=Epoch(epoch))
        assert newest_restorable(LEGACYS, named) == epoch
    for epoch in (6, 10):
        with pytest.raises(ProtocolError, match=f"s reports epoch {epoch}, which is not") as caught:
            newest_restorable(
                LEGACYS, answer(JobCondition.STOPPED, LEGACY, newest_ready_epoch=Epoch(epoch))
            )
        assert caught.value.facts["newest"] == LEGACYS.head.ref


@pytest.mark.parametrize(("epoch", "refused"), [(7, False), (8, True), (9, True)])
def test_commit_that_a_source_knows_to_be_unfinished_is_refused(epoch: int, refused: bool) -> None:
    def named(state: str) -> JobAnswer:
        listed = (
            CheckpointFacts(epoch=Epoch(6), ready=True, state="ready"),
            CheckpointFacts(epoch=Epoch(epoch), ready=False, state=state),
        )
        return answer(JobCondition.STOPPED, LEGACY, newest_ready_epoch=Epoch(8), checkpoints=listed)

    if refused:
        with pytest.raises(ProtocolError, match=f"commit of epoch {epoch} is not finished"):
            newest_restorable(LEGACYS, named("committing"))
    else:
        assert newest_restorable(LEGACYS, named("committing")) == 8
    assert newest_restorable(LEGACYS, named("inprogress")) == 8


# ---- clocks --------------------------------------------------------------------------------------


def finished(
    after_written: int | None, *, oldest: int | None = None, written: int | None = NOW
) -> Roots:
    """A job whose newest epoch was finished so long after the store wrote it."""
    finish = 0 if after_written is None else NOW + after_written
    head = replace(
        THEIRS.head,
        finish_time_micros=finish,
        written_at_micros=written,
        oldest_object_micros=oldest,
    )
    return replace(THEIRS, epochs=(head, *THEIRS.epochs[1:]))


def test_clocks_may_differ_by_the_margin_and_no_more() -> None:
    check_clock(finished(SKEW_MICROS), NOW + 10**12, live=True)
    with pytest.raises(ProtocolError, match="the writer's clock is ahead, or the store's") as error:
        check_clock(finished(SKEW_MICROS + 1), NOW + 10**12, live=True)
    assert ", 300 seconds apart" in error.value.message
    assert error.value.facts == {"job": PROTOCOL.root, "path": THEIRS.head.ref}
    check_clock(finished(-SKEW_MICROS, oldest=NOW), NOW, live=True)
    with pytest.raises(ProtocolError, match="the writer's clock is behind, or the objects were"):
        check_clock(finished(-SKEW_MICROS - 1, oldest=NOW), NOW, live=True)
    check_clock(finished(-SKEW_MICROS - 1, oldest=NOW), NOW, live=False)


def test_the_oldest_object_decides_whether_the_writers_clock_is_behind() -> None:
    """A rewrite, or a late claim, writes one object anew long after the epoch was finished."""
    check_clock(finished(-(10**12), oldest=NOW - 10**12), NOW, live=True)
    check_clock(finished(-(10**12), oldest=None), NOW, live=True)


def test_the_stores_time_now_stands_for_a_time_that_it_does_not_say() -> None:
    for written in (None, 0):
        check_clock(finished(SKEW_MICROS, written=written), NOW, live=True)
        with pytest.raises(ProtocolError, match="ahead"):
            check_clock(finished(SKEW_MICROS + 1, written=written), NOW, live=True)


def test_a_writer_that_says_no_time_is_not_compared() -> None:
    check_clock(finished(None, oldest=NOW), NOW, live=True)


def test_both_times_are_printed_in_utc_wherever_this_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as tokyo:
        tokyo.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        try:
            _both_times_are_printed()
        finally:
            tokyo.undo()
            time.tzset()


def _both_times_are_printed() -> None:
    with pytest.raises(ProtocolError, match="apart") as caught:
        check_clock(finished(3600 * 10**6 + 999_999), NOW, live=True)
    assert "finished at 2027-01-15T09:00:00Z by its writer's clock" in caught.value.message
    assert "written at 2027-01-15T08:00:00Z by the store's, 3600 seconds" in caught.value.message
    # A time that no calendar has.
    with pytest.raises(ProtocolError, match=f"{NOW + 10**18} microseconds since 1970"):
        check_clock(finished(10**18), NOW, live=True)


def test_the_stores_clock_counts_if_it_agrees_with_the_one_here() -> None:
    for apart in (-SKEW_MICROS, 0, SKEW_MICROS):
        assert check_store_clock(PROTOCOL, NOW + apart, NOW) == NOW + apart
    for apart in (-SKEW_MICROS - 1, SKEW_MICROS + 1):
        with pytest.raises(ProtocolError, match="300 seconds apart") as caught:
            check_store_clock(PROTOCOL, NOW + apart, NOW)
        assert caught.value.facts == {"job": PROTOCOL.root}
    for unsaid in (None, 0):
        with pytest.raises(ProtocolError, match="does not report when") as caught:
            check_store_clock(PROTOCOL, unsaid, NOW)
        assert caught.value.facts == {"job": PROTOCOL.root}


# ---- dead jobs -----------------------------------------------------------------------------------


def test_a_job_that_somebody_knows_to_be_gone_is_dead_unless_another_knows_better() -> None:
    gone = said("the user", JobCondition.GONE)
    assert why_dead(PROTOCOL, words(gone), [], managed=False) == "the user reports that it is gone"
    # Sources that differ in what else they say do not contradict that.
    other = said("the sheet", JobCondition.GONE, run_id=3, name="b")
    both = words(replace(gone, facts=replace(gone.facts, run_id=2, name="a")), other)  # type: ignore[type-var]
    assert why_dead(PROTOCOL, both, [], managed=False) == "the user reports that it is gone"
    with pytest.raises(ProtocolError, match="sources disagree on condition") as caught:
        why_dead(PROTOCOL, words(gone, said("api", JobCondition.STOPPED)), [], managed=False)
    assert caught.value.facts["job"] == PROTOCOL.root


@pytest.mark.parametrize("condition", [JobCondition.RUNNING, JobCondition.CHANGING, *AT_REST])
def test_a_job_that_a_source_has_is_not_dead(condition: JobCondition) -> None:
    known = words(said("api", condition), SourceAnswer(source="database", absence=Absence.NO_JOB))
    with pytest.raises(ProtocolError, match=f"the job exists: api reports {condition.value}"):
        why_dead(PROTOCOL, known, [knows("database")], managed=False)


@pytest.mark.parametrize("absence", [Absence.NO_JOB, Absence.NO_PIPELINE])
def test_source_proves_a_dead_job_only_if_it_knows_another(absence: Absence) -> None:
    """A server of another cluster knows none of the jobs of this URL."""
    denies = SourceAnswer(source="api", absence=absence)
    silent = SourceAnswer(source="database", absence=Absence.NOT_LISTED)
    dead = f"api: {absence.value}"
    assert why_dead(PROTOCOL, words(silent, denies), [knows("api")], managed=False) == dead
    assert why_dead(PROTOCOL, words(denies), [knows("x"), knows("api")], managed=False) == dead
    empty = words(SourceAnswer(source="api", absence=Absence.NO_JOB), job="other")
    stateless = words(said("api", JobCondition.UNKNOWN), job="other")
    for others in ([], [knows("database")], [empty], [stateless]):
        with pytest.raises(ProtocolError, match="nothing proves") as caught:
            why_dead(PROTOCOL, words(silent, denies), others, managed=False)
        assert caught.value.facts["job"] == PROTOCOL.root
    # A word for its state that nobody here knows shows a server that has jobs of this URL.
    strange = words(said("api", JobCondition.UNKNOWN, state="Draining"), job="other")
    assert why_dead(PROTOCOL, words(denies), [strange], managed=False) == dead
    with pytest.raises(ProtocolError, match="managed job"):
        why_dead(PROTOCOL, words(denies), [knows("api")], managed=True)


def test_one_source_that_could_not_answer_keeps_a_job_alive() -> None:
    failed = SourceAnswer(source="database", problem=ProtocolError("timed out"))
    denies = SourceAnswer(source="api", absence=Absence.NO_JOB)
    with pytest.raises(ProtocolError, match="could not answer: timed out"):
        why_dead(PROTOCOL, words(denies, failed), [knows("api")], managed=False)


@pytest.mark.parametrize("absence", [Absence.NOT_LISTED, Absence.UNSAID])
def test_less_than_a_no_proves_nothing_and_names_a_source(absence: Absence) -> None:
    said_nothing = words(SourceAnswer(source="api", absence=absence))
    steps = []
    for paths in (LEGACY, PROTOCOL):
        with pytest.raises(ProtocolError, match="nothing proves") as caught:
            why_dead(paths, said_nothing, [knows("api")], managed=False)
        steps.append(str(caught.value.next_step))
    assert "--arroyo-db" in steps[0]
    assert "the API or database" in steps[1]
    assert "--arroyo-db" not in steps[1]
    assert all("nothing was deleted" in one for one in steps)


@pytest.mark.parametrize("checked", [checked_grace, checked_purge_age])
def test_ages_are_an_hour_or_more(checked: Callable[[int], int]) -> None:
    assert checked(GRACE_FLOOR_MICROS) == GRACE_FLOOR_MICROS
    for micros in (0, GRACE_FLOOR_MICROS - 1):
        with pytest.raises(InputError, match="below an hour"):
            checked(micros)
