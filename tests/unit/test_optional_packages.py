"""A package that is not installed: one error, which names it and the command that installs it."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import arroyo_dagster
from arroyo_dagster import DeltaTarget, IcebergTarget, StatePath, open_store, orchestration
from arroyo_dagster.cli import main
from arroyo_dagster.errors import ArroyoStateError, InputError
from arroyo_dagster.optional_packages import (
    PACKAGES,
    explain_import,
    explained_imports,
    missing_package,
)
from arroyo_dagster.spark.session import open_session
from arroyo_dagster.spark.settings import SparkSettings
from tests.internals import open_directory

PROJECT = Path(__file__).parents[2]
DECLARED = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = DECLARED["optional-dependencies"]


AZURE = "abfs://container@account.dfs.core.windows.net/a"


def _read_by_fsspec(url: str) -> object:
    return open_store(url, options={"client": "fsspec"}).read(StatePath("x"))


def _session(**settings: str) -> object:
    return open_session(SparkSettings(**settings))  # type: ignore[arg-type]


USES: dict[str, tuple[str, Callable[[], object]]] = {
    "azure": ("adlfs", lambda: _read_by_fsspec(AZURE)),
    "connect": ("grpc_status", lambda: _session(remote="sc://127.0.0.1:1")),
    "delta": ("deltalake", lambda: DeltaTarget(url="/nowhere").lake),
    "gcs": ("gcsfs", lambda: _read_by_fsspec("gs://bucket/a")),
    "iceberg": (
        "pyiceberg",
        lambda: IcebergTarget(
            table="db.t", catalog={"type": "sql", "uri": "sqlite://"}
        ).lake.open(),
    ),
    "postgres": ("psycopg", lambda: open_directory(database="postgresql://arroyo@db/arroyo")),
    "spark": ("pandas", lambda: _session(master="local[1]")),
}
"""For each extra: the package that its code imports, and a call that needs it. But for `ui`:
`dagster dev` says itself what it lacks."""


def _quoted(extra: str) -> str:
    return " ".join(f"'{requirement}'" for requirement in EXTRAS[extra])


@pytest.mark.parametrize("extra", USES)
def test_missing_extra_names_its_packages(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package, use = USES[extra]
    monkeypatch.setitem(sys.modules, package, None)
    # Another test of this process may have a session.
    monkeypatch.setattr("arroyo_dagster.spark.session._active_session", lambda: None)
    with pytest.raises(InputError) as raised:
        use()
    assert package in raised.value.message
    # The packages, not the extra: it would bring Dagster and Spark to where neither is wanted.
    assert f"pip install {_quoted(extra)}" in str(raised.value.next_step)
    assert len(str(raised.value).splitlines()) == 1


def test_every_extra_is_one_of_the_packages() -> None:
    assert {_quoted(extra) for extra in USES} < {one.install for one in PACKAGES.values()}
    assert {*USES, "ui"} == set(EXTRAS)


def test_the_commands_install_the_declared_versions() -> None:
    declared = {*DECLARED["dependencies"], "dagster-pipes"}.union(*EXTRAS.values())
    for package in PACKAGES.values():
        assert set(package.install.replace("'", "").split()) <= declared


SPARK_COMMANDS = (
    ("bootstrap", "job", "nothing:here"),
    ("run", "nothing.py:here", "--spark"),
    ("compact", "run", "job", "--spark", "--yes"),
    ("compact", "window", "job", "--spark"),
    ("gc", "run", "expire", "job", "--spark", "--yes"),
    ("gc", "undelete", "job", "--spark", "--yes"),
    ("sdf", "replay", "nothing.yaml", "--spark"),
    ("sdf", "run", "nothing.yaml", "--spark"),
    ("verify", "job", "--spark"),
)


def _run(*command: str) -> Result:
    return CliRunner().invoke(main, list(command), catch_exceptions=False)


@pytest.mark.parametrize("command", SPARK_COMMANDS, ids=" ".join)
def test_command_is_refused_at_once(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    found = _run(*command, "--url", "/nowhere/at/all")
    assert (found.exit_code, found.stdout) == (1, "")
    assert found.stderr == f"InputError: {missing_package('pyspark')}\n"
    found = _run(*command, "--json", "--url", "/nowhere/at/all")
    error = json.loads(found.stderr)["error"]
    assert (error["type"], error["retryable"]) == ("InputError", False)


def test_a_command_finds_what_spark_needs() -> None:
    # In a process of its own: a command hides pandas from pyarrow until Spark imports it.
    words = ("doctor", "--read-only", "--url", "/tmp")
    done = subprocess.run(
        [sys.executable, "-m", "arroyo_dagster.cli", *words], capture_output=True, text=True
    )
    assert "pyspark: ok (" in done.stdout


def test_the_list_of_commands_with_spark_is_complete() -> None:
    cli = PROJECT / "arroyo_dagster" / "cli"
    count = sum(path.read_text().count("\n@spark_options(") for path in cli.rglob("*.py"))
    assert count == len(SPARK_COMMANDS)


def test_an_import_that_fails_later_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    found = _run("jobs", "--url", "/tmp", "--arroyo-db", "postgresql://arroyo@db/arroyo")
    assert found.exit_code == 1
    assert "pip install 'psycopg[binary]>=3.2'" in found.stderr


WITHOUT_DAGSTER = """
import sys
sys.modules["dagster"] = sys.modules["pydantic"] = None
import arroyo_dagster
from arroyo_dagster import orchestration

for name in orchestration.__all__:
    try:
        getattr(arroyo_dagster, name)
    except arroyo_dagster.InputError as error:
        assert "which is not installed" in error.message, error
        assert "pip install 'dagster>=1.12,<2'" in error.next_step, error
        print(name)
"""


def test_without_dagster_every_name_that_needs_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_DAGSTER], capture_output=True, text=True, check=True
    )
    named = set(done.stdout.split())
    assert {"ArroyoStateComponent", "build_arroyo_definitions"} <= named
    assert named <= set(orchestration.__all__) <= set(dir(arroyo_dagster))


DIRECTLY = """
import importlib, pkgutil, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("dagster", "pydantic", "pyspark", "py4j", "pandas"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import arroyo_dagster.orchestration, arroyo_dagster.spark

for package in (arroyo_dagster.orchestration, arroyo_dagster.spark):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        try:
            importlib.import_module(found.name)
        except arroyo_dagster.InputError as error:
            print(found.name, str(error))
"""


def test_a_module_that_is_imported_directly_names_the_missing_package() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DIRECTLY], capture_output=True, text=True, check=True
    )
    named = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert named["arroyo_dagster.orchestration.component"] == str(missing_package("dagster"))
    assert len(named) > 30
    # The data source extends classes of Spark; the others import pyspark when it is used.
    source = "arroyo_dagster.spark.query.source"
    assert named[source] == str(missing_package("pyspark"))
    assert [name for name in named if ".spark." in name] == [source]


def test_modules_that_are_found_keep_their_loader_and_source() -> None:
    from arroyo_dagster.spark import session

    assert isinstance(session.__loader__, SourceFileLoader)
    assert "def " in inspect.getsource(session)


def test_other_imports_that_fail_keep_their_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="nowhere"), explained_imports():
        import nowhere  # type: ignore[import-not-found] # noqa: F401
    with pytest.raises(ImportError, match="nothing"), explained_imports():
        from pyspark import nothing  # type: ignore[attr-defined] # noqa: F401
    assert explain_import(ModuleNotFoundError("x", name="pyspark.nothing")) is None
    assert explain_import(ArroyoStateError("x")) is None
