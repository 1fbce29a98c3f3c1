"""What older versions of pyspark lack is done in other ways, with the same result."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import functions as f

from arroyo_dagster.spark.versions import in_partitions


@pytest.mark.parametrize("partitions", [1, 7, 24])
def test_rows_are_in_the_partition_that_a_column_names(session: Any, partitions: int) -> None:
    rows = session.range(2 * partitions).select((f.col("id") % partitions).cast("int").alias("n"))
    old = SimpleNamespace(repartition=rows.repartition)  # before 4.1
    for frame in (rows, old):
        placed: Any = in_partitions(frame, partitions, "n")
        found = placed.select("n", f.spark_partition_id().alias("partition")).collect()
        assert len(found) == 2 * partitions
        assert all(row.n == row.partition for row in found)
