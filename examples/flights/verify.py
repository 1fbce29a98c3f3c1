"""Prove that the flights job is right: its tables and its output against a plain group-by.

    python examples/flights/verify.py .demo/flights/checkpoints .demo/flights/output

Shares nothing with `pipeline.py`: what is expected is computed from the flights by pyarrow alone,
what is found is read from the job's newest checkpoint and from the files of its output.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from arroyo_dagster.errors import ArroyoStateError, InputError, NotFoundError
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import JobId, PipelineId
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.storage.remote.open import open_store
from arroyo_dagster.state.storage.store import ObjectStore, read_many
from arroyo_dagster.state.tables.manager import TableManager
from arroyo_dagster.state.tables.table import TaskInfo

FLIGHTS = Path(__file__).resolve().parent / "data" / "flights-2013.parquet"
JOB = JobPaths(JobId("main"), PipelineId("flights"))
SHOWN = 5

_HOUR_MICROS = 3_600_000_000
_AWAY_MICROS = 30 * 24 * _HOUR_MICROS
_COUNTS = ("departures", "cancelled", "delayed", "delay_minutes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What was compared, and how it differs.

    Attributes:
        aircraft, hours, open_hours: rows of the table `totals`, of the output, and of the hours
            that the table `windows` still holds.
        output_files: how many files the output has.
        differences: what is wrong, a line each; empty = everything is equal.
    """

    epoch: int
    flights: int
    aircraft: int
    hours: int
    open_hours: int
    output_files: int
    differences: tuple[str, ...]


# ---- what is expected ----------------------------------------------------------------------------


def expected_totals(flights: pa.Table) -> pa.Table:
    """Totals of the aircraft in service when the last flight left.

    An aircraft counts from its first flight on that no other preceded within 30 days.

    Returns:
        tailnum, flights, cancelled, distance_miles, air_time_minutes, first_seen_micros,
        last_seen_micros; in no order.
    """
    end_micros = _end_micros(flights)
    rows = flights.filter(flights["tailnum"].is_valid())
    departed = rows["dep_delay"].is_valid()
    rows = pa.table(
        {
            "tailnum": rows["tailnum"],
            "micros": rows["scheduled"].cast(pa.int64()),
            "cancelled": rows["dep_delay"].is_null().cast(pa.int64()),
            "distance": pc.if_else(departed, rows["distance"], 0).cast(pa.int64()),
            "air_time": rows["air_time"].fill_null(0).cast(pa.int64()),
        }
    ).sort_by([("tailnum", "ascending"), ("micros", "ascending")])
    rows = rows.filter(_since_last_absence(rows))
    totals = rows.group_by("tailnum").aggregate(
        [
            ([], "count_all"),
            ("cancelled", "sum"),
            ("distance", "sum"),
            ("air_time", "sum"),
            ("micros", "min"),
            ("micros", "max"),
        ]
    )
    in_service = pc.greater(totals["micros_max"], end_micros - _AWAY_MICROS)
    return pa.table(
        {
            "tailnum": totals["tailnum"],
            "flights": totals["count_all"],
            "cancelled": totals["cancelled_sum"],
            "distance_miles": totals["distance_sum"],
            "air_time_minutes": totals["air_time_sum"],
            "first_seen_micros": totals["micros_min"],
            "last_seen_micros": totals["micros_max"],
        }
    ).filter(in_service)


def _since_last_absence(rows: pa.Table) -> pa.ChunkedArray:
    """Mark the flights since an aircraft was last away. `rows`: by tailnum and time."""
    micros, tailnum = rows["micros"].combine_chunks(), rows["tailnum"].combine_chunks()
    same = pc.equal(tailnum[1:], tailnum[:-1])
    away = pc.greater_equal(pc.subtract(micros[1:], micros[:-1]), _AWAY_MICROS)
    begins = pa.concat_arrays([pa.array([True]), pc.or_(pc.invert(same), away)])
    first = rows.filter(begins).group_by("tailnum").aggregate([("micros", "max")])
    place = pc.index_in(tailnum, value_set=first["tailnum"].combine_chunks())
    return pc.greater_equal(micros, first["micros_max"].combine_chunks().take(place))


def expected_hours(flights: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Departures by origin and hour: the hours that have passed, and those still kept.

    Returns:
        The output; and what `windows` holds: the hours that began at most an hour before the last
        flight, without `mean_delay_minutes`.
    """
    end_micros = _end_micros(flights)
    delay = flights["dep_delay"].cast(pa.int64())
    hours = (
        pa.table(
            {
                "origin": flights["origin"],
                "hour": pc.floor_temporal(flights["scheduled"], unit="hour"),
                "delay": delay,
                "late": pc.greater_equal(delay, 15).cast(pa.int64()),
            }
        )
        .group_by(["origin", "hour"])
        .aggregate(
            [
                ("delay", "count", pc.CountOptions(mode="only_valid")),
                ("delay", "count", pc.CountOptions(mode="only_null")),
                ("late", "sum", pc.ScalarAggregateOptions(min_count=0)),
                ("delay", "sum", pc.ScalarAggregateOptions(min_count=0)),
                ("delay", "mean"),
            ]
        )
        .rename_columns(["origin", "hour", *_COUNTS, "mean_delay_minutes"])
    )
    begins = hours["hour"].cast(pa.int64())
    passed = hours.filter(pc.less_equal(begins, end_micros - _HOUR_MICROS))
    kept = hours.filter(pc.greater_equal(begins, end_micros - _HOUR_MICROS))
    return passed, kept.drop_columns(["mean_delay_minutes"])


def _end_micros(flights: pa.Table) -> int:
    """Event time of the last flight: where the watermark ends."""
    end: int = pc.max(flights["scheduled"]).value
    return end


# ---- what is found -------------------------------------------------------------------------------


def found_totals(store: ObjectStore, checkpoint: Checkpoint) -> pa.Table:
    """The table `totals`, as a restart would load it; columns as `expected_totals`."""
    totals = _tables(store, checkpoint, "aircraft").get_global_keyed_state("totals").get_all()
    rows = [{"tailnum": tailnum, **total} for tailnum, total in totals.items()]
    return pa.Table.from_pylist(rows)


def found_windows(store: ObjectStore, checkpoint: Checkpoint) -> pa.Table:
    """The table `windows`, as a restart would load it, summed by origin and hour."""
    rows = _tables(store, checkpoint, "hourly").get_expiring_time_key_table("windows").rows()
    sums = rows.group_by(["origin", "_timestamp"]).aggregate([(name, "sum") for name in _COUNTS])
    return pa.table(
        {
            "origin": sums["origin"],
            "hour": sums["_timestamp"].cast(pa.timestamp("us", tz="UTC")),
            **{name: sums[f"{name}_sum"] for name in _COUNTS},
        }
    )


def found_offset(store: ObjectStore, checkpoint: Checkpoint) -> int:
    """How many flights the source has read, by its own table `offsets`."""
    offsets = _tables(store, checkpoint, "departures").get_global_keyed_state("offsets").get_all()
    return int(json.loads(offsets["row"]))


def found_output(output: str) -> tuple[pa.Table, int]:
    """The rows of every file of the output, and how many files there are.

    Raises:
        NotFoundError: there is no file.
    """
    store = open_store(output)
    paths = [info.path for info in store.list_dir().objects]
    if not paths:
        raise NotFoundError("the output has no file", url=output)
    files = [pq.read_table(io.BytesIO(data)) for data in read_many(store, paths).values()]
    return pa.concat_tables(files), len(files)


def _tables(store: ObjectStore, checkpoint: Checkpoint, name: str) -> TableManager:
    """The tables of an operator, loaded whole, as by a restart with a single subtask."""
    operator = checkpoint.operator(name)
    if operator is None:
        raise NotFoundError("the checkpoint has no such operator", operator=name)
    task = TaskInfo(
        pipeline=JOB.pipeline,
        job=JOB.job,
        operator=operator.operator,
        task_index=0,
        parallelism=1,
    )
    return TableManager(ParquetBackend(store, JOB), task, operator.configs, operator)


# ---- the comparison ------------------------------------------------------------------------------


def differences(what: str, keys: Sequence[str], expected: pa.Table, found: pa.Table) -> list[str]:
    """Compare two tables as multisets of rows, each value exactly.

    Args:
        what: begins every line.
        keys: the columns that name a row.

    Returns:
        A line each row that is lost, doubled, changed or not expected; empty = equal.
    """
    if sorted(expected.column_names) != sorted(found.column_names):
        return [f"{what}: has the columns {found.column_names}, not {expected.column_names}"]
    wanted, given = _rows_by_key(expected, keys), _rows_by_key(found, keys)
    lines: list[str] = []
    for key in sorted(wanted.keys() | given.keys(), key=repr):
        want, have = wanted.get(key, Counter()), given.get(key, Counter())
        if want == have:
            continue
        name = f"{what} of {', '.join(str(part) for part in key)}"
        if not have:
            lines.append(f"{name}: lost")
        elif not want:
            lines.append(f"{name}: not expected, found {_shown(have)}")
        elif have.total() > want.total():
            lines.append(f"{name}: {have.total()} times instead of {want.total()}")
        else:
            lines.append(f"{name}: {_shown(have)} instead of {_shown(want)}")
    return lines


_Row = tuple[object, ...]


def _rows_by_key(rows: pa.Table, keys: Sequence[str]) -> dict[_Row, Counter[_Row]]:
    others = sorted(set(rows.column_names) - set(keys))
    names = zip(*(rows[name].to_pylist() for name in keys), strict=True)
    values = zip(*(rows[name].to_pylist() for name in others), strict=True)
    by_key: dict[_Row, Counter[_Row]] = {}
    for key, value in zip(names, values, strict=True):
        by_key.setdefault(key, Counter())[value] += 1
    return by_key


def _shown(rows: Counter[_Row]) -> str:
    return " and ".join(str(row) for row in rows)


def prove(url: str, output: str, flights: pa.Table) -> Proof:
    """Compare the newest checkpoint of the job, and its output, with the flights it read.

    Args:
        url: the checkpoint URL.
        output: folder or URL of the output.
        flights: everything the job was to read.

    Raises:
        NotFoundError: the job has no checkpoint, or no output.
        FormatError: an object of the checkpoint is missing or broken.
    """
    store = open_store(url)
    backend = ParquetBackend(store, JOB)
    checkpoint = backend.prepare_checkpoint_load(backend.load().epoch)
    hours, open_hours = expected_hours(flights)
    rows, files = found_output(output)
    totals = found_totals(store, checkpoint)
    windows = found_windows(store, checkpoint)
    offset = found_offset(store, checkpoint)
    by_hour = ("hour", "origin")
    lines = [] if offset == flights.num_rows else [f"source: read {offset} of {flights.num_rows}"]
    lines += differences("totals", ["tailnum"], expected_totals(flights), totals)
    lines += differences("output", by_hour, hours, rows)
    lines += differences("windows", by_hour, open_hours, windows)
    return Proof(
        epoch=checkpoint.epoch,
        flights=flights.num_rows,
        aircraft=totals.num_rows,
        hours=rows.num_rows,
        open_hours=windows.num_rows,
        output_files=files,
        differences=tuple(lines),
    )


def explain(proof: Proof) -> str:
    """Say what was proved, or the first few differences, in lines for people."""
    if not proof.differences:
        return (
            f"Equal to a plain group-by of {proof.flights:,} flights: {proof.aircraft:,} aircraft, "
            f"{proof.hours:,} hours in {proof.output_files} files, {proof.open_hours} hours open."
        )
    lines = [f"Not equal: {len(proof.differences):,} differences."]
    lines += [f"  {line}" for line in proof.differences[:SHOWN]]
    hidden = len(proof.differences) - SHOWN
    return "\n".join([*lines, f"  … and {hidden:,} more"] if hidden > 0 else lines)


def main(arguments: Sequence[str]) -> int:
    """Run as a command: checkpoint URL and output. Returns the exit code."""
    try:
        if len(arguments) != 2:
            raise InputError("give the checkpoint URL and the folder of the output")
        url, output = (text if ":" in text else os.path.abspath(text) for text in arguments)
        proof = prove(url, output, pq.read_table(FLIGHTS))
    except ArroyoStateError as error:
        print(f"Nothing proved: {error}", file=sys.stderr)
        return 2
    print(explain(proof))
    return 1 if proof.differences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
