"""A job of ours with as many epochs as one likes, made up as it is read: nothing is stored."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from arroyo_dagster.errors import NotFoundError
from arroyo_dagster.state import (
    Epoch,
    JobId,
    JobPaths,
    OperatorCheckpoint,
    OperatorId,
    PipelineId,
    StatePath,
    TableConfig,
    TableName,
    WorkerGeneration,
)
from arroyo_dagster.state.model.tables import StoredSchema
from tests.formats import (
    MAX_ROUTING_KEY,
    CurrentGeneration,
    EpochRecord,
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    GenerationManifest,
    GlobalKeyedConfig,
    GlobalKeyedFiles,
    Manifest,
    RunProgress,
    TimeFile,
    encode,
    metadata,
)
from tests.formats import state_pb2 as pb
from tests.stores import Listing, ObjectInfo

PATHS = JobPaths(JobId("big"), PipelineId("pl"))
GENERATION = WorkerGeneration(1)
CARRIED = 3
"""An expiring table lists its files of so many epochs."""

_IN_TEMPLATE = re.compile(rb"checkpoint-900000([0-2])/")
_EPOCH = re.compile(r"epoch-(\d+)\.record|checkpoint-(\d+)/checkpoint-manifest\.pb")


class MadeUpJob:
    """A store that answers reads of a job's metadata; counts every call by verb and path.

    Args:
        operators: half of their tables are global ones, a file an epoch; the others carry files on.
        orphan_every: a listing shows an orphan for so many files.
    """

    url = "memory://made-up"

    def __init__(
        self, epochs: int, *, operators: int = 50, tables: int = 4, orphan_every: int = 10
    ) -> None:
        self._orphan_every = orphan_every
        self._names = sorted(
            f"operator-operator_{number}/table-t{table}-000-0123456789abcdef"
            for number in range(operators)
            for table in range(tables)
        )
        self.epochs = epochs
        self.calls: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self._template = self._operators(operators, tables)
        self._head = encode(
            GenerationManifest(
                pipeline=PipelineId("pl"),
                job=JobId("big"),
                worker_generation=GENERATION,
                base_ref=None,
                latest_ref=PATHS.manifest(GENERATION, Epoch(epochs)),
                updated_at_micros=1,
            )
        )
        self._fence = encode(
            CurrentGeneration(
                pipeline=PipelineId("pl"),
                job=JobId("big"),
                worker_generation=GENERATION,
                generation_manifest_ref=PATHS.generation_manifest(GENERATION),
                updated_at_micros=1,
            )
        )

    def _operators(self, operators: int, tables: int) -> bytes:
        """The operators of an epoch whose directory is 9000000 and those of the two before it."""
        manifest = Manifest(
            pipeline=PipelineId("pl"),
            job=JobId("big"),
            worker_generation=GENERATION,
            epoch=Epoch(1),
            min_epoch=Epoch(1),
            start_time_micros=1,
            finish_time_micros=1,
            needs_commit=False,
            operators=tuple(self._operator(number, tables) for number in range(operators)),
        )
        encoded = pb.CheckpointManifest.FromString(metadata.encode_manifest(manifest))
        return pb.CheckpointManifest(operators=encoded.operators).SerializeToString()

    def _operator(self, number: int, tables: int) -> OperatorCheckpoint:
        name = OperatorId(f"operator_{number}")
        files: dict[TableName, Any] = {}
        configs: dict[TableName, TableConfig] = {}
        for at in range(tables):
            table = TableName(f"t{at}")
            paths = [
                PATHS.data_file(
                    name, table, 0, Epoch(9_000_000 + ago), GENERATION, attempt="0123456789abcdef"
                )
                for ago in range(CARRIED)
            ]
            config: Any = GlobalKeyedConfig(table=table)
            if at % 2:
                config = ExpiringTimeKeyConfig(
                    table=table,
                    retention_micros=1,
                    schema=StoredSchema(arrow_schema="{}", timestamp_index=0),
                )
                timed = (
                    TimeFile(
                        epoch=Epoch(1),
                        path=path,
                        min_routing_key=0,
                        max_routing_key=MAX_ROUTING_KEY,
                        max_timestamp_micros=1,
                    )
                    for path in paths
                )
                files[table] = ExpiringTimeKeyFiles(files=tuple(timed))
            else:
                files[table] = GlobalKeyedFiles(files=tuple(paths[:1]))
            configs[table] = TableConfig(config=config)
        return OperatorCheckpoint(
            job=JobId("big"),
            operator=name,
            epoch=Epoch(1),
            parallelism=1,
            tables=files,
            configs=configs,
        )

    def manifest(self, epoch: int) -> bytes:
        """The bytes of one epoch's manifest."""
        parent = PATHS.manifest(GENERATION, Epoch(epoch - 1)) if epoch > 1 else None
        head = Manifest(
            pipeline=PipelineId("pl"),
            job=JobId("big"),
            worker_generation=GENERATION,
            epoch=Epoch(epoch),
            min_epoch=Epoch(1),
            start_time_micros=epoch * 1_000_000,
            finish_time_micros=epoch * 1_000_000 + 1,
            needs_commit=False,
            operators=(),
            parent_ref=parent,
            progress=RunProgress(offsets="{}"),
        )

        def directory(found: re.Match[bytes]) -> bytes:
            return b"checkpoint-%07d/" % max(1, epoch - int(found[1]))

        return metadata.encode_manifest(head) + _IN_TEMPLATE.sub(directory, self._template)

    def record(self, epoch: int) -> bytes:
        """The bytes of one epoch's record."""
        parent = PATHS.manifest(GENERATION, Epoch(epoch - 1)) if epoch > 1 else None
        return encode(
            EpochRecord(
                pipeline=PipelineId("pl"),
                job=JobId("big"),
                epoch=Epoch(epoch),
                worker_generation=GENERATION,
                parent_ref=parent,
                checkpoint_ref=PATHS.manifest(GENERATION, Epoch(epoch)),
                created_at_micros=1,
            )
        )

    # ---- the verbs that a plan of metadata alone may use -----------------------------------------

    def read(self, path: StatePath) -> bytes:
        self.calls["read"] += 1
        self.reads[path] += 1
        if path == PATHS.current_generation:
            return self._fence
        if path == PATHS.generation_manifest(GENERATION):
            return self._head
        found = _EPOCH.search(path)
        epoch = int(found[1] or found[2]) if found else 0
        if not 1 <= epoch <= self.epochs:
            raise NotFoundError("there is no such object", path=path)
        return self.record(epoch) if path.endswith(".record") else self.manifest(epoch)

    # ---- and those that a listing needs ----------------------------------------------------------

    def head(self, path: StatePath) -> ObjectInfo | None:
        self.calls["head"] += 1
        return _info(path)

    def list_dir(self, prefix: str = "") -> Listing:
        self.calls["list_dir"] += 1
        numbers = range(1, self.epochs + 1) if prefix == PATHS.epochs else ()
        records = (_info(PATHS.epoch_record(Epoch(number))) for number in numbers)
        return Listing(objects=tuple(records), prefixes=())

    def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Every object in order; in each operator's directory some that nothing lists."""
        self.calls["list"] += 1
        yield _info(PATHS.current_generation)
        for epoch in range(1, self.epochs + 1):
            yield _info(PATHS.epoch_record(Epoch(epoch)))
        for epoch in range(1, self.epochs + 1):
            ref = PATHS.manifest(GENERATION, Epoch(epoch))
            yield _info(ref)
            directory = ref.rpartition("/")[0]
            for at, name in enumerate(self._names):
                yield _info(f"{directory}/{name}")
                if at % self._orphan_every == 0:
                    yield _info(f"{directory}/{name[:-1]}g")
        yield _info(PATHS.generation_manifest(GENERATION))


def _info(path: str) -> ObjectInfo:
    """What describes an epoch is as old as the epoch says, data files are older."""
    found = _EPOCH.search(path)
    finished = int(found[1] or found[2]) * 1_000_000 + 1 if found else 10**13
    return ObjectInfo(
        path=str.__new__(StatePath, path),
        size_bytes=1000,
        modified_micros=1 if "/table-" in path else finished,
        etag="0123456789",
    )
