"""Deliver records of a service to a topic: the sink's transforms, then its converter.

Source: sdf-states.md 3.1, 6.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from arroyo_dagster.dataflow.runtime.context import collected_later
from arroyo_dagster.dataflow.runtime.operators import ServiceOperator, ServicePlan, TopicPlan
from arroyo_dagster.dataflow.runtime.record_batches import column, decode, decode_keys, place_in
from arroyo_dagster.dataflow.runtime.steps import Place, Records, run_steps
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

        def place(at: int) -> Place:
            return place_in(batch, self.plan.topics, at)

        records = Records(decode(batch), range(batch.num_rows), decode_keys(batch))
        with self._place.entered(), collected_later():
            records = run_steps(self._steps, records, self.failures, self.metrics, place)
        rows = self._written(records, place)
        if rows:
            indexes = pa.array([row[0] for row in rows], pa.int64())
            columns = [
                pa.array([row[1] for row in rows], pa.binary()),
                pa.array([row[2] for row in rows], pa.binary()),
                column(batch, "timestamp").take(indexes),
            ]
            collector.collect(pa.RecordBatch.from_arrays(columns, schema=SINK_SCHEMA))

    def _written(
        self, records: Records, place: Callable[[int], Place]
    ) -> list[tuple[int, bytes | None, bytes]]:
        """Return for each record its index in the batch, and its key and value as bytes."""
        name = f"sink {self._topic.name}"
        rows: list[tuple[int, bytes | None, bytes]] = []
        for index, value in enumerate(records.values):
            key: Any = None if records.keys is None else records.keys[index]
            try:
                written = None if key is None else self._write_key(key)
                rows.append((records.at[index], written, self._write(value)))
            except Exception as error:
                self.failures.note(
                    name, error, value, place(records.at[index]), topic=True, partial=self._partial
                )
        self.metrics.count(name, succeeded=len(rows))
        return rows

    def handle_checkpoint(self, ctx: OperatorContext, collector: Collector) -> None:
        """Write the metrics of the epoch."""
        self.finish_epoch(ctx)
