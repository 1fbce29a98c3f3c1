"""Jobs of ours made of given rows, without running anything: as many files as wanted, at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from arroyo_dagster.state import (
    GLOBAL_KEY_VALUE_SCHEMA,
    Epoch,
    ExpiringTimeKeyTable,
    GlobalKeyedTable,
    JobId,
    JobPaths,
    KeyRange,
    ObjectStore,
    OperatorCheckpoint,
    OperatorId,
    ParquetBackend,
    PipelineId,
    StatePath,
    TableConfig,
    key_hashes,
    range_for_server,
)
from arroyo_dagster.state.model.compaction import RowsMerge
from arroyo_dagster.state.model.layout import REMOVED
from arroyo_dagster.state.tables.merge.range_files import routes
from arroyo_dagster.state.tables.merge.rows import merge_rows
from arroyo_dagster.state.tables.time_files import write_time_file
from tests.formats import (
    INSERT,
    ExpiringTimeKeyConfig,
    Manifest,
    MergedRows,
    RunProgress,
    TableFiles,
    TimeFile,
    encode_pairs,
)

PATHS = JobPaths(JobId("made"), PipelineId("tests"))
OPERATOR = OperatorId("operator")


def stored_rows(
    config: TableConfig, rows: pa.Table, operations: pa.Array | None = None
) -> pa.Table:
    """Rows as a file has them: hashed, each with its operation; an insert where none is given."""
    assert isinstance(config.config, ExpiringTimeKeyConfig)
    hashed = key_hashes(
        [rows.column(at) for at in config.config.schema.hashed_indices], rows=rows.num_rows
    )
    if operations is None:
        operations = pa.repeat(pa.scalar(INSERT, pa.binary()), rows.num_rows)
    schema = ExpiringTimeKeyTable(config, None).file_schema  # type: ignore[arg-type]
    columns = [pa.chunked_array(column) for column in ([hashed], [operations])]
    return pa.Table.from_arrays([*rows.columns, *columns], schema=schema)


def time_files(
    store: ObjectStore,
    config: TableConfig,
    batches: Iterable[pa.Table],
    parallelism: int,
    *,
    paths: JobPaths = PATHS,
    write: Callable[..., tuple[TimeFile, int]] = write_time_file,
) -> tuple[TimeFile, ...]:
    """Write each batch of stored rows as the files of one epoch, one for each subtask with rows."""
    assert isinstance(config.config, ExpiringTimeKeyConfig)
    ranges = [range_for_server(at, parallelism) for at in range(parallelism)]
    found = []
    for number, batch in enumerate(batches, 1):
        for at, rows in routes(batch, ranges):
            path = StatePath(f"{paths.root}/data/e{number}/table-{config.table}-{at:03}-x")
            file, _ = write(
                store,
                rows,
                path,
                epoch=Epoch(number),
                timestamp_index=config.config.schema.timestamp_index,
            )
            found.append(file)
    return tuple(found)


def publish(
    store: ObjectStore,
    tables: Mapping[TableConfig, TableFiles] | Sequence[tuple[TableConfig, TableFiles]],
    *,
    parallelism: int = 2,
    watermark_micros: int | None = None,
    paths: JobPaths = PATHS,
    epoch: int = 1,
    final: bool = True,
) -> JobPaths:
    """Make them the first epoch of a job at rest."""
    listed = list(tables.items()) if isinstance(tables, Mapping) else list(tables)
    backend = ParquetBackend(store, paths, clock=lambda: 1)
    backend.start()
    assert backend.generation is not None
    assert paths.pipeline is not None
    operator = OperatorCheckpoint(
        job=paths.job,
        operator=OPERATOR,
        epoch=Epoch(epoch),
        parallelism=parallelism,
        min_watermark_micros=watermark_micros,
        max_watermark_micros=watermark_micros,
        tables={config.table: files for config, files in listed},
        configs={config.table: config for config, _ in listed},
    )
    backend.publish(
        Manifest(
            pipeline=paths.pipeline,
            job=paths.job,
            worker_generation=backend.generation,
            epoch=Epoch(epoch),
            min_epoch=Epoch(epoch),
            start_time_micros=1,
            finish_time_micros=1,
            needs_commit=False,
            operators=(operator,),
            parent_ref=None,
            progress=RunProgress(offsets="{}", final=final),
        )
    )
    return paths


def pair_files(
    store: ObjectStore,
    config: TableConfig,
    epochs: Iterable[tuple[Mapping[bytes, bytes | None], int]],
) -> tuple[StatePath, ...]:
    """Write the changes of each epoch, of a state version each: removals (None), then inserts."""
    found = []
    for number, (writes, version) in enumerate(epochs, 1):
        removed = [key for key, value in writes.items() if value is None]
        pairs = {key: value for key, value in writes.items() if value is not None}
        path = f"{PATHS.root}/data/e{number}/table-{config.table}-000-x"
        if removed:
            found.append(StatePath(path + REMOVED))
            data = GlobalKeyedTable(config, store).encode_removals(removed)
            store.put(found[-1], data)
        if pairs:
            found.append(StatePath(path))
            data = encode_pairs(pairs, pairs.values(), GLOBAL_KEY_VALUE_SCHEMA, version=version)
            store.put(found[-1], data)
    return tuple(found)


@dataclass(frozen=True)
class Merged:
    """Files of an expiring table merged into new ones; none if no row is left."""

    outputs: tuple[TimeFile, ...]
    rows_in: int
    rows_out: int
    dropped: Mapping[str, int]


def compact_rows(
    table: ExpiringTimeKeyTable,
    files: Sequence[TimeFile],
    name_file: Callable[[str], StatePath],
    keys: KeyRange,
    *,
    cutoff_micros: int,
    from_oldest: bool,
) -> Merged:
    """Merge files of one key range, as one merge of a plan does."""
    merge = RowsMerge(
        operator=OPERATOR,
        table=table.config.table,
        inputs=tuple(files),
        ranges=(keys,),
        cutoff_micros=cutoff_micros,
        size_bytes=0,
        from_oldest=from_oldest,
    )
    done = merge_rows(table, table._store, merge, lambda _, suffix: name_file(suffix))
    assert done.same
    assert isinstance(done.merged, MergedRows)
    return Merged(
        outputs=done.merged.outputs,
        rows_in=done.rows_in,
        rows_out=done.rows_out,
        dropped=done.dropped,
    )
