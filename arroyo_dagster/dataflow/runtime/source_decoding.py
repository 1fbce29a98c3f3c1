"""Decode the records of a service's sources, batch by batch: as columns, or one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.dataflow.runtime.json_columns import column_reader, reads_records
from arroyo_dagster.dataflow.runtime.operators import TopicPlan
from arroyo_dagster.dataflow.runtime.record_batches import column
from arroyo_dagster.dataflow.runtime.service_source import SOURCE
from arroyo_dagster.dataflow.runtime.steps import Failures, Place, Records
from arroyo_dagster.dataflow.storage.boundary import VALUE
from arroyo_dagster.dataflow.storage.engine_tables import Metrics
from arroyo_dagster.dataflow.storage.payloads import SCALAR

_TOGETHER = 1000
"""How many records are decoded at once: few enough for the caches of the processor."""


def by_source(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the rows of each source, in the order of the sources' first rows."""
    sources = column(batch, SOURCE)
    bounds = pc.min_max(sources)
    if bounds["min"].as_py() == bounds["max"].as_py():
        yield bounds["min"].as_py(), batch
        return
    for source in pc.unique(sources).to_pylist():
        yield source, batch.filter(pc.equal(sources, source))


class SourceDecoder:
    """Decodes the records of one source.

    Args:
        topic: what it reads.
        failures: are told the records that do not decode.
        metrics: count them, and those that do.
        in_columns: whether the next step takes columns.
    """

    def __init__(
        self, topic: TopicPlan, failures: Failures, metrics: Metrics, *, in_columns: bool
    ) -> None:
        converter = topic.converter
        self._topic, self._failures, self._metrics = topic, failures, metrics
        self._read, self._read_all = converter.reader(), converter.batch_reader()
        self._read_key = converter.key_reader()
        self._in_columns = in_columns
        parses = in_columns or reads_records(converter)
        self._read_columns = column_reader(converter) if parses else None

    def parse(self, batch: pa.RecordBatch) -> pl.DataFrame | None:
        """Return the records of a batch as columns; None if one does not decode so.

        Any thread may call this, at any time.
        """
        raw = column(batch, VALUE)
        if not pa.types.is_binary(raw.type):
            return None
        if self._in_columns and self._topic.converter.is_text and not raw.null_count:
            text, is_text = _as_text(raw)
            return pl.DataFrame({SCALAR: pl.from_arrow(text)}) if is_text else None
        frame = None if self._read_columns is None else self._read_columns(raw)
        if frame is None or self._in_columns or not any(series.null_count() for series in frame):
            return frame
        return None

    def records(
        self, batch: pa.RecordBatch, parsed: pl.DataFrame | None, place: Callable[[int], Place]
    ) -> Records:
        """Return the records of a batch that decode.

        Args:
            batch: rows of the source.
            parsed: what `parse` returned for them.
            place: returns the position in its topic of the record at an index of the batch.
        """
        count, name = batch.num_rows, self._topic.name
        if parsed is not None:
            self._metrics.count(name, succeeded=count)
            return Records(None, range(count), self._keys(batch), frame=parsed)
        values, bad = self._values(batch)
        for index, error in bad.items():
            raw = column(batch, VALUE)[index].as_py()
            self._failures.note(name, error, raw, place(index), topic=True)
        keys = self._keys(batch)
        self._metrics.count(name, succeeded=count - len(bad))
        records = Records(values, range(count), keys)
        if not bad:
            return records
        kept = [index for index in range(count) if index not in bad]
        some_keys = None if keys is None else [keys[index] for index in kept]
        return records.taken(kept, [values[index] for index in kept], some_keys)

    def _values(self, batch: pa.RecordBatch) -> tuple[list[Any], dict[int, Exception]]:
        """Return the value of each record, and the errors of those that do not decode, by index."""
        raw, converter = column(batch, VALUE), self._topic.converter
        is_binary = pa.types.is_binary(raw.type)
        read, read_all = (
            (self._read, self._read_all)
            if is_binary
            else (converter.arrow_reader(), converter.arrow_batch_reader())
        )
        if is_binary and (converter.is_text or converter.name == "json"):
            raw, plain = _as_text(raw)
            if plain and converter.is_text and not raw.null_count:
                return raw.to_pylist(), {}
        values: list[Any] = []
        bad: dict[int, Exception] = {}
        for start in range(0, len(raw), _TOGETHER):
            records = raw[start : start + _TOGETHER].to_pylist()
            if None not in records:
                with contextlib.suppress(ValueError, LookupError, TypeError):  # not as usual
                    values.extend(read_all(records))
                    continue
            for record in records:
                try:
                    if is_binary and record is None:
                        raise ValueError("the record has no value")
                    values.append(read(record))
                except ValueError as error:
                    bad[len(values)] = error
                    values.append(None)
        return values, bad

    def _keys(self, batch: pa.RecordBatch) -> list[Any] | None:
        keys = column(batch, "key")
        if keys.null_count == batch.num_rows:
            return None
        decoded: list[Any] = []
        for key in keys.to_pylist():
            try:
                decoded.append(None if key is None else self._read_key(key))
            except ValueError:
                decoded.append(key)  # a key that does not decode stays bytes
        return decoded


def _as_text(raw: pa.Array) -> tuple[pa.Array, bool]:
    try:
        return raw.cast(pa.string()), True
    except pa.ArrowInvalid:
        return raw, False
