"""What an earlier release stored stays readable: nobody's state is lost by an upgrade."""

from __future__ import annotations

import json
import os
import re
import shutil
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from arroyo_dagster.cli import main
from arroyo_dagster.state.codec.gc import decode_gc_plan
from arroyo_dagster.state.model.layout import Layout
from arroyo_dagster.state.operations.catalog import epochs as history
from arroyo_dagster.state.operations.catalog import known_jobs
from arroyo_dagster.state.operations.catalog.jobs import list_jobs
from arroyo_dagster.state.operations.catalog.owner import claim_catalogue
from arroyo_dagster.state.operations.catalog.verdicts import read_verdicts
from arroyo_dagster.state.operations.verify.job import verify_job
from arroyo_dagster.state.runtime.in_process import run_pipeline
from arroyo_dagster.state.storage import open_store
from tests.compat.arroyo import DATA, members
from tests.compat.write_release import ARROYO, SALES, answers, cli, words_job

RELEASES = sorted(path.name for path in DATA.glob("release-*.tar.gz"))


@pytest.fixture(params=RELEASES)
def release(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The directory that a release wrote, as the working directory."""
    with tarfile.open(DATA / request.param) as file:
        file.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_release_is_kept() -> None:
    assert RELEASES


def test_its_answers_are_the_same(release: Path) -> None:
    said = json.loads((release / "answers.json").read_text())
    # What an expiry keeps of a pinned epoch's parent had no state of its own then.
    kept = [one for one in said["epochs"]["words/main"] if one[1] == "partially collected"]
    assert len(kept) == 1
    kept[0][1] = "metadata only"
    said.pop("journal")  # not read any more
    assert json.loads(json.dumps(answers())) == said


@pytest.mark.parametrize("url", ["jobs", "arroyo", "states"])
def test_its_jobs_can_be_restored(release: Path, url: str) -> None:
    store = open_store(str(release / url))
    jobs = list_jobs(store)
    assert jobs
    for paths in jobs:
        verdict = verify_job(store, paths, level=4)
        assert verdict.passed, verdict


def test_its_journals_and_quarantines_are_refused_and_named(release: Path) -> None:
    def refused(*words: str) -> str:
        result = CliRunner().invoke(main, [*words, "main", "--yes", "--json", "--url", "jobs"])
        assert result.exit_code == 1
        found = json.loads(result.stdout or result.stderr)["error"]
        assert (found["type"], bool(found["next_step"])) == ("FormatError", True)
        return str(found["facts"]["path"]).rpartition("/_arroyo_dagster/")[2]

    before = cli("epochs", "main", "--url", "jobs")
    assert refused("gc", "run", "orphans") == "journal/head.json"
    assert refused("gc", "purge") == "journal/head.json"
    shutil.rmtree(release / "jobs/words/main/_arroyo_dagster/journal")
    for words in (("gc", "run", "orphans"), ("gc", "purge")):
        assert re.fullmatch("quarantine/[^/]+/index.json", refused(*words))
    assert cli("epochs", "main", "--url", "jobs") == before


def test_its_plan_is_read(release: Path) -> None:
    planned = json.loads((release / "plan.json").read_text())
    plan = decode_gc_plan((release / "plan.json").read_bytes(), "plan.json")
    assert (plan.digest, list(plan.epochs)) == (planned["digest"], planned["epochs"])


def test_its_rewrite_is_undone(release: Path) -> None:
    cli("compact", "undo", ARROYO, "--assume", f"{ARROYO}=stopped", "--yes", "--url", "arroyo")
    for one in members("legacy"):
        if one.data is not None and one.name.startswith(f"{ARROYO}/"):
            assert (release / "arroyo" / one.name).read_bytes() == one.data


@pytest.mark.parametrize("layout", Layout)
def test_its_jobs_go_on(release: Path, layout: Layout) -> None:
    store = open_store(str(release / "jobs"))
    pipeline = words_job(store, layout, rows=104)
    run_pipeline(pipeline, store)
    alone = open_store(str(release / "alone"))
    run_pipeline(words_job(alone, layout, rows=104), alone)
    rows = ("rows", pipeline.paths.root, "count", "counts", "--limit", "0", "--url")
    assert cli(*rows, "jobs") == cli(*rows, "alone")


def test_its_dataflow_goes_on(release: Path) -> None:
    with (release / "sales.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(one)}\n" for one in SALES)
    cli("sdf", "run", "dataflow.yaml", "--source", "sales=jsonl:sales.jsonl", "--url", "states")
    state = cli("sdf", "show", "state", "dataflow.yaml", "totals/sold", "--url", "states")
    assert {row["key"]: row["values"]["Value"] for row in state["rows"]} == {"ink": 72, "pen": 72}


def test_its_catalogue_is_read(release: Path) -> None:
    store, catalogue = open_store(str(release / "jobs")), open_store(str(release / "catalogue"))
    claim_catalogue(catalogue, "the jobs")
    for paths in list_jobs(store):
        rows = history.read_history(catalogue, paths).epochs
        assert max(row.epoch for row in rows) >= 24
        (verdict,) = read_verdicts(catalogue, "restorable", [paths]).values()
        assert (verdict.epoch, verdict.verdict.inspected) == (24, 3)
        assert [one.code for one in verdict.verdict.findings] == ["missing"]
    assert {paths.root for paths in known_jobs.forgotten(catalogue)} == {"words_legacy"}


def test_its_leases_do_not_last(release: Path) -> None:
    assert os.listdir(release / "jobs/words/main/_arroyo_dagster/leases")
    cli("pin", "main", "23", "--url", "jobs")
    cli("unpin", "main", "16", "--url", "jobs")
    assert [one["epoch"] for one in cli("pins", "main", "--url", "jobs")] == [23]
