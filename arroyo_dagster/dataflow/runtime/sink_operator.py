"""Deliver records of a service to a topic: the sink's transforms, then its converter.

Source: sdf-states.md 3.1, 6.1.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from arroyo_dagster.dataflow.runtime.context import collected_later
from arroyo_dagster.dataflow.runtime.operators import ServiceOperator, ServicePlan, TopicPlan
from arroyo_dagster.dataflow.runtime.record_batches import decode, decode_keys
from arroyo_dagster.dataflow.runtime.records import OriginRows, Records, column
from arroyo_dagster.dataflow.runtime.steps import FAILED, call_each
from arroyo_dagster.dataflow.storage.boundary import SINK_SCHEMA
from arroyo_dagster.engine.operators import Collector, OperatorContext


class DeliverOperator(ServiceOperator):
    """Encodes records for one topic."""

    output_schema = SINK_SCHEMA

    def __init__(self, plan: ServicePlan, topic: TopicPlan) -> None:
        super().__init__(plan)
        self._topic = topic

    def on_start(self, ctx: OperatorContext) -> None:
        """Load the functions."""
        super().on_start(ctx)
        self._place = self.invocation()
        partial = self.plan.partial_before_sinks
        self._steps = self.steps(self._topic.transforms, self._place, partial=partial)
        self._partial = partial or any(
            step.function.plan.operator == "flat-map" for step in self._steps
        )
        self._write = self._topic.converter.writer()
        self._write_key = self._topic.converter.key_writer()

    def process_batch(
        self, batch: pa.RecordBatch, ctx: OperatorContext, collector: Collector
    ) -> None:
        """Convert and emit the records of a batch."""
        self.see(batch, ctx)

        origin = OriginRows(batch, self.plan.topics)
        records = Records(origin, decode(batch), range(batch.num_rows), decode_keys(batch))
        with self._place.entered(), collected_later():
            for step in self._steps:
                records = step.run(records)
        name = f"sink {self._topic.name}"

        def fail(index: int, error: Exception) -> None:
            value, place = records.values[index], records.place(index)
            self.failures.note(name, error, value, place, topic=True, partial=self._partial)

        if records.keys is None:
            results, failed = call_each(self._write, [records.values], fail)
        else:
            results, failed = call_each(self._written, [records.keys, records.values], fail)
        self.metrics.count(name, succeeded=len(records) - failed)
        rows = [result for result in results if result is not FAILED]
        if rows:
            keyed = records.keys is not None
            pairs = zip(records.rows, results, strict=True)
            indexes = pa.array([row for row, result in pairs if result is not FAILED], pa.int64())
            columns = [
                pa.array([row[0] if keyed else None for row in rows], pa.binary()),
                pa.array([row[1] for row in rows] if keyed else rows, pa.binary()),
                column(batch, "timestamp").take(indexes),
            ]
            collector.collect(pa.RecordBatch.from_arrays(columns, schema=SINK_SCHEMA))

    def _written(self, key: Any, value: Any) -> tuple[bytes | None, bytes]:
        return (None if key is None else self._write_key(key)), self._write(value)

    def handle_checkpoint(self, ctx: OperatorContext, collector: Collector) -> None:
        """Write the metrics of the epoch."""
        self.finish_epoch(ctx)
