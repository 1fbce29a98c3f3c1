"""Retention of a running job never ends it: what could not be removed is left for the next time."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from arroyo_dagster import (
    Epoch,
    MemoryStore,
    ObjectStore,
    ParquetBackend,
    RunOutcome,
    StatePath,
    run_pipeline,
)
from arroyo_dagster.errors import ConflictError
from arroyo_dagster.state.storage import DeleteOutcome
from tests.contract import servers
from tests.contract.conftest import open_s3
from tests.formats import ObjectKind, object_name
from tests.jobs import output_of, word_job
from tests.shares import all_but
from tests.stores import Wrapper

pytestmark = pytest.mark.usefixtures("one_at_a_time")

CLIENTS = ("obstore", "fsspec")
OPTIONS: dict[str, Any] = {"rows": 24, "keep_epochs": 2, "parallelism": 1}


@pytest.fixture(scope="module")
def s3() -> Iterator[tuple[servers.FailingDeletes, str]]:
    made: list[servers.FailingDeletes] = []

    def dialect(app: servers.App) -> servers.App:
        made.append(servers.FailingDeletes(app))
        return made[0]

    with servers.moto_server(dialect) as endpoint:
        yield made[0], endpoint


@pytest.fixture(params=CLIENTS)
def store(
    request: pytest.FixtureRequest, s3: tuple[servers.FailingDeletes, str]
) -> Iterator[ObjectStore]:
    server, endpoint = s3
    bucket = f"retention-{request.param}-{abs(hash(request.node.name)):x}"[:60]
    servers.make_moto_bucket(bucket)
    yield open_s3(f"s3::http://{endpoint}/{bucket}/state", request.param)
    server.problem_of = lambda key: None


def run(store: ObjectStore, **options: Any) -> RunOutcome:
    return run_pipeline(word_job(store, **OPTIONS, **options), store)


def undisturbed() -> Counter[Any]:
    plain = MemoryStore()
    run(plain)
    return output_of(plain)


def epochs_of(store: ObjectStore) -> list[Epoch]:
    return ParquetBackend(store, word_job(store).paths).epochs()


def is_data(key: str) -> bool:
    return "/table-" in key


class Deleting(Wrapper):
    """A store whose deletes go through a function."""

    def __init__(
        self, store: ObjectStore, delete: Callable[[list[StatePath]], DeleteOutcome]
    ) -> None:
        super().__init__(store)
        self.delete = delete

    def delete_many(self, paths: Iterable[StatePath]) -> DeleteOutcome:
        doomed = list(paths)
        if any("/checkpoints/" in path for path in doomed):
            return self.delete(doomed)
        return self.inner.delete_many(doomed)


def test_one_throttled_key_is_tried_again(
    s3: tuple[servers.FailingDeletes, str], store: ObjectStore
) -> None:
    server, _ = s3
    failed: list[str] = []

    def once(key: str) -> str | None:
        if is_data(key) and not failed:
            failed.append(key)
            return "SlowDown"
        return None

    server.problem_of = once
    outcome = run(store)
    assert failed
    assert (outcome.retention_failures, outcome.overdue_epochs) == (0, 0)
    assert output_of(store) == undisturbed()
    assert epochs_of(store) == [5, 6]


@pytest.mark.parametrize("code", all_but(["SlowDown", "AccessDenied"], ["SlowDown"]))
def test_a_key_that_is_never_deleted_ends_no_job_and_keeps_its_epoch(
    s3: tuple[servers.FailingDeletes, str], code: str, caplog: pytest.LogCaptureFixture
) -> None:
    server, endpoint = s3
    servers.make_moto_bucket(f"never-{code.lower()}")
    store = open_s3(f"s3::http://{endpoint}/never-{code.lower()}/state")
    kept: list[str] = []

    def always(key: str) -> str | None:
        if is_data(key) and not kept:
            kept.append(key)
        return code if key in kept else None

    server.problem_of = always
    with caplog.at_level(logging.WARNING):
        outcome = run(store)
    assert outcome.retention_failures > 1
    assert outcome.overdue_epochs == 4
    assert output_of(store) == undisturbed()
    assert epochs_of(store) == list(range(1, 7))
    assert code in caplog.text
    assert "4 epochs" in caplog.text
    # Data goes before metadata: as long as the file is there, so is all that refers to it.
    path = StatePath(kept[0].partition("state/")[2])
    assert store.head(path) is not None
    server.problem_of = lambda key: None
    again = run_pipeline(word_job(store, **{**OPTIONS, "rows": 28}), store)
    assert (again.retention_failures, again.overdue_epochs) == (0, 0)
    assert epochs_of(store) == [6, 7]
    assert store.head(path) is None


def test_a_key_that_the_answer_leaves_out_was_not_deleted(
    s3: tuple[servers.FailingDeletes, str], store: ObjectStore
) -> None:
    server, _ = s3
    paths = [StatePath(f"a/{number}") for number in range(5)]
    for path in paths:
        store.put(path, b"x")
    server.problem_of = lambda key: server.LEFT_OUT if key.endswith(("3", "4")) else None
    outcome = store.delete_many(paths)
    assert outcome.deleted == tuple(paths[:3])
    assert list(outcome.failed) == paths[3:]
    assert "does not name" in outcome.failed[paths[3]]
    server.problem_of = lambda key: None
    assert store.delete_many(paths).deleted == tuple(paths)


def test_a_damaged_older_epoch_is_left_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    pipeline = word_job(store, **{**OPTIONS, "keep_epochs": None})
    run_pipeline(pipeline, store, max_epochs=5)
    manifest = ParquetBackend(store, pipeline.paths).load(Epoch(2)).ref
    store.put(manifest, b"\xff\xff damaged")
    with caplog.at_level(logging.WARNING):
        outcome = run(store)
    assert outcome.retention_failures > 0
    assert outcome.overdue_epochs > 0
    assert manifest in caplog.text
    assert output_of(store) == undisturbed()


def test_a_run_that_lost_its_job_stops_even_if_retention_finds_out() -> None:
    def lost(paths: list[StatePath]) -> DeleteOutcome:
        raise ConflictError("the lease on the job ran out")

    with pytest.raises(ConflictError, match="ran out"):
        run(Deleting(MemoryStore(), lost))


def test_a_mistake_in_the_program_is_not_hidden() -> None:
    def mistaken(paths: list[StatePath]) -> DeleteOutcome:
        raise TypeError("a mistake")

    with pytest.raises(TypeError, match="a mistake"):
        run(Deleting(MemoryStore(), mistaken))


def test_no_metadata_goes_while_data_of_its_epoch_is_left() -> None:
    inner = MemoryStore()
    paths = word_job(inner).paths
    asked: list[ObjectKind] = []

    def without_data(doomed: list[StatePath]) -> DeleteOutcome:
        asked.extend(object_name(paths, path).kind for path in doomed)
        return DeleteOutcome(deleted=(), failed=dict.fromkeys(doomed, "503 SlowDown"))

    outcome = run(Deleting(inner, without_data))
    assert set(asked) == {ObjectKind.DATA}
    assert outcome.retention_failures > 1
