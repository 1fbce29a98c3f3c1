"""The component: YAML to the same definitions, as `dg` loads it; what is wrong has a name."""

from __future__ import annotations

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
from dagster._utils.schedules import (
    is_valid_cron_string,
    schedule_execution_time_iterator,
)
from dagster.components.testing import create_defs_folder_sandbox
from hypothesis import example, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from arroyo_dagster.orchestration.component import ArroyoStateComponent
from arroyo_dagster.orchestration.definitions import build_arroyo_definitions
from arroyo_dagster.orchestration.yaml.cron import CRON
from arroyo_dagster.orchestration.yaml.scaffolder import format_yaml

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "dagster-project"
TYPE = "arroyo_dagster.ArroyoStateComponent"
ATTRIBUTES: dict[str, Any] = {
    "checkpoint_url": "/does/not/exist",
    "layout": "protocol",
    "deployment": "blue",
    "sensor_running": True,
    "compaction_sensor": True,
    "schedules": {"fleet": "*/5 * * * *", "timezone": "Europe/Berlin", "running": True},
    "arroyo_api_url": "http://arroyo:5115",
    "window": {"jobs": ["job_x"], "between": "02:00-04:00", "time_zone": "Asia/Tokyo"},
    "fork": {
        "nightly": {"source": "job_a", "job": "job_b", "source_url": "/other", "window": True},
        "cron": "7 4 * * *",
    },
    "owners": ["team:streaming"],
    "tags": {"domain": "payments"},
    "translation": {"group_name": "streaming", "tags": {"team": "platform"}},
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


def test_yaml_gives_the_definitions() -> None:
    (component,), defs = load(ATTRIBUTES)
    assert isinstance(component, ArroyoStateComponent)
    specs = {spec.key.to_user_string(): spec for spec in defs.resolve_all_asset_specs()}
    assert {"arroyo/blue/checkpoint", "arroyo/blue/fleet"} <= specs.keys()
    assert {spec.group_name for spec in specs.values()} == {"streaming"}
    for spec in specs.values():
        assert spec.owners == ["team:streaming"]
        assert (spec.tags["team"], spec.tags["domain"]) == ("platform", "payments")
    schedule = defs.resolve_schedule_def("arroyo_blue_fleet_schedule")
    assert schedule.cron_schedule == "*/5 * * * *"
    assert schedule.execution_timezone == "Europe/Berlin"
    assert schedule.default_status is dg.DefaultScheduleStatus.RUNNING
    window = defs.resolve_schedule_def("arroyo_blue_window_schedule")
    assert (window.cron_schedule, window.execution_timezone) == ("0 2 * * *", "Asia/Tokyo")
    fork = defs.resolve_schedule_def("arroyo_blue_fork_schedule")
    assert (fork.cron_schedule, fork.default_status.value) == ("7 4 * * *", "RUNNING")
    assert "arroyo/blue/forked_state" in specs
    assert defs.resolve_sensor_def("arroyo_blue_compaction_sensor").default_status.value == (
        "RUNNING"
    )


def test_a_fork_in_a_window_brings_what_starts_a_job_that_it_left_stopped() -> None:
    nightly = {"source": "job_a", "job": "job_b"}
    for in_window in (False, True):
        _, defs = load(
            {"checkpoint_url": "/x", "fork": {"nightly": nightly | {"window": in_window}}}
        )
        sensors = {one.name for one in defs.sensors or ()}
        assert ("arroyo_window_recovery" in sensors) is in_window
    _, defs = load({"checkpoint_url": "/x", "fork": {}})
    assert "arroyo_fork" in {job.name for job in defs.resolve_all_job_defs()}
    assert "arroyo_fork_schedule" not in {one.name for one in defs.schedules or ()}


# ---- several components --------------------------------------------------------------------------


def test_components_of_one_project_keep_apart(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    for name in ("none", "a", "b"):
        (tmp_path / name).mkdir()
    common = {"window": ATTRIBUTES["window"], "compaction_sensor": True}
    documents = [{**common, "checkpoint_url": str(tmp_path / "none")}]
    documents += [
        {**common, "checkpoint_url": str(tmp_path / name), "deployment": name} for name in "ab"
    ]
    _, defs = load(*documents)
    repository = defs.get_repository_def()
    every = [*repository.get_all_jobs(), *repository.sensor_defs, *repository.schedule_defs]
    names = {one.name for one in every} - {"__ASSET_JOB"}
    plain = {name for name in names if not re.match(r"arroyo_[ab]_", name)}
    for deployment in "ab":
        assert {name.replace("arroyo_", f"arroyo_{deployment}_") for name in plain} <= names
    assert "arroyo_fleet_schedule" in plain
    assert {"arroyo_store", "arroyo_a_store", "arroyo_b_store"} <= (defs.resources or {}).keys()
    with dg.DagsterInstance.ephemeral() as instance:
        for deployment in "ab":
            job = defs.resolve_job_def(f"arroyo_{deployment}_sync_partitions")
            key = f"job_{deployment}"
            folder = tmp_path / deployment / key / "checkpoints" / "checkpoint-0000001"
            folder.mkdir(parents=True)
            (folder / "metadata").write_bytes(b"")
            assert job.execute_in_process(instance=instance).success
        assert instance.get_dynamic_partitions("arroyo_a_jobs") == ["job_a"]
        assert instance.get_dynamic_partitions("arroyo_b_jobs") == ["job_b"]
        assert instance.get_dynamic_partitions("arroyo_jobs") == []


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

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "checkpoint_uri": ({"checkpoint_uri": "/x"}, "did you mean checkpoint_url?"),
    "layout": ({"layout": "modern"}, "'auto', 'legacy' or 'protocol'"),
    "checkpoint_url": ({"checkpoint_url": "ftp://x/y"}, "not a checkpoint URL"),
    "arroyo_api_url": ({"arroyo_api_url": "arroyo:5115"}, "begin it with http://"),
    "deployment": ({"deployment": "a b"}, "not a name"),
    "owners.0": ({"owners": ["streaming"]}, "not an owner"),
    "schedules.flet": ({"schedules": {"flet": "@daily"}}, "did you mean fleet?"),
    "schedules.gc": ({"schedules": {"gc": "every day"}}, "not a cron expression"),
    "schedules.fleet": ({"schedules": {"fleet": "99 * * * *"}}, "of possible times"),
    "schedules.audit": ({"schedules": {"audit": "0 0 31 2,4 *"}}, "of possible times"),
    "schedules.timezone": ({"schedules": {"timezone": "Europe/Berlinn"}}, "name of a time zone"),
    "window.between": ({"window": {"jobs": ["x"], "between": "25:00-26:00"}}, "HH:MM-HH:MM"),
    "window.jobs": ({"window": {"jobs": [], "between": "01:00-02:00"}}, "at least 1 item"),
    "maintenance.most_jobs": ({"maintenance": {"most_jobs": -4}}, "greater than or equal to 1"),
    "maintenance.keep_days": ({"maintenance": {"keep_days": -1}}, "greater than or equal to 0"),
    "maintenance.delete": ({"maintenance": {"delete": "perhaps"}}, "valid boolean"),
    "maintenance.compaction.sort": ({"maintenance": {"compaction": {"sort": "x"}}}, "'replay'"),
    "fork.cron": ({"fork": {"cron": "nightly"}}, "not a cron expression"),
    "fork.nightly.epoch": (
        {"fork": {"nightly": {"source": "a", "job": "b", "epoch": 0}}},
        "greater than or equal to 1",
    ),
    "fork.nightly.windows": (
        {"fork": {"nightly": {"source": "a", "job": "b", "windows": True}}},
        "did you mean window?",
    ),
    "sensor.events": ({"sensor": {"events": 0}}, "greater than or equal to 1"),
    "checks.recent_minutes": ({"checks": {"recent_minutes": 0}}, "greater than 0"),
}


@pytest.mark.parametrize("place", WRONG)
def test_what_is_wrong_is_named_by_the_schema_and_when_loading(place: str) -> None:
    wrong, expected = WRONG[place]
    attributes = {"checkpoint_url": "/x", **wrong}
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
    status = refusal({"checkpoint_url": "/x", "assume": {"orders/main": "flying"}})
    assert re.search(r"defs\.yaml:1: the status of a job is unknown .*flying.* use one of ", status)


def test_a_variable_that_is_not_set_is_named_as_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARROYO_TEST_NOWHERE", raising=False)
    found = refusal({"checkpoint_url": "{{ env.ARROYO_TEST_NOWHERE }}"})
    assert found.endswith(
        "attributes.checkpoint_url: should be a valid string, and is empty: if it names an "
        "environment variable, set that variable"
    )


NUMBERS = st.one_of(st.integers(0, 75).map(str), st.sampled_from(["00", "007", "*", "jan", "Mon"]))
BANDS = st.one_of(NUMBERS, st.tuples(NUMBERS, NUMBERS).map("-".join))
STEPPED = st.one_of(BANDS, st.tuples(BANDS, st.integers(0, 70).map(str)).map("/".join))
PARTS = st.one_of(STEPPED, st.sampled_from(["?", "l", "L", "mon#2", "2#6", "5#1,6#1", "L5", "-1"]))
LISTS = st.lists(PARTS, min_size=1, max_size=2).map(",".join)
POSSIBLE = [st.integers(0, top).map(str) | st.just("*") for top in (59, 23, 31, 12, 7)]
CRONS = st.one_of(
    st.tuples(*POSSIBLE).map(" ".join),
    st.tuples(*(st.one_of(one, one, one, LISTS) for one in POSSIBLE)).map(" ".join),
    st.lists(LISTS, min_size=4, max_size=6).map(" ".join),
    st.sampled_from(["@daily", "@Daily", "@reboot", "@daily ", " 0  0\t* * * ", ""]),
)
SURELY = re.compile(r"[0-9*,/\- ]+")


@given(CRONS)
@example("* * * 0-0 0")
def test_cron_expressions_are_those_that_dagster_accepts(text: str) -> None:
    ours = re.search(CRON, text) is not None
    if ours:
        assert is_valid_cron_string(text)
        assert cron_ticks(text)
    elif is_valid_cron_string(text):
        # What is refused beyond that: days that do not exist, month 0, and rare forms of names.
        no_month = re.search(r"\b0\b", " ".join(text.split()[2:4])) is not None
        assert no_month or not SURELY.fullmatch(text) or not cron_ticks(text)


def cron_ticks(text: str) -> bool:
    """Whether an expression has a next time."""
    try:
        next(schedule_execution_time_iterator(0.0, text, "UTC"))
    except Exception:
        return False
    return True


def test_templates_are_allowed_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARROYO_TEST_JOBS", "7")
    attributes = {
        "checkpoint_url": "{{ env.HOME }}/x",
        "maintenance": {"most_jobs": "{{ env.ARROYO_TEST_JOBS|int }}"},
        "schedules": "{{ {'gc': '@daily'} }}",
    }
    schema = Draft202012Validator(ArroyoStateComponent.model().model_json_schema())
    assert list(schema.iter_errors(attributes)) == []
    (component,), _ = load({**attributes, "schedules": {"gc": "@daily"}})
    assert component.maintenance.most_jobs == 7
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
    assert {".checkpoint_url", ".storage_options", ".owners", ".between", ".gc"} <= examples


def _is_ours(name: str) -> bool:
    """Whether a definition is of this package; those of `translation` are Dagster's."""
    return name != "AssetSpecUpdateKwargsModel" and "PartitionsDefinition" not in name


def test_every_argument_of_the_python_api_has_a_field() -> None:
    import inspect

    arguments = inspect.signature(build_arroyo_definitions).parameters.keys()
    elsewhere = {
        "store": "checkpoint_url",
        "runner": "maintenance",
        "translator": "translation",
        "schedules_running": "schedules",
        "recent": "checks",
        "health": "checks",
        "audit": "checks",
        "sdf": "checks",
        "directory": "assume",
    }
    assert {
        elsewhere.get(name, name) for name in arguments
    } <= ArroyoStateComponent.model_fields.keys()


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
        [here, "write", str(staging / "defs.yaml"), f"{wrong}  schedules: {{flet: '@daily'}}\n"],
        [here, "check", "yaml", str(staging)],
        [here, "write", str(staging / "defs.yaml"), wrong],
        [here, "check", "defs"],
        [str(ROOT), "check", "defs"],
    )
    assert scaffolded[0] == checked[0] == accepted[0] == ours[0] == 0, (scaffolded, accepted, ours)
    assert typo[0] == 1
    assert "staging/defs.yaml:4 - " in typo[1]
    assert "attributes.schedules.flet Additional properties are not allowed" in typo[1]
    assert refused[0] == 1


def test_a_scaffolded_file_lists_every_field_and_is_valid() -> None:
    given = {"checkpoint_url": "s3://bucket/x", "deployment": "a"}
    text = format_yaml(TYPE, ArroyoStateComponent, given)
    assert yaml.safe_load(text) == {"type": TYPE, "attributes": given}
    assert max(map(len, text.splitlines())) <= 100
    everything = yaml.safe_load(re.sub(r"(?m)^( +)#(- |  )?(\w)", r"\1\2\3", text))["attributes"]
    assert everything.keys() == ArroyoStateComponent.model_fields.keys()
    schema = Draft202012Validator(ArroyoStateComponent.model().model_json_schema())
    assert [error.message for error in schema.iter_errors(everything)] == []
