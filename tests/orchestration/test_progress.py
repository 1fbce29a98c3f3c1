"""The asset `progress`: positions, rates and lags of a job, as the command line prints them."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

import pytest

from arroyo_dagster.orchestration.catalog.progress import _rates
from arroyo_dagster.state.model.units import format_bytes
from arroyo_dagster.state.operations.query.advance import (
    PartitionAdvance,
    source_advance,
    watermark_advance,
)
from arroyo_dagster.state.operations.query.growth import table_growth
from arroyo_dagster.state.operations.query.positions import SourcePosition
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
    sources, watermarks = source_advance(job, 20), watermark_advance(job, 20)
    assert sources
    rows = [dict(one.data) for one in found["sources"].records]
    assert {(row["partition"], row["position"], row["state"]) for row in rows} == {
        (one.newest.partition, f"{one.newest.position:,}", one.status) for one in sources
    }
    assert [dict(one.data)["operator"] for one in found["watermarks"].records] == [
        one.operator for one in watermarks
    ]
    curve = unquote(found[f"rate of {sources[0].newest.operator}"].md_str)
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
    job = open_state(deployed.store).job(JOB)
    assert "at last" in unquote(epochs["watermark lag by epoch"].md_str)
    (rows,) = (one for one in table_growth(job, 100) if one.table == "rows")
    newest = format_bytes(rows.growth.sizes[-1][1])
    assert f"![{newest} at last" in unquote(operators["size of keep rows"].md_str)
    forecast = rows.growth.after_days(30)
    assert forecast is not None
    assert operators["size of keep rows in 30 days"].text == format_bytes(forecast)
    assert operators["largest subtask of keep rows"].text.endswith("× the average")


def test_the_rate_of_a_step_sums_partitions_whose_both_ends_are_known() -> None:
    def partition(*positions: int | None) -> PartitionAdvance:
        newest = SourcePosition(
            job="j",
            epoch=1,
            finished_at_micros=0,
            operator="o",
            table="t",
            connector="c",
            partition="p",
            position=positions[-1],
            finished=None,
            state="",
        )
        return PartitionAdvance(
            newest=newest,
            advanced_at_micros=None,
            rate=None,
            lag=None,
            positions=tuple((at * 2_000_000, one) for at, one in enumerate(positions)),
        )

    assert _rates([partition(0, 10, 30), partition(None, 5, 5)]) == pytest.approx([5.0, 10.0])
    assert _rates([partition(None, None)]) == []
