"""What a command loads: `arroyo-state` answers fast because it imports only what it needs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import pytest

from arroyo_dagster import cli, open_store
from arroyo_dagster.cli.lazy import LazyGroup
from tests.jobs import run_word_job

NEVER = {"dagster", "pyspark", "py4j", "pandas", "polars"}
CLIENTS = {"obstore", "fsspec", "s3fs", "botocore", "tenacity", "aiohttp"}
ASKING = {"http.client", "sqlite3", "psycopg", "ssl", "pendulum", "asyncio"}
ARROW = {"pyarrow", "numpy"}
WITHOUT_STORES = ASKING - {"ssl"}
METADATA = {"importlib.metadata", "email.message", "tomllib", "zipfile", "csv"}
"""What `importlib.metadata` loads, and what only a configuration file needs."""
PROTOBUF = {"google.protobuf"}
WRITING = {
    "pyarrow.compute",
    "pyarrow.dataset",
    "arroyo_dagster.state.codec.bincode.codec",
    "arroyo_dagster.state.metadata.backend",
    "arroyo_dagster.state.model.compaction",
    "arroyo_dagster.state.model.garbage",
    "arroyo_dagster.state.planning.compaction.rewrite",
    "arroyo_dagster.state.planning.gc.expiry",
    "arroyo_dagster.state.tables.known.sinks",
}
"""What only commands that write or decode rows need."""
CATALOGUE = "arroyo_dagster.state.tables.known.catalogue"
RECORDS = "arroyo_dagster.state.metadata.own_records"
SAVED = (
    NEVER - {"polars"}
    | CLIENTS
    | ARROW
    | {
        "pyarrow.compute",
        "pyarrow.parquet",
        "arroyo_dagster.state.operations.query.table",
        CATALOGUE,
        "psycopg",
        "sqlite3",
    }
)
"""What a saved query does without that reads only metadata. Polars loads modules of Python."""


def loaded(*commands: Sequence[str]) -> set[str]:
    """The modules that are loaded in a process which runs some commands one after the other."""
    code = f"""
import json, sys
from arroyo_dagster.cli import main
for command in {commands!r}:
    try:
        main(command)
    except SystemExit as ended:
        assert not ended.code, (command, ended.code)
sys.stdout.flush()
print("\\n" + json.dumps(sorted(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("root")
    run_word_job(open_store(str(folder)), rows=8, sinks=0)
    return str(folder)


METADATA_ONLY = NEVER | CLIENTS | ASKING | ARROW | METADATA
ROWS = NEVER | CLIENTS | METADATA | WITHOUT_STORES
COMMANDS: dict[tuple[str, ...], set[str]] = {
    ("jobs", "epochs main"): METADATA_ONLY | WRITING,
    ("sql --list",): NEVER | CLIENTS,
    ("sql @leases main",): SAVED | PROTOBUF | {RECORDS},
    ("sql @growth main",): SAVED - {CATALOGUE},
    ("sql @pins main", "sql @journal main"): SAVED | PROTOBUF,
    ("sql @watermarks main",): SAVED,
    ("gc purge main", "gc undelete main"): METADATA_ONLY,
    ("show main",): NEVER - {"polars"},  # `pyarrow.parquet` loads ssl itself.
    ("rows main count counts", "verify main"): ROWS,
    ("health", "health --level 4"): ROWS,
    ("compact plan", "compact plan main", "compact run main", "rollback main 1"): ROWS,
    ("gc plan expire main --keep 9",): NEVER | CLIENTS | METADATA,
    ("gc explain words/main/",): ROWS,
}
"""Commands that one process runs after each other, and what none of them may load."""


@pytest.mark.parametrize("commands", COMMANDS, ids=", ".join)
def test_a_command_loads_only_what_it_needs(root: str, commands: tuple[str, ...]) -> None:
    modules = loaded(*([*command.split(), "--url", root] for command in commands))
    assert "click" in modules
    assert not COMMANDS[commands] & modules


def test_help_loads_no_command() -> None:
    found = loaded(["--help"])
    assert not (NEVER | CLIENTS | ASKING | ARROW | PROTOBUF | {"rich"}) & found
    assert not [name for name in found if name.startswith("arroyo_dagster.state.operations.")]


def groups(group: LazyGroup, path: str = "") -> Iterator[tuple[str, LazyGroup]]:
    yield path, group
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, LazyGroup):
            yield from groups(command, f"{path} {name}".strip())


def test_the_list_of_commands_says_what_the_commands_say() -> None:
    assert isinstance(cli.main, LazyGroup)
    seen = 0
    for path, group in groups(cli.main):
        context = click.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None, f"{path} {name}"
            if name in group.lazy:
                seen += 1
                assert group.lazy[name].is_group == isinstance(command, click.Group)
                assert group.lazy[name].help == command.get_short_help_str(limit=300)
    assert seen > 30
