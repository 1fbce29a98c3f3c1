"""Parse definitions: the entry point of this package.

`parse_document` reads a dataflow or a package and reports all errors together.

Source: sdf-states.md 2.1, 2.11 and 2.12; errors E01, E02, E04, E05.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from arroyo_dagster.dataflow.definition import grammar
from arroyo_dagster.dataflow.definition.definition import (
    AsWritten,
    Dataflow,
    Package,
    ServiceDef,
    TopicDef,
)
from arroyo_dagster.dataflow.definition.diagnostics import Diagnostics, InvalidDefinition
from arroyo_dagster.dataflow.definition.legacy import modernise
from arroyo_dagster.dataflow.definition.packages import Imported, inject_states, states_of_imports
from arroyo_dagster.dataflow.definition.reading_services import ServiceReader, kept, read_function
from arroyo_dagster.dataflow.definition.reading_states import Block, StateReader, States
from arroyo_dagster.dataflow.definition.reading_types import read_declared, read_type
from arroyo_dagster.dataflow.definition.rules import (
    check_function,
    check_one_owner,
    check_path_name,
    check_service,
    link_states,
    unresolved_names,
)
from arroyo_dagster.dataflow.definition.shapes import check, text_of
from arroyo_dagster.dataflow.definition.types import Scope, TypeDef, same_name
from arroyo_dagster.dataflow.definition.yaml_tree import Node, read_tree


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
            for problem in unresolved_names(declared, scope):
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
        link_states(states)

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
                check_service(services[name], nodes[name], topics, schedules, scope, imported)
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
                check_function(function, known, nodes[name])
        return Package(**head, states=states.whole.get(owner, {}), functions=functions)


def _topic(name: str, node: Node, scope: Scope) -> TopicDef:
    schema = node.get("schema")
    types: dict[str, TypeDef | None] = {"key": None, "value": None}
    for key in types:
        part = None if schema is None else schema.get(key)
        if part is not None:
            types[key] = read_type(part)
            for problem in unresolved_names(types[key], scope):
                part.report("E23", f"{key} of topic `{name}`: {problem}", key="type")
    return TopicDef(name=name, **types, settings=AsWritten.of(node.plain()))


def _blocks(services: Mapping[str, ServiceDef], nodes: Mapping[str, Node]) -> Iterator[Block]:
    for name, service in services.items():
        block = nodes[name].get("states")
        window = None if service.windowed is None else service.windowed.window
        if block is not None:
            yield Block(owner=name, kind="service", node=block, window=window)
