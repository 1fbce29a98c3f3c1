"""Binds the sources and sinks of a pipeline that need Spark to one run of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import pyarrow as pa

from arroyo_dagster.errors import InputError
from arroyo_dagster.spark.connectors.columns import listed_columns
from arroyo_dagster.spark.connectors.queries import StagingQueries
from arroyo_dagster.spark.connectors.sink import SinkBinding, SparkSink
from arroyo_dagster.spark.connectors.source import SparkSource
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import OperatorId
from arroyo_dagster.state.runtime.coordinator import JobRun
from arroyo_dagster.state.runtime.pipeline import Pipeline
from arroyo_dagster.state.runtime.pipeline_run import OnEpoch
from arroyo_dagster.state.storage.store import ObjectStore


@contextlib.contextmanager
def bound_to_run(pipeline: Pipeline, store: ObjectStore) -> Iterator[StagingQueries]:
    """Bind sources and sinks within the context; the pipeline is to be packed inside it.

    Args:
        store: the object store of the state.

    Raises:
        InputError: Spark cannot store the offsets of a source; or a sink lacks a column.
    """
    sources = {
        name: node.source
        for name, node in pipeline.sources.items()
        if isinstance(node.source, SparkSource)
    }
    sinks = {name: sink for name, sink in pipeline.sinks().items() if isinstance(sink, SparkSink)}
    try:
        queries = StagingQueries(
            {
                name: source.bind(store, pipeline.paths, pipeline.sources[name])
                for name, source in sources.items()
            }
        )
        for source in sources.values():
            source.watch(queries)
        for name, sink in sinks.items():
            sink.bind(SinkBinding(store, name, _columns(pipeline, name), pipeline.paths.root))
        yield queries
    finally:
        for source in sources.values():
            source.watch(None)
        for sink in sinks.values():
            sink.bind(None)


def _columns(pipeline: Pipeline, sink: OperatorId) -> pa.Schema:
    first, *others = [pipeline.edge_schema(edge) for edge in pipeline.operators[sink].inputs]
    for other in others:
        if not other.equals(first):
            raise InputError(
                "the streams that a sink of Spark writes have different columns",
                operator=sink,
                columns=[listed_columns(first), listed_columns(other)],
                next_step="write each to a sink of its own, or give them the same output_schema",
            )
    return first


def noting(queries: StagingQueries, job: JobRun, on_epoch: OnEpoch | None) -> OnEpoch:
    """Return a function for `PipelineRun.run` that removes staged rows which an epoch has taken.

    Those of the epoch that the run continues are removed at once: the run that wrote it may have
    died before.

    Args:
        on_epoch: called with every epoch, too.
    """

    def note(checkpoint: Checkpoint) -> None:
        if checkpoint.progress is not None:
            queries.note(job.pipeline.paths.root, json.loads(checkpoint.progress.offsets))

    def note_and_pass_on(checkpoint: Checkpoint) -> None:
        note(checkpoint)
        if on_epoch is not None:
            on_epoch(checkpoint)

    if job.base is not None:
        note(job.base)
    return note_and_pass_on
