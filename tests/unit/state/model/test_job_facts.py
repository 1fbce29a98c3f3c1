"""Words of several sources become one answer, and nothing that was said is lost."""

from __future__ import annotations

from typing import Any

import pytest

from arroyo_dagster.errors import StorageError
from arroyo_dagster.state import Epoch, JobId, JobPaths, PipelineId
from arroyo_dagster.state.model.job_facts import condition_of, merge_answers
from tests.formats import Absence, CheckpointFacts, JobCondition, JobFacts, SourceAnswer

JOB = JobId("job_1")
PATHS = JobPaths(JOB)


def word(source: str, **facts: Any) -> SourceAnswer:
    return SourceAnswer(source=source, facts=JobFacts(job=JOB, source=source, **facts))


def state(source: str, name: str, **facts: Any) -> SourceAnswer:
    return word(source, state=name, condition=condition_of(name), **facts)


@pytest.mark.parametrize(
    ("name", "condition", "at_rest"),
    [
        ("Running", JobCondition.RUNNING, False),
        ("Stopped", JobCondition.STOPPED, True),
        ("Finished", JobCondition.FINISHED, True),
        ("Failed", JobCondition.FAILED, True),
        ("Created", JobCondition.CHANGING, False),
        ("Failing", JobCondition.CHANGING, False),
        ("CheckpointStopping", JobCondition.CHANGING, False),
        ("stopped", JobCondition.UNKNOWN, False),
        ("Hibernating", JobCondition.UNKNOWN, False),
        (None, JobCondition.UNKNOWN, False),
    ],
)
def test_what_arroyo_s_words_mean(name: str | None, condition: JobCondition, at_rest: bool) -> None:
    assert condition_of(name) is condition
    assert condition.at_rest is at_rest


def test_the_first_source_that_knows_wins_and_the_others_fill_its_gaps() -> None:
    epochs = (CheckpointFacts(epoch=Epoch(7), ready=True),)
    answer = merge_answers(
        PATHS,
        [
            word("user", name="orders"),
            state("api", "Running", run_id=3, pipeline=PipelineId("pl_1"), checkpoints=()),
            state("db", "Running", run_id=3, checkpoints=epochs, newest_ready_epoch=Epoch(7)),
        ],
    )
    facts = answer.facts
    assert (facts.name, facts.pipeline, facts.source) == ("orders", "pl_1", "api")
    assert (facts.condition, facts.run_id) == (JobCondition.RUNNING, 3)
    assert (facts.newest_ready_epoch, facts.checkpoints) == (7, epochs)
    assert (answer.disagreements, answer.reason) == ((), None)


def test_a_state_is_never_pieced_together_from_two_sources() -> None:
    answer = merge_answers(
        PATHS, [word("user", condition=JobCondition.STOPPED), state("db", "Stopped", run_id=9)]
    )
    assert (answer.facts.source, answer.facts.run_id, answer.facts.state) == ("user", None, None)


def test_disagreements_are_shown_in_the_order_asked() -> None:
    answer = merge_answers(
        PATHS, [state("api", "Running", run_id=4), state("db", "Stopped", run_id=3), word("user")]
    )
    assert answer.facts.condition is JobCondition.RUNNING
    assert [str(one) for one in answer.disagreements] == [
        "condition: running (api) or stopped (db)",
        "run_id: 4 (api) or 3 (db)",
    ]


def test_a_state_that_is_not_understood_is_not_overruled_by_an_older_source() -> None:
    answer = merge_answers(PATHS, [state("api", "Draining", run_id=4), state("db", "Stopped")])
    assert answer.facts.condition is JobCondition.UNKNOWN
    assert (answer.facts.source, answer.facts.state) == ("api", "Draining")
    assert answer.reason is not None
    assert "unknown state 'Draining'" in answer.reason


def test_unknown_has_the_reason_of_every_source() -> None:
    problem = StorageError("the server did not answer: refused")
    answer = merge_answers(
        PATHS,
        [
            SourceAnswer(source="api", problem=problem),
            SourceAnswer(source="db", absence=Absence.NO_JOB),
            word("user", name="orders"),
        ],
    )
    assert answer.facts.condition is JobCondition.UNKNOWN
    assert (answer.facts.source, answer.facts.name) == (None, "orders")
    assert answer.problems == (problem,)
    assert answer.reason == (
        "api: the server did not answer: refused; db: no such job; user: reports no state"
    )
