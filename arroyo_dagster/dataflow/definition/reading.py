"""Parse definitions: the entry point of this package.

`parse_document` reads a dataflow or a package and reports all errors together.

Source: sdf-states.md 2.1, 2.11 and 2.12; errors E01, E02, E04, E05.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from arroyo_dagster.dataflow.definition import grammar
from arroyo_dagster.dataflow.definition.bodies import ARITIES, inspect_body
from arroyo_dagster.dataflow.definition.definition import (
    AsWritten,
    Dataflow,
    FunctionDef,
    Package,
    ServiceDef,
    StateForm,
    TopicDef,
)
from arroyo_dagster.dataflow.definition.diagnostics import Diagnostics, InvalidDefinition
from arroyo_dagster.dataflow.definition.legacy import modernise
from arroyo_dagster.dataflow.definition.packages import (
    Imported,
    check_one_owner,
    inject_states,
    states_of_imports,
)
from arroyo_dagster.dataflow.definition.reading_services import ServiceReader, kept, read_function
from arroyo_dagster.dataflow.definition.reading_states import Block, StateReader, States, link
from arroyo_dagster.dataflow.definition.reading_types import read_declared, read_type
from arroyo_dagster.dataflow.definition.shapes import check, text_of
from arroyo_dagster.dataflow.definition.types import NamedType, Scope, TypeDef, names_in, same_name
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
    return DefinitionReader(text, lambda _: packages, legacy=legacy, extended=extended).document()


_OF_PACKAGES = {"states", "functions"}


class DefinitionReader:
    """Reads one definition as `parse_document` does. `packages` gets the root, a mapping."""

    def __init__(
        self,
        text: str,
        packages: Callable[[Node], Mapping[str, Package] | None],
        *,
        legacy: bool,
        extended: bool,
    ) -> None:
        self._diagnostics = Diagnostics()
        root = read_tree(text, self._diagnostics)
        if root is None or not isinstance(root.value, dict):
            if root is not None:
                root.report("E04", f"expected a mapping, found {root.kind}")
            raise InvalidDefinition("document", self._diagnostics.found)
        # Whether a document is a package by its keys; if they are misspelt, by the nearest.
        keys = {*root.members}
        if not keys & {"services", *_OF_PACKAGES}:
            known = [*grammar.DATAFLOW.fields, *_OF_PACKAGES]
            keys = {near for key in keys for near in difflib.get_close_matches(key, known, n=1)}
        self._is_dataflow = not ("services" not in keys and bool(keys & _OF_PACKAGES))
        self._extended, self._packages = extended, packages(root)
        self._version = text_of(root, "apiVersion") or ""
        self._supported = (
            grammar.DATAFLOW_VERSIONS if self._is_dataflow else grammar.PACKAGE_VERSIONS
        )
        self._lenient = legacy and self._version not in self._supported
        self._root = root
        if legacy:
            modernise(root)

    def document(self) -> Dataflow | Package:
        with self._diagnostics.softened(self._lenient):
            check(self._root, grammar.DATAFLOW if self._is_dataflow else grammar.PACKAGE)
            self._check_head()
        what, read = (
            ("dataflow", self._dataflow) if self._is_dataflow else ("package", self._package)
        )
        document = read()
        self._diagnostics.raise_if_any(what)
        return replace(document, warnings=self._diagnostics.warnings)

    # ---- the parts that dataflows and packages share ---------------------------------------------

    def _check_head(self) -> None:
        root, version = self._root, self._root.given("apiVersion")
        if version is None or version.value not in self._supported:
            fault = "is missing" if version is None else f"`{version.plain()}` is not supported"
            message = f"apiVersion {fault}; expected one of {', '.join(self._supported)}"
            if self._version in grammar.LEGACY_VERSIONS:
                message += (
                    ". Upgrade to 0.5.0, or read it as it is with --accept legacy (legacy=True)"
                )
            root.report("E01", message, key="apiVersion")
        if self._is_dataflow and self._version == "0.5.0" and root.given("schedule"):
            root.report("E02", "`schedule` needs apiVersion 0.6.0, found 0.5.0", key="schedule")
        meta = root.get("meta")
        for key in grammar.META.fields if meta is not None else ():
            text = text_of(meta, key)
            assert meta is not None
            if text and key != "version":
                check_path_name(text, meta, key=key)
            if text is not None and not text.strip():
                meta.report("E05", f"{key} cannot be empty", key=key)

    def _shared(self, kept_keys: tuple[str, ...]) -> tuple[dict[str, Any], Imported, Scope]:
        """Return arguments of `Document`, the result of the imports, and the types in scope."""
        section = self._root.get("types")
        types = {} if section is None else read_declared(section)
        imported = Imported({same_name(name): declared for name, declared in types.items()})
        with self._diagnostics.softened(self._lenient):
            for node in self._root.listed("imports"):
                imported.read(node, self._packages)
        scope = Scope.of(types, imported.types)
        for name, declared in types.items():
            for problem in _unresolved(declared, scope):
                assert section is not None
                section.members[name].report("E23", f"type `{name}`: {problem}")
        meta = self._root.get("meta")
        parts = {key: kept(self._root, key) for key in kept_keys}
        head = {
            **{key: text_of(meta, key) or "" for key in grammar.META.fields},
            "api_version": self._version,
            "tests": self._root.get("tests"),
            "types": {name: declared for name, declared in types.items() if declared is not None},
            "imports": tuple(sorted(imported.imports, key=lambda item: item.package)),
            "kept": {key: part for key, part in parts.items() if part is not None},
        }
        return head, imported, scope

    def _read_states(self, blocks: list[Block], states: States, scope: Scope) -> None:
        section = self._root.get("types")
        places = {} if section is None else section.key_places
        reader = StateReader(
            scope=scope,
            api_version=self._version,
            type_lines={same_name(name): line for name, (line, _) in places.items()},
            extended=self._extended,
        )
        for block in blocks:
            reader.read(block, states)
        link(states)

    # ---- a dataflow ------------------------------------------------------------------------------

    def _dataflow(self) -> Dataflow:
        head, imported, scope = self._shared(grammar.KEPT_BY_DATAFLOWS)
        nodes, topic_nodes = self._named_members("services"), self._named_members("topics")
        with self._diagnostics.softened(self._lenient):
            for name, node in (*nodes.items(), *topic_nodes.items()):
                check_path_name(name, node)
            topics = {name: _topic(name, node, scope) for name, node in topic_nodes.items()}
            reader = ServiceReader()
            services = {name: reader.read(name, node) for name, node in nodes.items()}
        states = States({name: states_of_imports(x, imported) for name, x in services.items()})
        self._read_states([*_blocks(services, nodes)], states, scope)
        with self._diagnostics.softened(self._lenient):
            schedules = self._named_members("schedule").keys()
            for name, service in services.items():
                declared = replace(service, states=states.whole.get(name, {}))
                services[name] = inject_states(declared, imported, nodes[name])
                _check_service(services[name], nodes[name], topics, schedules, scope, imported)
            check_one_owner(services, nodes, states.named)
        return Dataflow(**head, services=services, topics=topics)

    def _named_members(self, key: str) -> dict[str, Node]:
        section = self._root.get(key)
        return {} if section is None else section.members

    # ---- a package -------------------------------------------------------------------------------

    def _package(self) -> Package:
        head, imported, scope = self._shared(grammar.KEPT_BY_PACKAGES)
        block, owner, states = self._root.get("states"), head["name"], States()
        blocks = [] if block is None else [Block(owner=owner, kind="package", node=block)]
        self._read_states(blocks, states, scope)
        known = {*states.named.get(owner, {}), *imported.states}
        nodes = self._named_members("functions")
        with self._diagnostics.softened(self._lenient):
            functions = {name: read_function(name, node) for name, node in nodes.items()}
            for name, function in functions.items():
                _check_function(function, known, nodes[name])
        return Package(**head, states=states.whole.get(owner, {}), functions=functions)


def _topic(name: str, node: Node, scope: Scope) -> TopicDef:
    schema = node.get("schema")
    types: dict[str, TypeDef | None] = {"key": None, "value": None}
    for key in types:
        part = None if schema is None else schema.get(key)
        if part is not None:
            types[key] = read_type(part)
            for problem in _unresolved(types[key], scope):
                part.report("E23", f"{key} of topic `{name}`: {problem}", key="type")
    return TopicDef(name=name, **types, settings=AsWritten.of(node.plain()))


def _blocks(services: Mapping[str, ServiceDef], nodes: Mapping[str, Node]) -> Iterator[Block]:
    for name, service in services.items():
        block = nodes[name].get("states")
        window = None if service.windowed is None else service.windowed.window
        if block is not None:
            yield Block(owner=name, kind="service", node=block, window=window)


# ---- checks between the parts of a definition ----------------------------------------------------
# Source: sdf-states.md 2.4, 5.2; errors E23, E30, E33, E38 to E40.


def _unresolved(declared: TypeDef | None, scope: Scope) -> Iterator[str]:
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


def _check_service(
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


def _check_function(function: FunctionDef, states: Collection[str], node: Node) -> None:
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
        found = "none" if output is None else _name(output.type)
        problems.append(("E38", f" has the output {found}; expected bool"))
    if operator == "filter-map" and output is not None and not output.optional:
        problems.append(("E38", " has an output that is not optional; expected `optional: true`"))
    if operator == "assign-timestamp" and output is not None and _name(output.type) != "i64":
        problems.append(("E29", f" gives {_name(output.type)}; expected a signed 64-bit integer"))
    return problems


def _name(declared: TypeDef) -> str:
    return str(getattr(declared, "value", None) or getattr(declared, "name", "another type"))
