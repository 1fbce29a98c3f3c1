"""Many small jobs without a run: checkpoints of both layouts, put as objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from arroyo_dagster.state import (
    GLOBAL_KEY_VALUE_SCHEMA,
    Epoch,
    JobId,
    JobPaths,
    Layout,
    ObjectStore,
    OperatorCheckpoint,
    OperatorId,
    PipelineId,
    StatePath,
    TableName,
    WorkerGeneration,
    global_table_config,
)
from arroyo_dagster.state.model.checkpoints import CommittedMarker
from tests.formats import (
    CurrentGeneration,
    EpochRecord,
    GenerationManifest,
    GlobalKeyedFiles,
    LegacyCheckpoint,
    Manifest,
    encode,
    encode_pairs,
    metadata,
)

OPERATOR = OperatorId("count")
TABLE = TableName("counts")
SECOND = 1_000_000
START = 1_700_000_000 * SECOND


def protocol_job(pipeline: str, job: str = "main") -> JobPaths:
    return JobPaths(JobId(job), PipelineId(pipeline))


def legacy_job(job: str) -> JobPaths:
    return JobPaths(JobId(job))


class Written:
    """One job: each call writes what its run would, in the same order.

    Args:
        files: whether the data files themselves are written.
        keep: how many of its newest files an epoch lists.
        start: an epoch is finished so many microseconds after 1970, and a second for each epoch
            before it.
        now: when an epoch is finished, in microseconds since 1970, in place of that.
        ends: operators without tables beside it, such as `source_orders_0`; in the protocol layout.
        row: key and value of each file; by default no values of their types.
    """

    def __init__(
        self,
        store: ObjectStore,
        paths: JobPaths,
        *,
        generation: int = 1,
        files: bool = True,
        keep: int = 3,
        start: int = START,
        now: Callable[[], int] | None = None,
        ends: Iterable[str] = (),
        row: tuple[bytes, bytes] = (b"k", b"v"),
    ) -> None:
        self.store = store
        self.paths = paths
        self.generation = WorkerGeneration(generation)
        self.epoch = Epoch(0)
        self._files = files
        self._keep = keep
        self._start = start
        self._now = now
        self._row = row
        self._ends = [OperatorId(one) for one in ends]
        self._listed: list[StatePath] = []
        self._ref: StatePath | None = None
        if paths.layout is Layout.PROTOCOL:
            self.start(generation)

    def start(self, generation: int) -> None:
        """Start a worker generation."""
        self.generation = WorkerGeneration(generation)
        self.put_generation(latest=None)
        fence = CurrentGeneration(
            pipeline=self._pipeline,
            job=self.paths.job,
            worker_generation=self.generation,
            generation_manifest_ref=self.paths.generation_manifest(self.generation),
            updated_at_micros=START,
        )
        self.store.put(self.paths.current_generation, encode(fence))

    @property
    def _pipeline(self) -> PipelineId:
        assert self.paths.pipeline is not None
        return self.paths.pipeline

    def put_generation(self, latest: StatePath | None) -> None:
        """Write what the generation started from, and the hint to its newest."""
        manifest = GenerationManifest(
            pipeline=self._pipeline,
            job=self.paths.job,
            worker_generation=self.generation,
            base_ref=self._ref,
            latest_ref=latest,
            updated_at_micros=START,
        )
        path = self.paths.generation_manifest(self.generation)
        self.store.put(path, encode(manifest))

    def epochs(self, count: int) -> None:
        """Write so many epochs."""
        for _ in range(count):
            self.write()

    def skip(self, count: int) -> None:
        """Be at so many epochs more, of which only what a listing shows is there."""
        for _ in range(count):
            self.epoch = Epoch(self.epoch + 1)
            legacy = self.paths.layout is Layout.LEGACY
            root = self.paths.legacy_metadata if legacy else self.paths.epoch_record
            self.store.put(root(self.epoch), b"never read")

    def write(self, *, committing: bool = False, record: bool = True) -> Epoch:
        """Write the next epoch.

        Args:
            committing: leave its commit undone; `commit` finishes it.
            record: False stops between the hint and the epoch record.
        """
        self.epoch = Epoch(self.epoch + 1)
        generation = None if self.paths.layout is Layout.LEGACY else self.generation
        path = self.paths.data_file(OPERATOR, TABLE, 0, self.epoch, generation, attempt="x")
        if self._files:
            data = encode_pairs([self._row[0]], [self._row[1]], GLOBAL_KEY_VALUE_SCHEMA, version=0)
            self.store.put(path, data)
        self._listed = [*self._listed, path][-self._keep :]
        if self.paths.layout is Layout.LEGACY:
            self._write_legacy()
        else:
            self._write_protocol(committing, record)
        return self.epoch

    def _operator(self, committing: bool = False) -> OperatorCheckpoint:
        config = global_table_config(TABLE, key=str, value=str, two_phase_commit=committing)
        at = self._now() if self._now else self._start + self.epoch * SECOND
        return OperatorCheckpoint(
            job=self.paths.job,
            operator=OPERATOR,
            epoch=self.epoch,
            parallelism=1,
            min_watermark_micros=at,
            max_watermark_micros=at,
            start_time_micros=at,
            finish_time_micros=at + 500,
            tables={TABLE: GlobalKeyedFiles(files=tuple(self._listed))},
            configs={TABLE: config},
        )

    def _write_legacy(self) -> None:
        operator = self._operator()
        path = self.paths.operator_metadata(OPERATOR, self.epoch)
        self.store.put(path, metadata.encode_operator(operator))
        head = LegacyCheckpoint(
            job=self.paths.job,
            epoch=self.epoch,
            min_epoch=Epoch(1),
            start_time_micros=operator.start_time_micros,
            finish_time_micros=operator.finish_time_micros,
            operators=(OPERATOR,),
        )
        root = self.paths.legacy_metadata(self.epoch)
        self.store.put(root, metadata.encode_legacy_checkpoint(head))

    def _write_protocol(self, committing: bool, record: bool) -> None:
        operator = self._operator(committing)
        manifest = Manifest(
            pipeline=self._pipeline,
            job=self.paths.job,
            worker_generation=self.generation,
            epoch=self.epoch,
            min_epoch=Epoch(1),
            start_time_micros=operator.start_time_micros,
            finish_time_micros=operator.finish_time_micros,
            needs_commit=committing,
            operators=(
                operator,
                *(replace(operator, operator=one, tables={}, configs={}) for one in self._ends),
            ),
            parent_ref=self._ref,
        )
        ref = self.paths.manifest(self.generation, self.epoch)
        self.store.put(ref, metadata.encode_manifest(manifest))
        self.put_generation(latest=ref)
        if record:
            self.claim(ref)

    def claim(self, ref: StatePath | None = None) -> None:
        """Write the record of the newest epoch."""
        ref = ref or self.paths.manifest(self.generation, self.epoch)
        found = EpochRecord(
            pipeline=self._pipeline,
            job=self.paths.job,
            epoch=self.epoch,
            worker_generation=self.generation,
            parent_ref=self._ref,
            checkpoint_ref=ref,
            created_at_micros=START,
        )
        self.store.put(self.paths.epoch_record(self.epoch), encode(found))
        self._ref = ref

    def commit(self) -> None:
        """Finish the commit of the newest epoch."""
        assert self._ref is not None
        marker = CommittedMarker(
            pipeline=self._pipeline,
            job=self.paths.job,
            epoch=self.epoch,
            checkpoint_worker_generation=self.generation,
            writer_worker_generation=self.generation,
            checkpoint_ref=self._ref,
        )
        path = self.paths.committed(self.generation, self.epoch)
        self.store.put(path, encode(marker))

    def expire(self, epochs: Iterable[int]) -> None:
        """Remove what makes these epochs exist."""
        legacy = self.paths.layout is Layout.LEGACY
        roots = self.paths.legacy_metadata if legacy else self.paths.epoch_record
        self.store.delete_many([roots(Epoch(epoch)) for epoch in epochs])

    def damage(self, epoch: int) -> None:
        """Make an epoch unreadable."""
        legacy = self.paths.layout is Layout.LEGACY
        number = Epoch(epoch)
        root = (
            self.paths.legacy_metadata(number)
            if legacy
            else self.paths.manifest(self.generation, number)
        )
        self.store.put(root, b"\xff\xff\xff")

    def vanish(self) -> None:
        """Remove the job."""
        self.store.delete_many([info.path for info in self.store.list(self.paths.root)])
