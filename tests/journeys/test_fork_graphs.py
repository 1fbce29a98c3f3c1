"""A fork into a job of other SQL is refused where Arroyo's database shows the graphs, also if the
job has no epoch yet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import Layout, MemoryStore, ParquetBackend, cli, configure, find_job
from tests.jobs import copy_into, listing
from tests.journeys.test_create_epoch import begun_job
from tests.journeys.test_fork import two_jobs
from tests.programs import Operator, program_database


@pytest.fixture(params=[True, False], ids=["create", "fork"])
def jobs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[MemoryStore, bool]]:
    source, _ = begun_job() if request.param else two_jobs(Layout.LEGACY)
    store = copy_into(MemoryStore(f"fork-graphs-{tmp_path.name}"), source.store)
    yield store, request.param
    configure(None)


def fork(store: MemoryStore, create: bool, database: str) -> Result:
    more = ["--create"] if create else []
    words = ["fork", "job_a", "job_b", *more, "--arroyo-db", database, "--url", store.url]
    return CliRunner().invoke(cli.main, words)


def program(store: MemoryStore, **configs: bytes) -> list[Operator]:
    epoch = ParquetBackend(store, find_job(store, "job_a")).load()
    order = sorted(epoch.operators, key=lambda one: one.operator.startswith("sink_"))
    return [(one.operator, "Any", configs.get(str(one.operator), b"SELECT")) for one in order]


def test_a_job_of_the_same_sql_is_forked_with_its_own_output(
    jobs: tuple[MemoryStore, bool], tmp_path: Path
) -> None:
    store, create = jobs
    pipelines = {"job_a": program(store), "job_b": program(store, sink_6=b"/out/other")}
    known = program_database(tmp_path / "db.sqlite", pipelines, rows={"job_b": "inprogress"})
    found = fork(store, create, known)
    assert found.exit_code == 0, found.stderr
    assert "precondition met: the pipelines have the same graph (8 operators" in found.stdout
    assert "whether the job has exactly the operators" not in found.stdout


@pytest.mark.parametrize(
    ("dropped", "added", "changed", "expected"),
    [
        ("join_4", None, None, "join_4 of the epoch is not in it"),
        (None, ("session_9", "Any"), None, "the epoch has no operator for session_9 of it"),
        (None, None, b"SELECT x", "window_3 computes something else"),
    ],
    ids=["lacks", "more", "other"],
)
def test_a_job_of_other_sql_is_refused(
    jobs: tuple[MemoryStore, bool],
    tmp_path: Path,
    dropped: str | None,
    added: Operator | None,
    changed: bytes | None,
    expected: str,
) -> None:
    store, create = jobs
    other = program(store, window_3=changed or b"SELECT")
    other = [one for one in other if one[0] != dropped]
    if added is not None:
        other.insert(-1, added)
    pipelines = {"job_a": program(store), "job_b": other}
    known = program_database(tmp_path / "db.sqlite", pipelines, rows={"job_b": "inprogress"})
    was = listing(store)
    found = fork(store, create, known)
    assert (found.exit_code, listing(store)) == (1, was)
    assert "the jobs are not of the same SQL" in found.stderr
    assert expected in found.stderr
