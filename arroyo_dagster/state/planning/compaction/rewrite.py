"""Which files of an Arroyo job may be rewritten and when, and the metadata afterwards.

A table is rewritten completely or not at all: the new files replace every file of compaction level
0. In an aggregate's table, only all row generations together show which rows are outdated. And a
file of level 0 beside a younger one of a higher level is what a compaction leaves behind that raced
a barrier.

Source: `arroyo-state.md` 5.4 to 5.7 and 9.8; tested with a real Arroyo's restore in both layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.checkpoints import Checkpoint, CheckpointState, OperatorCheckpoint
from arroyo_dagster.state.model.compaction import CompactionPolicy, CompactionSettings, LeftOut
from arroyo_dagster.state.model.ids import Epoch, OperatorId, StatePath, TableName
from arroyo_dagster.state.model.job_facts import JobAnswer, JobCondition
from arroyo_dagster.state.model.keys import KeyRange, range_for_server
from arroyo_dagster.state.model.layout import is_rewritten
from arroyo_dagster.state.model.rewrite import RewriteInput, RewritePlan, RewriteRule, TableRewrite
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    TableConfig,
    TableFiles,
    TimeFile,
)
from arroyo_dagster.state.planning.compaction.plan import forecast
from arroyo_dagster.state.planning.compaction.policies import within_budget
from arroyo_dagster.state.planning.restore.reads import plan_read
from arroyo_dagster.state.planning.verify.restore import unkeyed_loss

PART_BYTES = 64 << 20
"""A part of a table reads about this many bytes; larger tables are split by key range."""

SNAPSHOT = (
    "every epoch writes it completely, so there is nothing to merge, and no older file is read"
)
UNKNOWN_TABLE = "no known operator has such a table, so it is unknown which rows a restore loads"
RUNS = "the job runs: its workers keep the lists of files in memory, so its files cannot be changed"
PASS_A_SOURCE = (
    "pass Arroyo's API or database (--arroyo-api, --arroyo-db), or assume the status: "
    "--assume JOB=stopped"
)

_WINDOWS = frozenset(
    {"tumbling_intermediate", "Sliding_intermediate", "session", "window function input"}
)
_JOINS = frozenset({"left join data", "right join data"})
_AGGREGATES = frozenset({"accumulator_state", "batch_state"})

TableKey = tuple[OperatorId, TableName]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnkeyedFacts:
    """Row counts from the file footers of the table of an aggregate without GROUP BY.

    Attributes:
        rows, batches: of all its files; Arroyo reads one row of each record batch.
    """

    rows: int
    batches: int

    @property
    def lost(self) -> int:
        """How many rows Arroyo does not read: an upper bound of the current rows that it loses."""
        return self.rows - self.batches


def restart_losses(facts: Mapping[TableKey, UnkeyedFacts]) -> Iterator[str]:
    """Yield what the next start loses of aggregates without GROUP BY, for people; the rule is that
    of `verify`.
    """
    for (operator, table), unkeyed in facts.items():
        loss = unkeyed_loss(operator, table, unkeyed.rows, unkeyed.batches)
        if loss is not None:
            yield loss


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFacts:
    """Facts about the tables of an epoch that its metadata does not contain.

    Attributes:
        sizes: of every listed file, in bytes.
        inputs: every listed file of an expiring table that exists, by path.
        unkeyed: of the tables of aggregates without GROUP BY.
        unwritable: for each table whose columns cannot be written back exactly, the reason.
    """

    sizes: Mapping[StatePath, int]
    inputs: Mapping[StatePath, RewriteInput]
    unkeyed: Mapping[TableKey, UnkeyedFacts]
    unwritable: Mapping[TableKey, str]


# ---- when ----------------------------------------------------------------------------------------


def why_not_now(answer: JobAnswer, checkpoint: Checkpoint) -> str | None:
    """Return why an Arroyo job must not be rewritten now; None = it may.

    Args:
        answer: what the status sources report of the job, its epochs included.
        checkpoint: the epoch that its next start would restore.
    """
    facts = answer.facts
    condition = facts.condition
    if condition is JobCondition.UNKNOWN:
        return f"the status of the job is unknown: {answer.reason}"
    conflicts = [item for item in answer.disagreements if item.fact in ("condition", "run_id")]
    if conflicts:
        return f"sources disagree on {conflicts[0]}"
    if condition is JobCondition.RUNNING:
        return RUNS
    if not condition.at_rest:
        return f"the job is {condition.value}" + (f" ({facts.state})" if facts.state else "")
    if facts.action_in_progress or (
        condition is JobCondition.STOPPED and facts.running_desired is True
    ):
        return "the job is about to be started"
    ignored = facts.ignore_state_before_epoch
    if ignored is not None and checkpoint.epoch < ignored:
        return f"its next start ignores the epochs below {ignored}"
    if checkpoint.state is not CheckpointState.READY:
        return f"epoch {checkpoint.epoch} is {checkpoint.state.value}: the next start finishes it"
    return _why_committing(answer, checkpoint)


def _why_committing(answer: JobAnswer, checkpoint: Checkpoint) -> str | None:
    """Return whether the controller lists a later epoch that a start may restore and commit."""
    for row in answer.facts.checkpoints or ():
        later = row.epoch > checkpoint.epoch or (row.epoch == checkpoint.epoch and not row.ready)
        if not later or row.ready:
            continue
        if row.state == "committing" or (row.state is None and checkpoint.needs_commit):
            return f"epoch {row.epoch} may still have to be committed"
    return None


def epoch_to_rewrite(answer: JobAnswer, visible: Sequence[Epoch]) -> Epoch | None:
    """Return the epoch of the legacy layout that the next start restores, as far as is known.

    Args:
        visible: the existing epochs, ascending.

    Returns:
        The newest ready epoch that the controller names, or None if it does not exist. Without
        such a name, the newest existing epoch: the one before it stays restorable unchanged. None
        if there are no epochs.
    """
    named = answer.facts.newest_ready_epoch
    if named is None:
        return visible[-1] if visible else None
    return named if named in visible else None


# ---- what ----------------------------------------------------------------------------------------


def plan_table_rewrites(
    checkpoint: Checkpoint,
    facts: TableFacts,
    settings: CompactionSettings,
    part_bytes: Mapping[TableKey, Sequence[int]] | None = None,
) -> RewritePlan:
    """Choose what to rewrite at one epoch of an Arroyo job, without checking whether it may be.

    Args:
        part_bytes: the output bytes of each part of a table, where they were estimated; by default
            the bytes of its inputs, split evenly.

    Returns:
        A plan; `left_out` has the reason for every table that is not in it.

    Raises:
        InputError: a listed file is missing.
    """
    tables: list[TableRewrite] = []
    left_out: list[LeftOut] = []
    chooser = _Chooser(facts, settings)
    for operator in checkpoint.operators:
        for name, files in operator.tables.items():
            planned = chooser.table(operator, name, files)
            if isinstance(planned, str):
                left_out.append(LeftOut(operator=operator.operator, table=name, reason=planned))
            else:
                tables.append(planned)
    tables, too_much = within_budget(settings.budget, tables, lambda rewrite: rewrite.gain)
    expected = {(rewrite.operator, rewrite.table): _as_forecast(rewrite) for rewrite in tables}
    after = rewritten(
        checkpoint,
        {(one.operator, one.table): (one, expected[one.operator, one.table]) for one in tables},
    )
    sizes = dict(facts.sizes)
    for rewrite in tables:
        key = rewrite.operator, rewrite.table
        even = [rewrite.size_bytes // len(rewrite.parts)] * len(rewrite.parts)
        inspected = (part_bytes or {}).get(key, even)
        sizes |= zip((file.path for file in expected[key]), inspected, strict=True)
    return RewritePlan(
        pipeline=checkpoint.pipeline,
        job=checkpoint.job,
        epoch=checkpoint.epoch,
        worker_generation=checkpoint.worker_generation,
        ref=checkpoint.ref,
        tables=tuple(tables),
        left_out=(*left_out, *too_much),
        before=forecast(checkpoint, facts.sizes, settings.parallelism),
        after=forecast(after, sizes, settings.parallelism),
        parallelism=settings.parallelism,
    )


def _as_forecast(table: TableRewrite) -> tuple[TimeFile, ...]:
    """Return one expected file for each part, with a name that no store holds."""
    newest = max(source.file.max_timestamp_micros for source in table.inputs)
    epoch = max(source.file.epoch for source in table.inputs)
    return tuple(
        TimeFile(
            epoch=epoch,
            path=StatePath(f"forecast/{table.operator}/{table.table}/{index}"),
            min_routing_key=keys.start,
            max_routing_key=keys.end,
            max_timestamp_micros=newest,
            compaction_generation=table.compaction_generation,
        )
        for index, keys in enumerate(table.parts)
    )


def rewritten(
    checkpoint: Checkpoint, files: Mapping[TableKey, tuple[TableRewrite, Sequence[TimeFile]]]
) -> Checkpoint:
    """Return the epoch with the inputs of the given tables replaced by their new files."""
    operators = tuple(
        rewritten_operator(
            op, {name: new for (operator, name), new in files.items() if operator == op.operator}
        )
        for op in checkpoint.operators
    )
    return replace(checkpoint, operators=operators)


def whole_table(
    operator: OperatorCheckpoint,
    name: TableName,
    facts: TableFacts,
    parallelism: int | None = None,
) -> TableRewrite | str:
    """Return the rewrite of all files of one table, or the reason why it cannot be rewritten.

    Args:
        parallelism: the number of subtasks that they are split for; None = the operator's own.

    Raises:
        InputError: a listed file is missing.
    """
    settings = CompactionSettings(policy=CompactionPolicy.FULL, parallelism=parallelism)
    chooser = _Chooser(facts, settings)
    return chooser.table(operator, name, operator.tables[name], whole=True)


def rule_for(config: ExpiringTimeKeyConfig) -> RewriteRule | None:
    """Return the rule by which a restore loads an Arroyo table's rows; None for unknown tables.

    Source: crates/arroyo-worker/src/arrow/ (arroyo-state.md 5.6).
    """
    if config.generational:
        if config.description not in _AGGREGATES:
            return None
        keyed = bool(config.schema.hashed_indices)
        return RewriteRule.NEWEST if keyed else RewriteRule.UNKEYED
    if config.description in _JOINS:
        # A windowed join has the same table descriptions; a restore loads its rows one by one.
        return RewriteRule.BATCHES if config.retention_micros > 0 else RewriteRule.ROWS
    return RewriteRule.ROWS if config.description in _WINDOWS else None


@dataclass(frozen=True, slots=True)
class _Chooser:
    """The rules that choose the tables of one job to rewrite."""

    facts: TableFacts
    settings: CompactionSettings

    def table(
        self,
        operator: OperatorCheckpoint,
        name: TableName,
        files: TableFiles,
        *,
        whole: bool = False,
    ) -> TableRewrite | str:
        """Return the rewrite of one table, or the reason why it is not rewritten.

        Args:
            whole: rewrite it even where that makes no fewer files.
        """
        config = operator.configs.get(name)
        if not isinstance(files, ExpiringTimeKeyFiles):
            return SNAPSHOT
        if config is None or not isinstance(config.config, ExpiringTimeKeyConfig):
            return "its configuration is missing, or of another kind"
        rule = rule_for(config.config)
        if rule is None:
            return UNKNOWN_TABLE
        unwritable = self.facts.unwritable.get((operator.operator, name))
        if unwritable is not None:
            key = operator.operator, name
            unkeyed = {other: facts for other, facts in self.facts.unkeyed.items() if other == key}
            return "; ".join((unwritable, *restart_losses(unkeyed)))
        return self._expiring(operator, config, rule, files, whole=whole)

    def _expiring(
        self,
        operator: OperatorCheckpoint,
        config: TableConfig,
        rule: RewriteRule,
        files: ExpiringTimeKeyFiles,
        *,
        whole: bool,
    ) -> TableRewrite | str:
        assert isinstance(config.config, ExpiringTimeKeyConfig)
        subtasks = self.settings.parallelism or operator.parallelism
        inputs = [self._input(file) for file in sorted(files.files, key=lambda file: file.epoch)]
        chosen = self._chosen(inputs, rule, subtasks)
        if not chosen:
            return "it has no files"
        facts = self.facts.unkeyed.get((operator.operator, config.table))
        lost = facts.lost if facts is not None and rule is RewriteRule.UNKEYED else 0
        parts = self._parts(chosen, rule, subtasks)
        reason = None if whole else self._why_not(chosen, parts, rule, subtasks)
        if reason is not None and not lost:
            return reason
        # Arroyo reads row generations without applying the retention.
        cutoff = plan_read(config.config, files, operator.min_watermark_micros, managed=False)
        return TableRewrite(
            operator=operator.operator,
            table=config.table,
            rule=rule,
            inputs=tuple(chosen),
            parts=parts,
            parallelism=subtasks,
            cutoff_micros=cutoff.cutoff_micros,
            compaction_generation=1 + max(source.file.compaction_generation for source in chosen),
            lost_rows=lost,
        )

    def _input(self, file: TimeFile) -> RewriteInput:
        rewrite_input = self.facts.inputs.get(file.path)
        if rewrite_input is None:
            raise InputError(
                "a listed file has no known size; it may be missing",
                path=file.path,
                next_step="check the epoch; nothing is rewritten while a file is missing",
            )
        return rewrite_input

    def _chosen(
        self, files: Sequence[RewriteInput], rule: RewriteRule, subtasks: int
    ) -> list[RewriteInput]:
        whole = self.settings.policy is CompactionPolicy.FULL
        if whole or rule.aggregate:
            return list(files)
        small = self.settings.target_bytes * self.settings.small_share
        return [
            source
            for source in files
            if source.file.compaction_generation == 0
            or source.size_bytes < small
            or len(source.file.owners(subtasks)) > 1
        ]

    def _why_not(
        self,
        chosen: Sequence[RewriteInput],
        parts: Sequence[KeyRange],
        rule: RewriteRule,
        subtasks: int,
    ) -> str | None:
        if any(len(source.file.owners(subtasks)) > 1 for source in chosen):
            return None  # every subtask whose range it overlaps reads it and filters its rows
        fresh = sum(not is_rewritten(source.file.path) for source in chosen)
        if not fresh:
            return "all its files were already rewritten"
        if len(chosen) <= len(parts):
            return "it already has one file per subtask"
        if self.settings.policy is CompactionPolicy.FULL:
            return None
        if fresh < self.settings.min_files or 2 * fresh < len(chosen):
            return (
                f"fewer than {self.settings.min_files} files that were never rewritten, or fewer "
                "of them than of rewritten ones"
            )
        return None

    def _parts(
        self, chosen: Sequence[RewriteInput], rule: RewriteRule, subtasks: int
    ) -> tuple[KeyRange, ...]:
        owners = sorted({owner for source in chosen for owner in source.file.owners(subtasks)})
        return tuple(part for owner in owners for part in self._of_owner(chosen, owner, subtasks))

    def _of_owner(
        self, chosen: Sequence[RewriteInput], owner: int, subtasks: int
    ) -> Iterator[KeyRange]:
        """Yield the key range of a subtask, split where its files are too large for one part."""
        keys = range_for_server(owner, subtasks)
        inside = [source for source in chosen if _reaches(source.file, keys)]
        total = sum(source.size_bytes // len(source.file.owners(subtasks)) for source in inside)
        low = max(keys.start, min(source.file.min_routing_key for source in inside))
        high = min(keys.end, max(source.file.max_routing_key for source in inside))
        part_bytes = min(PART_BYTES, self.settings.part_bytes)
        count = min(-(-total // part_bytes) or 1, high - low + 1)
        cuts = [low + (high - low + 1) * index // count for index in range(1, count)]
        starts, ends = [keys.start, *cuts], [*(cut - 1 for cut in cuts), keys.end]
        yield from map(KeyRange, starts, ends)


def _reaches(file: TimeFile, keys: KeyRange) -> bool:
    return keys.intersects(file.min_routing_key, file.max_routing_key)


# ---- the metadata after a rewrite ----------------------------------------------------------------


def rewritten_operator(
    operator: OperatorCheckpoint,
    outputs: Mapping[TableName, tuple[TableRewrite, Sequence[TimeFile]]],
) -> OperatorCheckpoint:
    """Return an operator's metadata with the inputs of the given tables replaced by new files.

    Only the file lists of these tables change.

    Raises:
        InputError: the operator does not list every input, or already lists an output.
    """
    tables = dict(operator.tables)
    for name, (table, files) in outputs.items():
        listed = tables.get(name)
        assert isinstance(listed, ExpiringTimeKeyFiles)
        gone, new = set(table.paths), {file.path for file in files}
        if not gone <= set(listed.paths) or new & set(listed.paths) or len(new) != len(files):
            raise InputError(
                "new files do not match what the operator lists",
                operator=operator.operator,
                table=name,
                next_step="plan again; nothing was published",
            )
        kept = tuple(file for file in listed.files if file.path not in gone)
        tables[name] = replace(listed, files=(*files, *kept))
    return replace(operator, tables=tables)
