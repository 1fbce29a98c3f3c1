"""Parse definitions: the entry point of this package.

`parse_document` reads a dataflow or a package and reports all errors together.

Source: sdf-states.md 2.1, 2.11 and 2.12; errors E01, E02, E04, E05.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from arroyo_dagster.dataflow.definition import grammar
from arroyo_dagster.dataflow.definition.bodies import ARITIES, inspect_body
from arroyo_dagster.dataflow.definition.definition import (
    AsWritten,
    Dataflow,
    Endpoint,
    FunctionDef,
    Package,
    ServiceDef,
    StateDef,
    StateForm,
    TopicDef,
)
from arroyo_dagster.dataflow.definition.diagnostics import Diagnostics, InvalidDefinition
from arroyo_dagster.dataflow.definition.legacy import modernised
from arroyo_dagster.dataflow.definition.packages import (
    Imported,
    ImportReader,
    check_one_owner,
    inject_states,
    states_of_imports,
)
from arroyo_dagster.dataflow.definition.reading_services import (
    ServiceReader,
    StepReader,
    kept,
    names_of,
)
from arroyo_dagster.dataflow.definition.reading_states import Block, StateReader, States
from arroyo_dagster.dataflow.definition.reading_types import TypeReader
from arroyo_dagster.dataflow.definition.scope import Scope
from arroyo_dagster.dataflow.definition.shapes import Conformity, text_of
from arroyo_dagster.dataflow.definition.types import NamedType, TypeDef, names_in
from arroyo_dagster.dataflow.definition.yaml_tree import Node, read_tree
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.ids import checked_name


def parse_document(
    text: str,
    *,
    legacy: bool = False,
    extended: bool = False,
    packages: Mapping[str, Package] | None = None,
) -> Dataflow | Package:
    """Read a dataflow.yaml or an sdf-package.yaml.

    It is a package if it has `states` or `functions` but no `services`, else a dataflow.

    Args:
        text: the YAML.
        legacy: also read unsupported apiVersions, such as those of dataflows before 0.5.0. Errors
            outside of their states and types are then warnings.
        extended: accept scalar values that SDF's own engine rejects, such as f64 or string.
        packages: the packages that it imports, by id; None = do not check imported names.

    Raises:
        InvalidDefinition: with all errors.
    """
    return _DefinitionReader(text, legacy=legacy, extended=extended, packages=packages).document()


@dataclass(slots=True)
class _Shared:
    """The sections that dataflows and packages share, as read."""

    types: dict[str, TypeDef | None]
    imported: Imported
    scope: Scope


class _DefinitionReader:
    def __init__(
        self,
        text: str,
        *,
        legacy: bool,
        extended: bool,
        packages: Mapping[str, Package] | None,
    ) -> None:
        self._mistakes = Diagnostics()
        root = read_tree(text, self._mistakes)
        if root is None or not isinstance(root.value, dict):
            if root is not None:
                self._mistakes.add(
                    root.diagnostic_at("E04", f"expected a mapping, found {root.kind}")
                )
            raise InvalidDefinition("document", self._mistakes.found)
        # Whether a document is a package by its keys; if they are misspelt, by the nearest.
        found = {*root.members}
        if not found & {"services", *_OF_PACKAGES}:
            known = [*grammar.DATAFLOW.fields, *_OF_PACKAGES]
            found = {near for key in found for near in difflib.get_close_matches(key, known, n=1)}
        self._is_dataflow = not ("services" not in found and bool(found & _OF_PACKAGES))
        self._legacy, self._extended, self._packages = legacy, extended, packages
        self._version = text_of(root, "apiVersion") or ""
        supported = grammar.DATAFLOW_VERSIONS if self._is_dataflow else grammar.PACKAGE_VERSIONS
        self._lenient = legacy and self._version not in supported
        self._shapes = Conformity(grammar.GRAMMAR, self._mistakes)
        self._shape = grammar.DATAFLOW if self._is_dataflow else grammar.PACKAGE
        self._root = self._shapes.bound(modernised(root) if legacy else root, self._shape)
        self._types = TypeReader(self._mistakes, self._shapes)

    def document(self) -> Dataflow | Package:
        with self._mistakes.softened(self._lenient):
            root, version = self._root, self._root.given("apiVersion")
            supported = grammar.DATAFLOW_VERSIONS if self._is_dataflow else grammar.PACKAGE_VERSIONS
            if version is None or version.value not in supported:
                found = "is missing" if version is None else f"`{version.plain()}` is not supported"
                message = f"apiVersion {found}; expected one of {', '.join(supported)}"
                if self._version in grammar.LEGACY_VERSIONS:
                    message += (
                        ". Upgrade to 0.5.0, or read it as it is with --accept legacy (legacy=True)"
                    )
                self._mistakes.add(root.diagnostic_at("E01", message, key="apiVersion"))
            if self._is_dataflow and self._version == "0.5.0" and root.given("schedule"):
                message = "`schedule` needs apiVersion 0.6.0, found 0.5.0"
                self._mistakes.add(root.diagnostic_at("E02", message, key="schedule"))
            meta = root.get("meta")
            for key in grammar.META.fields:
                text = text_of(meta, key)
                if meta is not None and text and key != "version":
                    check_path_name(text, meta, self._mistakes, key=key)
                if meta is not None and text is not None and not text.strip():
                    self._mistakes.add(meta.diagnostic_at("E05", f"{key} cannot be empty", key=key))
            self._shapes.check(self._root, self._shape)
        document = self._dataflow() if self._is_dataflow else self._package()
        self._mistakes.raise_if_any("dataflow" if self._is_dataflow else "package")
        return replace(document, warnings=self._mistakes.warnings)

    # ---- head ------------------------------------------------------------------------------------

    def _head(self) -> dict[str, Any]:
        meta = self._root.get("meta")
        head = {key: text_of(meta, key) or "" for key in grammar.META.fields}
        return {**head, "api_version": self._version, "tests": self._root.get("tests")}

    def _kept(self, keys: tuple[str, ...]) -> dict[str, AsWritten]:
        parts = {key: kept(self._root, key) for key in keys}
        return {key: part for key, part in parts.items() if part is not None}

    # ---- types and imports -----------------------------------------------------------------------

    def _shared(self) -> _Shared:
        section = self._root.get("types")
        types = {} if section is None else self._types.declared(section)
        imports = self._root.get("imports")
        with self._mistakes.softened(self._lenient):
            reader = ImportReader(self._mistakes, self._packages, types)
            imported = reader.read(imports.items if imports else ())
        scope = Scope.of(types, imported.types)
        if section is not None:
            check_names(types, section, scope, self._mistakes)
        return _Shared(types, imported, scope)

    def _states(
        self,
        parts: _Shared,
        blocks: list[Block],
        imported_states: Mapping[str, Mapping[str, StateDef] | None] | None = None,
    ) -> States:
        section = self._root.get("types")
        lines = {} if section is None else {k: v[0] for k, v in section.key_places.items()}
        reader = StateReader(
            self._mistakes,
            self._types,
            parts.scope,
            api_version=self._version,
            type_lines=lines,
            extended=self._extended,
        )
        return reader.read(blocks, imported_states or {})

    # ---- a dataflow ------------------------------------------------------------------------------

    def _dataflow(self) -> Dataflow:
        parts = self._shared()
        section = self._root.get("services")
        nodes = {} if section is None else section.members
        with self._mistakes.softened(self._lenient):
            for name, node in nodes.items():
                check_path_name(name, node, self._mistakes)
            topics = self._topics(parts.scope)
            reader = ServiceReader(self._mistakes, StepReader(self._mistakes, self._types))
            services = {name: reader.read(name, node) for name, node in nodes.items()}
        imported_states = {
            name: states_of_imports(one, parts.imported) for name, one in services.items()
        }
        states = self._states(parts, _blocks(services, nodes), imported_states)
        with self._mistakes.softened(self._lenient):
            services = self._completed(parts, services, states, topics, nodes)
        return Dataflow(
            **self._head(),
            types=_whole(parts.types),
            imports=tuple(sorted(parts.imported.imports, key=lambda one: one.package)),
            kept=self._kept(grammar.KEPT_BY_DATAFLOWS),
            services=services,
            topics=topics,
        )

    def _completed(
        self,
        parts: _Shared,
        services: Mapping[str, ServiceDef],
        states: States,
        topics: Mapping[str, TopicDef],
        nodes: Mapping[str, Node],
    ) -> dict[str, ServiceDef]:
        schedule = self._root.get("schedule")
        schedules = frozenset({} if schedule is None else schedule.members)
        check = ServiceCheck(self._mistakes, topics, schedules, parts.scope, parts.imported)
        done: dict[str, ServiceDef] = {}
        for name, service in services.items():
            declared = replace(service, states=states.whole.get(name, {}))
            done[name] = inject_states(declared, parts.imported, nodes[name], self._mistakes)
            check.check(done[name], nodes[name])
        check_one_owner(done, nodes, self._mistakes)
        return done

    def _topics(self, scope: Scope) -> dict[str, TopicDef]:
        section = self._root.get("topics")
        nodes = {} if section is None else section.members
        for name, node in nodes.items():
            check_path_name(name, node, self._mistakes)
        return {name: self._topic(name, node, scope) for name, node in nodes.items()}

    def _topic(self, name: str, node: Node, scope: Scope) -> TopicDef:
        schema = node.get("schema")
        found: dict[str, TypeDef | None] = {"key": None, "value": None}
        for key in found:
            part = None if schema is None else schema.get(key)
            declared = None if part is None else self._types.read(part)
            found[key] = declared
            if part is None or declared is None:
                continue
            for inner in sorted(names_in(declared)):
                if (problem := scope.resolve(NamedType(inner)).problem) is not None:
                    message = f"{key} of topic `{name}`: {problem}"
                    self._mistakes.add(part.diagnostic_at("E23", message, key="type"))
        settings = AsWritten.of(node.plain())
        return TopicDef(name=name, key=found["key"], value=found["value"], settings=settings)

    # ---- a package -------------------------------------------------------------------------------

    def _package(self) -> Package:
        parts = self._shared()
        head = self._head()
        block = self._root.get("states")
        owner = head["name"]
        blocks = [] if block is None else [Block(owner=owner, kind="package", node=block)]
        states = self._states(parts, blocks)
        known = frozenset(states.named.get(owner, {})) | parts.imported.states
        section = self._root.get("functions")
        with self._mistakes.softened(self._lenient):
            steps = StepReader(self._mistakes, self._types)
            nodes = {} if section is None else section.members
            functions = {name: _function(name, node, steps) for name, node in nodes.items()}
            if section is not None:
                check_functions(functions, known, section, self._mistakes)
        return Package(
            **head,
            types=_whole(parts.types),
            imports=tuple(sorted(parts.imported.imports, key=lambda one: one.package)),
            kept=self._kept(grammar.KEPT_BY_PACKAGES),
            states=states.whole.get(owner, {}),
            functions=functions,
        )


_OF_PACKAGES = {"states", "functions"}


def _whole(types: Mapping[str, TypeDef | None]) -> dict[str, TypeDef]:
    return {name: declared for name, declared in types.items() if declared is not None}


def _blocks(services: Mapping[str, ServiceDef], nodes: Mapping[str, Node]) -> list[Block]:
    found: list[Block] = []
    for name, service in services.items():
        block = nodes[name].get("states")
        window = None if service.windowed is None else service.windowed.window
        if block is not None:
            found.append(Block(owner=name, kind="service", node=block, window=window))
    return found


def _function(name: str, node: Node, steps: StepReader) -> FunctionDef:
    operator = text_of(node, "operator") or ""
    return FunctionDef(
        name=name,
        operator="flush" if operator == "aggregate" else operator,
        inputs=steps.inputs(node),
        output=steps.parameter(node.get("output")),
        states=names_of(node, "states"),
        language=text_of(node, "lang"),
        source=text_of(node, "run"),
        dependencies=kept(node, "dependencies"),
        line=(node.get("run") or node).line,
    )


# ---- checks between the parts of a definition ----------------------------------------------------
# Source: sdf-states.md 2.4, 5.2; errors E23, E30, E33, E38 to E40.


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
            found = None if step.target is None else self._imported.functions.get(step.target)
            if found is not None and found[0].operator != step.operator:
                message = (
                    f"function `{step.target}` is of operator {found[0].operator}, expected "
                    f"{step.operator} at `{step.path}`"
                )
                self._mistakes.add(node.diagnostic_at("E33", message))
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
