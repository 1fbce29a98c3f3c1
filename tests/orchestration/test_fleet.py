"""`fleet`: which pipelines are overlooked, vanished, broken or waiting, the worst first.
A job that the store denies is named, and hides no other one."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest

from arroyo_dagster.state import ParquetBackend
from tests.denied import ALL, READS, Denied
from tests.fleets import Written, legacy_job, protocol_job
from tests.internals import lease
from tests.jobs import run_word_job
from tests.orchestration.conftest import Deployment, told
from tests.orchestration.results import (
    COMPACT,
    JOB,
    KEY,
    PATHS,
    checks,
    event_metadata,
    failure,
    materialized,
)

CHECK = "every_pipeline_known"


def looked(deployed: Deployment) -> tuple[Any, dict[str, str]]:
    """The evaluation of the check, and the state of each pipeline, in the order of the table."""
    result = deployed.run("arroyo_fleet")
    assert result.success
    (event,) = materialized(result)
    table = event.metadata.get("pipelines")
    rows = {} if table is None else {one.data["pipeline"]: one.data for one in table.records}
    return checks(result)[CHECK], {root: row["state"] for root, row in rows.items()}


def test_a_deployment_without_pipelines_has_a_fleet(deployed: Deployment) -> None:
    check, states = looked(deployed)
    assert states == {}
    assert "at least" not in (check.description or "")


def test_what_was_not_verified_yet_is_a_warning_and_then_green(at_rest: Deployment) -> None:
    check, states = looked(at_rest)
    assert not check.passed
    assert check.severity.value == "WARN"
    assert "was never verified" in check.description
    assert "arroyo_verify" in check.description
    assert at_rest.run("arroyo_verify").success
    check, states = looked(at_rest)
    assert check.passed
    assert states == {KEY: "at rest"}


def test_a_broken_pipeline_comes_first_and_makes_the_check_red(at_rest: Deployment) -> None:
    for name in ("aaa", "zzz"):
        run_word_job(at_rest.store, **JOB, job=name, max_epochs=8)
    at_rest.build()
    at_rest.store.delete_many([ParquetBackend(at_rest.store, PATHS).load().paths[0]])
    assert not at_rest.run("arroyo_verify").success
    check, states = looked(at_rest)
    assert not check.passed
    assert check.severity.value == "ERROR"
    assert next(iter(states.items())) == (KEY, "broken")
    assert KEY in check.description


def test_a_verdict_that_changes_is_seen_in_the_fleet_at_once(at_rest: Deployment) -> None:
    path, *_ = ParquetBackend(at_rest.store, PATHS).load().paths
    data = at_rest.store.read(path)
    assert at_rest.run("arroyo_verify").success
    looked(at_rest)
    key = dg.AssetKey(["arroyo", *KEY.split("/"), "checkpoint"])
    page = dg.define_asset_job("page", dg.AssetSelection.checks_for_assets(key))
    at_rest.defs = dg.Definitions.merge(at_rest.defs, dg.Definitions(jobs=[page]))
    for broken, job in ((True, "arroyo_verify"), (False, "page"), (True, "arroyo_verify")):
        at_rest.store.delete_many([path]) if broken else at_rest.store.put(path, data)
        assert at_rest.run(job).success is not broken
        check = at_rest.check("", CHECK)
        assert (check.passed, check.is_error) == (not broken, broken)
        fleet = dg.AssetKey(["arroyo", "fleet"])
        (made,) = at_rest.instance.fetch_materializations(fleet, limit=1).records
        assert event_metadata(made.asset_materialization)["arroyo/broken"] == broken
        assert made.run_id == ""  # as that of the verdict: Dagster shows it


def test_a_pipeline_that_the_definitions_do_not_know_is_verified_as_a_row(
    at_rest: Deployment,
) -> None:
    at_rest.run("arroyo_verify")
    run_word_job(at_rest.store, **JOB, job="new", max_epochs=8)
    check, states = looked(at_rest)
    assert states["words/new"] == "unknown"
    assert check.severity.value == "WARN"
    assert "reload the definitions" in check.description
    paths = PATHS.__class__(job="new", pipeline=PATHS.pipeline)  # type: ignore[arg-type]
    at_rest.store.delete_many([ParquetBackend(at_rest.store, paths).load().paths[0]])
    check, states = looked(at_rest)
    assert next(iter(states.items())) == ("words/new", "broken")
    assert check.severity.value == "ERROR"


def test_a_vanished_pipeline_is_red_until_it_is_named_as_gone(at_rest: Deployment) -> None:
    other = Written(at_rest.store, legacy_job("old"))
    other.epochs(2)
    at_rest.build()
    other.vanish()
    at_rest.build()  # the definitions keep it
    check, states = looked(at_rest)
    assert states["old"] == "vanished"
    assert check.severity.value == "ERROR"
    assert not at_rest.run("arroyo_verify").success
    assert "there is no such job" in at_rest.check("old").description
    at_rest.build(gone=["old"])
    _, states = looked(at_rest)
    assert "old" not in states


def test_a_pipeline_that_is_called_gone_and_is_there_says_so(at_rest: Deployment) -> None:
    Written(at_rest.store, legacy_job("old")).epochs(2)
    at_rest.build()
    at_rest.build(gone=["old"])
    at_rest.run("arroyo_verify")
    check, states = looked(at_rest)
    assert states["old"] == "unknown"
    assert "take it out of `gone`" in check.description
    assert "old" not in str(at_rest.evaluate().skip_message)  # a reload does not find it


def test_what_waits_is_a_row_and_an_error_after_a_day(at_rest: Deployment) -> None:
    at_rest.run("arroyo_verify")
    with lease(at_rest.store, PATHS, "somebody"):
        config = {"ops": {"arroyo_compacted_state": {"config": {"lease_wait_seconds": 0.0}}}}
        assert at_rest.run("arroyo_compaction", run_config=config).success
    check, _ = looked(at_rest)
    assert check.passed
    at_rest.build(waiting_limit=0.0)
    check, _ = looked(at_rest)
    assert not check.passed
    assert "the job is leased by" in check.description
    assert at_rest.run("arroyo_compaction", run_config=COMPACT).success
    check, _ = looked(at_rest)
    assert check.passed


def test_totals_are_numbers(at_rest: Deployment) -> None:
    Written(at_rest.store, protocol_job("words2")).epochs(2)
    at_rest.tick()
    (event,) = materialized(at_rest.run("arroyo_fleet"))
    assert event.metadata["arroyo/pipelines"].value == 2
    assert event.metadata["arroyo/at_rest"].value == 1
    assert event.metadata["arroyo/bytes"].value > 0


ONE, OTHER = protocol_job("words"), legacy_job("other")


@pytest.mark.usefixtures("retries_at_once")
@pytest.mark.parametrize(("prefix", "verbs"), [("words/main", READS), ("words", ALL)])
def test_a_denied_job_is_unreadable_and_stops_nobody(
    deployed: Any, prefix: str, verbs: frozenset[str]
) -> None:
    for paths in (ONE, OTHER):
        Written(deployed.store, paths).epochs(2)
    deployed.tick()
    Written(deployed.store, OTHER).epochs(3)
    deployed.wrap(lambda store: Denied(store, prefix, verbs))
    deployed.build()  # both stay assets
    tick = deployed.evaluate()
    deployed.keep(tick)
    assert list(told(tick)) == ["other"]
    fleet = deployed.run("arroyo_fleet")
    assert fleet.success
    (event,) = materialized(fleet)
    assert event.metadata["arroyo/unreadable"].value == 1
    assert event.metadata["arroyo/vanished"].value == 0
    assert not checks(fleet)["every_pipeline_known"].passed
    verify = deployed.run("arroyo_verify")
    assert not verify.success
    assert "words/main" in failure(verify).description
    assert deployed.check("other")
