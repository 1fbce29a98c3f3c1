"""Read the splits of a small epoch in the driver: its job then has one stage less, and no exchange
before the first operators.

See docs/decisions/spark-runtime.md, "Small epochs".
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from arroyo_dagster.spark.chunks import ChunkStream, chunk_batches
from arroyo_dagster.state.runtime.exchange import (
    ExchangeChunk,
    every_watermark,
    read_split,
    source_chunks,
)
from arroyo_dagster.state.runtime.pipeline import Pipeline
from arroyo_dagster.state.runtime.pipeline_run import SourceSplit

MOST_BYTES = 256 << 10
"""More rows do not travel with each task: Spark shuffles them."""

MOST_SPLITS = 8
MOST_SECONDS = 0.25
"""What takes longer to read is read by several workers at a time."""

LEFT_TO_WORKERS = 16
"""So many epochs are read by workers after one that the driver could not read, or not quickly."""


@dataclass(frozen=True, slots=True)
class ReadRows:
    """The rows of an epoch, read by the driver.

    Attributes:
        first: by subtask, the chunks of the first level as a `ChunkStream`.
        later: the chunks of later levels likewise; None if there are none.
    """

    first: Mapping[int, bytes]
    later: bytes | None


@dataclass(slots=True)
class SmallEpochs:
    """Decides by what earlier epochs were whether the driver reads the next one."""

    pipeline: Pipeline
    _left_to_workers: int = field(default=0)

    def read(self, splits: Sequence[SourceSplit]) -> ReadRows | None:
        """Read the splits of an epoch; None if workers must read them.

        They must if the epoch is not small, and if a source fails here: workers may reach what the
        driver does not, and Spark tries them again.
        """
        if self._left_to_workers > 0:
            self._left_to_workers -= 1
            return None
        if len(splits) > MOST_SPLITS:
            return None
        try:
            parts = self._few_rows(splits)
        except Exception:  # of a source, which may be a user's
            parts = None
        if parts is None:
            self._left_to_workers = LEFT_TO_WORKERS
            return None
        return self._rows(splits, parts)

    def _few_rows(self, splits: Sequence[SourceSplit]) -> list[list[pa.RecordBatch]] | None:
        """Return the rows of each split; None if they are many, or reading takes long."""
        size, until = 0, time.monotonic() + MOST_SECONDS
        parts: list[list[pa.RecordBatch]] = []
        for split in splits:
            parts.append([])
            for batch in read_split(self.pipeline.sources[split.source], split.split):
                size += batch.nbytes
                if size > MOST_BYTES or time.monotonic() > until:
                    return None
                parts[-1].append(batch)
        return parts

    def _rows(
        self, splits: Sequence[SourceSplit], parts: Sequence[Sequence[pa.RecordBatch]]
    ) -> ReadRows:
        chunks = [
            chunk
            for split, part in zip(splits, parts, strict=True)
            for chunk in source_chunks(
                self.pipeline, self.pipeline.sources[split.source], part, split.index
            )
        ]
        if not splits:
            chunks = list(every_watermark(self.pipeline))
        first: dict[int, list[ExchangeChunk]] = {}
        for chunk in chunks:
            if chunk.level == 1:
                first.setdefault(chunk.subtask, []).append(chunk)
        later = [chunk for chunk in chunks if chunk.level > 1]
        return ReadRows(
            first={subtask: _stream(group) for subtask, group in first.items()},
            later=_stream(later) if later else None,
        )


def _stream(chunks: Sequence[ExchangeChunk]) -> bytes:
    stream = ChunkStream()
    for batch in chunk_batches(chunks):
        stream.write(batch)
    return bytes(stream.close())
