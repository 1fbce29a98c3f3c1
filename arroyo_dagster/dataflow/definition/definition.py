"""The declarations of a dataflow or a package, as values.

Two definitions are equal if they mean the same. The order of named entries, comments, spellings
(`s32`, `i32`), positions in the text and the apiVersion are not compared.

Source: sdf-states.md 2.1, 2.4 and 2.13.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from arroyo_dagster.dataflow.definition.diagnostics import Diagnostic
from arroyo_dagster.dataflow.definition.types import (
    Column,
    KeyedType,
    NamedType,
    ScalarType,
    TypeDef,
)
from arroyo_dagster.dataflow.definition.windows import WindowDef
from arroyo_dagster.dataflow.definition.yaml_tree import Node
from arroyo_dagster.state.model.ids import PipelineId


@dataclass(frozen=True, slots=True)
class AsWritten:
    """A section that is kept uninterpreted, as JSON with sorted keys."""

    json: str

    @classmethod
    def of(cls, value: Any) -> AsWritten:
        """Keep a value that consists of dicts, lists and scalars."""
        return cls(json.dumps(value, sort_keys=True, ensure_ascii=False))

    @property
    def value(self) -> Any:
        """A new copy of the value at each access."""
        return json.loads(self.json)


class StateForm(enum.Enum):
    """How a state is declared: owned, a reference to an owner's state, or the engine's."""

    TYPED = "typed"
    REFERENCE = "reference"
    SYSTEM = "system"


class ValueKind(enum.Enum):
    """The kind of a key's value: one scalar, or a row of columns."""

    SCALAR = "scalar"
    ROW = "row"


@dataclass(frozen=True, slots=True)
class StateRef:
    """The target of a reference: `from: service.state`."""

    service: str
    state: str

    def __str__(self) -> str:
        return f"{self.service}.{self.state}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDef:
    """One state as one service or package sees it.

    Attributes:
        name: its key in the YAML; a reference may have another name than the owner's state.
        owner: the service or package that defines it; only the owner may change it.
        key_type: None if the type comes from a package that was not loaded.
        value_kind: None if the type comes from a package that was not loaded.
        declared: the type as declared, with unresolved names; None unless typed.
        scalar_type: the type of a scalar value.
        columns: the columns of a row, sorted by name; in a table, `_key` precedes them.
        ttl_ms: None = rows or values never expire.
        ref: the target of a reference.
        system: the name that a system state declares.
        accessor: the name of the function that user code calls.
        table: its SQL name: the owner's name of the state, with `_` for `-`.
        aliases: its other SQL names.
        window: the owner's window, if it has one.
        package: the package whose function added it to the service; None if the service
            declares it.
        was: its earlier names, the latest first; rows that are stored under one are its rows.
        convert: for a scalar, the SQL expression that makes its values of the stored `value`.
        extended: features that SDF's own engine does not support: `scalar`, `document`, `ttl` (of a
            primitive value).
    """

    name: str
    owner: str
    form: StateForm
    key_type: ScalarType | None = None
    value_kind: ValueKind | None = None
    scalar_type: ScalarType | None = None
    columns: tuple[Column, ...] = ()
    ttl_ms: int | None = None
    declared: KeyedType | NamedType | None = None
    ref: StateRef | None = None
    system: str | None = None
    accessor: str
    table: str
    aliases: tuple[str, ...] = ()
    window: WindowDef | None = None
    package: str | None = None
    was: tuple[str, ...] = ()
    convert: str | None = None
    extended: frozenset[str] = frozenset()
    api_version: str = field(compare=False)
    path: str = field(compare=False)
    line: int = field(compare=False)

    @property
    def schema(self) -> dict[str, Any]:
        """What a stored state must match: key type, kind and columns; not the TTL."""
        return {
            "key": None if self.key_type is None else self.key_type.value,
            "kind": None if self.value_kind is None else self.value_kind.value,
            "scalar": None if self.scalar_type is None else self.scalar_type.value,
            "columns": [[column.name, column.type.value] for column in self.columns],
        }

    @property
    def schema_hash(self) -> str:
        """SHA-256 of `schema`, in hexadecimal."""
        return hashlib.sha256(json.dumps(self.schema, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """An input or the output of a packaged function."""

    name: str | None
    type: TypeDef
    is_key: bool = False
    optional: bool = False
    is_list: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDef:
    """A slot for user code.

    Attributes:
        operator: map, filter, filter-map, flat-map, assign-key, assign-timestamp, update-state
            or flush.
        name: the name of the function; for an inline body, of the function that it defines.
        language: the language of an inline body: python or rust.
        source: the inline body.
        target: the value of `uses`: an imported function, or `module:function`.
        states: the names of the states that it lists.
        parameters: the value of `with`, as written.
        body_line: the line in which its inline body begins; None = it has none.
    """

    operator: str
    name: str
    language: str | None = None
    source: str | None = None
    target: str | None = None
    inputs: tuple[Parameter, ...] = ()
    output: Parameter | None = None
    states: tuple[str, ...] = ()
    dependencies: AsWritten | None = None
    parameters: AsWritten | None = None
    path: str = field(compare=False)
    line: int = field(compare=False)
    body_line: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A source or a sink. `kind`: topic, schedule or no-target; `id`: None for no-target."""

    kind: str
    id: str | None
    transforms: tuple[StepDef, ...] = ()
    line: int = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionDef:
    """The steps that run per key."""

    assign_key: StepDef
    transforms: tuple[StepDef, ...] = ()
    update_state: StepDef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowedDef:
    """The steps that run per window. If `flush` is None, a closing window emits nothing."""

    window: WindowDef
    assign_timestamp: StepDef
    transforms: tuple[StepDef, ...] = ()
    partition: PartitionDef | None = None
    flush: StepDef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceDef:
    """One path from sources through operators to sinks, and the states it owns or reads."""

    name: str
    sources: tuple[Endpoint, ...]
    sinks: tuple[Endpoint, ...] = ()
    states: Mapping[str, StateDef] = field(default_factory=dict)
    transforms: tuple[StepDef, ...] = ()
    partition: PartitionDef | None = None
    windowed: WindowedDef | None = None

    @property
    def steps(self) -> tuple[StepDef, ...]:
        """Every step, in the order in which a record passes them (spec 3.1)."""
        found = [step for source in self.sources for step in source.transforms]
        found += self.transforms
        partition = self.partition
        if self.windowed is not None:
            found += [self.windowed.assign_timestamp, *self.windowed.transforms]
            partition = self.windowed.partition
        if partition is not None:
            found += [partition.assign_key, *partition.transforms]
            found += [partition.update_state] if partition.update_state else []
        if self.windowed is not None and self.windowed.flush is not None:
            found.append(self.windowed.flush)
        return (*found, *(step for sink in self.sinks for step in sink.transforms))


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicDef:
    """A topic. `settings`: its complete declaration as written, including the types."""

    name: str
    key: TypeDef | None
    value: TypeDef | None
    settings: AsWritten


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionImport:
    """An imported function of a package; steps use its `alias`, or its `name` without one."""

    name: str
    alias: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportDef:
    """The names that are imported from a package. `path`: the folder of the package, if given."""

    package: str
    path: str | None = None
    types: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    functions: tuple[FunctionImport, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionDef:
    """A function of a package: its operator, its signature and, if inline, its body.

    Attributes:
        line: the line of its body; without one, its own.
    """

    name: str
    operator: str
    inputs: tuple[Parameter, ...] = ()
    output: Parameter | None = None
    states: tuple[str, ...] = ()
    language: str | None = None
    source: str | None = None
    dependencies: AsWritten | None = None
    line: int = field(default=1, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The fields that dataflows and packages share.

    Attributes:
        kept: sections that are kept as written: config, dev, schedule, packages, tests.
        tests: the section of this name, with its lines; None = there is none.
        warnings: what was accepted but is probably a mistake.
    """

    name: str
    namespace: str
    version: str
    types: Mapping[str, TypeDef] = field(default_factory=dict)
    imports: tuple[ImportDef, ...] = ()
    kept: Mapping[str, AsWritten] = field(default_factory=dict)
    tests: Node | None = field(default=None, compare=False, repr=False)
    api_version: str = field(compare=False)
    warnings: tuple[Diagnostic, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataflow(Document):
    """A dataflow.yaml."""

    services: Mapping[str, ServiceDef]
    topics: Mapping[str, TopicDef] = field(default_factory=dict)

    @property
    def pipeline(self) -> PipelineId:
        """`{namespace}.{name}`: the pipeline; its jobs are the services."""
        return PipelineId(f"{self.namespace}.{self.name}")

    @property
    def states(self) -> tuple[StateDef, ...]:
        """Every state of every service, sorted by service and name."""
        return tuple(
            self.services[service].states[state]
            for service in sorted(self.services)
            for state in sorted(self.services[service].states)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Package(Document):
    """An sdf-package.yaml."""

    states: Mapping[str, StateDef] = field(default_factory=dict)
    functions: Mapping[str, FunctionDef] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Its name in imports: `{namespace}/{name}@{version}`."""
        return f"{self.namespace}/{self.name}@{self.version}"
