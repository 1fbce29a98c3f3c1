"""Run a dataflow in memory for tests: send records to its topics, and read its results."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from arroyo_dagster.dataflow.definition.definition import Dataflow, Package
from arroyo_dagster.dataflow.definition.loading import load_dataflow
from arroyo_dagster.dataflow.definition.types import scope_of
from arroyo_dagster.dataflow.in_process import DataflowOptions, run_dataflow
from arroyo_dagster.dataflow.runtime.converters import Converter
from arroyo_dagster.dataflow.runtime.letters import Letter
from arroyo_dagster.dataflow.runtime.service import (
    SKIP,
    Bindings,
    RunOptions,
    build_dataflow,
    converter_of,
)
from arroyo_dagster.dataflow.topics.records import RECORDS, Found, record_batches
from arroyo_dagster.dataflow.topics.replay import plan_replay
from arroyo_dagster.dataflow.topics.segments import SegmentSource
from arroyo_dagster.dataflow.topics.sinks import KeptSink
from arroyo_dagster.dataflow.topics.wiring import services_by_topic
from arroyo_dagster.dataflow.views.namespaces import Namespaces
from arroyo_dagster.dataflow.views.view import Views, service_paths
from arroyo_dagster.engine.operators import Offset, Source
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.clock import Clock, wall_clock_ms
from arroyo_dagster.state.storage.memory import MemoryStore


class SentTopic(Source):
    """A source with the records that were sent to a topic so far."""

    schema = RECORDS

    def __init__(self) -> None:
        self.records: list[Found] = []

    def initial_offset(self) -> Offset:
        """Return the offset of the first record."""
        return {"next": 0}

    def latest_offset(self, start: Offset) -> Offset:
        """Return the offset after all sent records."""
        return {"next": len(self.records)}

    def partitions(self, start: Offset, end: Offset) -> Sequence[tuple[int, int]]:
        """Return one split, or none without new records."""
        return [(int(start["next"]), int(end["next"]))] if start != end else []

    def read(self, partition: tuple[int, int]) -> Iterator[pa.RecordBatch]:
        """Yield the records of one split."""
        yield from record_batches(self.records[partition[0] : partition[1]], 0)

    def exhausted(self, offset: Offset) -> bool:
        """Return whether all sent records were read."""
        return int(offset["next"]) >= len(self.records)


@dataclass(frozen=True, slots=True)
class ReceivedRecord:
    """A record that a service wrote to a topic.

    Attributes:
        value: text if the topic is raw, else parsed JSON.
        key: its key in the declared type, as text if none is declared; None = no key.
        time_ms: its timestamp in epoch milliseconds.
    """

    value: Any
    key: Any = None
    time_ms: int | None = None


class DataflowTrial:
    """A dataflow in memory, for tests. It runs as with `arroyo-state sdf run`.

        flow = DataflowTrial("dataflow.yaml")
        flow.send("sentences", "to be or not", "to be")
        flow.run()
        assert flow.state("count-words.hits") == {"to": 2, "be": 2, "or": 1, "not": 1}

    Args:
        definition: the path of a dataflow.yaml, or a loaded dataflow, with its packages if it
            imports some.
        functions: Python functions for bodies in other languages, by name: callables, or
            `module:function`.
        env: the environment that functions see as `env`.
        clock: the engine's clock, in epoch milliseconds.
        on_error: as in `RunOptions`; with `DEAD_LETTER`, `letters` has the records that failed.

    Raises:
        InvalidDefinition: the definition has errors.
        InputError: it is a package, or a function is not bound (E26).
    """

    def __init__(
        self,
        definition: str | Path | Dataflow | tuple[Dataflow, dict[str, Package]],
        *,
        functions: Mapping[str, Callable[..., Any] | str] | None = None,
        env: Mapping[str, str] | None = None,
        clock: Clock = wall_clock_ms,
        on_error: str = SKIP,
    ) -> None:
        if isinstance(definition, tuple):
            self.dataflow, packages = definition
        elif isinstance(definition, Dataflow):
            self.dataflow, packages = definition, {}
        else:
            self.dataflow, packages = load_dataflow(definition)
        self.store = MemoryStore(uuid.uuid4().hex)
        self._clock, self._on_error = clock, on_error
        self._types = scope_of(self.dataflow, packages)
        self._written = services_by_topic(self.dataflow, "sinks")
        read = services_by_topic(self.dataflow, "sources")
        self._sent = {topic: SentTopic() for topic in read if topic not in self._written}
        self._between = {topic: self._segments(topic) for topic in read if topic in self._written}
        self._bindings = Bindings(
            sources={**self._sent, **self._between},
            sinks={topic: KeptSink(self.store.url, topic) for topic in self._written},
            functions=dict(functions or {}),
            packages=packages,
            env=dict(env or {}),
        )
        self._pipelines(flush_open=False)  # raises at once if a function is not bound

    def _segments(self, topic: str) -> SegmentSource:
        writers = {
            service: service_paths(self.dataflow, service).topic(topic)
            for service in self._written[topic]
        }
        return SegmentSource(topic, self.store, writers)

    def _pipelines(self, *, flush_open: bool) -> Any:
        options = RunOptions(flush_open=flush_open, clock=self._clock, on_error=self._on_error)
        return build_dataflow(self.dataflow, self.store, bindings=self._bindings, options=options)

    def send(
        self,
        topic: str,
        *values: Any,
        key: str | int | bool | None = None,
        time_ms: int | None = None,
    ) -> DataflowTrial:
        """Append records to a topic that no service writes.

        Args:
            topic: the topic.
            values: bytes are sent unchanged, and so is text if the topic is raw; other values are
                sent as JSON.
            key: the key of all these records, of the topic's type; None = no key.
            time_ms: their event time in epoch milliseconds; None = the engine's clock.

        Raises:
            InputError: no service reads the topic, or a service writes it; the key does not have
                the topic's type.
        """
        if topic not in self._sent:
            raise InputError(
                f"records are not sent to topic `{topic}`",
                topics=", ".join(self._sent) or "none",
                next_step="send to a topic that a service reads and none writes",
            )
        raw = converter_of(self.dataflow, topic) == "raw"
        records = self._sent[topic].records
        key_bytes = None if key is None else self._encoded_key(topic, key)
        for value in values:
            data = value.encode() if raw and isinstance(value, str) else value
            if not isinstance(data, bytes):
                data = json.dumps(data, ensure_ascii=False).encode()
            records.append(Found(len(records), data, key_bytes, time_ms))
        return self

    def _encoded_key(self, topic: str, key: str | int | bool) -> bytes:
        try:
            encoded: bytes = self._keys_of(topic).key_writer()(key)
        except ValueError as error:
            raise InputError(f"key {key!r} of topic `{topic}`: {error}") from error
        return encoded

    def _keys_of(self, topic: str) -> Converter:
        known = self.dataflow.topics.get(topic)
        key_type = None if known is None else known.key
        return Converter(name="raw", type=None, key_type=key_type, types=self._types)

    def run(self, *, close_windows: bool = False) -> DataflowTrial:
        """Run all services until nothing is new. The next run continues from there.

        Args:
            close_windows: whether to close open windows at the end.
        """
        run_dataflow(
            self._pipelines(flush_open=close_windows),
            self.store,
            DataflowOptions(idle_seconds=0.0),
            between=tuple(self._between.values()),
        )
        for source in self._between.values():
            source.complete = False
        return self

    def received(self, topic: str) -> list[Any]:
        """Return the values of `received_records`. Errors as there."""
        return [record.value for record in self.received_records(topic)]

    def received_records(self, topic: str) -> list[ReceivedRecord]:
        """Return all records that services wrote to a topic, in order.

        Raises:
            InputError: no service writes the topic.
        """
        if topic not in self._written:
            raise InputError(
                f"no service writes topic `{topic}`", topics=", ".join(self._written) or "none"
            )
        source = self._segments(topic)
        raw = converter_of(self.dataflow, topic) == "raw"
        key_of = self._keys_of(topic).key_reader()
        found: list[ReceivedRecord] = []
        offset = source.initial_offset()
        while (end := source.latest_offset(offset)) != offset:
            for split in source.partitions(offset, end):
                for batch in source.read(split):
                    times = batch.column("timestamp").cast(pa.int64())
                    columns = (batch.column("value"), batch.column("key"), times)
                    for value, key, time_ms in zip(
                        *(column.to_pylist() for column in columns), strict=True
                    ):
                        found.append(
                            ReceivedRecord(
                                value.decode() if raw else json.loads(value),
                                None if key is None else key_of(key),
                                time_ms,
                            )
                        )
            offset = end
        return found

    def state(self, name: str) -> dict[str, Any]:
        """Return the content of a state: scalars, or rows as dicts, by the text of their key.

        A windowed state has the content of the window that closed last.

        Args:
            name: `service.state`, or the name of the state if it is unique.

        Raises:
            InputError: there is no such state.
        """
        view = Views(self.store, self.dataflow, clock=self._clock).view(name)
        keys = view.frame().get_column("_key").to_list()
        return {key: view.get(key) for key in keys}

    def sql(self, text: str, params: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Query the arrow-row states, and return each row as a dict. Errors as in `sdf.sql`."""
        views = Views(self.store, self.dataflow, clock=self._clock)
        return views.sql(text, params).to_dicts()

    @property
    def letters(self) -> list[Letter]:
        """The dead letters: the records that failed, if `on_error` keeps them."""
        replays = plan_replay(self.dataflow, self.store)
        return [letter for service in replays for letter in (*service.letters, *service.partial)]

    @property
    def failed(self) -> dict[str, int]:
        """The number of failed records by `service/function` or `service/topic`, if not 0."""
        found = {}
        for metrics in Namespaces(self.store, self.dataflow, clock=self._clock).metrics():
            for row in metrics.rows:
                count = dict(zip(metrics.names, row.values, strict=True))["failed"]
                if count:
                    found[metrics.name.removesuffix("/metrics")] = count
        return found
