"""Exported tables as assets: each epoch once, with its schema; nothing to do leaves no event."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from arroyo_dagster.errors import InputError
from arroyo_dagster.orchestration import ArroyoOptions, build_arroyo_definitions
from arroyo_dagster.state import StatePath, TableExport, TargetOptions, open_state, open_store
from tests.fleets import Written, legacy_job, protocol_job
from tests.jobs import copy_into, listing, run_word_job, written_by_word_job
from tests.orchestration.results import failure, materialized
from tests.orchestration.test_store_options import of_yaml

JOB = "words/main"
KEY = dg.AssetKey(["arroyo", "words", "main", "exported_state", "rows"])


def export(folder: object, **changes: Any) -> TableExport:
    given = {"name": "rows", "jobs": JOB, "operator": "keep", "table": "rows"}
    return TableExport(**{**given, "target": str(folder), **changes})


@pytest.fixture
def prepared(deployed: Any) -> Any:
    """A deployment with a job of several epochs, and the keys of another job."""
    copy_into(deployed.store, written_by_word_job(rows=40, keep_epochs=None))
    return deployed


@pytest.mark.parametrize("form", ["parquet", "delta"])
def test_a_run_exports_the_newest_epoch_and_the_next_has_nothing_to_do(
    prepared: Any, tmp_path: Path, form: str
) -> None:
    target = f"file://{tmp_path}/{{pipeline}}-{{job}}"
    prepared.build(exports=[export(target, to=TargetOptions(format=form))])
    before = listing(prepared.store)
    (found,) = materialized(prepared.run("arroyo_export"))
    epoch = open_state(prepared.store).job(JOB).epoch()
    rows = epoch.table("keep", "rows").to_arrow()
    assert found.asset_key == KEY
    assert found.metadata["newest epoch"].value == epoch.number
    assert found.metadata["dagster/row_count"].value == rows.num_rows
    columns = found.metadata["dagster/column_schema"].schema.columns
    assert [(one.name, one.type) for one in columns] == [
        (field.name, str(field.type)) for field in rows.schema
    ]
    assert found.metadata["dagster/uri"].value == f"file://{tmp_path}/words-main"
    assert found.tags["dagster/data_version"].endswith(f":e{epoch.number}")
    if form == "delta":
        assert DeltaTable(f"{tmp_path}/words-main").to_pyarrow_table().num_rows == rows.num_rows
    assert materialized(prepared.run("arroyo_export")) == []
    assert listing(prepared.store) == before, "the state was only read"


def test_private_columns_are_masked_in_what_is_exported(prepared: Any, tmp_path: Path) -> None:
    prepared.build(exports=[export(tmp_path)], private_columns=["word"])
    (found,) = materialized(prepared.run("arroyo_export"))
    epoch = found.metadata["newest epoch"].value
    rows = pq.read_table(tmp_path / f"epoch={epoch}" / "part-00000.parquet")
    assert rows.num_rows
    assert all(word.startswith("private:") for word in rows["word"].to_pylist())


def test_an_asset_stands_below_each_pipeline_that_an_export_covers(
    prepared: Any, tmp_path: Path
) -> None:
    run_word_job(prepared.store, job="other")
    prepared.build(exports=[export(tmp_path, jobs="words/ma*"), export(tmp_path, name="all")])
    specs = {spec.key: spec for spec in prepared.defs.resolve_all_asset_specs()}
    keys = {"/".join(key.path) for key in specs if "exported_state" in key.path}
    below = "arroyo/words/main/exported_state"
    assert keys == {f"{below}/rows", f"{below}/all"}
    checkpoint = dg.AssetKey(["arroyo", "words", "main", "checkpoint"])
    assert [dep.asset_key for dep in specs[KEY].deps] == [checkpoint]
    prepared.build(exports=[export(tmp_path, jobs="shop/*")])
    assert "arroyo_export" not in [job.name for job in prepared.defs.resolve_all_job_defs()]


def test_a_pattern_makes_no_asset_of_a_pipeline_without_the_operator(
    prepared: Any, tmp_path: Path
) -> None:
    def exported(operator: str) -> set[str]:
        prepared.build(exports=[export(tmp_path, jobs="*", operator=operator)])
        keys = prepared.defs.resolve_all_asset_keys()
        return {key.path[1] for key in keys if "exported_state" in key.path}

    Written(prepared.store, protocol_job("other")).epochs(1)
    Written(prepared.store, legacy_job("old")).epochs(1)
    prepared.store.put(StatePath("new/main/current-generation.json"), b"{}")  # without an epoch
    assert exported("keep") == {"words", "new"}
    assert exported("mistyped") == {"words", "other", "old", "new"}


def test_an_export_of_an_operator_that_no_pipeline_has_fails_and_names_it(
    prepared: Any, tmp_path: Path
) -> None:
    prepared.build(exports=[export(tmp_path, jobs="*", operator="kep")])
    assert "keep" in failure(prepared.run("arroyo_export")).description


def test_an_export_that_fails_does_not_stop_the_others(prepared: Any, tmp_path: Path) -> None:
    wrong = export(tmp_path / "x", name="a_wrong", table="nothing")
    prepared.build(exports=[wrong, export(tmp_path / "y")])
    result = prepared.run("arroyo_export")
    assert not result.success
    assert "1 of 1 pipeline failed: words/main: " in failure(result).description
    assert "table" in failure(result).description
    (event,) = materialized(result)
    assert event.asset_key == KEY
    prepared.store.delete_many([one.path for one in prepared.store.list(JOB)])
    gone = prepared.run("arroyo_export")
    assert "there is no such job below the checkpoint URL" in failure(gone).description


def test_the_schedule_requests_the_pipelines_with_new_epochs_once(
    prepared: Any, tmp_path: Path
) -> None:
    prepared.build(exports=[export(tmp_path, jobs="*/main")])
    (request,) = prepared.due("arroyo_export_schedule").run_requests
    assert request.asset_selection == [KEY]
    (event,) = materialized(prepared.launch_due("arroyo_export_schedule"))
    assert event.asset_key == KEY
    assert "nothing due" in prepared.due("arroyo_export_schedule").skip_message


def test_what_cannot_be_an_export_is_refused(tmp_path: Path) -> None:
    for changes in ({"name": "a/b"}, {"epochs": "all"}, {"target": "{x}"}):
        with pytest.raises(InputError, match="not "):
            export(tmp_path, **changes)
    with pytest.raises(InputError, match="not a value of the option format"):
        TargetOptions(format="csv")
    twice = [export(tmp_path), export(tmp_path)]
    with pytest.raises(InputError, match="two exports have the same name"):
        build_arroyo_definitions("/does/not/exist", options=ArroyoOptions(exports=twice))


def test_the_component_builds_the_same_exports(tmp_path: Path) -> None:
    run_word_job(open_store(str(tmp_path)), rows=8, sinks=0)
    given = {
        "name": "rows",
        "jobs": "words/*",
        "operator": "count",
        "table": "counts",
        "target": "s3://lake/{pipeline}/counts",
        "format": "delta",
        "epochs": "every",
        "options": {"secret_access_key": {"env": "LAKE_SECRET"}},
    }
    advanced = {"exports": [given], "schedules": {"exports": "@daily"}}
    defs = of_yaml({"checkpoint_url": str(tmp_path), "advanced": advanced})
    (spec,) = (one for one in defs.resolve_all_asset_specs() if one.key == KEY)
    assert "`counts`" in (spec.description or "")
    assert spec.kinds >= {"arroyo", "deltalake"}
    schedule = defs.resolve_schedule_def("arroyo_export_schedule")
    assert schedule.cron_schedule == "@daily"
