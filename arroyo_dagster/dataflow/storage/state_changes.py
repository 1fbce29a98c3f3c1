"""Compare the stored states of a service with its definition: what was renamed, changed, dropped.

Pure: from stored schemas and definitions to changes.

Source: the project's design, section 9; error E50. The decision `sdf-changed-states.md`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from arroyo_dagster.dataflow.definition.definition import StateDef


@dataclass(frozen=True, slots=True)
class Differences:
    """How a stored schema differs from a definition.

    Attributes:
        texts: a description of each difference.
        convertible: whether rows can be carried over: the kind and the windows are the same.
        only_added: whether all of them are added columns that begin with defaults, so that nothing
            is converted.
    """

    texts: tuple[str, ...]
    convertible: bool
    only_added: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChange:
    """What happens to one stored state when the definition is applied.

    Attributes:
        stored: the name of the stored state.
        state: the definition that takes its rows; None = dropped: its rows are kept unread.
        dropped: whether its rows were kept unread before.
        differences: between the stored schema and the definition.
    """

    stored: str
    state: StateDef | None
    dropped: bool = False
    differences: Differences = Differences((), True, False)

    @property
    def needs_revision(self) -> bool:
        """Whether stored tables must be changed before the service can run."""
        if self.state is None:
            return not self.dropped
        found = self.differences
        if self.dropped or self.stored != self.state.name:
            return True
        return bool(found.texts) and not found.only_added

    @property
    def texts(self) -> tuple[str, ...]:
        """Descriptions of the change: where the rows are, and the schema."""
        if self.state is None:
            return (f"state `{self.stored}` is stored, and no longer declared",)
        found = []
        if self.dropped:
            found.append(f"state `{self.stored}` was dropped earlier, and its rows are unread")
        if self.stored != self.state.name:
            found.append(f"state `{self.stored}` is now named `{self.state.name}`")
        if self.differences.texts:
            found.append(
                f"state `{self.state.name}` was stored with another schema than its definition "
                f"has: {'; '.join(self.differences.texts)}"
            )
        return tuple(found)


def state_changes(
    stored: Mapping[str, str], dropped: Mapping[str, str], owned: Iterable[StateDef]
) -> list[StateChange]:
    """Return what happens to each stored state of a service.

    A state takes the rows that are stored under its name, else under one of its earlier names
    (`was`), else those of these names that were kept unread.

    Args:
        stored, dropped: the stored schemas by state, in the form of `stored_schemas`.
        owned: the definitions of the service's states.
    """
    definitions = {state.name: state for state in owned}
    taken: dict[tuple[bool, str], StateDef] = {}
    for state in definitions.values():
        for place in _places(state, stored, dropped, definitions):
            if place not in taken:
                taken[place] = state
                break
    found = []
    for is_dropped, schemas in ((False, stored), (True, dropped)):
        for name, text in schemas.items():
            taker = taken.get((is_dropped, name))
            differences = Differences((), True, False)
            if taker is not None:
                differences = differences_of(json.loads(text), taker)
            found.append(
                StateChange(stored=name, state=taker, dropped=is_dropped, differences=differences)
            )
    return found


def _places(
    state: StateDef,
    stored: Mapping[str, str],
    dropped: Mapping[str, str],
    definitions: Mapping[str, StateDef],
) -> list[tuple[bool, str]]:
    earlier = [name for name in state.was if name not in definitions]
    places = [(False, name) for name in (state.name, *earlier) if name in stored]
    return places + [(True, name) for name in (state.name, *earlier) if name in dropped]


def differences_of(before: Mapping[str, Any], state: StateDef) -> Differences:
    """Compare a stored schema, decoded, with a definition."""
    now = state.schema
    windowed = state.window is not None
    texts = []
    if before.get("windowed", windowed) != windowed:
        was, is_now = ("outside of", "in") if windowed else ("in", "outside of")
        texts.append(f"its keys were {was} windows, and are now {is_now} windows")
    if before.get("kind") != now["kind"]:
        texts.append(f"kind changed from {before.get('kind')} to {now['kind']}")
    convertible = not texts
    texts += [
        f"{part} changed from {before.get(part)} to {now[part]}"
        for part in ("key", "scalar")
        if before.get(part) != now[part]
    ]
    old, new = dict(before.get("columns") or ()), dict(now.get("columns") or ())
    added = [f"added column `{name}`" for name in sorted(new.keys() - old.keys())]
    removed = [f"removed column `{name}`" for name in sorted(old.keys() - new.keys())]
    changed = [
        f"column `{name}` changed from {old[name]} to {new[name]}"
        for name in sorted(old.keys() & new.keys())
        if old[name] != new[name]
    ]
    computed = any(column.convert for column in state.columns if column.name not in old)
    only_added = bool(added) and not (texts or removed or changed or computed)
    return Differences((*texts, *added, *removed, *changed), convertible, only_added)


def advice(change: StateChange, free: Iterable[StateDef], service: str) -> str:
    """Return what to do about a change that a run refuses: commands, and lines of the YAML.

    Args:
        free: the states of the definition that take no stored rows.
    """
    clean = f"`arroyo-state sdf clean DATAFLOW --state {service}/{change.stored}` removes its rows"
    state = change.state
    if state is None:
        candidates = {one.name: one for one in free}
        near = difflib.get_close_matches(change.stored, candidates, n=1)
        name = near[0] if near else next(iter(candidates), None)
        renamed = (
            ""
            if name is None
            else (
                f"if it is now `{name}`, add `was: {change.stored}` to it (line "
                f"{candidates[name].line}); else "
            )
        )
        return f"{renamed}`sdf run --migrate` keeps its rows, unread, and {clean}"
    if not change.differences.convertible:
        return (
            f"give the state in line {state.line} another name: `sdf run --migrate` then keeps "
            f"the stored rows, unread; or {clean}"
        )
    if not change.needs_revision:
        return "run it with --migrate: added columns start with their defaults"
    return (
        f"`sdf run --migrate` carries the rows over to the definition in line {state.line}; or "
        f"{clean}"
    )
