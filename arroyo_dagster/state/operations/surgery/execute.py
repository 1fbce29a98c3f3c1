"""Execute an edit of a stopped Arroyo job: write new files, prove them, publish in place.

The order is that of a rewrite (`operations.compaction.rewrite`): nothing is overwritten before
every new file was read back, and the epoch as it would be was verified. Nothing is deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from arroyo_dagster.errors import FormatError, NotFoundError, ProtocolError
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.lease import Leased, LeasedOperation, LeaseOptions, lease
from arroyo_dagster.state.model.changes import ChangeKind
from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.compaction import LeftOut
from arroyo_dagster.state.model.ids import Epoch, StatePath
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.rewrite import QuietSettings, RewriteShard
from arroyo_dagster.state.model.surgery.edits import Edit, Rescale
from arroyo_dagster.state.model.surgery.plans import EditOutcome, EditPlan
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    TimeFile,
)
from arroyo_dagster.state.operations.catalog.job_directory import JobDirectory
from arroyo_dagster.state.operations.compaction.execute import check_same
from arroyo_dagster.state.operations.compaction.rewrite import RunRewrites, rewrite_here
from arroyo_dagster.state.operations.compaction.rewrite_preconditions import (
    JobSnapshot,
    Unchanged,
    check_not_cancelled,
    check_restorable,
    wait_until_quiet,
)
from arroyo_dagster.state.operations.compaction.rewrite_publish import (
    change_record,
    encoded_objects,
    publish_change,
)
from arroyo_dagster.state.operations.surgery.entries import write_entries
from arroyo_dagster.state.operations.surgery.plan import (
    PreparedEdit,
    check_can_run,
    prepare_edit,
    request_of,
    with_lists,
)
from arroyo_dagster.state.operations.surgery.rescale import check_rescaled
from arroyo_dagster.state.operations.surgery.rows import RewrittenRows, count_rows
from arroyo_dagster.state.planning.compaction.rewrite import TableFacts, TableKey
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.merge.rewrite import RewriteTask


@dataclass(frozen=True, slots=True, kw_only=True)
class EditOptions(LeasedOperation, QuietSettings):
    """Options of an edit.

    Attributes:
        approved: the digest of the plan that a person has reviewed; None = not asked for.
        verify_level: the level at which the epoch as it would be published is verified before.
        run: rewrites shards of expiring tables, in this process or on Spark.
        cancelled: whether to give up; called between the shards and before each change of metadata.
        on_published: called with the outcome, before an interrupt can arrive.
    """

    approved: str | None = None
    owner: str = "arroyo-state edit"
    verify_level: int = 2
    run: RunRewrites = rewrite_here
    cancelled: Callable[[], bool] = lambda: False
    on_published: Callable[[EditOutcome], None] = lambda outcome: None


def run_edit(
    store: ObjectStore,
    paths: JobPaths,
    directory: JobDirectory,
    edit: Edit,
    options: EditOptions | None = None,
) -> EditOutcome:
    """Edit the state of a stopped Arroyo job, in place.

    It deletes nothing and records the original metadata: `run_undo` restores it until the job is
    started. If it is interrupted, the epoch holds the old state or the new one; in the legacy
    layout, where each operator has its own metadata, possibly some operators each. Then `verify`
    reports `edit-unfinished`, and every further edit is refused until that one is undone.

    Args:
        directory: the source of the job's status; asked again before each change.

    Raises:
        InputError: the job is not at rest, no source reports its status, or it is a managed job; or
            the edit does not fit its tables.
        LeaseHeldError: another process maintains the job.
        ConflictError: the job changed or was started meanwhile; another plan was approved; an
            earlier edit was interrupted; or this one was cancelled.
        ProtocolError: the new files would not restore what they should, or the epoch would not pass
            verification; nothing was published.
        NotFoundError, FormatError: the epoch, or a file of it, is missing or broken.
    """
    run_options = options or EditOptions()
    prepared = prepare_edit(store, paths, directory, edit)
    check_can_run(paths, prepared.snapshot, prepared.plan, run_options.approved)
    if prepared.plan.empty:
        return EditOutcome(plan=prepared.plan)

    def write(held: Leased, again: PreparedEdit) -> NewState:
        lists, shards = _written(held, paths, again, run_options)
        operators = tuple(with_lists(operator, lists) for operator in again.operators)
        return NewState(operators, shards, tuple(_evidence(held, again, operators)))

    change = ChangeSteps(lambda held: prepare_edit(held, paths, directory, edit), write)
    return execute_change(store, paths, directory, prepared, change, run_options)


class PreparedChange(Protocol):
    """What is known of a change before it is executed."""

    @property
    def plan(self) -> EditPlan:
        """The plan."""

    @property
    def snapshot(self) -> JobSnapshot:
        """The job as it was when the plan was made."""

    @property
    def facts(self) -> TableFacts:
        """Its tables."""


P = TypeVar("P", bound=PreparedChange)


@dataclass(frozen=True, slots=True)
class NewState:
    """The operators of an epoch as they will be, in its order, and the shards written for them.

    Attributes:
        evidence: what the new files were found to load.
    """

    operators: tuple[OperatorCheckpoint, ...]
    shards: tuple[RewriteShard, ...] = ()
    evidence: tuple[str, ...] = ()


Publish = Callable[[Leased, Unchanged, EditPlan, NewState, EditOptions], EditOutcome]
"""Publishes the new metadata of an epoch, once the job is quiet."""


@dataclass(frozen=True, slots=True)
class ChangeSteps(Generic[P]):
    """The steps of a planned change.

    Attributes:
        prepare: plans under the lease.
        write: writes the new files.
        publish: as `publish_edit`; None = in place.
    """

    prepare: Callable[[Leased], P]
    write: Callable[[Leased, P], NewState]
    publish: Publish | None = None


def execute_change(
    store: ObjectStore,
    paths: JobPaths,
    directory: JobDirectory,
    prepared: P,
    change: ChangeSteps[P],
    options: EditOptions,
) -> EditOutcome:
    """Execute a planned change under the lease: plan again, write new files, wait, publish.

    Args:
        prepared: planned without the lease; refused if the plan under the lease is another one.

    Raises:
        ConflictError, InputError, LeaseHeldError, ProtocolError: as `run_edit`.
    """
    with lease(store, paths, options.owner, LeaseOptions.of(options)) as held:
        # The previous holder of the lease may have changed the job.
        again = change.prepare(held)
        check_can_run(paths, again.snapshot, again.plan, prepared.plan.digest)
        if again.plan.needs_whole:
            check_restorable(held, paths, again.plan.epoch, 0)
        began = options.clock()
        work = Unchanged(paths, directory, again.snapshot, again.facts.sizes, options.cancelled)
        state = change.write(held, again)
        wait_until_quiet(again.snapshot, began, options)
        publish = change.publish or publish_edit
        return publish(held, work, again.plan, state, options)


# ---- new files -----------------------------------------------------------------------------------


def _written(
    held: ObjectStore, paths: JobPaths, prepared: PreparedEdit, options: EditOptions
) -> tuple[dict[TableKey, Sequence[StatePath | TimeFile]], tuple[RewriteShard, ...]]:
    """Return the new lists of files of the tables that change, and the shards written for them."""
    checkpoint = prepared.snapshot.checkpoint
    lists: dict[TableKey, Sequence[StatePath | TimeFile]] = {
        (e.table.operator.operator, e.table.name): write_entries(held, paths, checkpoint, e)
        for e in prepared.entries
    }
    tasks = [task for table in prepared.rows for task in _tasks(paths, checkpoint, table)]
    shards: list[RewriteShard] = []
    for outcome in options.run(held, tasks):
        if isinstance(outcome, LeftOut):
            raise ProtocolError(
                f"a table cannot be rewritten: {outcome.reason}",
                job=paths.root,
                operator=outcome.operator,
                table=outcome.table,
                next_step="nothing was published; the job is unchanged",
            )
        check_same(paths, checkpoint.epoch, outcome)
        check_not_cancelled(paths, options.cancelled)
        shards.append(outcome)
    if len(shards) != len(tasks):
        raise ProtocolError(
            f"{len(shards)} of {len(tasks)} shards returned a result",
            job=paths.root,
            next_step="run it again; nothing was published",
        )
    lists |= {_key(row): _new_list(held, paths, prepared, row, shards) for row in prepared.rows}
    return lists, tuple(shards)


def _key(one: RewrittenRows) -> TableKey:
    return one.step.operator, one.step.table


def _tasks(paths: JobPaths, checkpoint: Checkpoint, one: RewrittenRows) -> list[RewriteTask]:
    return [
        RewriteTask(
            paths=paths,
            epoch=checkpoint.epoch,
            worker_generation=checkpoint.worker_generation,
            config=_config(checkpoint, one),
            table=one.rewrite,
            keys=keys,
            removes=one.condition,
        )
        for keys in one.rewrite.parts
    ]


def _config(checkpoint: Checkpoint, one: RewrittenRows) -> ExpiringTimeKeyConfig:
    operator = checkpoint.operator(one.step.operator)
    assert operator is not None
    config = operator.configs[one.step.table].config
    assert isinstance(config, ExpiringTimeKeyConfig)
    return config


def _new_list(
    held: ObjectStore,
    paths: JobPaths,
    prepared: PreparedEdit,
    one: RewrittenRows,
    shards: Sequence[RewriteShard],
) -> tuple[TimeFile, ...]:
    """Return the new files of a table, after none of them was found to hold a removed row."""
    outputs = tuple(
        file
        for shard in shards
        if (shard.merged.operator, shard.merged.table) == _key(one)
        for file in shard.merged.outputs
        if isinstance(file, TimeFile)
    )
    config = _config(prepared.snapshot.checkpoint, one)
    for file in () if one.condition is None else outputs:
        assert one.condition is not None
        _, left = count_rows(held, config, file, one.condition)
        if left:
            raise ProtocolError(
                f"{left} of the rows to remove are in a new file; nothing was published",
                job=paths.root,
                path=file.path,
                next_step="report it; the job is unchanged",
            )
    return outputs


def _evidence(
    held: ObjectStore, prepared: PreparedEdit, operators: tuple[OperatorCheckpoint, ...]
) -> Iterator[str]:
    """Yield what the new files of a rescale load; another edit has read its own back."""
    edit = prepared.plan.edit
    if isinstance(edit, Rescale) and prepared.loaded is not None:
        after = replace(prepared.snapshot.checkpoint, operators=operators)
        yield check_rescaled(held, after, edit.parallelism, prepared.loaded)


# ---- publication ---------------------------------------------------------------------------------


def publish_edit(
    held: Leased,
    work: Unchanged,
    plan: EditPlan,
    new: NewState,
    options: EditOptions,
) -> EditOutcome:
    """Publish the new metadata of an epoch in place, with the records that explain and undo it.

    Raises:
        ConflictError: the job changed or was started meanwhile.
        ProtocolError: the epoch as it would be does not pass verification; nothing was published.
    """
    snapshot = work.snapshot
    checkpoint = snapshot.checkpoint
    after = replace(checkpoint, operators=new.operators)
    objects = encoded_objects(snapshot, after)
    if not objects:
        return EditOutcome(plan=plan)
    listed = set(after.paths)
    unlisted = tuple(path for path in dict.fromkeys(checkpoint.paths) if path not in listed)
    epochs = ParquetBackend(held, work.paths).epochs()
    older = tuple(epoch for epoch in epochs if epoch < checkpoint.epoch)
    change = change_record(
        held,
        checkpoint,
        {path: snapshot.objects[path] for path in objects},
        objects,
        kind=ChangeKind.EDIT,
        operation=plan.edit.name,
        digest=plan.digest,
        created_at_micros=options.clock(),
        inputs=tuple(sorted(unlisted)),
        unlisted=(*unlisted, *_expired(held, work.paths, checkpoint, older)),
        request=request_of(plan.edit),
    )
    done = EditOutcome(
        plan=plan,
        shards=new.shards,
        published=True,
        objects=change.objects,
        unlisted=unlisted,
        older_epochs=older,
        evidence=new.evidence,
    )

    def published(path: StatePath) -> None:
        options.on_published(replace(done, record=path))

    path = publish_change(held, work, change, objects, options.verify_level, published)
    return replace(done, record=path)


def _expired(
    held: ObjectStore, paths: JobPaths, checkpoint: Checkpoint, older: Sequence[Epoch]
) -> tuple[StatePath, ...]:
    """Return the files that the epoch before lists and this one did not, before its edit.

    The epoch passed verification, so they had expired. At a watermark that goes back they would
    look lost.
    """
    if not older:
        return ()
    try:
        before = ParquetBackend(held, paths).load(older[-1])
    except (FormatError, NotFoundError):
        return ()
    listed = set(checkpoint.paths)
    return tuple(
        path
        for operator in before.operators
        for files in operator.tables.values()
        if isinstance(files, ExpiringTimeKeyFiles)
        for path in files.paths
        if path not in listed
    )
