"""A job that the store denies is named by sensors, assets and checks, and hides no other job."""

from __future__ import annotations

from typing import Any

import pytest

from tests.denied import ALL, READS, Denied
from tests.fleets import Written, legacy_job, protocol_job

ONE, OTHER = protocol_job("words"), legacy_job("other")


@pytest.mark.parametrize(("prefix", "verbs"), [("words/main", READS), ("words", ALL)])
def test_a_denied_job_is_unreadable_and_stops_nobody(
    deployed: Any, prefix: str, verbs: frozenset[str]
) -> None:
    for paths in (ONE, OTHER):
        Written(deployed.store, paths).epochs(2)
    deployed.tick()
    Written(deployed.store, OTHER).epochs(3)
    deployed.wrap(lambda store: Denied(store, prefix, verbs))
    tick = deployed.evaluate()
    deployed.keep(tick)
    assert [event.partition for event in tick.asset_events] == [str(OTHER.root)]
    assert deployed.run("arroyo_sync_partitions").success
    assert deployed.keys == [str(OTHER.root), str(ONE.root)]
    fleet = deployed.run("arroyo_fleet")
    (event,) = fleet.asset_materializations_for_node("arroyo_fleet_overview")
    assert event.metadata["arroyo/jobs_unreadable"].value == 1
    assert event.metadata["arroyo/jobs_vanished"].value == 0
    health = deployed.run("arroyo_health")
    assert health.success
    checks = {one.check_name: one for one in health.get_asset_check_evaluations()}
    readable = checks["newest_epoch_readable"]
    assert not readable.passed
    assert "permission denied" in str(readable.description)
    audit = deployed.run("arroyo_audit")
    assert not audit.success
    assert audit.asset_materializations_for_node("arroyo_audit_jobs")
