"""The definitions load, start nothing, touch nothing, and can be named otherwise; the
documented limits of an instance hold for them."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import dagster as dg
import pytest
import yaml
from dagster._utils.tags import TagConcurrencyLimitsCounter
from hypothesis import example, given, settings
from hypothesis import strategies as st

from arroyo_dagster.cli import main
from arroyo_dagster.errors import ArroyoStateError, ConflictError, InputError, StorageError
from arroyo_dagster.orchestration import (
    ArroyoAssetProps,
    ArroyoOptions,
    DagsterArroyoTranslator,
    Lineage,
    MaintenanceWindow,
    PipelineList,
    SparkSessionResource,
    as_failure,
    build_arroyo_definitions,
    failures,
)
from arroyo_dagster.orchestration import DagsterArroyoTranslator as Translator
from arroyo_dagster.orchestration.pipelines.listing import with_keys
from arroyo_dagster.orchestration.pipelines.model import LineageEndpoint, ListedPipeline
from arroyo_dagster.orchestration.requests import MAINTENANCE_TAG
from arroyo_dagster.orchestration.translator import EVERY_PIPELINE, TABLES
from arroyo_dagster.spark.session import OpenedSession
from arroyo_dagster.spark.settings import SparkChoice
from tests.documentation import PROJECT
from tests.orchestration.results import keys

# ---- names ---------------------------------------------------------------------------------------


class Prefixed(DagsterArroyoTranslator):
    def get_asset_spec(self, props: ArroyoAssetProps) -> dg.AssetSpec:
        spec = super().get_asset_spec(props)
        named = spec.replace_attributes(key=spec.key.with_prefix("prod"), owners=["team:streams"])
        return named.merge_attributes(tags={"tier": "one"})


def pipeline(root: str, key: tuple[str, ...] | None = None, **fields: Any) -> ListedPipeline:
    """A managed pipeline."""
    return ListedPipeline(root, key or tuple(root.split("/")), **{"managed": True, **fields})


def listed(*pipelines: ListedPipeline) -> PipelineList:
    return PipelineList("memory://x", pipelines, {one.root: one.key for one in pipelines})


def built(*pipelines: ListedPipeline, **given: Any) -> dg.Definitions:
    """The definitions of these pipelines, with all assets."""
    given = {"mode": "maintain", "pipelines": listed(*pipelines), **given}
    defs = build_arroyo_definitions("memory://x", **given)
    dg.Definitions.validate_loadable(defs)
    return defs


def test_a_translator_renames_every_asset_and_what_depends_on_it() -> None:
    defs = built(pipeline("words/main"), options=ArroyoOptions(translator=Prefixed()))
    assert all(key.startswith("prod/arroyo/") for key in keys(defs))
    graph = defs.resolve_asset_graph()
    compacted = graph.get(dg.AssetKey(["prod", "arroyo", "words", "main", "compacted_state"]))
    assert {key.path[0] for key in compacted.parent_keys} == {"prod"}
    assert compacted.owners == ["team:streams"]
    assert compacted.tags["tier"] == "one"


NAMES = st.one_of(
    st.text(alphabet="ab-_. /ä", min_size=1, max_size=6),
    st.text(min_size=1, max_size=255),
    st.sampled_from(["a-b", "a_b", "a.b", "ü", "a/b", "/", "x" * 255, "🚰" * 60]),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(NAMES, min_size=1, max_size=5, unique=True))
@example(["a-b", "a_b", "a.b", "a b", "a/b"])
def test_pipelines_of_any_names_load_each_with_its_own_outputs_and_checks(names: list[str]) -> None:
    given = {
        f"pl_{number}/job": name.encode(errors="replace").decode()
        for number, name in enumerate(names)
    }
    found = with_keys({}, given)
    defs = built(*(pipeline(root, found[root], name=given[root]) for root in given))
    repository = defs.get_repository_def()
    tables = ("checkpoint", "compacted_state", "retained_epochs")
    every = {dg.AssetKey(["arroyo", *key, table]) for key in found.values() for table in tables}
    assert len(every) == 3 * len(given)
    assert {*defs.resolve_all_asset_keys()} == {*every, dg.AssetKey(["arroyo", "fleet"])}
    outputs = [
        (asset.op.name, name)
        for asset in repository.asset_graph.assets_defs
        if asset.is_executable
        for name in asset.keys_by_output_name
    ]
    assert len(outputs) == len({*outputs}) == 2 * len(given) + 1
    checks = {key for key in repository.asset_graph.asset_check_keys if key.name != EVERY_PIPELINE}
    expected = {key for key in every if key.path[-1] == "checkpoint"}
    assert {(key.asset_key, key.name) for key in checks} == {
        (key, name) for key in expected for name in ("restorable", "healthy")
    }


def test_two_deployments_merge() -> None:
    ends = {
        "sources": (KAFKA,),
        "sinks": (LineageEndpoint(("lake", "blue"), "sink_x_1", "filesystem"),),
    }
    blue = built(pipeline("words/main", **ends), deployment="blue-1")
    merged = dg.Definitions.merge(blue, built(pipeline("words/main", sources=(KAFKA,))))
    dg.Definitions.validate_loadable(merged)
    assert {
        "arroyo/words/main/checkpoint",
        "arroyo/blue-1/words/main/checkpoint",
        "lake/blue",
    } <= keys(merged)
    assert merged.resolve_job_def("arroyo_blue_1_verify")


def test_pipelines_of_one_key_in_two_deployments_are_refused_as_the_page_says() -> None:
    page = (PROJECT / "docs/dagster-configuration.md").read_text()
    documented = re.search(r"- `(Received .*)`: the pipeline `(.*)` without .*`(.*)` of", page)
    assert documented is not None
    message, root, other = documented.groups()
    blue = built(pipeline(other), deployment="blue")
    with pytest.raises(dg.DagsterInvalidDefinitionError, match=message) as refused:
        dg.Definitions.validate_loadable(dg.Definitions.merge(built(pipeline(root)), blue))
    jobs = re.findall(r"'arroyo/job': '([^']*)'", str(refused.value))
    assert {*jobs} == {root, other}
    for remedy in ({"deployment": "green"}, {"options": ArroyoOptions(translator=Prefixed())}):
        merged = dg.Definitions.merge(built(pipeline(root), **remedy), blue)
        dg.Definitions.validate_loadable(merged)


# ---- lineage -------------------------------------------------------------------------------------

KAFKA = LineageEndpoint(("kafka", "orders"), "source_orders_0", "kafka")
LAKE = LineageEndpoint(("lake", "orders"), "sink_orders_1", "filesystem")


@dg.asset(key=["lake", "orders"])
def orders() -> None:
    """An asset of the user's own, with the key of a sink."""


def test_an_asset_of_the_key_of_a_sink_is_refused_until_the_key_is_left_to_its_owner() -> None:
    mine = dg.Definitions(assets=[orders])
    with pytest.raises(dg.DagsterInvalidDefinitionError, match=r"lake.*orders"):
        dg.Definitions.validate_loadable(
            dg.Definitions.merge(built(pipeline("a/main", sinks=(LAKE,))), mine)
        )
    options = ArroyoOptions(lineage=Lineage(sinks={"lake/orders": None}))
    defs = dg.Definitions.merge(built(pipeline("a/main", sinks=(LAKE,)), options=options), mine)
    dg.Definitions.validate_loadable(defs)


def test_a_source_is_named_on_the_page_of_its_reader_and_is_the_users_to_define() -> None:
    mine = dg.AssetSpec(["kafka", "orders"], group_name="mine")
    ours = built(pipeline("a/main", sources=(KAFKA,)), pipeline("b/main", sources=(KAFKA,)))
    defs = dg.Definitions.merge(dg.Definitions(assets=[mine]), ours)
    dg.Definitions.validate_loadable(defs)
    graph = defs.resolve_asset_graph()
    assert graph.get(mine.key).group_name == "mine"
    for name in "ab":
        checkpoint = graph.get(dg.AssetKey(["arroyo", name, "main", "checkpoint"]))
        assert checkpoint.parent_keys == {mine.key}
        assert checkpoint.metadata["arroyo/reads"] == "kafka/orders"


def test_a_sink_stands_in_the_group_of_its_only_writer() -> None:
    topic = LineageEndpoint(("kafka", "paid"), "sink_paid_1", "kafka")
    graph = built(
        pipeline("a/main", sinks=(LAKE, topic)), pipeline("b/main", sinks=(LAKE,))
    ).resolve_asset_graph()
    assert graph.get(dg.AssetKey(["kafka", "paid"])).group_name == "arroyo_a_main"
    assert graph.get(dg.AssetKey(["lake", "orders"])).group_name == "arroyo_sinks"


def test_a_sink_with_two_writers_is_one_asset_that_depends_on_both() -> None:
    defs = built(
        pipeline("a/main", sources=(KAFKA,), sinks=(LAKE,)), pipeline("b/main", sinks=(LAKE,))
    )
    graph = defs.resolve_asset_graph()
    parents = graph.get(dg.AssetKey(["lake", "orders"])).parent_keys
    assert {key.to_user_string() for key in parents} == {
        "arroyo/a/main/checkpoint",
        "arroyo/b/main/checkpoint",
    }
    checkpoint = graph.get(dg.AssetKey(["arroyo", "a", "main", "checkpoint"]))
    assert {key.to_user_string() for key in checkpoint.parent_keys} == {"kafka/orders"}


def test_a_ring_of_pipelines_is_evaluated_by_automation_conditions() -> None:
    topics = {name: LineageEndpoint(("kafka", name), f"source_{name}_0", "kafka") for name in "ab"}
    defs = built(
        pipeline("one/main", sources=(topics["a"],), sinks=(topics["b"],)),
        pipeline("two/main", sources=(topics["b"],), sinks=(topics["a"],)),
    )

    @dg.asset(
        deps=[["arroyo", "one", "main", "checkpoint"], ["arroyo", "two", "main", "checkpoint"]],
        automation_condition=dg.AutomationCondition.eager(),
    )
    def report() -> None:
        pass

    merged = dg.Definitions.merge(defs, dg.Definitions(assets=[report]))
    with dg.DagsterInstance.ephemeral() as instance:
        result = dg.evaluate_automation_conditions(defs=merged, instance=instance)
        for name in ("one", "two"):
            key = dg.AssetKey(["arroyo", name, "main", "checkpoint"])
            instance.report_runless_asset_event(dg.AssetMaterialization(key))
        result = dg.evaluate_automation_conditions(
            defs=merged, instance=instance, cursor=result.cursor
        )
        assert result.total_requested == 1
    left_out = [
        spec.metadata["arroyo/edges_that_close_a_cycle"]
        for spec in defs.resolve_all_asset_specs()
        if "arroyo/edges_that_close_a_cycle" in spec.metadata
    ]
    assert left_out == ["kafka/a"]


# ---- failures ------------------------------------------------------------------------------------


def test_an_error_becomes_a_failure_that_begins_with_its_job() -> None:
    error = ConflictError("somebody else won", job="words/main", next_step="look again")
    with pytest.raises(dg.Failure) as caught, as_failure():
        raise error
    assert caught.value.description == "words/main: somebody else won. Next: look again"
    assert caught.value.allow_retries is False
    assert caught.value.metadata["arroyo/job"].value == "words/main"
    assert caught.value.__cause__ is error


@pytest.mark.usefixtures("retries_at_once")
@pytest.mark.parametrize(("error", "retries"), [(StorageError("down"), 2), (InputError("no"), 0)])
def test_only_what_may_heal_by_itself_is_retried(error: ArroyoStateError, retries: int) -> None:
    @dg.op
    def failing() -> None:
        with as_failure():
            raise error

    @dg.job
    def one() -> None:
        failing()

    result = one.execute_in_process(raise_on_error=False)
    assert sum(event.is_step_up_for_retry for event in result.all_events) == retries
    (failed,) = [event for event in result.all_events if event.is_step_failure]
    assert failed.step_failure_data.user_failure_data is not None
    assert failed.step_failure_data.user_failure_data.description == str(error)


def test_no_next_step_of_maintenance_names_an_option_of_the_command_line() -> None:
    from arroyo_dagster.state.planning.compaction import rewrite as rewriting
    from arroyo_dagster.state.planning.gc import dead_jobs
    from arroyo_dagster.state.planning.gc import safety_checks as permission
    from arroyo_dagster.state.planning.restore import reads as query

    for module in (dead_jobs, permission, rewriting, query):
        text = failures.name_dagster_fields(inspect.getsource(module))
        assert not re.findall(r"--[a-z][a-z-]+", text), module.__name__


# ---- resources -----------------------------------------------------------------------------------


def test_everything_that_looks_gets_a_write_protected_store(deployed: Any) -> None:
    from arroyo_dagster.state import StatePath

    with pytest.raises(InputError, match="write-protected"):
        deployed.resource.reading().put(StatePath("a"), b"")
    deployed.resource.writable().put(StatePath("a"), b"")


def test_only_a_session_that_was_started_here_is_stopped() -> None:
    class Session:
        stopped = False

        def stop(self) -> None:
            self.stopped = True

    context = dg.build_init_resource_context()
    for managed, stop, stopped in ((True, True, True), (False, True, False), (True, False, False)):
        session, resource = Session(), SparkSessionResource(stop_on_teardown=stop)
        with resource.yield_for_execution(context):
            resource._opened = OpenedSession(session, SparkChoice("local[1]", "a test"), managed)
        assert session.stopped is stopped


def test_dots_in_names_are_no_trouble_for_dagster_1_12(monkeypatch: pytest.MonkeyPatch) -> None:
    """It derives names of inputs from asset keys, as this replacement does."""
    from dagster._core.definitions.decorators import decorator_assets_definition_builder as builder

    def of_1_12(key: dg.AssetKey) -> str:
        return "_".join(key.path).replace("-", "_")

    monkeypatch.setattr(builder, "stringify_asset_key_to_input_name", of_1_12)
    key = with_keys({}, {"a.b/main": None})["a.b/main"]
    built(pipeline("a.b/main", key), deployment="eu.1")


DEPLOYMENT = Path(__file__).parents[2] / "docs" / "operate" / "deployment.md"
BLOCK = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", DEPLOYMENT.read_text(), re.DOTALL)[0])
LIMITS = BLOCK["concurrency"]["runs"]["tag_concurrency_limits"]
CHANGING = ("compaction", "gc", "windows")
OTHERS = ("verify", "fleet")


def tags_of(deployment: str, *jobs: str) -> list[Mapping[str, str]]:
    """The tags of runs of these jobs of a deployment."""
    pipeline = ListedPipeline("p/main", ("p", "main"), managed=True)
    listed = PipelineList("memory://limits", (pipeline,), {pipeline.root: pipeline.key})
    window = MaintenanceWindow(jobs=["payments/job"], between="02:00-04:00")
    defs = build_arroyo_definitions(
        "memory://limits",
        pipelines=listed,
        mode="maintain",
        deployment=deployment,
        options=ArroyoOptions(window=window),
    )
    return [defs.resolve_job_def(f"arroyo_{deployment}_{name}").run_tags for name in jobs]


def dequeued(limits: list[Any], queued: list[Mapping[str, str]]) -> list[int]:
    """Which of the queued runs Dagster starts together."""
    counter, found = TagConcurrencyLimitsCounter(limits, []), []
    for number, tags in enumerate(queued):
        run = dg.DagsterRun(job_name="j", tags=dict(tags))
        if not counter.is_blocked(run):
            counter.update_counters_with_launched_item(run)
            found.append(number)
    return found


def test_deployments_stay_within_the_limit_of_the_instance_for_runs_that_change_state() -> None:
    queued = [tags for name in ("a", "b") for tags in tags_of(name, *CHANGING)]
    [limit] = [one["limit"] for one in LIMITS if one["key"] == MAINTENANCE_TAG]
    assert len(dequeued(LIMITS, queued)) == limit == 4
    assert {tags[MAINTENANCE_TAG] for tags in queued} == {"a", "b"}
    looking = tags_of("a", *OTHERS)
    assert len(dequeued(LIMITS, [*queued, *looking])) == limit + len(looking)


def test_no_run_is_retried() -> None:
    for tags in tags_of("a", *CHANGING, *OTHERS):
        assert tags["dagster/max_retries"] == "0"


def commands_of(description: str | None) -> list[list[str]]:
    (block,) = re.findall(r"\n\n```sh\n(.*?)\n```$", description or "", re.DOTALL)
    return [shlex.split(line) for line in block.splitlines()]


def parsed(words: list[str]) -> None:
    """Let click parse a command, as far as its options and its number of arguments."""
    command: click.Command = main
    context = click.Context(main, info_name=words.pop(0))
    while isinstance(command, click.Group):
        name = words.pop(0)
        found = command.get_command(context, name)
        assert found is not None, name
        command, context = found, click.Context(found, parent=context, info_name=name)
    words = ["1" if word == "EPOCH" else word for word in words]
    command.parse_args(context, words)


@pytest.mark.parametrize("table", TABLES)
def test_the_commands_in_an_asset_s_description_exist(table: str) -> None:
    pipeline = ListedPipeline(root="words/main", key=("words", "main"))
    spec = Translator().get_asset_spec(ArroyoAssetProps(table=table, pipeline=pipeline))
    for words in commands_of(spec.description):
        parsed(words)
