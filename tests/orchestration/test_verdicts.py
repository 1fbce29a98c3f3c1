"""A verdict stays when the sensor reports something newer, whoever asked for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from arroyo_dagster.engine.in_process import run_pipeline
from arroyo_dagster.state.storage import open_store
from tests.fleets import Written, protocol_job
from tests.orchestration.launching import InProcess, in_process
from tests.word_services import random_words, words_services

DEFINITIONS = """
import dagster as dg
from arroyo_dagster import ArroyoOptions, SensorOptions, VerifyOptions, build_arroyo_definitions
from tests.word_services import words_dataflow

ours = build_arroyo_definitions(
    {url!r},
    running=True,
    options=ArroyoOptions(
        sensor=SensorOptions(interval_seconds=1),
        verify=VerifyOptions(audit_after=1e12),  # level 1: what the files hold is made up
        dataflows=[words_dataflow()],
    ),
)
defs = dg.Definitions.merge(ours, dg.Definitions(executor=dg.in_process_executor))
"""
COUNTS = ["sdf", "tests", "words", "state", "count", "counts"]
ORDERS = ["arroyo", "orders", "main", "checkpoint"]
SDF_CHECKS = ("keys_unique", "not_stale", "restorable", "ttl_effective")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[InProcess]:
    store = open_store(str(tmp_path / "checkpoints"))
    Written(store, protocol_job("orders")).epochs(1)
    _count(tmp_path, 60)
    text = DEFINITIONS.format(url=str(tmp_path / "checkpoints"))
    with in_process(tmp_path, text, InProcess) as found:
        found.tick()
        yield found


def _count(folder: Path, rows: int) -> None:
    store = open_store(str(folder / "checkpoints"))
    (count, *_) = words_services(store, random_words(rows, 1), per_epoch=60)
    run_pipeline(count, store)


def test_verdicts_on_states_stay_with_newer_epochs_of_their_owner(server: InProcess) -> None:
    green = dict.fromkeys(SDF_CHECKS, ("SUCCEEDED", "WARN"))
    server.launch("sdf_tests_words", {})
    reported, shown = server.checks(COUNTS)
    assert shown == green
    _count(server.folder, 180)
    server.tick()
    newer, still = server.checks(COUNTS)
    assert newer > reported
    assert still == green


def test_verdicts_on_a_state_that_their_run_materialized_stay(server: InProcess) -> None:
    _count(server.folder, 180)
    run = server.launch("sdf_tests_words", {})
    _, shown = server.checks(COUNTS)
    assert {status for status, _ in shown.values()} == {"SUCCEEDED"}
    made = server.instance.get_latest_materialization_event(dg.AssetKey(COUNTS))
    assert made is not None
    assert made.run_id == run
    server.tick()
    _count(server.folder, 240)
    server.tick()
    assert server.checks(COUNTS)[1] == shown


def test_verdicts_of_checks_that_a_user_executed_stay(server: InProcess) -> None:
    checks = [(ORDERS, name) for name in ("restorable", "healthy")]
    server.launch("__ASSET_JOB", {}, checks=checks)
    reported, shown = server.checks(ORDERS)
    assert shown == {"restorable": ("SUCCEEDED", "ERROR"), "healthy": ("SUCCEEDED", "WARN")}
    Written(open_store(str(server.folder / "checkpoints")), protocol_job("orders")).epochs(2)
    server.tick()
    newer, still = server.checks(ORDERS)
    assert newer > reported
    assert still == shown
