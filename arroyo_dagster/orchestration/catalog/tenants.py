"""The cost of jobs by tenant, from the catalogue: it makes no request to the store."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arroyo_dagster.orchestration.directory import ArroyoDirectory
from arroyo_dagster.orchestration.rendering import number
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.units import format_bytes
from arroyo_dagster.state.planning.costs import LIST_PRICES, Prices
from arroyo_dagster.state.planning.fleet.tenants import TenantExpression, costs_by_tenant


@dataclass(frozen=True, kw_only=True)
class TenantOptions:
    """Who pays for what.

    Attributes:
        expression: what a tenant is, as of `TenantExpression`.
        prices: what the store charges.
    """

    expression: str
    prices: Prices = LIST_PRICES

    def __post_init__(self) -> None:
        TenantExpression(self.expression)


def tenant_lines(
    store: ArroyoStateStore,
    directory: ArroyoDirectory,
    jobs: Sequence[JobPaths],
    options: TenantOptions,
) -> Iterator[Mapping[str, Any]]:
    """Yield a line for each tenant, the most expensive first.

    Raises:
        FormatError: an object of the catalogue does not decode.
        InputError: a source of status cannot be used.
    """
    from arroyo_dagster.state.operations.catalog.fleet import catalogued_costs

    answers = directory.directory(store).look_up(jobs)
    costs = catalogued_costs(store.catalogue(), answers, TenantExpression(options.expression))
    for one in costs_by_tenant(costs, options.prices):
        yield {
            "tenant": one.tenant,
            "jobs": len(one.jobs),
            "size": format_bytes(sum(job.size_bytes for job in one.jobs)),
            "files": number(sum(job.objects for job in one.jobs)),
            "writes a day": number(round(sum(job.writes_a_day for job in one.jobs))),
            "USD a month": f"{one.month_usd:,.2f}",
            "storage": f"{one.storage_usd:,.2f}",
            "requests": f"{one.requests_usd:,.2f}",
        }
