"""Which jobs a listing shows, which epochs to inspect, and which files and rows a read needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from arroyo_dagster.errors import FormatError, InputError, NotFoundError
from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.ids import (
    OUR_DIRECTORY,
    Epoch,
    JobId,
    OperatorId,
    PipelineId,
    StatePath,
    TableName,
    WorkerGeneration,
)
from arroyo_dagster.state.model.keys import MAX_ROUTING_KEY, KeyRange, range_for_server
from arroyo_dagster.state.model.layout import CURRENT_GENERATION, JobPaths, parse_checkpoint_dir
from arroyo_dagster.state.model.numbers import parse_number
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    TableConfig,
    TableFiles,
    TableKind,
    TimeFile,
)
from arroyo_dagster.state.planning.restore.checkpoint import cutoff_micros, files_to_carry

ALL_KEYS = KeyRange(0, MAX_ROUTING_KEY)
_CHECKPOINTS = "checkpoints"
_ARROYO_DATABASE = "state.sqlite"
_JOIN_DATA = frozenset({"left join data", "right join data"})


# ---- finding jobs --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Level:
    """The names of the objects and directories directly in one directory.

    Attributes:
        objects: of objects, and of directories whose names no store can write.
        unusable: the latter.
    """

    objects: frozenset[str] = frozenset()
    directories: frozenset[str] = frozenset()
    unusable: frozenset[str] = frozenset()


def directories_to_list(known: Mapping[str, Level]) -> list[str]:
    """Return the directories that must be listed, one level each, before `jobs_in` can be called.

    Args:
        known: the levels listed so far, by path; "" is the root.

    Returns:
        Paths that are not yet in `known`, in order; empty once the listing is complete. Never
        deeper than two levels, so no data file is ever listed.
    """
    if "" not in known:
        return [""]
    missing: list[str] = []
    for first in sorted(_candidates(known[""])):
        if first not in known:
            missing.append(first)
            continue
        below = (f"{first}/{second}" for second in sorted(_candidates(known[first])))
        missing.extend(path for path in below if path not in known)
    return missing


def jobs_in(known: Mapping[str, Level]) -> list[JobPaths]:
    """Find the jobs by directory structure; names do not matter, since an id may be any text.

    `{x}/checkpoints/checkpoint-…` is a job of the legacy layout, `{x}/{y}/current-generation.json`
    one of the protocol layout.
    """
    jobs: list[JobPaths] = []
    for path, level in known.items():
        first, _, second = path.partition("/")
        if OUR_DIRECTORY in (first, second) or "/" in second:
            continue
        if second == _CHECKPOINTS and any(map(_is_checkpoint, level.directories)):
            jobs.append(JobPaths(JobId(first)))
        if second and CURRENT_GENERATION in level.objects:
            jobs.append(JobPaths(JobId(second), PipelineId(first)))
    return sorted(jobs, key=lambda paths: paths.root)


def _candidates(level: Level) -> frozenset[str]:
    return level.directories - {OUR_DIRECTORY}


def _is_checkpoint(name: str) -> bool:
    return parse_checkpoint_dir(name) is not None


def check_root(known: Mapping[str, Level], jobs: Sequence[JobPaths], url: str) -> None:
    """Refuse a directory that is not empty and contains no job.

    A directory that contains only records of this package counts as a removed job.

    Args:
        known: the complete levels, for which `directories_to_list` returns nothing more.
        jobs: the jobs that `jobs_in` finds in them.

    Raises:
        InputError: not a checkpoint root; the facts name what was found.
    """
    if jobs:
        return
    root = known[""]
    removed = {
        path.partition("/")[0]
        for path, level in known.items()
        if OUR_DIRECTORY in level.directories
    }
    strangers = [f"{name}/" for name in sorted(_candidates(root) - removed)]
    strangers += sorted(name for name in root.objects if not name.startswith(_ARROYO_DATABASE))
    if not strangers:
        return
    more = f" and {len(strangers) - 10} more" if len(strangers) > 10 else ""
    raise InputError(
        "not a checkpoint root: no directory in it looks like a job",
        url=url,
        found=", ".join(strangers[:10]) + more,
        next_step="give the directory that holds `{job}/checkpoints/checkpoint-…` or "
        "`{pipeline}/{job}/current-generation.json`",
    )


def choose_job(name: str, jobs: Sequence[JobPaths], url: str) -> JobPaths:
    """Find the job that a user names as `job` or `pipeline/job`.

    A complete path takes precedence over the job part of another, so that every job can be named.

    Raises:
        NotFoundError: no such job; the error lists the existing ones.
        InputError: several pipelines have such a job; the error lists them.
    """
    exact = [paths for paths in jobs if paths.root == name]
    matches = exact or [paths for paths in jobs if paths.job == name]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise InputError(
            "several jobs have this name",
            job=name,
            url=url,
            candidates=", ".join(paths.root for paths in matches),
            next_step="name it as pipeline/job",
        )
    names = ", ".join(paths.root for paths in jobs[:20]) + (", …" if len(jobs) > 20 else "")
    raise NotFoundError(
        "there is no such job",
        job=name,
        url=url,
        jobs=names or "none",
        next_step="choose an existing job, or check --url",
    )


# ---- which epochs to inspect ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class Attempt:
    """A directory in which a worker generation wrote an epoch, completely or in part."""

    epoch: Epoch
    worker_generation: WorkerGeneration | None


def unfinished_attempts(attempts: Iterable[Attempt], owners: Iterable[Attempt]) -> list[Attempt]:
    """Return the attempts that may be invisible, unclaimed or orphaned, oldest first.

    Directories older than the oldest owned epoch are left out. They belong to expired epochs and
    stay while a newer epoch lists a file in them.

    Args:
        attempts: every checkpoint directory.
        owners: the attempts that own their epoch.
    """
    owned = set(owners)
    oldest = min((owner.epoch for owner in owned), default=Epoch(0))
    return sorted(one for one in attempts if one not in owned and one.epoch >= oldest)


def job_watermark_micros(checkpoint: Checkpoint) -> int | None:
    """Return the smallest watermark of the operators that have one; None if none has one."""
    marks = [operator.min_watermark_micros for operator in checkpoint.operators]
    return min((mark for mark in marks if mark is not None), default=None)


def ordered_operators(checkpoint: Checkpoint) -> tuple[OperatorCheckpoint, ...]:
    """Return the operators from source to sink.

    The metadata of managed jobs has this order. Arroyo's has a random order, but most operator ids
    end in the operator's position in the plan.
    """
    if checkpoint.progress is not None:
        return checkpoint.operators
    return tuple(sorted(checkpoint.operators, key=lambda operator: _place(operator.operator)))


def _place(operator: str) -> tuple[bool, int, str]:
    number = parse_number(operator.rpartition("_")[2])
    return (number is None, number or 0, operator)


def is_at_rest(newest: Checkpoint, generation: WorkerGeneration | None) -> bool:
    """Return whether the run that wrote the newest epoch stopped with it, and is still the last.

    Args:
        generation: the newest worker generation that was started.
    """
    final = newest.progress is not None and newest.progress.final
    return final and newest.worker_generation == generation


# ---- what a read needs ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The files of an expiring table to read, in replay order, and the rows to keep of them.

    Attributes:
        keys: the routing keys to keep, both ends included.
        cutoff_micros: rows older than this are dropped once all files are replayed; 0 = none.
        whole_batches: a record batch is kept completely if one of its rows is not too old.
    """

    files: tuple[TimeFile, ...]
    keys: KeyRange
    cutoff_micros: int
    whole_batches: bool = False


def plan_read(
    config: ExpiringTimeKeyConfig,
    files: ExpiringTimeKeyFiles,
    watermark_micros: int | None,
    keys: KeyRange = ALL_KEYS,
    *,
    managed: bool = True,
) -> ReadPlan:
    """Choose what a restore with this watermark loads of an expiring table.

    Args:
        watermark_micros: the smallest watermark of the operator; None = it has none.
        managed: whether a managed job wrote the table. Arroyo reads its generational tables without
            applying the retention, keeps or drops rows of updating joins by record batch, and reads
            files in the order of their epochs.

    Source: crates/arroyo-state/src/tables/expiring_time_key_map.rs (arroyo-state.md 5.4).
    """
    unbounded = config.generational and not managed
    cutoff = 0 if unbounded else cutoff_micros(watermark_micros, config.retention_micros)
    carried = files_to_carry(files.files, cutoff, keys)
    if managed:
        return ReadPlan(carried, keys, cutoff)
    in_order = tuple(sorted(carried, key=lambda file: file.epoch))
    return ReadPlan(in_order, keys, cutoff, whole_batches=_of_updating_join(config))


def _of_updating_join(config: ExpiringTimeKeyConfig) -> bool:
    # A windowed join registers the same descriptions, with a retention of 0.
    return config.description in _JOIN_DATA and config.retention_micros > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRead:
    """What one subtask opens of one table in a restore.

    Attributes:
        keys: the routing keys it keeps; all keys of a global keyed table.
        cutoff_micros: rows older than this are dropped once all files are replayed; 0 = none.
        files: in replay order.
        size_bytes: the total size of the files whose size is known.
    """

    operator: OperatorId
    table: TableName
    kind: TableKind
    subtask: int
    keys: KeyRange
    cutoff_micros: int
    files: tuple[StatePath, ...]
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What a restore opens: one read per operator, table and subtask, in this order."""

    reads: tuple[TableRead, ...]

    @property
    def size_bytes(self) -> int:
        """The number of bytes in opened files, by all subtasks together."""
        return sum(read.size_bytes for read in self.reads)

    @property
    def files(self) -> tuple[StatePath, ...]:
        """The files that any subtask opens, each once."""
        return tuple(dict.fromkeys(path for read in self.reads for path in read.files))


def restore_plan(
    checkpoint: Checkpoint,
    parallelism: int | None = None,
    *,
    sizes: Mapping[StatePath, int] | None = None,
) -> RestorePlan:
    """Compute what each subtask opens when this epoch is restored.

    A table whose configuration is missing, or of another kind, is left out: it cannot be opened.

    Args:
        parallelism: of the restored job; None = each operator's own at this epoch.
        sizes: the sizes of the files, in bytes; may be incomplete.
    """
    return RestorePlan(
        tuple(
            read
            for operator in checkpoint.operators
            for name, files in operator.tables.items()
            if name in operator.configs and operator.configs[name].kind is files.kind
            for read in _table_reads(
                operator,
                operator.configs[name],
                files,
                parallelism or operator.parallelism,
                sizes or {},
                managed=checkpoint.progress is not None,
            )
        )
    )


def _table_reads(
    operator: OperatorCheckpoint,
    config: TableConfig,
    files: TableFiles,
    parallelism: int,
    sizes: Mapping[StatePath, int],
    *,
    managed: bool,
) -> Iterator[TableRead]:
    for subtask in range(parallelism):
        # Every subtask reads a global keyed table in full.
        keys, cutoff, paths = ALL_KEYS, 0, files.paths
        if isinstance(files, ExpiringTimeKeyFiles):
            assert isinstance(config.config, ExpiringTimeKeyConfig)
            keys = range_for_server(subtask, parallelism)
            watermark = operator.min_watermark_micros
            plan = plan_read(config.config, files, watermark, keys, managed=managed)
            cutoff, paths = plan.cutoff_micros, tuple(file.path for file in plan.files)
        yield TableRead(
            operator=operator.operator,
            table=config.table,
            kind=files.kind,
            subtask=subtask,
            keys=keys,
            cutoff_micros=cutoff,
            files=paths,
            size_bytes=sum(sizes.get(path, 0) for path in paths),
        )


def find_table(
    checkpoint: Checkpoint, operator_name: str, table_name: str
) -> tuple[OperatorCheckpoint, TableConfig, TableFiles]:
    """Look up one table of one operator.

    Raises:
        NotFoundError: no such operator or table; the error lists the existing ones.
        FormatError: the table has no configuration, or one of the other kind.
    """
    operator = checkpoint.operator(operator_name)
    if operator is None:
        raise NotFoundError(
            "the job has no such operator at this epoch",
            job=checkpoint.job,
            epoch=checkpoint.epoch,
            operator=operator_name,
            operators=", ".join(existing.operator for existing in checkpoint.operators) or "none",
            next_step="choose an existing operator",
        )
    for name, files in operator.tables.items():
        if name == table_name:
            return operator, config_of(checkpoint, operator, name), files
    raise NotFoundError(
        "the operator has no such table at this epoch",
        job=checkpoint.job,
        epoch=checkpoint.epoch,
        operator=operator_name,
        table=table_name,
        tables=", ".join(operator.tables) or "none",
        next_step="choose an existing table",
    )


def config_of(checkpoint: Checkpoint, operator: OperatorCheckpoint, name: TableName) -> TableConfig:
    """Return the configuration of a table that an operator has.

    Raises:
        FormatError: it has none, or one of the other kind.
    """
    files, config = operator.tables[name], operator.configs.get(name)
    if config is None or config.kind is not files.kind:
        raise FormatError(
            f"the metadata holds a {files.kind.label} table without its configuration",
            job=checkpoint.job,
            epoch=checkpoint.epoch,
            operator=operator.operator,
            table=name,
            path=checkpoint.ref,
            next_step="choose another epoch; `arroyo-state verify` lists what else is wrong",
        )
    return config
