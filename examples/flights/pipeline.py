"""A year of New York flights: totals of every aircraft, and what left each airport every hour.

    arroyo-state run examples/flights/pipeline.py:pipeline --url .demo/flights/checkpoints --spark

The flights come in the order in which they were scheduled to leave; that time is event time.
Cancelled flights are those that never left: their `dep_delay` is null.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.engine import (
    Collector,
    Operator,
    OperatorContext,
    ParquetReplay,
    ParquetSink,
    Pipeline,
)
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.hashing.routing import key_hashes
from arroyo_dagster.state.model.tables import TableConfig
from arroyo_dagster.state.tables.expiring_time_key import timestamp_table_config
from arroyo_dagster.state.tables.global_keyed import global_table_config

HERE = Path(__file__).resolve().parent
FLIGHTS = HERE / "data" / "flights-2013.parquet"
OUTPUT = HERE.parents[1] / ".demo" / "flights" / "output"
COLUMNS = ("scheduled", "dep_delay", "tailnum", "origin", "air_time", "distance")

HOUR_MICROS = 3_600_000_000
AWAY_MICROS = 30 * 24 * HOUR_MICROS
DELAYED_MINUTES = 15

_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AircraftTotal:
    """What one aircraft did since it was first seen.

    Attributes:
        flights: how many were scheduled, cancelled ones included.
        distance_miles: of the flights that left.
        air_time_minutes: of the flights that arrived where they were bound.
        first_seen_micros, last_seen_micros: event time of its first and its latest flight.
    """

    flights: int
    cancelled: int
    distance_miles: int
    air_time_minutes: int
    first_seen_micros: int
    last_seen_micros: int

    def joined(self, later: AircraftTotal) -> AircraftTotal:
        """Both together."""
        return AircraftTotal(
            self.flights + later.flights,
            self.cancelled + later.cancelled,
            self.distance_miles + later.distance_miles,
            self.air_time_minutes + later.air_time_minutes,
            min(self.first_seen_micros, later.first_seen_micros),
            max(self.last_seen_micros, later.last_seen_micros),
        )


class AircraftTotals(Operator):
    """Totals of every aircraft in service, in the global keyed table `totals` by tail number.

    An aircraft not seen for 30 days is removed; should it come back, it starts anew. Event time
    alone decides, wherever the batches end: a flight that leaves 30 days or more after the one
    before it starts anew even if the watermark has not removed the aircraft yet.

    Flights without a tail number belong to no aircraft and are not counted.
    """

    def tables(self) -> Sequence[TableConfig]:
        """The table `totals`."""
        return [global_table_config("totals", "by tail number", key=str, value=AircraftTotal)]

    def on_start(self, ctx: OperatorContext) -> None:
        """Find out anew which aircraft this subtask has to watch, and since when."""
        self._totals = ctx.table_manager.get_global_keyed_state("totals", str, AircraftTotal)
        # The table shows the aircraft of every subtask; each is removed by the owner of its key.
        known = self._totals.get_all()
        hashes = key_hashes([pa.array(known, pa.string())]).to_pylist()
        owned = ctx.task_info.key_range
        # One entry an aircraft. Its time may be older than the aircraft's last flight, never newer.
        self._watched = [
            (total.last_seen_micros, tailnum)
            for (tailnum, total), key_hash in zip(known.items(), hashes, strict=True)
            if owned.contains(key_hash)
        ]
        heapq.heapify(self._watched)

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        """Add the flights to the totals of their aircraft."""
        stays = latest_stays(batch.filter(pc.is_valid(batch.column("tailnum"))))
        known = self._totals.get_many([stay.tailnum for stay in stays])
        changed: list[tuple[str, AircraftTotal]] = []
        for stay, before in zip(stays, known, strict=True):
            total = stay.total
            if before is None:
                heapq.heappush(self._watched, (total.last_seen_micros, stay.tailnum))
            elif (
                not stay.came_back
                and total.first_seen_micros - before.last_seen_micros < AWAY_MICROS
            ):
                total = before.joined(total)
            changed.append((stay.tailnum, total))
        self._totals.insert_many(changed)

    def handle_watermark(
        self, watermark_micros: int, ctx: OperatorContext, collector: Collector
    ) -> None:
        """Remove the aircraft not seen for 30 days."""
        latest_gone = watermark_micros - AWAY_MICROS
        gone: list[str] = []
        while self._watched and self._watched[0][0] <= latest_gone:
            _, tailnum = heapq.heappop(self._watched)
            last_seen = self._totals.get(tailnum).last_seen_micros
            if last_seen <= latest_gone:
                gone.append(tailnum)
            else:
                heapq.heappush(self._watched, (last_seen, tailnum))
        self._totals.remove_many(gone)


@dataclass(frozen=True, slots=True)
class Stay:
    """The flights of one aircraft in a batch, from the last time it was away on.

    Attributes:
        came_back: whether it was away for 30 days within the batch.
    """

    tailnum: str
    came_back: bool
    total: AircraftTotal


def latest_stays(batch: pa.RecordBatch) -> list[Stay]:
    """Sum the flights of a batch by aircraft, those before an absence of 30 days left out.

    Args:
        batch: no tail number is null.
    """
    if not batch.num_rows:
        return []
    names = batch.column("tailnum").dictionary_encode()
    aircraft = names.indices.to_numpy()
    micros = batch.column("_timestamp").cast(pa.int64()).to_numpy() // 1000
    order = np.lexsort((micros, aircraft))
    aircraft, micros = aircraft[order], micros[order]

    other = np.diff(aircraft, prepend=-1) != 0
    starts = np.flatnonzero(other | (np.diff(micros, prepend=micros[0]) >= AWAY_MICROS))
    ends = np.append(starts[1:], batch.num_rows)
    latest = np.append(other[starts[1:]], True)  # behind it another aircraft begins, or nothing

    departed = batch.column("dep_delay").is_valid().to_numpy(zero_copy_only=False)
    distance = batch.column("distance").to_numpy() * departed
    air_time = batch.column("air_time").fill_null(0).to_numpy()

    def summed(values: npt.NDArray[np.generic]) -> list[int]:
        sums: _Integers = np.add.reduceat(values[order], starts, dtype=np.int64)
        return sums[latest].tolist()

    totals = zip(
        (ends - starts)[latest].tolist(),
        summed(~departed),
        summed(distance),
        summed(air_time),
        micros[starts][latest].tolist(),
        micros[ends - 1][latest].tolist(),
        strict=True,
    )
    tailnums = names.dictionary.take(pa.array(aircraft[starts][latest])).to_pylist()
    came_back = (~other[starts][latest]).tolist()
    return [
        Stay(tailnum, back, AircraftTotal(*total))
        for tailnum, back, total in zip(tailnums, came_back, totals, strict=True)
    ]


_COUNTS = ("departures", "cancelled", "delayed", "delay_minutes")


class HourlyDepartures(Operator):
    """What left each airport in every hour: one row as soon as the hour has passed.

    The expiring table `windows` holds, by origin and hour, what each batch added. An hour has
    passed when the watermark reaches its end. Flights of an hour that has passed come too late and
    are not counted; a source in order of event time has none.
    """

    output_schema = pa.schema(
        [
            pa.field("origin", pa.string(), nullable=False),
            pa.field("hour", pa.timestamp("us", tz="UTC"), nullable=False),
            *(pa.field(name, pa.int64(), nullable=False) for name in _COUNTS),
            pa.field("mean_delay_minutes", pa.float64()),
        ]
    )
    """`delayed`: left 15 minutes late or more. `delay_minutes`: the sum over all that left, early
    ones negative. `mean_delay_minutes`: null where none left."""

    windows_schema = pa.schema(
        [
            pa.field("origin", pa.string(), nullable=False),
            *(pa.field(name, pa.int64(), nullable=False) for name in _COUNTS),
            pa.field("_timestamp", pa.timestamp("ns"), nullable=False),
        ]
    )
    """`_timestamp`: the start of the hour."""

    def tables(self) -> Sequence[TableConfig]:
        """The table `windows`: a row may go once its hour has passed."""
        return [
            timestamp_table_config(
                "windows",
                "by origin, what each epoch added to an hour",
                retention_micros=HOUR_MICROS,
                schema=self.windows_schema,
                keys=["origin"],
            )
        ]

    def on_start(self, ctx: OperatorContext) -> None:
        """Look at the hours that have not passed."""
        self._windows = ctx.table_manager.get_expiring_time_key_table("windows")

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        """Add the flights to their hours."""
        delay = batch.column("dep_delay").cast(pa.int64())
        flights = pa.table(
            {
                "origin": batch.column("origin"),
                "departures": delay.is_valid().cast(pa.int64()),
                "cancelled": delay.is_null().cast(pa.int64()),
                "delayed": pc.greater_equal(delay, DELAYED_MINUTES).fill_null(False),
                "delay_minutes": delay.fill_null(0),
                "_timestamp": pc.floor_temporal(batch.column("_timestamp"), unit="hour"),
            }
        )
        if ctx.watermark_micros is not None:
            earliest = pa.scalar(_first_open_hour(ctx.watermark_micros) * 1000, pa.timestamp("ns"))
            flights = flights.filter(pc.greater_equal(flights["_timestamp"], earliest))
        self._windows.insert(_summed(flights, "_timestamp").select(self.windows_schema.names))

    def handle_watermark(
        self, watermark_micros: int, ctx: OperatorContext, collector: Collector
    ) -> None:
        """Put out the hours that have passed since the watermark before."""
        before = ctx.watermark_micros
        first = 0 if before is None else _first_open_hour(before)
        hours = _summed(
            self._windows.rows_between(first, _first_open_hour(watermark_micros)), "_timestamp"
        )
        departures = hours["departures"].cast(pa.float64())
        mean = pc.divide(hours["delay_minutes"].cast(pa.float64()), departures)
        columns = {
            **{name: hours[name] for name in ("origin", *_COUNTS)},
            "hour": hours["_timestamp"].cast(pa.timestamp("us")).cast(pa.timestamp("us", tz="UTC")),
            "mean_delay_minutes": pc.if_else(pc.greater(departures, 0), mean, None),
        }
        names = self.output_schema.names
        rows = pa.table([columns[name] for name in names], schema=self.output_schema)
        collector.collect(rows.sort_by([("hour", "ascending"), ("origin", "ascending")]))


def _first_open_hour(watermark_micros: int) -> int:
    """The start of the first hour that has not passed, in microseconds."""
    return watermark_micros - watermark_micros % HOUR_MICROS


def _summed(rows: pa.Table, hour: str) -> pa.Table:
    """Sum the counts by origin and hour."""
    summed = rows.group_by(["origin", hour], use_threads=False).aggregate(
        [(name, "sum") for name in _COUNTS]
    )
    return summed.rename_columns(["origin", hour, *_COUNTS])


def flights_pipeline(
    output: str,
    *,
    data: str = str(FLIGHTS),
    rows_per_epoch: int = 8192,
    parallelism: int = 2,
    keep_epochs: int | None = None,
    job: str = "main",
) -> Pipeline:
    """Build the pipeline.

    Args:
        output: the folder or URL that gets the hourly departures, as Parquet files.
        data: the flights, in order of their column `scheduled`.
        rows_per_epoch: how many flights an epoch takes; 8192 = one row group of the file.
        keep_epochs: how many epochs a run keeps; None = all.
        job: the job's id.
    """
    flights = Pipeline("flights", job, parallelism, keep_epochs)
    source = ParquetReplay(data, columns=COLUMNS, rows_per_epoch=rows_per_epoch, splits=parallelism)
    rows = flights.source("departures", source, timestamp="scheduled")
    rows.key_by("tailnum").apply("aircraft", AircraftTotals())
    rows.key_by("origin").apply("hourly", HourlyDepartures()).sink("output", ParquetSink(output))
    return flights


def pipeline() -> Pipeline:
    """Build the pipeline for `arroyo-state run`, as the environment says.

    FLIGHTS_OUTPUT: where the hourly departures go, a folder or URL; `.demo/flights/output` below
        the project unless set.
    FLIGHTS_ROWS_PER_EPOCH, FLIGHTS_PARALLELISM: 8192 and 2 unless set.
    FLIGHTS_JOB: the job's id, `main` unless set.
    """
    output = os.environ.get("FLIGHTS_OUTPUT") or str(OUTPUT)
    return flights_pipeline(
        output if ":" in output else os.path.abspath(output),
        rows_per_epoch=_number("FLIGHTS_ROWS_PER_EPOCH", 8192),
        parallelism=_number("FLIGHTS_PARALLELISM", 2),
        job=os.environ.get("FLIGHTS_JOB") or "main",
    )


def _number(variable: str, otherwise: int) -> int:
    text = os.environ.get(variable) or str(otherwise)
    try:
        return int(text)
    except ValueError as error:
        raise InputError(f"{variable} is not a whole number", found=text) from error
