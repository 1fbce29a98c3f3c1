"""A dataflow as a graph of assets: topics, services, states, and their dependencies."""

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg

from arroyo_dagster.dataflow.definition.definition import (
    Dataflow,
    Endpoint,
    ServiceDef,
    StateDef,
    StateForm,
    StateRef,
    ValueKind,
)
from arroyo_dagster.orchestration.rendering import column_schema, with_commands

_CODE = "dagster/code_references"
TOPIC, SERVICE, STATE = "topic", "service", "state"


@dataclass(frozen=True, kw_only=True)
class SdfProps:
    """What is known about an asset of a dataflow when it is named.

    Attributes:
        kind: `topic`, `service` or `state`.
        dataflow: `{namespace}.{name}`, also the first directory of its states.
        name: the topic's, the service's, or the state's by its owner.
        service: for a state, its owner.
        state: for a state, its definition.
        deployment: the name of the deployment, if one instance has several.
    """

    kind: str
    dataflow: str
    name: str
    service: str | None = None
    state: StateDef | None = None
    deployment: str | None = None


class DagsterSdfTranslator:
    """Names and describes the assets of a dataflow; override `get_asset_spec` to change any of it.

    Dependencies are added to what it returns.
    """

    def get_asset_spec(self, props: SdfProps) -> dg.AssetSpec:
        """Return key, group, kinds, description, tags, owners and metadata of an asset."""
        owner = [props.service] if props.service else []
        deployment = [props.deployment] if props.deployment else []
        kinds = {TOPIC: {"sdf", "topic"}, SERVICE: {"sdf", "python"}, STATE: {"sdf", "arroyo"}}
        return dg.AssetSpec(
            ["sdf", *deployment, props.dataflow, props.kind, *owner, props.name],
            group_name=re.sub(r"\W", "_", props.dataflow),
            kinds=kinds[props.kind],
            description=_description(props),
            metadata=_metadata(props),
        )


def _description(props: SdfProps) -> str:
    if props.kind == TOPIC:
        return f"The topic `{props.name}`, outside of Dagster."
    if props.kind == SERVICE:
        return f"The service `{props.name}`: a streaming job. The sensor reports its epochs."
    state = props.state
    assert state is not None
    what = "a value" if state.value_kind is ValueKind.SCALAR else "a row"
    kept = "never expires" if state.ttl_ms is None else f"expires after {state.ttl_ms / 1000:g} s"
    window = "" if state.window is None else "; shows the window that closed last"
    commands = [f"sdf show dataflow.yaml {state.owner}/{state.name}/state"]
    if state.value_kind is not ValueKind.SCALAR:
        commands.append(f'sdf sql dataflow.yaml "select * from {state.table}"')
    text = f"Keyed state: {what} per key{window}. It {kept}. SQL name: `{state.table}`."
    return with_commands(text, commands)


def _metadata(props: SdfProps) -> dict[str, object]:
    if props.state is None:
        return {}
    state = props.state
    return {
        "dagster/table_name": f"{props.dataflow}.{state.table}",
        "dagster/column_schema": column_schema(_columns(state), {"_key": "the key"}),
        "sdf/ttl_seconds": "never" if state.ttl_ms is None else state.ttl_ms / 1000,
    }


def _columns(state: StateDef) -> Iterator[tuple[str, str, bool]]:
    yield "_key", state.key_type.value if state.key_type else "string", False
    if state.value_kind is ValueKind.SCALAR and state.scalar_type is not None:
        yield "value", state.scalar_type.value, False
    for column in state.columns:
        yield column.name, column.type.value, True


@dataclass(frozen=True)
class SdfGraph:
    """The assets of one dataflow.

    Attributes:
        dataflow: the definition.
        translator: names the assets.
        file: the dataflow.yaml, to which assets refer as their code; None = unknown.
        deployment: the name of the deployment, if one instance has several.
    """

    dataflow: Dataflow
    translator: DagsterSdfTranslator = field(default_factory=DagsterSdfTranslator)
    deployment: str | None = None
    file: Path | None = None

    @property
    def name(self) -> str:
        """Return `{namespace}.{name}`: the pipeline of its services' jobs."""
        return self.dataflow.pipeline

    @property
    def op_name(self) -> str:
        """Return a name for an op or a job, of letters, digits and underscores."""
        deployment = f"{self.deployment}_" if self.deployment else ""
        return "sdf_" + re.sub(r"\W", "_", f"{deployment}{self.name}")

    @property
    def owned(self) -> tuple[StateDef, ...]:
        """Return the states that its services define."""
        return tuple(
            state
            for service in self.dataflow.services.values()
            for state in service.states.values()
            if state.form is StateForm.TYPED
        )

    def key_of(self, state: StateDef) -> dg.AssetKey:
        """Return the key of a state's asset."""
        return self.state_spec(state).key

    def service_key(self, service: str) -> dg.AssetKey:
        """Return the key of a service's asset."""
        return self._key(SERVICE, service)

    def state_spec(self, state: StateDef) -> dg.AssetSpec:
        """Return the asset of a state, made by the service that owns it."""
        return self._spec(
            SdfProps(
                kind=STATE,
                dataflow=self.name,
                name=state.name,
                service=state.owner,
                state=state,
                deployment=self.deployment,
            ),
            [self._key(SERVICE, state.owner)],
        )

    def state_specs(self) -> list[dg.AssetSpec]:
        """Return the assets of all states."""
        return [self.state_spec(state) for state in self.owned]

    def reported_keys(self) -> list[dg.AssetKey]:
        """Return the keys of the assets that the sensor reports: services and owned states."""
        services = [self.service_key(name) for name in self.dataflow.services]
        return [*services, *(self.key_of(state) for state in self.owned)]

    def outer_specs(self) -> list[dg.AssetSpec]:
        """Return the assets outside of Dagster: topics and services.

        Services may pass records in a cycle, but assets may not: a dependency that would close a
        cycle is left out.
        """
        return _without_circles(self._outer(), fixed=self.state_specs())

    def _outer(self) -> list[dg.AssetSpec]:
        services = self.dataflow.services.values()
        written: dict[str, list[dg.AssetKey]] = {}
        for service in services:
            for sink in _topics(service.sinks):
                written.setdefault(sink, []).append(self._key(SERVICE, service.name))
            for source in _topics(service.sources):
                written.setdefault(source, [])
        topics = [
            self._spec(self._props(TOPIC, topic), writers)
            for topic, writers in sorted(written.items())
        ]
        return topics + [self._service(service) for service in services]

    def _service(self, service: ServiceDef) -> dg.AssetSpec:
        read = [self._key(TOPIC, topic) for topic in _topics(service.sources)]
        seen = [
            self._referenced(state.ref)
            for state in service.states.values()
            if state.ref is not None
        ]
        return self._spec(self._props(SERVICE, service.name), [*read, *seen])

    def _referenced(self, ref: StateRef) -> dg.AssetKey:
        return self.key_of(self.dataflow.services[ref.service].states[ref.state])

    def _key(self, kind: str, name: str) -> dg.AssetKey:
        return self.translator.get_asset_spec(self._props(kind, name)).key

    def _props(self, kind: str, name: str) -> SdfProps:
        return SdfProps(kind=kind, dataflow=self.name, name=name, deployment=self.deployment)

    def _spec(self, props: SdfProps, deps: list[dg.AssetKey]) -> dg.AssetSpec:
        spec = self.translator.get_asset_spec(props)
        metadata = {**self._code(props.state), **spec.metadata}
        return spec.replace_attributes(deps=[*spec.deps, *deps], metadata=metadata)

    def _code(self, state: StateDef | None) -> dict[str, Any]:
        """The line of the file that defines a state; the file for what is no state."""
        if self.file is None or (state is not None and state.package is not None):
            return {}
        line = None if state is None else state.line
        with warnings.catch_warnings():  # users of the graph have not chosen a beta feature
            warnings.simplefilter("ignore", dg.BetaWarning)
            code = dg.LocalFileCodeReference(
                file_path=str(self.file.absolute()), line_number=line, label=self.file.name
            )
            return {_CODE: dg.CodeReferencesMetadataValue(code_references=[code])}


def _topics(endpoints: tuple[Endpoint, ...]) -> list[str]:
    found = [one.id for one in endpoints if one.kind == "topic" and one.id is not None]
    return list(dict.fromkeys(found))


def _without_circles(specs: list[dg.AssetSpec], *, fixed: list[dg.AssetSpec]) -> list[dg.AssetSpec]:
    above = {spec.key: {dep.asset_key for dep in spec.deps} for spec in fixed}
    above.update({spec.key: set() for spec in specs})
    for spec in specs:
        for dep in spec.deps:
            if not _reaches(above, dep.asset_key, spec.key):
                above[spec.key].add(dep.asset_key)
    return [
        spec.replace_attributes(deps=[dep for dep in spec.deps if dep.asset_key in above[spec.key]])
        for spec in specs
    ]


def _reaches(
    above: dict[dg.AssetKey, set[dg.AssetKey]], start: dg.AssetKey, goal: dg.AssetKey
) -> bool:
    """Whether `goal` is `start`, or one of what `start` is made of."""
    seen, left = {start}, [start]
    while left:
        one = left.pop()
        if one == goal:
            return True
        fresh = above.get(one, set()) - seen
        seen |= fresh
        left.extend(fresh)
    return False
