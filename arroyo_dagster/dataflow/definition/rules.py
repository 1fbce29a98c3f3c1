"""The rules between the parts of a definition, which their shapes do not have.

Names of types, topics, functions and states refer to something; a state has one owner; functions
take and give what their operator does; windows lose no record. Each is reported where it stands.

Source: sdf-states.md 2.4, 2.10, 3.5, 5.2; errors E04, E16, E22, E23, E30, E33, E37 to E40.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from arroyo_dagster.dataflow.definition.bodies import ARITIES, inspect_body
from arroyo_dagster.dataflow.definition.definition import (
    FunctionDef,
    ServiceDef,
    StateDef,
    StateForm,
    StateRef,
    TopicDef,
)
from arroyo_dagster.dataflow.definition.shapes import text_of
from arroyo_dagster.dataflow.definition.types import NamedType, Scope, TypeDef, names_in
from arroyo_dagster.dataflow.definition.windows import MOST_WINDOWS
from arroyo_dagster.dataflow.definition.yaml_tree import Node
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.ids import checked_name

if TYPE_CHECKING:
    from arroyo_dagster.dataflow.definition.packages import Imported
    from arroyo_dagster.dataflow.definition.reading_states import States

# ---- names, topics and functions -----------------------------------------------------------------


def unresolved_names(declared: TypeDef | None, scope: Scope) -> Iterator[str]:
    """Yield the reason for each name in a type that refers to no type."""
    for name in sorted(names_in(declared)) if declared is not None else ():
        problem = scope.resolve(NamedType(name)).problem
        if problem is not None:
            yield problem


def check_path_name(name: str, node: Node, *, key: str | None = None) -> None:
    """Report a name that cannot be part of a path: it names a directory or a table of the state."""
    try:
        checked_name(name, "path")
    except InputError as error:
        reason = error.message.partition(": ")[2]
        node.report("E04", f"`{name!r:.80}` is no name of a path: {reason}", key=key)


def check_service(
    service: ServiceDef,
    node: Node,
    topics: Mapping[str, TopicDef],
    schedules: Collection[str],
    scope: Scope,
    imported: Imported,
) -> None:
    """Report the errors of one service as a whole."""
    for key, ends in (("sources", service.sources), ("sinks", service.sinks)):
        for end, place in zip(ends, node.listed(key), strict=True):
            known = schedules if end.kind == "schedule" else topics
            if end.id is not None and end.id not in known:
                message = (
                    f"service `{service.name}`: {end.kind} `{end.id}` is not defined in the "
                    f"dataflow; it has {', '.join(sorted(known)) or 'none'}"
                )
                place.report("E39", message, key="id")
        # An endpoint's own steps may convert its topic's type to another.
        ids = [end.id for end in ends if not end.transforms and end.id is not None]
        plain = [topics[name] for name in ids if name in topics]
        resolved = [topic.value and scope.resolve(topic.value).type for topic in plain]
        for topic, declared in zip(plain[1:], resolved[1:], strict=True):
            if resolved[0] is not None and declared is not None and resolved[0] != declared:
                message = (
                    f"service `{service.name}`: {key} `{plain[0].name}` and `{topic.name}` differ "
                    f"in type, {_value_type(plain[0])} and {_value_type(topic)}"
                )
                node.report("E39", message, key=key)
    for step in service.steps:
        function = None if step.target is None else imported.functions.get(step.target)
        if function is not None and function[0].operator != step.operator:
            message = (
                f"function `{step.target}` is of operator {function[0].operator}, expected "
                f"{step.operator} at `{step.path}`"
            )
            node.report("E33", message)
    if service.states and not service.steps:
        owned = [state for state in service.states.values() if state.form is StateForm.TYPED]
        names = ", ".join(sorted(state.name for state in owned or service.states.values()))
        message = f"service `{service.name}` has no operator that can reach its states: {names}"
        node.warn("E40", message, key="states")


def _value_type(topic: TopicDef) -> str:
    value = topic.settings.value.get("schema", {}).get("value", {})
    return f"`{value.get('type')}`"


def check_function(function: FunctionDef, states: Collection[str], node: Node) -> None:
    """Check a package's function: the states it lists, its inputs and output, and its body.

    A function with an inline body may omit its signature, which is then that of the body.
    """
    name = function.name
    for state in function.states:
        if state not in states:
            known = ", ".join(sorted(states)) or "none"
            message = f"cannot resolve state `{state}`; the package has {known}"
            node.report("E30", f"function `{name}`: {message}")
    for number, message in _signature_errors(function):
        node.report(number, f"function `{name}` of operator {function.operator}{message}")
    if function.source is not None and function.operator in ARITIES:
        body = inspect_body(function.source, function.language, function.operator)
        for number, message in body.errors:
            node.report(number, f"function `{name}`: {message}", key="run")


def _signature_errors(function: FunctionDef) -> list[tuple[str, str]]:
    problems: list[tuple[str, str]] = []
    if any(one.is_key for one in function.inputs[1:]):
        problems.append(("E38", ": the input of kind key must be the first"))
    operator, output = function.operator, function.output
    if function.source is not None and output is None:
        return problems  # the body's own signature counts
    if operator == "update-state" and output is not None:
        problems.append(("E38", " has an output; expected none"))
    if operator == "flush" and function.inputs:
        problems.append(("E38", " has inputs; expected none"))
    if operator not in ("update-state", "filter") and output is None:
        problems.append(("E38", " has no output; expected one"))
    if operator == "filter" and (output is None or _name(output.type) != "bool"):
        output_type = "none" if output is None else _name(output.type)
        problems.append(("E38", f" has the output {output_type}; expected bool"))
    if operator == "filter-map" and output is not None and not output.optional:
        problems.append(("E38", " has an output that is not optional; expected `optional: true`"))
    if operator == "assign-timestamp" and output is not None and _name(output.type) != "i64":
        problems.append(("E29", f" gives {_name(output.type)}; expected a signed 64-bit integer"))
    return problems


def _name(declared: TypeDef) -> str:
    return str(getattr(declared, "value", None) or getattr(declared, "name", "another type"))


# ---- states: references and owners ---------------------------------------------------------------


def link_states(states: States) -> None:
    """Copy the owner's definition into each reference; remove references without an owner."""
    for service, of_service in states.whole.items():
        for name, state in list(of_service.items()):
            linked = state if state.ref is None else _linked(states, service, state, state.ref)
            if linked is None:
                del of_service[name]
            else:
                of_service[name] = linked


def _linked(states: States, service: str, state: StateDef, ref: StateRef) -> StateDef | None:
    owner = states.whole.get(ref.service, {}).get(ref.state)
    if owner is None and ref.state in states.named.get(ref.service, {}):
        return None  # it exists, and its errors were reported
    if owner is None and ref.service != service:
        imported_states = states.imported_states.get(ref.service, {})
        if imported_states is None:
            return state
        owner = imported_states.get(ref.state)
    if owner is None or owner.form is not StateForm.TYPED or ref.service == service:
        message = _missing(states, service, state, ref, owner)
        states.named[state.owner][state.name].report("E16", message)
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


def _missing(
    states: States, service: str, state: StateDef, ref: StateRef, owner: StateDef | None
) -> str:
    comes = f"state `{state.name}` of service `{service}` comes from `{ref}`"
    if ref.service == service:
        return f"{comes}: the service itself; `{ref}` is not defined in the dataflow elsewhere"
    if owner is not None:
        return (
            f"{comes}: that is a {owner.form.value} itself, not defined in the dataflow by "
            f"`{ref.service}`; name the owner"
        )
    known = [
        f"{other.owner}.{other.name}"
        for of_owner in states.whole.values()
        for other in of_owner.values()
        if other.form is StateForm.TYPED
    ]
    near = difflib.get_close_matches(str(ref), known, n=3)
    hint = ", ".join(f"`{name}`" for name in near or sorted(known)[:10]) or "none"
    meant = "did you mean" if near else "there are"
    return f"{comes}: `{ref}` is not defined in the dataflow; {meant} {hint}"


def check_one_owner(
    services: Mapping[str, ServiceDef],
    nodes: Mapping[str, Node],
    declared: Mapping[str, Mapping[str, Node]],
) -> None:
    """Report states whose table another service owns (E22).

    Args:
        services: with the states that imported functions add to them.
        nodes: the nodes of the services.
        declared: the nodes of the states that services declare, by service and name.
    """
    owned = [
        state
        for service in services.values()
        for state in service.states.values()
        if state.form is StateForm.TYPED
    ]
    first: dict[str, StateDef] = {}
    for state in sorted(owned, key=lambda state: state.package is not None):  # stable
        owner = first.setdefault(state.table, state)
        if owner.owner == state.owner:
            continue
        table = f"both are the table `{state.table}`"
        if state.package is None:
            message = (
                f"state `{state.name}` is already defined by `{owner.owner}` in line "
                f"{owner.line}: {table}; rename one, or refer "
                f"to it with `from: {owner.owner}.{owner.name}`"
            )
            declared[state.owner][state.name].report("E22", message, softened=False)
            continue
        message = (
            f"state `{state.name}`, which a function of package `{state.package}` adds to "
            f"service `{state.owner}`, is already defined by `{owner.owner}`: {table}; "
            f"declare `{state.name}: {{ from: {owner.owner}.{owner.name} }}` in "
            f"`{state.owner}` to read that one, or use the function in one service"
        )
        nodes[state.owner].report("E22", message, key="states")


# ---- windows -------------------------------------------------------------------------------------


def check_slide(duration_ms: int, slide_ms: int, node: Node) -> None:
    """Report a slide that loses records, or puts each into very many windows (E37)."""
    problem = None
    if slide_ms > duration_ms:
        problem = "is longer than the duration: records between two windows would be lost"
    elif duration_ms > slide_ms * MOST_WINDOWS:
        problem = f"puts a record into more than {MOST_WINDOWS} windows; lengthen it"
    if problem is not None:
        node.report("E37", f"slide `{text_of(node, 'slide')}` {problem}", key="slide")
