"""What a restore of an epoch would cost, also at another parallelism or retention.

Subtasks restore at the same time, so the slowest decides. Seconds and memory are estimates; files,
bytes and rows are exact. Of data files only the footers are read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.ids import StatePath, TableName
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    TableConfig,
    TimeFile,
)
from arroyo_dagster.state.operations.catalog.stored_files import stored_sizes
from arroyo_dagster.state.operations.query.state import StateEpoch
from arroyo_dagster.state.planning.compaction.plan import forecast
from arroyo_dagster.state.planning.restore.rates import DEFAULT_RATES, RestoreRates
from arroyo_dagster.state.planning.restore.reads import TableRead, restore_plan
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.data_files import open_data_file


@dataclass(frozen=True, slots=True, kw_only=True)
class TableEstimate:
    """What a restore reads of one table.

    Attributes:
        files, size_bytes, rows: of the files that any subtask opens, each counted once.
        opens: how often files are opened, by all subtasks together.
        most_rows: the most rows that one subtask reads, about.
    """

    operator: str
    table: str
    files: int
    size_bytes: int
    rows: int
    opens: int
    most_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreEstimate:
    """What a restore costs.

    Attributes:
        parallelism: of the restored job; None = each operator's own.
        retention_micros: in place of the tables' own; None = their own.
        seconds: how long the slowest subtask takes, by the rates.
        memory_bytes: the decoded size of what one worker with one subtask of each operator reads,
            of the largest, about.
        subtask_bytes: what each subtask reads, over all operators.
    """

    parallelism: int | None
    retention_micros: int | None
    tables: tuple[TableEstimate, ...]
    seconds: float
    memory_bytes: int
    subtask_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _File:
    rows: int
    decoded_bytes: int


def estimate_restore(
    epoch: StateEpoch,
    *,
    parallelism: int | None = None,
    retention_micros: int | None = None,
    rates: RestoreRates = DEFAULT_RATES,
) -> RestoreEstimate:
    """Estimate what a restore of an epoch costs.

    Args:
        parallelism: of the restored job; None = each operator's own.
        retention_micros: of all expiring tables; None = their own.

    Raises:
        InputError: a parallelism below 1, or a negative retention.
        FormatError, NotFoundError: a file is broken or missing.
    """
    if (parallelism is not None and parallelism < 1) or (retention_micros or 0) < 0:
        raise InputError(
            "a parallelism is 1 or more, and a retention is not negative",
            parallelism=parallelism,
            retention_micros=retention_micros,
        )
    store = epoch.job.catalog.store
    checkpoint = _with_retention(epoch.checkpoint, retention_micros)
    sizes = stored_sizes(store, checkpoint.paths)
    plan = restore_plan(checkpoint, parallelism, sizes=sizes)
    files = _footers(store, plan.files)
    bounds = _bounds(checkpoint)
    of_subtask: dict[int, list[TableRead]] = defaultdict(list)
    of_table: dict[tuple[str, str], list[TableRead]] = defaultdict(list)
    for read in plan.reads:
        of_subtask[read.subtask].append(read)
        of_table[read.operator, read.table].append(read)
    reads = forecast(checkpoint, sizes, parallelism)
    managed = checkpoint.progress is not None
    decoded = [sum(_kept(one, files, bounds)[1] for one in ones) for ones in of_subtask.values()]
    return RestoreEstimate(
        parallelism=parallelism,
        retention_micros=retention_micros,
        tables=tuple(_table(ones, files, sizes, bounds) for ones in of_table.values()),
        seconds=rates.of_job(managed=managed).restore_seconds(reads),
        memory_bytes=round(max(decoded, default=0)),
        subtask_bytes=reads.read_bytes,
    )


def _with_retention(checkpoint: Checkpoint, retention_micros: int | None) -> Checkpoint:
    if retention_micros is None:
        return checkpoint

    def changed(config: TableConfig) -> TableConfig:
        if not isinstance(config.config, ExpiringTimeKeyConfig):
            return config
        return replace(config, config=replace(config.config, retention_micros=retention_micros))

    def operator(one: OperatorCheckpoint) -> OperatorCheckpoint:
        configs: dict[TableName, TableConfig] = {
            name: changed(config) for name, config in one.configs.items()
        }
        return replace(one, configs=configs)

    return replace(checkpoint, operators=tuple(map(operator, checkpoint.operators)))


def _footers(store: ObjectStore, paths: tuple[StatePath, ...]) -> dict[StatePath, _File]:
    def read(path: StatePath) -> _File:
        with closing(open_data_file(store, path)) as data:
            return _File(sum(data.footer.rows), sum(data.footer.encoded_bytes))

    return dict(zip(paths, concurrently(read, paths), strict=True))


def _bounds(checkpoint: Checkpoint) -> dict[StatePath, TimeFile]:
    return {
        file.path: file
        for operator in checkpoint.operators
        for files in operator.tables.values()
        if isinstance(files, ExpiringTimeKeyFiles)
        for file in files.files
    }


def _table(
    reads: list[TableRead],
    files: Mapping[StatePath, _File],
    sizes: Mapping[StatePath, int],
    bounds: Mapping[StatePath, TimeFile],
) -> TableEstimate:
    paths = dict.fromkeys(path for read in reads for path in read.files)
    return TableEstimate(
        operator=reads[0].operator,
        table=reads[0].table,
        files=len(paths),
        size_bytes=sum(sizes.get(path, 0) for path in paths),
        rows=sum(files[path].rows for path in paths),
        opens=sum(len(read.files) for read in reads),
        most_rows=round(max(_kept(read, files, bounds)[0] for read in reads)),
    )


def _kept(
    read: TableRead, files: Mapping[StatePath, _File], bounds: Mapping[StatePath, TimeFile]
) -> tuple[float, float]:
    """Return about how many rows and decoded bytes a subtask keeps: keys are hashes, so they are
    spread evenly over the range of a file.
    """
    rows = decoded = 0.0
    for path in read.files:
        share = _share(read, bounds.get(path))
        rows += share * files[path].rows
        decoded += share * files[path].decoded_bytes
    return rows, decoded


def _share(read: TableRead, file: TimeFile | None) -> float:
    if file is None or read.keys.covers(file.min_routing_key, file.max_routing_key):
        return 1.0
    low = max(read.keys.start, file.min_routing_key)
    high = min(read.keys.end, file.max_routing_key)
    return (high - low + 1) / (file.max_routing_key - file.min_routing_key + 1)
