"""The built wheel works in an environment that has it and its dependencies, and nothing else.

The wheel is built from the source distribution, so both are complete. Installing all dependencies
takes minutes: `make test` links those of this environment, `make soak` installs the locked ones.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.light import CASES, DRIVER

PROJECT = Path(__file__).parents[2]
PACKAGE = PROJECT / "arroyo_dagster"
SOURCES = ("pyproject.toml", "README.md", "DESCRIPTION.md", "CHANGELOG.md", "LICENSE")
PIP = ("-m", "pip", "--disable-pip-version-check")
BUILD_SDIST = "import setuptools.build_meta as it, sys; print(it.build_sdist(sys.argv[1]))"
SMOKE = """
import importlib, importlib.metadata, importlib.resources, json, pathlib, pkgutil, runpy, sys
import dagster as dg
import arroyo_dagster
from arroyo_dagster.orchestration.component import ArroyoStateComponent

for found in pkgutil.walk_packages(arroyo_dagster.__path__, "arroyo_dagster."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
defs = arroyo_dagster.build_arroyo_definitions(sys.argv[1])
dg.Definitions.validate_loadable(defs)
dg.Definitions.validate_loadable(runpy.run_path(sys.argv[2])["defs"])
points = importlib.metadata.entry_points(group="dagster_dg_cli.registry_modules")
(point,) = [one for one in points if one.name == "arroyo_dagster"]
root = importlib.resources.files("arroyo_dagster")
print(json.dumps({
    "file": arroyo_dagster.__file__,
    "version": importlib.metadata.version("arroyo-dagster"),
    "assets": len(defs.resolve_asset_graph().get_all_asset_keys()),
    "registered": hasattr(point.load(), "ArroyoStateComponent"),
    "logging": (root / "spark/log4j2.properties").is_file(),
    "typed": (root / "py.typed").is_file(),
}))
"""


def run(python: Path | str, *args: str, cwd: Path, **env: str) -> str:
    """Run Python away from the project: no PYTHONPATH, no user's packages."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(python), *args],
        cwd=cwd,
        env={**clean, "PYTHONNOUSERSITE": "1", **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    copy = folder / "source"
    shutil.copytree(PACKAGE, copy / "arroyo_dagster", ignore=shutil.ignore_patterns("__pycache__"))
    for name in SOURCES:
        shutil.copy(PROJECT / name, copy)
    built = run(sys.executable, "-c", BUILD_SDIST, str(folder), cwd=copy).splitlines()[-1]
    return folder / built


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(folder))
    run(sys.executable, *PIP, "wheel", *options, str(source), cwd=folder)
    return next(folder.glob("*.whl"))


def _files() -> set[str]:
    return {
        str(path.relative_to(PROJECT))
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(one for one in names if one.endswith("/METADATA"))).decode()
    assert {one for one in names if ".dist-info/" not in one} == _files()
    assert "Requires-Python: >=3.11" in metadata
    assert "Requires-Dist: obstore>=0.8" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert "License-File: LICENSE" in metadata
    assert any(one.endswith(".dist-info/licenses/LICENSE") for one in names)
    assert "Author: arroyo_dagster contributors" in metadata
    assert "Project-URL" not in metadata
    assert {f"Provides-Extra: {one}" for one in ("azure", "gcs", "postgres")} <= {
        line for line in metadata.splitlines() if line.startswith("Provides-Extra")
    }
    assert "Description-Content-Type: text/markdown" in metadata
    assert metadata.partition("\n\n")[2].strip() == (PROJECT / "DESCRIPTION.md").read_text().strip()
    assert "arroyo_dagster/py.typed" in names


def test_the_wheel_is_small(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        largest = max(one.file_size for one in archive.infolist())
    assert wheel.stat().st_size < 2_000_000
    assert largest < 200_000


def test_the_source_distribution_holds_what_a_build_and_a_reader_need(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = _files() | {*SOURCES, "PKG-INFO"} - {"CHANGELOG.md"}
    assert expected <= names
    assert not [one for one in names if one.startswith(("tests", "docs", "examples"))]


def _install(python: Path, wheel: Path, folder: Path) -> None:
    options = ("--no-deps", "--no-index", "--quiet")
    run(sys.executable, *PIP, "--python", str(python), "install", *options, str(wheel), cwd=folder)


def _linked(wheel: Path, folder: Path, lock: Path) -> Path:
    """Make an environment with the wheel, and links to the locked packages, installed here."""
    venv.create(folder / "venv", with_pip=False)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    files = _files_of(lock)
    for kind in ("purelib", "platlib"):
        for path in Path(sysconfig.get_path(kind)).iterdir():
            if path.name in files and not (site / path.name).exists():
                (site / path.name).symlink_to(path)
    python = folder / "venv" / "bin" / "python"
    _install(python, wheel, folder)
    return python


def _files_of(lock: Path) -> set[str]:
    """The files and folders of site-packages that the packages of a lock file consist of."""
    found: set[str] = set()
    pins = re.findall(r"^([\w.-]+)(?:\[\S+\])?==[^ ]+ (;?)", lock.read_text(), re.MULTILINE)
    for name, marker in pins:
        try:
            files = importlib.metadata.distribution(name).files
        except importlib.metadata.PackageNotFoundError:
            assert marker, f"{name} is in {lock.name}, and is not installed"
            continue
        found |= {path.parts[0] for path in files or ()}
    return found - {"..", "__pycache__"}


# ---- without Spark and Dagster -------------------------------------------------------------------

CORE, BASE = (PROJECT / "requirements" / f"{name}.txt" for name in ("core", "base"))


@pytest.fixture(scope="module")
def light(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and the packages of `core.txt`: no Spark, no Dagster."""
    return _linked(wheel, tmp_path_factory.mktemp("light"), CORE)


def walk(python: Path, folder: Path) -> None:
    """Run every command of `arroyo-state` where neither Spark nor Dagster is installed."""
    example = (PROJECT / "examples" / "hello_state.py").read_text()
    program, _, last = example.strip().rpartition("\n")
    assert last.startswith("ad.run_pipeline(")
    (folder / "hello.py").write_text(f"{program}\npipeline = rows.pipeline\n")
    shutil.copytree(PROJECT / "examples" / "sdf", folder / "sdf")
    (folder / "managed").mkdir()
    with tarfile.open(PROJECT / "tests" / "compat" / "data" / "arroyo-leader.tar.gz") as archive:
        archive.extractall(folder / "arroyo", filter="data")
    given = json.dumps([[case.words, case.root and str(folder / case.root)] for case in CASES])
    home = {"HOME": str(folder), "DAGSTER_HOME": str(folder)}
    answer = json.loads(run(python, "-I", "-c", DRIVER, given, cwd=folder, **home).splitlines()[-1])
    assert Path(answer["file"]).is_relative_to(python.parents[1])
    assert answer["missing"] == ["dagster", "pydantic", "pyspark", "py4j", "pandas"]
    assert "pip install 'dagster>=1.12,<2'" in answer["component"]
    for case, found in zip(CASES, answer["answers"], strict=True):
        assert "ModuleNotFoundError" not in found["text"] + found["error"], (case, found)
        assert (found["code"], case.text in found["text"]) == (case.code, True), (case, found)
    for found in answer["helps"]:
        assert (found["code"], "Usage: " in found["text"]) == (0, True), found
    run_words = [case.words.split() for case in CASES]
    for command in answer["commands"]:
        assert any(words[: len(command)] == command for words in run_words), command
    script = str(python.with_name("arroyo-state"))
    url = ("--url", str(folder / "managed"))
    assert "hello" in run(script, "jobs", *url, cwd=folder)
    assert "can be restored" in run(script, "verify", "main", *url, cwd=folder)
    assert "nothing to delete" in run(script, "gc", "plan", "orphans", "main", *url, cwd=folder)


def test_every_command_works_without_spark_and_dagster(light: Path, tmp_path: Path) -> None:
    walk(light, tmp_path)


@pytest.mark.soak
def test_every_command_works_with_exactly_the_locked_core(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, *PIP, "install", "--quiet", "--require-hashes", "-r", str(CORE), cwd=tmp_path)
    _install(python, wheel, tmp_path)
    walk(python, tmp_path)


@pytest.mark.soak
def test_every_command_works_with_the_lowest_versions_that_are_allowed(
    wheel: Path, tmp_path: Path
) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    groups = tomllib.loads((PROJECT / "pyproject.toml").read_text())["dependency-groups"]
    install = ("pip", "install", "--quiet", "--resolution=lowest-direct", *groups["core"])
    uv = Path(sys.executable).with_name("uv")
    run(uv, *install, cwd=tmp_path, VIRTUAL_ENV=str(tmp_path / "venv"))
    _install(python, wheel, tmp_path)
    walk(python, tmp_path)


# ---- with all of them ----------------------------------------------------------------------------


def smoke(python: Path, folder: Path) -> None:
    """The example, the command line, the definitions, the entry points and the data files."""
    state = folder / "hello-state"
    example = (PROJECT / "examples" / "hello_state.py").read_text()
    assert "/tmp/hello-state" in example
    (folder / "hello_state.py").write_text(example.replace("/tmp/hello-state", str(state)))
    run(python, "-I", "hello_state.py", cwd=folder)
    script = str(python.with_name("arroyo-state"))
    (job,) = json.loads(run(script, "jobs", "--json", "--url", str(state), cwd=folder))
    assert (job["pipeline"], job["epochs"]) == ("hello", 2)
    rows = json.loads(
        run(script, *("rows", "main", "count", "counts", "--json", "--url", str(state)), cwd=folder)
    )
    assert sorted((row["key"], row["value"]) for row in rows) == [("be", 1), ("to", 2)]
    for kind in ("dataflow", "sdf-package"):  # what editors take
        assert (
            "json-schema.org"
            in json.loads(run(script, "sdf", "schema", kind, cwd=folder))["$schema"]
        )
    shutil.copy(PROJECT / "definitions.py", folder)
    told = json.loads(
        run(
            *(python, "-I", "-c", SMOKE, str(state), "definitions.py"),
            cwd=folder,
            DAGSTER_HOME=str(folder),
            ARROYO__CHECKPOINT_URL=str(state),
        ).splitlines()[-1]
    )
    assert Path(told.pop("file")).is_relative_to(python.parents[1])
    assert told.pop("assets") > 2
    assert told.pop("version")
    assert told == {"registered": True, "logging": True, "typed": True}


def test_the_wheel_works_beside_what_it_requires_and_nothing_else(
    wheel: Path, tmp_path: Path
) -> None:
    python = _linked(wheel, tmp_path, BASE)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    assert not [name for name in ("pandas", "dagster_webserver") if (site / name).exists()]
    run(sys.executable, *PIP, "--python", str(python), "check", cwd=tmp_path)
    smoke(python, tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_wheel_works_with_exactly_the_locked_dependencies(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    lock = str(PROJECT / "requirements" / "runtime.txt")
    run(python, *PIP, "install", "--quiet", "--require-hashes", "-r", lock, cwd=tmp_path)
    _install(python, wheel, tmp_path)
    run(python, *PIP, "check", cwd=tmp_path)
    smoke(python, tmp_path)
