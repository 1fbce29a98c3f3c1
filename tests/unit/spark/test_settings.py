"""Which Spark is used: what this process already is, then the settings, then Spark's own files."""

from __future__ import annotations

from typing import Any

import pytest

from arroyo_dagster.errors import InputError
from arroyo_dagster.spark.settings import SparkEnvironment, SparkSettings, choose_spark

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
