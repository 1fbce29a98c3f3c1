"""Readings of sensors, from JSON files that keep arriving in a folder: the hottest of each sensor.

    mkdir -p /tmp/readings/in
    arroyo-state run examples/growing_folder.py:pipeline --spark --follow --url /tmp/readings/state

Then move files into the folder, from a place on the same disk, so that none is read half written:

    echo '{"sensor": "a", "celsius": 21.5, "at": "2026-01-01T00:00:00Z"}' > /tmp/readings/next
    mv /tmp/readings/next /tmp/readings/in/1.json

Each line counts once, whatever is killed. Every new maximum is a row in the Parquet files of
`/tmp/readings/out`, and
`arroyo-state rows readings/main hottest hottest --url /tmp/readings/state` prints the table.
READINGS: the folder to use in place of `/tmp/readings`.
"""

from __future__ import annotations

import os

import pyarrow as pa

import arroyo_dagster as ad
from arroyo_dagster.spark.engine.connectors import SparkSource

READINGS = pa.schema(
    [
        pa.field("sensor", pa.string()),
        pa.field("celsius", pa.float64()),
        pa.field("at", pa.timestamp("us", "UTC")),
    ]
)


class Hottest(ad.Operator):
    """Puts out each reading that is higher than all of its sensor before."""

    output_schema = pa.schema([("sensor", pa.string()), ("celsius", pa.float64())])

    def tables(self):
        return [ad.global_table_config("hottest", key=str, value=float)]

    def process_batch(self, batch, ctx, collector):
        hottest = ctx.table_manager.get_global_keyed_state("hottest", str, float)
        higher = hottest.merge(batch["sensor"], batch["celsius"], "max")
        collector.collect(
            pa.table([list(higher), list(higher.values())], schema=self.output_schema)
        )


def pipeline() -> ad.Pipeline:
    """Build the pipeline for `arroyo-state run`."""
    folder = os.environ.get("READINGS", "/tmp/readings")
    readings = ad.Pipeline("readings", parallelism=2)
    # Spark reads what a line does not have as null.
    complete = "sensor IS NOT NULL AND celsius IS NOT NULL AND at IS NOT NULL"
    source = SparkSource("json", {"path": f"{folder}/in"}, schema=READINGS, where=complete)
    rows = readings.source("files", source, timestamp="at")
    hottest = rows.key_by("sensor").apply("hottest", Hottest())
    hottest.sink("out", ad.ParquetSink(f"{folder}/out"))
    return readings
