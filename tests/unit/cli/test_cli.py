"""`arroyo-state` as a shell sees it: output, exit codes, one message for an error."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import (
    MemoryStore,
    ParquetBackend,
    Pipeline,
    RunOutcome,
    StatePath,
    cli,
    configure,
)
from arroyo_dagster.cli import common as grammar
from arroyo_dagster.cli.spark import print_choice
from arroyo_dagster.spark.engine.pipeline import SparkOptions
from arroyo_dagster.spark.settings import SparkSettings
from arroyo_dagster.state.storage.remote import open as opening
from tests.jobs import copy_into, run_word_job, word_job
from tests.stores import MUTATING, Counting

URL = "memory://cli-words"
MOMENT = re.compile(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
READS = (
    ("jobs",),
    ("epochs", "main"),
    ("show", "main"),
    ("show", "words/main", "2"),
    ("rows", "main", "count", "counts"),
    ("rows", "main@1", "keep", "rows", "--limit", "0"),
)


@pytest.fixture(scope="module", autouse=True)
def words() -> Iterator[MemoryStore]:
    store = MemoryStore("cli-words")
    run_word_job(store, rows=8, sinks=0, keep_epochs=None)
    yield store
    configure(None)


def run(*args: str, env: dict[str, str | None] | None = None, url: str | None = URL) -> Result:
    given = [] if url is None else ["--url", url]
    return CliRunner().invoke(cli.main, [*args, *given], env=env, catch_exceptions=False)


def output(*args: str, url: str = URL) -> Any:
    result = run(*args, "--json", url=url)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def failure(*args: str, url: str | None = URL) -> dict[str, Any]:
    result = run(*args, "--json", url=url)
    assert (result.exit_code, result.stdout) == (1, "")
    error: dict[str, Any] = json.loads(result.stderr)["error"]
    assert set(error) == {"type", "message", "facts", "next_step", "retryable"}
    plain = run(*args, url=url)
    assert (plain.exit_code, plain.stdout) == (1, "")
    assert plain.stderr.startswith(f"{error['type']}: {error['message']}")
    assert len(plain.stderr.splitlines()) == 1
    return error


# ---- what --json prints --------------------------------------------------------------------------


def test_jobs_as_json() -> None:
    (job,) = output("jobs")
    assert MOMENT.fullmatch(job.pop("finished_at"))
    assert job == {
        "job": "main",
        "pipeline": "words",
        "layout": "protocol",
        "epochs": 2,
        "newest_epoch": 2,
        "state": "ready",
        "watermark": "2024-01-01T00:00:07.000000Z",
        "problem": None,
        "maintenance": {
            "possible": "any time",
            "reason": "managed job: `compact run` works while it runs and at rest",
        },
        "abandoned": None,
        "name": None,
        "condition": "unknown",
        "arroyo": None,
    }


def test_epochs_as_json() -> None:
    first, second = output("epochs", "words/main")
    for epoch in (first, second):
        assert MOMENT.fullmatch(epoch.pop("started_at"))
        assert MOMENT.fullmatch(epoch.pop("finished_at"))
        assert epoch.pop("seconds") > 0
        assert epoch.pop("bytes") > epoch.pop("files") * 100
    assert first.pop("new_bytes") < 20_000
    assert second.pop("new_bytes") < 20_000
    same = {"generation": 1, "state": "ready", "operators": 4, "problem": None}
    assert first == {
        **same,
        "epoch": 1,
        "watermark": "2024-01-01T00:00:03.000000Z",
        "new_files": first["new_files"],
        "missing": 0,
        "final": False,
    }
    assert second["final"] is True
    assert output("epochs", "main", "--limit", "1")[0]["epoch"] == 2


# ---- what people see -----------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["jobs", "health", "compact plan"])
def test_an_empty_root_says_so_and_is_no_error(command: str, tmp_path: Path) -> None:
    result = run(*command.split(), url=str(tmp_path))
    assert (result.exit_code, result.stdout) == (0, f"file://{tmp_path} holds no jobs.\n")
    if command != "health":
        assert output(*command.split(), url=str(tmp_path)) == []


def test_a_broken_epoch_is_shown_among_the_others_and_reported(words: MemoryStore) -> None:
    store = copy_into(MemoryStore("cli-broken"), words)
    ref = ParquetBackend(store, word_job(store).paths).load().ref
    store.put(ref, b"\xff")
    for command in (("jobs",), ("epochs", "main")):
        result = run(*command, url=store.url)
        assert result.exit_code == 1
        assert "unreadable" in result.stdout
        assert result.stderr.startswith("FormatError: ")
        as_json = run(*command, "--json", url=store.url)
        assert ref in json.loads(as_json.stdout)[-1]["problem"]
        assert json.loads(as_json.stderr)["error"]["facts"]["path"] == ref


# ---- the URL -------------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["ARROYO__CHECKPOINT_URL", "CHECKPOINT_URL"])
def test_the_url_comes_from_the_environment_where_none_is_given(variable: str) -> None:
    names: dict[str, str | None] = dict.fromkeys(grammar.URL_VARIABLES)
    result = run("jobs", "--json", url=None, env={**names, variable: URL})
    assert json.loads(result.stdout)[0]["job"] == "main"


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("nonsense://x", "InputError"),
        ("/no/such/directory", "NotFoundError"),
        ("no/such/directory", "NotFoundError"),
        (__file__, "InputError"),
        (str(Path(__file__).parent), "InputError"),
        ("memory://nothing-here", "NotFoundError"),
    ],
)
def test_a_wrong_url_is_one_clear_error(url: str, kind: str) -> None:
    for command in READS[:3]:
        assert failure(*command, url=url)["type"] == kind


def test_missing_url_is_an_error_that_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in grammar.URL_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    configure(None)
    assert "--url" in failure("jobs", url=None)["next_step"]


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "kind", "fact"),
    [
        (("show", "mian"), "NotFoundError", ("jobs", "words/main")),
        (("show", "main", "7"), "NotFoundError", ("epochs", "1-2")),
        (("epochs", "../main"), "InputError", ("job", "../main")),
        (("rows", "main", "cuont", "x"), "NotFoundError", ("operators", "lines, count, keep, sum")),
        (("rows", "main", "count", "x"), "NotFoundError", ("tables", "counts")),
        (("stop", "mian"), "NotFoundError", ("jobs", "words/main")),
    ],
)
def test_an_unknown_name_is_one_error_that_names_those_there_are(
    command: Sequence[str], kind: str, fact: tuple[str, str]
) -> None:
    error = failure(*command)
    assert error["type"] == kind
    assert error["facts"][fact[0]] == fact[1]


@pytest.mark.parametrize(
    "command",
    [
        ("show",),
        ("show", "main", "x"),
        ("rows", "main", "count"),
        ("rows", "main", "a", "b", "--limit", "-1"),
        ("run", "a:b", "--spark", "server=local"),
        ("run", "a:b", "--spark", "from-mb=1"),
        ("verify", "main", "--spark", "from-mb=-1"),
        ("jobs", "--nope"),
        ("nope",),
    ],
)
def test_a_wrong_command_line_exits_with_2(command: Sequence[str]) -> None:
    result = run(*command)
    assert result.exit_code == 2
    assert "Usage" in result.stderr


# ---- reading writes nothing and loads little -----------------------------------------------------


def test_reading_commands_do_not_write(words: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(words.list())
    counting = Counting(words)
    monkeypatch.setattr(opening, "get_storage_provider", lambda url: counting)
    for command in READS:
        assert run(*command).exit_code == 0
    assert counting.calls.total() > 0
    assert not set(counting.calls) & set(MUTATING)
    assert list(words.list()) == before


# ---- run and stop --------------------------------------------------------------------------------

MODULE = """
from arroyo_dagster.state.storage.remote import open as opening
from tests.jobs import word_job
from arroyo_dagster.state.storage import MemoryStore
from arroyo_dagster.engine.pipeline import Pipeline
from arroyo_dagster.engine.pipeline_run import RunOutcome

PIPELINE = word_job(MemoryStore(), rows=12, sinks=0)
NUMBER = 3

def build() -> Pipeline:
    return word_job(MemoryStore(), rows=12, sinks=0, job="built")

def needs(one) -> Pipeline:
    return PIPELINE
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = f"cli_pipeline_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    yield name
    sys.path[:] = before
    sys.modules.pop(name, None)


def test_run_shows_every_epoch_and_goes_on_where_it_stopped(module: str) -> None:
    url = f"memory://{module}"
    first = run("run", f"{module}:PIPELINE", "--epochs", "1", url=url)
    assert first.exit_code == 0
    lines = first.stdout.splitlines()
    assert re.fullmatch(r"epoch 1: \d+ files, [\d.]+ k?B, \d+\.\d\d s", lines[0])
    assert lines[1:] == [
        "words/main: wrote 1 epoch, the newest is 1; the next run continues from there"
    ]
    rest = run("run", f"{module}:PIPELINE", url=url).stdout.splitlines()
    assert [line.partition(":")[0] for line in rest[:-1]] == ["epoch 2", "epoch 3"]
    assert rest[-1].endswith("the sources have ended")


def test_run_as_json_is_one_document_and_the_epochs_go_to_stderr(module: str) -> None:
    result = run("run", f"{module}.py:build", "--json", url=f"memory://{module}-2")
    assert json.loads(result.stdout) == {
        "job": "built",
        "pipeline": "words",
        "epochs": 3,
        "newest_epoch": 3,
        "exhausted": True,
        "retention_failures": 0,
        "overdue_epochs": 0,
    }
    assert len(result.stderr.splitlines()) == 3


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("PIPELINE", "MODULE:PIPELINE"),
        ("no_such_module_here:x", "no module 'no_such_module_here'"),
        ("no_such_file.py:x", "no such file"),
        ("{}:PIPELIN", "no 'PIPELIN' in it"),
        ("{}:NUMBER", "of type int, not a Pipeline"),
        ("{}:needs", "without arguments"),
    ],
)
def test_pipeline_that_cannot_be_found_is_one_error(module: str, target: str, says: str) -> None:
    url = f"memory://{module}-3"
    assert says in failure("run", target.format(module), url=url)["message"]
    assert failure("jobs", url=url)["type"] == "NotFoundError"


def test_a_module_that_fails_is_one_error_with_the_line(module: str, tmp_path: Path) -> None:
    (tmp_path / "broken_on_purpose.py").write_text("x = 1\ny = x / 0\n")
    error = failure("run", "broken_on_purpose:x")
    assert "ZeroDivisionError" in error["message"]
    assert error["facts"]["at"].endswith("broken_on_purpose.py:2")


def test_a_file_whose_name_is_taken_is_refused(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text(MODULE)
    error = failure("run", f"{tmp_path}/json.py:PIPELINE")
    assert error["next_step"] == "rename the file"


def test_spark_options_reach_the_runtime_on_spark(
    module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those of the command line come before the environment's, and these before the file's."""
    seen: dict[str, Any] = {}

    def on_spark(
        pipeline: Pipeline, store: Any, options: SparkOptions, *, on_epoch: Any
    ) -> RunOutcome:
        seen.update(options=options, on_epoch=on_epoch, pipeline=pipeline.name, url=store.url)
        return RunOutcome(epochs=0, newest=None, exhausted=False)

    monkeypatch.setattr("arroyo_dagster.spark.engine.pipeline.run_pipeline", on_spark)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "arroyo-state.toml").write_text(
        '[spark]\nmaster = "yarn"\nship = true\nfrom-mb = 3\nspark.a.b = "1"\nspark.c = "x y"\n'
    )
    monkeypatch.setenv("ARROYO_SPARK_MASTER", "local[3]")
    monkeypatch.setenv("ARROYO_SPARK_CONF", "spark.c='2 3' spark.d=4")
    options = ("--spark", "master=local[2]", "spark.d=5=6", "--follow")
    result = run("run", f"{module}:PIPELINE", *options, "--epochs", "4", "--interval", "1.5")
    assert result.exit_code == 0
    assert seen.pop("on_epoch")
    assert seen == {
        "pipeline": "words",
        "url": URL,
        "options": SparkOptions(
            spark=SparkSettings(
                master="local[2]",
                ship=True,
                conf={"spark.a.b": "1", "spark.c": "2 3", "spark.d": "5=6"},
            ),
            on_spark=print_choice,
            max_epochs=4,
            interval_seconds=1.5,
            follow=True,
        ),
    }


def test_stop_says_that_a_job_is_at_rest_and_asks_nothing() -> None:
    result = run("stop", "main")
    assert result.stdout == "words/main is at rest: it stopped with epoch 2.\n"
    assert output("stop", "main") == {
        "job": "main",
        "pipeline": "words",
        "at_rest": True,
        "generation": 1,
        "newest_epoch": 2,
    }
    store = MemoryStore("cli-words")
    assert store.head(word_job(store).paths.stop_request) is None


def test_stop_asks_the_newest_run_which_writes_one_more_epoch() -> None:
    store = MemoryStore("cli-stop")
    run_word_job(store, rows=12, sinks=0, max_epochs=1)
    pipeline = word_job(store, rows=12, sinks=0)
    ParquetBackend(store, pipeline.paths).start()
    result = run("stop", "main", url=store.url)
    assert result.exit_code == 0
    assert result.stdout.startswith("words/main: asked worker generation 2 to stop.")
    assert store.head(pipeline.paths.stop_request) is not None
    assert output("stop", "main", url=store.url)["at_rest"] is False


def test_arroyos_own_jobs_cannot_be_stopped_through_their_state() -> None:
    store = MemoryStore("cli-arroyo")
    store.put(StatePath("old/checkpoints/checkpoint-0000001/operator-x/table-t-000"), b"")
    error = failure("stop", "old", url=store.url)
    assert "Arroyo job" in error["message"]
