"""Tables computed by Spark are those of the same rows in this process, written by workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster.errors import InputError
from arroyo_dagster.spark.surgery.bootstrap import Bootstrap
from arroyo_dagster.state.model.layout import Layout
from arroyo_dagster.state.operations.compaction.rewrite_undo import run_undo
from arroyo_dagster.state.operations.surgery.execute import EditOptions
from arroyo_dagster.state.storage import open_store
from tests.arroyo_jobs import SECOND, stopped
from tests.evolved_jobs import Sql, loaded, sql_job
from tests.journeys.test_bootstrap import EVENTS, NOW, groups_of, windows_of
from tests.journeys.test_surgery import errors_of
from tests.surgery_jobs import WATERMARK


def test_spark_computes_and_writes_the_tables_of_a_job(session: Any, tmp_path: Path) -> None:
    made = sql_job(Layout.PROTOCOL, "job_b")
    store = open_store(f"file://{tmp_path}")
    for info in made.store.list():
        store.put(info.path, made.store.read(info.path))
    events = session.createDataFrame(pa.table(EVENTS).to_pandas())
    events.createOrReplaceTempView("events")
    windows = session.sql(
        "select k, count(*) as `count(Int64(1))[count]`, sum(v) as `sum(v)[sum]`, "
        "timestamp_seconds(at - at % 10) as _timestamp from events group by k, at - at % 10"
    ).repartition(3)
    groups = session.sql(
        "select k, count(*) as `count(Int64(1))[count]`, max(v) as `max(v)[value]`, "
        "timestamp_seconds(max(at)) as _timestamp, count(*) as _generation from events group by k"
    ).repartition(2)
    ids = Sql().ids
    cut = Bootstrap(
        store=store,
        job=made.paths,
        directory=stopped(made.paths),
        watermark_micros=WATERMARK + 5 * SECOND,
    )
    with pytest.raises(InputError, match="have other columns than the table"):
        cut.table(ids["window"], "t", groups).plan()
    cut = cut.table(ids["window"], "t", windows).table(ids["totals"], "a", groups)
    cut = cut.position("0", "4711", operator=ids["source"])
    was = {info.path: store.read(info.path) for info in store.list(made.paths.root)}
    plan = cut.plan()
    assert {info.path for info in store.list(made.paths.root)} == was.keys()
    assert cut.run(plan, EditOptions(quiet_seconds=0)).published
    found = loaded(store, made.paths)
    assert found[ids["window"], "t"] == windows_of(NOW)
    assert found[ids["totals"], "a"] == groups_of()
    assert errors_of(store, made.paths) == set()
    run_undo(store, made.paths, stopped(made.paths))
    assert loaded(store, made.paths) == loaded(made.store, made.paths)
