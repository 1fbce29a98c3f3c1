"""A job that the store denies is named by sensors, assets and checks, and hides no other job."""

from __future__ import annotations

from typing import Any

import pytest

from tests.denied import ALL, READS, Denied
from tests.fleets import Written, legacy_job, protocol_job
from tests.orchestration.conftest import told
from tests.orchestration.results import checks, failure, materialized

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
