"""Of an earlier release: checkpoints of managed jobs stay readable, and a record of its own whose
form this code does not read is refused by whatever deletes, and named."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from arroyo_dagster.cli import main
from arroyo_dagster.state import (
    ObjectStore,
    Pipeline,
    list_jobs,
    open_store,
    run_pipeline,
    verify_job,
)
from arroyo_dagster.state.model.layout import Layout
from tests.compat.arroyo import DATA
from tests.jobs import word_job

ARROYO = "job_mSLGII6lDN"
SALES = [{"item": item, "amount": amount} for amount in range(1, 9) for item in ("pen", "ink")]
UNKNOWN = {
    "pins": ("jobs", "words/main", "retained.json"),
    "pins of the legacy layout": ("jobs", "words_legacy", "retained.json"),
    "journal": ("jobs", "words/main", "journal/head.json"),
    "quarantine": ("jobs", "words/main", "quarantine/*/index.json"),
    "rewrite": ("arroyo", ARROYO, "rewrites/*.json"),
}
"""Kinds of records, with the URL and the job of one, and its place below the job's own records."""


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that the release wrote, as the working directory."""
    with tarfile.open(DATA / "release-0.1.0.tar.gz") as file:
        file.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cli(*arguments: str) -> Any:
    """The JSON answer of a command, run in the working directory."""
    answer = CliRunner().invoke(main, [*arguments, "--json"], catch_exceptions=False)
    assert answer.exit_code == 0, (arguments, answer.output, answer.stderr)
    return json.loads(answer.stdout)


def words_job(store: ObjectStore, layout: Layout) -> Pipeline:
    pipeline = word_job(store, rows=104, rows_per_epoch=4, parallelism=2, keep_epochs=None)
    pipeline.layout = layout
    if layout is Layout.LEGACY:
        pipeline.name = "words_legacy"
    return pipeline


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["jobs", "arroyo", "states"])
def test_its_jobs_can_be_restored(release: Path, url: str) -> None:
    store = open_store(str(release / url))
    jobs = list_jobs(store)
    assert jobs
    for paths in jobs:
        verdict = verify_job(store, paths, level=4)
        assert verdict.passed, verdict


@pytest.mark.parametrize("layout", Layout)
def test_its_jobs_go_on(release: Path, layout: Layout) -> None:
    store = open_store(str(release / "jobs"))
    pipeline = words_job(store, layout)
    run_pipeline(pipeline, store)
    alone = open_store(str(release / "alone"))
    run_pipeline(words_job(alone, layout), alone)
    rows = ("rows", pipeline.paths.root, "count", "counts", "--limit", "0", "--url")
    assert cli(*rows, "jobs") == cli(*rows, "alone")


def test_its_dataflow_goes_on(release: Path) -> None:
    with (release / "sales.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(sale)}\n" for sale in SALES)
    cli("sdf", "run", "dataflow.yaml", "--source", "sales=jsonl:sales.jsonl", "--url", "states")
    state = cli("sdf", "show", "dataflow.yaml", "totals/sold", "--url", "states")
    assert {row["key"]: row["values"]["Value"] for row in state["rows"]} == {"ink": 72, "pen": 72}


# ---- our own records -----------------------------------------------------------------------------


@pytest.mark.parametrize("work", ["expire", "orphans"])
@pytest.mark.parametrize("kind", UNKNOWN)
def test_gc_refuses_and_names_a_record_of_unknown_form(release: Path, kind: str, work: str) -> None:
    url, job, place = UNKNOWN[kind]
    (record,) = (release / url / job / "_arroyo_dagster").glob(place)
    make_unknown(record)
    for other in ("journal", "quarantine"):  # of the release, in a form that is refused by itself
        if not place.startswith(other):
            shutil.rmtree(release / url / job / "_arroyo_dagster" / other, ignore_errors=True)
    before = objects(release / url)
    keep = ("--keep", "3") if work == "expire" else ()
    run = ("gc", "run", work, job, *keep, "--yes", "--url", url)
    assume = ("--assume", f"{job}=stopped") if url == "arroyo" else ()
    refused = CliRunner().invoke(main, [*run, *assume])
    assert refused.exit_code == 1
    assert str(record.relative_to(release / url)) in refused.stderr
    assert objects(release / url) == before


def test_a_plan_of_unknown_form_is_refused_and_named(release: Path) -> None:
    make_unknown(release / "plan.json")
    before = objects(release / "jobs")
    run = ("gc", "run", "expire", "main", "--plan", "plan.json", "--yes", "--url", "jobs")
    refused = CliRunner().invoke(main, run)
    assert refused.exit_code == 1
    assert "plan.json" in refused.stderr
    assert objects(release / "jobs") == before


def make_unknown(record: Path) -> None:
    fields = json.loads(record.read_text())
    record.write_text(json.dumps({**fields, "version": 99}))


def objects(root: Path) -> dict[str, bytes]:
    """All objects but leases, which a refused command takes and gives back."""
    files = [path for path in root.rglob("*") if path.is_file() and path.parent.name != "leases"]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}
