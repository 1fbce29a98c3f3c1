"""A topic that services of one dataflow write and read: Parquet files in the writer's job.

A writer publishes the records of an epoch in the second phase of its commit (`KeptSink`), so that a
reader sees only ready epochs. All files of an epoch exist before the first file of the writer's
next epoch. A reader that sees a file of epoch n therefore knows that all earlier epochs are
complete, and its offset need not list their files.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import pyarrow as pa

from arroyo_dagster.dataflow.storage.boundary import SINK_SCHEMA
from arroyo_dagster.dataflow.topics.records import RECORDS
from arroyo_dagster.engine.operators import Offset, Source
from arroyo_dagster.errors import (
    FormatError,
    InputError,
    NotFoundError,
    ProtocolError,
    StorageError,
)
from arroyo_dagster.state.codec.parquet import decode_file
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.numbers import number_pattern
from arroyo_dagster.state.storage.store import ObjectStore

_NAME = re.compile(rf"({number_pattern(7)})-({number_pattern(3)})-[0-9a-f]{{16}}\.parquet")
FILES_PER_EPOCH = 64
EPOCHS_KEPT = 10
FROM = "from:"
"""The prefix of writers in an offset; members without it are kept, as in `FileSource`."""


_EPOCH_BITS, _SUBTASK_BITS = 36, 24  # rows of a subtask's epoch, then subtasks, then epochs
_BEGINNING: Offset = {"epoch": 0, "read": []}


def offset_behind(epoch: Epoch) -> Offset:
    """Return the member of an offset for a writer all of whose records up to an epoch were read."""
    return {"epoch": int(epoch), "read": []}


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """A file of records. `epoch`, `subtask`: the writer's epoch and subtask."""

    epoch: int
    subtask: int
    path: StatePath

    @property
    def first_offset(self) -> int:
        """The offset of its first record, greater than all offsets of earlier files."""
        return (self.epoch << _EPOCH_BITS) + (self.subtask << _SUBTASK_BITS)


@dataclass(frozen=True, slots=True)
class SegmentSplit:
    """A file that an epoch reads. `number`: the partition of its records, one per writer."""

    number: int
    first_offset: int
    path: StatePath


class SegmentSource(Source):
    """Records that services of the dataflow wrote to a topic, each exactly once.

    Args:
        topic: the topic.
        store: the object store of the writers' jobs.
        writers: the directory of each writing service.
        files_per_epoch: the maximum number of files per epoch.
        readers: the services that read the topic. Files that all of them have read can be removed,
            see `note`.
        up_to: the last epoch of the writers that is read; None = all.

    Raises:
        InputError: there is no writer, or `files_per_epoch` is below 1.
    """

    schema = RECORDS

    def __init__(
        self,
        topic: str,
        store: ObjectStore,
        writers: Mapping[str, StatePath],
        *,
        files_per_epoch: int = FILES_PER_EPOCH,
        readers: Collection[str] = (),
        up_to: Epoch | None = None,
    ) -> None:
        if not writers or files_per_epoch < 1:
            raise InputError(
                "no service writes the topic" if not writers else "files_per_epoch is at least 1",
                topic=topic,
            )
        self._topic = topic
        self._store = store
        self._writers = dict(sorted(writers.items()))
        self._files_per_epoch = files_per_epoch
        self._readers = frozenset(readers)
        self._up_to = up_to
        self._taken: dict[str, Offset] = {}
        self._trimmed = dict.fromkeys(self._writers, 0)
        self.complete = False
        """Whether the writers have ended; their runner sets it."""

    @property
    def writers(self) -> frozenset[str]:
        """The services that write the topic."""
        return frozenset(self._writers)

    def initial_offset(self) -> Offset:
        """Return the offset before the first epoch of every writer."""
        return {FROM + writer: _BEGINNING for writer in self._writers}

    def latest_offset(self, start: Offset) -> Offset:
        """Return the offset after at most `files_per_epoch` more files."""
        end, room = {**self.initial_offset(), **start}, self._files_per_epoch
        for writer in self._writers:
            member = FROM + writer
            epoch, done = int(end[member]["epoch"]), set(end[member]["read"])
            segments = self._segments(writer, epoch)
            fresh = [segment for segment in segments if segment.path.name not in done][:room]
            room -= len(fresh)
            done.update(segment.path.name for segment in fresh)
            complete = epoch
            for segment in segments:
                if segment.path.name not in done:
                    break
                if segment.epoch < segments[-1].epoch:
                    complete = segment.epoch
            names = {s.path.name: s for s in segments if s.epoch > complete}
            end[member] = {"epoch": complete, "read": sorted(done & names.keys())}
        return end

    def _segments(self, writer: str, after_epoch: int) -> list[Segment]:
        directory = self._writers[writer]
        try:
            listed = self._store.list(directory, start_after=f"{directory}/{after_epoch + 1:07}")
            paths = [info.path for info in listed if info.path.parent == directory]
        except NotFoundError:
            return []  # the store itself does not exist yet
        segments = [(_NAME.fullmatch(path.name), path) for path in paths]
        return sorted(
            Segment(int(match.group(1)), int(match.group(2)), path)
            for match, path in segments
            if match and (self._up_to is None or int(match.group(1)) <= self._up_to)
        )

    def partitions(self, start: Offset, end: Offset) -> Sequence[SegmentSplit]:
        """Return one split per file, ordered by writer and epoch.

        Raises:
            ProtocolError: a file that the offset lists is missing.
        """
        splits: list[SegmentSplit] = []
        for number, writer in enumerate(self._writers):
            begin, stop = start.get(FROM + writer, _BEGINNING), end[FROM + writer]
            segments = self._segments(writer, int(begin["epoch"]))
            added = set(stop["read"]) - set(begin["read"])
            self._check_there(writer, added - {segment.path.name for segment in segments})
            splits += [
                SegmentSplit(number, segment.first_offset, segment.path)
                for segment in segments
                if segment.path.name not in begin["read"]
                and (segment.epoch <= int(stop["epoch"]) or segment.path.name in added)
            ]
        return splits

    def _check_there(self, writer: str, missing: set[str]) -> None:
        if missing:
            raise ProtocolError(
                "records that an epoch of this run has read are missing",
                topic=self._topic,
                path=self._writers[writer] / min(missing),
            )

    def read(self, partition: SegmentSplit) -> Iterator[pa.RecordBatch]:
        """Yield the records of one file."""
        rows, _ = decode_file(self._store.read(partition.path), partition.path)
        if not rows.schema.equals(SINK_SCHEMA):
            raise FormatError("kept records have another schema than expected", path=partition.path)
        first, count = partition.first_offset, rows.num_rows
        columns = {
            **{name: rows.column(name) for name in SINK_SCHEMA.names},
            "partition": pa.array([partition.number] * count, pa.int32()),
            "offset": pa.array(range(first, first + count), pa.int64()),
        }
        yield from pa.table([columns[name] for name in RECORDS.names], RECORDS).to_batches()

    def note(self, reader: str, checkpoint: Checkpoint) -> None:
        """Note a ready epoch of a reader, and remove files that all readers have read.

        The files of each writer's last `EPOCHS_KEPT` read epochs are kept: a writer that failed may
        commit its newest epoch again, and then checks its files.

        Args:
            reader: the service of the epoch.
            checkpoint: the ready epoch.
        """
        if reader not in self._readers or checkpoint.progress is None:
            return
        for source in json.loads(checkpoint.progress.offsets).values():
            if self._topic in source.get("topics", {}):
                self._taken[reader] = source["topics"][self._topic]
        if self._taken.keys() == self._readers:
            for writer in self._writers:
                # The epoch is ready, so a failure here is harmless: a later call removes the files.
                with contextlib.suppress(StorageError):
                    self._trim(writer)

    def _trim(self, writer: str) -> None:
        offsets = [offset.get(FROM + writer, _BEGINNING) for offset in self._taken.values()]
        before = min(int(offset["epoch"]) for offset in offsets) - EPOCHS_KEPT
        if before < self._trimmed[writer] + EPOCHS_KEPT:
            return  # list only every `EPOCHS_KEPT` epochs
        paths = [segment.path for segment in self._segments(writer, 0) if segment.epoch <= before]
        if not self._store.delete_many(paths).failed:
            self._trimmed[writer] = before

    def exhausted(self, offset: Offset) -> bool:
        """Return whether the writers have ended and all of their records were read."""
        return self.complete and self.latest_offset(offset) == offset


def note_ends(between: Iterable[SegmentSource], ended: Set[str]) -> bool:
    """Mark topics between services as complete if all their writers have ended.

    Args:
        between: the sources of these topics.
        ended: the services that have ended.

    Returns:
        Whether at least one was marked, so that its readers may have more to do.
    """
    fresh = [source for source in between if not source.complete and source.writers <= ended]
    for source in fresh:
        source.complete = True
    return bool(fresh)
