"""Jobs as an Arroyo would write them, of any tables: small, in memory, in both layouts."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from arroyo_dagster.state import (
    GLOBAL_KEY_VALUE_SCHEMA,
    CheckpointState,
    Epoch,
    JobId,
    JobPaths,
    Layout,
    MemoryStore,
    ObjectStore,
    OperatorCheckpoint,
    OperatorId,
    ParquetBackend,
    PipelineId,
    StatePath,
    TableConfig,
    TableName,
    WorkerGeneration,
    WriteProtected,
    key_hashes,
    range_for_server,
    timestamp_table_config,
    verify_job,
)
from arroyo_dagster.state.tables.time_files import in_range
from tests.formats import (
    CurrentGeneration,
    EpochRecord,
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    GenerationManifest,
    GlobalKeyedConfig,
    GlobalKeyedFiles,
    JobCondition,
    JobFacts,
    LegacyCheckpoint,
    Manifest,
    RowsDigest,
    SourceAnswer,
    TableFiles,
    TimeFile,
    digest_rows,
    encode,
    encode_pairs,
    encode_rows,
    file_schema,
    memory_schema,
    metadata,
)
from tests.internals import AssumedJobs, JobDirectory, Restore, restored_rows
from tests.jobs import copied

SECOND = 1_000_000


def window_config(schema: pa.Schema, keys: Sequence[str], *, retention: int = 10) -> TableConfig:
    """Table `t` of a tumbling window."""
    return timestamp_table_config(
        "t", "tumbling_intermediate", retention_micros=retention * SECOND, schema=schema, keys=keys
    )


def join_config(schema: pa.Schema, keys: Sequence[str], *, retention: int = 10) -> TableConfig:
    """Table `left` of an updating join; of a windowed one with a retention of 0."""
    return timestamp_table_config(
        "left", "left join data", retention_micros=retention * SECOND, schema=schema, keys=keys
    )


def accumulators_config(schema: pa.Schema, keys: Sequence[str]) -> TableConfig:
    """Table `a` of an updating aggregate."""
    return timestamp_table_config(
        "a",
        "accumulator_state",
        retention_micros=3600 * SECOND,
        schema=schema,
        keys=keys,
        generational=True,
    )


def tuples_config(schema: pa.Schema, keys: Sequence[str]) -> TableConfig:
    """Table `b` of an updating aggregate whose groups are `keys`."""
    return timestamp_table_config(
        "b",
        "batch_state",
        retention_micros=3600 * SECOND,
        schema=schema,
        keys=[*keys, "accumulator", "args_row"],
        routing_keys=keys,
        generational=True,
    )


GROUPS = pa.schema(
    [
        pa.field("k", pa.string()),
        pa.field("sum", pa.int64()),
        pa.field("_timestamp", pa.timestamp("ns")),
    ]
)
TUPLES = pa.schema(
    [
        pa.field("k", pa.string()),
        pa.field("accumulator", pa.uint32(), nullable=False),
        pa.field("args_row", pa.binary(), nullable=False),
        pa.field("count", pa.uint64(), nullable=False),
        pa.field("_timestamp", pa.timestamp("ns"), nullable=False),
    ]
)
EVENTS = pa.schema(
    [
        pa.field("k", pa.string()),
        pa.field("n", pa.uint64(), nullable=False),
        pa.field("_timestamp", pa.timestamp("ns"), nullable=False),
    ]
)


def without_keys(schema: pa.Schema) -> pa.Schema:
    """The same table of an aggregate without GROUP BY."""
    return pa.schema([field for field in schema if field.name != "k"])


@dataclass
class ArroyoJob:
    """A stopped job of Arroyo's, written epoch by epoch.

    Attributes:
        parallelism: of every operator.
        watermark_micros: of every operator; None = none.
        run: the number of the run that writes; in the protocol layout its worker generation.
        files: what the newest epoch lists, by operator and table, as the run has it in memory.
        ignored: the newest epoch when the run began, if it ignored the state: its files count
            from 1 again (legacy layout).
    """

    layout: Layout
    parallelism: int = 2
    watermark_micros: int | None = None
    store: MemoryStore = field(default_factory=MemoryStore)
    run: int = 3
    epoch: int = 0
    configs: dict[tuple[str, str], TableConfig] = field(default_factory=dict)
    files: dict[tuple[str, str], list[Any]] = field(default_factory=dict)
    previous: StatePath | None = None
    base: StatePath | None = None
    job: str = "job_x"
    ignored: int = 0

    @property
    def directory(self) -> Epoch:
        """The number that the workers give their files."""
        return Epoch(self.epoch - self.ignored)

    @property
    def paths(self) -> JobPaths:
        pipeline = PipelineId("pl_x") if self.layout is Layout.PROTOCOL else None
        return JobPaths(JobId(self.job), pipeline)

    @property
    def generation(self) -> WorkerGeneration | None:
        return WorkerGeneration(self.run) if self.layout is Layout.PROTOCOL else None

    def write(
        self, tables: Mapping[tuple[str, TableConfig], pa.Table], *, whole: bool = False
    ) -> None:
        """One more epoch: what was listed, and a file a subtask of the rows given.

        Args:
            tables: rows as the operator sees them, `_generation` included, by operator and table.
            whole: one file for all subtasks: as if the job had run with parallelism 1.
        """
        self.epoch += 1
        for (operator, config), rows in tables.items():
            key = (operator, str(config.table))
            self.configs[key] = config
            listed = self.files.setdefault(key, [])
            listed.extend(self._written(operator, config, rows, whole))
        self._publish()

    def _written(
        self, operator: str, config: TableConfig, rows: pa.Table, whole: bool
    ) -> Iterable[TimeFile]:
        stored = as_stored(config, rows)
        hashes = stored.column(stored.num_columns - 2)
        subtasks = 1 if whole else self.parallelism
        for subtask in range(subtasks):
            mine = stored.filter(in_range(hashes, range_for_server(subtask, subtasks)))
            if mine.num_rows or rows.num_rows == 0:
                yield self._file(operator, config, mine, subtask)

    def _file(self, operator: str, config: TableConfig, rows: pa.Table, subtask: int) -> TimeFile:
        assert isinstance(config.config, ExpiringTimeKeyConfig)
        path = StatePath(
            self.paths.operator(OperatorId(operator), self.directory, self.generation)
            / f"table-{config.table}-{subtask:03}"
        )
        self.store.put(path, encode_rows(rows))
        hashes = rows.column(rows.num_columns - 2).to_numpy()
        times = rows.column(config.config.schema.timestamp_index).cast(pa.int64()).drop_null()
        newest = int(max(times.to_pylist(), default=0))
        return TimeFile(
            epoch=self.directory,
            path=path,
            min_routing_key=int(hashes.min()) if len(hashes) else 0,
            max_routing_key=int(hashes.max()) if len(hashes) else 0,
            max_timestamp_micros=newest // 1000,
        )

    def _publish(self) -> None:
        operators = tuple(self._operator(name) for name in ("source_0", *self._names()))
        if self.layout is Layout.LEGACY:
            self._publish_legacy(operators)
        else:
            self._publish_protocol(operators)

    def _names(self) -> list[str]:
        return list(dict.fromkeys(operator for operator, _ in self.configs))

    def _operator(self, name: str) -> OperatorCheckpoint:
        tables: dict[TableName, TableFiles] = {}
        configs: dict[TableName, TableConfig] = {}
        if name == "source_0":
            tables, configs = self._source()
        for (operator, table), config in self.configs.items():
            if operator == name and self.files[operator, table]:
                tables[TableName(table)] = ExpiringTimeKeyFiles(
                    files=tuple(self.files[operator, table])
                )
                configs[TableName(table)] = config
        return OperatorCheckpoint(
            job=self.paths.job,
            operator=OperatorId(name),
            epoch=Epoch(self.epoch),
            parallelism=self.parallelism,
            min_watermark_micros=None if name == "source_0" else self.watermark_micros,
            max_watermark_micros=None if name == "source_0" else self.watermark_micros,
            tables=tables,
            configs=configs,
        )

    def _source(self) -> tuple[dict[TableName, TableFiles], dict[TableName, TableConfig]]:
        name = TableName("s")
        path = StatePath(
            self.paths.operator(OperatorId("source_0"), self.directory, self.generation)
            / "table-s-000"
        )
        data = encode_pairs([b"\0"], [b"\x05"], GLOBAL_KEY_VALUE_SCHEMA, version=0)
        self.store.put(path, data)
        return {name: GlobalKeyedFiles(files=(path,))}, {
            name: TableConfig(config=GlobalKeyedConfig(table=name))
        }

    def _publish_legacy(self, operators: tuple[OperatorCheckpoint, ...]) -> None:
        epoch = Epoch(self.epoch)
        for one in operators:
            path = self.paths.operator_metadata(one.operator, epoch)
            self.store.put(path, metadata.encode_operator(one))
        head = LegacyCheckpoint(
            job=self.paths.job,
            epoch=epoch,
            min_epoch=Epoch(0),
            start_time_micros=time.time_ns() // 1000,
            finish_time_micros=time.time_ns() // 1000,
            operators=tuple(one.operator for one in operators),
        )
        self.store.put(self.paths.legacy_metadata(epoch), metadata.encode_legacy_checkpoint(head))

    def _publish_protocol(self, operators: tuple[OperatorCheckpoint, ...]) -> None:
        pipeline, epoch, run = PipelineId("pl_x"), Epoch(self.epoch), WorkerGeneration(self.run)
        ref = self.paths.manifest(run, epoch)
        manifest = Manifest(
            pipeline=pipeline,
            job=self.paths.job,
            worker_generation=run,
            epoch=epoch,
            min_epoch=Epoch(0),
            start_time_micros=1,
            finish_time_micros=time.time_ns() // 1000,
            needs_commit=False,
            operators=operators,
            parent_ref=self.previous,
        )
        self.store.put(ref, metadata.encode_manifest(manifest))
        self._publish_generation(base=self.base, latest=ref)
        claim = EpochRecord(
            pipeline=pipeline,
            job=self.paths.job,
            epoch=epoch,
            worker_generation=run,
            parent_ref=self.previous,
            checkpoint_ref=ref,
            created_at_micros=1,
        )
        self.store.put(self.paths.epoch_record(epoch), encode(claim))
        self.previous = ref

    def _publish_generation(self, base: StatePath | None, latest: StatePath | None) -> None:
        shared: dict[str, Any] = {
            "pipeline": PipelineId("pl_x"),
            "job": self.paths.job,
            "worker_generation": WorkerGeneration(self.run),
            "updated_at_micros": 1,
        }
        path = self.paths.generation_manifest(WorkerGeneration(self.run))
        fence = CurrentGeneration(**shared, generation_manifest_ref=path)
        generation = GenerationManifest(**shared, base_ref=base, latest_ref=latest)
        put = self.store.put
        put(self.paths.current_generation, encode(fence))
        put(path, encode(generation))

    def start_empty(self) -> None:
        """Start the next run with `ignore_state`, in the legacy layout."""
        assert self.layout is Layout.LEGACY
        self.run, self.ignored, self.files = self.run + 1, self.epoch, {}

    def start(self) -> None:
        """Start the next run: it goes on from what the store says, and from nothing else."""
        self.ignored = 0
        backend = ParquetBackend(self.store, self.paths)
        if self.layout is Layout.PROTOCOL:
            found = backend.next_restore()
            assert isinstance(found, Restore)
            operators, self.base, self.epoch = (
                found.manifest.operators,
                found.ref,
                int(found.manifest.epoch),
            )
            self.run += 1
            self._publish_generation(base=found.ref, latest=None)
            self.previous = found.ref
        else:
            newest = backend.load()
            operators, self.epoch = newest.operators, int(newest.epoch)
            self.run += 1
            self.store.put(newest.ref, self.store.read(newest.ref))  # as a restore does
        self.files = {
            (one.operator, name): list(files.files)
            for one in operators
            for name, files in one.tables.items()
            if isinstance(files, ExpiringTimeKeyFiles)
        }


JobT = TypeVar("JobT", bound=ArroyoJob)


def twin(job: JobT) -> JobT:
    """The same job in a store of its own: a job that many tests begin with is written once."""
    found = copy.copy(job)
    found.store = copied(job.store, keep_times=True)
    for name, value in vars(job).items():
        if isinstance(value, dict):
            own = {key: list(one) if isinstance(one, list) else one for key, one in value.items()}
            setattr(found, name, own)
    return found


def as_stored(config: TableConfig, rows: pa.Table) -> pa.Table:
    """Rows of the operator's as a data file has them."""
    assert isinstance(config.config, ExpiringTimeKeyConfig)
    schema = memory_schema(config.config)
    rows = pa.Table.from_arrays(rows.columns, schema=schema)
    indices = config.config.schema.hashed_indices
    if indices:
        hashed = key_hashes([rows.column(at) for at in indices], rows=rows.num_rows)
    else:
        hashed = pa.array(np.zeros(rows.num_rows, np.uint64))
    operations = pa.array([b"\0"] * rows.num_rows, pa.binary())
    return pa.Table.from_arrays(
        [*rows.columns, hashed, operations], schema=file_schema(config.config)
    )


def table_rows(schema: pa.Schema, columns: Sequence[Sequence[Any]]) -> pa.Table:
    """Rows of a schema from Python values; one column more is `_generation`."""
    fields = list(schema)
    if len(columns) > len(fields):
        fields.append(pa.field("_generation", pa.uint64(), nullable=False))
    arrays = [pa.array(v, f.type) for v, f in zip(columns, fields, strict=True)]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


# ---- what is said of it --------------------------------------------------------------------------


def stopped(paths: JobPaths) -> JobDirectory:
    """The user's word."""
    return JobDirectory([AssumedJobs({str(paths.root): "stopped"})])


@dataclass
class Telling:
    """A source whose answers a test chooses; `at` look-up number k it changes its mind.

    Attributes:
        later: what it says from look-up `at` on.
    """

    now: JobFacts
    later: JobFacts | None = None
    at: int = 0
    asked: int = 0
    source: str = "the test"

    def look_up(self, jobs: Sequence[JobPaths], *, checkpoints: bool = False) -> list[SourceAnswer]:
        self.asked += 1
        facts = self.later if self.later is not None and self.asked >= self.at else self.now
        return [SourceAnswer(source=self.source, facts=facts) for _ in jobs]


def facts_of(paths: JobPaths, condition: JobCondition, **facts: Any) -> JobFacts:
    return JobFacts(job=paths.job, source="the test", condition=condition, **facts)


# ---- what it holds -------------------------------------------------------------------------------


def content(
    store: ObjectStore, paths: JobPaths, epoch: int | None = None
) -> dict[tuple[str, str], RowsDigest]:
    """What a restore holds of every expiring table, read the way `rows` reads it."""
    checkpoint = ParquetBackend(store, paths).load(None if epoch is None else Epoch(epoch))
    return {
        (operator.operator, name): digest_rows(
            restored_rows(store, operator, name, managed=False).rows
        )
        for operator in checkpoint.operators
        for name, files in operator.tables.items()
        if isinstance(files, ExpiringTimeKeyFiles)
    }


WINDOW = window_config(EVENTS, ["k"], retention=60)
UNKEYED_ACCUMULATORS = accumulators_config(without_keys(GROUPS), [])
UNKEYED_TUPLES = tuples_config(without_keys(TUPLES), [])


def begun(layout: Layout, epochs: int = 4, name: str = "job_x") -> ArroyoJob:
    """Two operators: a window, and an aggregate without GROUP BY of which Arroyo loses rows."""
    return twin(_begun(layout, epochs, name))


@functools.cache
def _begun(layout: Layout, epochs: int, name: str) -> ArroyoJob:
    job = ArroyoJob(layout, watermark_micros=30 * SECOND, job=name)
    for at in range(epochs):
        times = [(20 + 10 * at + n) * SECOND * 1000 for n in range(6)]
        window = table_rows(EVENTS, [[f"k{n % 4}" for n in range(6)], [at] * 6, times])
        totals = table_rows(
            without_keys(GROUPS), [[at + 1, at + 2], times[:2], [at * 10 + 1, at * 10 + 2]]
        )
        tuples = table_rows(
            without_keys(TUPLES),
            [[1] * 3, [b"x", b"y", b"z"], [at + 1, at + 2, 2], times[:1] * 3, [at + 1, at + 2, 1]],
        )
        job.write(
            {
                ("tumbling_1", WINDOW): window,
                ("agg_2", UNKEYED_ACCUMULATORS): totals,
                ("agg_2", UNKEYED_TUPLES): tuples,
            }
        )
    return job


def expect_whole(store: ObjectStore, job: ArroyoJob, expected: Any, note: str) -> None:
    """The job is restorable, by the letter, and holds what it held."""
    assert content(store, job.paths) == expected, note
    verdict = verify_job(WriteProtected(store), job.paths, level=2).verdict
    assert verdict.errors == (), note
    assert ParquetBackend(store, job.paths).load().state is CheckpointState.READY
