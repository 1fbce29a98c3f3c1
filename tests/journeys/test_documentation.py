"""The pages of docs/ and the README: every command and code on them runs."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog.sql import SqlCatalog

from arroyo_dagster import CheckpointState, cli, open_state, open_store, run_pipeline
from arroyo_dagster.state import MemoryStore
from arroyo_dagster.state.metadata.backend import ProtocolBackend
from tests.commands import leaf_commands
from tests.documentation import PAGES, PROJECT, blocks, first_program
from tests.fleets import Written, legacy_job
from tests.formats import iso_micros
from tests.jobs import run_word_job

INDEX = "docs/README.md"
GUIDE = "docs/operate/README.md"
ELSEWHERE = {
    "docs/change-sql.md": "tests/unit/cli/test_evolve.py",
    "docs/edit-state.md": "tests/unit/cli/test_surgery.py",
    "docs/sdf-changes.md": "tests/journeys/test_sdf_changes.py",
    "docs/sdf.md": "tests/journeys/test_sdf_documented.py",
    "docs/spark.md": "tests/spark/test_documented.py",
}
"""Pages whose commands need more than a job: the test that runs them."""
OF_ARROYO = re.compile("--assume|--arroyo-api")
"""Commands on a job of Arroyo's, run by tests/unit/cli/test_rewrite.py."""
OTHER_PROGRAMS = ("make ", "export ", "pip ", "dg ")
"""Programs that no test runs, as they set up a machine or need a package index; `dg` is run by
tests/orchestration/test_component.py."""
NAMES = {"JOB": "words/main", "OPERATOR": "count", "TABLE": "counts"}


def _commands(block: str) -> list[str]:
    return [line for line in block.splitlines() if line.startswith("arroyo-state ")]


def _runnable(page: str) -> Iterator[tuple[str, str]]:
    for block in blocks(page, "sh"):
        if any(not OF_ARROYO.search(line) for line in _commands(block)):
            yield page, block


RUNNABLE = [one for page in PAGES if page not in ELSEWHERE for one in _runnable(page)]


def _words(command: str) -> list[str]:
    program, *words = shlex.split(command, comments=True)
    assert program == "arroyo-state"
    return words


def _run(command: str, folder: Path, url: str) -> Result:
    """Run a command in this process: a new one for each would take a second longer."""
    env = {"ARROYO__CHECKPOINT_URL": url}
    with contextlib.chdir(folder):
        return CliRunner().invoke(cli.main, _words(command), env=env, catch_exceptions=False)


@pytest.fixture(scope="module")
def twelve_epochs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job with epochs to expire, to merge and to go back to."""
    folder = tmp_path_factory.mktemp("words")
    run_word_job(open_store(f"file://{folder}"), rows=24, rows_per_epoch=2, keep_epochs=None)
    return folder


@pytest.fixture
def place(twelve_epochs: Path, tmp_path: Path) -> Iterator[Path]:
    """A folder with the program of docs/checkpoints.md, a copy of that job below `state`, and
    listings of it.
    """
    shutil.copytree(twelve_epochs, tmp_path / "state")
    lines = [
        f"{info.path},{info.size_bytes},{iso_micros(info.modified_micros)}"
        for info in open_store(f"file://{tmp_path}/state").list()
    ]
    (tmp_path / "listing.csv").write_text("\n".join(["path,size,time", *lines, ""]))
    lines = ["Key,Size,LastModifiedDate,ETag", *(f"{line}," for line in lines), ""]
    (tmp_path / "objects.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    with first_program(tmp_path):
        yield tmp_path


# ---- commands ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "block"), RUNNABLE, ids=lambda text: text.split("\n")[0][-40:])
def test_the_commands_of_a_block_run(page: str, block: str, place: Path) -> None:
    for line in _commands(block):
        if OF_ARROYO.search(line):
            continue
        command = line.replace("file:///tmp", f"file://{place}")
        for word, value in NAMES.items():
            command = re.sub(rf"\b{word}\b", value, command)
        answer = _run(command, place, f"file://{place}/state")
        assert answer.exit_code == 0, f"{page}: {line}\n{answer.stderr}"
        assert answer.stdout


def test_every_line_of_every_block_is_run_by_a_test() -> None:
    lines = [line for page in PAGES for block in blocks(page, "sh") for line in block.splitlines()]
    ours = [line for line in lines if line.startswith("arroyo-state ")]
    assert len(ours) >= 50
    for page in PAGES:
        for block in blocks(page, "sh") if page not in ELSEWHERE else ():
            for line in block.splitlines():
                known = line.startswith(("arroyo-state ", *OTHER_PROGRAMS))
                assert known, f"{page}: {line}"
                assert page == "docs/compaction.md" or not OF_ARROYO.search(line)


@pytest.mark.parametrize(("page", "test"), ELSEWHERE.items())
def test_the_other_pages_have_a_test_of_their_own(page: str, test: str) -> None:
    assert blocks(page, "sh")
    assert Path(page).name in (PROJECT / test).read_text()


def test_the_first_operator_runs_from_a_shell_and_prints_its_totals(place: Path) -> None:
    run, rows = _commands(blocks("docs/checkpoints.md", "sh")[0])
    for command in (run, f"{rows} --json"):
        words = _words(command.replace("file:///tmp", f"file://{place}"))
        answer = subprocess.run(
            [sys.executable, "-m", "arroyo_dagster.cli", *words],
            cwd=place,
            capture_output=True,
            text=True,
            check=False,
        )
        assert answer.returncode == 0, answer.stderr
    assert {"key": "ada", "value": 300} in json.loads(answer.stdout)


def test_orders_are_read_from_and_written_to_delta_and_iceberg(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, sources, sink = (
        block.replace("/tmp/", f"{place}/") for block in blocks("docs/checkpoints.md", "python")
    )
    found: dict[str, Any] = {}
    exec(program, found)
    write_deltalake(f"{place}/shop-orders", found["orders"])
    catalog = SqlCatalog(
        "shop", uri=f"sqlite:///{place}/shop-catalog.db", warehouse=f"file://{place}/warehouse"
    )
    catalog.create_namespace("shop")
    catalog.create_table("shop.orders", found["orders"].schema).append(found["orders"])
    exec(sources, found)
    exec(sink, found)
    store = open_store(f"file://{place}/shop")

    def crash(*_: Any, **__: Any) -> None:
        raise OSError("the power is gone")

    with monkeypatch.context() as patched:
        patched.setattr(ProtocolBackend, "mark_committed", crash)
        with pytest.raises(OSError, match="the power"):
            run_pipeline(found["pipeline"], store)
    assert DeltaTable(f"{place}/shop-sold").to_pyarrow_table().num_rows == 2
    run_pipeline(found["pipeline"], store)
    sold = DeltaTable(f"{place}/shop-sold").to_pyarrow_table()
    assert sorted(sold["cents"].to_pylist()) == [50, 100, 250]
    epoch = open_state(store).job("shop/main").epoch()
    for name in ("totals", "delta_totals", "iceberg_totals"):
        totals = epoch.table(name, "totals").to_arrow()
        assert dict(zip(totals["key"].to_pylist(), totals["value"].to_pylist(), strict=True)) == {
            "ada": 300,
            "bob": 100,
        }


def test_the_program_of_keyed_state_leaves_the_open_hour(place: Path) -> None:
    run, rows = _commands(blocks("docs/state-by-key.md", "sh")[0])
    for command in (run, f"{rows} --json"):
        answer = _run(command.replace("file:///tmp", f"file://{place}"), place, "unused")
        assert answer.exit_code == 0, answer.stderr
    (row,) = json.loads(answer.stdout)
    assert (row["key"], row["map_key"][:16], row["value"]) == ("ada", "2026-01-01T03:00", 75)


def test_verify_says_that_the_job_can_be_restored(place: Path) -> None:
    url = f"file://{place}/state"
    words, document = (
        _run(command.replace("JOB", "words/main"), place, url).stdout
        for command in _commands(blocks("docs/verify-and-restore.md", "sh")[0])
    )
    assert "can be restored: nothing found" in words
    assert json.loads(document)["parallelism"] == 8


def test_the_page_shows_what_saved_queries_answer(tmp_path: Path) -> None:
    assert (
        blocks("docs/query.md", "text")[3] == _run("arroyo-state sql --list", tmp_path, "").stdout
    )


def test_the_page_explains_every_state_of_an_epoch() -> None:
    text = (PROJECT / "docs" / "see.md").read_text().split("## States of an epoch")[1]
    shown = re.findall(r"^\| ([a-z ]+) \|", text.split("\n## ")[0], re.MULTILINE)
    assert sorted(shown) == sorted(state.value for state in CheckpointState)


# ---- the reference of the command line -----------------------------------------------------------


LEAVES = {
    " ".join(words): command
    for words, command in leaf_commands(cli.main, ("arroyo-state",), hidden_words=False)
}


def test_the_reference_lists_every_command() -> None:
    text = (PROJECT / "docs" / "reference-cli.md").read_text()
    shown = re.findall(r"^\| `(arroyo-state [a-z -]+)` \|", text, re.MULTILINE)
    assert sorted(shown) == sorted(LEAVES)


@pytest.mark.parametrize("page", PAGES)
def test_every_option_that_a_page_names_exists(page: str) -> None:
    options = [option for found in LEAVES.values() for option in found.params]
    options = [option for option in options if not getattr(option, "hidden", False)]
    known = {name for option in options for name in (*option.opts, *option.secondary_opts)}
    known |= {"--checkpoint-url", "--deployment", "--mode", "--arroyo-api-url"}  # of `dg scaffold`
    known |= {"--format", "--help", "--version"}
    known |= {"--no-deps", "--require-hashes", "--wheel-dir"}  # of pip
    known |= {"--master", "--conf", "--bootstrap-server", "--topic"}  # of Spark's, Kafka's tool
    known |= {"--clocks", "--minutes", "--kills"}  # of modules below tests/
    text = (PROJECT / page).read_text()
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= known


# ---- code ----------------------------------------------------------------------------------------


@pytest.fixture
def documented() -> MemoryStore:
    """The jobs that pages name: they are listed when definitions load."""
    store = MemoryStore()
    for job in ("JOB", "orders"):
        Written(store, legacy_job(job)).epochs(1)
    return store


def _loaded(code: str, url: str) -> Any:
    """Run code of a page; its checkpoint URLs are those of a store in memory."""
    found: dict[str, Any] = {}
    code = re.sub(r"s3://(bucket|staging)/checkpoints", url, code)
    # Without the import of this module that turns annotations into texts.
    exec(compile(code, "docs/dagster.md", "exec", dont_inherit=True), found)
    return found["defs"]


def test_the_component_loads(documented: MemoryStore) -> None:
    import dagster as dg
    import yaml
    from dagster.components.testing import create_defs_folder_sandbox

    from arroyo_dagster import ArroyoStateComponent

    given, lineage = map(yaml.safe_load, blocks("docs/dagster.md", "yaml"))
    assert given["type"] == "arroyo_dagster.ArroyoStateComponent"
    every = yaml.safe_load(blocks("docs/dagster-configuration.md", "yaml")[0])
    ArroyoStateComponent.model().model_validate(every)
    assert [*every] == [*ArroyoStateComponent.model_fields]
    given["attributes"] |= {"checkpoint_url": documented.url, **lineage}
    with create_defs_folder_sandbox() as sandbox:
        sandbox.scaffold_component(ArroyoStateComponent, defs_yaml_contents=given)
        with sandbox.build_all_defs() as defs:
            dg.Definitions.validate_loadable(defs)
            assert defs.resolve_job_def("arroyo_verify")
            assert dg.AssetKey(["arroyo", "orders", "checkpoint"]) in defs.resolve_all_asset_keys()


@pytest.mark.parametrize(
    "code",
    blocks("docs/dagster.md", "python"),
    ids=["defs", "window", "exports", "forks", "own assets", "translator"],
)
def test_the_definitions_load(code: str, documented: MemoryStore) -> None:
    import dagster as dg

    from arroyo_dagster import build_arroyo_definitions

    defs = _loaded(code, documented.url)
    assert isinstance(defs, dg.Definitions)
    if "build_arroyo_definitions(" not in code:
        defs = dg.Definitions.merge(build_arroyo_definitions(documented.url), defs)
    dg.Definitions.validate_loadable(defs)
    assert dg.AssetKey(["arroyo", "orders", "checkpoint"]) in defs.resolve_all_asset_keys()


def test_the_assets_jobs_and_checks_of_the_page_exist(documented: MemoryStore) -> None:
    import dagster as dg

    from arroyo_dagster import (
        ArroyoDirectory,
        ArroyoOptions,
        DeadJobsConfig,
        MaintenanceOptions,
        MaintenanceWindow,
        OrphansConfig,
        StateFork,
        TableExport,
        build_arroyo_definitions,
    )

    run_word_job(documented, rows=4, rows_per_epoch=2)
    everything = ArroyoOptions(
        directory=ArroyoDirectory(assume={"JOB": "stopped"}),
        maintenance=MaintenanceOptions(orphans=OrphansConfig(), dead_jobs=DeadJobsConfig()),
        window=MaintenanceWindow(jobs=["JOB"], between="02:00-04:00"),
        exports=[
            TableExport(name="NAME", jobs="*", operator="o", table="t", target="memory://lake")
        ],
        fork=StateFork(),
        bootstrapped_state="history:orders",
    )
    defs = build_arroyo_definitions(documented.url, mode="maintain", options=everything)
    dg.Definitions.validate_loadable(defs)
    graph = defs.resolve_asset_graph()
    text = (PROJECT / "docs" / "dagster.md").read_text()
    assets = {key.path[-1] for key in graph.get_all_asset_keys() if key.path[0] == "arroyo"}
    shown = re.findall(r"^\| `(?:arroyo/)?([a-z_]+)(?:/NAME)?` \| [A-Za-z]", text, re.MULTILINE)
    checks = {key.name for key in graph.asset_check_keys}
    jobs = {job.name for job in defs.get_repository_def().get_all_jobs()} - {"__ASSET_JOB"}
    assert assets - {"NAME"} | {"exported_state"} <= {*shown}
    assert {*shown} <= assets | jobs | {"exported_state"}
    assert checks <= {*re.findall(r"^\| `([a-z_]+)` \| `", text, re.MULTILINE)}
    assert jobs <= {*re.findall(r"`(arroyo_[a-z_]+)`", text)}


# ---- links ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [INDEX, GUIDE])
def test_an_index_leads_to_every_page_below_it(index: str) -> None:
    text = (PROJECT / index).read_text()
    folder = f"{Path(index).parent.as_posix()}/" if index == GUIDE else "docs/"
    below = [page for page in PAGES if page.startswith(folder)]
    if index != GUIDE:
        below = [page for page in below if "operate/" not in page or page == GUIDE]
    for page in below:
        if page != index:
            name = os.path.relpath(page, Path(index).parent)
            assert f"({name})" in text, f"{index} does not lead to {page}"


README = "README.md"
MOST_LINES = 150


def test_the_readme_is_read_in_ten_minutes() -> None:
    assert len((PROJECT / README).read_text().splitlines()) <= MOST_LINES


def test_the_three_commands_are_make_targets() -> None:
    assert blocks(README, "sh")[0].splitlines() == ["make demo", "make ui", "make test"]


def test_the_definitions_of_the_readme_load() -> None:
    (code,) = blocks(README, "python")
    found: dict[str, object] = {}
    exec(code, found)
    assert found["defs"].resolve_all_asset_keys()  # type: ignore[attr-defined]
