"""Check an epoch's data files for `verify`: alone, against neighbouring epochs, and restored."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from arroyo_dagster.errors import FormatError
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.ids import OperatorId, StatePath, TableName
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.progress import OnProgress, ProgressUnit, no_progress
from arroyo_dagster.state.model.tables import GlobalKeyedFiles, TableConfig, TableFiles
from arroyo_dagster.state.model.verify import MAX_LEVEL
from arroyo_dagster.state.operations.catalog.stored_files import stored_sizes
from arroyo_dagster.state.operations.engines import HERE, ItemRunner, Threads
from arroyo_dagster.state.operations.progress import counter
from arroyo_dagster.state.operations.verify.edits import read_edits, read_rebuilds
from arroyo_dagster.state.operations.verify.keys import find_variant
from arroyo_dagster.state.operations.verify.metadata import JobMetadata
from arroyo_dagster.state.operations.verify.positions import position_findings
from arroyo_dagster.state.operations.verify.rows import (
    CheckDepth,
    FileToRead,
    read_file_facts,
)
from arroyo_dagster.state.operations.verify.values import value_findings
from arroyo_dagster.state.planning.engines import WorkAmount
from arroyo_dagster.state.planning.restore.reads import RestorePlan, TableRead, restore_plan
from arroyo_dagster.state.planning.verify.checks import config_findings
from arroyo_dagster.state.planning.verify.edits import (
    concerns,
    edit_findings,
    explained_files,
    rebuild_findings,
    undone_files,
)
from arroyo_dagster.state.planning.verify.epochs import across_findings, waiting_findings
from arroyo_dagster.state.planning.verify.files import (
    FileFacts,
    ListedFile,
    file_findings,
    list_findings,
)
from arroyo_dagster.state.planning.verify.findings import KEEP_AND_REPORT, Finding, error
from arroyo_dagster.state.planning.verify.restore import (
    SubtaskRestore,
    owner_findings,
    subtask_restores,
    unkeyed_findings,
)
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.forms import table_forms

# Rows are decoded here: more threads than this only use more memory.
_READERS = Threads(count=4)
_FOOTER_READERS = Threads(count=16)
_FILE_BYTES = 1 << 16
"""The cost of opening a file and its footer, as the equivalent number of bytes."""

_Files = Mapping[StatePath, FileFacts]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFindings:
    """The findings about the data files of an epoch and its neighbours."""

    findings: tuple[Finding, ...] = ()
    restore: tuple[SubtaskRestore, ...] = ()
    inspected: int = 0


def data_findings(
    store: ObjectStore,
    paths: JobPaths,
    found: JobMetadata,
    look: CheckDepth,
    on_progress: OnProgress = no_progress,
    items: ItemRunner = HERE,
) -> DataFindings:
    """Check the files that the epoch lists, to the depth of `look`.

    Args:
        found: the metadata of the epoch; its checkpoint is readable.
        on_progress: called after each file that was read.
        items: reads the files; in this process, or on Spark.

    Raises:
        StorageError: the store failed.
    """
    checkpoint = found.checkpoint
    assert checkpoint is not None
    plan = restore_plan(checkpoint, look.parallelism)
    tables = _tables_of(checkpoint, plan)
    files = _read(store, tables.files, plan, look, on_progress, items)
    findings = [*tables.findings, *_of_files(paths, checkpoint, tables.files, files)]
    # Metadata of another job or epoch cannot be compared with its neighbours.
    if not any(finding.code == "metadata-of-another" for finding in found.findings):
        findings += _across(store, paths, found.history, look)
    findings += _waiting(store, paths, checkpoint)
    findings += value_findings(store, checkpoint, tables.files, files, look, items)
    if look.level < MAX_LEVEL:
        return DataFindings(findings=tuple(findings), inspected=len(files))
    reported = {finding.object for finding in (*found.findings, *findings)}
    findings += owner_findings(plan, files, reported)
    findings += unkeyed_findings(checkpoint, files)
    restore = subtask_restores(plan, files)
    return DataFindings(findings=tuple(findings), restore=restore, inspected=len(files))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    """The tables of an epoch: the files they list, and the findings about their configurations."""

    files: Mapping[StatePath, ListedFile]
    findings: tuple[Finding, ...]


def _tables_of(checkpoint: Checkpoint, plan: RestorePlan) -> _Tables:
    """Return every file that the epoch lists, assigned to the first table that lists it."""
    listed: dict[StatePath, ListedFile] = {}
    findings = list(config_findings(checkpoint))
    opened = set(plan.files)
    for operator in checkpoint.operators:
        for name, files in operator.tables.items():
            config = operator.configs.get(name)
            if config is None or config.kind is not files.kind:
                continue  # reported above
            try:
                own = _listed_files(checkpoint, operator, config, files, opened)
            except FormatError as problem:
                evidence = f"table {name} of operator {operator.operator}: {problem.message}"
                findings.append(
                    error("table-configuration", checkpoint.ref, evidence, KEEP_AND_REPORT)
                )
                continue
            for file in own:
                listed.setdefault(file.path, file)
    return _Tables(files=listed, findings=tuple(findings))


def _listed_files(
    checkpoint: Checkpoint,
    operator: OperatorCheckpoint,
    config: TableConfig,
    files: TableFiles,
    opened: Container[StatePath],
) -> list[ListedFile]:
    forms = table_forms(config)
    bounds = {} if isinstance(files, GlobalKeyedFiles) else {one.path: one for one in files.files}
    return [
        ListedFile(
            path=path,
            operator=operator.operator,
            config=config,
            forms=forms,
            bounds=bounds.get(path),
            opened=path in opened,
            managed=checkpoint.progress is not None,
        )
        for path in files.paths
    ]


def _read(
    store: ObjectStore,
    listed: Mapping[StatePath, ListedFile],
    plan: RestorePlan,
    look: CheckDepth,
    on_progress: OnProgress,
    items: ItemRunner,
) -> dict[StatePath, FileFacts]:
    if look.level == 0:
        sizes = _stored_sizes(store, listed, items)
        return {path: FileFacts(size_bytes=sizes[path]) for path in listed if path in sizes}
    if look.level == MAX_LEVEL:
        look = CheckDepth(
            level=look.level,
            parallelism=look.parallelism,
            catalogue=look.catalogue,
            variant=find_variant(store, listed.values()),
        )
    reads = {(read.operator, read.table): read for read in plan.reads}
    to_read = [_to_read(file, reads) for file in listed.values()]
    count = counter(on_progress, "verified files", len(to_read), ProgressUnit.FILES)
    # A footer takes about the same time whatever the size of its file.
    sizes = stored_sizes(store, listed) if items.distributes and look.level > 1 else {}
    weights = [_FILE_BYTES + sizes.get(path, 0) for path in listed]
    choice = items.choose(
        "verify files", WorkAmount(files=len(to_read), size_bytes=sum(sizes.values()))
    )
    facts = items.run(
        choice,
        partial(_facts_of, store, look),
        to_read,
        weights,
        threads=_READERS if look.level > 1 else _FOOTER_READERS,
        on_items=lambda done: _repeat(count, done),
    )
    pairs = zip(listed, facts, strict=True)
    return {path: facts for path, facts in pairs if facts is not None}


def _facts_of(store: ObjectStore, look: CheckDepth, file: FileToRead) -> FileFacts | None:
    return read_file_facts(store, file, look)


def _repeat(count: Callable[[], None], times: int) -> None:
    for _ in range(times):
        count()


def _stored_sizes(
    store: ObjectStore, listed: Iterable[StatePath], items: ItemRunner
) -> dict[StatePath, int]:
    """Return the sizes of the files that exist, with one listing per directory."""
    by_directory: dict[StatePath, list[StatePath]] = {}
    for path in listed:
        if path.parent is not None:
            by_directory.setdefault(path.parent, []).append(path)
    groups = list(by_directory.values())
    weights = [len(group) for group in groups]
    choice = items.choose("verify that files exist", WorkAmount(objects=sum(weights)))
    answers = items.run(choice, partial(stored_sizes, store), groups, weights)
    return {path: size for sizes in answers for path, size in sizes.items()}


def _to_read(
    file: ListedFile, reads: Mapping[tuple[OperatorId, TableName], TableRead]
) -> FileToRead:
    # The last read of a table is that of its last subtask.
    last = reads.get((file.operator, file.config.table))
    return FileToRead(
        listed=file,
        parallelism=1 if last is None else last.subtask + 1,
        cutoff_micros=0 if last is None else last.cutoff_micros,
    )


def _of_files(
    paths: JobPaths,
    checkpoint: Checkpoint,
    listed: Mapping[StatePath, ListedFile],
    files: _Files,
) -> Iterator[Finding]:
    twice = list(list_findings(checkpoint, paths.root, files))
    yield from twice
    reported = {finding.object for finding in twice if finding.code == "file-listed-twice"}
    for path, file in listed.items():
        if path not in reported:
            yield from file_findings(file, files.get(path))


def _across(
    store: ObjectStore, paths: JobPaths, history: Sequence[Checkpoint], look: CheckDepth
) -> Iterator[Finding]:
    positions = partial(position_findings, store, paths, history, look.catalogue)
    now, decodes = history[-1], look.level > 2
    if now.progress is not None:
        yield from across_findings(history)
        yield from positions() if decodes else ()
        return
    edits = read_edits(store, paths, history)
    readable = [record for record in edits.records.values() if record is not None]
    explained = explained_files(history, readable, edits.digests)
    yield from across_findings(history, explained, undone_files(history, readable))
    yield from edit_findings(history, edits.records, edits.digests)
    yield from rebuild_findings(history, read_rebuilds(store, paths))
    if decodes:
        edited = any(concerns(record, now) for record in readable)
        yield from positions(edited=edited, unlisted=explained.get(now.epoch, frozenset()))


def _waiting(store: ObjectStore, paths: JobPaths, checkpoint: Checkpoint) -> Iterator[Finding]:
    records = ParquetBackend(store, paths).compaction_records()
    outputs = [
        path
        for record in records.values()
        for merged in (() if record is None else record.merged)
        for path in merged.output_paths
    ]
    present = stored_sizes(store, outputs) if outputs else {}
    yield from waiting_findings(records, present, checkpoint.paths)
