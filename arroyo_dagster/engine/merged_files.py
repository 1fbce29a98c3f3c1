"""Merged files in the lists of a job: those of maintenance that it adopts, and its own merges."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from arroyo_dagster.engine.pipeline import Pipeline
from arroyo_dagster.engine.task import EpochPlan
from arroyo_dagster.errors import StorageError
from arroyo_dagster.state.metadata.backend import StateBackend
from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.compaction import Merged
from arroyo_dagster.state.model.ids import Epoch, OperatorId, StatePath, TableName
from arroyo_dagster.state.model.layout import is_compacted
from arroyo_dagster.state.model.tables import GlobalKeyedFiles
from arroyo_dagster.state.planning.compaction.apply import Applied, adoptable, apply_merges
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.global_keyed import GlobalKeyedTable
from arroyo_dagster.state.tables.messages import Compaction


@dataclass(frozen=True, slots=True)
class TakenOver:
    """Operators after maintenance's merges were applied, and the records of these merges."""

    applied: Applied
    records: list[StatePath]


@dataclass(frozen=True, slots=True)
class MergedFiles:
    """Handles the merged files of a run, at each of its epochs.

    Attributes:
        since: the epoch from which the run continued; 0 = it began without state.
    """

    store: ObjectStore
    pipeline: Pipeline
    backend: StateBackend
    since: Epoch

    def take_over(self, operators: Sequence[OperatorCheckpoint]) -> TakenOver:
        """Replace files in the lists by the files into which maintenance has merged them."""
        records = self.backend.compaction_records()
        merges = adoptable(operators, filter(None, records.values()), self.since)
        outputs = list(dict.fromkeys(path for merge in merges for path in merge.output_paths))
        heads = concurrently(self.store.head, outputs)
        missing = {path for path, info in zip(outputs, heads, strict=True) if info is None}
        whole = [merge for merge in merges if not missing & set(merge.output_paths)]
        return TakenOver(
            apply_merges(operators, whole), [path for path, record in records.items() if record]
        )

    def forget_records(self, taken: TakenOver) -> None:
        """Delete the records that were read: they are adopted, or can never be applied."""
        # A remaining record is not applied again; it must not stop a run whose epoch exists.
        with contextlib.suppress(StorageError):
            if taken.records:
                self.store.delete_many(taken.records)

    def merge(
        self, plan: EpochPlan, taken: TakenOver, base: Checkpoint | None
    ) -> tuple[list[OperatorCheckpoint], dict[OperatorId, tuple[Compaction, ...]]]:
        """Merge the files that the previous epoch listed, where a global table lists too many.

        Args:
            base: the previous epoch; None for the first.

        Returns:
            The operators, and the compactions to announce to their subtasks at the next epoch.
        """
        announced: dict[OperatorId, list[Compaction]] = {}
        for merged in taken.applied.done:
            announced.setdefault(merged.operator, []).append(_announcement(merged, base))
        result: list[OperatorCheckpoint] = []
        for operator in taken.applied.operators:
            tables = dict(operator.tables)
            done = announced.setdefault(operator.operator, [])
            for name, files in operator.tables.items():
                before = _listed_before(base, operator.operator, name)
                fresh = sum(not is_compacted(path) for path in before)
                if fresh <= self.pipeline.merge_files_after or any(name in m.tables for m in done):
                    continue
                assert isinstance(files, GlobalKeyedFiles)
                table = GlobalKeyedTable(operator.configs[name], self.store)
                namer = self._namer(operator.operator, name, plan)
                whole = table.compact_data(before, namer).merged.output_metadata
                tables[name] = replace(files, files=(*whole.paths, *files.files[len(before) :]))
                done.append(Compaction(tables={name: whole}, inputs={name: before}))
            result.append(replace(operator, tables=tables))
        return result, {name: tuple(done) for name, done in announced.items() if done}

    def _namer(
        self, operator: OperatorId, table: TableName, plan: EpochPlan
    ) -> Callable[[str], StatePath]:
        return lambda suffix: self.pipeline.paths.data_file(
            operator, table, 0, plan.epoch, plan.generation, attempt=uuid.uuid4().hex[:16] + suffix
        )


def _announcement(merged: Merged, base: Checkpoint | None) -> Compaction:
    # The subtasks no longer know inputs that have expired meanwhile.
    operator = base.operator(merged.operator) if base else None
    listed = set(operator.paths) if operator else set()
    return Compaction(
        tables={merged.table: merged.output_metadata},
        inputs={merged.table: tuple(path for path in merged.input_paths if path in listed)},
    )


def _listed_before(
    base: Checkpoint | None, operator: OperatorId, table: TableName
) -> tuple[StatePath, ...]:
    before = base.operator(operator) if base else None
    files = before.tables.get(table) if before else None
    return files.files if isinstance(files, GlobalKeyedFiles) else ()
