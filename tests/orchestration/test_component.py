"""The component: YAML to the same definitions, as `dg` loads it; what is wrong has a name."""

from __future__ import annotations

import dataclasses
import datetime as dt
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster.components.testing import create_defs_folder_sandbox
from jsonschema import Draft202012Validator

from arroyo_dagster.orchestration import (
    ArroyoOptions,
    ArroyoStateComponent,
    build_arroyo_definitions,
)
from arroyo_dagster.orchestration.component import ArroyoStateParams, ArroyoStateScaffolder
from arroyo_dagster.orchestration.yaml.fields import Advanced
from arroyo_dagster.state import open_store
from tests.fleets import Written, protocol_job

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "dagster-project"
TYPE = "arroyo_dagster.ArroyoStateComponent"
ATTRIBUTES: dict[str, Any] = {
    "checkpoint_url": "/does/not/exist",
    "mode": "maintain",
    "running": True,
    "deployment": "blue",
    "arroyo_api_url": "http://arroyo:5115",
    "freshness": "15m",
    "lineage": {"sources": False},
    "translation": {"group_name": "streaming", "tags": {"team": "platform"}},
    "advanced": {
        "layout": "protocol",
        "schedules": {"fleet": "*/5 * * * *", "timezone": "Europe/Berlin"},
        "window": {"jobs": ["job_x"], "between": "02:00-04:00", "time_zone": "Asia/Tokyo"},
        "fork": {"nightly": {"source": "job_a"}, "job": "p/job_b", "cron": "7 4 * * *"},
        "owners": ["team:streaming"],
        "tags": {"domain": "payments"},
    },
}


def load(*documents: dict[str, Any]) -> tuple[list[ArroyoStateComponent], dg.Definitions]:
    """Load components from the documents of one YAML file, and build all definitions."""
    with create_defs_folder_sandbox() as sandbox:
        path = sandbox.scaffold_component(
            ArroyoStateComponent, defs_yaml_contents={"type": TYPE, "attributes": documents[0]}
        )
        text = yaml.safe_dump_all([{"type": TYPE, "attributes": one} for one in documents])
        (path / "defs.yaml").write_text(text)
        with sandbox.build_all_defs() as defs, sandbox.build_component_tree() as tree:
            components = tree.get_all_components(of_type=ArroyoStateComponent)
            dg.Definitions.validate_loadable(defs)
            return components, defs


def refusal(*documents: dict[str, Any]) -> str:
    """Return what Dagster prints last of the error that these documents cause."""
    with pytest.raises(Exception) as caught:
        load(*documents)
    error: BaseException = caught.value
    while error.__cause__ is not None:
        error = error.__cause__
    assert error.__traceback__ is None, "a stack trace would follow the message"
    return str(error)


def written(folder: Path, *roots: str) -> str:
    """Write pipelines below a folder; its URL."""
    store = open_store(str(folder))
    for root in roots:
        Written(store, protocol_job(*root.split("/"))).epochs(1)
    return str(folder)


def test_yaml_gives_the_definitions(tmp_path: Path) -> None:
    url = written(tmp_path / "state", "p/job_b")
    (component,), defs = load({**ATTRIBUTES, "checkpoint_url": url})
    assert isinstance(component, ArroyoStateComponent)
    specs = {spec.key.to_user_string(): spec for spec in defs.resolve_all_asset_specs()}
    below = {"checkpoint", "compacted_state", "forked_state"}
    assert {f"arroyo/blue/p/job_b/{table}" for table in below} <= specs.keys()
    ours = [spec for name, spec in specs.items() if name.startswith("arroyo/")]
    assert {spec.group_name for spec in ours} == {"streaming"}
    for spec in ours:
        assert spec.owners == ["team:streaming"]
        assert (spec.tags["team"], spec.tags["domain"]) == ("platform", "payments")
    policy = specs["arroyo/blue/p/job_b/checkpoint"].freshness_policy
    assert policy == dg.FreshnessPolicy.time_window(fail_window=dt.timedelta(minutes=15))
    schedule = defs.resolve_schedule_def("arroyo_blue_fleet_schedule")
    assert schedule.cron_schedule == "*/5 * * * *"
    assert schedule.execution_timezone == "Europe/Berlin"
    assert schedule.default_status is dg.DefaultScheduleStatus.RUNNING
    window = defs.resolve_schedule_def("arroyo_blue_window_schedule")
    assert (window.cron_schedule, window.execution_timezone) == ("0 2 * * *", "Asia/Tokyo")
    fork = defs.resolve_schedule_def("arroyo_blue_fork_schedule")
    assert (fork.cron_schedule, fork.default_status.value) == ("7 4 * * *", "RUNNING")


def test_defaults_view_and_start_nothing(tmp_path: Path) -> None:
    _, defs = load({"checkpoint_url": written(tmp_path, "a/main")})
    assert {job.name for job in defs.resolve_all_job_defs()} - {"__ASSET_JOB"} == {
        "arroyo_verify",
        "arroyo_fleet",
    }
    repository = defs.get_repository_def()
    for one in (*repository.schedule_defs, *repository.sensor_defs):
        assert one.default_status.value == "STOPPED"


# ---- several components --------------------------------------------------------------------------


def test_components_of_one_project_keep_apart(tmp_path: Path) -> None:
    urls = {name: written(tmp_path / name, f"job_{name}/main") for name in ("none", "a", "b")}
    common = {
        "mode": "maintain",
        "arroyo_database": "/nowhere.sqlite",
        "advanced": {"window": ATTRIBUTES["advanced"]["window"]},
    }
    documents = [{**common, "checkpoint_url": urls["none"]}]
    documents += [{**common, "checkpoint_url": urls[name], "deployment": name} for name in "ab"]
    _, defs = load(*documents)
    repository = defs.get_repository_def()
    every = [*repository.get_all_jobs(), *repository.sensor_defs, *repository.schedule_defs]
    names = {one.name for one in every} - {"__ASSET_JOB"}
    plain = {name for name in names if not re.match(r"arroyo_[ab]_", name)}
    for deployment in "ab":
        assert {name.replace("arroyo_", f"arroyo_{deployment}_") for name in plain} <= names
    assert "arroyo_fleet_schedule" in plain
    assert {"arroyo_store", "arroyo_a_store", "arroyo_b_store"} <= (defs.resources or {}).keys()
    keys = {key.to_user_string() for key in defs.resolve_all_asset_keys()}
    assert {
        "arroyo/job_none/main/checkpoint",
        "arroyo/a/job_a/main/checkpoint",
        "arroyo/b/job_b/main/checkpoint",
    } <= keys


@pytest.mark.parametrize(
    ("names", "what"),
    [((None, None), "have no deployment"), (("a-1", "a.1"), "are 'a-1'"), (("b", "b"), "are 'b'")],
)
def test_two_components_of_one_name_are_refused(names: tuple[Any, Any], what: str) -> None:
    found = refusal(*({"checkpoint_url": "/x", "deployment": name} for name in names))
    assert f"two components {what}: " in found
    assert re.search(r"defs\.yaml:1 and \S+defs\.yaml:\d", found)
    assert "deployment: NAME" in found


# ---- what is wrong -------------------------------------------------------------------------------

_WINDOW = {"jobs": ["x"], "between": "01:00-02:00"}
WRONG: dict[str, tuple[Any, str]] = {
    "checkpoint_uri": ("/x", "did you mean checkpoint_url?"),
    "checkpoint_url": ("ftp://x/y", "not a checkpoint URL"),
    "mode": ("maintian", "'view' or 'maintain'"),
    "arroyo_api_url": ("arroyo:5115", "begin it with http://"),
    "deployment": ("a b", "not a name"),
    "freshness": ("soon", "not a duration, such as 90s"),
    "advanced.layout": ("modern", "'auto', 'legacy' or 'protocol'"),
    "advanced.owners.0": ("streaming", "not an owner"),
    "advanced.schedules.flet": ("@daily", "did you mean fleet?"),
    "advanced.schedules.timezone": ("Europe/Berlinn", "name of a time zone"),
    "advanced.window.between": ("25:00-26:00", "HH:MM-HH:MM"),
    "advanced.window.jobs": ([], "at least 1 item"),
    "advanced.maintenance.most_jobs": (-4, "greater than or equal to 1"),
    "advanced.maintenance.gc.keep_days": (-1, "greater than or equal to 0"),
    "advanced.maintenance.compaction.sort": ("x", "'replay'"),
    "advanced.fork.nightly.epoch": (0, "greater than or equal to 1"),
    "advanced.fork.nightly.windows": (True, "did you mean window?"),
    "advanced.sensor.events": (0, "greater than 0"),
    "advanced.verify.audit_after": ("1 fortnight", "not a duration"),
    "advanced.verify.health.usuall": (1, "the fields are"),
}
_BESIDE: dict[str, dict[str, Any]] = {
    "advanced.window": _WINDOW,
    "advanced.fork.nightly": {"source": "a"},
}


def wrong_at(place: str) -> dict[str, Any]:
    """The attributes with a wrong value at a place."""
    value: Any = WRONG[place][0]
    names = place.split(".")
    while names:
        name = names.pop()
        beside = _BESIDE.get(".".join(names), {})
        value = [value] if name.isdigit() else {**beside, name: value}
    return {"checkpoint_url": "/x", **value}


@pytest.mark.parametrize("place", WRONG)
def test_what_is_wrong_is_named_by_the_schema_and_when_loading(place: str) -> None:
    attributes, expected = wrong_at(place), WRONG[place][1]
    schema = Draft202012Validator(ArroyoStateComponent.model().model_json_schema())
    (found,) = schema.iter_errors(attributes)
    path = [str(part) for part in found.absolute_path]
    path += re.findall(r"\('(\w+)' was unexpected\)", found.message)  # as `dg` finds its line
    assert ".".join(path) == place
    text = refusal(attributes)
    assert re.search(rf"defs\.yaml:\d+: attributes\.{re.escape(place)}: ", text)
    assert expected in text
    assert len(text.splitlines()) == 1


def test_what_the_schema_cannot_say_is_the_last_line() -> None:
    found = refusal({"checkpoint_url": "/x", "storage_options": {"secret_access_key": "hunter2"}})
    assert re.search(r"defs\.yaml:1: .*secret_access_key must name an environment variable", found)
    assert "hunter2" not in found
    status = refusal({"checkpoint_url": "/x", "advanced": {"assume": {"orders/main": "flying"}}})
    assert re.search(r"defs\.yaml:1: the status of a job is unknown .*flying.* use one of ", status)
    cron = {"schedules": {"fleet": "every day"}}
    schedule = refusal({"checkpoint_url": "/x", "advanced": cron})
    assert re.search(r"defs\.yaml:1: .*every day.*arroyo_fleet_schedule", schedule)


def test_a_variable_that_is_not_set_is_named_as_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARROYO_TEST_NOWHERE", raising=False)
    found = refusal({"checkpoint_url": "{{ env.ARROYO_TEST_NOWHERE }}"})
    assert found.endswith(
        "attributes.checkpoint_url: should be a valid string, and is empty: if it names an "
        "environment variable, set that variable"
    )


def test_templates_are_allowed_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARROYO_TEST_JOBS", "7")
    schedules = "{{ {'gc': '@daily'} }}"
    maintenance = {"most_jobs": "{{ env.ARROYO_TEST_JOBS|int }}"}
    attributes: dict[str, Any] = {
        "checkpoint_url": "{{ env.HOME }}/x",
        "advanced": {"maintenance": maintenance, "schedules": schedules},
    }
    schema = Draft202012Validator(ArroyoStateComponent.model().model_json_schema())
    assert list(schema.iter_errors(attributes)) == []
    attributes["advanced"]["schedules"] = {"gc": "@daily"}
    (component,), _ = load(attributes)
    assert component.advanced.maintenance.most_jobs == 7
    assert component.checkpoint_url == f"{os.environ['HOME']}/x"


# ---- the schema ----------------------------------------------------------------------------------


def fields(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, field in node.get("properties", {}).items():
        yield f"{path}.{name}", field


def test_every_field_of_the_schema_has_a_description() -> None:
    schema = ArroyoStateComponent.model().model_json_schema()
    ours = [schema, *(one for name, one in schema["$defs"].items() if _is_ours(name))]
    found = [(one.get("title"), *field) for one in ours for field in fields(one)]
    assert len(found) > 70
    assert [(title, name) for title, name, field in found if not field.get("description")] == []
    examples = {name for _, name, field in found if field.get("examples")}
    assert {".checkpoint_url", ".storage_options", ".owners", ".between"} <= examples


def _is_ours(name: str) -> bool:
    """Whether a definition is of this package; those of `translation` are Dagster's."""
    return name != "AssetSpecUpdateKwargsModel" and "PartitionsDefinition" not in name


def test_every_argument_of_the_python_api_has_a_field() -> None:
    arguments = inspect.signature(build_arroyo_definitions).parameters.keys()
    options = {field.name for field in dataclasses.fields(ArroyoOptions)}
    elsewhere = {
        "store": "checkpoint_url",
        "options": "advanced",
        "pipelines": "defs_state",
        "runner": "maintenance",
        "translator": "translation",
        "waiting_limit": "verify",
        "sdf": "dataflows",
        "directory": "assume",
    }
    fields = ArroyoStateComponent.model_fields.keys() | Advanced.model_fields.keys()
    assert {elsewhere.get(name, name) for name in arguments | options} <= fields
    top = "checkpoint_url mode running delete deployment storage_options delete_options gone"
    top += " arroyo_api_url arroyo_api_token arroyo_database freshness lineage defs_state"
    expected = {*top.split(), "translation", "advanced"}
    assert ArroyoStateComponent.model_fields.keys() == expected


# ---- dg ------------------------------------------------------------------------------------------

STEPS = """
import json, os, sys
from pathlib import Path
from click.testing import CliRunner
from dagster_dg_cli.cli import create_dg_cli

cli = create_dg_cli()
for folder, *arguments in json.loads(sys.argv[1]):
    os.chdir(folder)
    if arguments[0] == "write":
        Path(arguments[1]).write_text(arguments[2])
        continue
    result = CliRunner().invoke(cli, arguments)
    print(json.dumps([result.exit_code, result.output]))
"""


def run_dg(home: Path, *steps: list[str]) -> list[tuple[int, str]]:
    """Run commands of `dg`, all in one process: its start costs five seconds."""
    environment = {
        **os.environ,
        "ARROYO__CHECKPOINT_URL": "/does/not/exist",
        "COLUMNS": "500",
        "DAGSTER_DISABLE_TELEMETRY": "1",
        "VIRTUAL_ENV": sys.prefix,
        "XDG_CONFIG_HOME": str(home),
    }
    answer = subprocess.run(
        [sys.executable, "-c", STEPS, json.dumps(steps)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return [tuple(json.loads(line)) for line in answer.stdout.splitlines() if line[:1] == "["]


def test_dg_scaffolds_and_checks_projects(tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(EXAMPLE, project)
    staging = project / "streaming" / "defs" / "staging"
    here, wrong = str(project), f"type: {TYPE}\nattributes:\n  checkpoint_url: /x\n"
    url = ["--checkpoint-url", "s3://bucket/staging", "--deployment", "staging"]
    scaffolded, checked, accepted, typo, refused, ours = run_dg(
        tmp_path,
        [here, "scaffold", "defs", TYPE, "staging", *url],
        [here, "check", "yaml"],
        [here, "check", "defs"],
        [here, "write", str(staging / "defs.yaml"), f"{wrong}  lineage: {{sinkz: true}}\n"],
        [here, "check", "yaml", str(staging)],
        [here, "write", str(staging / "defs.yaml"), wrong],
        [here, "check", "defs"],
        [str(ROOT), "check", "defs"],
    )
    assert scaffolded[0] == checked[0] == accepted[0] == ours[0] == 0, (scaffolded, accepted, ours)
    assert typo[0] == 1
    assert "staging/defs.yaml:4 - " in typo[1]
    assert "attributes.lineage.sinkz Additional properties are not allowed" in typo[1]
    assert refused[0] == 1


@pytest.mark.parametrize("given", [{}, {"deployment": "a", "arroyo_api_url": "http://arroyo"}])
def test_a_scaffolded_file_is_short_and_valid(given: dict[str, str], tmp_path: Path) -> None:
    params = ArroyoStateParams(checkpoint_url=str(tmp_path), **given)
    request = dg.ScaffoldRequest(TYPE, tmp_path, "yaml", tmp_path, params)
    ArroyoStateScaffolder().scaffold(request)
    text = (tmp_path / "defs.yaml").read_text()
    assert len(text.splitlines()) <= 15
    assert max(map(len, text.splitlines())) <= 100
    everything = yaml.safe_load(re.sub(r"(?m)^  # (\w+: )", r"  \1", text))["attributes"]
    assert yaml.safe_load(text)["attributes"].items() <= everything.items()
    assert {"running", "delete"} <= everything.keys()
    load(everything)
