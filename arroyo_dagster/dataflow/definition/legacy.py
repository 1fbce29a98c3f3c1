"""Convert dataflows of apiVersion 0.1.0 to 0.4.0 to the layout of 0.5.0.

Source: sdf-states.md 2.11, 2.12.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from arroyo_dagster.dataflow.definition.shapes import text_of
from arroyo_dagster.dataflow.definition.yaml_tree import Node, joined

_RENAMED = {"group-by": "assign-key", "aggregate": "flush", "process": "map"}
_PARTITION = ("assign-key", "update-state")


def modernise(root: Node) -> None:
    """Convert the services of a document to the layout of 0.5.0. Line numbers are unchanged."""
    services = root.get("services")
    for service in services.members.values() if services is not None else ():
        if isinstance(service.value, dict):
            _modernise_service(service, service.value)


def _list(holder: Node, key: str, items: Sequence[Node]) -> Node:
    return replace(holder, path=joined(holder.path, key), value=tuple(items))


def _modernise_service(node: Node, members: dict[str, Node]) -> None:
    for singular in ("source", "sink"):
        end = node.get(singular)
        if end is not None and node.get(f"{singular}s") is None:
            members[f"{singular}s"] = _list(node, f"{singular}s", (end,))
        members.pop(singular, None)
        if (ends := node.get(f"{singular}s")) is not None:
            ends.value = ends.items  # what is no list has none
    for end in (*node.listed("sources"), *node.listed("sinks")):
        if end.get("steps") is not None:
            end.members["transforms"] = end.members.pop("steps")
    transforms = node.get("transforms")
    if transforms is not None and isinstance(transforms.value, dict):
        del members["transforms"]
        _unpack(node, members, transforms)
    for holder in (node, node.get("window")):
        partition = None if holder is None else holder.get("partition")
        if partition is not None:
            _modernise_partition(partition)


def _unpack(node: Node, members: dict[str, Node], transforms: Node) -> None:
    """Move the members of a `transforms` mapping (states, steps, window, flush) to where 0.5.0 has
    them.
    """
    states, own = transforms.get("states"), node.get("states")
    if states is not None and own is not None:
        # The service's own states and those of its transforms as one list.
        items = [*own.items, *_as_items(own), *states.items, *_as_items(states)]
        states = _list(node, "states", items)
    if states is not None:
        members["states"] = states
    before, slots, inside = _sorted_steps(transforms.listed("steps"))
    for key in ("flush", "aggregate"):
        if (flush := transforms.get(key)) is not None:
            slots["flush"] = flush
    if before:
        members["transforms"] = _list(transforms, "transforms", before)
    holder = members
    window = transforms.get("window") or node.get("window")
    if window is not None:
        members["window"] = window
        window.value = holder = window.members
        holder |= {key: slots[key] for key in ("assign-timestamp", "flush") if key in slots}
    if of_partition := {key: slots[key] for key in _PARTITION if key in slots}:
        path = joined(node.path, "partition")
        partition = replace(node, path=path, value=of_partition, key_places={})
        if inside:
            of_partition["transforms"] = _list(partition, "transforms", inside)
        holder["partition"] = partition


def _as_items(block: Node) -> list[Node]:
    """Return the states of a mapping as the items of a list."""
    for name, entry in block.members.items():
        if entry.members:
            path = joined(entry.path, "name")
            entry.members["name"] = replace(entry, path=path, value=name)
    return [*block.members.values()]


def _sorted_steps(steps: Sequence[Node]) -> tuple[list[Node], dict[str, Node], list[Node]]:
    """Split steps into those before `assign-key`, the slots by operator, and those after it."""
    before: list[Node] = []
    inside: list[Node] = []
    slots: dict[str, Node] = {}
    for step in steps:
        operator = text_of(step, "operator") or ""
        operator = _RENAMED.get(operator, operator)
        if operator in (*_PARTITION, "assign-timestamp", "flush"):
            slots[operator] = step
            del step.members["operator"]
        else:
            (inside if "assign-key" in slots else before).append(step)
    return before, slots, inside


def _modernise_partition(node: Node) -> None:
    """Move `update-state` out of a partition's transforms, where it was until June 2024."""
    transforms, steps = node.get("transforms"), node.listed("transforms")
    updates = [step for step in steps if text_of(step, "operator") == "update-state"]
    if transforms is None or not updates:
        return
    transforms.value = tuple(step for step in steps if text_of(step, "operator") != "update-state")
    node.members["update-state"] = updates[-1]
    for update in updates:
        del update.members["operator"]
    if not transforms.value:
        del node.members["transforms"]
