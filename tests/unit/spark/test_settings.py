"""Which Spark is used: what this process already is, then the settings, then Spark's own files."""

from __future__ import annotations

from typing import Any

import pytest

from arroyo_dagster.errors import InputError
from arroyo_dagster.spark.settings import (
    SparkEnvironment,
    SparkSettings,
    choose_spark,
    parse_properties,
    parse_submit_arguments,
)

DEFAULTS = {"spark.master": "spark://defaults:7077"}


@pytest.mark.parametrize(
    ("settings", "environment", "target", "reason"),
    [
        ({}, {}, "local[*]", "the default"),
        ({}, {"defaults": DEFAULTS}, "spark://defaults:7077", "spark-defaults.conf"),
        ({}, {"remote": "sc://a:1", "defaults": DEFAULTS}, "sc://a:1", "SPARK_REMOTE"),
        ({"master": "yarn"}, {"remote": "sc://a:1"}, "yarn", "the setting"),
        ({"remote": "sc://b:1"}, {"defaults": DEFAULTS}, "sc://b:1", "the setting"),
        ({"conf": {"spark.master": "yarn"}}, {"defaults": DEFAULTS}, "yarn", "the setting"),
        ({}, {"submitted": "yarn", "remote": "sc://a:1"}, "yarn", "spark-submit"),
        ({"master": "yarn"}, {"active": "local[2]"}, "local[2]", "the active session"),
    ],
)
def test_the_process_comes_first_then_settings_then_configuration(
    settings: Any, environment: Any, target: str, reason: str
) -> None:
    choice = choose_spark(SparkSettings(**settings), SparkEnvironment(**environment))
    assert (choice.target, choice.reason) == (target, reason)


@pytest.mark.parametrize("process", ["active", "submitted"])
def test_a_setting_without_effect_is_named(process: str) -> None:
    environment = SparkEnvironment(**{process: "local[2]"})
    line = str(choose_spark(SparkSettings(master="yarn"), environment))
    assert line.endswith("; yarn has no effect")
    same = choose_spark(SparkSettings(master="local[2]"), environment)
    assert "no effect" not in str(same)


def test_a_token_is_not_printed() -> None:
    settings = SparkSettings(remote="sc://host:15002/;token=CANARY", conf={"x.password": "CANARY"})
    choice = choose_spark(settings, SparkEnvironment())
    assert choice.connect
    assert "CANARY" not in f"{choice} {choice!r} {settings!r}"
    ignored = choose_spark(settings, SparkEnvironment(active="local[2]"))
    assert "CANARY" not in f"{ignored} {ignored!r}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"master": "yarn", "remote": "sc://a"}, "a Spark master and a Spark Connect server"),
        ({"remote": "sc://a", "packages": ("a:b:1",)}, "loads its jars when it starts"),
        ({"remote": "sc://a", "conf": {"spark.jars.packages": "a:b:1"}}, "loads its jars"),
    ],
)
def test_what_cannot_work_is_refused_at_once(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        SparkSettings(**given)


def test_packages_are_added_to_those_of_the_settings() -> None:
    settings = SparkSettings(packages=("a:b:1", "c:d:2"), conf={"spark.jars.packages": "e:f:3"})
    assert settings.conf_with_packages == {"spark.jars.packages": "e:f:3,a:b:1,c:d:2"}
    assert SparkSettings().conf_with_packages == {}


@pytest.mark.parametrize(
    ("target", "in_process"),
    [
        ("local", True),
        ("local[*]", True),
        ("local[4,2]", True),
        ("local-cluster[2,1,1024]", False),
        ("spark://local:7077", False),
        ("sc://local", False),
    ],
)
def test_only_local_masters_run_tasks_in_this_process(target: str, in_process: bool) -> None:
    choice = choose_spark(SparkSettings(master=target), SparkEnvironment())
    assert choice.in_process is in_process


def test_properties_are_read_as_spark_reads_them() -> None:
    text = """
# a comment
! another
spark.master            spark://host:7077
spark.app.name=two words = one value
  spark.driver.memory : 4g
spark.empty
"""
    assert parse_properties(text) == {
        "spark.master": "spark://host:7077",
        "spark.app.name": "two words = one value",
        "spark.driver.memory": "4g",
    }


def test_submit_arguments_give_master_remote_and_settings() -> None:
    text = "--master yarn --conf spark.a=b=c --remote sc://a -c 'spark.b=two words' pyspark-shell"
    assert parse_submit_arguments(text) == {
        "spark.master": "yarn",
        "spark.a": "b=c",
        "spark.remote": "sc://a",
        "spark.b": "two words",
    }
    assert parse_submit_arguments("--master 'unfinished") == {}
