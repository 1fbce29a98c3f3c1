"""State of a job computed from events by Spark, beside the same query that Spark writes itself."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from arroyo_dagster.spark.session import open_session
from arroyo_dagster.spark.settings import SparkSettings
from arroyo_dagster.spark.surgery.bootstrap import Bootstrap
from arroyo_dagster.state import Layout, open_store
from tests.arroyo_jobs import SECOND, stopped
from tests.benchmarks.conftest import Comparison
from tests.evolved_jobs import Sql, sql_job
from tests.internals import EditOptions
from tests.jobs import copy_into
from tests.surgery_jobs import BEGAN, WATERMARK

EVENTS = 10**7
KEYS = 10**6
ROUNDS = 3


def groups(session: Any) -> Any:
    """The state of each group, of events that Spark makes up as it reads them."""
    session.range(EVENTS).selectExpr(
        f"concat('k', (id * 7919) % {KEYS}) as k",
        "id * id % 101 - 20 as v",
        f"{BEGAN // SECOND + 30} + id % 30 as at",
    ).createOrReplaceTempView("events")
    return session.sql(
        "select k, count(*) as `count(Int64(1))[count]`, max(v) as `max(v)[value]`, "
        "timestamp_seconds(max(at)) as _timestamp, count(*) as _generation from events group by k"
    )


def test_ten_million_events_into_a_million_keys_beside_a_query_that_spark_writes(
    comparison: Comparison, tmp_path: Path
) -> None:
    session = open_session(SparkSettings(master="local[2]")).session
    made = sql_job(Layout.PROTOCOL, "job_b")

    def fresh() -> Path:
        root = tmp_path / "root"
        shutil.rmtree(root, ignore_errors=True)
        copy_into(open_store(str(root)), made.store)
        return root

    def ours(root: Path) -> None:
        frame = groups(session).cache()
        bootstrap = Bootstrap(
            tables={f"{Sql().ids['totals']}.a": frame}, watermark_micros=WATERMARK + 5 * SECOND
        ).job(made.paths, stopped(made.paths))
        store = open_store(str(root))
        plan = bootstrap.plan(store)
        done = bootstrap.run(store, EditOptions(quiet_seconds=0), plan=plan)
        frame.unpersist(blocking=True)
        assert done.published

    def peer(root: Path) -> None:
        groups(session).write.mode("overwrite").parquet(str(root.with_name("spark")))

    ratio = 1 / comparison.ratio(ours, peer, goal=2.0, rounds=ROUNDS, prepare=fresh)
    print(f"{ratio:.2f} of the pace of Spark, floor 0.5")
    assert ratio > 0.5
