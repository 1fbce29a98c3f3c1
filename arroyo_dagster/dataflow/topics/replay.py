"""Dead letters as the source of a service, so that the records that failed are processed again.

How far letters were replayed is part of the service's offset, like the position in any source. So
a replay that is killed goes on exactly once, and a letter is replayed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from arroyo_dagster.dataflow.definition.definition import Dataflow
from arroyo_dagster.dataflow.runtime.letters import DEAD_LETTERS, Letter
from arroyo_dagster.dataflow.runtime.service import (
    Bindings,
    RunOptions,
    build_service,
    service_order,
)
from arroyo_dagster.dataflow.storage.boundary import FILE_METADATA
from arroyo_dagster.dataflow.topics.records import Found, record_batches
from arroyo_dagster.dataflow.topics.segments import FROM, SegmentSource, SegmentSplit
from arroyo_dagster.dataflow.views.namespaces import stored_offsets
from arroyo_dagster.dataflow.views.view import OwnerJob, service_paths
from arroyo_dagster.engine.operators import Offset
from arroyo_dagster.engine.pipeline import Pipeline
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.storage.store import ObjectStore

_WHOLE, _PARTIAL = "dead letters", "dead letters, partial"
"""The names of the two readings of letters in an offset. The first comes first."""

LETTER_MEMBERS = (FROM + _WHOLE, FROM + _PARTIAL)
"""Their members of the offset of a topic."""


class LetterSource(SegmentSource):
    """The dead letters of one service from one topic, as records of this topic.

    Args:
        topic: the topic.
        store: the object store of the service's job.
        dataflow, service: the service.
        up_to: the last epoch whose letters are replayed. Those that fail again come later.
        partial: whether to replay records of which parts had effects, too.
    """

    def __init__(
        self,
        topic: str,
        store: ObjectStore,
        dataflow: Dataflow,
        service: str,
        *,
        up_to: Epoch,
        partial: bool,
    ) -> None:
        directory = service_paths(dataflow, service).topic(DEAD_LETTERS)
        names = (_WHOLE, _PARTIAL) if partial else (_WHOLE,)
        super().__init__(topic, store, dict.fromkeys(names, directory), up_to=up_to)
        self.complete = True

    def letters(self, partition: SegmentSplit) -> list[Letter]:
        """Return the letters of one split."""
        letters = [
            Letter.decode(value)
            for batch in super().read(partition)
            for value in batch.column("value").to_pylist()
        ]
        partial = list(self._writers)[partition.number] == _PARTIAL
        return [item for item in letters if item.topic == self._topic and item.partial == partial]

    def read(self, partition: SegmentSplit) -> Iterator[pa.RecordBatch]:
        """Yield the records of the letters of one split, with their original positions."""
        for letter in self.letters(partition):
            if letter.record is None:
                continue
            record = Found(letter.offset, letter.record, letter.key, letter.time_ms)
            name = {} if letter.file is None else {FILE_METADATA: letter.file.encode()}
            for batch in record_batches([record], letter.partition):
                yield batch.replace_schema_metadata(name)

    def waiting(self, offset: Offset) -> list[Letter]:
        """Return the letters after an offset."""
        letters: list[Letter] = []
        while (end := self.latest_offset(offset)) != offset:
            for split in self.partitions(offset, end):
                letters += self.letters(split)
            offset = end
        return letters


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceReplay:
    """The replay of the letters of one service.

    Attributes:
        sources: by topic.
        letters: those that the replay reads.
        partial: those of which parts had effects, which it leaves.
    """

    service: str
    sources: dict[str, LetterSource]
    letters: tuple[Letter, ...]
    partial: tuple[Letter, ...]


def plan_replay(
    dataflow: Dataflow, store: ObjectStore, *, service: str | None = None, partial: bool = False
) -> list[ServiceReplay]:
    """Return what a replay of dead letters would read, by service, owners before readers.

    Args:
        dataflow: the definition.
        store: the object store of the states.
        service: only this service; None = all.
        partial: whether to replay records of which parts had effects, which are then repeated.

    Raises:
        InputError: there is no such service.
        CheckpointError: the newest epoch of a service cannot be read (E51).
    """
    if service is not None and service not in dataflow.services:
        raise InputError(
            f"the dataflow has no service `{service}`", services=sorted(dataflow.services)
        )
    replays: list[ServiceReplay] = []
    for name in service_order(dataflow):
        head = OwnerJob(store, service_paths(dataflow, name)).newest()
        if head is not None and service in (None, name):
            offsets = stored_offsets(store, head)
            sources: dict[str, LetterSource] = {}
            letters: list[Letter] = []
            left: list[Letter] = []
            for end in dataflow.services[name].sources:
                if end.id is None:
                    continue
                offset = offsets.get(end.id, {})
                every = LetterSource(end.id, store, dataflow, name, up_to=head.epoch, partial=True)
                for letter in every.waiting({**every.initial_offset(), **offset}):
                    (letters if partial or not letter.partial else left).append(letter)
                sources[end.id] = LetterSource(
                    end.id, store, dataflow, name, up_to=head.epoch, partial=partial
                )
            replays.append(
                ServiceReplay(
                    service=name, sources=sources, letters=tuple(letters), partial=tuple(left)
                )
            )
    return replays


def build_replay(
    dataflow: Dataflow,
    store: ObjectStore,
    replays: Sequence[ServiceReplay],
    *,
    bindings: Bindings,
    options: RunOptions,
) -> list[Pipeline]:
    """Build the pipelines that replay letters; arguments and errors as in `build_dataflow`.

    Services without letters do not run.
    """
    return [
        build_service(
            dataflow,
            replay.service,
            store,
            bindings=replace(bindings, sources=dict(replay.sources)),
            options=options,
        )
        for replay in replays
        if replay.letters
    ]
