"""How the rows of one expiring table of the source become rows of a table of the job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from arroyo_dagster.state.model.checkpoints import OperatorCheckpoint
from arroyo_dagster.state.model.surgery.evolve import Overrides
from arroyo_dagster.state.model.surgery.graphs import ProgrammedOperator
from arroyo_dagster.state.model.tables import ExpiringTimeKeyConfig, ExpiringTimeKeyFiles
from arroyo_dagster.state.operations.surgery.conversion import RowConversion, accumulator_numbers
from arroyo_dagster.state.operations.surgery.transfer import TwoJobs
from arroyo_dagster.state.planning.surgery.columns import (
    ACCUMULATORS,
    BATCHES,
    WINDOWS,
    ColumnMap,
    aggregates_of,
    map_accumulators,
    map_columns,
    override,
)
from arroyo_dagster.state.storage.store import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedRows:
    """What becomes of the rows.

    Attributes:
        conversion: None = the files are copied byte for byte.
        changes: what changes in the rows, for people.
    """

    conversion: RowConversion | None
    changes: tuple[str, ...]
    missing_outputs: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TablePair:
    """An expiring table that both jobs have written.

    Attributes:
        operators, tables: of the source and of the job.
        programs: of both operators; None = not known.
    """

    jobs: TwoJobs
    overrides: Overrides
    operators: tuple[OperatorCheckpoint, OperatorCheckpoint]
    tables: tuple[ExpiringTimeKeyConfig, ExpiringTimeKeyConfig]
    programs: tuple[ProgrammedOperator, ProgrammedOperator] | None = None

    def carried(self) -> CarriedRows | str:
        """Return what becomes of the rows; or why they cannot be carried, for people.

        Raises:
            FormatError, NotFoundError: a file is broken, or missing.
        """
        theirs, ours = self.tables
        slides = self._slides()
        if slides[0] != slides[1]:
            seconds = [(slide or 0) / 1e6 for slide in slides]
            return f"its windows slide by {seconds[1]:g} s, and in the source by {seconds[0]:g} s"
        columns = map_columns(theirs, ours, self.operators[1].operator, self.overrides)
        if isinstance(columns, str):
            return columns
        numbers = self._numbers() if ours.description == BATCHES else None
        if isinstance(numbers, str):
            return numbers
        conversion = RowConversion(
            source=theirs, target=ours, columns=columns, accumulators=numbers
        )
        reason = conversion.check_fills()
        if reason is not None:
            return reason
        as_they_are = columns.identical and numbers is None
        return CarriedRows(
            conversion=None if as_they_are else conversion,
            changes=_changes(columns, conversion),
            missing_outputs=self._missing_outputs(columns),
            unknown=self._unknown(),
        )

    def _slides(self) -> tuple[int | None, int | None]:
        if self.programs is None:
            return None, None
        return self.programs[0].slide_micros, self.programs[1].slide_micros

    @property
    def _same_program(self) -> bool:
        """Whether the programs show that both operators compute the same."""
        if self.programs is None:
            return False
        configs = [program.config for program in self.programs]
        return configs[0] is not None and configs[0] == configs[1]

    def _numbers(self) -> Mapping[int, int] | str | None:
        """Return the new numbers of the aggregates in table `b`; None if all stay; or why they are
        not known.
        """
        theirs = self._aggregates(self.jobs.source.store, 0)
        ours = self._aggregates(self.jobs.store, 1)
        if theirs is None or ours is None:
            return "it has no table `a` beside it"
        operator = self.operators[1].operator
        moves = {
            move.source: move.number
            for move in self.overrides.accumulators
            if move.operator == operator
        }
        mapping = map_accumulators(theirs, ours, moves, same=self._same_program)
        (_, before), (_, after) = theirs, ours
        if isinstance(mapping, str):
            if len(before) == len(after):
                order = zip(sorted(before), sorted(after), strict=True)
                line = override("accumulators", operator, {str(old): new for old, new in order})
                return f"{mapping}; if they keep their order in the SELECT: {line} in --overrides"
            choice = ", ".join(f'"{old}": NEW' for old in sorted(before))
            positions = " or ".join(map(str, sorted(after))) or "a position"
            return (
                f"{mapping}; name their positions in the SELECT, `accumulators: {{{operator}: "
                f"{{{choice}}}}}`, where NEW is {positions}"
            )
        for old, new in mapping.items():
            sizes = before.get(old, set()), after.get(new, set())
            if len(sizes[0]) == len(sizes[1]) == 1 and sizes[0] != sizes[1]:
                return f"its aggregate {new} has arguments of another type than aggregate {old}"
        stays = all(old == new for old, new in mapping.items())
        return None if stays and mapping.keys() == before.keys() else mapping

    def _aggregates(
        self, store: ObjectStore, side: int
    ) -> tuple[tuple[str, ...], dict[int, set[int]]] | None:
        """Return the aggregates of table `a` of one side, and the numbers in table `b` with the
        sizes of their arguments.
        """
        operator, config = self.operators[side], self.tables[side]
        files = operator.tables[config.table]
        named = table_described(operator, ACCUMULATORS)
        if not isinstance(files, ExpiringTimeKeyFiles) or named is None:
            return None
        numbers = accumulator_numbers(store, config, files.files)
        sizes = {number: {size for size, _ in arguments} for number, arguments in numbers.items()}
        return aggregates_of(named), sizes

    @property
    def _where(self) -> str:
        return f"{self.operators[1].operator}.{self.tables[1].table}"

    def _missing_outputs(self, columns: ColumnMap) -> tuple[str, ...]:
        theirs, ours = self.tables
        epoch, filled = self.jobs.taken.epoch, ", ".join(columns.filled)
        texts = []
        if columns.filled and ours.description in WINDOWS:
            texts.append(
                f"{self._where}: in windows that are open, {filled} leave out the rows before "
                f"epoch {epoch} of the source"
            )
        elif columns.filled and ours.description == ACCUMULATORS:
            texts.append(
                f"{self._where}: {filled} count from epoch {epoch} of the source on; the first "
                "retraction of a key shows what they were filled with"
            )
        if theirs.retention_micros != ours.retention_micros:
            texts.append(
                f"{self._where}: rows live {ours.retention_micros / 1e6:g} s, and "
                f"{theirs.retention_micros / 1e6:g} s in the source: older ones are dropped"
            )
        return tuple(texts)

    def _unknown(self) -> tuple[str, ...]:
        description = self.tables[1].description
        if description == "Sliding_intermediate" and self._slides() == (None, None):
            return (f"{self._where}: whether both windows slide alike is not in the state",)
        if description == BATCHES and not self._same_program:
            return (
                f"{self._where}: which columns its aggregates take is not in the state: they are "
                "those of the source, if the SQL of both says so",
            )
        return ()


def table_described(operator: OperatorCheckpoint, description: str) -> ExpiringTimeKeyConfig | None:
    """Return an operator's expiring table with a description; None if it has no rows."""
    for name in operator.tables:
        config = operator.configs[name].config if name in operator.configs else None
        if isinstance(config, ExpiringTimeKeyConfig) and config.description == description:
            return config
    return None


def _changes(columns: ColumnMap, conversion: RowConversion) -> tuple[str, ...]:
    texts = []
    if columns.filled:
        texts.append(f"filled: {', '.join(columns.filled)}")
    if columns.dropped:
        texts.append(f"columns dropped: {', '.join(columns.dropped)}")
    if conversion.accumulators is not None:
        moved = [f"{old} to {new}" for old, new in conversion.accumulators.items()]
        texts.append(f"aggregates renumbered: {', '.join(moved)}")
    return tuple(texts)
