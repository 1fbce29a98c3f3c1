"""The requests that each schedule makes for a pipeline."""

from __future__ import annotations

import pytest

from arroyo_dagster.orchestration import PipelineList, VerifyOptions
from arroyo_dagster.orchestration.pipelines.model import ListedPipeline
from arroyo_dagster.state.planning.polling import Requests
from tests.documentation import PROJECT
from tests.fleets import Written, protocol_job
from tests.orchestration.conftest import Deployment
from tests.orchestration.results import configured
from tests.stores import Counting

PER_PIPELINE = {
    "verify": Requests(1, 0),
    "fleet": Requests(3, 2),
    "compaction": Requests(2, 2),
    "gc": Requests(1, 0),
}
"""The requests of a schedule for each pipeline, as the page on sizing shows them."""
DUE = Requests(14, 41)
"""At most those of a run of `arroyo_verify` for each pipeline that is due, with four epochs."""
PIPELINES = 4


def _made(counting: Counting) -> Requests:
    lists = counting.calls["list"] + counting.calls["list_dir"]
    return Requests(lists, counting.calls.total() - lists)


def _check(made: Requests, shown: Requests, row: str) -> None:
    # Besides those of each pipeline, a run lists the root some times.
    assert made.lists <= shown.lists * PIPELINES + 4, made
    assert made.gets <= shown.gets * PIPELINES + 1, made
    assert row in (PROJECT / "docs" / "operate" / "sizing.md").read_text()


@pytest.fixture
def jobs(deployed: Deployment) -> list[Written]:
    """Four pipelines with three epochs, which were verified, and reported."""
    jobs = [Written(deployed.store, protocol_job(f"p{at}")) for at in range(PIPELINES)]
    for job in jobs:
        job.epochs(3)
    roots = {str(job.paths.root): job.paths.root.split("/") for job in jobs}
    managed = [ListedPipeline(root, tuple(key), managed=True) for root, key in roots.items()]
    listed = PipelineList(
        deployed.store.url, tuple(managed), {one.root: one.key for one in managed}
    )
    # At level 1: what the files hold is made up.
    deployed.build(pipelines=listed, verify=VerifyOptions(audit_after=1e12))
    deployed.tick()
    assert deployed.run("arroyo_verify").success
    return jobs


@pytest.mark.usefixtures("jobs")
@pytest.mark.parametrize("name", PER_PIPELINE)
def test_a_schedule_makes_the_requests_that_the_page_shows(deployed: Deployment, name: str) -> None:
    counting = deployed.wrap(Counting)
    schedule = f"arroyo_{name}_schedule"
    if name == "fleet":
        deployed.run("arroyo_fleet")
    else:
        deployed.due(schedule)
    shown = PER_PIPELINE[name]
    made = _made(counting)
    assert (made.lists // PIPELINES, made.gets // PIPELINES) == (shown.lists, shown.gets)
    _check(made, shown, f"| `{schedule}` | {shown.lists} | {shown.gets} |")


def test_a_run_makes_the_requests_that_the_page_shows_for_what_is_due(
    deployed: Deployment, jobs: list[Written]
) -> None:
    for job in jobs:
        job.epochs(1)
    counting = deployed.wrap(Counting)
    config = {"pipelines": [str(job.paths.root) for job in jobs]}
    run = deployed.run("arroyo_verify", run_config=configured("arroyo_verify_op", **config))
    assert run.success
    row = "| a run of `arroyo_verify`, for a pipeline with four epochs that is due | "
    _check(_made(counting), DUE, f"{row}{DUE.lists} | {DUE.gets} |")
