"""The asset `progress`: positions, rates and lags of a job, as the command line prints them."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

from arroyo_dagster.state.operations.query.sql import SqlCatalog
from arroyo_dagster.state.operations.query.state import open_state
from tests.jobs import listing, written_by_word_job

JOB = "words/main"


def put_job(deployed: Any) -> None:
    written = written_by_word_job(rows=40, keep_epochs=None)
    for info in written.list():
        deployed.store.put(info.path, written.read(info.path))
    deployed.instance.add_dynamic_partitions("arroyo_jobs", [JOB])


def facts(result: Any) -> dict[str, Any]:
    assert result.success
    (event,) = result.asset_materializations_for_node("arroyo_job_progress")
    return dict(event.metadata)


def test_a_run_shows_what_the_command_line_prints(deployed: Any) -> None:
    put_job(deployed)
    before = listing(deployed.store)
    found = facts(deployed.run("arroyo_progress", JOB))
    job = open_state(deployed.store).job(JOB)
    catalog = SqlCatalog(job.catalog)
    sources, watermarks = (
        catalog.saved(name, JOB, {"epochs": "20"}).to_dicts() for name in ("offsets", "watermarks")
    )
    assert sources
    rows = [dict(one.data) for one in found["sources"].records]
    assert {(row["partition"], row["position"], row["state"]) for row in rows} == {
        (row["partition"], f"{row['position']:,}", row["status"]) for row in sources
    }
    assert [dict(one.data)["operator"] for one in found["watermarks"].records] == [
        row["operator"] for row in watermarks
    ]
    curve = unquote(found[f"rate of {sources[0]['operator']}"].md_str)
    assert re.search(r"[\d.,]+/s at last", curve)
    assert found["newest epoch"].value == job.epochs()[-1]
    assert listing(deployed.store) == before, "the state was only read"
