"""Verify whether a job can be restored from an epoch: read all facts, apply all rules.

This module writes nothing. It reads files one by one, a few thousand rows at a time: memory depends
on the number of files, never on their size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from arroyo_dagster.errors import FormatError, NotFoundError
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.own_records import read_records
from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.ids import Epoch, OperatorId, StatePath, TableName
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.progress import OnProgress, ProgressUnit, no_progress
from arroyo_dagster.state.model.tables import GlobalKeyedFiles, TableConfig, TableFiles
from arroyo_dagster.state.model.verify import HISTORY, MAX_LEVEL, VerifySettings
from arroyo_dagster.state.operations.catalog.footers import expired_meanwhile
from arroyo_dagster.state.operations.catalog.metadata_only import metadata_only_epochs, stored_sizes
from arroyo_dagster.state.operations.catalog.query import chosen_epoch
from arroyo_dagster.state.operations.engines import HERE, ItemRunner, Threads
from arroyo_dagster.state.operations.gc.journal_check import NEWEST, check_journal
from arroyo_dagster.state.operations.progress import counter
from arroyo_dagster.state.operations.query.positions import counts_records, source_positions
from arroyo_dagster.state.operations.query.state import StateCatalog, StateEpoch, StateJob
from arroyo_dagster.state.operations.verify.edits import read_edits, read_rebuilds
from arroyo_dagster.state.operations.verify.metadata import JobMetadata, read_job_metadata
from arroyo_dagster.state.operations.verify.rows import (
    CheckDepth,
    FileToRead,
    KeyedEpoch,
    find_shared_keys,
    find_variant,
    keyed_epochs,
    read_file_facts,
)
from arroyo_dagster.state.planning.engines import EngineChoice, WorkAmount
from arroyo_dagster.state.planning.privacy import NOTHING_PRIVATE
from arroyo_dagster.state.planning.restore.reads import RestorePlan, restore_plan
from arroyo_dagster.state.planning.verify.checks import config_findings
from arroyo_dagster.state.planning.verify.edits import (
    concerns,
    edit_findings,
    explained_files,
    rebuild_findings,
    undone_files,
)
from arroyo_dagster.state.planning.verify.epochs import (
    Positions,
    absurd_positions,
    across_findings,
    position_steps,
    waiting_findings,
)
from arroyo_dagster.state.planning.verify.files import (
    FileFacts,
    ListedFile,
    file_findings,
    list_findings,
)
from arroyo_dagster.state.planning.verify.findings import (
    KEEP_AND_REPORT,
    Finding,
    Verdict,
    either,
    error,
)
from arroyo_dagster.state.planning.verify.restore import (
    SubtaskRestore,
    owner_findings,
    shared_key_findings,
    subtask_restores,
    unkeyed_findings,
    unknown_table_findings,
)
from arroyo_dagster.state.planning.verify.starts import Origin, origin_of
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.forms import table_forms
from arroyo_dagster.state.tables.known.catalogue import Catalogue, default_catalogue

_ATTEMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class JobVerdict:
    """Whether a job can be restored from an epoch.

    Attributes:
        level: the level of the verification, as of `verify_job`.
        parallelism: of the simulated restore; None = each operator's own.
        verdict: `inspected` counts data files and metadata objects.
        restore: what each subtask opens and keeps; empty below level 4.
        epochs: the consecutive epochs that were compared, ascending.
        engines: which engine ran each step, if there was a choice.
    """

    paths: JobPaths
    epoch: Epoch
    level: int
    parallelism: int | None
    verdict: Verdict
    restore: tuple[SubtaskRestore, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    engines: tuple[EngineChoice, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether no finding is an error."""
        return self.verdict.passed


def verify_job(
    store: ObjectStore,
    paths: JobPaths,
    epoch: int | None = None,
    *,
    level: int = MAX_LEVEL,
    parallelism: int | None = None,
    history: int = HISTORY,
    catalogue: Catalogue | None = None,
    on_progress: OnProgress = no_progress,
    items: ItemRunner = HERE,
) -> JobVerdict:
    """Determine whether a job can be restored from an epoch, and report every finding.

    Metadata is checked in full at every level: ownership, chain of parents, commit, fence, what the
    next start would restore, and how the lists of files change from epoch to epoch.

    Args:
        epoch: None = the newest visible epoch.
        level, parallelism, history: see `VerifySettings`.
        catalogue: decodes entries whose types the job did not store; None = the tables registered
            in this process.
        on_progress: called after each file that was read.
        items: reads the files; in this process, or on Spark.

    Raises:
        InputError: the level, the history or the parallelism is out of range.
        NotFoundError: the job has no such epoch, or none at all.
        ConflictError: epochs expire faster than they can be read.
        StorageError: the store failed.
    """
    settings = VerifySettings(level=level, parallelism=parallelism, history=history)
    look = CheckDepth(
        level=settings.level,
        parallelism=settings.parallelism,
        catalogue=catalogue or default_catalogue(),
    )
    for _ in range(_ATTEMPTS):
        epochs = ParquetBackend(store, paths).epochs()
        number = chosen_epoch(store, paths, epochs, epoch)
        if number != epochs[-1] and (needed_by := metadata_only_epochs(store, paths, {number})):
            return _metadata_only(paths, number, needed_by[number], look)
        metadata = read_job_metadata(store, paths, epochs, number, settings.history)
        findings = [
            *_records(store, paths, metadata, whole=level == MAX_LEVEL),
            *check_journal(store, paths, None if level == MAX_LEVEL else NEWEST),
        ]
        verdict = _judge(store, paths, metadata, look, on_progress, items, findings)
        # Objects that an expiry deletes meanwhile are not damage.
        if verdict.passed or set(epochs) <= set(ParquetBackend(store, paths).epochs()):
            return verdict
    raise expired_meanwhile(store, paths, "try again with a lower level, or keep more epochs")


def _records(
    store: ObjectStore, paths: JobPaths, found: JobMetadata, *, whole: bool
) -> Iterator[Finding]:
    """Find records of this package that this release does not read."""
    records = read_records(store, paths, whole=whole)
    managed = found.checkpoint is None or found.checkpoint.progress is not None
    for path, problem in records.unreadable.items():
        blocks_start = managed and path not in records.beside
        step = str(problem.next_step)
        yield either(blocks_start, "record-unreadable", path, problem.message, step)


def _metadata_only(paths: JobPaths, epoch: Epoch, by: Epoch, look: CheckDepth) -> JobVerdict:
    finding = error(
        "metadata-only",
        paths.epoch_record(epoch),
        f"epoch {epoch} expired: its metadata stays for epoch {by}, its data is deleted",
        f"choose another epoch: `arroyo-state epochs {paths.root}` lists them",
    )
    return JobVerdict(
        paths=paths,
        epoch=epoch,
        level=look.level,
        parallelism=look.parallelism,
        verdict=Verdict(findings=(finding,), inspected=1),
        epochs=(epoch,),
    )


def _judge(
    store: ObjectStore,
    paths: JobPaths,
    found: JobMetadata,
    look: CheckDepth,
    on_progress: OnProgress,
    items: ItemRunner,
    ours: Sequence[Finding],
) -> JobVerdict:
    findings: Sequence[Finding] = ()
    restore: tuple[SubtaskRestore, ...] = ()
    inspected = 0
    if found.checkpoint is not None:
        data = _data_findings(store, paths, found, look, on_progress, items)
        findings, restore, inspected = data
    return JobVerdict(
        paths=paths,
        epoch=found.epoch,
        level=look.level,
        parallelism=look.parallelism,
        verdict=Verdict(
            findings=(*found.findings, *findings, *ours),
            inspected=found.objects + inspected,
        ),
        restore=restore,
        epochs=tuple(checkpoint.epoch for checkpoint in found.history),
    )


# ---- data files: alone, against neighbouring epochs, and restored --------------------------------

# Rows are decoded here: more threads than this only use more memory.
_READERS = Threads(count=4)
_FOOTER_READERS = Threads(count=16)
_FILE_BYTES = 1 << 16
"""The cost of opening a file and its footer, as the equivalent number of bytes."""

_Files = Mapping[StatePath, FileFacts]


def _data_findings(
    store: ObjectStore,
    paths: JobPaths,
    found: JobMetadata,
    look: CheckDepth,
    on_progress: OnProgress,
    items: ItemRunner,
) -> tuple[list[Finding], tuple[SubtaskRestore, ...], int]:
    """Check the files that the epoch lists, to the depth of `look`, and their neighbours.

    Args:
        found: the metadata of the epoch; its checkpoint is readable.
        on_progress: called after each file that was read.
        items: reads the files; in this process, or on Spark.

    Returns:
        The findings, what each subtask would restore, and the number of files.

    Raises:
        StorageError: the store failed.
    """
    checkpoint = found.checkpoint
    assert checkpoint is not None
    plan = restore_plan(checkpoint, look.parallelism)
    listed, findings = _tables_of(checkpoint, plan)
    files = _read(store, listed, plan, look, on_progress, items)
    findings += _of_files(paths, checkpoint, listed, files)
    # Metadata of another job or epoch cannot be compared with its neighbours.
    if not any(finding.code == "metadata-of-another" for finding in found.findings):
        findings += _across(store, paths, found.history, look)
    findings += _waiting(store, paths, checkpoint)
    findings += value_findings(store, checkpoint, listed, files, look, items)
    if look.level < MAX_LEVEL:
        return findings, (), len(files)
    reported = {finding.object for finding in (*found.findings, *findings)}
    findings += owner_findings(plan, files, reported)
    findings += unkeyed_findings(checkpoint, files)
    return findings, subtask_restores(plan, files), len(files)


def _tables_of(
    checkpoint: Checkpoint, plan: RestorePlan
) -> tuple[dict[StatePath, ListedFile], list[Finding]]:
    """Return every file that the epoch lists, assigned to the first table that lists it, and the
    findings about the configurations of its tables.
    """
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
    return listed, findings


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
        look = replace(look, variant=find_variant(store, listed.values()))
    reads = {(read.operator, read.table): read for read in plan.reads}
    to_read = []
    for file in listed.values():
        # The last read of a table is that of its last subtask.
        last = reads.get((file.operator, file.config.table))
        subtasks, cutoff = (1, 0) if last is None else (last.subtask + 1, last.cutoff_micros)
        to_read.append(FileToRead(listed=file, parallelism=subtasks, cutoff_micros=cutoff))
    count = counter(on_progress, "verified files", len(to_read), ProgressUnit.FILES)
    # A footer takes about the same time whatever the size of its file.
    sizes = stored_sizes(store, listed) if items.distributes and look.level > 1 else {}
    weights = [_FILE_BYTES + sizes.get(path, 0) for path in listed]
    choice = items.choose(
        "verify files", WorkAmount(files=len(to_read), size_bytes=sum(sizes.values()))
    )
    facts = items.run(
        choice,
        partial(read_file_facts, store, look=look),
        to_read,
        weights,
        threads=_READERS if look.level > 1 else _FOOTER_READERS,
        on_items=lambda done: _repeat(count, done),
    )
    pairs = zip(listed, facts, strict=True)
    return {path: facts for path, facts in pairs if facts is not None}


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
    yield from rebuild_findings(history, read_rebuilds(store, edits))
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


# ---- compare how far the sources of a job have read with the epoch before ------------------------


def position_findings(
    store: ObjectStore,
    paths: JobPaths,
    history: Sequence[Checkpoint],
    catalogue: Catalogue,
    *,
    edited: bool = False,
    unlisted: Collection[StatePath] = (),
) -> Iterator[Finding]:
    """Check the positions of the last epoch, and compare them with those of the epoch before.

    Tables that cannot be read are left to the findings about their files.

    Args:
        history: consecutive visible epochs, oldest first; the last is the one that is verified.
        edited: whether an edit has set the state of the last epoch.
        unlisted: the files that an edit took from its lists.

    Raises:
        StorageError: the store failed.
    """
    now = history[-1]
    new = known_positions(store, paths, now, catalogue)
    yield from absurd_positions(now, new)
    if len(history) < 2 or edited or not new:
        return
    before = history[-2]
    revised = now.progress is not None and now.progress.revises == before.epoch
    if now.epoch != before.epoch + 1 or revised:
        return
    if origin_of(before, now, unlisted) is Origin.BEFORE:
        old = known_positions(store, paths, before, catalogue)
        yield from position_steps(before, now, old, new)


def known_positions(
    store: ObjectStore, paths: JobPaths, checkpoint: Checkpoint, catalogue: Catalogue
) -> Positions:
    """Return the positions of sources at an epoch that are numbers; none if a table is broken."""
    job = StateJob(StateCatalog(store, NOTHING_PRIVATE, catalogue), paths)
    try:
        positions = source_positions(StateEpoch(job, checkpoint))
    except (FormatError, NotFoundError):
        return {}
    return {
        (position.operator, position.table, position.partition): position.position
        for position in positions
        if position.position is not None and counts_records(position)
    }


# ---- findings of `verify` about the values of an epoch, table by table ---------------------------


def value_findings(
    store: ObjectStore,
    checkpoint: Checkpoint,
    listed: Mapping[StatePath, ListedFile],
    files: Mapping[StatePath, FileFacts],
    look: CheckDepth,
    items: ItemRunner = HERE,
) -> Iterator[Finding]:
    """Report unknown tables, keys that several subtasks wrote, and commit data that does not
    decode.

    Args:
        files: the facts of the files that exist.
        items: reads the keys of the files; in this process, or on Spark.

    Raises:
        StorageError: the store failed.
    """
    if look.level < 3:
        return
    unknown: dict[tuple[OperatorId, TableName], str] = {}
    for path, file in listed.items():
        facts = files.get(path)
        if facts is not None and facts.rows is not None and facts.rows.unknown:
            unknown.setdefault((file.operator, file.config.table), facts.rows.unknown)
    yield from unknown_table_findings(unknown)
    epochs = list(_keyed_epochs(checkpoint, files))
    weights = [sum(files[path].size_bytes for path in epoch.paths) for epoch in epochs]
    count = sum(len(list(epoch.paths)) for epoch in epochs)
    choice = items.choose("compare keys", WorkAmount(files=count, size_bytes=sum(weights)))
    find = partial(find_shared_keys, store)
    # One at a time: the keys of an epoch are in memory.
    shared = items.run(choice, find, epochs, weights, threads=Threads(count=1))
    several = [keys for keys in shared if keys is not None]
    yield from shared_key_findings(several, managed=checkpoint.progress is not None)
    if checkpoint.progress is None:
        yield from _commit_data(checkpoint, look.catalogue)


def _keyed_epochs(
    checkpoint: Checkpoint, files: Mapping[StatePath, FileFacts]
) -> Iterator[KeyedEpoch]:
    for operator in checkpoint.operators:
        for name, tables in operator.tables.items():
            config = operator.configs.get(name)
            if config is not None and isinstance(tables, GlobalKeyedFiles):
                readable = [path for path in tables.files if path in files and files[path].rows]
                yield from keyed_epochs(operator.operator, config, readable)


def _commit_data(checkpoint: Checkpoint, catalogue: Catalogue) -> Iterator[Finding]:
    for operator in checkpoint.operators:
        for name, by_subtask in operator.commit_data().items():
            config = operator.configs.get(name)
            if config is None:
                continue  # reported as an error of the configuration
            typed = any(table.commit for table in catalogue.find(operator.operator, config))
            for subtask, data in by_subtask.items():
                if not data or not typed:
                    continue
                if catalogue.decode_commit_data(operator.operator, config, data) is None:
                    dotted = f"{operator.operator}.{name}"
                    evidence = f"the commit data of subtask {subtask} of {dotted} does not decode"
                    yield error("commit-undecodable", checkpoint.ref, evidence, KEEP_AND_REPORT)
