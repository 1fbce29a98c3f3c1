"""Convert dataflows of apiVersion 0.1.0 to 0.4.0 to the layout of 0.5.0.

Source: sdf-states.md 2.11, 2.12.
"""

from __future__ import annotations

from dataclasses import replace

from arroyo_dagster.dataflow.definition.yaml_tree import Node, joined

_RENAMED = {"group-by": "assign-key", "aggregate": "flush", "process": "map"}
_PARTITION = ("assign-key", "update-state")


def modernised(root: Node) -> Node:
    """Return the document with its services in the layout of 0.5.0. Line numbers are unchanged."""
    services = root.get("services")
    if services is None or not isinstance(services.value, dict):
        return root
    members = {name: _service(node) for name, node in services.members.items()}
    return _with(root, services=replace(services, value=members))


def _with(node: Node, **members: Node | None) -> Node:
    """Return the mapping with some members set, or removed if None."""
    changed = dict(node.members)
    for name, member in members.items():
        key = name.replace("_", "-")
        changed.pop(key, None)
        if member is not None:
            changed[key] = member
    return replace(node, value=changed)


def _list(holder: Node, key: str, items: tuple[Node, ...]) -> Node:
    return replace(holder, path=joined(holder.path, key), value=items)


def _service(node: Node) -> Node:
    if not isinstance(node.value, dict):
        return node
    for singular in ("source", "sink"):
        one = node.get(singular)
        if one is not None and node.get(f"{singular}s") is None:
            node = _with(node, **{f"{singular}s": _list(node, f"{singular}s", (one,))})
        node = _with(node, **{singular: None})
    for key in ("sources", "sinks"):
        if (ends := node.get(key)) is not None:
            items = tuple(_steps_as_transforms(one) for one in ends.items)
            node = _with(node, **{key: replace(ends, value=items)})
    transforms = node.get("transforms")
    if transforms is not None and isinstance(transforms.value, dict):
        node = _unpacked(_with(node, transforms=None), transforms)
    partition, window = node.get("partition"), node.get("window")
    if partition is not None:
        node = _with(node, partition=_partition(partition))
    if window is not None and (inner := window.get("partition")) is not None:
        node = _with(node, window=_with(window, partition=_partition(inner)))
    return node


def _steps_as_transforms(node: Node) -> Node:
    steps = node.get("steps")
    return node if steps is None else _with(node, transforms=steps, steps=None)


def _unpacked(node: Node, transforms: Node) -> Node:
    """Return the service with the members of a `transforms` mapping (states, steps, window, flush)
    moved to where 0.5.0 has them.
    """
    states = transforms.get("states")
    if states is not None and node.get("states") is None:
        node = _with(node, states=states)
    elif states is not None:
        # The service's own states and those of its transforms as one list.
        items: list[Node] = []
        for block in (node.get("states"), states):
            assert block is not None
            items += block.items
            for name, entry in block.members.items():
                named = replace(entry, path=joined(entry.path, "name"), value=name)
                items.append(_with(entry, name=named) if entry.members else entry)
        node = _with(node, states=_list(node, "states", tuple(items)))
    steps = transforms.get("steps")
    before, slots, inside = _sorted_steps(steps.items if steps is not None else ())
    for key in ("flush", "aggregate"):
        if (flush := transforms.get(key)) is not None:
            slots["flush"] = flush
    window = transforms.get("window") or node.get("window")
    partition = _slots(node, "partition", {key: slots.get(key) for key in _PARTITION}, inside)
    node = _with(node, transforms=_list(transforms, "transforms", before) if before else None)
    if window is None:
        return _with(node, partition=partition) if partition is not None else node
    held = _with(
        window, **{key: slots[key] for key in ("assign-timestamp", "flush") if key in slots}
    )
    return _with(node, window=_with(held, partition=partition) if partition is not None else held)


def _sorted_steps(
    steps: tuple[Node, ...],
) -> tuple[tuple[Node, ...], dict[str, Node], tuple[Node, ...]]:
    """Split steps into those before `assign-key`, the slots by operator, and those after it."""
    before: list[Node] = []
    inside: list[Node] = []
    slots: dict[str, Node] = {}
    for step in steps:
        word = step.get("operator")
        operator = word.text if word is not None and word.text is not None else ""
        operator = _RENAMED.get(operator, operator)
        if operator in (*_PARTITION, "assign-timestamp", "flush"):
            slots[operator] = _with(step, operator=None)
        else:
            (inside if "assign-key" in slots else before).append(step)
    return tuple(before), slots, tuple(inside)


def _slots(
    node: Node, key: str, slots: dict[str, Node | None], inside: tuple[Node, ...]
) -> Node | None:
    members = {name: step for name, step in slots.items() if step is not None}
    if not members:
        return None
    made = replace(node, path=joined(node.path, key), value=members, key_places={})
    return _with(made, transforms=_list(made, "transforms", inside) if inside else None)


def _partition(node: Node) -> Node:
    """Move `update-state` out of a partition's transforms, where it was until June 2024."""
    transforms = node.get("transforms")
    if transforms is None or not isinstance(transforms.value, tuple):
        return node
    _, slots, _ = _sorted_steps(transforms.items)
    update = slots.get("update-state")
    if update is None:
        return node
    others = tuple(step for step in transforms.items if _operator(step) != "update-state")
    node = _with(node, transforms=replace(transforms, value=others) if others else None)
    return _with(node, update_state=update)


def _operator(step: Node) -> object:
    word = step.get("operator")
    return None if word is None else word.value
