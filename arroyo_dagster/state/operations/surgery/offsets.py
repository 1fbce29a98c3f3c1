"""New positions of sources: absolute or relative, by the rules of their connectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.codec.iso_times import iso_micros
from arroyo_dagster.state.model.surgery.edits import ALL_PARTITIONS, NewPosition, SetOffsets
from arroyo_dagster.state.operations.surgery.entries import (
    ChangedEntries,
    GlobalTable,
    changed_entries,
)
from arroyo_dagster.state.tables.known.positions import PositionRule, rule_of


@dataclass(frozen=True, slots=True)
class OffsetChanges:
    """The changes of the tables of sources, and what outputs will show.

    Attributes:
        kept: the partitions of these sources that keep their positions, for people.
        lookup: the position that was found of each partition, if they are those of a time.
    """

    tables: tuple[ChangedEntries, ...]
    duplicate_outputs: tuple[str, ...]
    missing_outputs: tuple[str, ...]
    unknown: tuple[str, ...]
    kept: tuple[str, ...] = ()
    lookup: tuple[str, ...] = ()


OPEN_STATE = "open windows, joins and aggregates"
"""What counts records twice that are read again."""


def offset_changes(
    edit: SetOffsets, tables: Sequence[GlobalTable], counted_in: str | None = OPEN_STATE
) -> OffsetChanges:
    """Compute new positions.

    Args:
        counted_in: what counts records twice that are read again, for people; None = nothing.

    Raises:
        InputError: no source of the job has a partition that is named, or several have it; or its
            position cannot be set so.
        FormatError: the entries of a source do not decode.
    """
    sources = [_Source(table, rule, counted_in) for table, rule in _sources(edit, tables)]
    if edit.at_micros is not None:
        _take_lookup(edit.positions, edit.at_micros, sources)
    else:
        for position in edit.positions:
            _assign(position, sources)
    changes = [(src, changed_entries(src.table, src.moved)) for src in sources if src.positions]
    return OffsetChanges(
        tables=tuple(changed for _, changed in changes),
        duplicate_outputs=tuple(
            dict.fromkeys(text for source, _ in changes for text in source.duplicate_outputs)
        ),
        missing_outputs=tuple(
            dict.fromkeys(text for source, _ in changes for text in source.missing_outputs)
        ),
        unknown=tuple(text for source, _ in changes for text in source.unknown()),
        kept=tuple(text for source, _ in changes for text in source.kept()),
        lookup=tuple(text for source, _ in changes for text in source.lookup),
    )


def _sources(
    edit: SetOffsets, tables: Sequence[GlobalTable]
) -> Iterator[tuple[GlobalTable, PositionRule]]:
    any_source = False
    for table in tables:
        rule = rule_of(table.config)
        if rule is None or edit.operator not in (None, table.operator.operator):
            continue
        any_source = True
        yield table, rule
    if not any_source:
        named: dict[str, Any] = {} if edit.operator is None else {"operator": edit.operator}
        raise InputError(
            "the job has no source whose positions can be set"
            if edit.operator is None
            else "the operator is no source whose positions can be set",
            **named,
            next_step="`arroyo-state sql @offsets JOB` lists the sources and their partitions",
        )


@dataclass(slots=True)
class _Source:
    """One source, the new positions of its partitions, and what they mean for its outputs."""

    table: GlobalTable
    rule: PositionRule
    counted_in: str | None
    positions: dict[str, NewPosition] = field(default_factory=dict)
    duplicate_outputs: list[str] = field(default_factory=list)
    missing_outputs: list[str] = field(default_factory=list)
    unclear: list[str] = field(default_factory=list)
    lookup: list[str] = field(default_factory=list)
    by_time: bool = False

    def partitions(self) -> list[str]:
        return list(
            dict.fromkeys(self.rule.partition(key, value) for _, key, value in self.table.entries())
        )

    def moved(self, key: Any, value: Any) -> Any:
        """Return an entry's value with its new position."""
        partition = self.rule.partition(key, value)
        position = self.positions.get(partition)
        if position is None:
            return value
        where = {**self.table.where, "partition": partition}
        before = self.rule.position(value)
        text = moved_position(before, position, where)
        try:
            new = self.rule.moved(value, text)
        except InputError as error:
            facts: dict[str, Any] = {**error.facts, **where}
            raise InputError(error.message, **facts) from error
        after = self.rule.position(new)
        if self.by_time:
            self.lookup.append(f"partition {partition} at {after}, now at {before}")
        self._note(partition, before, after)
        return new

    def _note(self, partition: str, before: int | None, after: int | None) -> None:
        at = f"{self.table.operator.operator} partition {partition}"
        if before is None or after is None:
            self.unclear.append(
                f"{at}: the positions are no numbers, so it is unknown how many records are read "
                "again or skipped"
            )
        else:
            again, never = self.duplicate_outputs, self.missing_outputs
            note_move(at, before, after, again, never, counted_in=self.counted_in)

    def kept(self) -> Iterator[str]:
        for name in self.partitions():
            if name not in self.positions:
                yield f"{self.table.operator.operator} partition {name}"

    def unknown(self) -> Iterator[str]:
        yield from dict.fromkeys(self.unclear)
        if not self.rule.tried:
            yield (
                f"{self.table.operator.operator}: positions of the {self.table.owner} were set by "
                "codec round trip only; no real Arroyo was seen to continue from them"
            )


def _take_lookup(
    positions: Sequence[NewPosition], at_micros: int, sources: Sequence[_Source]
) -> None:
    """Give the positions of a time to the partitions of the only source.

    Raises:
        InputError: there are several sources, or a partition was not looked up.
    """
    if len(sources) > 1:
        raise InputError(
            f"a lookup is of one source, and the job has {len(sources)}",
            operators=", ".join(str(source.table.operator.operator) for source in sources),
            next_step="name one with --operator",
        )
    (source,) = sources
    offsets = {position.partition: position for position in positions}
    for name in source.partitions():
        if name not in offsets:
            raise InputError(
                f"the lookup has no offset of partition {name}",
                **source.table.where,
                partitions=", ".join(offsets),
                next_step="look up all partitions of the topic",
            )
        source.positions[name] = offsets.pop(name)
    source.by_time = True
    for name in offsets:
        source.unclear.append(
            f"{source.table.operator.operator} partition {name} has no entry in the state: the job "
            f"reads it from its beginning, not from {iso_micros(at_micros)}"
        )


def _assign(position: NewPosition, sources: Sequence[_Source]) -> None:
    """Give a new position to the source that has its partition."""
    if position.partition == ALL_PARTITIONS:
        for source in sources:
            for name in source.partitions():
                source.positions.setdefault(name, position)
        return
    having = [source for source in sources if position.partition in source.partitions()]
    if not having:
        names = sorted({name for source in sources for name in source.partitions()})
        raise InputError(
            f"no source has a partition {position.partition!r}",
            partitions=", ".join(names[:20]) or "none",
            next_step="`arroyo-state sql @offsets JOB` lists the sources and their partitions",
        )
    if len(having) > 1:
        raise InputError(
            f"{len(having)} sources have a partition {position.partition!r}",
            operators=", ".join(str(source.table.operator.operator) for source in having),
            next_step="name one with --operator",
        )
    having[0].positions[position.partition] = position


def moved_position(before: int | None, position: NewPosition, where: dict[str, Any]) -> str:
    """Return a new position as text; a relative one is added to the stored one.

    Raises:
        InputError: a relative position without a number to add to, or before the first record; an
            absolute one of a position that is a number is not checked here.
    """
    text = position.position
    if not position.relative:
        return text
    if before is None:
        raise InputError(
            "the position is no number, so nothing can be added to it",
            **where,
            next_step="give an absolute position",
        )
    if before + int(text) < 0:
        raise InputError(
            f"the new position would be {before + int(text)}, before the first record",
            **where,
            position=before,
            next_step="subtract less, or give an absolute position",
        )
    return str(before + int(text))


def note_move(
    at: str,
    before: int,
    after: int,
    again: list[str],
    never: list[str],
    *,
    counted_in: str | None = OPEN_STATE,
) -> None:
    """Say which outputs are seen twice, or never, after a source was moved."""
    if after < before:
        twice = "no table counts" if counted_in is None else f"{counted_in} count"
        again.append(
            f"{at}: {before - after} records from position {after} to {before} are read again; "
            f"their outputs are seen twice, and {twice} them twice"
        )
    elif after > before:
        never.append(
            f"{at}: {after - before} records from position {before} to {after} are never read"
        )
