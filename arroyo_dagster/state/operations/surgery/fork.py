"""Fork: give a stopped Arroyo job the state of another job of the same SQL.

The other job is only read; it may run. Its data files are copied under new names below the stopped
job's epoch, whose metadata then lists them. Sinks keep the stopped job's own state.

Source: docs/spec/state-surgery.md, `The trick` and `Rules`.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from arroyo_dagster.errors import ConflictError, InputError, ProtocolError
from arroyo_dagster.state.codec.schema import memory_schema
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.lease import Leased
from arroyo_dagster.state.model.checkpoints import Checkpoint, CheckpointState, OperatorCheckpoint
from arroyo_dagster.state.model.ids import Epoch, StatePath, TableName
from arroyo_dagster.state.model.layout import JobPaths, rewritten_attempt
from arroyo_dagster.state.model.surgery.edits import Fork
from arroyo_dagster.state.model.surgery.plans import (
    EditOutcome,
    EditPlan,
    EditPrecondition,
    TableAction,
    TableStep,
    WatermarkStep,
)
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    GlobalKeyedFiles,
    TableConfig,
    TableFiles,
)
from arroyo_dagster.state.operations.catalog.hash_variant import find_hash_variant
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.catalog.query import chosen_epoch
from arroyo_dagster.state.operations.compaction.rewrite_preconditions import (
    JobSnapshot,
    check_not_cancelled,
    check_restorable,
    table_facts,
)
from arroyo_dagster.state.operations.gc.copies import digest_stored
from arroyo_dagster.state.operations.surgery.entries import plain_key, read_global_tables
from arroyo_dagster.state.operations.surgery.execute import (
    EditOptions,
    NewState,
    change_in_place,
)
from arroyo_dagster.state.operations.surgery.plan import (
    check_can_run,
    editable_snapshot,
    preconditions,
)
from arroyo_dagster.state.planning.compaction.rewrite import TableFacts, TableKey
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.known.catalogue import default_catalogue

_ONE_PARALLELISM = frozenset({"nexmark source state", "AsyncMapOperator state"})
"""Tables whose entries Arroyo restores wrongly, or not at all, at another parallelism."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkSource:
    """The job whose state is taken.

    Attributes:
        store: where it lies; may be the store of the other job.
        epoch: None = its newest visible epoch.
    """

    store: ObjectStore
    paths: JobPaths
    epoch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedFork:
    """A plan, and what its execution needs.

    Attributes:
        source: the epoch whose state is taken.
        carried: the tables that are copied.
        emptied: the tables that have no rows in the source.
    """

    plan: EditPlan
    snapshot: JobSnapshot
    facts: TableFacts
    source: Checkpoint
    carried: tuple[TableKey, ...]
    emptied: tuple[TableKey, ...]


def plan_fork(
    source: ForkSource, store: ObjectStore, paths: JobPaths, directory: JobDirectory
) -> EditPlan:
    """Plan to give a stopped Arroyo job the state of another one. Writes nothing: the dry run.

    Args:
        directory: the source of the stopped job's status.

    Raises:
        InputError: a job is a managed job; their operators or tables differ; both write one file;
            or a table cannot be restored at the other parallelism.
        NotFoundError: a job has no checkpoint, or the source has no such epoch.
        ProtocolError: the source's epoch does not pass verification, or its keys are hashed
            otherwise.
        FormatError: metadata or a file is broken.
        ConflictError: an earlier edit was interrupted; undo it first.
    """
    return _prepare(source, store, paths, directory).plan


def run_fork(
    source: ForkSource,
    store: ObjectStore,
    paths: JobPaths,
    directory: JobDirectory,
    options: EditOptions | None = None,
) -> EditOutcome:
    """Give a stopped Arroyo job the state of another job of the same SQL, in place.

    The source is only read. Nothing is deleted, and `run_undo` restores the job's own state until
    it is started. If it is interrupted, see `run_edit`.

    Args:
        directory: the source of the stopped job's status; asked again before each change.

    Raises:
        LeaseHeldError: another process maintains the job.
        ConflictError: the job changed or was started meanwhile; the source's epoch expired or
            changed while it was copied; another plan was approved; or the fork was cancelled.
        InputError, NotFoundError, ProtocolError, FormatError: as `plan_fork`.
    """
    chosen = options or EditOptions(owner="arroyo-state fork")
    prepared = _prepare(source, store, paths, directory)
    check_can_run(paths, prepared.snapshot, prepared.plan, chosen.approved)
    pinned = replace(source, epoch=prepared.source.epoch)

    def write(held: Leased, again: PreparedFork) -> NewState:
        copies = _copied(pinned, held, paths, again)
        check_not_cancelled(paths, chosen.cancelled)
        _check_source_unchanged(pinned, again.source)
        operators = again.snapshot.checkpoint.operators
        return NewState(tuple(_forked(again, one, copies) for one in operators))

    return change_in_place(
        store,
        paths,
        directory,
        prepared,
        lambda held: _prepare(pinned, held, paths, directory),
        write,
        chosen,
    )


# ---- planning ------------------------------------------------------------------------------------


def _prepare(
    source: ForkSource, store: ObjectStore, paths: JobPaths, directory: JobDirectory
) -> PreparedFork:
    taken = _read_source(source)
    request = Fork(source=source.paths.root, epoch=taken.epoch)
    snapshot = editable_snapshot(store, paths, directory, request)
    if (source.store.url, source.paths) == (store.url, paths):
        raise InputError(
            "the job would be forked into itself", job=paths.root, next_step="name another job"
        )
    facts = table_facts(store, snapshot)
    match = _Match(source, taken, store, paths, snapshot.checkpoint)
    match.compare()
    answer = snapshot.answer.facts
    checkpoint = snapshot.checkpoint
    plan = EditPlan(
        pipeline=checkpoint.pipeline,
        job=checkpoint.job,
        edit=request,
        epoch=checkpoint.epoch,
        worker_generation=checkpoint.worker_generation,
        ref=checkpoint.ref,
        condition=answer.condition,
        run_id=answer.run_id,
        why_not=snapshot.why_not,
        tables=tuple(match.steps),
        watermarks=tuple(match.watermarks()),
        preconditions=(*preconditions(snapshot, facts), *match.evidence()),
        unknown=tuple(dict.fromkeys(match.unknown)),
        duplicate_outputs=(
            f"if {source.paths.root} goes on, rows that it reads after epoch {taken.epoch} are "
            "processed by both jobs: each writes their outputs to its own sinks",
        ),
        missing_outputs=(
            "the job's own state and positions are replaced: rows that it has read and not emitted "
            "are never emitted, unless the other job's state holds them",
        ),
        objects={path: hashlib.sha256(data).hexdigest() for path, data in snapshot.objects.items()},
    )
    return PreparedFork(
        plan=plan,
        snapshot=snapshot,
        facts=facts,
        source=taken,
        carried=tuple(_keys(match.steps, TableAction.CARRIED)),
        emptied=tuple(_keys(match.steps, TableAction.EMPTIED)),
    )


def _keys(steps: Sequence[TableStep], action: TableAction) -> Iterator[TableKey]:
    return ((one.operator, one.table) for one in steps if one.action is action)


def _read_source(source: ForkSource) -> Checkpoint:
    backend = ParquetBackend(source.store, source.paths)
    epoch = chosen_epoch(source.store, source.paths, backend.epochs(), source.epoch)
    found = backend.load(epoch)
    if found.progress is not None:
        raise InputError("the source is a managed job", job=source.paths.root)
    if found.state is not CheckpointState.READY:
        raise InputError(
            f"epoch {epoch} of the source is {found.state.value}: its sinks have not committed it",
            job=source.paths.root,
            epoch=epoch,
            next_step="wait until it is ready, or name an older epoch with --epoch",
        )
    check_restorable(source.store, source.paths, epoch, 1)
    return found


def _check_source_unchanged(source: ForkSource, taken: Checkpoint) -> None:
    """Check that the source's epoch is what it was before its files were copied."""
    now = ParquetBackend(source.store, source.paths).load(taken.epoch)
    if now.operators != taken.operators:
        raise ConflictError(
            "the source's epoch was written anew while it was copied",
            job=source.paths.root,
            epoch=taken.epoch,
            retryable=True,
            next_step="run it again; nothing was published",
        )


@dataclass(slots=True)
class _Match:
    """Compares the tables of two jobs of the same SQL."""

    source: ForkSource
    taken: Checkpoint
    store: ObjectStore
    paths: JobPaths
    target: Checkpoint
    steps: list[TableStep] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def compare(self) -> None:
        self._check_operators()
        self._check_sinks()
        for operator in self.target.operators:
            other = self._other(operator)
            for name in dict.fromkeys((*other.tables, *operator.tables)):
                self.steps.append(self._step(other, operator, name))
            if other.parallelism != operator.parallelism:
                self.unknown.append(
                    f"{operator.operator}: a fork from parallelism {other.parallelism} to "
                    f"{operator.parallelism} was not tried on a real Arroyo; a restart at another "
                    "parallelism was"
                )
        if self.source.paths.layout is not self.paths.layout:
            self.unknown.append(
                "a fork into the other layout was not tried on a real Arroyo; forks within each "
                "layout were"
            )

    def _other(self, operator: OperatorCheckpoint) -> OperatorCheckpoint:
        found = self.taken.operator(operator.operator)
        assert found is not None
        return found

    def _check_operators(self) -> None:
        ours = {one.operator for one in self.target.operators}
        theirs = {one.operator for one in self.taken.operators}
        if ours != theirs:
            raise InputError(
                "the jobs have other operators, so they are not of the same SQL",
                job=self.paths.root,
                only_in_source=", ".join(sorted(theirs - ours)) or "none",
                only_in_job=", ".join(sorted(ours - theirs)) or "none",
                next_step="fork into a job that was created from the source's SQL",
            )

    def _check_sinks(self) -> None:
        """Refuse two jobs that write one file: each would cut off what the other has written."""
        written = [
            {
                plain_key(table, key)
                for table in read_global_tables(store, checkpoint, default_catalogue())
                if table.config.config.description == "file_sink"
                for _, key, _ in table.entries()
            }
            for store, checkpoint in (
                (self.source.store, self.taken),
                (self.store, self.target),
            )
        ]
        both = sorted(written[0] & written[1])
        if both:
            raise InputError(
                f"both jobs write the file {both[0]}: at its start the job would cut off what the "
                "source has written",
                job=self.paths.root,
                next_step="create the job with another output path",
            )

    def _step(
        self, other: OperatorCheckpoint, operator: OperatorCheckpoint, name: TableName
    ) -> TableStep:
        theirs, ours = other.tables.get(name), operator.tables.get(name)
        now = () if ours is None else ours.paths
        if _of_sink(operator, name) or _of_sink(other, name):
            reason = "a sink's state means nothing to another job: the job keeps its own"
            action = TableAction.KEPT
        elif theirs is None:
            reason = f"the source has no rows of it at epoch {self.taken.epoch}"
            action = TableAction.EMPTIED
        else:
            self._check_table(other, operator, name)
            reason = f"{len(theirs.paths)} files of epoch {self.taken.epoch} of the source"
            if ours is None:
                reason += "; the job has no such table yet, so its columns are the source's"
            action = TableAction.CARRIED
            now = theirs.paths
        return TableStep(
            operator=operator.operator, table=name, action=action, reason=reason, files=now
        )

    def _check_table(
        self, other: OperatorCheckpoint, operator: OperatorCheckpoint, name: TableName
    ) -> None:
        theirs, ours = other.configs.get(name), operator.configs.get(name)
        if theirs is None:
            raise InputError(
                "a table of the source has no configuration",
                operator=operator.operator,
                table=name,
            )
        if ours is not None and ours != theirs:
            raise InputError(
                f"the table is another one in the source: {_difference(theirs, ours)}",
                operator=operator.operator,
                table=name,
                next_step="fork into a job that was created from the source's SQL",
            )
        moved = other.parallelism != operator.parallelism
        if moved and _needs_same_parallelism(other, name, theirs):
            raise InputError(
                f"entries of this table cannot be restored at parallelism {operator.parallelism}, "
                f"only at {other.parallelism}",
                operator=operator.operator,
                table=name,
                next_step=f"give the job the parallelism {other.parallelism}, let it take a "
                "checkpoint, and stop it again",
            )

    def watermarks(self) -> Iterator[WatermarkStep]:
        for operator in self.target.operators:
            before, after = operator.min_watermark_micros, self._other(operator)
            if before != after.min_watermark_micros:
                yield WatermarkStep(
                    operator=operator.operator,
                    before_micros=before,
                    after_micros=after.min_watermark_micros,
                )

    def evidence(self) -> Iterator[EditPrecondition]:
        """Yield what the comparison has shown.

        Raises:
            ProtocolError: the keys of the two jobs are hashed by different builds.
        """
        count = len(self.target.operators)
        yield EditPrecondition(
            name="both jobs have the same operators and tables",
            met=True,
            evidence=f"{count} operators by id; configurations and columns are equal",
        )
        theirs = find_hash_variant(self.source.store, self.taken)
        ours = find_hash_variant(self.store, self.target)
        if not set(theirs.possible) & set(ours.possible):
            raise ProtocolError(
                "the keys of the jobs are hashed by different builds of Arroyo",
                job=self.paths.root,
                source=theirs.summary,
                found=ours.summary,
                next_step="run both jobs on builds for the same kind of processor",
            )
        if ours.variant is None:
            self.unknown.append(
                "the job has no row of its own that shows how its build hashes keys"
            )
        yield EditPrecondition(
            name="both jobs hash keys alike", met=True, evidence=f"source: {theirs.summary}"
        )


def _of_sink(operator: OperatorCheckpoint, name: TableName) -> bool:
    config = operator.configs.get(name)
    if operator.operator.startswith("sink_") or config is None:
        return config is not None
    owner = default_catalogue().owner_of(operator.operator, config) or ""
    return config.uses_two_phase_commit or "sink" in owner


def _needs_same_parallelism(
    other: OperatorCheckpoint, name: TableName, config: TableConfig
) -> bool:
    if not isinstance(other.tables[name], GlobalKeyedFiles):
        return False
    known = default_catalogue().describe(other.operator, config)
    return known is None or config.config.description in _ONE_PARALLELISM


def _difference(theirs: TableConfig, ours: TableConfig) -> str:
    """Return how two configurations differ, for people."""
    if isinstance(theirs.config, ExpiringTimeKeyConfig) and isinstance(
        ours.config, ExpiringTimeKeyConfig
    ):
        columns = [memory_schema(one).to_string() for one in (theirs.config, ours.config)]
        if columns[0] != columns[1]:
            shown = [one.replace("\n", ", ") for one in columns]
            return f"its columns are ({shown[0]}), and here ({shown[1]})"
        if theirs.config.retention_micros != ours.config.retention_micros:
            return (
                f"its retention is {theirs.config.retention_micros} microseconds, and here "
                f"{ours.config.retention_micros}"
            )
    return "its kind, description, keys or version of values differ"


# ---- execution -----------------------------------------------------------------------------------


def _copied(
    source: ForkSource, held: ObjectStore, paths: JobPaths, prepared: PreparedFork
) -> Mapping[StatePath, StatePath]:
    """Copy the source's files under new names, and prove that each copy has the same bytes.

    Raises:
        NotFoundError: a file expired meanwhile.
        ProtocolError: a copy differs.
    """
    checkpoint = prepared.snapshot.checkpoint
    names: dict[StatePath, StatePath] = {}
    for operator, table in prepared.carried:
        found = prepared.source.operator(operator)
        assert found is not None
        for at, path in enumerate(found.tables[table].paths):
            names[path] = paths.data_file(
                operator,
                table,
                at,
                checkpoint.epoch,
                checkpoint.worker_generation,
                attempt=rewritten_attempt(uuid.uuid4().hex),
            )

    def copy(path: StatePath) -> None:
        if source.store.url == held.url:
            held.copy(path, names[path])
        else:
            held.put(names[path], source.store.read(path))
        if digest_stored(held, names[path]) != digest_stored(source.store, path):
            raise ProtocolError(
                "a copy reads back different from its original; nothing was published",
                path=names[path],
                original=path,
            )

    concurrently(copy, list(names))
    return names


def _forked(
    prepared: PreparedFork, operator: OperatorCheckpoint, copies: Mapping[StatePath, StatePath]
) -> OperatorCheckpoint:
    """Return the operator with the source's tables and watermarks; its epoch, parallelism and sink
    tables stay its own.
    """
    other = prepared.source.operator(operator.operator)
    assert other is not None
    tables, configs = dict(operator.tables), dict(operator.configs)
    for at, name in prepared.emptied:
        if at == operator.operator:
            del tables[name]
            configs.pop(name, None)
    for at, name in prepared.carried:
        if at == operator.operator:
            tables[name] = _renamed(other.tables[name], copies, operator.epoch)
            configs[name] = other.configs[name]
    return replace(
        operator,
        tables=tables,
        configs=configs,
        min_watermark_micros=other.min_watermark_micros,
        max_watermark_micros=other.max_watermark_micros,
    )


def _renamed(files: TableFiles, copies: Mapping[StatePath, StatePath], epoch: Epoch) -> TableFiles:
    """Return a list of files under their new names, in the order in which a restore reads them."""
    if isinstance(files, GlobalKeyedFiles):
        # Commit data stays with the sinks, whose tables are not carried.
        return replace(files, files=tuple(copies[path] for path in files.files))
    assert isinstance(files, ExpiringTimeKeyFiles)
    # A subtask takes a file of a later epoch than its own for one that it has just written. Sorted
    # by the source's epochs first, files of equal epochs keep their order.
    ordered = sorted(files.files, key=lambda one: one.epoch)
    levels = {one.compaction_generation for one in ordered}
    # With the order of epochs lost, a file beside a compacted one would look like its input.
    one_level = max(levels) if ordered and ordered[-1].epoch > epoch and len(levels) > 1 else None
    return replace(
        files,
        files=tuple(
            replace(
                one,
                path=copies[one.path],
                epoch=Epoch(min(one.epoch, epoch)),
                compaction_generation=one.compaction_generation if one_level is None else one_level,
            )
            for one in ordered
        ),
    )
