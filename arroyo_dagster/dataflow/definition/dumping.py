"""Write definitions as canonical YAML of apiVersion 0.6.0.

Reading the YAML yields an equal definition, and dumping that yields the same YAML.

Source: sdf-states.md 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from arroyo_dagster.dataflow.definition.definition import (
    AsWritten,
    Dataflow,
    Endpoint,
    FunctionDef,
    ImportDef,
    Package,
    Parameter,
    PartitionDef,
    ServiceDef,
    StateDef,
    StepDef,
    WindowedDef,
)
from arroyo_dagster.dataflow.definition.durations import format_duration
from arroyo_dagster.dataflow.definition.emitting import emit
from arroyo_dagster.dataflow.definition.types import (
    CompositeType,
    KeyedType,
    Member,
    NamedType,
    PlainType,
    PrimitiveType,
    RowType,
    ScalarType,
    TypeDef,
)
from arroyo_dagster.dataflow.definition.windows import WindowDef, WindowKind

CANONICAL_VERSION = "0.6.0"


def dump(document: Dataflow | Package) -> str:
    """Return a dataflow or package as YAML, with sorted names and canonical spelling.

    States that an imported function added to a service are omitted: the import adds them again. A
    definition that was read as legacy may lack required parts; its warnings name them.
    """
    return emit(to_plain(document))


def to_plain(document: Dataflow | Package) -> dict[str, Any]:
    """Return the content of `dump` as dicts, lists and scalars."""
    head = {
        "apiVersion": CANONICAL_VERSION,
        "meta": {
            "name": document.name,
            "version": document.version,
            "namespace": document.namespace,
        },
        "imports": [_import(one) for one in document.imports],
        **_kept(document.kept, ("config", "packages")),
        "types": _sorted({name: type_plain(one) for name, one in document.types.items()}),
    }
    if isinstance(document, Package):
        body = {
            "states": _states(document.states),
            "functions": _sorted({n: _function(one) for n, one in document.functions.items()}),
        }
    else:
        topics = {name: topic.settings.value for name, topic in document.topics.items()}
        services = {name: _service(one) for name, one in document.services.items()}
        body = {"topics": _sorted(topics), "services": _sorted(services)}
    plain = _filled({**head, **body, **_kept(document.kept, ("schedule", "dev", "tests"))})
    return plain if isinstance(document, Package) else {**plain, "services": body["services"]}


def _filled(members: Mapping[str, Any]) -> dict[str, Any]:
    """Omit None and empty members: absence means the same."""
    return {
        key: value for key, value in members.items() if value is not None and value not in ([], {})
    }


def _sorted(members: Mapping[str, Any]) -> dict[str, Any]:
    return {name: members[name] for name in sorted(members)}


def _kept(parts: Mapping[str, AsWritten], keys: Iterable[str]) -> dict[str, Any]:
    return {key: parts[key].value for key in keys if key in parts}


def _names(names: Iterable[str]) -> list[dict[str, str]]:
    return [{"name": name} for name in names]


def _import(one: ImportDef) -> dict[str, Any]:
    functions = [_filled({"name": f.name, "alias": f.alias}) for f in one.functions]
    return _filled(
        {
            "pkg": one.package,
            "path": one.path,
            "types": _names(one.types),
            "states": _names(one.states),
            "functions": functions,
        }
    )


# ---- types ---------------------------------------------------------------------------------------


def type_plain(declared: TypeDef) -> dict[str, Any]:
    """Return a type as its YAML declaration."""
    if isinstance(declared, NamedType):
        return {"type": declared.name}
    if isinstance(declared, PlainType):
        return {"type": None if declared is PlainType.NULL else declared.value}
    if isinstance(declared, ScalarType):
        return {"type": declared.value}
    if isinstance(declared, PrimitiveType):
        ttl = {} if declared.ttl_ms is None else {"ttl": format_duration(declared.ttl_ms)}
        return {"type": "primitive", "properties": {"value": declared.type.value}, **ttl}
    if isinstance(declared, RowType):
        columns = {
            column.name: _filled({"type": column.type.value, "convert": column.convert})
            for column in declared.columns
        }
        ttl = {} if declared.ttl_ms is None else {"ttl": format_duration(declared.ttl_ms)}
        return {"type": "arrow-row", "properties": columns, **ttl}
    if isinstance(declared, KeyedType):
        key, value = type_plain(declared.key), type_plain(declared.value)
        return {"type": "keyed-state", "properties": {"key": key, "value": value}}
    return _composite(declared)


def _composite(declared: CompositeType) -> dict[str, Any]:
    named = _filled({"type-name": declared.type_name})
    members = {member.name: _member(member) for member in declared.members}
    if declared.kind in ("list", "option"):
        return {"type": declared.kind, **named, **members}
    if declared.kind == "enum":
        tagging = {"tagging": "untagged"} if declared.untagged else {}
        return {"type": "enum", **named, **tagging, "oneOf": members}
    return {"type": declared.kind, **named, "properties": members}


def _member(member: Member) -> dict[str, Any]:
    renames = {"serialize": member.written_as, "deserialize": member.read_as}
    return {
        **type_plain(member.type),
        **_filled({"optional": member.optional or None}),
        **{key: {"rename": name} for key, name in renames.items() if name is not None},
    }


# ---- states, steps, services ---------------------------------------------------------------------


def _states(states: Mapping[str, StateDef]) -> dict[str, Any]:
    own = {name: _state(one) for name, one in states.items() if one.package is None}
    return _sorted(own)


def _state(state: StateDef) -> dict[str, Any]:
    if state.ref is not None:
        return {"from": str(state.ref)}
    if state.system is not None:
        return {"system": state.system}
    assert state.declared is not None
    plain = type_plain(state.declared)
    if state.convert is not None and "properties" in plain:
        plain["properties"]["value"]["convert"] = state.convert
    return {**plain, **_filled({"was": list(state.was)})}


def _parameter(one: Parameter | None) -> dict[str, Any] | None:
    if one is None:
        return None
    flags = {
        "kind": "key" if one.is_key else None,
        "optional": one.optional or None,
        "list": one.is_list or None,
    }
    name = {} if one.name is None else {"name": one.name}
    return {**name, **type_plain(one.type), **_filled(flags)}


def _step(step: StepDef | None) -> dict[str, Any] | None:
    if step is None:
        return None
    return _filled(
        {
            "uses": step.target,
            "inputs": [_parameter(one) for one in step.inputs],
            "output": _parameter(step.output),
            "states": _names(step.states),
            "with": None if step.parameters is None else step.parameters.value,
            "dependencies": None if step.dependencies is None else step.dependencies.value,
            "lang": step.language,
            "run": step.source,
        }
    )


def _steps(steps: Iterable[StepDef]) -> list[dict[str, Any]]:
    return [{"operator": step.operator, **(_step(step) or {})} for step in steps]


def _endpoint(end: Endpoint) -> dict[str, Any]:
    return _filled({"type": end.kind, "id": end.id, "transforms": _steps(end.transforms)})


def _partition(one: PartitionDef | None) -> dict[str, Any] | None:
    if one is None:
        return None
    return _filled(
        {
            "assign-key": _step(one.assign_key),
            "transforms": _steps(one.transforms),
            "update-state": _step(one.update_state),
        }
    )


def _windowed(one: WindowedDef | None) -> dict[str, Any] | None:
    if one is None:
        return None
    idleness, grace = one.window.idleness_ms, one.window.grace_ms
    watermark = {
        "idleness": None if idleness is None else format_duration(idleness),
        "grace-period": format_duration(grace) if grace else None,
    }
    return _filled(
        {
            one.window.kind.value: _times(one.window),
            "assign-timestamp": _step(one.assign_timestamp),
            "watermark": _filled(watermark),
            "transforms": _steps(one.transforms),
            "partition": _partition(one.partition),
            "flush": _step(one.flush),
        }
    )


def _times(window: WindowDef) -> dict[str, Any]:
    slide = window.slide_ms if window.kind is WindowKind.SLIDING else 0
    times = {"duration": window.duration_ms, "slide": slide, "offset": window.offset_ms}
    return {key: format_duration(one) for key, one in times.items() if one}


def _service(service: ServiceDef) -> dict[str, Any]:
    return _filled(
        {
            "sources": [_endpoint(one) for one in service.sources],
            "states": _states(service.states),
            "transforms": _steps(service.transforms),
            "window": _windowed(service.windowed),
            "partition": _partition(service.partition),
            "sinks": [_endpoint(one) for one in service.sinks],
        }
    )


def _function(one: FunctionDef) -> dict[str, Any]:
    return _filled(
        {
            "operator": "aggregate" if one.operator == "flush" else one.operator,
            "inputs": [_parameter(each) for each in one.inputs],
            "output": _parameter(one.output),
            "states": _names(one.states),
            "lang": one.language,
            "dependencies": None if one.dependencies is None else one.dependencies.value,
            "run": one.source,
        }
    )
