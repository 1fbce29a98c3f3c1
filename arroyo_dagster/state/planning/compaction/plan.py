"""Which files to merge, and what a restore would then read.

Files are merged if they are neighbours in the replay order, so that later files still apply to the
same rows. In an expiring table only the order within a key range matters: key ranges are merged
separately, and each merged file belongs to one subtask.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from arroyo_dagster.errors import ConflictError, InputError
from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.compaction import (
    CompactionPlan,
    CompactionRecord,
    CompactionSettings,
    Forecast,
    Generations,
    InputFile,
    LeftOut,
    Merge,
    Merged,
    MergedPairs,
    MergedRows,
    OutputForm,
    PairsMerge,
    RowsMerge,
    SortOrder,
)
from arroyo_dagster.state.model.ids import StatePath, TableName
from arroyo_dagster.state.model.keys import range_for_server
from arroyo_dagster.state.model.layout import JobPaths, compaction_level
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    TableFiles,
    TimeFile,
)
from arroyo_dagster.state.planning.compaction.apply import adoptable, apply_merges
from arroyo_dagster.state.planning.compaction.policies import (
    Candidate,
    FileRun,
    choose,
    why_left,
    within_budget,
)
from arroyo_dagster.state.planning.restore.checkpoint import cutoff_micros
from arroyo_dagster.state.planning.restore.reads import restore_plan

ARROYO_JOB = (
    "this is an Arroyo job: it is rewritten in place while it is stopped "
    "(`state.operations.compaction.rewrite`), not compacted as a managed job"
)
_KEYED_ROWS = 1 << 16
"""The maximum number of rows in a row group of rows sorted by key: a look-up decodes one."""
_WINDOWS_IN_RETENTION = 8


# ---- planning ------------------------------------------------------------------------------------


def plan_merges(
    checkpoint: Checkpoint,
    sizes: Mapping[StatePath, int],
    settings: CompactionSettings,
    pending: Sequence[CompactionRecord] = (),
    *,
    stamps: Mapping[StatePath, str] | None = None,
    merged_bytes: Sequence[int] | None = None,
) -> CompactionPlan:
    """Choose what to merge at one epoch.

    Args:
        checkpoint: the newest epoch of the job.
        sizes: bytes of every file that it, or a pending record, lists.
        pending: compactions that the job has not adopted yet; they count as done.
        stamps: for each file its etag or modification time, with which the plan is checked later.
        merged_bytes: the output bytes of each merge, where they were estimated from a sample; by
            default the bytes of its inputs.

    Returns:
        A plan, without merges where no merge would reduce the files; `left_out` has the reasons.

    Raises:
        InputError: the size of a listed file is unknown.
    """
    waiting = adoptable(checkpoint.operators, pending, checkpoint.epoch)
    operators = apply_merges(checkpoint.operators, waiting).operators
    merges: list[Merge] = []
    left_out: list[LeftOut] = []
    if checkpoint.progress is None:
        operators = ()
        left_out.append(LeftOut(reason=ARROYO_JOB))
    for operator in operators:
        for name, files in operator.tables.items():
            _check_sizes(files.paths, sizes, checkpoint)
            planned = _plan_table(_Table(operator, name), files, sizes, settings)
            merges.extend(planned.merges)
            left_out.extend(planned.left_out)
    merges, too_much = within_budget(settings.budget, merges, gain)
    left_out.extend(too_much)
    after = replace(checkpoint, operators=_forecast(operators, merges))
    all_sizes = {**sizes, **_forecast_sizes(merges, merged_bytes)}
    taken = dict.fromkeys(path for merge in merges for path in merge.paths)
    return CompactionPlan(
        pipeline=checkpoint.pipeline,
        job=checkpoint.job,
        epoch=checkpoint.epoch,
        ref=checkpoint.ref,
        policy=settings.policy,
        merges=tuple(merges),
        inputs=tuple(
            InputFile(path=path, size_bytes=sizes[path], stamp=(stamps or {}).get(path))
            for path in taken
        ),
        left_out=tuple(left_out),
        pending=len(pending),
        before=forecast(replace(checkpoint, operators=operators), sizes, settings.parallelism),
        after=forecast(after, all_sizes, settings.parallelism),
        parallelism=settings.parallelism,
    )


def forecast(
    checkpoint: Checkpoint, sizes: Mapping[StatePath, int], parallelism: int | None = None
) -> Forecast:
    """Compute what a restore of this epoch reads.

    Args:
        sizes: bytes of the files that it lists; a file without a size counts as 0 bytes.
        parallelism: of the restore; None = each operator's own.
    """
    plan = restore_plan(checkpoint, parallelism, sizes=sizes)
    listed = list(dict.fromkeys(path for op in checkpoint.operators for path in op.paths))
    opens = [0] * max((read.subtask + 1 for read in plan.reads), default=0)
    read_bytes = [0] * len(opens)
    for read in plan.reads:
        opens[read.subtask] += len(read.files)
        read_bytes[read.subtask] += read.size_bytes
    return Forecast(
        files=len(listed),
        size_bytes=sum(sizes.get(path, 0) for path in listed),
        opens=tuple(opens),
        read_bytes=tuple(read_bytes),
    )


def backlog(checkpoint: Checkpoint) -> int:
    """Count the data files of a job that were never merged, less one per subtask and table.

    Reads metadata only, so that a schedule can evaluate hundreds of jobs. 0 for an Arroyo job.
    """
    if checkpoint.progress is None:
        return 0
    return sum(
        max(0, _fresh(files) - operator.parallelism)
        for operator in checkpoint.operators
        for files in operator.tables.values()
    )


def most_outputs(merge: Merge) -> int:
    """Return the maximum number of files that a merge writes, for values of one state version."""
    if isinstance(merge, PairsMerge):
        return 1 if merge.from_oldest else 2
    return len(merge.ranges) + merge.size_bytes // merge.form.file_bytes


def gain(merge: Merge) -> int:
    """Return by how many files at least a merge reduces the number of files."""
    return len(merge.paths) - most_outputs(merge)


def _check_sizes(
    paths: Iterable[StatePath], sizes: Mapping[StatePath, int], checkpoint: Checkpoint
) -> None:
    unknown = [path for path in paths if path not in sizes]
    if unknown:
        raise InputError(
            f"{len(unknown)} listed files have no known size; they may be missing",
            job=checkpoint.job,
            epoch=checkpoint.epoch,
            path=unknown[0],
            next_step="check the epoch; nothing is merged while a file is missing",
        )


# ---- one table -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Table:
    """A table and its operator."""

    operator: OperatorCheckpoint
    name: TableName

    def left(self, reason: str, files: Iterable[StatePath] = ()) -> LeftOut:
        return LeftOut(
            operator=self.operator.operator, table=self.name, reason=reason, files=tuple(files)
        )


@dataclass(frozen=True, slots=True)
class _PlannedMerges:
    merges: Sequence[Merge] = ()
    left_out: Sequence[LeftOut] = ()


def _plan_table(
    table: _Table,
    files: TableFiles,
    sizes: Mapping[StatePath, int],
    settings: CompactionSettings,
) -> _PlannedMerges:
    if isinstance(files, ExpiringTimeKeyFiles):
        return _plan_rows(table, files, sizes, settings)
    candidates = [_candidate(path, sizes) for path in files.files]
    runs, left = _split(table, candidates, settings, None)
    merges: list[Merge] = []
    for run in runs:
        inputs = files.files[run.start : run.end]
        merge = PairsMerge(
            operator=table.operator.operator,
            table=table.name,
            inputs=inputs,
            size_bytes=sum(sizes[path] for path in inputs),
            from_oldest=run.start == 0,
            sizes=tuple(sizes[path] for path in inputs),
            level=_level(candidates, run),
        )
        if most_outputs(merge) < len(inputs):
            merges.append(merge)
        else:
            left.append(table.left(_no_gain(merge), inputs))
    return _PlannedMerges(merges, left)


def _candidate(path: StatePath, sizes: Mapping[StatePath, int]) -> Candidate:
    return Candidate(path=path, size_bytes=sizes[path], level=compaction_level(path))


def _level(candidates: Sequence[Candidate], run: FileRun) -> int:
    return 1 + max(candidate.level for candidate in candidates[run.start : run.end])


def _no_gain(merge: Merge) -> str:
    return f"{len(merge.paths)} files would become {most_outputs(merge)}"


def _split(
    table: _Table,
    candidates: Sequence[Candidate],
    settings: CompactionSettings,
    window_micros: int | None,
) -> tuple[list[FileRun], list[LeftOut]]:
    """Return the runs to merge, and the other files grouped by the reason why they stay."""
    runs = choose(candidates, settings, window_micros)
    taken = {index for run in runs for index in range(run.start, run.end)}
    reasons: dict[str, list[StatePath]] = {}
    for index, candidate in enumerate(candidates):
        if index not in taken:
            reason = why_left(candidates, index, settings, window_micros)
            reasons.setdefault(reason, []).append(candidate.path)
    return runs, [table.left(reason, files) for reason, files in reasons.items()]


def _plan_rows(
    table: _Table,
    files: ExpiringTimeKeyFiles,
    sizes: Mapping[StatePath, int],
    settings: CompactionSettings,
) -> _PlannedMerges:
    config = table.operator.configs[table.name].config
    assert isinstance(config, ExpiringTimeKeyConfig)
    parallelism = settings.parallelism or table.operator.parallelism
    rule = _RowsRule.of(table, config, settings, parallelism)
    live = [file for file in files.files if file.max_timestamp_micros >= rule.cutoff_micros]
    kept = {file.path for file in live}
    gone = [file.path for file in files.files if file.path not in kept]
    merges: list[Merge] = []
    left = [table.left("none of its rows is kept: the next epoch no longer lists it", gone)]
    for sequence in _sequences(live, parallelism):
        candidates = [rule.candidate(file, sizes) for file in sequence]
        runs, others = _split(table, candidates, settings, rule.window_micros)
        left.extend(others)
        for run in runs:
            merge = rule.merge(sequence, run, candidates, sizes)
            if most_outputs(merge) < len(merge.inputs) or _is_rescale(settings, candidates, run):
                merges.append(merge)
            else:
                left.append(table.left(_no_gain(merge), merge.paths))
    if not live and not gone:
        left = [table.left("it has one file or none")]
    return _PlannedMerges(merges, [entry for entry in left if entry.files or not files.files])


def _is_rescale(
    settings: CompactionSettings, candidates: Sequence[Candidate], run: FileRun
) -> bool:
    straddling = any(candidate.straddles for candidate in candidates[run.start : run.end])
    return settings.parallelism is not None and straddling


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowsRule:
    """How the files of one expiring table are merged."""

    table: _Table
    parallelism: int
    cutoff_micros: int
    window_micros: int
    generations: Generations
    form: OutputForm

    @classmethod
    def of(
        cls,
        table: _Table,
        config: ExpiringTimeKeyConfig,
        settings: CompactionSettings,
        parallelism: int,
    ) -> _RowsRule:
        cutoff = cutoff_micros(table.operator.min_watermark_micros, config.retention_micros)
        window = settings.window_micros or config.retention_micros // _WINDOWS_IN_RETENTION
        return cls(
            table=table,
            parallelism=parallelism,
            cutoff_micros=cutoff,
            window_micros=max(1, window),
            generations=_generations(config, settings),
            form=_form(config, settings),
        )

    def candidate(self, file: TimeFile, sizes: Mapping[StatePath, int]) -> Candidate:
        return Candidate(
            path=file.path,
            size_bytes=sizes[file.path],
            level=max(file.compaction_generation, compaction_level(file.path)),
            latest_micros=file.max_timestamp_micros,
            straddles=len(file.owners(self.parallelism)) > 1,
        )

    def merge(
        self,
        sequence: Sequence[TimeFile],
        run: FileRun,
        candidates: Sequence[Candidate],
        sizes: Mapping[StatePath, int],
    ) -> RowsMerge:
        inputs = tuple(sequence[run.start : run.end])
        owners = sorted(set().union(*(file.owners(self.parallelism) for file in inputs)))
        return RowsMerge(
            operator=self.table.operator.operator,
            table=self.table.name,
            inputs=inputs,
            ranges=tuple(range_for_server(owner, self.parallelism) for owner in owners),
            cutoff_micros=self.cutoff_micros,
            size_bytes=sum(sizes[file.path] for file in inputs),
            from_oldest=run.start == 0,
            sizes=tuple(sizes[file.path] for file in inputs),
            level=_level(candidates, run),
            parallelism=self.parallelism,
            generations=self.generations,
            form=self.form,
        )


def _generations(config: ExpiringTimeKeyConfig, settings: CompactionSettings) -> Generations:
    if not config.generational or not settings.deduplicate:
        return Generations.ALL
    return Generations.NEWEST_AT_ANY_CUTOFF


def _form(config: ExpiringTimeKeyConfig, settings: CompactionSettings) -> OutputForm:
    sort = _sort(config, settings)
    form = OutputForm(
        sort=sort, file_bytes=2 * settings.target_bytes, memory_bytes=settings.memory_bytes
    )
    return replace(form, row_group_rows=_KEYED_ROWS) if sort is SortOrder.KEY else form


def _sort(config: ExpiringTimeKeyConfig, settings: CompactionSettings) -> SortOrder:
    """Return the requested order, or replay order where rows depend on the order of the others."""
    if settings.sort is SortOrder.TIME and config.generational and not settings.deduplicate:
        return SortOrder.REPLAY
    return settings.sort


def _sequences(files: Sequence[TimeFile], parallelism: int) -> list[tuple[TimeFile, ...]]:
    """Group files that depend on each other, in replay order.

    One group per subtask; a single group if any file has keys of more than one subtask.
    """
    owners = [file.owners(parallelism) for file in files]
    if any(len(owner) > 1 for owner in owners):
        return [tuple(files)]
    pairs = sorted(zip((owner[0] for owner in owners), range(len(files)), strict=True))
    return [
        tuple(files[index] for _, index in group)
        for _, group in itertools.groupby(pairs, key=lambda pair: pair[0])
    ]


def _fresh(files: TableFiles) -> int:
    return sum(not compaction_level(path) for path in files.paths)


# ---- the forecast --------------------------------------------------------------------------------


def _forecast(
    operators: Sequence[OperatorCheckpoint], merges: Sequence[Merge]
) -> tuple[OperatorCheckpoint, ...]:
    """Return the operators as they would be with the maximum number of outputs of each merge."""
    applied = apply_merges(operators, [stand_in(i, merge) for i, merge in enumerate(merges)])
    assert not applied.stale
    return applied.operators


def _outputs(at: int, merge: Merge) -> list[StatePath]:
    return [StatePath(f"planned/{at}/{number}") for number in range(most_outputs(merge))]


def stand_in(at: int, merge: Merge) -> Merged:
    """Return the result that a merge is expected to have, with file names that no store holds.

    Args:
        at: the index of the merge in the plan; makes the names unique.
    """
    paths = _outputs(at, merge)
    if isinstance(merge, PairsMerge):
        return MergedPairs(
            operator=merge.operator,
            table=merge.table,
            inputs=merge.inputs,
            outputs=tuple(paths),
        )
    newest = max(file.max_timestamp_micros for file in merge.inputs)
    epoch = max(file.epoch for file in merge.inputs)
    ranges = [*merge.ranges, *[merge.ranges[-1]] * (len(paths) - len(merge.ranges))]
    return MergedRows(
        operator=merge.operator,
        table=merge.table,
        inputs=merge.inputs,
        outputs=tuple(
            TimeFile(
                epoch=epoch,
                path=path,
                min_routing_key=keys.start,
                max_routing_key=keys.end,
                max_timestamp_micros=newest,
                compaction_generation=merge.level,
            )
            for path, keys in zip(paths, ranges, strict=True)
        ),
    )


def _forecast_sizes(
    merges: Sequence[Merge], merged_bytes: Sequence[int] | None
) -> dict[StatePath, int]:
    sizes: dict[StatePath, int] = {}
    for index, merge in enumerate(merges):
        paths = _outputs(index, merge)
        size_bytes = merge.size_bytes if merged_bytes is None else merged_bytes[index]
        sizes.update(dict.fromkeys(paths, size_bytes // len(paths)))
    return sizes


# ---- whether a plan that was made earlier may still be executed ----------------------------------


def check_plan(
    plan: CompactionPlan,
    checkpoint: Checkpoint,
    pending: Sequence[CompactionRecord],
    sizes: Mapping[StatePath, int],
    stamps: Mapping[StatePath, str],
) -> None:
    """Check that a plan is for the newest epoch and that its input files are unchanged.

    At the epoch of the plan, each merge still takes neighbouring files and drops only rows that a
    restore drops. At any other epoch this is not guaranteed.

    Args:
        checkpoint: the newest epoch.
        pending: compactions that the job has not adopted yet.
        sizes, stamps: of its files, as in `plan_merges`.

    Raises:
        ConflictError: the plan no longer matches.
    """
    if (plan.pipeline, plan.job) != (checkpoint.pipeline, checkpoint.job):
        raise _stale(plan, "it is of another job")
    if plan.ref != checkpoint.ref:
        raise _stale(plan, f"it is of epoch {plan.epoch}, the job is at epoch {checkpoint.epoch}")
    for file in plan.inputs:
        if sizes.get(file.path) != file.size_bytes or stamps.get(file.path) != file.stamp:
            raise _stale(plan, "a file was written again", path=file.path)
    waiting = adoptable(checkpoint.operators, pending, checkpoint.epoch)
    operators = apply_merges(checkpoint.operators, waiting).operators
    planned = apply_merges(operators, [stand_in(i, merge) for i, merge in enumerate(plan.merges)])
    if planned.stale:
        raise _stale(plan, f"its files were merged meanwhile: {planned.stale[0].reason}")


def _stale(plan: CompactionPlan, reason: str, **facts: object) -> ConflictError:
    return ConflictError(
        f"the plan no longer matches the state: {reason}",
        job=JobPaths(plan.job, plan.pipeline).root,
        retryable=True,
        next_step="make a new plan; nothing was written",
        **facts,
    )
