"""Show a fork, an evolve and a bootstrap, with what a restore loads before and after.

Needs no Arroyo: the state is of fixtures and of jobs made of given rows. The bootstrap is computed
by Spark in this process.
"""

from __future__ import annotations

import inspect
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq

from arroyo_dagster.cli.rendering import print_table
from arroyo_dagster.cli.surgery.rendering import print_plan
from arroyo_dagster.spark.session import open_session
from arroyo_dagster.spark.settings import SparkSettings
from arroyo_dagster.spark.surgery.bootstrap import Bootstrap, computed_bootstrap, encoded_arguments
from arroyo_dagster.state import (
    JobPaths,
    Layout,
    ObjectStore,
    WriteProtected,
    find_job,
    open_store,
    run_undo,
    verify_job,
)
from tests.arroyo_jobs import SECOND, stopped
from tests.compat.arroyo import unpack
from tests.compat.test_surgery import FORWARD, with_other_outputs
from tests.evolved_jobs import (
    COUNT,
    LEAST,
    MOST,
    SHIFTED,
    SUM,
    SUMS,
    Rows,
    Sql,
    as_suggested,
    in_order,
    loaded,
    sql_job,
)
from tests.formats import EditPlan
from tests.internals import EditOptions, StateSource, run_edit, run_evolve, run_fork
from tests.jobs import copy_into
from tests.surgery_jobs import BEGAN, NANOS

NOW = EditOptions(quiet_seconds=0)
ROWS_PRINTED = 4
SPARK = SparkSettings(master="local[2]", conf={"spark.sql.shuffle.partitions": "2"})

CUT = {0: 50, 1: 45}
"""The first offset of each partition that the job reads itself."""
LATENESS = 5
ORDERS: list[dict[str, Any]] = [
    {
        "k": f"k{n % 7}",
        "v": n * n % 11 - 3,
        "item": f"item-{n % 5}",
        "price": n * 7 % 60,
        "ordered_at": BEGAN // SECOND + 30 + n // 2,
        "kafka_partition": n % 2,
        "kafka_offset": n // 2,
    }
    for n in range(120)
]
"""Times are in seconds."""


class DemoError(Exception):
    """The demo did not come out as it must."""


def main(session: Any = None) -> None:
    """Run the three operations, and undo each.

    Args:
        session: of Spark; None = one of this process.
    """
    with tempfile.TemporaryDirectory() as folder:
        _fork(Path(folder))
        _evolve()
        _bootstrap(session or open_session(SPARK).session, Path(folder))
    click.secho("\nEach job verified, and each operation was undone to the last row.", bold=True)


def _fork(folder: Path) -> None:
    _title("1. Fork: hourly departures, which a real Arroyo counted, beside production")
    store = open_store(unpack("flights", folder))
    paths = find_job(store, "hourly_departures")
    twin = with_other_outputs(store, paths)
    run_edit(twin, paths, stopped(paths), FORWARD, NOW)
    before = loaded(twin, paths)
    source = StateSource(store=WriteProtected(store), paths=paths)
    plan = run_fork(source, twin, paths, stopped(paths), NOW).plan
    key = "tumbling_4", "t"
    _show(plan, [("the source", loaded(store, paths)[key]), ("after", loaded(twin, paths)[key])])
    _check(loaded(twin, paths) == loaded(store, paths), "the fork has other rows than its source")
    _undo(twin, paths, 1)
    _check(loaded(twin, paths) == before, "the undo left other rows")


def _evolve() -> None:
    _title("2. Evolve: statements reordered, min(v) and sum(v) added, count(distinct) moved")
    source = sql_job(Layout.PROTOCOL, "job_a")
    now = Sql(
        ids=SHIFTED, window=(COUNT, LEAST, SUM), totals=(SUM, SUMS, COUNT, MOST), distinct=(2,)
    )
    job = sql_job(Layout.PROTOCOL, "job_b", now, base=7, epochs=2)
    before = loaded(job.store, job.paths)
    taken = StateSource(store=WriteProtected(source.store), paths=source.paths)
    plan = as_suggested(
        lambda chosen: run_evolve(taken, job.store, job.paths, stopped(job.paths), chosen, NOW).plan
    )
    was, after = loaded(source.store, source.paths), loaded(job.store, job.paths)
    for old, new in (
        (("tumbling_4", "t"), ("tumbling_17", "t")),
        (("updating_aggregate_7", "a"), ("updating_aggregate_9", "a")),
    ):
        _check(len(was[old]) == len(after[new]), "rows were lost")
        _show(plan if new[1] == "t" else None, [
            (f"{old[0]} of the source", was[old]), (f"{new[0]}, before", before[new]),
            (f"{new[0]}, after", after[new])])  # fmt: skip
    _undo(job.store, job.paths, 1)
    _check(loaded(job.store, job.paths) == before, "the undo left other rows")


def history(spark: Any, orders: str) -> Bootstrap:
    """Compute three tables and one side of a join from the orders before the cut."""
    cut = f"case kafka_partition when 0 then {CUT[0]} else {CUT[1]} end"
    events = spark.read.parquet(orders).where(f"kafka_offset < {cut}")
    events.createOrReplaceTempView("orders")
    (newest,) = events.selectExpr("max(unix_micros(ordered_at))").first()
    watermark = newest - LATENESS * SECOND
    windows = spark.sql(f"""
        select k, count(*) as `{COUNT[0]}`, sum(v) as `{SUM[0]}`,
               timestamp_seconds(at) as _timestamp
        from (select *, unix_seconds(ordered_at) div 40 * 40 as at from orders)
        where at >= {watermark // SECOND - 40} group by k, at
    """)
    totals = spark.sql(f"""
        select k, count(*) as `{COUNT[0]}`, max(v) as `{MOST[0]}`, max(ordered_at) as _timestamp,
               count(*) as _generation
        from orders group by k
    """)
    values = spark.sql(f"""
        select k, 1 as accumulator, v as args_row, count(*) as count,
               timestamp_micros({watermark}) as _timestamp, count(*) as _generation
        from orders group by k, v
    """)
    left = spark.sql(
        "select k, item, price, ordered_at as _timestamp from orders where price >= 20"
    )
    return Bootstrap(
        tables={
            "tumbling_4.t": windows,
            "updating_aggregate_7.a": totals,
            "updating_aggregate_7.b": encoded_arguments(values),  # count(distinct v)
            "join_11.left": left,
        },
        watermark_micros=watermark,
        positions={str(partition): offset for partition, offset in CUT.items()},
    )


def _bootstrap(session: Any, folder: Path) -> None:
    _title("3. Bootstrap: a function computes tables from orders in Parquet up to a cut")
    made = sql_job(Layout.LEGACY, "job_c", Sql(sign=128))
    paths = made.paths
    store = copy_into(open_store(str(folder / "checkpoints")), made.store)
    before = loaded(store, paths)
    click.echo(inspect.getsource(history))
    orders = str(_write_orders(folder))
    with computed_bootstrap(session, partial(history, orders=orders), "history") as computed:
        job = computed.job(paths, stopped(paths))
        plan = job.plan(store)
        job.run(store, NOW, plan=plan)
    after, truth = loaded(store, paths), truth_of_orders()
    states = {"before": before, "after": after}
    for at, key in enumerate(truth):
        parts = [(f"{'.'.join(key)}, {when}", rows[key]) for when, rows in states.items()]
        _show(None if at else plan, parts)
        _check(after[key] == truth[key], f"{key}: a restore loads other rows than the orders say")
    click.echo("\nA restore loads what plain Python computes from the orders before the cut.")
    _undo(store, paths, 1)
    _check(loaded(store, paths) == before, "the undo left other rows")


def _write_orders(folder: Path) -> Path:
    rows = pa.Table.from_pylist(ORDERS)
    at = rows.schema.get_field_index("ordered_at")
    times = pa.array([one["ordered_at"] * SECOND for one in ORDERS], pa.timestamp("us", "UTC"))
    path = folder / "orders.parquet"
    pq.write_table(rows.set_column(at, "ordered_at", times), path)
    return path


def truth_of_orders() -> dict[tuple[str, str], Rows]:
    """The rows of the computed tables, computed from the orders before the cut."""
    orders = [one for one in ORDERS if one["kafka_offset"] < CUT[one["kafka_partition"]]]
    watermark = max(one["ordered_at"] for one in orders) - LATENESS
    bins: dict[tuple[str, int], list[int]] = defaultdict(list)
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    values: dict[tuple[str, int], int] = defaultdict(int)
    for one in orders:
        bins[one["k"], one["ordered_at"] // 40 * 40].append(one["v"])
        groups[one["k"]].append(one)
        values[one["k"], one["v"]] += 1
    found: dict[tuple[str, str], Rows] = {
        ("tumbling_4", "t"): [
            {"k": k, COUNT[0]: len(some), SUM[0]: sum(some), "_timestamp": at * NANOS}
            for (k, at), some in bins.items()
            if at >= watermark - 40
        ],
        ("updating_aggregate_7", "a"): [
            {
                "k": k,
                COUNT[0]: len(some),
                MOST[0]: max(one["v"] for one in some),
                "_timestamp": max(one["ordered_at"] for one in some) * NANOS,
                "_generation": len(some),
            }
            for k, some in groups.items()
        ],
        ("updating_aggregate_7", "b"): [
            {
                "k": k,
                "accumulator": 1,
                "args_row": b"\1" + (v + 2**63).to_bytes(8, "big"),
                "count": count,
                "_timestamp": watermark * NANOS,
                "_generation": count,
            }
            for (k, v), count in values.items()
        ],
        ("join_11", "left"): [
            {name: one[name] for name in ("k", "item", "price")}
            | {"_timestamp": one["ordered_at"] * NANOS}
            for one in orders
            if one["price"] >= 20
        ],
    }
    return {key: in_order(rows) for key, rows in found.items()}


def _title(text: str) -> None:
    click.secho(f"\n{text}\n", bold=True)


def _show(plan: EditPlan | None, parts: Sequence[tuple[str, Rows]]) -> None:
    if plan is not None:
        print_plan(plan, in_full=False)
    for name, rows in parts:
        click.echo(f"\n{name}: a restore loads {len(rows)} rows")
        if rows:
            shown = [[str(value) for value in row.values()] for row in rows[:ROWS_PRINTED]]
            print_table(list(rows[0]), shown)


def _undo(store: ObjectStore, paths: JobPaths, level: int) -> None:
    verdict = verify_job(WriteProtected(store), paths, level=level).verdict
    _check(verdict.passed, f"the job does not pass verification: {verdict.errors[:1]}")
    run_undo(store, paths, stopped(paths))


def _check(held: bool, message: str) -> None:
    if not held:
        raise DemoError(message)


if __name__ == "__main__":
    main()
