"""The assets and checks, run in this process on memory stores."""

from __future__ import annotations

import re
from typing import Any

import dagster as dg
import pytest

from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.operations.catalog.epochs import read_history
from arroyo_dagster.state.storage import open_store
from tests.compat.arroyo import ARCHIVES, unpack
from tests.fleets import Written, legacy_job, protocol_job
from tests.jobs import run_word_job
from tests.orchestration.results import checks, passed
from tests.shares import all_but

ONE = protocol_job("words")


def materialised(result: Any) -> dict[str, dict[str, Any]]:
    """The metadata of a run's events, by table."""
    return {
        event.asset_key.path[-1]: dict(event.materialization.metadata)
        for event in result.get_asset_materialization_events()
    }


# ---- the catalogue -------------------------------------------------------------------------------


def test_the_catalogue_is_written_shown_and_checked(deployed: Any) -> None:
    run_word_job(deployed.store, sinks=0, keep_epochs=None)
    deployed.tick()
    result = deployed.run("arroyo_refresh", "words/main")
    assert result.success
    found = materialised(result)
    assert found.keys() == {"epoch_catalog", "operator_metadata"}
    epochs, operators = found["epoch_catalog"], found["operator_metadata"]
    assert epochs["dagster/partition_row_count"].value == 6
    assert epochs["newest epoch"].value == "6, of worker generation 1"
    assert re.fullmatch(r"[\d.]+ kB \([\d,]+ bytes\) in \d+ files, \d+ rows", epochs["size"].value)
    assert epochs["epochs"].value == "6 kept, 6 new in the catalogue"
    assert epochs["size by epoch"].value.startswith("![")
    assert len(epochs["newest epochs"].records) == 6
    assert epochs["newest epochs"].records[0].data["epoch"] == 6
    assert operators["tables"].value == "5 tables with files, of 4 operators"
    tables = [record.data["table"] for record in operators["tables of the newest epoch"].records]
    assert sorted(tables) == ["counts", "offsets", "rows", "times", "watermark"]
    columns = {column.name for column in operators["dagster/column_schema"].schema.columns}
    assert {"operator", "table", "path", "rows", "size_bytes"} <= columns
    assert passed(result) == {"files_exist": True, "restorable": True}
    assert len(read_history(deployed.catalogue, ONE).epochs) == 6


def test_the_data_version_is_that_of_the_newest_epoch(deployed: Any) -> None:
    Written(deployed.store, ONE).epochs(3)
    deployed.tick()
    (first, second) = deployed.run("arroyo_refresh", ONE.root).get_asset_materialization_events()
    for event in (first, second):
        assert event.materialization.tags["dagster/data_version"] == "g1:e3"


def test_a_run_over_many_jobs_shows_each_by_itself(deployed: Any) -> None:
    for at in range(3):
        Written(deployed.store, protocol_job(f"p{at}")).epochs(at + 1)
    deployed.tick()
    tags = {
        "dagster/asset_partition_range_start": "p0/main",
        "dagster/asset_partition_range_end": "p2/main",
    }
    result = deployed.run("arroyo_refresh", tags=tags)
    assert result.success
    events = [
        e for e in result.get_asset_materialization_events() if "epoch" in e.asset_key.path[-1]
    ]
    shown = {e.partition: e.materialization.metadata["newest epoch"].value[0] for e in events}
    assert shown == {"p0/main": "1", "p1/main": "2", "p2/main": "3"}
    assert all(passed(result).values())


@pytest.mark.parametrize("archive", all_but(ARCHIVES, ["legacy"]))
def test_jobs_of_a_real_arroyo_are_seen_and_checked(deployed: Any, archive: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    deployed.wrap(lambda _: open_store(unpack(archive, tmp_path)))
    for job in list(deployed.tick())[:2]:
        result = deployed.run("arroyo_refresh", job)
        assert result.success
        assert passed(result) == {"files_exist": True, "restorable": True}
    assert deployed.run("arroyo_fleet").success


def test_a_vanished_job_fails_its_refresh_and_its_epochs_count_as_expired(deployed: Any) -> None:
    job = Written(deployed.store, ONE)
    job.epochs(2)
    Written(deployed.store, legacy_job("old")).epochs(1)
    deployed.tick()
    deployed.run("arroyo_refresh", ONE.root)
    job.vanish()
    result = deployed.run("arroyo_refresh", ONE.root)
    assert not result.success
    line = failure_of(result, "arroyo_catalog")
    assert line.startswith(f"{ONE.root}: there is no such job below the checkpoint URL; nothing")
    assert "last_epoch=2" in line
    assert passed(result) == {"files_exist": False, "restorable": False}
    assert [row.present for row in read_history(deployed.catalogue, ONE).epochs] == [False, False]


# ---- checks --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "files", "whole"),
    [("missing", False, False), ("broken", True, False), ("unreadable", False, False)],
)
def test_a_damaged_epoch_fails_the_run_and_stops_what_follows(
    deployed: Any, damage: str, files: bool, whole: bool
) -> None:
    job = Written(deployed.store, ONE)
    job.epochs(3)
    deployed.tick()
    path = ParquetBackend(deployed.store, ONE).load().paths[-1]
    if damage == "missing":
        deployed.store.delete_many([path])
    elif damage == "broken":
        deployed.store.put(path, b"PAR1 no more")
    else:
        job.damage(3)
    result = deployed.run("arroyo_refresh", ONE.root)
    assert passed(result) == {"files_exist": files, "restorable": whole}
    found = checks(result)["restorable"]
    assert found.blocking
    assert str(found.description).startswith(str(path) if damage != "unreadable" else "words/main/")
    assert "Next: " in str(found.description)


def test_a_blocking_check_keeps_what_depends_on_it_from_running(deployed: Any) -> None:
    Written(deployed.store, ONE, files=False).epochs(1)
    deployed.tick()
    ran: list[str] = []

    @dg.asset(deps=[["arroyo", "operator_metadata"]])
    def after() -> None:
        ran.append("after")

    keys = [["arroyo", "epoch_catalog"], ["arroyo", "operator_metadata"], ["after"]]
    job = dg.define_asset_job("both", selection=dg.AssetSelection.assets(*keys))
    deployed.defs = dg.Definitions.merge(deployed.defs, dg.Definitions(assets=[after], jobs=[job]))
    result = deployed.run("both", ONE.root)
    assert not result.success
    assert ran == []


# ---- the fleet -----------------------------------------------------------------------------------


def failure_of(result: Any, step: str) -> str:
    events = [e for e in result.all_events if e.is_step_failure and e.step_key == step]
    return str(events[0].event_specific_data.user_failure_data.description).splitlines()[0]


def test_jobs_that_fail_do_not_keep_others_from_being_catalogued(deployed: Any) -> None:
    for at in range(2):
        Written(deployed.store, protocol_job(f"p{at}")).epochs(1)
    deployed.tick()
    deployed.catalogue.put(StatePath("epoch_catalog/protocol/p0/main.parquet"), b"no parquet")
    tags = {
        "dagster/asset_partition_range_start": "p0/main",
        "dagster/asset_partition_range_end": "p1/main",
    }
    result = deployed.run("arroyo_refresh", tags=tags)
    line = failure_of(result, "arroyo_catalog")
    assert line.startswith("p0/main: epoch_catalog/protocol/p0/main.parquet: a data file")
    assert "; 1 of 2 jobs were not catalogued, the others were" in line
    assert len(read_history(deployed.catalogue, protocol_job("p1")).epochs) == 1
