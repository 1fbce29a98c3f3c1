"""The asset `progress`: positions, rates and lags of a job, as the command line prints them."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

from arroyo_dagster.state.model.units import format_bytes
from arroyo_dagster.state.operations.query.sql import SqlCatalog
from arroyo_dagster.state.operations.query.state import open_state
from tests.fleets import Written, protocol_job
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


def test_several_jobs_of_one_run_have_an_event_each(deployed: Any) -> None:
    put_job(deployed)
    other = protocol_job("other")
    Written(deployed.store, other).epochs(3)
    deployed.instance.add_dynamic_partitions("arroyo_jobs", [str(other.root)])
    found = deployed.run(
        "arroyo_progress",
        tags={
            "dagster/asset_partition_range_start": JOB,
            "dagster/asset_partition_range_end": str(other.root),
        },
    )
    assert found.success
    events = found.asset_materializations_for_node("arroyo_job_progress")
    assert {event.partition: event.metadata["newest epoch"].value for event in events} == {
        name: open_state(deployed.store).job(name).epochs()[-1] for name in (JOB, str(other.root))
    }


def test_the_catalogue_has_curves_of_lags_and_of_the_largest_tables(deployed: Any) -> None:
    put_job(deployed)
    result = deployed.run("arroyo_refresh", JOB)
    epochs, operators = (
        dict(next(one for one in events if one.asset_key.path[-1] == name).metadata)
        for events in [result.asset_materializations_for_node("arroyo_catalog")]
        for name in ("epoch_catalog", "operator_metadata")
    )
    assert "at last" in unquote(epochs["watermark lag by epoch"].md_str)
    grown = SqlCatalog(open_state(deployed.store)).saved("growth", JOB, {"epochs": "100"})
    (rows,) = (row for row in grown.to_dicts() if row["table"] == "rows")
    newest = format_bytes(rows["size_bytes"])
    assert f"![{newest} at last" in unquote(operators["size of keep rows"].md_str)
    forecast = format_bytes(rows["forecast_bytes"])
    assert operators["size of keep rows in 30 days"].text == forecast
    assert operators["largest subtask of keep rows"].text.endswith("× the average")
