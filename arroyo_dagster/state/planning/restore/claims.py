"""Which part of a pipeline continues with which state of a checkpoint.

A part that was renamed would begin empty beside sources that go on. So a run does not start while
state is left that nothing claims, until a person has decided: renamed, or dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.checkpoints import Checkpoint, CheckpointState, OperatorCheckpoint
from arroyo_dagster.state.model.ids import OperatorId, TableName
from arroyo_dagster.state.model.tables import GlobalKeyedFiles, TableFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What a pipeline claims of the checkpoint from which it continues.

    Attributes:
        tables: the tables that each source and operator registers.
        renamed_from: the earlier names of sources and operators.
        allow_dropped: operators, and tables as `operator/table`, whose state a person gives up. The
            names are those of the checkpoint.
        carries_unclaimed: whether epochs go on listing operators that the pipeline does not have.
    """

    tables: Mapping[OperatorId, Collection[TableName]]
    renamed_from: Mapping[OperatorId, OperatorId]
    allow_dropped: Collection[str] = ()
    carries_unclaimed: bool = False

    def settle(self, base: Checkpoint) -> Checkpoint:
        """Return a checkpoint as the pipeline continues from it: renamed, without what is dropped.

        `progress.dropped` of the result records what was renamed and dropped.

        Raises:
            InputError: the checkpoint has state that nothing claims, or a renamed operator has
                state under both names.
        """
        names = self._names(base)
        operators: list[OperatorCheckpoint] = []
        dropped: set[str] = set()
        unclaimed: list[str] = []
        for operator in base.operators:
            stored = operator.operator
            name = names.get(stored, stored)
            if stored == name and stored in names.values():
                continue  # it has no state, and takes over that of its earlier name
            if name != stored:
                dropped.add(stored)
            if name not in self.tables and self.carries_unclaimed:
                operators.append(operator)
            elif name not in self.tables:
                dropped.add(stored)
                unclaimed += [stored] if holds_state(base, operator) else []
            else:
                left = {table for table in operator.tables if table not in self.tables[name]}
                dropped |= {f"{stored}/{table}" for table in left}
                unclaimed += [
                    f"{stored}/{table}"
                    for table in sorted(left)
                    if _has_rows(base, operator.tables[table])
                ]
                operators.append(_without(replace(operator, operator=name), left))
        refused = [name for name in unclaimed if name not in self.allow_dropped]
        if refused:
            raise self._unclaimed(base, refused, names)
        if base.progress is None:
            return replace(base, operators=tuple(operators))
        present = {*self.tables} | {
            f"{name}/{table}" for name, tables in self.tables.items() for table in tables
        }
        every = tuple(sorted(dropped.union(base.progress.dropped) - present))
        progress = replace(base.progress, dropped=every)
        return replace(base, operators=tuple(operators), progress=progress)

    def _names(self, base: Checkpoint) -> dict[OperatorId, OperatorId]:
        """Return the names that operators of the checkpoint have now, where they differ."""
        names: dict[OperatorId, OperatorId] = {}
        for now, before in self.renamed_from.items():
            stored = base.operator(before)
            if stored is None or before in self.allow_dropped:
                continue
            own = base.operator(now)
            if own is not None and holds_state(base, own):
                raise InputError(
                    f"epoch {base.epoch} has state of `{before}` and of `{now}`, and "
                    f'`{now}` is renamed_from="{before}": only one of them can be taken over',
                    job=base.job,
                    next_step=f"remove renamed_from and run with --allow-dropped {before}, or "
                    "go back to an epoch before the new name with --from-epoch",
                )
            names[before] = now
        return names

    def _unclaimed(
        self, base: Checkpoint, refused: list[str], names: Mapping[OperatorId, OperatorId]
    ) -> InputError:
        stored = {names.get(op.operator, op.operator): op for op in base.operators}
        empty = [str(name) for name, tables in self.tables.items() if tables and name not in stored]
        empty += [
            f"{name}/{table}"
            for name, operator in stored.items()
            if any(label.startswith(f"{operator.operator}/") for label in refused)
            for table in sorted(self.tables[name])
            if table not in operator.tables
        ]
        renamed = [
            f"register the table {name.partition('/')[2]} again"
            if "/" in name
            else f'if it has a new name, give that one renamed_from="{name}"'
            for name in refused[:1]
        ]
        drop = " ".join(f"--allow-dropped {name}" for name in refused)
        return InputError(
            f"epoch {base.epoch} has state that nothing in the pipeline claims: "
            f"{_listed(refused)}; without state there: {_listed(empty) or 'none'}",
            job=base.job,
            next_step=f"{renamed[0]}; or leave the state behind in the older epochs with "
            f"`run {drop}` (allow_dropped in Python)",
        )


def holds_state(checkpoint: Checkpoint, operator: OperatorCheckpoint) -> bool:
    """Return whether an operator has files, or commit data that is not committed."""
    return any(_has_rows(checkpoint, files) for files in operator.tables.values())


def _has_rows(checkpoint: Checkpoint, files: TableFiles) -> bool:
    if files.paths or not isinstance(files, GlobalKeyedFiles):
        return bool(files.paths)
    waits = checkpoint.state is not CheckpointState.READY
    return waits and any(files.commit_data_by_subtask.values())


def _without(operator: OperatorCheckpoint, left: Collection[TableName]) -> OperatorCheckpoint:
    return replace(
        operator,
        tables={name: files for name, files in operator.tables.items() if name not in left},
        configs={name: config for name, config in operator.configs.items() if name not in left},
    )


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
