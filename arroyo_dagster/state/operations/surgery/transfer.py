"""Give a stopped Arroyo job the state of another job, or of an older epoch of its own: what `fork`,
`evolve` and `rollback` have in common.

The source is only read; another job may run. Its data files are copied, or converted to other
columns, under new names below the stopped job's epoch, whose metadata then lists them: Arroyo's
cleanup deletes files of an older epoch, even if a newer one lists them again. Sinks of another job
are not taken.

Source: docs/spec/state-surgery.md, `The trick` and `Rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from arroyo_dagster.errors import ConflictError, InputError, ProtocolError
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.lease import Leased
from arroyo_dagster.state.model.checkpoints import Checkpoint, CheckpointState, OperatorCheckpoint
from arroyo_dagster.state.model.ids import Epoch, OperatorId, StatePath, TableName
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.surgery.edits import AnyEdit
from arroyo_dagster.state.model.surgery.evolve import OperatorMatch
from arroyo_dagster.state.model.surgery.plans import (
    EditOutcome,
    EditPlan,
    EditPrecondition,
    TableAction,
    TableStep,
    WatermarkStep,
)
from arroyo_dagster.state.model.tables import ExpiringTimeKeyFiles
from arroyo_dagster.state.operations.catalog.hash_variant import find_hash_variant
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.catalog.query import chosen_epoch
from arroyo_dagster.state.operations.compaction.rewrite_preconditions import (
    JobSnapshot,
    check_not_cancelled,
    check_restorable,
    table_facts,
    unkeyed_facts,
)
from arroyo_dagster.state.operations.surgery.carried_files import (
    CarriedTable,
    CarriedTables,
    StateSource,
    WrittenFiles,
    without_rows,
)
from arroyo_dagster.state.operations.surgery.create import (
    begun_snapshot,
    created_plan,
    publish_created,
)
from arroyo_dagster.state.operations.surgery.entries import plain_key, read_global_tables
from arroyo_dagster.state.operations.surgery.execute import (
    ChangeSteps,
    EditOptions,
    NewState,
    execute_change,
)
from arroyo_dagster.state.operations.surgery.plan import (
    bare_plan,
    check_can_run,
    editable_snapshot,
    preconditions,
)
from arroyo_dagster.state.planning.compaction.rewrite import TableFacts, TableKey, restart_losses
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectInfo, ObjectStore
from arroyo_dagster.state.tables.known.catalogue import default_catalogue

WatermarkBounds = tuple[int | None, int | None]
"""The smallest and the largest watermark of an operator's subtasks."""


@dataclass(frozen=True, slots=True)
class TwoJobs:
    """The epoch of the source whose state is taken, and the stopped job that gets it.

    Attributes:
        committed: the epoch of the stopped job that Arroyo names as ready; None = not reported.
    """

    source: StateSource
    taken: Checkpoint
    store: ObjectStore
    paths: JobPaths
    target: Checkpoint
    committed: Epoch | None = None


@dataclass(slots=True, kw_only=True)
class Transfer:
    """What becomes of the stopped job, as `fork`, `evolve` or `rollback` decides it.

    Attributes:
        watermarks: the new ones of each operator of the job; others keep theirs.
    """

    steps: list[TableStep] = field(default_factory=list)
    carried: list[CarriedTable] = field(default_factory=list)
    matches: tuple[OperatorMatch, ...] = ()
    watermarks: dict[OperatorId, WatermarkBounds] = field(default_factory=dict)
    evidence: list[EditPrecondition] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    duplicate_outputs: list[str] = field(default_factory=list)
    missing_outputs: list[str] = field(default_factory=list)


StoredFiles = Mapping[StatePath, ObjectInfo | None]
"""Data files by path, as the store describes them; None if one does not exist."""

Decide = Callable[[TwoJobs], Transfer]
"""Decides what becomes of each table; raises if the jobs do not match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTransfer:
    """A plan, and what its execution needs.

    Attributes:
        source: the epoch whose state is taken.
        found: its files as they were before they were verified; None = missing.
        emptied: the tables of the job that have no rows any more.
    """

    plan: EditPlan
    snapshot: JobSnapshot
    facts: TableFacts
    source: Checkpoint
    found: StoredFiles
    transfer: Transfer
    emptied: tuple[TableKey, ...]

    @property
    def inputs(self) -> CarriedTables:
        """The tables that are carried, with the epoch that has their files."""
        return CarriedTables(self.source, tuple(self.transfer.carried))


@dataclass(frozen=True, slots=True)
class TransferJob:
    """The two jobs of a transfer, and what decides about their tables.

    Attributes:
        request: the edit that the plan names, from the path and the epoch of the source.
        create: whether the stopped job has no epoch, so that its first one is created.
        goes_back: whether the source is an older epoch of the job. Files of its newest one may be
            missing.
    """

    source: StateSource
    paths: JobPaths
    directory: JobDirectory
    request: Callable[[StatePath, Epoch], AnyEdit]
    decide: Decide
    create: bool = False
    goes_back: bool = False

    def prepare(self, store: ObjectStore) -> PreparedTransfer:
        """Plan the transfer, and return what its execution needs.

        Args:
            store: of the stopped job.

        Raises:
            InputError, NotFoundError, ProtocolError, FormatError, ConflictError: as `plan_fork`.
        """
        source, paths = self.source, self.paths
        taken, stored = _read_source(source)
        request = self.request(source.paths.root, taken.epoch)
        if not self.goes_back and (source.store.url, source.paths) == (store.url, paths):
            raise InputError(
                "the job would be forked into itself",
                job=paths.root,
                next_step=f"go back with `arroyo-state rollback {paths.root}`, or name another job",
            )
        if self.create:
            snapshot = begun_snapshot(store, paths, self.directory, taken)
        else:
            snapshot = editable_snapshot(store, paths, self.directory, request)
        facts = _facts(stored) if self.goes_back else table_facts(store, snapshot)
        committed = snapshot.answer.facts.newest_ready_epoch
        jobs = TwoJobs(source, taken, store, paths, snapshot.checkpoint, committed)
        transfer = self.decide(jobs)
        if not self.goes_back:
            _check_sinks(jobs)
            _add_outputs(jobs, transfer)
            _add_hash_evidence(jobs, transfer)
        transfer.unknown += _written_later(source, taken, stored)
        carried = {table.source for table in transfer.carried}
        unkeyed = unkeyed_facts(source.store, taken)
        transfer.missing_outputs += restart_losses(
            {key: facts for key, facts in unkeyed.items() if key in carried}
        )
        emptied = [step for step in transfer.steps if step.action is TableAction.EMPTIED]
        plan = _plan(jobs, request, snapshot, facts, transfer)
        return PreparedTransfer(
            plan=created_plan(plan, snapshot, taken, transfer.evidence) if self.create else plan,
            snapshot=snapshot,
            facts=facts,
            source=taken,
            found=stored,
            transfer=transfer,
            emptied=tuple((step.operator, step.table) for step in emptied),
        )

    def run(self, store: ObjectStore, options: EditOptions) -> EditOutcome:
        """Carry out the transfer in place. Errors: `run_fork`."""
        prepared = self.prepare(store)
        check_can_run(self.paths, prepared.snapshot, prepared.plan, options.approved)
        pinned = replace(self, source=replace(self.source, epoch=prepared.source.epoch))

        def write(held: Leased, again: PreparedTransfer) -> NewState:
            written = WrittenFiles.of(pinned.source, held, again.snapshot.checkpoint, again.inputs)
            check_not_cancelled(self.paths, options.cancelled)
            _check_source_unchanged(pinned.source, again)
            operators = again.snapshot.checkpoint.operators
            return NewState(tuple(_with_state(held, again, op, written) for op in operators))

        change = ChangeSteps(pinned.prepare, write, publish_created if self.create else None)
        return execute_change(store, self.paths, self.directory, prepared, change, options)


# ---- planning ------------------------------------------------------------------------------------


def _plan(
    jobs: TwoJobs,
    request: AnyEdit,
    snapshot: JobSnapshot,
    facts: TableFacts,
    transfer: Transfer,
) -> EditPlan:
    return replace(
        bare_plan(snapshot, request),
        tables=tuple(transfer.steps),
        matches=transfer.matches,
        watermarks=tuple(_watermark_steps(snapshot.checkpoint, transfer)),
        preconditions=(*preconditions(snapshot, facts), *transfer.evidence),
        unknown=tuple(dict.fromkeys((*transfer.unknown, *_not_tried(jobs)))),
        duplicate_outputs=tuple(transfer.duplicate_outputs),
        missing_outputs=tuple(transfer.missing_outputs),
    )


def _add_outputs(jobs: TwoJobs, transfer: Transfer) -> None:
    """Say first what outputs show because the state is another job's."""
    root, epoch = jobs.source.paths.root, jobs.taken.epoch
    transfer.duplicate_outputs[:0] = [
        f"if {root} goes on, rows that it reads after epoch {epoch} are processed by both jobs: "
        "each writes their outputs to its own sinks",
        "outputs that the job has written itself stay in its sinks",
    ]
    transfer.missing_outputs[:0] = [
        "the job's own state and positions are replaced: rows that it has read and not emitted are "
        "never emitted, unless the other job's state holds them"
    ]


def _watermark_steps(checkpoint: Checkpoint, transfer: Transfer) -> Iterator[WatermarkStep]:
    for operator in checkpoint.operators:
        before = operator.min_watermark_micros
        after, _ = transfer.watermarks.get(operator.operator, (before, None))
        if before != after:
            yield WatermarkStep(
                operator=operator.operator, before_micros=before, after_micros=after
            )


def _not_tried(jobs: TwoJobs) -> Iterator[str]:
    if jobs.source.paths.layout is not jobs.paths.layout:
        yield (
            "a fork into the other layout was not tried on a real Arroyo; forks within each layout "
            "were"
        )


def _stored(store: ObjectStore, checkpoint: Checkpoint) -> StoredFiles:
    paths = list(dict.fromkeys(checkpoint.paths))
    return dict(zip(paths, concurrently(store.head, paths), strict=True))


def _facts(stored: StoredFiles) -> TableFacts:
    """Return facts about the files that are taken, where none of the job's own is needed."""
    sizes = {path: info.size_bytes for path, info in stored.items() if info is not None}
    return TableFacts(sizes=sizes, inputs={}, unkeyed={}, unwritable={})


def _written_later(source: StateSource, taken: Checkpoint, found: StoredFiles) -> Iterator[str]:
    """Name files that were written after the metadata that lists them, by the store's clock.

    Global keyed tables have no statistics that would show other contents.
    """
    if taken.worker_generation is not None:
        return  # in the protocol layout each run has names of its own
    names = (source.paths.operator_metadata(op.operator, taken.epoch) for op in taken.operators)
    described = concurrently(source.store.head, [taken.ref, *names])
    times = [info.modified_micros or 0 for info in described if info is not None]
    later = [
        path
        for path, info in found.items()
        if info is not None and (info.modified_micros or 0) > max(times, default=0)
    ]
    if later:
        yield (
            f"{len(later)} files of epoch {taken.epoch} of {source.paths.root} were written after "
            f"its metadata, such as {later[0]}: the job is a copy, or a run that was started "
            "without state has used their names again, and they do not hold the epoch's state"
        )


def _read_source(source: StateSource) -> tuple[Checkpoint, StoredFiles]:
    backend = ParquetBackend(source.store, source.paths)
    epoch = chosen_epoch(source.store, source.paths, backend.epochs(), source.epoch)
    loaded = backend.load(epoch)
    if loaded.progress is not None:
        raise InputError(
            "the source is a managed job",
            job=source.paths.root,
            next_step="name an Arroyo job; `arroyo-state copy` copies a managed one",
        )
    if loaded.state is not CheckpointState.READY:
        raise InputError(
            f"epoch {epoch} of the source is {loaded.state.value}: its sinks have not committed it",
            job=source.paths.root,
            epoch=epoch,
            next_step="wait until it is ready, or name an older epoch",
        )
    files = _stored(source.store, loaded)
    check_restorable(source.store, source.paths, epoch, 1)
    return loaded, files


def _check_source_unchanged(source: StateSource, prepared: PreparedTransfer) -> None:
    """Check that the source's epoch is what it was before its files were verified and copied.

    A run of the legacy layout that ignored the state gives the names of old files again.
    """
    taken = prepared.source
    now = ParquetBackend(source.store, source.paths).load(taken.epoch)
    if now.operators != taken.operators or _stored(source.store, taken) != prepared.found:
        raise ConflictError(
            "the source's epoch was written anew while it was copied",
            job=source.paths.root,
            epoch=taken.epoch,
            retryable=True,
            next_step="run it again; nothing was published",
        )


def _check_sinks(jobs: TwoJobs) -> None:
    """Refuse two jobs that write one file: each would cut off what the other has written."""
    sides = ((jobs.source.store, jobs.taken), (jobs.store, jobs.target))
    written = [entry_keys(store, checkpoint, "file_sink") for store, checkpoint in sides]
    both = sorted(written[0] & written[1])
    if both:
        raise InputError(
            f"both jobs write the file {both[0]}: at its start the job would cut off what the "
            "source has written",
            job=jobs.paths.root,
            next_step="create the job with another output path",
        )


def entry_keys(
    store: ObjectStore, checkpoint: Checkpoint, description: str, operator: str | None = None
) -> set[str]:
    """Return the keys of the global keyed tables with a description, as JSON texts.

    Args:
        operator: only of this operator; None = of all.
    """
    return {
        plain_key(table, key)
        for table in read_global_tables(store, checkpoint, default_catalogue())
        if table.config.config.description == description
        and operator in (None, table.operator.operator)
        for _, key, _ in table.entries()
    }


def _add_hash_evidence(jobs: TwoJobs, transfer: Transfer) -> None:
    """Add the evidence that the keys of the two jobs are hashed by the same build."""
    theirs = find_hash_variant(jobs.source.store, jobs.taken)
    ours = find_hash_variant(jobs.store, jobs.target)
    if not set(theirs.possible) & set(ours.possible):
        raise ProtocolError(
            "the keys of the jobs are hashed by different builds of Arroyo",
            job=jobs.paths.root,
            source=theirs.summary,
            found=ours.summary,
            next_step="run both jobs on builds for the same kind of processor",
        )
    if ours.variant is None:
        transfer.unknown.append(
            "the job has no row of its own that shows how its build hashes keys"
        )
    transfer.evidence.append(
        EditPrecondition(
            name="both jobs hash keys alike", met=True, evidence=f"source: {theirs.summary}"
        )
    )


def of_sink(operator: OperatorCheckpoint, name: TableName) -> bool:
    """Whether a table belongs to a sink, whose state means nothing to another job."""
    config = operator.configs.get(name)
    if operator.operator.startswith("sink_") or config is None:
        return config is not None
    owner = default_catalogue().owner_of(operator.operator, config) or ""
    return config.uses_two_phase_commit or "sink" in owner


def parallelism_not_tried(other: OperatorCheckpoint, operator: OperatorCheckpoint) -> Iterator[str]:
    """Yield what is not known of a state that moves to another parallelism."""
    if other.parallelism != operator.parallelism:
        yield (
            f"{operator.operator}: state of parallelism {other.parallelism} was not given to "
            f"{operator.parallelism} subtasks on a real Arroyo; a restart at another parallelism "
            "was tried"
        )


# ---- execution -----------------------------------------------------------------------------------


def _with_state(
    held: ObjectStore,
    prepared: PreparedTransfer,
    operator: OperatorCheckpoint,
    written: WrittenFiles,
) -> OperatorCheckpoint:
    """Return the operator with the source's tables and watermarks; its epoch, parallelism and sink
    tables stay its own.
    """
    empty = [name for owner, name in prepared.emptied if owner == operator.operator]
    tables, configs = dict(operator.tables), dict(operator.configs)
    for table in prepared.transfer.carried:
        if table.target[0] != operator.operator:
            continue
        name = table.target[1]
        files = written.listed(table.target, prepared.inputs.files_of(table), operator.epoch)
        tables[name], configs[name] = files, table.config
        if isinstance(files, ExpiringTimeKeyFiles) and not files.files:
            empty.append(name)
    own = operator.min_watermark_micros, operator.max_watermark_micros
    least, most = prepared.transfer.watermarks.get(operator.operator, own)
    carried = replace(
        operator,
        tables=tables,
        configs=configs,
        min_watermark_micros=least,
        max_watermark_micros=most,
    )
    return without_rows(held, prepared.snapshot.checkpoint, carried, empty)
