"""Dataflows in Dagster: states as assets, told of by the sensor, checked, with their lineage."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from arroyo_dagster.dataflow.definition.definition import Dataflow
from arroyo_dagster.dataflow.definition.loading import load_with_packages
from arroyo_dagster.dataflow.runtime.service import build_dataflow
from arroyo_dagster.dataflow.topics.bindings import BindingsText, parse_binding
from arroyo_dagster.dataflow.topics.wiring import wire
from arroyo_dagster.engine import run_pipeline
from arroyo_dagster.orchestration import GcConfig, MaintenanceOptions
from arroyo_dagster.orchestration.dataflow.assets import (
    SdfOptions,
    observe_states,
    sdf_dataflow_assets,
)
from arroyo_dagster.orchestration.dataflow.graph import SdfGraph
from arroyo_dagster.state import Checkpoint
from tests.word_services import random_words, run_words, words_dataflow, words_services

FLOW = ("tests", "words")
COUNTS = dg.AssetKey(["sdf", *FLOW, "state", "count", "counts"])
SEEN = dg.AssetKey(["sdf", *FLOW, "state", "count", "last-seen"])
IN_WINDOW = dg.AssetKey(["sdf", *FLOW, "state", "windowed", "in-window"])


def service(name: str) -> dg.AssetKey:
    return dg.AssetKey(["sdf", *FLOW, "service", name])


def topic(name: str) -> dg.AssetKey:
    return dg.AssetKey(["sdf", *FLOW, "topic", name])


@pytest.fixture
def seen(deployed: Any) -> Any:
    deployed.build(dataflows=[words_dataflow()])
    return deployed


def materialise(deployed: Any, *keys: dg.AssetKey) -> Any:
    job = deployed.defs.resolve_job_def("sdf_tests_words")
    return job.execute_in_process(
        instance=deployed.instance, asset_selection=list(keys) or None, raise_on_error=False
    )


# ---- the graph -----------------------------------------------------------------------------------


def test_lineage_leads_from_topics_through_owners_and_states_to_readers(seen: Any) -> None:
    graph = seen.defs.resolve_asset_graph()
    parents = {key: graph.get(key).parent_keys for key in graph.get_all_asset_keys()}
    assert parents[service("count")] == {topic("words")}
    assert parents[COUNTS] == parents[SEEN] == {service("count")}
    assert parents[service("look-up")] == {topic("asked"), SEEN}
    assert parents[topic("answers")] == {service("look-up")}
    assert parents[topic("words")] == set()


# ---- looking -------------------------------------------------------------------------------------


def test_materialising_shows_states_and_an_unchanged_state_is_not_materialised(seen: Any) -> None:
    run_words(seen.store, random_words(120, 1))
    result = materialise(seen)
    assert result.success
    events = {event.asset_key: event for event in result.get_asset_materialization_events()}
    found = events[COUNTS].materialization.metadata
    assert found["dagster/row_count"].value == 9
    assert found["sdf/epoch"].value >= 2
    assert found["first rows"].value.records[0].data["_key"] == "w0"
    assert events[SEEN].materialization.metadata["sdf/bytes"].value > 0
    assert IN_WINDOW in events
    again = materialise(seen)
    assert again.success
    assert again.get_asset_materialization_events() == []
    assert len(again.get_asset_check_evaluations()) == 12


def test_samples_mask_private_columns(deployed: Any) -> None:
    private = ["counts._key", "last-seen.*"]
    deployed.build(dataflows=[words_dataflow()], private_columns=private)
    run_words(deployed.store, random_words(120, 1))
    events = materialise(deployed, COUNTS, SEEN).get_asset_materialization_events()
    samples = {
        one.asset_key: [row.data for row in metadata["first rows"].value.records]
        for one in events
        if (metadata := one.materialization.metadata)
    }
    assert len(samples[COUNTS]) == 9
    for rows in samples.values():
        assert all(str(row["_key"]).startswith("private:") for row in rows)
    assert sum(int(row["value"]) for row in samples[COUNTS]) == 120
    assert {(row["last"], row["n"]) for row in samples[SEEN]} == {("(private)", "(private)")}


def test_checks_pass_on_whole_states_and_name_a_file_that_is_gone(seen: Any) -> None:
    run_words(seen.store, random_words(60, 2))
    checks = materialise(seen).get_asset_check_evaluations()
    assert {one.check_name for one in checks if not one.passed} == set()
    (lost, *_) = [
        info.path
        for info in seen.store.list("tests.words/count")
        if "/table-counts-" in info.path and "operator-states" in info.path
    ]
    seen.store.delete_many([lost])
    seen.build(dataflows=[words_dataflow()])
    result = materialise(seen, SEEN)
    found = {one.check_name: one for one in result.get_asset_check_evaluations()}
    assert not found["restorable"].passed
    assert lost in (found["restorable"].description or "")


def test_a_state_whose_owner_was_killed_is_stale_and_one_at_rest_is_not(seen: Any) -> None:
    def stale() -> bool:
        checks = materialise(seen, COUNTS).get_asset_check_evaluations()
        return not next(one for one in checks if one.check_name == "not_stale").passed

    seen.build(dataflows=[words_dataflow()], sdf=SdfOptions(stale_after=timedelta(0)))
    (count, *_) = words_services(seen.store, random_words(60, 2), per_epoch=20)

    def die(checkpoint: Checkpoint) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_pipeline(count, seen.store, on_epoch=die)
    assert stale()
    run_pipeline(count, seen.store)
    assert not stale()


# ---- the sensor ----------------------------------------------------------------------------------


def test_the_sensor_tells_of_states_that_changed_with_the_epochs_of_their_owners(seen: Any) -> None:
    (count, *_) = words_services(seen.store, random_words(120, 1), per_epoch=60)
    run_pipeline(count, seen.store, max_epochs=1)
    first = seen.evaluate()
    keys = [event.asset_key for event in first.asset_events]
    assert {COUNTS, SEEN, service("count")} <= set(keys)
    assert "3 events of dataflows" in (first.skip_message or "")
    seen.keep(first)
    assert seen.evaluate().asset_events == []
    run_pipeline(count, seen.store)
    second = {event.asset_key: event for event in seen.evaluate().asset_events}
    assert second[COUNTS].metadata["sdf/epoch"].value > 1
    assert second[COUNTS].metadata["dagster/row_count"].value == 9


def test_a_state_that_cannot_be_read_does_not_keep_its_job_from_being_seen(seen: Any) -> None:
    (count, *_) = words_services(seen.store, random_words(60, 1))
    run_pipeline(count, seen.store)
    for info in list(seen.store.list("tests.words/count")):
        if "/table-counts-" in info.path:
            seen.store.put(info.path, b"PAR1 broken")
    seen.build()
    told = [event.asset_key.path for event in seen.evaluate().asset_events]
    assert ["arroyo", "tests--2ewords", "count", "checkpoint"] in told


# ---- beside the rest -----------------------------------------------------------------------------


def test_compaction_and_expiry_schedules_include_the_services(seen: Any) -> None:
    for rounds in range(1, 5):
        (count, *_) = words_services(seen.store, random_words(40 * rounds, 1), per_epoch=10)
        run_pipeline(count, seen.store)
    seen.build(maintenance=MaintenanceOptions(min_backlog=4, gc=GcConfig(keep_epochs=3)))
    for name, table in (("compaction", "compacted_state"), ("gc", "retained_epochs")):
        (request,) = seen.due(f"arroyo_{name}_schedule").run_requests
        key = dg.AssetKey(["arroyo", "tests--2ewords", "count", table])
        assert request.asset_selection == [key]


def test_names_with_dots_are_parts_of_keys_that_every_release_of_dagster_takes() -> None:
    dataflow = replace(words_dataflow(), namespace="my.tests", name="words.v2")
    graph = SdfGraph(dataflow, deployment="eu.west")
    above = ("sdf", "eu--2ewest", "my--2etests", "words--2ev2")
    for key in graph.reported_keys():
        assert tuple(key.path[:4]) == above
        assert not any("." in part for part in key.path)


def test_a_dataflow_with_imported_packages_has_the_states_that_they_bring(
    deployed: Any, tmp_path: Path
) -> None:
    file = Path(__file__).parents[2] / "examples" / "sdf" / "packages" / "dataflow.yaml"
    (tmp_path / "sentences.txt").write_text("to be or not\nto be\n")
    (tmp_path / "asked.txt").write_text("be\n")
    dataflow, packages = load_with_packages(file)
    assert isinstance(dataflow, Dataflow)
    given = BindingsText(
        sources={
            name: parse_binding(f"{name}=jsonl:{tmp_path}/{name}.txt", "source")
            for name in ("sentences", "asked")
        }
    )
    wired = wire(dataflow, given, deployed.store, packages=packages)
    for pipeline in build_dataflow(dataflow, deployed.store, bindings=wired.bindings):
        run_pipeline(pipeline, deployed.store)

    @sdf_dataflow_assets(file)
    def packaged(context: dg.AssetExecutionContext, arroyo_store: dg.ResourceParam[Any]):  # type: ignore[no-untyped-def]
        yield from observe_states(context, arroyo_store, file)

    deployed.build(dataflows=[file])
    key = dg.AssetKey(["sdf", "examples", "packaged", "state", "count-words", "word-count"])
    reader = dg.AssetKey(["sdf", "examples", "packaged", "service", "look-up"])
    assert key in deployed.defs.resolve_asset_graph().get(reader).parent_keys
    defs = dg.Definitions([packaged], resources={"arroyo_store": deployed.resource})
    for job in (
        deployed.defs.resolve_job_def("sdf_examples_packaged"),
        defs.resolve_implicit_global_asset_job_def(),
    ):
        deployed.instance.wipe_assets([key])
        result = job.execute_in_process(instance=deployed.instance)
        (event,) = result.get_asset_materialization_events()
        assert event.asset_key == key
        assert event.materialization.metadata["dagster/row_count"].value == 4
        checks = result.get_asset_check_evaluations()
        assert {one.check_name for one in checks if not one.passed} == set()
