"""Of an earlier release: checkpoints of managed jobs stay readable. `test_unknown_records.py` has
the records that are not."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from arroyo_dagster.cli import main
from arroyo_dagster.engine import Pipeline, run_pipeline
from arroyo_dagster.state import Layout, ObjectStore, list_jobs, open_store, verify_job
from tests.compat.arroyo import DATA
from tests.jobs import word_job

MAINTENANCE = ("leases", "writers", "windows", "journal", "quarantine", "changes")
SALES = [{"item": item, "amount": amount} for amount in range(1, 9) for item in ("pen", "ink")]


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that the release wrote, as the working directory."""
    with tarfile.open(DATA / "release-0.1.0.tar.gz") as file:
        file.extractall(tmp_path, filter="data")
    # As upgrade.md says: nothing of maintenance is left.
    for records in tmp_path.glob("**/_arroyo_dagster"):
        for path in (*map(records.joinpath, MAINTENANCE), *records.glob("*.json")):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
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


# ---- plans ---------------------------------------------------------------------------------------


def test_a_plan_of_unknown_form_is_refused_and_named(release: Path) -> None:
    plan = release / "plan.json"
    plan.write_text(json.dumps({**json.loads(plan.read_text()), "version": 99}))
    run = ("gc", "run", "expire", "main", "--plan", "plan.json", "--yes", "--url", "jobs")
    before = objects(release / "jobs")
    refused = CliRunner().invoke(main, run)
    assert refused.exit_code == 1
    assert "plan.json" in refused.stderr
    assert objects(release / "jobs") == before


def objects(root: Path) -> dict[str, bytes]:
    """All objects but leases, which a refused command takes and gives back."""
    files = [path for path in root.rglob("*") if path.is_file() and path.parent.name != "leases"]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}
