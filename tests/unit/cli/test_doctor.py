"""`doctor`: every check has a verdict, and a refusal of the store is one, not a failure."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from arroyo_dagster import MemoryStore, cli, list_jobs, open_store
from arroyo_dagster.cli.symptoms import SYMPTOMS
from arroyo_dagster.errors import StorageError
from arroyo_dagster.spark.readiness import check_java
from arroyo_dagster.state.model.clock import wall_clock
from arroyo_dagster.state.operations.verify.store import CheckStatus, StoreCheck, check_store
from arroyo_dagster.state.planning.rules import KINDS
from tests.compat.arroyo import unpack
from tests.formats import SKEW_MICROS
from tests.internals import LeaseOptions, lease
from tests.jobs import run_word_job
from tests.stores import DeleteOutcome

STORE_CHECKS = ["conditional create", "list", "read", "create", "delete", "clocks", "layout"]
MACHINE_CHECKS = ["configuration", "java", "pyspark", "fast start", "dagster"]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    run_word_job(open_store(str(tmp_path / "root")), rows=8, sinks=0)
    return tmp_path / "root"


def run(*args: str) -> Result:
    return CliRunner().invoke(cli.main, ["doctor", *args], catch_exceptions=False)


def by_name(checks: tuple[StoreCheck, ...]) -> dict[str, StoreCheck]:
    assert [one.name for one in checks] == STORE_CHECKS
    return {one.name: one for one in checks}


def refuses(*_: Any, **__: Any) -> Any:
    raise StorageError("access denied", retryable=False)


def test_every_check_has_one_line_and_nothing_is_left(root: Path) -> None:
    before = sorted(root.rglob("*"))
    done = run("--url", str(root))
    assert done.exit_code == 0, done.output
    lines = [line for line in done.stdout.splitlines() if not line.startswith("  next: ")]
    assert [line.partition(":")[0] for line in lines] == STORE_CHECKS + MACHINE_CHECKS
    assert "layout: ok (1 jobs in the protocol layout)" in lines
    assert lines[-1].startswith("dagster: not checked (")
    assert [path for path in sorted(root.rglob("*")) if path.is_file()] == [
        path for path in before if path.is_file()
    ]


def test_read_only_credentials_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore("doctor-read-only")
    run_word_job(store, rows=8, sinks=0)
    monkeypatch.setattr(store, "put", refuses)
    monkeypatch.setattr(store, "create", refuses)
    found = by_name(check_store(store))
    assert found["create"].status is CheckStatus.WARNING
    assert found["create"].detail == "access denied"
    assert "maintenance" in str(found["create"].next_step)
    for name in ("conditional create", "delete", "clocks"):
        assert found[name].status is CheckStatus.NOT_CHECKED
    assert found["read"].status is found["layout"].status is CheckStatus.OK


def test_credentials_that_cannot_delete_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore("doctor-no-delete")
    run_word_job(store, rows=8, sinks=0)
    monkeypatch.setattr(
        store, "delete_many", lambda paths: DeleteOutcome(failed=dict.fromkeys(paths, "denied"))
    )
    found = by_name(check_store(store))
    assert found["delete"].status is CheckStatus.WARNING
    assert "_arroyo_dagster/leases/probe-" in str(found["delete"].next_step)


def test_credentials_that_cannot_read_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore("doctor-no-read")
    run_word_job(store, rows=8, sinks=0)
    monkeypatch.setattr(store, "read", refuses)
    assert by_name(check_store(store))["read"].status is CheckStatus.ERROR


@pytest.mark.parametrize(
    ("apart", "status"),
    [
        (SKEW_MICROS // 2, CheckStatus.OK),
        (-SKEW_MICROS // 2, CheckStatus.OK),
        (SKEW_MICROS * 2, CheckStatus.ERROR),
        (-SKEW_MICROS * 2, CheckStatus.ERROR),
    ],
)
def test_clocks_that_differ_are_an_error(root: Path, apart: int, status: CheckStatus) -> None:
    found = by_name(check_store(open_store(str(root)), clock=lambda: wall_clock() - apart))
    assert found["clocks"].status is status
    assert ("ahead" if apart > 0 else "behind") in found["clocks"].detail


def test_a_root_of_something_else_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"x")
    found = by_name(check_store(open_store(str(tmp_path)), read_only=True))
    assert found["layout"].status is CheckStatus.WARNING
    assert found["layout"].next_step


def test_a_wrong_configuration_file_is_an_error(root: Path) -> None:
    (root.parent / "arroyo-state.toml").write_text("[rows]\nlimmit = 3\n")
    done = run("--url", str(root))
    assert done.exit_code == 3
    assert "configuration: error (the key rows.limmit is no option of `rows`" in done.stdout


JAVAS: list[tuple[str, CheckStatus, str]] = [
    ('openjdk version "17.0.9" 2023-10-17', CheckStatus.OK, "Java 17"),
    ('openjdk version "21" 2023-09-19', CheckStatus.OK, "Java 21"),
    ('java version "1.8.0_392"', CheckStatus.WARNING, "Java 8"),
    ("something else", CheckStatus.WARNING, "unknown version"),
]


@pytest.mark.parametrize(("text", "status", "detail"), JAVAS)
def test_the_version_of_java(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, status: CheckStatus, detail: str
) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\necho '{text}' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    found = check_java()
    assert (found.status, detail in found.detail) == (status, True)


def test_the_reference_lists_every_check() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference-cli.md").read_text()
    table = page.split("## Check a store and a machine")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    listed = {name.strip(" `") for row in rows for name in row.split(",")}
    assert listed == {*STORE_CHECKS, *MACHINE_CHECKS, "daemons", "sensor"}


def test_the_same_as_json(root: Path) -> None:
    found = json.loads(run("--url", str(root), "--store-only", "--json").stdout)
    assert found["healthy"] is True
    assert [one["check"] for one in found["checks"]] == STORE_CHECKS
    assert {one["status"] for one in found["checks"]} == {"ok"}
    assert found["checks"][-1]["detail"] == "1 jobs in the protocol layout"


# ---- of a job ------------------------------------------------------------------------------------


def test_a_healthy_job_has_no_symptom_and_nothing_is_written(root: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    done = run("main", "--url", str(root))
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("words/main: nothing found. If its state is wrong all the same")
    assert "`arroyo-state rollback words/main`" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    document = json.loads(run("main", "--url", str(root), "--json").stdout)
    assert (document["job"], document["healthy"], document["checks"]) == ("words/main", True, [])
    assert run("main", "--url", str(root), "--store-only").exit_code == 2


OPERATOR = "checkpoints/checkpoint-0000008/operator-watermark_2"
STOPPED = ("--assume", "grand_total=stopped", "--yes", "--quiet", "0")
COMMANDS: dict[str, tuple[str | tuple[str, ...], int, list[str]]] = {
    "a missing file": (
        f"{OPERATOR}/table-s-000",
        3,
        ["sql @fate --param path=grand_total/", "rollback grand_total 7"],
    ),
    "missing metadata": (
        f"{OPERATOR}/metadata",
        3,
        ["verify grand_total", "rebuild grand_total 8", "fork grand_total@7 NEW_JOB"],
    ),
    "an edit": (("edit", "offsets", "grand_total", "all=-1"), 0, ["undo grand_total"]),
    "a rollback": (("rollback", "grand_total", "5"), 0, ["undo grand_total"]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_each_symptom_of_a_job_has_its_command(name: str, tmp_path: Path) -> None:
    cause, code, commands = COMMANDS[name]
    url = unpack("flights", tmp_path)
    if isinstance(cause, str):
        (tmp_path / "grand_total" / cause).unlink()
    else:
        done = CliRunner().invoke(cli.main, [*cause, *STOPPED, "--url", url])
        assert done.exit_code == 0, done.output
    found = run("grand_total", "--url", url)
    assert found.exit_code == code, found.output
    assert re.findall("next: arroyo-state (.+)", found.stdout) == commands
    assert ("nothing found" in found.stdout) == (code == 0)


def test_small_files_leases_and_quarantines_are_symptoms(tmp_path: Path) -> None:
    store = open_store(unpack("leader", tmp_path))
    paths = next(paths for paths in list_jobs(store) if paths.job == "job_REpArXOlRQ")
    with lease(store, paths, "somebody", LeaseOptions()):
        found = run(paths.root, "--url", str(tmp_path))
    assert found.exit_code == 3
    assert "starts are slow: warning (" in found.stdout
    assert f"next: arroyo-state compact plan {paths.root}" in found.stdout
    assert "a run waits: ok (the maintenance lease is held by" in found.stdout
    assert f"next: arroyo-state show {paths.root}" in found.stdout
    expire = ["gc", "run", "expire", paths.root, "--keep", "2", "--quarantine"]
    stopped = ["--assume", f"{paths.root}=stopped", "--yes"]
    done = CliRunner().invoke(cli.main, [*expire, *stopped, "--url", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert (
        f"next: arroyo-state gc undelete {paths.root}"
        in run(paths.root, "--url", str(tmp_path)).stdout
    )


def test_every_kind_of_finding_has_a_symptom_and_a_command_of_the_guide() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "operate" / "README.md").read_text()
    assert SYMPTOMS.keys() >= KINDS.keys()
    for _, command in SYMPTOMS.values():
        assert f"`{command.format(job='JOB')}`" in guide
