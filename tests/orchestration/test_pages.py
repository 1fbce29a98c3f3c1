"""What Dagster's pages show: commands, code, links, and the first line of a failed run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import dagster as dg
import pytest

from arroyo_dagster.cli import main
from arroyo_dagster.orchestration.dataflow.assets import load_graph
from arroyo_dagster.orchestration.definitions import build_arroyo_definitions
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.translator import TABLES, ArroyoTableProps
from arroyo_dagster.orchestration.translator import DagsterArroyoTranslator as Translator
from arroyo_dagster.state.metadata.backend import ParquetBackend
from tests.fleets import Written, legacy_job, protocol_job
from tests.jobs import run_word_job

WORDS = Path("examples/sdf/words/dataflow.yaml")
ONE = protocol_job("pl 1", "job_1")
CODE = "dagster/code_references"
ARROYO = "http://arroyo:5115"


# ---- descriptions --------------------------------------------------------------------------------


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
    spec = Translator().get_asset_spec(ArroyoTableProps(table))
    for words in commands_of(spec.description):
        parsed(words)


def test_a_state_s_description_has_the_commands_that_show_it() -> None:
    specs = {spec.key.path[-1]: spec for spec in load_graph(WORDS).state_specs()}
    stats = commands_of(specs["word-stats"].description)
    assert [words[:4] for words in stats] == [
        ["arroyo-state", "sdf", "show", "dataflow.yaml"],
        ["arroyo-state", "sdf", "sql", "dataflow.yaml"],
    ]
    assert len(commands_of(specs["hits"].description)) == 1
    for words in stats:
        parsed([str(WORDS) if word == "dataflow.yaml" else word for word in words])


# ---- code references -----------------------------------------------------------------------------


def reference_of(spec: dg.AssetSpec) -> dg.LocalFileCodeReference:
    (found,) = spec.metadata[CODE].code_references
    return found  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("error::dagster.BetaWarning")
def test_a_state_refers_to_its_lines_of_the_dataflow() -> None:
    graph = load_graph(WORDS)
    lines = WORDS.read_text().splitlines()
    for spec in graph.state_specs():
        found = reference_of(spec)
        assert Path(found.file_path) == WORDS.absolute()
        assert found.line_number is not None
        assert lines[found.line_number - 2].strip().startswith(f"{spec.key.path[-1]}:")
    assert {reference_of(spec).line_number for spec in graph.outer_specs()} == {None}


@pytest.mark.filterwarnings("ignore::dagster.BetaWarning")
@pytest.mark.parametrize("deployment", [None, "blue"])
def test_code_references_of_dagster_lead_to_the_assets_functions(
    tmp_path: Path, deployment: str | None
) -> None:
    defs = build_arroyo_definitions(str(tmp_path), dataflows=[WORDS], deployment=deployment)
    found = dg.with_source_code_references(list(defs.assets or ()))  # type: ignore[arg-type]
    linked = dg.link_code_references_to_git(
        found,
        git_url="https://github.com/example/streaming",
        git_branch="main",
        file_path_mapping=dg.AnchorBasedFilePathMapping(
            local_file_anchor=Path(__file__).parents[2], file_anchor_path_in_repository=""
        ),
    )
    urls = {
        spec.key.path[-1]: [one.url for one in spec.metadata[CODE].code_references]
        for asset in linked
        if isinstance(asset, dg.AssetsDefinition)
        for spec in asset.specs
    }
    assert any("/arroyo_dagster/orchestration/catalog/" in url for url in urls["epoch_catalog"])
    assert any("/arroyo_dagster/orchestration/gc/" in url for url in urls["orphans"])
    assert any(re.search(r"/examples/sdf/words/dataflow\.yaml#L\d+$", url) for url in urls["hits"])


# ---- links ---------------------------------------------------------------------------------------


def test_an_arroyo_job_links_to_its_pipeline(deployed: Any) -> None:
    for paths in (ONE, legacy_job("old")):
        Written(deployed.store, paths).epochs(1)
    run_word_job(deployed.store, sinks=0, max_epochs=1)
    assert not any("Arroyo" in event.metadata for event in deployed.evaluate().asset_events)
    deployed.resource = type(deployed.resource)(
        **{**dict(deployed.resource), "arroyo_api_url": f"{ARROYO}/api/v1/"}
    )
    deployed.build()
    events = {event.partition: event.metadata for event in deployed.evaluate().asset_events}
    assert events[ONE.root]["Arroyo"] == dg.MetadataValue.url(f"{ARROYO}/pipelines/pl%201")
    assert "Arroyo" not in events["old"]  # its paths do not name the pipeline
    assert "Arroyo" not in events["words/main"]  # not a job of Arroyo's


def test_a_managed_job_is_told_from_the_store(deployed: Any) -> None:
    Written(deployed.store, ONE).epochs(1)
    run_word_job(deployed.store, sinks=0, max_epochs=1)
    store = ArroyoStateStore(checkpoint_url=deployed.store.url, arroyo_api_url=ARROYO)
    assert store.arroyo_page(ONE).url == f"{ARROYO}/pipelines/pl%201"
    assert store.arroyo_page(protocol_job("words")) is None


# ---- failed runs and ticks -----------------------------------------------------------------------


def first_line(result: Any) -> str:
    (event,) = [event for event in result.all_events if event.is_step_failure]
    return str(event.step_failure_data.user_failure_data.description).splitlines()[0]


def test_a_failed_check_fails_its_run_with_the_job_and_the_object(deployed: Any) -> None:
    Written(deployed.store, ONE).epochs(3)
    deployed.tick()
    path = ParquetBackend(deployed.store, ONE).load().paths[0]
    deployed.store.delete_many([path])
    result = deployed.run("arroyo_refresh", ONE.root)
    assert not result.success
    line = first_line(result)
    assert line.startswith(f"{ONE.root}: checks files_exist, restorable failed: {path}: ")
    verdicts = {one.check_name: one.passed for one in result.get_asset_check_evaluations()}
    assert verdicts == {"files_exist": False, "restorable": False}
    assert len(result.get_asset_materialization_events()) == 2


def test_a_tick_with_news_is_logged_and_a_quiet_one_is_not(
    deployed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    Written(deployed.store, ONE).epochs(1)
    deployed.tick()
    assert "1 new epoch of 1 of 1 job; appeared: pl 1/job_1; " in capsys.readouterr().err
    deployed.tick()
    assert "new epoch" not in capsys.readouterr().err
