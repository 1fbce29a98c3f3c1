"""A dataflow as a graph of assets: topics, services, states, and their dependencies."""

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import dagster as dg

from arroyo_dagster.orchestration.pipelines.lineage import reaches
from arroyo_dagster.orchestration.pipelines.model import key_part
from arroyo_dagster.orchestration.rendering import column_schema, with_commands

if TYPE_CHECKING:
    from arroyo_dagster.dataflow.definition.definition import Dataflow, Endpoint, StateDef
else:
    Dataflow = Any  # loaded by who has one; the fields of the component evaluate annotations

_CODE = "dagster/code_references"
TOPIC, SERVICE, STATE = "topic", "service", "state"
_KINDS = {TOPIC: {"sdf", "topic"}, SERVICE: {"sdf", "python"}, STATE: {"sdf", "arroyo"}}


def _description(kind: str, name: str, state: "StateDef | None") -> str:
    if kind == TOPIC:
        return f"The topic `{name}`, outside of Dagster."
    if state is None:
        return f"The service `{name}`: a streaming job. The sensor reports its epochs."
    scalar = state.scalar_type is not None
    kept = "never expires" if state.ttl_ms is None else f"expires after {state.ttl_ms / 1000:g} s"
    window = "" if state.window is None else "; shows the window that closed last"
    commands = [f"sdf show dataflow.yaml {state.owner}/{state.name}/state"]
    if not scalar:
        commands.append(f'sdf sql dataflow.yaml "select * from {state.table}"')
    unit = "a value" if scalar else "a row"
    text = f"Keyed state: {unit} per key{window}. It {kept}. SQL name: `{state.table}`."
    return with_commands(text, commands)


def _columns(state: "StateDef") -> Iterator[tuple[str, str, bool]]:
    yield "_key", state.key_type.value if state.key_type else "string", False
    if state.scalar_type is not None:
        yield "value", state.scalar_type.value, False
    for column in state.columns:
        yield column.name, column.type.value, True


@dataclass(frozen=True)
class SdfGraph:
    """The assets of one dataflow.

    Attributes:
        dataflow: the definition.
        file: the dataflow.yaml, to which assets refer as their code; None = unknown.
        deployment: the name of the deployment, if one instance has several.
    """

    dataflow: Dataflow
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
    def owned(self) -> tuple["StateDef", ...]:
        """Return the states that its services define."""
        from arroyo_dagster.dataflow.definition.definition import StateForm

        services = self.dataflow.services.values()
        every = (state for service in services for state in service.states.values())
        return tuple(state for state in every if state.form is StateForm.TYPED)

    def key_of(self, state: "StateDef") -> dg.AssetKey:
        """Return the key of a state's asset."""
        return self._spec(STATE, state.name, state).key

    def service_key(self, service: str) -> dg.AssetKey:
        """Return the key of a service's asset."""
        return self._spec(SERVICE, service).key

    def reported_keys(self) -> list[dg.AssetKey]:
        """Return the keys of the assets that the sensor reports: services and owned states."""
        return [*map(self.service_key, self.dataflow.services), *map(self.key_of, self.owned)]

    def state_specs(self) -> list[dg.AssetSpec]:
        """Return the assets of all states, each made by the service that owns it."""
        return [
            self._spec(STATE, state.name, state, deps=[self.service_key(state.owner)])
            for state in self.owned
        ]

    def outer_specs(self) -> list[dg.AssetSpec]:
        """Return the assets outside of Dagster: topics and services.

        Services may pass records in a cycle, but assets may not: a dependency that would close a
        cycle is left out.
        """
        services = self.dataflow.services.values()
        topics: dict[str, list[dg.AssetKey]] = {}
        for service in services:
            for topic in _topics(service.sinks):
                topics.setdefault(topic, []).append(self.service_key(service.name))
            for topic in _topics(service.sources):
                topics.setdefault(topic, [])
        specs = [self._spec(TOPIC, topic, deps=topics[topic]) for topic in sorted(topics)]
        for service in services:
            read = [self._spec(TOPIC, topic).key for topic in _topics(service.sources)]
            refs = [state.ref for state in service.states.values() if state.ref is not None]
            state_keys = [
                self.key_of(self.dataflow.services[ref.service].states[ref.state]) for ref in refs
            ]
            specs.append(self._spec(SERVICE, service.name, deps=[*read, *state_keys]))
        fixed = self.state_specs()
        above = {spec.key: {dep.asset_key for dep in spec.deps} for spec in fixed}
        kept = []
        for spec in specs:
            deps = [dep for dep in spec.deps if not reaches(dep.asset_key, spec.key, above)]
            above.setdefault(spec.key, set()).update(dep.asset_key for dep in deps)
            kept.append(spec.replace_attributes(deps=deps))
        return kept

    def _spec(
        self,
        kind: str,
        name: str,
        state: "StateDef | None" = None,
        deps: Sequence[dg.AssetKey] = (),
    ) -> dg.AssetSpec:
        deployment = [self.deployment] if self.deployment else []
        above = [*deployment, self.dataflow.namespace, self.dataflow.name]
        owner, metadata = list[str](), self._code(state)
        if state is not None:
            owner.append(state.owner)
            metadata |= {
                "dagster/table_name": f"{self.name}.{state.table}",
                "dagster/column_schema": column_schema(_columns(state), {"_key": "the key"}),
                "sdf/ttl_seconds": "never" if state.ttl_ms is None else state.ttl_ms / 1000,
            }
        return dg.AssetSpec(
            ["sdf", *map(key_part, [*above, kind, *owner, name])],
            deps=deps,
            group_name=re.sub(r"\W", "_", "_".join(above)),
            kinds=_KINDS[kind],
            description=_description(kind, name, state),
            metadata=metadata,
        )

    def _code(self, state: "StateDef | None") -> dict[str, Any]:
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


DataflowSource: TypeAlias = str | Path | Dataflow | SdfGraph
"""A dataflow.yaml, a definition, or its graph."""


def _topics(endpoints: Sequence["Endpoint"]) -> list[str]:
    topics = [end.id for end in endpoints if end.kind == "topic" and end.id is not None]
    return list(dict.fromkeys(topics))
