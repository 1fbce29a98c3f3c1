"""Compaction of one job: plan, execute the merges here or elsewhere, verify, publish."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from arroyo_dagster.errors import InputError, ProtocolError
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.metadata.interrupts import uninterrupted
from arroyo_dagster.state.metadata.lease import LeasedOperation, LeaseOptions, lease
from arroyo_dagster.state.model.compaction import (
    AdoptionSettings,
    CompactionPlan,
    CompactionSettings,
    MergeOutcome,
)
from arroyo_dagster.state.model.layout import JobPaths, Layout
from arroyo_dagster.state.model.progress import OnProgress, no_progress
from arroyo_dagster.state.operations.compaction.execute import (
    Meter,
    RunMerges,
    check_same,
    merge_here,
)
from arroyo_dagster.state.operations.compaction.plan import (
    CompactionFacts,
    compaction_facts,
    limited,
    make_plan,
    merge_tasks,
)
from arroyo_dagster.state.operations.compaction.publish import (
    CompactionOutcome,
    publish_epoch,
    publish_record,
)
from arroyo_dagster.state.operations.slowdown import CheckpointWatch
from arroyo_dagster.state.planning.compaction.plan import check_plan
from arroyo_dagster.state.storage.store import ObjectStore

_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionOptions(LeasedOperation, AdoptionSettings):
    """Options of a compaction.

    Attributes:
        sampled: forecast the number of bytes afterwards, as `plan_compaction` does.
        run: executes the merges, in this process or on Spark.
        on_merge: called with every finished merge, before it is verified, and the number left.
        on_progress: called at intervals with the number of bytes read, perhaps by another thread.
        on_published: called with the outcome, before an interrupt can arrive.
    """

    owner: str = "arroyo-state compact"
    sampled: bool = False
    run: RunMerges = merge_here
    on_merge: Callable[[MergeOutcome, int], None] = lambda outcome, left: None
    on_progress: OnProgress = no_progress
    on_published: Callable[[CompactionOutcome], None] = lambda outcome: None


def run_compaction(
    store: ObjectStore,
    paths: JobPaths,
    settings: CompactionSettings | None = None,
    options: CompactionOptions | None = None,
    *,
    plan: CompactionPlan | None = None,
) -> CompactionOutcome:
    """Merge small files of a job, verify what a restore would load, and publish the result.

    It deletes nothing: inputs stay for the epochs that list them. If it is interrupted at any
    point, the job is restorable, and unreferenced files remain for gc. A second run finds nothing
    to do and writes nothing.

    Args:
        settings: the settings of the plan; with a given plan only `part_bytes` matters.
        plan: execute this plan, made earlier by `plan_compaction`; None = plan under the lease.

    Raises:
        LeaseHeldError: another process maintains the job.
        ConflictError: the job was started or changed meanwhile, or `plan` no longer fits.
        ProtocolError: the written files would not restore the rows of their inputs; nothing was
            published.
        InputError: the job is in the legacy layout, or is an Arroyo job.
        NotFoundError, FormatError: the epoch, or a file of it, is missing or broken.
    """
    run_options = options or CompactionOptions()
    outcome = _Compaction(paths, settings or CompactionSettings(), run_options, plan).run(store)
    if outcome.published == "record" and run_options.wait_seconds > 0:
        return _awaited(store, paths, outcome, run_options.wait_seconds)
    return outcome


@dataclass(frozen=True, slots=True)
class _Compaction:
    """One call of `run_compaction`: its arguments except the store."""

    paths: JobPaths
    settings: CompactionSettings
    options: CompactionOptions
    given: CompactionPlan | None

    def run(self, store: ObjectStore) -> CompactionOutcome:
        facts = compaction_facts(store, self.paths)
        plan = self._plan(store, facts)
        if not _worth_it(plan, facts):
            return _nothing(plan, facts)
        if self.paths.layout is Layout.LEGACY:
            raise InputError(
                "a job in the legacy layout has no epoch records: a running job could not adopt "
                "merged files",
                job=self.paths.root,
                next_step="let its runs merge (merge_files_after), or use the protocol layout",
            )
        options = self.options
        with lease(
            store,
            self.paths,
            options.owner,
            LeaseOptions.of(options),
        ) as held:
            # The previous holder of the lease may have merged some of it.
            facts = compaction_facts(held, self.paths)
            plan = self._plan(held, facts, sampled=options.sampled)
            if not _worth_it(plan, facts):
                return _nothing(plan, facts)
            plan, merges = self._merge(held, facts, plan)
            backend = ParquetBackend(held, self.paths, clock=options.clock)
            # A generation without an epoch would look like a restarted job.
            with uninterrupted():
                if facts.at_rest:
                    outcome = publish_epoch(backend, facts, plan, merges)
                else:
                    outcome = publish_record(backend, held.lease.token, facts, plan, merges)
                options.on_published(outcome)
        return outcome

    def _plan(
        self, store: ObjectStore, facts: CompactionFacts, *, sampled: bool = False
    ) -> CompactionPlan:
        if self.given is None:
            return make_plan(store, self.paths, facts, self.settings, sampled=sampled)
        pending = [record for _, record in facts.pending]
        check_plan(self.given, facts.checkpoint, pending, facts.sizes, facts.stamps)
        return self.given

    def _merge(
        self, store: ObjectStore, facts: CompactionFacts, plan: CompactionPlan
    ) -> tuple[CompactionPlan, tuple[MergeOutcome, ...]]:
        """Execute the merges; return them, and the plan that they fulfil.

        Between two merges it looks at the job's checkpoints. If they became slower, the other
        merges are left out of the plan. Merges that Spark executes together are one step.
        """
        most = None if facts.at_rest else self.settings.max_checkpoint_slowdown
        watch = CheckpointWatch(store, self.paths, facts.checkpoint.epoch, most)
        tasks = merge_tasks(self.paths, facts, plan, self.settings)
        meter = Meter(sum(merge.size_bytes for merge in plan.merges), self.options.on_progress)
        outcomes: list[MergeOutcome] = []
        for outcome in self.options.run(store, tasks, meter.add) if tasks else ():
            outcomes.append(outcome)
            self.options.on_merge(outcome, len(tasks) - len(outcomes))
            check_same(self.paths, plan.epoch, outcome)
            slower = watch.slowdown() if len(outcomes) < len(tasks) else None
            if slower is not None and self.given is None:
                reason = f"stopped, since {slower}; the next run continues"
                self.options.on_lease(f"{len(tasks) - len(outcomes)} merges are left out: {reason}")
                done = limited(self.settings, len(outcomes), reason)
                return facts.plan(done), tuple(outcomes)
        if len(outcomes) != len(tasks):
            raise ProtocolError(
                f"{len(outcomes)} of {len(tasks)} merges returned a result",
                job=self.paths.root,
                next_step="run it again; nothing was published",
            )
        return plan, tuple(outcomes)


def _worth_it(plan: CompactionPlan, facts: CompactionFacts) -> bool:
    # At rest, only a compaction can apply the records that wait for the job's writer.
    return bool(plan.merges) or (facts.at_rest and bool(facts.pending))


def _nothing(plan: CompactionPlan, facts: CompactionFacts) -> CompactionOutcome:
    return CompactionOutcome(
        plan=plan,
        files_after=plan.files_before,
        size_bytes_after=plan.size_bytes_before,
        waiting=tuple(path for path, _ in facts.pending),
    )


def _awaited(
    store: ObjectStore, paths: JobPaths, outcome: CompactionOutcome, seconds: float
) -> CompactionOutcome:
    """Wait until the writer has processed the record, and set the epoch that adopted it."""
    backend = ParquetBackend(store, paths)
    assert outcome.record is not None
    outputs = {path for merge in outcome.merges for path in merge.merged.output_paths}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if store.head(outcome.record) is None:
            newest = backend.load()
            taken = outputs & set(newest.paths)
            return replace(outcome, epoch=newest.epoch if taken else None)
        time.sleep(_POLL_SECONDS)
    return outcome
