"""A dataflow as a graph of services, topics and states, in the language of Graphviz (DOT)."""

from __future__ import annotations

import json
from collections.abc import Iterator

from arroyo_dagster.dataflow.definition.definition import Dataflow, StateDef


def dot_text(dataflow: Dataflow) -> str:
    """Return the graph of a dataflow as DOT text; equal definitions give equal texts.

    Services are boxes, topics ellipses, states cylinders. Solid edges are records and changes;
    dashed ones are reads of another service's state.
    """
    lines = [
        f"digraph {_quoted(f'{dataflow.namespace}/{dataflow.name}')} {{",
        "  rankdir=LR;",
        *sorted(set(_nodes(dataflow))),
        *sorted(set(_edges(dataflow))),
        "}",
    ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _node(kind: str, name: str) -> str:
    return _quoted(f"{kind} {name}")


def _state(state: StateDef) -> str:
    name = state.name if state.ref is None else state.ref.state
    return f"{state.owner}.{name}"


def _nodes(dataflow: Dataflow) -> Iterator[str]:
    shapes = {"service": "box", "topic": "ellipse", "schedule": "diamond", "state": "cylinder"}
    named: list[tuple[str, str, str]] = []
    for service in dataflow.services.values():
        label = f"{service.name}\n(windows)" if service.windowed else service.name
        named.append(("service", service.name, label))
        ends = (*service.sources, *service.sinks)
        named += [(end.kind, end.id, end.id) for end in ends if end.id is not None]
        named += [("state", _state(state), state.name) for state in service.states.values()]
    for kind, name, label in named:
        yield f"  {_node(kind, name)} [shape={shapes[kind]}, label={_quoted(label)}];"


def _edges(dataflow: Dataflow) -> Iterator[str]:
    for service in dataflow.services.values():
        service_node = _node("service", service.name)
        for end in service.sources:
            if end.id is not None:
                yield f"  {_node(end.kind, end.id)} -> {service_node};"
        for end in service.sinks:
            if end.id is not None:
                yield f"  {service_node} -> {_node(end.kind, end.id)};"
        for state in service.states.values():
            state_node = _node("state", _state(state))
            if state.ref is None:
                yield f"  {service_node} -> {state_node};"
            else:
                yield f"  {state_node} -> {service_node} [style=dashed];"
