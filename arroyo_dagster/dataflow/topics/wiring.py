"""Open the sources and sinks of a dataflow's topics from their bindings.

A topic that services both write and read needs no binding: its records are stored in the writers'
jobs. A sink that is bound to such a topic receives them too.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import pyarrow as pa

from arroyo_dagster.dataflow.definition.definition import Dataflow, Package
from arroyo_dagster.dataflow.definition.types import scope_of
from arroyo_dagster.dataflow.runtime.letters import DEAD_LETTERS
from arroyo_dagster.dataflow.runtime.service import Bindings, converter_of
from arroyo_dagster.dataflow.storage.boundary import FILE_METADATA
from arroyo_dagster.dataflow.topics.bindings import BindingsText, TopicBinding
from arroyo_dagster.dataflow.topics.cells import CsvLines, JsonLines, Shape, shape_of
from arroyo_dagster.dataflow.topics.folders import Folder, FolderEntry, folder_at, refuse_compressed
from arroyo_dagster.dataflow.topics.lines import CsvRows, Lines
from arroyo_dagster.dataflow.topics.pipe import ByteStream, PipeSource
from arroyo_dagster.dataflow.topics.rate import RateSource
from arroyo_dagster.dataflow.topics.records import RECORDS
from arroyo_dagster.dataflow.topics.rows import ParquetRows
from arroyo_dagster.dataflow.topics.segments import SegmentSource
from arroyo_dagster.dataflow.topics.sinks import (
    AppendSink,
    BothSinks,
    KeptSink,
    LinesFolderSink,
    ParquetFolderSink,
    PrintSink,
    Writer,
)
from arroyo_dagster.dataflow.views.view import service_paths
from arroyo_dagster.engine.operators import Offset, Sink, Source
from arroyo_dagster.errors import ArroyoStateError, InputError, ProtocolError
from arroyo_dagster.redaction import redact_url, register_settings, register_url
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Wired:
    """The opened sources and sinks of a dataflow.

    Attributes:
        bindings: the bindings for `build_dataflow`.
        between: the sources of topics that services both write and read.
        pipes: the sources that store lines of the standard input, by topic.
        unbound: the topics that services write, and that have neither sink nor reader.
    """

    bindings: Bindings
    between: tuple[SegmentSource, ...] = ()
    pipes: Mapping[str, PipeSource] = field(default_factory=dict)
    unbound: tuple[str, ...] = ()


class Outside(Protocol):
    """Opens bindings that another engine runs: `spark`."""

    def source(
        self, binding: TopicBinding, shape: Shape, directory: StatePath, readers: tuple[str, ...]
    ) -> Source:
        """Open a source. `directory`: where it may store data; `readers`: the services."""

    def sink(self, binding: TopicBinding, shape: Shape) -> Sink:
        """Open a sink."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Letters:
    """What the services of a run do with dead letters.

    Attributes:
        written: whether they write them, so that a sink may be bound to `dead-letters`.
        replayed: whether they read them instead of their topics, so that no source is opened.
    """

    written: bool = False
    replayed: bool = False


NO_LETTERS = Letters()


def wire(
    dataflow: Dataflow,
    given: BindingsText,
    store: ObjectStore,
    *,
    packages: Mapping[str, Package] | None = None,
    stdin: ByteStream | None = None,
    outside: Outside | None = None,
    letters: Letters = NO_LETTERS,
) -> Wired:
    """Open the sources and sinks of a dataflow's topics.

    Args:
        dataflow: the definition.
        given: the bindings.
        store: the object store of the states, and of records between services.
        packages: the packages that the dataflow imports, by id.
        stdin: the standard input; None = not available.
        outside: opens `spark` bindings; None = not available.
        letters: what the services do with dead letters.

    Raises:
        InputError: a topic that a service reads has neither source nor writer, or both; a source
            or sink is bound to a topic that no service reads or writes; a binding is invalid.
        NotFoundError: a file does not exist.
    """
    register_settings(given.env)
    for binding in (*given.sources.values(), *given.sinks.values()):
        register_url(binding.target)
        register_settings(binding.options)
    wiring = _Wiring(dataflow, given, store, packages or {}, stdin, outside)
    if letters.written:
        wiring.add_letters()
    return wiring.wired(replays=letters.replayed)


class _Wiring:
    def __init__(
        self,
        dataflow: Dataflow,
        given: BindingsText,
        store: ObjectStore,
        packages: Mapping[str, Package],
        stdin: ByteStream | None,
        outside: Outside | None,
    ) -> None:
        self._dataflow = dataflow
        self._given = given
        self._store = store
        self._packages = packages
        self._stdin = stdin
        self._outside = outside
        self._types = scope_of(dataflow, packages)
        self._readers = services_by_topic(dataflow, "sources")
        self._writers = services_by_topic(dataflow, "sinks")

    def add_letters(self) -> None:
        self._writers[DEAD_LETTERS] = list(self._dataflow.services)

    def wired(self, *, replays: bool) -> Wired:
        self._check(replays=replays)
        sources: dict[str, Source] = {}
        between: list[SegmentSource] = []
        for topic in () if replays else self._readers:
            if topic in self._given.sources:
                sources[topic] = self._source(self._given.sources[topic])
            else:
                between.append(self._between(topic))
                sources[topic] = between[-1]
        sinks = {topic: self._sink(topic) for topic in self._writers}
        return Wired(
            bindings=Bindings(
                sources=sources,
                sinks={topic: sink for topic, sink in sinks.items() if sink is not None},
                functions=self._given.functions,
                packages=self._packages,
                env=self._given.env,
            ),
            between=tuple(between),
            pipes={name: pipe for name, pipe in sources.items() if isinstance(pipe, PipeSource)},
            unbound=tuple(
                sorted(
                    topic for topic, sink in sinks.items() if sink is None and topic != DEAD_LETTERS
                )
            ),
        )

    # ---- checks ----------------------------------------------------------------------------------

    def _check(self, *, replays: bool) -> None:
        for role, bound, used in (
            ("source", self._given.sources, self._readers),
            ("sink", self._given.sinks, self._writers),
        ):
            for topic in bound:
                if topic not in used:
                    raise self._not_used(role, topic, used)
        missing = [
            topic
            for topic in (() if replays else self._readers)
            if topic not in self._given.sources and topic not in self._writers
        ]
        if missing:
            raise InputError(
                f"{len(missing)} topic{'s have' if len(missing) > 1 else ' has'} no source: "
                f"{', '.join(missing)}",
                dataflow=self._dataflow.name,
                services=", ".join(self._readers[missing[0]]),
                next_step=f"bind each, for example `--source {missing[0]}=jsonl:PATH`",
            )
        for topic in self._given.sources:
            if topic in self._writers:
                raise InputError(
                    "a topic with a source is also written by a service, so its readers would "
                    "have two inputs",
                    topic=topic,
                    services=", ".join(self._writers[topic]),
                    next_step=f"remove the source of {topic}; readers then get what the service "
                    "writes",
                )
        piped = [name for name, binding in self._given.sources.items() if binding.kind == "stdin"]
        readers = [service for name in piped for service in self._readers[name]]
        if len(readers) > 1:
            raise InputError(
                "only one service can read the standard input, which cannot be read twice",
                topics=", ".join(piped),
                services=", ".join(readers),
                next_step="let one service read it, and write a topic that the others read",
            )

    def _not_used(self, role: str, topic: str, used: Mapping[str, Sequence[str]]) -> InputError:
        near = difflib.get_close_matches(topic, used, n=1)
        verb = "reads" if role == "source" else "writes"
        return InputError(
            f"no service {verb} a topic {topic!r}; topics with a {role}: "
            f"{', '.join(sorted(used)) or 'none'}",
            dataflow=self._dataflow.name,
            topic=topic,
            next_step=f"did you mean {near[0]!r}?" if near else f"remove its {role}",
        )

    # ---- sources and sinks -----------------------------------------------------------------------

    def _shape(self, topic: str, *, reading: bool) -> Shape:
        declared = self._dataflow.topics.get(topic)
        if declared is None:
            return Shape()
        return shape_of(
            declared.value,
            self._types,
            raw=converter_of(self._dataflow, topic) == "raw",
            reading=reading,
            snake_case=self._dataflow.api_version == "0.5.0",
        )

    def _source(self, binding: TopicBinding) -> Source:
        rows = int(binding.options.get("rows_per_epoch", ROWS_PER_EPOCH))
        if binding.kind == "rate":
            limit = binding.options.get("limit")
            return RateSource(
                binding.topic,
                _number(binding),
                limit=None if limit is None else int(limit),
                rows_per_epoch=rows,
            )
        if binding.kind == "stdin":
            return self._pipe(binding.topic, rows)
        shape = self._shape(binding.topic, reading=True)
        if binding.kind == "spark":
            readers = tuple(self._readers[binding.topic])
            directory = service_paths(self._dataflow, readers[0]).spark_source(binding.topic)
            return self._opener(binding).source(binding, shape, directory, readers)
        formats: dict[str, Format] = {
            "jsonl": Lines(),
            "csv": CsvRows(shape.from_cells),
            "parquet": ParquetRows(
                shape.from_row, shape.wants, raw=shape.raw and shape.fields is None
            ),
        }
        try:
            return FileSource(
                binding.topic,
                folder_at(binding.target),
                formats[binding.kind],
                follow=bool(binding.options.get("follow", False)),
                rows_per_epoch=rows,
            )
        except ArroyoStateError as error:
            error.facts.setdefault("topic", binding.topic)
            raise

    def _opener(self, binding: TopicBinding) -> Outside:
        if self._outside is None:
            raise InputError(
                f"the {binding.role} needs Spark, and this run is in process",
                topic=binding.topic,
                next_step="run it with --spark",
            )
        return self._outside

    def _pipe(self, topic: str, rows: int) -> PipeSource:
        if self._stdin is None:
            raise InputError("the standard input is not available here", topic=topic)
        directory = service_paths(self._dataflow, self._readers[topic][0]).stdin(topic)
        return PipeSource(topic, self._store, directory, self._stdin, rows_per_epoch=rows)

    def _between(self, topic: str) -> SegmentSource:
        writers = {
            service: service_paths(self._dataflow, service).topic(topic)
            for service in self._writers[topic]
        }
        return SegmentSource(topic, self._store, writers, readers=self._readers[topic])

    def _sink(self, topic: str) -> Sink | None:
        binding = self._given.sinks.get(topic)
        bound = None if binding is None else self._bound_sink(binding)
        if topic not in self._readers:
            return bound
        kept = KeptSink(self._store.url, topic)
        return kept if bound is None else BothSinks(bound, kept)

    def _bound_sink(self, binding: TopicBinding) -> Sink:
        shape = self._shape(binding.topic, reading=False)
        if binding.kind == "spark":
            return self._opener(binding).sink(binding, shape)
        if binding.kind == "stdout":
            return PrintSink(binding.topic, JsonLines(binding.topic))
        if binding.kind == "parquet":
            return ParquetFolderSink(binding.topic, _folder_url(binding.target), shape)
        writer: Writer = (
            JsonLines(binding.topic) if binding.kind == "jsonl" else CsvLines(binding.topic, shape)
        )
        target = binding.target
        remote = "://" in target and not target.startswith("file://")
        if remote or target.endswith("/") or os.path.isdir(target.removeprefix("file://")):
            return LinesFolderSink(binding.topic, _folder_url(binding.target), writer)
        if len(self._writers[binding.topic]) > 1:
            raise InputError(
                "a file can take the records of only one service",
                topic=binding.topic,
                services=", ".join(self._writers[binding.topic]),
                next_step=f"bind it to a directory: `{binding.topic}={binding.kind}:PATH/`",
            )
        return AppendSink(binding.topic, binding.target.removeprefix("file://"), writer)


def services_by_topic(dataflow: Dataflow, ends: str) -> dict[str, list[str]]:
    """Return the services that read (`ends` = `sources`) or write (`sinks`) each topic."""
    services: dict[str, list[str]] = {}
    for service in dataflow.services.values():
        for end in service.sources if ends == "sources" else service.sinks:
            if end.id is not None and service.name not in services.setdefault(end.id, []):
                services[end.id].append(service.name)
    return services


def _number(binding: TopicBinding) -> float:
    try:
        return float(binding.target)
    except ValueError as error:
        raise InputError(
            "rate needs numbers a second", topic=binding.topic, given=redact_url(binding.target)
        ) from error


def _folder_url(target: str) -> str:
    return target if "://" in target else os.path.abspath(target)


# ---- a topic with records in files: one file or a directory, fixed or growing --------------------

ROWS_PER_EPOCH = 100_000

FILE = "file:"
"""The prefix of files in an offset. Members without it belong to an earlier binding of the topic;
they are kept, so that a later run with that binding continues at its position."""

FileProgress = tuple[int, int, int]
"""The read position in a file, its fingerprint, and its number in the order of discovery."""


class Format(Protocol):
    """A file format with records; see the methods of `Lines` for details."""

    def length(self, folder: Folder, entry: FolderEntry) -> int:
        """Return the end position of the file."""

    def check(self, folder: Folder, entry: FolderEntry, position: int, fingerprint: int) -> None:
        """Check that the file is the one that was read up to `position`."""

    def fingerprint(self, folder: Folder, entry: FolderEntry, position: int) -> int:
        """Return a checksum that identifies a file that was read up to `position`."""

    def extent(
        self, folder: Folder, entry: FolderEntry, start: int, room: int, *, final: bool
    ) -> tuple[int, int]:
        """Return the end position of one epoch, and the number of its records."""

    def cuts(self, folder: Folder, name: str, start: int, end: int) -> Sequence[int]:
        """Return positions between `start` and `end`, both exclusive, at which to split."""

    def batches(
        self, folder: Folder, name: str, number: int, start: int, end: int
    ) -> Iterator[pa.RecordBatch]:
        """Yield the records from `start` (inclusive) to `end` (exclusive); `number`: partition."""


@dataclass(frozen=True, slots=True, order=True)
class FileSplit:
    """A range of one file that one epoch reads. `number`: the partition of its records."""

    number: int
    name: str
    start: int
    end: int


class FileSource(Source):
    """Records of a file, or of all files directly in a directory, in the order of their names.

    The offset has the read position and a fingerprint of every file. A file that is shorter than
    before or has another fingerprint is an error, so that no record is skipped silently. A file
    that appears later is read completely, whatever its name.

    Args:
        topic: the topic, for messages.
        folder: the files.
        holds: the format of the files.
        follow: whether files may grow or appear. A last line without a line end is then not read
            until it has one.
        rows_per_epoch: the maximum number of records per epoch.

    Raises:
        NotFoundError: there is no such file or directory.
        InputError: a file is compressed, or `rows_per_epoch` is below 1.
    """

    schema = RECORDS

    def __init__(
        self,
        topic: str,
        folder: Folder,
        holds: Format,
        *,
        follow: bool = False,
        rows_per_epoch: int = ROWS_PER_EPOCH,
    ) -> None:
        if rows_per_epoch < 1:
            raise InputError("rows_per_epoch is at least 1", topic=topic, given=rows_per_epoch)
        self._topic = topic
        self._folder = folder
        self._format = holds
        self._follow = follow
        self._rows_per_epoch = rows_per_epoch
        self._entries()

    def _entries(self) -> list[FolderEntry]:
        try:
            entries = self._folder.entries()
            for entry in entries:
                refuse_compressed(self._folder.where, entry.name)
        except ArroyoStateError as error:
            error.facts.setdefault("topic", self._topic)
            raise
        return entries

    def initial_offset(self) -> Offset:
        """Return the offset before all files."""
        return {}

    def check_offset(self, offset: Offset) -> None:
        """Check the files that were read.

        Raises:
            ProtocolError: a file is shorter than the part that was read, or was replaced.
        """

        def check(entry: FolderEntry) -> None:
            position, fingerprint, _ = self._progress(offset, entry.name)
            length = self._format.length(self._folder, entry)
            if length < position:
                raise self._shorter(entry, position, length)
            if position and self._format.fingerprint(self._folder, entry, position) != fingerprint:
                raise ProtocolError(
                    "the beginning of a file that was read has changed",
                    topic=self._topic,
                    path=self._folder.where,
                    file=entry.name,
                    next_step="give a file of other records another name; nothing was written",
                )

        concurrently(check, self._entries())

    def latest_offset(self, start: Offset) -> Offset:
        """Return the offset after at most `rows_per_epoch` more records.

        Raises:
            ProtocolError: a file is shorter than the part that was read, or was replaced.
            FormatError: a file is invalid.
        """
        end, room = dict(start), self._rows_per_epoch
        for entry in self._entries():
            position, fingerprint, number = self._progress(end, entry.name)
            length = self._format.length(self._folder, entry)
            if length < position:
                raise self._shorter(entry, position, length)
            if length == position or not room:
                continue
            if position:
                self._format.check(self._folder, entry, position, fingerprint)
            stop, count = self._format.extent(
                self._folder, entry, position, room, final=not self._follow
            )
            room -= count
            if stop > position:
                end[FILE + entry.name] = [
                    stop,
                    self._format.fingerprint(self._folder, entry, stop),
                    number,
                ]
        return end

    @staticmethod
    def _progress(offset: Offset, name: str) -> FileProgress:
        seen = sum(member.startswith(FILE) for member in offset)
        position, fingerprint, number = offset.get(FILE + name, (0, 0, seen))
        return position, fingerprint, number

    def _shorter(self, entry: FolderEntry, position: int, length: int) -> ProtocolError:
        return ProtocolError(
            "a file is shorter than the part of it that was already read",
            topic=self._topic,
            path=self._folder.where,
            file=entry.name,
            read=position,
            found=length,
            next_step="give a file of other records another name; nothing was written",
        )

    def partitions(self, start: Offset, end: Offset) -> Sequence[FileSplit]:
        """Return one split, or several for a large range, for each file that the epoch reads."""
        splits: list[FileSplit] = []
        names = (member.removeprefix(FILE) for member in end if member.startswith(FILE))
        for name in names:
            (first, _, _), (last, _, number) = (
                self._progress(start, name),
                self._progress(end, name),
            )
            if first != last:
                places = [first, *self._format.cuts(self._folder, name, first, last), last]
                splits += (FileSplit(number, name, *part) for part in pairwise(places))
        return sorted(splits)

    def read(self, partition: FileSplit) -> Iterator[pa.RecordBatch]:
        """Yield the records of one split, with the name of the file as metadata."""
        name = {FILE_METADATA: partition.name.encode()}
        for batch in self._format.batches(
            self._folder, partition.name, partition.number, partition.start, partition.end
        ):
            yield batch.replace_schema_metadata(name)

    def exhausted(self, offset: Offset) -> bool:
        """Return whether every file was read to its end; with `follow`, always False."""
        return not self._follow and all(
            self._progress(offset, entry.name)[0] >= self._format.length(self._folder, entry)
            for entry in self._entries()
        )
