"""Pipelines that read Spark's streaming sources: every row once, whatever dies when."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster import ParquetSink, Pipeline, RunOutcome, open_store, plan_rollback
from arroyo_dagster.errors import InputError, ProtocolError, StorageError
from arroyo_dagster.spark.engine.connectors import SparkSink, SparkSource
from arroyo_dagster.spark.engine.connectors.queries import StagingQueries
from arroyo_dagster.spark.engine.pipeline import SparkOptions, run_pipeline
from arroyo_dagster.state.metadata.backend import ProtocolBackend
from tests.faulty_stores import Crash
from tests.spark.test_staging import staged_rows
from tests.words import output_of

PROJECT = Path(__file__).parents[2]
WORDS = pa.schema([("word", pa.string()), ("n", pa.int64()), ("at", pa.timestamp("us", "UTC"))])


class Place:
    """A folder in which files of words arrive, and a job that counts them."""

    def __init__(self, session: Any, root: Path) -> None:
        self.session = session
        self.root = root
        self.input = root / "in"
        self.input.mkdir(exist_ok=True)
        self.store = open_store(f"file://{root}/state")
        self.pipeline = self.built()
        self.directory = self.pipeline.paths.spark_source("words")
        self.written: list[str] = []

    def built(self, schema: pa.Schema = WORDS, **options: Any) -> Pipeline:
        given = {"path": str(self.input), "maxFilesPerTrigger": "1"}
        pipeline = Pipeline("words", parallelism=2)
        source = SparkSource("json", given, schema=schema, **options)
        rows = pipeline.source("words", source, timestamp="at")
        rows.key_by("word").sink("out", ParquetSink(str(self.root / "out")))
        return pipeline

    def write(self, name: str, *words: str) -> None:
        lines = []
        for number, word in enumerate(words, start=len(self.written)):
            at = dt.datetime(2026, 1, 1) + dt.timedelta(seconds=number)
            lines.append(json.dumps({"word": word, "n": number, "at": f"{at.isoformat()}Z"}))
        hidden = self.input / f".{name}"
        hidden.write_text("\n".join(lines) + "\n")
        hidden.rename(self.input / name)
        self.written += words

    def run(self, **options: Any) -> RunOutcome:
        chosen = SparkOptions(session=self.session, **options)
        return run_pipeline(self.pipeline, self.store, chosen)

    @property
    def words(self) -> list[tuple[int, str]]:
        return sorted((n, word) for word, n, *_ in output_of(self.root / "out"))

    def assert_exact(self) -> None:
        assert self.words == list(enumerate(self.written))


@pytest.fixture
def place(session: Any, tmp_path: Path) -> Place:
    return Place(session, tmp_path)


def test_rows_are_read_once_over_several_runs_and_nothing_stays_staged(place: Place) -> None:
    place.write("a.json", "to", "be")
    assert place.run().epochs == 1
    place.write("b.json", "or")
    place.write("c.json", "not")
    assert place.run().epochs == 1
    assert place.run().epochs == 0
    place.assert_exact()
    assert staged_rows(place.store, place.directory) == []
    with pytest.raises(ProtocolError, match="cannot go back: the staged rows") as found:
        plan_rollback(place.store, place.pipeline.paths, 1)
    assert found.value.facts["sources"] == "words"


# ---- crashes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "behind"),
    [
        ("publish", False),
        ("publish", True),
        ("note", False),
        pytest.param("note", True, marks=pytest.mark.soak),
    ],
)
def test_a_run_that_ends_at_an_epoch_goes_on_exactly_once(
    place: Place, point: str, behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write("a.json", "to", "be")
    places = {"publish": (ProtocolBackend, "publish_next"), "note": (StagingQueries, "note")}
    target, name = places[point]
    real = getattr(target, name)

    def crash(*given: Any, **named: Any) -> None:
        if behind:
            real(*given, **named)
        raise Crash

    monkeypatch.setattr(target, name, crash)
    with pytest.raises(Crash):
        place.run()
    monkeypatch.undo()
    place.write("b.json", "or")
    place.run()
    place.assert_exact()


KILLED = """
import os, signal, sys
from pathlib import Path
from arroyo_dagster.spark import session
from arroyo_dagster.spark.engine.connectors.binding import bound_to_run
from arroyo_dagster.spark.engine.connectors.queries import StagingQueries
from arroyo_dagster.spark.engine.staging import Staging
from arroyo_dagster.state.metadata.backend import ProtocolBackend
from arroyo_dagster.state.storage.local_disk import LocalDiskStore
from tests.spark.test_spark_source import Place

def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

point, root = sys.argv[1:]
if point == "rows-staged":
    create = LocalDiskStore.create
    LocalDiskStore.create = lambda self, path, data: (
        kill() if "/landed/" in path and path.endswith(".json") else create(self, path, data)
    )
elif point == "batch-staged":
    stage = Staging.stage
    Staging.stage = lambda *given: (stage(*given), kill())
elif point == "subtasks-written":
    ProtocolBackend.publish_next = kill
else:
    StagingQueries.note = kill
Place(session.get_session("local[2]")[0], Path(root)).run()
"""
SOAKED = ("batch-staged", "subtasks-written", "epoch-ready")


@pytest.mark.parametrize(
    "point", ["rows-staged", *(pytest.param(one, marks=pytest.mark.soak) for one in SOAKED)]
)
def test_a_driver_that_is_killed_goes_on_exactly_once(place: Place, point: str) -> None:
    place.write("a.json", "to", "be")
    place.write("b.json", "or")
    with (place.root / "log").open("wb") as log:
        command = [sys.executable, "-c", KILLED, point, str(place.root)]
        done = subprocess.Popen(
            command, cwd=PROJECT, stdout=log, stderr=log, start_new_session=True
        )
        status = done.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(done.pid, signal.SIGKILL)  # the JVM
    assert status == -signal.SIGKILL, (place.root / "log").read_text()
    place.write("c.json", "not")
    place.run()
    place.assert_exact()
    assert staged_rows(place.store, place.directory) == []


# ---- errors --------------------------------------------------------------------------------------


def test_a_row_without_event_time_is_refused_before_it_is_staged_and_can_be_left_out(
    place: Place,
) -> None:
    place.write("a.json", "to")
    (place.input / "b.json").write_text('{"word": "no time", "n": 7}')
    with pytest.raises(StorageError, match="1 rows have no event time") as found:
        place.run()
    assert found.value.facts["source"] == "words"
    place.pipeline = place.built(where="at IS NOT NULL")
    place.run()
    place.assert_exact()


def test_rows_that_were_staged_with_other_columns_are_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write("a.json", "to")
    monkeypatch.setattr(ProtocolBackend, "publish_next", _crash)
    with pytest.raises(Crash):
        place.run()
    monkeypatch.undo()
    place.pipeline = place.built(schema=WORDS.append(pa.field("more", pa.string())))
    with pytest.raises(InputError, match="staged with other columns") as found:
        place.run()
    assert "former schema" in str(found.value.next_step)
    place.pipeline = place.built()
    place.run()
    place.assert_exact()


def _crash(*_: Any, **__: Any) -> None:
    raise Crash


# ---- sinks ---------------------------------------------------------------------------------------


def test_a_sink_of_spark_writes_each_row_of_a_pipeline(place: Place) -> None:
    place.write("a.json", "to", "be")
    out = place.root / "spark-out"
    pipeline = Pipeline("words", parallelism=2)
    source = SparkSource("json", {"path": str(place.input)}, schema=WORDS)
    rows = pipeline.source("words", source, timestamp="at")
    rows.key_by("word").sink("out", SparkSink("json", {"path": str(out)}))
    place.pipeline = pipeline
    place.run()
    place.write("b.json", "or")
    place.run()
    found = [json.loads(line) for file in out.glob("*.json") for line in file.open()]
    assert sorted((row["n"], row["word"]) for row in found) == list(enumerate(place.written))
    assert {"word", "n", "at", "_timestamp"} == set(found[0])
    assert not [
        one
        for one in place.store.list()
        if one.path.name.endswith(".parquet") and "spark-sinks" in one.path
    ]
