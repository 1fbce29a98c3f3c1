"""Tenants: which jobs an expression assigns to whom, and that every dollar has one tenant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.ids import JobId, PipelineId
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.planning.costs import Prices, Requests, inspection_a_day
from arroyo_dagster.state.planning.fleet.tenants import (
    NO_TENANT,
    JobCost,
    TenantExpression,
    costs_by_tenant,
    with_inspection,
)

PROTOCOL = JobPaths(JobId("main"), PipelineId("acme-orders"))
LEGACY = JobPaths(JobId("job_7"))


@pytest.mark.parametrize(
    ("text", "protocol", "legacy"),
    [
        ("{pipeline}", "acme-orders", NO_TENANT),
        ("{job}", "main", "job_7"),
        ("team {pipeline}/{job}", "team acme-orders/main", NO_TENANT),
        ("{name}", "Orders of Acme", NO_TENANT),
        ("^(?P<tenant>[^-/]+)", "acme", "job_7"),
        ("of (?P<tenant>.*)$", "Acme", NO_TENANT),
        ("^(?P<tenant>x)?", NO_TENANT, NO_TENANT),
    ],
)
def test_an_expression_derives_the_tenant_from_names(text: str, protocol: str, legacy: str) -> None:
    expression = TenantExpression(text)
    assert expression.tenant(PROTOCOL, "Orders of Acme") == protocol
    assert expression.tenant(LEGACY) == legacy


@pytest.mark.parametrize(
    "text",
    [
        *("", "acme", "{tenant}", "{job", "(?P<tenant>", "{job.x}", "{}", "{0}", "{job[0]}"),
        *("{job:d}", "{job:999999999999}", "{job:{pipeline}}", "{job!r}", "{job!x}", "{job:}{"),
        "(?P<tenant>a{99999999999999999999})",
        "(?P<tenant>" + "(" * 5000 + ")" * 5000 + ")",
        r"(?P<tenant>a)(?P<tenant>b)",
    ],
)
def test_an_expression_that_names_no_part_of_a_job_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="no expression over names"):
        TenantExpression(text)


def test_prices_are_those_of_the_page_on_sizing() -> None:
    prices = Prices()
    assert prices.storage_usd(1e12) == pytest.approx(23)
    assert prices.requests_usd(puts=1000, lists=1000, gets=10_000) == pytest.approx(0.014)
    assert Requests(lists=1000, gets=1000).usd == pytest.approx(0.0054)
    # The table of docs/operate/sizing.md: 100 jobs, polls and schedules.
    assert inspection_a_day(100).usd == pytest.approx(0.30 + 0.67, abs=0.01)


JOBS = st.lists(
    st.builds(
        JobCost,
        job=st.uuids().map(str),
        tenant=st.sampled_from(["a", "b", NO_TENANT]),
        size_bytes=st.integers(0, 10**15),
        objects=st.integers(0, 10**9),
        writes_a_day=st.floats(0, 1e9),
    ),
    max_size=8,
)


@given(jobs=JOBS, gb_month=st.integers(0, 10**6))
def test_each_job_has_one_tenant_and_the_sums_are_those_of_the_jobs(
    jobs: list[JobCost], gb_month: int
) -> None:
    prices = Prices(gb_month=gb_month)
    shared = with_inspection(jobs, Requests(lists=70, gets=700)) if jobs else []
    assert sum(job.lists_a_day for job in shared) == pytest.approx(70 if jobs else 0)
    found = costs_by_tenant(shared, prices)
    assert sorted(job.job for one in found for job in one.jobs) == sorted(job.job for job in jobs)
    assert all(job.tenant == one.tenant for one in found for job in one.jobs)
    every = sum(job.month_usd(prices) for job in shared)
    assert sum(one.month_usd for one in found) == pytest.approx(every)
    assert [one.month_usd for one in found] == sorted(
        (one.month_usd for one in found), reverse=True
    )
