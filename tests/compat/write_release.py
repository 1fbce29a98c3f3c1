"""Write one directory with everything that a release stores, for later releases to read.

    python -m tests.compat.write_release DIRECTORY

It holds two managed jobs (both layouts) that were compacted, collected, pinned and rolled back, a
job of Arroyo's that was rewritten in place, the states of a dataflow, stored plans, and a catalogue
of all of it. `answers.json` holds what the release that wrote it says of them.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from arroyo_dagster.cli import main
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.model.layout import Layout
from arroyo_dagster.state.operations.catalog import epochs as history
from arroyo_dagster.state.operations.catalog import known_jobs
from arroyo_dagster.state.operations.catalog.jobs import find_job, list_jobs
from arroyo_dagster.state.operations.catalog.owner import claim_catalogue
from arroyo_dagster.state.operations.catalog.verdicts import StoredVerdict, write_verdict
from arroyo_dagster.state.planning.verify.findings import Verdict, error
from arroyo_dagster.state.runtime.in_process import run_pipeline
from arroyo_dagster.state.runtime.pipeline import Pipeline
from arroyo_dagster.state.storage import ObjectStore, open_store
from tests.compat.arroyo import unpack
from tests.jobs import word_job

ARROYO = "job_mSLGII6lDN"
ROWS = {"words/main": "main count counts", "words_legacy": "words_legacy count counts"}
DATAFLOW = """\
apiVersion: 0.5.0
meta:
  name: shop
  version: 0.1.0
  namespace: tests
config:
  converter: json
types:
  sale:
    type: object
    properties:
      item:
        type: string
      amount:
        type: u32
topics:
  sales:
    schema:
      value:
        type: sale
services:
  totals:
    sources:
      - type: topic
        id: sales
    states:
      sold:
        type: keyed-state
        properties:
          key:
            type: string
          value:
            type: u32
    partition:
      assign-key:
        run: |
          def key_of(sale):
              return sale.item
      update-state:
        run: |
          def add(sale):
              sold().increment(sale.amount)
"""
SALES = [{"item": item, "amount": amount} for amount in range(1, 9) for item in ("pen", "ink")]


def cli(*arguments: str) -> Any:
    """The JSON answer of a command, run in the working directory."""
    answer = CliRunner().invoke(main, [*arguments, "--json"], catch_exceptions=False)
    assert answer.exit_code == 0, (arguments, answer.output, answer.stderr)
    return json.loads(answer.stdout)


def words_job(store: ObjectStore, layout: Layout, rows: int) -> Pipeline:
    """The job of a layout, over so many rows."""
    pipeline = word_job(store, rows=rows, rows_per_epoch=4, parallelism=2, keep_epochs=None)
    pipeline.layout = layout
    if layout is Layout.LEGACY:
        pipeline.name = "words_legacy"
    return pipeline


def write(base: Path) -> None:
    """Write everything below an empty directory."""
    os.chdir(base)
    jobs, store = "jobs", open_store(str(base / "jobs"))
    for layout in Layout:
        run_pipeline(words_job(store, layout, rows=96), store)
    cli("compact", "run", "main", "--yes", "--policy", "full", "--url", jobs)
    for name in ("main", "words_legacy"):
        cli("pin", name, "16", "--reason", "before the release", "--url", jobs)
    collect = ("gc", "run", "expire", "--keep", "4", "--yes", "--url", jobs)
    cli(*collect, "main", "--quarantine")
    cli(*collect, "words_legacy")
    cli("rollback", "main", "23", "--yes", "--url", jobs)
    plan = ("gc", "plan", "expire", "main", "--keep", "2", "--out", "plan.json")
    cli(*plan, "--url", jobs)
    unpack("legacy", base / "arroyo")
    for other in (base / "arroyo").iterdir():
        if other.name != ARROYO:
            shutil.rmtree(other) if other.is_dir() else other.unlink()
    stopped = ("--assume", f"{ARROYO}=stopped", "--quiet", "0")
    cli("compact", "run", ARROYO, *stopped, "--yes", "--policy", "full", "--url", "arroyo")
    (base / "dataflow.yaml").write_text(DATAFLOW)
    (base / "sales.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in SALES))
    run = ("sdf", "run", "dataflow.yaml", "--source", "sales=jsonl:sales.jsonl", "--url", "states")
    assert CliRunner().invoke(main, run).exit_code == 0
    write_catalogue(base)
    (base / "answers.json").write_text(json.dumps(answers(), indent=1, sort_keys=True))


def write_catalogue(base: Path) -> None:
    """Write a catalogue of the managed jobs: epochs, verdicts, a job that was forgotten."""
    store, catalogue = open_store(str(base / "jobs")), open_store(str(base / "catalogue"))
    claim_catalogue(catalogue, "the jobs")
    now = time.time_ns() // 1000
    for paths in list_jobs(store):
        history.refresh(store, catalogue, paths)
        findings = (error("missing", "a/file", "it is not there", "bring it back"),)
        found = StoredVerdict(
            paths, "restorable", now, Epoch(24), Verdict(findings=findings, inspected=3)
        )
        write_verdict(catalogue, found)
    gone = find_job(store, "words_legacy")
    known_jobs.remember(catalogue, [(gone, 24)], now)
    known_jobs.forget(catalogue, gone, owner="the release", now_micros=now)


def answers() -> dict[str, Any]:
    """What this release says of all that lies in the working directory, without times."""
    said: dict[str, Any] = {"rows": {}, "epochs": {}, "pins": {}}
    for job, words in ROWS.items():
        rows = cli("rows", *words.split(), "--limit", "0", "--url", "jobs")
        said["rows"][job] = sorted(json.dumps(row, sort_keys=True) for row in rows)
        epochs = cli("epochs", job, "--url", "jobs")
        said["epochs"][job] = [[one["epoch"], one["state"], one["files"]] for one in epochs]
        said["pins"][job] = cli("pins", job, "--url", "jobs")
    said["states"] = cli("sdf", "show", "state", "dataflow.yaml", "totals/sold", "--url", "states")
    return said


if __name__ == "__main__":
    write(Path(sys.argv[1]).resolve())
