"""The cost of jobs by tenant. A tenant is an expression over the names of a job."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.planning.costs import DAYS_OF_A_MONTH, Prices, Requests

NO_TENANT = "(none)"
"""The tenant of jobs whose names do not fit the expression."""

_GROUP = "tenant"
_FIELDS = ("pipeline", "job", "name")
_MOST_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class TenantExpression:
    """Derives a tenant from the names of a job.

    Attributes:
        text: a format of `{pipeline}`, `{job}` and `{name}` (the pipeline's name in Arroyo), for
            example `{pipeline}`; or a regular expression with a group `(?P<tenant>…)`, searched in
            `pipeline/job`, then in the name.
    """

    text: str

    def __post_init__(self) -> None:
        self._check()

    def tenant(self, paths: JobPaths, name: str | None = None) -> str:
        """Return the tenant of a job; `NO_TENANT` if its names do not fit.

        Args:
            name: the pipeline's name in Arroyo; None if it is unknown.
        """
        if not self._is_regex:
            values = {"pipeline": paths.pipeline, "job": paths.job, "name": name}
            used = [values[field] for field in self._fields()]
            if any(value is None for value in used):
                return NO_TENANT
            return self.text.format(**values)
        pattern = re.compile(self.text)
        for text in (paths.root, name or ""):
            found = pattern.search(text)
            if found is not None and found[_GROUP]:
                return found[_GROUP]
        return NO_TENANT

    @property
    def _is_regex(self) -> bool:
        return f"(?P<{_GROUP}>" in self.text

    def _fields(self) -> list[str]:
        return [field for field, _, _ in self._parts()]

    def _parts(self) -> list[tuple[str, str | None, str | None]]:
        """Return the fields, each with its format and its conversion."""
        return [
            (field, spec, conversion)
            for _, field, spec, conversion in string.Formatter().parse(self.text)
            if field is not None
        ]

    def _check(self) -> None:
        try:
            if self._is_regex:
                re.compile(self.text)
                return
            parts = self._parts()
        except (re.error, ValueError, OverflowError, RecursionError) as error:
            raise _wrong(self.text, str(error)) from error
        if not parts or not {field for field, _, _ in parts} <= {*_FIELDS}:
            raise _wrong(self.text, "it names no part of a job, or an unknown one")
        # Formats could fail later, for one job of many, or fill the memory.
        if any(spec or conversion for _, spec, conversion in parts):
            raise _wrong(self.text, "write a part without a format, as {pipeline}")


def _wrong(text: str, why: str) -> InputError:
    shortened = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"
    return InputError(
        f"the tenant {shortened!r} is no expression over names: {why}",
        next_step="write a format such as {pipeline}, or a regular expression with a group, such "
        "as ^(?P<tenant>[^-/]+)",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCost:
    """What a job stores, and which requests it causes per day.

    Attributes:
        writes_a_day: the objects that the job itself writes.
        lists_a_day, gets_a_day: of inspection.
        complete: whether everything it stores was listed; else bytes and objects are lower bounds.
    """

    job: str
    tenant: str
    size_bytes: int
    objects: int
    writes_a_day: float = 0.0
    lists_a_day: float = 0.0
    gets_a_day: float = 0.0
    complete: bool = True

    def storage_usd(self, prices: Prices) -> float:
        """Return the price of what it stores, per month."""
        return prices.storage_usd(self.size_bytes)

    def requests_usd(self, prices: Prices) -> float:
        """Return the price of its requests, per month."""
        return DAYS_OF_A_MONTH * prices.requests_usd(
            puts=self.writes_a_day, lists=self.lists_a_day, gets=self.gets_a_day
        )

    def month_usd(self, prices: Prices) -> float:
        """Return the price of both, per month."""
        return self.storage_usd(prices) + self.requests_usd(prices)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantCost:
    """The jobs of a tenant and their cost per month, in US dollars."""

    tenant: str
    jobs: tuple[JobCost, ...]
    storage_usd: float
    requests_usd: float

    @property
    def month_usd(self) -> float:
        """The price of storage and requests together."""
        return self.storage_usd + self.requests_usd


def with_inspection(jobs: Sequence[JobCost], inspection: Requests) -> list[JobCost]:
    """Divide the requests of a day's inspection equally among jobs."""
    count = len(jobs)
    return [
        replace(job, lists_a_day=inspection.lists / count, gets_a_day=inspection.gets / count)
        for job in jobs
    ]


def costs_by_tenant(jobs: Iterable[JobCost], prices: Prices) -> list[TenantCost]:
    """Return the cost of each tenant, the most expensive first."""
    tenants: dict[str, list[JobCost]] = {}
    for job in jobs:
        tenants.setdefault(job.tenant, []).append(job)
    found = [
        TenantCost(
            tenant=tenant,
            jobs=tuple(sorted(its, key=lambda job: (-job.month_usd(prices), job.job))),
            storage_usd=sum(job.storage_usd(prices) for job in its),
            requests_usd=sum(job.requests_usd(prices) for job in its),
        )
        for tenant, its in tenants.items()
    ]
    return sorted(found, key=lambda one: (-one.month_usd, one.tenant))
