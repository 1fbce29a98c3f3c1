"""Checks between the parts of a definition.

Source: sdf-states.md 2.4, 5.2; errors E23, E30, E33, E38 to E40.
"""

from __future__ import annotations

from collections.abc import Mapping

from arroyo_dagster.dataflow.definition.bodies import ARITIES, inspect_body
from arroyo_dagster.dataflow.definition.definition import (
    Endpoint,
    FunctionDef,
    ServiceDef,
    StateForm,
    StepDef,
    TopicDef,
)
from arroyo_dagster.dataflow.definition.diagnostics import Diagnostics
from arroyo_dagster.dataflow.definition.packages import Imported
from arroyo_dagster.dataflow.definition.scope import Scope
from arroyo_dagster.dataflow.definition.types import NamedType, TypeDef, names_in
from arroyo_dagster.dataflow.definition.yaml_tree import Node
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.ids import checked_name


def check_names(
    types: Mapping[str, TypeDef | None], node: Node, scope: Scope, to: Diagnostics
) -> None:
    """Report every name in a type of the `types` section that refers to no type."""
    for name, declared in types.items():
        if declared is None:
            continue
        for inner in sorted(names_in(declared)):
            problem = scope.resolve(NamedType(inner)).problem
            if problem is not None:
                to.add(node.members[name].diagnostic_at("E23", f"type `{name}`: {problem}"))


def check_path_name(name: str, node: Node, to: Diagnostics, *, key: str | None = None) -> None:
    """Report a name that cannot be part of a path: it names a directory or a table of the state."""
    try:
        checked_name(name, "path")
    except InputError as error:
        said = error.message.partition(": ")[2]
        to.add(node.diagnostic_at("E04", f"`{name!r:.80}` is no name of a path: {said}", key=key))


class ServiceCheck:
    """Checks services, one at a time, against topics, schedules and imports."""

    def __init__(
        self,
        diagnostics: Diagnostics,
        topics: Mapping[str, TopicDef],
        schedules: frozenset[str],
        scope: Scope,
        imported: Imported,
    ) -> None:
        self._mistakes = diagnostics
        self._topics = topics
        self._schedules = schedules
        self._scope = scope
        self._imported = imported

    def check(self, service: ServiceDef, node: Node) -> None:
        """Report the errors of one service as a whole."""
        for key, ends in (("sources", service.sources), ("sinks", service.sinks)):
            holder = node.get(key)
            for end, place in zip(ends, holder.items if holder else (), strict=True):
                self._known(service, end, place)
            self._same_types(service, key, ends, node)
        for step in service.steps:
            self._imported_kind(step, node)
        self._check_reachable_states(service, node)

    def _known(self, service: ServiceDef, end: Endpoint, place: Node) -> None:
        known = self._schedules if end.kind == "schedule" else self._topics
        if end.id is not None and end.id not in known:
            listed = ", ".join(sorted(known)) or "none"
            message = (
                f"service `{service.name}`: {end.kind} `{end.id}` is not defined in the dataflow; "
                f"it has {listed}"
            )
            self._mistakes.add(place.diagnostic_at("E39", message, key="id"))

    def _same_types(
        self, service: ServiceDef, key: str, ends: tuple[Endpoint, ...], node: Node
    ) -> None:
        # An endpoint's own steps may convert its topic's type to another.
        ids = [end.id for end in ends if not end.transforms and end.id is not None]
        plain = [self._topics[name] for name in ids if name in self._topics]
        for topic in plain[1:]:
            first, other = self._type(plain[0]), self._type(topic)
            if first is not None and other is not None and first != other:
                message = (
                    f"service `{service.name}`: {key} `{plain[0].name}` and `{topic.name}` differ "
                    f"in type, {_value_type(plain[0])} and {_value_type(topic)}"
                )
                self._mistakes.add(node.diagnostic_at("E39", message, key=key))

    def _type(self, topic: TopicDef) -> TypeDef | None:
        return None if topic.value is None else self._scope.resolve(topic.value).type

    def _imported_kind(self, step: StepDef, node: Node) -> None:
        found = None if step.target is None else self._imported.functions.get(step.target)
        if found is not None and found[0].operator != step.operator:
            message = (
                f"function `{step.target}` is of operator {found[0].operator}, expected "
                f"{step.operator} at `{step.path}`"
            )
            self._mistakes.add(node.diagnostic_at("E33", message))

    def _check_reachable_states(self, service: ServiceDef, node: Node) -> None:
        owned = [one for one in service.states.values() if one.form is StateForm.TYPED]
        if service.steps or not service.states:
            return
        names = ", ".join(sorted(state.name for state in owned or service.states.values()))
        message = f"service `{service.name}` has no operator that can reach its states: {names}"
        self._mistakes.warn(node.diagnostic_at("E40", message, key="states"))


def _value_type(topic: TopicDef) -> str:
    value = topic.settings.value.get("schema", {}).get("value", {})
    return f"`{value.get('type')}`"


def check_functions(
    functions: Mapping[str, FunctionDef], states: frozenset[str], node: Node, to: Diagnostics
) -> None:
    """Check a package's functions: the states they list, their inputs and outputs, and bodies.

    A function with an inline body may omit its signature, which is then that of the body.
    """
    for name, function in functions.items():
        place = node.members[name]
        for state in function.states:
            if state not in states:
                known = ", ".join(sorted(states)) or "none"
                message = (
                    f"function `{name}`: cannot resolve state `{state}`; the package has {known}"
                )
                to.add(place.diagnostic_at("E30", message))
        for number, message in _signature_errors(function):
            to.add(
                place.diagnostic_at(
                    number, f"function `{name}` of operator {function.operator}{message}"
                )
            )
        if function.source is not None and function.operator in ARITIES:
            body = inspect_body(function.source, function.language, function.operator)
            for number, message in body.errors:
                to.add(place.diagnostic_at(number, f"function `{name}`: {message}", key="run"))


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
        found = "none" if output is None else _name(output.type)
        problems.append(("E38", f" has the output {found}; expected bool"))
    if operator == "filter-map" and output is not None and not output.optional:
        problems.append(("E38", " has an output that is not optional; expected `optional: true`"))
    if operator == "assign-timestamp" and output is not None and _name(output.type) != "i64":
        problems.append(("E29", f" gives {_name(output.type)}; expected a signed 64-bit integer"))
    return problems


def _name(declared: TypeDef) -> str:
    return str(getattr(declared, "value", None) or getattr(declared, "name", "another type"))
