"""The asset `progress`: how far the sources and the event time of each job are, with curves."""

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
from arroyo_dagster.state.model.layout import JobPaths

if TYPE_CHECKING:
    from arroyo_dagster.state.operations.query.advance import PartitionAdvance, WatermarkAdvance

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
    from arroyo_dagster.state.operations.query.advance import source_advance, watermark_advance
    from arroyo_dagster.state.operations.query.state import StateJob, open_state

    job = StateJob(open_state(store.reading()), paths)
    if not job.epochs():
        return {}, None
    newest = job.epoch()
    sources, watermarks = source_advance(job, _EPOCHS), watermark_advance(job, _EPOCHS)
    still = sum(one.stands_still for one in sources)
    lags = [one.lag_micros for one in watermarks if one.lag_micros is not None]
    facts = {
        "newest epoch": int(newest.number),
        "partitions": f"{shown.counted(len(sources), 'partition')}, {still:,} of them stand still"
        if sources
        else None,
        "watermark lag": shown.duration(max(lags)) if lags else None,
        **_source_curves(sources),
        **_lag_curves(watermarks),
        "sources": shown.table(map(_source_line, sorted(sources, key=_slowest_first))),
        "watermarks": shown.table(map(_watermark_line, watermarks)),
        "arroyo/partitions_standing_still": still,
    }
    return shown.known(facts), f"g{newest.checkpoint.worker_generation or 0}:e{newest.number}"


# ---- curves --------------------------------------------------------------------------------------


def _source_curves(sources: "Sequence[PartitionAdvance]") -> dict[str, Any]:
    by_operator: dict[str, list[PartitionAdvance]] = defaultdict(list)
    for one in sources:
        by_operator[one.newest.operator].append(one)
    return {
        f"rate of {operator}": shown.sparkline(_rates(ones), "{:,.1f}/s".format)
        for operator, ones in itertools.islice(by_operator.items(), _CURVES)
    }


def _rates(partitions: "Sequence[PartitionAdvance]") -> list[float]:
    """Return the positions a second from each epoch to the next, of all partitions together.

    A partition counts in the steps whose both ends have a number.
    """
    steps: dict[tuple[int, int], int] = defaultdict(int)
    for partition in partitions:
        for (begin, before), (end, after) in itertools.pairwise(partition.positions):
            if before is not None and after is not None and end > begin:
                steps[begin, end] += after - before
    return [steps[begin, end] / ((end - begin) / 1e6) for begin, end in sorted(steps)]


def _lag_curves(watermarks: "Sequence[WatermarkAdvance]") -> dict[str, Any]:
    behind = sorted(watermarks, key=lambda one: -(one.lag_micros or -1))
    return {
        f"watermark lag of {one.operator}": shown.sparkline(
            [None if reached is None else at - reached for at, reached in one.watermarks],
            lambda micros: str(shown.duration(micros)),
        )
        for one in behind[:_CURVES]
    }


# ---- tables --------------------------------------------------------------------------------------


def _slowest_first(one: "PartitionAdvance") -> tuple[bool, float]:
    return not one.stands_still, one.rate or 0.0


def _source_line(one: "PartitionAdvance") -> Mapping[str, Any]:
    position = one.newest.position
    return {
        "operator": one.newest.operator,
        "connector": one.newest.connector,
        "partition": one.newest.partition,
        "position": shown.number(position),
        "a second": None if one.rate is None else f"{one.rate:,.1f}",
        "advanced at": shown.time_of_day(one.advanced_at_micros),
        "state": one.status,
    }


def _watermark_line(one: "WatermarkAdvance") -> Mapping[str, Any]:
    return {
        "operator": one.operator,
        "watermark": shown.time_of_day(one.watermark_micros),
        "lag": shown.duration(one.lag_micros),
        "fastest subtask ahead": shown.duration(one.ahead_micros),
        "seconds of event time a second": None if one.rate is None else f"{one.rate:.2f}",
    }
