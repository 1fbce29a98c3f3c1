"""Decode the records of a service's sources, batch by batch: as columns, or one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from arroyo_dagster.dataflow.definition.types import CompositeType, ScalarType
from arroyo_dagster.dataflow.runtime.converters import Converter
from arroyo_dagster.dataflow.runtime.failures import Failures
from arroyo_dagster.dataflow.runtime.operators import TopicPlan
from arroyo_dagster.dataflow.runtime.records import OriginRows, Records, column
from arroyo_dagster.dataflow.runtime.service_source import SOURCE
from arroyo_dagster.dataflow.storage.boundary import VALUE
from arroyo_dagster.dataflow.storage.engine_tables import Metrics
from arroyo_dagster.dataflow.storage.payloads import SCALAR
from arroyo_dagster.dataflow.storage.values import arrow_type

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
        read_columns = column_reader(converter)
        self._read_columns = read_columns if in_columns or reads_records(converter) else None

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

    def records(self, origin: OriginRows, parsed: pl.DataFrame | None) -> Records:
        """Return the records of a batch that decode.

        Args:
            origin: the rows of the source.
            parsed: what `parse` returned for them.
        """
        batch, name = origin.batch, self._topic.name
        count = batch.num_rows
        keys = self._keys(batch)
        values, bad = (None, {}) if parsed is not None else self._values(batch)
        for index, error in bad.items():
            raw = column(batch, VALUE)[index].as_py()
            self._failures.note(name, error, raw, origin.place(index), topic=True)
        self._metrics.count(name, succeeded=count - len(bad))
        records = Records(origin, values, range(count), keys, frame=parsed)
        if not bad:
            return records
        return records.chosen([index for index in range(count) if index not in bad])

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


# ---- JSON as columns -----------------------------------------------------------------------------
# The result is that of decoding each record. Whatever is doubtful (a record that does not decode, a
# member that is missing, a number that is not finite) gives None: the records are then decoded one
# by one, and each that fails is reported.

ReadColumns = Callable[[pa.Array], pl.DataFrame | None]
_BLOCK_BYTES = 1 << 20


def column_reader(converter: Converter) -> ReadColumns | None:
    """Return a function that decodes raw values (binary) as columns; None = the type has none.

    The type must be an object of scalars. Columns have the names of its members.
    """
    declared = converter.resolved(converter.type)
    if converter.name != "json" or not isinstance(declared, CompositeType):
        return None
    if declared.kind != "object" or not declared.members:
        return None
    members: dict[str, tuple[str, ScalarType, bool]] = {}
    for member in declared.members:
        scalar = converter.resolved(member.type)
        if not isinstance(scalar, ScalarType) or scalar is ScalarType.TIMESTAMP:
            return None
        members[member.name] = (converter.name_in_json(member), scalar, member.optional)
    # A double is read for an f32, too, so that it is rounded as it is elsewhere.
    kinds = {
        written: pa.float64() if scalar is ScalarType.F32 else arrow_type(scalar)
        for written, scalar, _ in members.values()
    }
    if len(kinds) < len(members):
        return None
    parse = pj.ParseOptions(
        explicit_schema=pa.schema(list(kinds.items())), unexpected_field_behavior="ignore"
    )

    def read(raw: pa.Array) -> pl.DataFrame | None:
        table = _parsed(raw, parse)
        if table is None:
            return None
        columns: dict[str, pa.ChunkedArray] = {}
        for name, (written, scalar, optional) in members.items():
            column = table.column(written)
            if column.null_count and not optional:
                return None
            if pa.types.is_floating(column.type):
                if scalar is ScalarType.F32:
                    column = column.cast(pa.float32(), safe=False).cast(pa.float64())
                if not pc.all(pc.is_finite(column.drop_null())).as_py():
                    return None
                column = pc.add(column, 0.0)  # -0 is an int of JSON, and so 0
            columns[name] = column
        return cast(pl.DataFrame, pl.from_arrow(pa.table(columns)))

    return read


def reads_records(converter: Converter) -> bool:
    """Return whether records made of what `column_reader` reads, without nulls, are what the
    converter gives: the type is an object of text, bools and whole numbers.
    """
    declared = converter.resolved(converter.type)
    if not isinstance(declared, CompositeType):
        return False
    scalars = [converter.resolved(member.type) for member in declared.members]
    return all(isinstance(scalar, ScalarType) and scalar in _AS_READ for scalar in scalars)


_AS_READ = {
    scalar
    for scalar in ScalarType
    if scalar in (ScalarType.STRING, ScalarType.BOOL) or scalar.is_integer
}
"""The types whose values in Python are the same whoever decodes them."""


def _parsed(raw: pa.Array, parse: pj.ParseOptions) -> pa.Table | None:
    if not len(raw) or raw.null_count or not _are_objects(raw):
        return None
    whole = pa.ListArray.from_arrays(pa.array([0, len(raw)], pa.int32()), raw)
    data = pc.binary_join(whole, b"\n")[0].as_buffer()
    # A record that is longer than a block would be refused.
    longest = pc.max(pc.binary_length(raw)).as_py() + 1
    options = pj.ReadOptions(block_size=max(_BLOCK_BYTES, longest))
    try:
        table = pj.read_json(pa.BufferReader(data), options, parse)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    return table if table.num_rows == len(raw) else None


def _are_objects(raw: pa.Array) -> bool:
    """Return whether each value begins and ends with a brace.

    Then no value ends in another's line, so that as many rows as values are one of each. And the
    parser ends the process at a `null` that is not in an object.
    """
    first = pc.binary_slice(raw, 0, 1)
    last = pc.binary_slice(raw, -1)
    braces = pc.and_(pc.equal(first, b"{"), pc.equal(last, b"}"))
    return bool(pc.all(braces).as_py())
