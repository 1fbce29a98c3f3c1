"""`arroyo-state evolve`: plans, executes, undoes and refuses as documented."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import Layout, MemoryStore, cli, configure
from tests.documentation import blocks
from tests.evolved_jobs import COUNT, LEAST, SHIFTED, SUM, Sql, loaded, sql_job
from tests.internals import parse_overrides
from tests.jobs import listing
from tests.surgery_jobs import SurgeryJob, surgery_job

SAID = ("--assume", "job_b=stopped")


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[tuple[SurgeryJob, SurgeryJob]]:
    store = MemoryStore(f"cli-evolve-{tmp_path.name}")
    source = sql_job(Layout.LEGACY, "job_a", store=store)
    now = Sql(ids=SHIFTED, window=(LEAST, COUNT, SUM))
    yield source, sql_job(Layout.LEGACY, "job_b", now, base=7, epochs=2, store=store)
    configure(None)


def run(store: MemoryStore, *args: str) -> Result:
    command = ["evolve", *args, "--url", store.url]
    return CliRunner().invoke(cli.main, command, catch_exceptions=False)


def suggested(job: SurgeryJob) -> list[str]:
    """The options that the refusal of an evolve of changed SQL prints."""
    refused = run(job.store, "job_a", "job_b", *SAID, "--yes")
    assert refused.exit_code == 1
    text = " ".join(refused.stderr.split())
    assert "the operators do not match for certain" in text
    assert "equal keys (30), equal retention (10)" in text
    return shlex.split(text.partition("if this is right, add ")[2].partition(" (in a file")[0])


def test_a_job_is_planned_evolved_and_put_back(jobs: tuple[SurgeryJob, SurgeryJob]) -> None:
    _, job = jobs
    was = loaded(job.store, job.paths)
    words = ["job_a", "job_b", *SAID, *suggested(job)]
    assert "tumbling_4=tumbling_17" in words
    shown = run(job.store, *words)
    assert shown.exit_code == 0, shown.stderr
    for text in (
        "filled: min(v)[value]",
        "takes the state of",
        "you named them",
        "a sink's state means nothing to another job",
        "never seen: tumbling_17.t: in windows that are open",
        "add --yes to execute",
    ):
        assert text in shown.stdout
    digest = shown.stdout.partition("plan ")[2].split()[0]
    assert loaded(job.store, job.paths) == was
    done = run(job.store, *words, "--yes", "--approve", digest, "--quiet", "0")
    assert "evolve done at epoch 2" in done.stdout
    window = loaded(job.store, job.paths)["tumbling_17", "t"]
    assert [(one["k"], one["min(v)[value]"]) for one in window][:2] == [("k0", None), ("k0", None)]
    undo = ["undo", "job_b", *SAID, "--yes", "--url", job.store.url]
    assert CliRunner().invoke(cli.main, undo).exit_code == 0
    assert loaded(job.store, job.paths) == was


def test_the_plan_is_one_json_document(jobs: tuple[SurgeryJob, SurgeryJob]) -> None:
    _, job = jobs
    words = ["job_a", "job_b", *SAID, "--json", *suggested(job)]
    plan = json.loads(run(job.store, *words).stdout)["plan"]
    assert plan["operation"] == "evolve"
    (window,) = (one for one in plan["tables"] if one["operator"] == "tumbling_17")
    assert (window["action"], window["source"]) == ("filled", "tumbling_4")
    (match,) = (one for one in plan["matches"] if one["operator"] == "tumbling_17")
    assert match["source"] == "tumbling_4"
    assert "operators were matched without the graphs of the pipelines" in " ".join(plan["unknown"])


def test_overrides_of_file_and_options(jobs: tuple[SurgeryJob, SurgeryJob], tmp_path: Path) -> None:
    _, job = jobs
    file = tmp_path / "changes.yaml"
    file.write_text("drop: [tumbling_4, SessionWindow<4s>]\nmap: {join_11: join_21}\n")
    rest = [one for one in suggested(job) if not one.startswith(("tumbling", "join_11", "Session"))]
    pairs = [word for one in rest if one != "--map" for word in ("--map", one)]
    words = ("job_a", "job_b", *SAID, "--overrides", str(file), *pairs)
    shown = run(job.store, *words, "--start-empty", "SessionWindow<4s>").stdout
    assert "dropped, as asked" in shown
    assert "it starts without state, as asked" in shown
    assert "you named them" in shown
    wrong = run(job.store, "job_a", "job_b", *SAID, "--map", "tumbling_4")
    assert (wrong.exit_code, "expected OLD=NEW" in wrong.stderr) == (2, True)


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("map: [", 1, "no YAML: line 1"),
        ("maps: {}", 1, "the overrides have no 'maps'"),
        ("map: {tumbling_4: join_21}", 1, "cannot take the state of tumbling_4"),
    ],
)
def test_overrides_that_cannot_be_read_are_refused(
    jobs: tuple[SurgeryJob, SurgeryJob], tmp_path: Path, text: str, code: int, message: str
) -> None:
    _, job = jobs
    file = tmp_path / "changes.yaml"
    file.write_text(text)
    was = listing(job.store)
    found = run(job.store, "job_a", "job_b", *SAID, "--overrides", str(file))
    assert (found.exit_code, message in found.stderr) == (code, True), found.stderr
    missing = run(job.store, "job_a", "job_b", *SAID, "--overrides", str(tmp_path / "none"))
    assert "the overrides cannot be read" in missing.stderr
    assert listing(job.store) == was


def test_the_documented_commands_show_their_plan(tmp_path: Path) -> None:
    """Those of docs/change-sql.md."""
    store = MemoryStore(f"cli-evolve-docs-{tmp_path.name}")
    surgery_job(Layout.LEGACY, store=store, epochs=4, name="job_a")
    surgery_job(Layout.LEGACY, store=store, epochs=2, name="job_b")
    file = tmp_path / "changes.yaml"
    file.write_text("start_empty: [join_4]\n")
    lines = "".join(blocks("docs/change-sql.md", "sh")).splitlines()
    commands = [line for line in lines if line.startswith("arroyo-state evolve")]
    assert len(commands) == 4
    for line in commands:
        words = line.partition("#")[0].replace("JOB", "job_b").replace("SOURCE", "job_a")
        words = words.replace("changes.yaml", str(file))
        shown = CliRunner().invoke(cli.main, [*shlex.split(words)[1:], "--url", store.url])
        assert shown.exit_code == 0, shown.stderr
        assert "add --yes to execute" in shown.stdout
    configure(None)


def test_the_documented_overrides_are_read() -> None:
    from arroyo_dagster.dataflow.definition.diagnostics import Diagnostics
    from arroyo_dagster.dataflow.definition.yaml_tree import read_tree

    (text,) = [one for one in blocks("docs/change-sql.md", "yaml") if "same_columns" in one]
    tree = read_tree(text, Diagnostics())
    assert tree is not None
    found = parse_overrides(tree.plain())
    assert found.matches == (("join_17", "join_11"),)
    assert [one.value for one in found.fills] == ['"web"']
    assert [(one.source, one.number) for one in found.accumulators] == [(2, 3)]
