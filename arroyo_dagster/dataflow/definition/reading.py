"""Parse definitions: the entry point of this package.

`parse_document` reads a dataflow or a package and reports all errors together.

Source: sdf-states.md 2.1, 2.11 and 2.12; errors E01, E02, E04, E05.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from arroyo_dagster.dataflow.definition import grammar
from arroyo_dagster.dataflow.definition.checking import (
    ServiceCheck,
    check_functions,
    check_names,
    check_path_name,
)
from arroyo_dagster.dataflow.definition.definition import (
    AsWritten,
    Dataflow,
    FunctionDef,
    Package,
    ServiceDef,
    StateDef,
    TopicDef,
)
from arroyo_dagster.dataflow.definition.diagnostics import Diagnostics, InvalidDefinition
from arroyo_dagster.dataflow.definition.legacy import modernised
from arroyo_dagster.dataflow.definition.linking import States
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
from arroyo_dagster.dataflow.definition.reading_states import Block, StateReader
from arroyo_dagster.dataflow.definition.reading_types import TypeReader
from arroyo_dagster.dataflow.definition.scope import Scope
from arroyo_dagster.dataflow.definition.shapes import Conformity, text_of
from arroyo_dagster.dataflow.definition.types import NamedType, TypeDef, names_in
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
        self._is_dataflow = not _is_package(root.members)
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
            self._check_head()
            self._shapes.check(self._root, self._shape)
        document = self._dataflow() if self._is_dataflow else self._package()
        self._mistakes.raise_if_any("dataflow" if self._is_dataflow else "package")
        return replace(document, warnings=self._mistakes.warnings)

    # ---- head ------------------------------------------------------------------------------------

    def _check_head(self) -> None:
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
            functions = self._functions(section)
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

    def _functions(self, section: Node | None) -> dict[str, FunctionDef]:
        steps = StepReader(self._mistakes, self._types)
        nodes = {} if section is None else section.members
        return {name: _function(name, node, steps) for name, node in nodes.items()}


_OF_PACKAGES = {"states", "functions"}


def _is_package(keys: Iterable[str]) -> bool:
    """Return whether a document is a package by its keys; if they are misspelt, by the nearest."""
    found = {*keys}
    if not found & {"services", *_OF_PACKAGES}:
        known = [*grammar.DATAFLOW.fields, *_OF_PACKAGES]
        found = {near for key in found for near in difflib.get_close_matches(key, known, n=1)}
    return "services" not in found and bool(found & _OF_PACKAGES)


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
