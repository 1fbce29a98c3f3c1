"""The asset `progress`: how far the sources and the event time of each job are, with curves."""

import datetime as dt
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from arroyo_dagster.orchestration import rendering as shown
from arroyo_dagster.orchestration.failures import as_failure
from arroyo_dagster.orchestration.partitions import job_of
from arroyo_dagster.orchestration.resources import ArroyoStateStore
from arroyo_dagster.orchestration.translator import CHECKPOINT, PROGRESS, Naming, specified_assets
from arroyo_dagster.state.codec.iso_times import nanos_of
from arroyo_dagster.state.model.layout import JobPaths

if TYPE_CHECKING:
    from arroyo_dagster.state.operations.query.sql import SqlCatalog

_EPOCHS = 20
_JOBS_PER_RUN = 50
_CURVES = 5
"""At most so many curves of sources, and of watermarks."""


def build_progress(naming: Naming) -> dg.AssetsDefinition:
    """Build the asset with the positions of sources and the watermarks of a job.

    It compares the newest 20 epochs. A job without an epoch has no event.
    """
    key = naming.key(PROGRESS)

    @specified_assets(
        name=naming.name("arroyo_job_progress"),
        specs=[naming.spec(PROGRESS, deps=[CHECKPOINT]).replace_attributes(skippable=True)],
        backfill_policy=dg.BackfillPolicy.multi_run(_JOBS_PER_RUN),
    )
    @naming.bind
    def arroyo_job_progress(  # type: ignore[no-untyped-def]
        context: dg.AssetExecutionContext, arroyo_store: ArroyoStateStore
    ):
        with as_failure():
            found = {name: _progress(arroyo_store, job_of(name)) for name in context.partition_keys}
            if len(found) == 1:
                ((facts, version),) = found.values()
                if version is not None:
                    yield dg.MaterializeResult(
                        asset_key=key, metadata=facts, data_version=dg.DataVersion(version)
                    )
                return
            for name, (facts, _) in found.items():
                context.add_asset_metadata(metadata=facts, asset_key=key, partition_key=name)
            yield dg.MaterializeResult(asset_key=key)

    return arroyo_job_progress


def _progress(store: ArroyoStateStore, paths: JobPaths) -> tuple[dict[str, Any], str | None]:
    """Return the metadata of a job and the version of its newest epoch; None = it has no epoch."""
    from arroyo_dagster.state.operations.query.sql import SqlCatalog
    from arroyo_dagster.state.operations.query.state import StateJob, open_state

    catalog = SqlCatalog(open_state(store.reading()))
    job = StateJob(catalog.state, paths)
    if not job.epochs():
        return {}, None
    newest, epochs = job.epoch(), {"epochs": str(_EPOCHS)}
    sources = catalog.saved("offsets", job.name, epochs).to_dicts()
    watermarks = catalog.saved("watermarks", job.name, epochs).to_dicts()
    still = sum(map(_stands_still, sources))
    lags = [row["lag_seconds"] for row in watermarks if row["lag_seconds"] is not None]
    facts = {
        "newest epoch": int(newest.number),
        "partitions": f"{shown.counted(len(sources), 'partition')}, {still:,} of them stand still"
        if sources
        else None,
        "watermark lag": _duration(max(lags)) if lags else None,
        **_source_curves(catalog, job.name),
        **_lag_curves(catalog, job.name, watermarks),
        "sources": shown.table(map(_source_line, sorted(sources, key=_slowest_first))),
        "watermarks": shown.table(map(_watermark_line, watermarks)),
        "arroyo/partitions_standing_still": still,
    }
    return shown.known(facts), f"g{newest.checkpoint.worker_generation or 0}:e{newest.number}"


# ---- curves --------------------------------------------------------------------------------------


def _history(job: str, table: str) -> str:
    """Return the name of a metadata table of a job's newest epochs."""
    from arroyo_dagster.state.operations.query.names import quoted

    return f"{quoted(f'{job}@newest {_EPOCHS}')}.{table}"


def _source_curves(catalog: "SqlCatalog", job: str) -> dict[str, Any]:
    """Return curves of positions a second, of all partitions together that both epochs know."""
    steps = catalog.collect(
        f"""with steps as (
            select operator, epoch,
                position - lag(position) over (
                    partition by operator, "table", "partition" order by epoch) as moved,
                cast(finished_at as bigint) - lag(cast(finished_at as bigint)) over (
                    partition by operator, "table", "partition" order by epoch) as micros
            from {_history(job, "offsets")}
        )
        select operator, epoch, sum(moved) / cast(max(micros) as double) * 1000000 as rate
        from steps where micros > 0 and moved is not null
        group by operator, epoch order by operator, epoch"""
    )
    rates: dict[str, list[float]] = defaultdict(list)
    for operator, _, rate in steps.iter_rows():
        rates[operator].append(rate)
    return {
        f"rate of {operator}": shown.sparkline(ones, "{:,.1f}/s".format)
        for operator, ones in itertools.islice(rates.items(), _CURVES)
    }


def _lag_curves(
    catalog: "SqlCatalog", job: str, watermarks: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    lags: dict[str, list[float | None]] = defaultdict(list)
    query = f"select operator, lag_seconds from {_history(job, 'watermarks')} order by epoch"
    for operator, lag in catalog.collect(query).iter_rows():
        lags[operator].append(lag)
    behind = sorted(watermarks, key=lambda row: -(row["lag_seconds"] or -1))
    return {
        f"watermark lag of {row['operator']}": shown.sparkline(
            lags[row["operator"]], lambda seconds: str(_duration(seconds))
        )
        for row in behind[:_CURVES]
    }


# ---- tables --------------------------------------------------------------------------------------


def _stands_still(row: Mapping[str, Any]) -> bool:
    return bool(row["status"] == "stands still")


def _slowest_first(row: Mapping[str, Any]) -> tuple[bool, float]:
    return not _stands_still(row), row["per_second"] or 0.0


def _source_line(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "operator": row["operator"],
        "connector": row["connector"],
        "partition": row["partition"],
        "position": shown.number(row["position"]),
        "a second": None if row["per_second"] is None else f"{row['per_second']:,.1f}",
        "advanced at": _time(row["advanced_at"]),
        "state": row["status"],
    }


def _watermark_line(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "operator": row["operator"],
        "watermark": _time(row["watermark"]),
        "lag": _duration(row["lag_seconds"]),
        "fastest subtask ahead": _duration(row["ahead_seconds"]),
        "seconds of event time a second": None if row["rate"] is None else f"{row['rate']:.2f}",
    }


def _duration(seconds: float | None) -> str | None:
    return shown.duration(None if seconds is None else round(seconds * 1e6))


def _time(moment: dt.datetime | None) -> str | None:
    return shown.time_of_day(None if moment is None else nanos_of(moment) // 1000)
