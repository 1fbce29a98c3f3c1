"""Can a job be restored from an epoch, and if not, why: every fact gathered, every rule asked.

Nothing here writes. Files are looked at one by one, their rows a few thousand at a time: memory
depends on the number of files, never on their size.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from arroyo_dagster.errors import ConflictError, FormatError, InputError, NotFoundError
from arroyo_dagster.state.backend import ParquetBackend
from arroyo_dagster.state.local.jobs import stored_sizes
from arroyo_dagster.state.local.verify_keys import find_shared_keys, find_variant
from arroyo_dagster.state.local.verify_metadata import JobMetadata, read_job_metadata
from arroyo_dagster.state.local.verify_rows import FileToRead, Look, read_file_facts
from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.ids import Epoch, OperatorId, StatePath, TableName
from arroyo_dagster.state.model.keys import key_range_size
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.tables import GlobalKeyedFiles, TableConfig, TableFiles
from arroyo_dagster.state.planning.findings import KEEP_AND_REPORT, Finding, Verdict, error
from arroyo_dagster.state.planning.health import config_findings
from arroyo_dagster.state.planning.query import RestorePlan, TableRead, restore_plan
from arroyo_dagster.state.planning.verify_epochs import across_findings, waiting_findings
from arroyo_dagster.state.planning.verify_files import (
    FileFacts,
    ListedFile,
    file_findings,
    list_findings,
)
from arroyo_dagster.state.planning.verify_restore import (
    SubtaskRestore,
    owner_findings,
    shared_key_findings,
    subtask_restores,
    unkeyed_findings,
    unknown_table_findings,
)
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.catalogue import Catalogue, default_catalogue
from arroyo_dagster.state.tables.forms import table_forms

MAX_LEVEL = 4
HISTORY = 32
"""How many epochs before the verified one are looked at, unless said otherwise."""

_ATTEMPTS = 3
# Rows are decoded here: more threads than this only take more memory.
_READERS = 4
_FOOTER_READERS = 16
_Files = Mapping[StatePath, FileFacts]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobVerdict:
    """Whether a job can be restored from an epoch.

    Attributes:
        level: how closely it was looked at.
        parallelism: of the restore that was simulated; None = each operator's own.
        verdict: `looked_at` counts data files and metadata objects.
        restore: what each subtask opens and keeps; empty below level 4.
        epochs: those looked at for what happened between them, ascending.
    """

    paths: JobPaths
    epoch: Epoch
    level: int
    parallelism: int | None
    verdict: Verdict
    restore: tuple[SubtaskRestore, ...] = ()
    epochs: tuple[Epoch, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing found is an error."""
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
) -> JobVerdict:
    """Say whether a job can be restored from an epoch, and what is wrong if not.

    Metadata is looked at in full at every level: ownership, chain of parents, commit, fence, what
    the next start would restore, and what happened to files from one epoch to the next.

    Args:
        epoch: the newest visible one when None.
        level: 0 = every listed file is there; 1 = footers, columns, row counts; 2 = statistics
            are those of the rows; 3 = every value decodes; 4 = a restore is simulated.
        parallelism: of the restored job; None = each operator's own.
        history: how many visible epochs before it are looked at.
        catalogue: how entries decode whose types the job did not store; None = what this process
            knows.

    Raises:
        InputError: no such level, or no parallelism.
        NotFoundError: the job has no such epoch, or none at all.
        ConflictError: epochs expire faster than they can be looked at.
        StorageError: the store failed.
    """
    _check(level, parallelism, history)
    look = Look(level=level, parallelism=parallelism, catalogue=catalogue or default_catalogue())
    for _ in range(_ATTEMPTS):
        epochs = ParquetBackend(store, paths).epochs()
        wanted = _chosen(store, paths, epochs, epoch)
        found = read_job_metadata(store, paths, epochs, wanted, history)
        verdict = _judge(store, paths, found, look)
        # What an expiry takes away meanwhile is no damage.
        if verdict.passed or set(epochs) <= set(ParquetBackend(store, paths).epochs()):
            return verdict
    raise ConflictError(
        "epochs of this job expire faster than they can be looked at",
        job=paths.root,
        url=store.url,
        retryable=True,
        next_step="try again with a lower level, or keep more epochs",
    )


def _check(level: int, parallelism: int | None, history: int) -> None:
    if not 0 <= level <= MAX_LEVEL or history < 0:
        raise InputError(
            f"a level is a number from 0 to {MAX_LEVEL}, a history 0 or more",
            level=level,
            history=history,
        )
    if parallelism is not None:
        key_range_size(parallelism)


def _chosen(store: ObjectStore, paths: JobPaths, epochs: list[Epoch], epoch: int | None) -> Epoch:
    wanted = Epoch(epoch) if epoch is not None else (epochs[-1] if epochs else None)
    if wanted is None or wanted not in epochs:
        raise NotFoundError(
            "the job has no visible epoch" if wanted is None else "there is no such epoch",
            job=paths.root,
            epoch=wanted,
            oldest=epochs[0] if epochs else None,
            newest=epochs[-1] if epochs else None,
            url=store.url,
            next_step="choose one of the epochs that `arroyo-state epochs` lists",
        )
    return wanted


# ---- the files -----------------------------------------------------------------------------------


def _judge(store: ObjectStore, paths: JobPaths, found: JobMetadata, look: Look) -> JobVerdict:
    data = _Data() if found.checkpoint is None else _of_data(store, paths, found, look)
    return JobVerdict(
        paths=paths,
        epoch=found.epoch,
        level=look.level,
        parallelism=look.parallelism,
        verdict=Verdict(
            findings=(*found.findings, *data.findings), looked_at=found.objects + data.looked_at
        ),
        restore=data.restore,
        epochs=tuple(one.epoch for one in found.history),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Data:
    """What the data files of an epoch say, beside its neighbours."""

    findings: tuple[Finding, ...] = ()
    restore: tuple[SubtaskRestore, ...] = ()
    looked_at: int = 0


def _of_data(store: ObjectStore, paths: JobPaths, found: JobMetadata, look: Look) -> _Data:
    checkpoint = found.checkpoint
    assert checkpoint is not None
    plan = restore_plan(checkpoint, look.parallelism)
    tables = _tables_of(checkpoint, plan)
    files = _read(store, tables.files, plan, look)
    findings = [*tables.findings, *_of_files(paths, checkpoint, tables.files, files)]
    # What is another's cannot be compared with its neighbours.
    if not any(one.code == "metadata-of-another" for one in found.findings):
        findings += across_findings(found.history)
    findings += _waiting(store, paths, checkpoint)
    findings += _of_values(store, checkpoint, tables.files, files, look)
    if look.level < MAX_LEVEL:
        return _Data(findings=tuple(findings), looked_at=len(files))
    told = {one.object for one in (*found.findings, *findings)}
    findings += owner_findings(plan, files, told)
    findings += unkeyed_findings(checkpoint, files)
    restore = subtask_restores(plan, files)
    return _Data(findings=tuple(findings), restore=restore, looked_at=len(files))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    """The tables of an epoch: the files they list, and what is wrong with their configurations."""

    files: Mapping[StatePath, ListedFile]
    findings: tuple[Finding, ...]


def _tables_of(checkpoint: Checkpoint, plan: RestorePlan) -> _Tables:
    """Every file that the epoch lists, as the first table that does."""
    listed: dict[StatePath, ListedFile] = {}
    findings = list(config_findings(checkpoint))
    opened = set(plan.files)
    for operator in checkpoint.operators:
        for name, files in operator.tables.items():
            config = operator.configs.get(name)
            if config is None or config.kind is not files.kind:
                continue  # told above
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
            ours=checkpoint.progress is not None,
        )
        for path in files.paths
    ]


def _read(
    store: ObjectStore, listed: Mapping[StatePath, ListedFile], plan: RestorePlan, look: Look
) -> dict[StatePath, FileFacts]:
    if look.level == 0:
        sizes = stored_sizes(store, listed)
        return {path: FileFacts(size_bytes=size) for path, size in sizes.items()}
    if look.level == MAX_LEVEL:
        look = Look(
            level=look.level,
            parallelism=look.parallelism,
            catalogue=look.catalogue,
            variant=find_variant(store, listed.values()),
        )
    reads = {(read.operator, read.table): read for read in plan.reads}
    wanted = [_to_read(file, reads) for file in listed.values()]
    with ThreadPoolExecutor(_READERS if look.level > 1 else _FOOTER_READERS, "verify") as pool:
        found = pool.map(lambda file: read_file_facts(store, file, look), wanted)
        pairs = zip(listed, found, strict=True)
        return {path: facts for path, facts in pairs if facts is not None}


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
    told = {one.object for one in twice if one.code == "file-listed-twice"}
    for path, file in listed.items():
        if path not in told:
            yield from file_findings(file, files.get(path))


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


# ---- values --------------------------------------------------------------------------------------


def _of_values(
    store: ObjectStore,
    checkpoint: Checkpoint,
    listed: Mapping[StatePath, ListedFile],
    files: _Files,
    look: Look,
) -> Iterator[Finding]:
    if look.level < 3:
        return
    unknown: dict[tuple[OperatorId, TableName], str] = {}
    for path, file in listed.items():
        found = files.get(path)
        if found is not None and found.rows is not None and found.rows.unknown:
            unknown.setdefault((file.operator, file.config.table), found.rows.unknown)
    yield from unknown_table_findings(unknown)
    for operator in checkpoint.operators:
        for name, tables in operator.tables.items():
            config = operator.configs.get(name)
            if config is None or not isinstance(tables, GlobalKeyedFiles):
                continue
            readable = [path for path in tables.files if path in files and files[path].rows]
            shared = find_shared_keys(store, operator.operator, config, readable)
            yield from shared_key_findings(shared, ours=checkpoint.progress is not None)
    if checkpoint.progress is None:
        yield from _commit_data(checkpoint, look.catalogue)


def _commit_data(checkpoint: Checkpoint, catalogue: Catalogue) -> Iterator[Finding]:
    for operator in checkpoint.operators:
        for name, by_subtask in operator.commit_data().items():
            config = operator.configs.get(name)
            if config is None:
                continue  # told as the fault of the configuration
            typed = any(one.commit for one in catalogue.find(operator.operator, config))
            for subtask, data in by_subtask.items():
                if not data or not typed:
                    continue
                if catalogue.decode_commit_data(operator.operator, config, data) is None:
                    at = f"{operator.operator}.{name}"
                    evidence = (
                        f"what subtask {subtask} of {at} left to be committed does not decode"
                    )
                    yield error("commit-undecodable", checkpoint.ref, evidence, KEEP_AND_REPORT)
