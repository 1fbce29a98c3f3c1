"""Link the states of a dataflow: references to their owners, and table names that must be unique.

Source: sdf-states.md 2.10; errors E16, E22.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from arroyo_dagster.dataflow.definition.definition import StateDef, StateForm, StateRef
from arroyo_dagster.dataflow.definition.diagnostics import Diagnostics
from arroyo_dagster.dataflow.definition.yaml_tree import Node


@dataclass(slots=True)
class States:
    """The states of all services.

    Attributes:
        whole: the states without errors, by owner and name.
        named: the nodes of all states, also of those with errors, by owner and name.
        imported_states: the states of imported functions, by service; None if they are unknown
            because a package was not loaded.
    """

    whole: dict[str, dict[str, StateDef]]
    named: dict[str, dict[str, Node]]
    imported_states: Mapping[str, Mapping[str, StateDef] | None] = field(default_factory=dict)


class Linking:
    """Finds the owner of every reference, and checks that no two states share a table."""

    def __init__(self, diagnostics: Diagnostics, states: States) -> None:
        self._mistakes = diagnostics
        self._states = states

    def link(self) -> None:
        """Copy the owner's definition into each reference; remove references without an owner."""
        self._check_owners()
        for service, states in self._states.whole.items():
            for name, state in list(states.items()):
                if state.ref is None:
                    continue
                linked = self._linked(service, state, state.ref)
                if linked is None:
                    del states[name]
                else:
                    states[name] = linked

    def _check_owners(self) -> None:
        owners: dict[str, StateDef] = {}
        for states in self._states.whole.values():
            for state in states.values():
                if state.form is not StateForm.TYPED:
                    continue
                first = owners.setdefault(state.table, state)
                if first.owner != state.owner:
                    self._add(
                        "E22",
                        state,
                        f"state `{state.name}` is already defined by `{first.owner}` in line "
                        f"{first.line}: both are the table `{state.table}`; rename one, or refer "
                        f"to it with `from: {first.owner}.{first.name}`",
                    )

    def _add(self, number: str, state: StateDef, message: str) -> None:
        node = self._states.named[state.owner][state.name]
        self._mistakes.add(node.diagnostic_at(number, message))

    def _linked(self, service: str, state: StateDef, ref: StateRef) -> StateDef | None:
        owner = self._states.whole.get(ref.service, {}).get(ref.state)
        if owner is None and ref.state in self._states.named.get(ref.service, {}):
            return None  # it exists, and its errors were reported
        if owner is None and ref.service != service:
            imported_states = self._states.imported_states.get(ref.service, {})
            if imported_states is None:
                return state
            owner = imported_states.get(ref.state)
        if owner is None or owner.form is not StateForm.TYPED or ref.service == service:
            self._add("E16", state, self._missing(service, state, ref, owner))
            return None
        # The table has the owner's name; the local name is an alias.
        names = dict.fromkeys((*owner.aliases, state.table, state.name))
        names.pop(owner.table, None)
        return replace(
            owner,
            name=state.name,
            form=StateForm.REFERENCE,
            declared=None,
            ref=ref,
            accessor=state.accessor,
            aliases=tuple(names),
            api_version=state.api_version,
            path=state.path,
            line=state.line,
        )

    def _missing(self, service: str, state: StateDef, ref: StateRef, owner: StateDef | None) -> str:
        said = f"state `{state.name}` of service `{service}` comes from `{ref}`"
        if ref.service == service:
            return f"{said}: the service itself; `{ref}` is not defined in the dataflow elsewhere"
        if owner is not None:
            return (
                f"{said}: that is a {owner.form.value} itself, not defined in the dataflow by "
                f"`{ref.service}`; name the owner"
            )
        known = [
            f"{one.owner}.{one.name}"
            for states in self._states.whole.values()
            for one in states.values()
            if one.form is StateForm.TYPED
        ]
        near = difflib.get_close_matches(str(ref), known, n=3)
        hint = ", ".join(f"`{one}`" for one in near or sorted(known)[:10]) or "none"
        meant = "did you mean" if near else "there are"
        return f"{said}: `{ref}` is not defined in the dataflow; {meant} {hint}"
