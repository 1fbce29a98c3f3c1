"""The requests that each schedule makes for a job."""

from __future__ import annotations

from typing import Any

import pytest

from arroyo_dagster.state.planning.polling import Requests
from arroyo_dagster.state.storage import Counting
from tests.documentation import PROJECT
from tests.fleets import Written, protocol_job

PER_JOB = {
    "fleet": Requests(6, 4),
    "refresh": Requests(11, 15),
    "sync": Requests(2, 0),
    "compaction": Requests(4, 2),
    "gc": Requests(3, 0),
}
"""The requests of a run for each job, as the page on sizing shows them."""
JOBS = 4


def _made(counting: Counting) -> Requests:
    lists = counting.calls["list"] + counting.calls["list_dir"]
    return Requests(lists, counting.calls.total() - lists)


def _serve(deployed: Any, name: str) -> None:
    """Evaluate a schedule, and execute the first run that it requests."""
    job = deployed.defs.resolve_schedule_def(f"arroyo_{name}_schedule").job_name
    for one in (deployed.due(f"arroyo_{name}_schedule").run_requests or [])[:1]:
        deployed.run(job, run_config=one.run_config, tags=one.tags)


@pytest.mark.parametrize("name", PER_JOB)
def test_a_schedule_makes_the_requests_that_the_page_shows(deployed: Any, name: str) -> None:
    jobs = [Written(deployed.store, protocol_job(f"p{at}")) for at in range(JOBS)]
    for job in jobs:
        job.epochs(3)
    deployed.tick()
    deployed.run("arroyo_refresh_fleet")
    for job in jobs:
        job.epochs(1)
    counting = deployed.wrap(Counting)
    _serve(deployed, name)
    made, shown = _made(counting), PER_JOB[name]
    # Besides those of each job, a run lists the root some times.
    assert shown.lists * JOBS <= made.lists <= shown.lists * JOBS + 4
    assert made.gets == shown.gets * JOBS
    row = f"| `arroyo_{name}_schedule` | {shown.lists} | {shown.gets} |"
    assert row in (PROJECT / "docs" / "operate" / "sizing.md").read_text()
