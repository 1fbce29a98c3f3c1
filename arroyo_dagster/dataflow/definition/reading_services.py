"""Read services from YAML: sources, steps, partitions, windows and sinks, without their states.

The shapes are checked before; missing parts are already reported.

Source: sdf-states.md 2.3, 2.4, 3.1; errors E24, E36, E37.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from arroyo_dagster.dataflow.definition.bodies import ARITIES, inspect_body
from arroyo_dagster.dataflow.definition.definition import (
    AsWritten,
    Endpoint,
    FunctionDef,
    Parameter,
    PartitionDef,
    ServiceDef,
    StepDef,
    WindowedDef,
)
from arroyo_dagster.dataflow.definition.durations import ACCEPTED, parse_duration_ms
from arroyo_dagster.dataflow.definition.reading_types import read_type
from arroyo_dagster.dataflow.definition.rules import check_slide
from arroyo_dagster.dataflow.definition.shapes import text_of
from arroyo_dagster.dataflow.definition.types import same_name
from arroyo_dagster.dataflow.definition.windows import WindowDef, WindowKind
from arroyo_dagster.dataflow.definition.yaml_tree import Node


def names_of(node: Node, key: str) -> tuple[str, ...]:
    """Return the names of a list of `{name: …}`, sorted, since their order has no meaning."""
    names = (text_of(item, "name") for item in node.listed(key))
    return tuple(sorted({name for name in names if name}))


def kept(node: Node, key: str) -> AsWritten | None:
    """Return a section as written; None if it is absent or empty."""
    section = node.get(key)
    empty = section is None or section.value in ({}, ())
    return None if section is None or empty else AsWritten.of(section.plain())


def _signature(node: Node) -> dict[str, Any]:
    """Read what steps and functions share, as keyword arguments."""
    inputs = map(_parameter, node.listed("inputs"))
    return {
        "inputs": tuple(parameter for parameter in inputs if parameter is not None),
        "output": _parameter(node.get("output")),
        "states": names_of(node, "states"),
        "dependencies": kept(node, "dependencies"),
    }


def _parameter(node: Node | None) -> Parameter | None:
    """Read an input or output: a type, its name and its flags."""
    declared = None if node is None else read_type(node)
    if node is None or declared is None:
        return None
    optional, is_list = node.get("optional"), node.get("list")
    return Parameter(
        name=text_of(node, "name"),
        type=declared,
        is_key=text_of(node, "kind") == "key",
        optional=optional is not None and optional.value is True,
        is_list=is_list is not None and is_list.value is True,
    )


def read_function(name: str, node: Node) -> FunctionDef:
    """Read a function of a package."""
    operator = text_of(node, "operator") or ""
    return FunctionDef(
        name=name,
        operator="flush" if operator == "aggregate" else operator,
        language=text_of(node, "lang"),
        source=text_of(node, "run"),
        line=(node.get("run") or node).line,
        **_signature(node),
    )


@dataclass(slots=True)
class ServiceReader:
    """Reads services, and checks that the names of their inline functions are unique (E24).

    Attributes:
        inline: the inline bodies that were read, by the name of their function.
    """

    inline: dict[str, Node] = field(default_factory=dict)

    def read(self, name: str, node: Node) -> ServiceDef:
        """Read a service without its states; parts with errors are omitted."""
        window, partition = node.get("window"), node.get("partition")
        if window is not None and partition is not None:
            message = (
                f"service `{name}` has both `window` and `partition`; put one inside the other"
            )
            node.report("E36", message, key="partition")
        return ServiceDef(
            name=name,
            sources=tuple(map(self._endpoint, node.listed("sources"))),
            transforms=self._steps(node),
            windowed=None if window is None else self._windowed(window),
            partition=self._partition(partition),
            sinks=tuple(map(self._endpoint, node.listed("sinks"))),
        )

    def _endpoint(self, node: Node) -> Endpoint:
        kind = text_of(node, "type") or ""
        if kind != "no-target" and node.given("id") is None:
            node.report("E04", "missing `id`", key="id")
        return Endpoint(
            kind=kind, id=text_of(node, "id"), transforms=self._steps(node), line=node.line
        )

    def _partition(self, node: Node | None) -> PartitionDef | None:
        if node is None:
            return None
        assign_key = self._slot(node, "assign-key")
        transforms = self._steps(node)
        update = self._slot(node, "update-state")
        if not node.get("transforms") and not node.get("update-state"):
            node.warn("2.4", "a partition without `transforms` or `update-state` does nothing")
        if assign_key is None:
            return None
        return PartitionDef(assign_key=assign_key, transforms=transforms, update_state=update)

    def _windowed(self, node: Node) -> WindowedDef | None:
        window = _window(node)
        timestamp = self._slot(node, "assign-timestamp")
        transforms = self._steps(node)
        partition = self._partition(node.get("partition"))
        flush = self._slot(node, "flush")
        if window is None or timestamp is None:
            return None
        return WindowedDef(
            window=window,
            assign_timestamp=timestamp,
            transforms=transforms,
            partition=partition,
            flush=flush,
        )

    # ---- steps -----------------------------------------------------------------------------------

    def _steps(self, node: Node) -> tuple[StepDef, ...]:
        listed = node.listed("transforms")
        steps = (self._step(step, text_of(step, "operator")) for step in listed)
        return tuple(step for step in steps if step is not None)

    def _slot(self, node: Node, operator: str) -> StepDef | None:
        step = node.get(operator)
        return None if step is None else self._step(step, operator)

    def _step(self, node: Node, operator: str | None) -> StepDef | None:
        """Read one step; `run` takes precedence over `uses`.

        None if there is no function, or if the operator is unknown, which is already reported.
        """
        run, uses = node.get("run"), text_of(node, "uses")
        if operator not in ARITIES:
            return None
        function: dict[str, Any] = {"target": uses, "name": (uses or "").rpartition(":")[2]}
        if run is not None:
            if run.text is None:
                return None
            body = inspect_body(run.text, text_of(node, "lang"), operator)
            for number, message in body.errors:
                run.report(number, message)
            if body.name is None:
                return None
            first = self.inline.setdefault(same_name(body.name), run)
            if first is not run and body.language != "sql":
                message = f"inline function `{body.name}` is not unique: line {first.line} has one"
                run.report("E24", message)
            function = {
                "name": body.name,
                "language": body.language,
                "source": run.text if run.text.endswith("\n") else f"{run.text}\n",
                # The position of a block of text is that of its `|`, in the line before.
                "body_line": run.line + ("\n" in run.text),
            }
        elif not uses:
            return None
        return StepDef(
            operator=operator,
            **function,
            **_signature(node),
            parameters=kept(node, "with"),
            path=node.path,
            line=node.line,
        )


# ---- the times of a window -----------------------------------------------------------------------


def _window(node: Node) -> WindowDef | None:
    """Read the times of a window; None if they have errors."""
    kinds = [kind for kind in WindowKind if node.get(kind.value) is not None]
    if len(kinds) != 1:
        names = " and ".join(f"`{kind.value}`" for kind in kinds) or "neither"
        node.report("E36", f"a window is either `tumbling` or `sliding`; found {names}")
        return None
    body = node.get(kinds[0].value)
    duration = _time(body, "duration")
    slide = _time(body, "slide") if kinds[0] is WindowKind.SLIDING else duration
    offset = _time(body, "offset", zero=True)
    watermark = node.get("watermark")
    idleness = _time(watermark, "idleness")
    grace = _time(watermark, "grace-period", zero=True)
    if duration is None or slide is None or body is None:
        return None
    check_slide(duration, slide, body)
    return WindowDef(
        kind=kinds[0],
        duration_ms=duration,
        slide_ms=slide,
        offset_ms=offset or 0,
        idleness_ms=idleness,
        grace_ms=grace or 0,
    )


def _time(node: Node | None, key: str, *, zero: bool = False) -> int | None:
    time = None if node is None else node.get(key)
    if time is None or time.text is None:
        return None
    milliseconds = parse_duration_ms(time.text)
    if milliseconds is None or (milliseconds == 0 and not zero):
        least = "" if zero else " above 0"
        time.report("E37", f"{key} `{time.text}` is no duration{least}; expected {ACCEPTED}")
        return None
    return milliseconds
