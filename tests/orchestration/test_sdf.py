"""Dataflows in Dagster: states as assets, told of by the sensor, checked, with their lineage."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from arroyo_dagster.dataflow.definition.definition import Dataflow
from arroyo_dagster.dataflow.definition.diagnostics import InvalidDefinition
from arroyo_dagster.dataflow.definition.loading import load_with_packages
from arroyo_dagster.dataflow.runtime.service import build_dataflow
from arroyo_dagster.dataflow.topics.bindings import BindingsText, parse_binding
from arroyo_dagster.dataflow.topics.wiring import wire
from arroyo_dagster.orchestration.dataflow.assets import (
    SdfOptions,
    load_graph,
    observe_states,
    sdf_dataflow_assets,
)
from arroyo_dagster.orchestration.dataflow.graph import SdfGraph
from arroyo_dagster.orchestration.definitions import build_arroyo_definitions
from arroyo_dagster.orchestration.gc.assets import GcConfig
from arroyo_dagster.orchestration.maintenance import MaintenanceOptions
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.runtime.in_process import run_pipeline
from tests.word_services import WORDS, random_words, run_words, words_dataflow, words_services

FLOW = "tests.words"
COUNTS = dg.AssetKey(["sdf", FLOW, "state", "count", "counts"])
SEEN = dg.AssetKey(["sdf", FLOW, "state", "count", "last-seen"])
IN_WINDOW = dg.AssetKey(["sdf", FLOW, "state", "windowed", "in-window"])


def service(name: str) -> dg.AssetKey:
    return dg.AssetKey(["sdf", FLOW, "service", name])


def topic(name: str) -> dg.AssetKey:
    return dg.AssetKey(["sdf", FLOW, "topic", name])


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


def test_definitions_with_dataflows_load_as_a_code_location(seen: Any) -> None:
    dg.Definitions.validate_loadable(seen.defs)
    assert seen.defs.get_repository_def().has_job("sdf_tests_words")


def test_lineage_leads_from_topics_through_owners_and_states_to_readers(seen: Any) -> None:
    graph = seen.defs.resolve_asset_graph()
    parents = {key: graph.get(key).parent_keys for key in graph.get_all_asset_keys()}
    assert parents[service("count")] == {topic("words")}
    assert parents[COUNTS] == parents[SEEN] == {service("count")}
    assert parents[service("look-up")] == {topic("asked"), SEEN}
    assert parents[topic("answers")] == {service("look-up")}
    assert parents[topic("words")] == set()


def test_services_that_pass_records_round_in_a_circle_still_make_a_graph() -> None:
    circle = (
        WORDS.replace(
            "sources: [{type: topic, id: words}]\n    states",
            (
                "sources: [{type: topic, id: words}]\n    sinks: [{type: topic, id: asked}]\n"
                "    transforms: [{operator: map, uses: 'm:f'}]\n    states"
            ),
            1,
        )
        .replace("id: answers}]", "id: words}]")
        .replace("answers: {", "unused: {")
    )
    dataflow = words_dataflow(
        circle.replace(
            "asked: {schema: {value: {type: string}}}", "asked: {schema: {value: {type: top}}}"
        )
    )
    defs = build_arroyo_definitions("memory://circle", dataflows=[dataflow])
    defs.resolve_asset_graph().toposorted_asset_keys


def test_a_state_shows_its_columns_its_ttl_and_its_sql_name() -> None:
    text = WORDS.replace("last: {type: i64}}}", "last: {type: i64}}, ttl: 90s}")
    graph = SdfGraph(words_dataflow(text))
    (state,) = [one for one in graph.owned if one.name == "last-seen"]
    spec = graph.state_spec(state)
    columns = spec.metadata["dagster/column_schema"].columns
    assert [(one.name, one.type) for one in columns] == [
        ("_key", "string"),
        ("last", "i64"),
        ("n", "u32"),
    ]
    assert spec.metadata["sdf/ttl_seconds"] == 90
    assert "`last_seen`" in (spec.description or "")


def test_a_dataflow_with_mistakes_is_refused_with_all_of_them(tmp_path: Path) -> None:
    file = tmp_path / "dataflow.yaml"
    file.write_text(WORDS.replace("count.last-seen", "count.nothing").replace("u32", "u33"))
    with pytest.raises(InvalidDefinition) as found:
        load_graph(file)
    assert len(found.value.diagnostics) > 1


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


def test_states_without_epochs_are_not_materialised_and_say_so(seen: Any) -> None:
    result = materialise(seen)
    assert result.get_asset_materialization_events() == []
    failed = {one.check_name for one in result.get_asset_check_evaluations() if not one.passed}
    assert failed <= {"restorable", "not_stale"}


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


def test_the_sensor_tells_of_states_that_changed_with_the_epochs_of_their_owners(
    seen: Any,
) -> None:
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
    told = [event.asset_key.path[0] for event in seen.evaluate().asset_events]
    assert "arroyo" in told


# ---- beside the rest -----------------------------------------------------------------------------


def test_compaction_and_expiry_schedules_include_the_services(seen: Any) -> None:
    for rounds in range(1, 5):
        (count, *_) = words_services(seen.store, random_words(40 * rounds, 1), per_epoch=10)
        run_pipeline(count, seen.store)
    seen.build(
        dataflows=[words_dataflow()],
        maintenance=MaintenanceOptions(min_backlog=4, gc=GcConfig(keep_epochs=3)),
    )
    seen.keep(seen.evaluate())
    for name in ("compaction", "gc"):
        schedule = seen.defs.resolve_schedule_def(f"arroyo_{name}_schedule")
        with (
            dg.build_schedule_context(
                instance=seen.instance,
                scheduled_execution_time=datetime(2026, 1, 1, 5, 17, tzinfo=UTC),
                repository_def=seen.defs.get_repository_def(),
                resources={"arroyo_store": seen.resource},
            ) as context,
            dg.partition_loading_context(dynamic_partitions_store=seen.instance),
        ):
            (request,) = schedule.evaluate_tick(context).run_requests or ()
        config = request.run_config["ops"][f"arroyo_{name}_fleet_op"]["config"]
        assert config["jobs"] == ["tests.words/count"], name


def test_a_function_of_ones_own_may_make_the_states(deployed: Any) -> None:
    @sdf_dataflow_assets(words_dataflow(), name="mine")
    def mine(context, arroyo_store):  # type: ignore[no-untyped-def]
        yield from observe_states(context, arroyo_store, words_dataflow())

    run_words(deployed.store, random_words(60, 3))
    defs = dg.Definitions([mine], resources={"arroyo_store": deployed.resource})
    result = defs.resolve_implicit_global_asset_job_def().execute_in_process(
        instance=deployed.instance
    )
    assert {event.asset_key for event in result.get_asset_materialization_events()} == {
        COUNTS,
        SEEN,
        IN_WINDOW,
    }


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
    key = dg.AssetKey(["sdf", "examples.packaged", "state", "count-words", "word-count"])
    reader = dg.AssetKey(["sdf", "examples.packaged", "service", "look-up"])
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
