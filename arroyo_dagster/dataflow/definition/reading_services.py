"""Read services from YAML: sources, steps, partitions, windows and sinks, without their states.

The shapes are checked before; missing parts are already reported.

Source: sdf-states.md 2.3, 2.4, 3.1; errors E24, E36, E37.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from arroyo_dagster.dataflow.definition.bodies import ARITIES, inspect_body
from arroyo_dagster.dataflow.definition.definition import (
    AsWritten,
    Endpoint,
    Parameter,
    PartitionDef,
    ServiceDef,
    StepDef,
    WindowedDef,
)
from arroyo_dagster.dataflow.definition.diagnostics import Diagnostics
from arroyo_dagster.dataflow.definition.durations import ACCEPTED, parse_duration_ms
from arroyo_dagster.dataflow.definition.reading_types import TypeReader
from arroyo_dagster.dataflow.definition.shapes import text_of
from arroyo_dagster.dataflow.definition.types import same_name
from arroyo_dagster.dataflow.definition.windows import MOST_WINDOWS, WindowDef, WindowKind
from arroyo_dagster.dataflow.definition.yaml_tree import Node


class StepReader:
    """Reads steps, and checks that the names of inline functions are unique (E24)."""

    def __init__(self, diagnostics: Diagnostics, types: TypeReader) -> None:
        self._mistakes = diagnostics
        self._types = types
        self._inline: dict[str, Node] = {}

    def listed(self, node: Node | None, key: str = "transforms") -> tuple[StepDef, ...]:
        """Read a list of steps, each with its `operator`."""
        found = None if node is None else node.get(key)
        items: Sequence[Node] = () if found is None else found.items
        steps = (self.step(one, text_of(one, "operator")) for one in items)
        return tuple(step for step in steps if step is not None)

    def step(self, node: Node | None, operator: str | None) -> StepDef | None:
        """Read one step; `run` takes precedence over `uses`.

        None if there is no function, or if the operator is unknown, which is already reported.
        """
        if node is None or operator not in ARITIES:
            return None
        run, uses = node.get("run"), node.get("uses")
        if run is not None:
            if run.text is None:
                return None
            body = inspect_body(run.text, text_of(node, "lang"), operator)
            for number, message in body.errors:
                self._mistakes.add(run.diagnostic_at(number, message))
            if body.name is None:
                return None
            first = self._inline.setdefault(same_name(body.name), run)
            if first is not run and body.language != "sql":
                message = f"inline function `{body.name}` is not unique: line {first.line} has one"
                self._mistakes.add(run.diagnostic_at("E24", message))
            source = run.text if run.text.endswith("\n") else f"{run.text}\n"
            # The position of a block of text is that of its `|`, in the line before.
            line = run.line + ("\n" in run.text)
            step = self._step(node, operator, body.name, language=body.language, source=source)
            return replace(step, body_line=line)
        if uses is None or not uses.text:
            return None
        name = uses.text.rpartition(":")[2]
        return self._step(node, operator, name, target=uses.text)

    def _step(
        self,
        node: Node,
        operator: str,
        name: str,
        *,
        language: str | None = None,
        source: str | None = None,
        target: str | None = None,
    ) -> StepDef:
        return StepDef(
            operator=operator,
            name=name,
            language=language,
            source=source,
            target=target,
            inputs=self.inputs(node),
            output=self.parameter(node.get("output")),
            states=names_of(node, "states"),
            dependencies=kept(node, "dependencies"),
            parameters=kept(node, "with"),
            path=node.path,
            line=node.line,
        )

    def inputs(self, node: Node) -> tuple[Parameter, ...]:
        """Read the inputs of a function, in order."""
        found = node.get("inputs")
        listed = (self.parameter(one) for one in (found.items if found else ()))
        return tuple(one for one in listed if one is not None)

    def parameter(self, node: Node | None) -> Parameter | None:
        """Read an input or output: a type, its name and its flags."""
        declared = None if node is None else self._types.read(node)
        if node is None or declared is None:
            return None
        return Parameter(
            name=text_of(node, "name"),
            type=declared,
            is_key=text_of(node, "kind") == "key",
            optional=_flag(node, "optional"),
            is_list=_flag(node, "list"),
        )


def names_of(node: Node, key: str) -> tuple[str, ...]:
    """Return the names of a list of `{name: …}`, sorted, since their order has no meaning."""
    found = node.get(key)
    names = (text_of(one, "name") for one in (found.items if found else ()))
    return tuple(sorted({name for name in names if name}))


def kept(node: Node, key: str) -> AsWritten | None:
    """Return a section as written; None if it is absent or empty."""
    found = node.get(key)
    return None if found is None or found.value in ({}, ()) else AsWritten.of(found.plain())


def _flag(node: Node, key: str) -> bool:
    found = node.get(key)
    return found is not None and found.value is True


class ServiceReader:
    """Reads services."""

    def __init__(self, diagnostics: Diagnostics, steps: StepReader) -> None:
        self._mistakes = diagnostics
        self._steps = steps

    def read(self, name: str, node: Node) -> ServiceDef:
        """Read a service without its states; parts with errors are omitted."""
        window, partition = node.get("window"), node.get("partition")
        if window is not None and partition is not None:
            message = (
                f"service `{name}` has both `window` and `partition`; put one inside the other"
            )
            self._mistakes.add(node.diagnostic_at("E36", message, key="partition"))
        return ServiceDef(
            name=name,
            sources=self._endpoints(node, "sources"),
            transforms=self._steps.listed(node),
            windowed=None if window is None else self._windowed(window),
            partition=self._partition(partition),
            sinks=self._endpoints(node, "sinks"),
        )

    def _endpoints(self, node: Node, key: str) -> tuple[Endpoint, ...]:
        found = node.get(key)
        return tuple(self._endpoint(one) for one in (found.items if found else ()))

    def _endpoint(self, node: Node) -> Endpoint:
        kind = text_of(node, "type") or ""
        if kind != "no-target" and node.given("id") is None:
            self._mistakes.add(node.diagnostic_at("E04", "missing `id`", key="id"))
        return Endpoint(
            kind=kind,
            id=text_of(node, "id"),
            transforms=self._steps.listed(node),
            line=node.line,
        )

    def _partition(self, node: Node | None) -> PartitionDef | None:
        if node is None:
            return None
        assign_key = self._steps.step(node.get("assign-key"), "assign-key")
        transforms = self._steps.listed(node)
        update = self._steps.step(node.get("update-state"), "update-state")
        if not node.get("transforms") and not node.get("update-state"):
            message = "a partition without `transforms` or `update-state` does nothing"
            self._mistakes.warn(node.diagnostic_at("2.4", message))
        if assign_key is None:
            return None
        return PartitionDef(assign_key=assign_key, transforms=transforms, update_state=update)

    def _windowed(self, node: Node) -> WindowedDef | None:
        window = self.window(node)
        timestamp = self._steps.step(node.get("assign-timestamp"), "assign-timestamp")
        transforms = self._steps.listed(node)
        partition = self._partition(node.get("partition"))
        flush = self._steps.step(node.get("flush"), "flush")
        if window is None or timestamp is None:
            return None
        return WindowedDef(
            window=window,
            assign_timestamp=timestamp,
            transforms=transforms,
            partition=partition,
            flush=flush,
        )

    # ---- the times of a window -------------------------------------------------------------------

    def window(self, node: Node) -> WindowDef | None:
        """Read the times of a window; None if they have errors."""
        kinds = [kind for kind in WindowKind if node.get(kind.value) is not None]
        if len(kinds) != 1:
            found = " and ".join(f"`{kind.value}`" for kind in kinds) or "neither"
            message = f"a window is either `tumbling` or `sliding`; found {found}"
            self._mistakes.add(node.diagnostic_at("E36", message))
            return None
        body = node.get(kinds[0].value)
        duration = self._time(body, "duration")
        sliding = kinds[0] is WindowKind.SLIDING
        slide = self._time(body, "slide") if sliding else duration
        offset = self._time(body, "offset", zero=True)
        watermark = node.get("watermark")
        idleness = self._time(watermark, "idleness")
        grace = self._time(watermark, "grace-period", zero=True)
        if duration is None or slide is None or body is None:
            return None
        self._check_slide(body, duration, slide)
        return WindowDef(
            kind=kinds[0],
            duration_ms=duration,
            slide_ms=slide,
            offset_ms=offset or 0,
            idleness_ms=idleness,
            grace_ms=grace or 0,
        )

    def _check_slide(self, body: Node, duration: int, slide: int) -> None:
        if slide > duration:
            message = f"slide `{text_of(body, 'slide')}` is longer than the duration: records "
            message += "between two windows would be lost"
            self._mistakes.add(body.diagnostic_at("E37", message, key="slide"))
        elif duration > slide * MOST_WINDOWS:
            message = f"slide `{text_of(body, 'slide')}` puts a record into more than "
            self._mistakes.add(
                body.diagnostic_at(
                    "E37", f"{message}{MOST_WINDOWS} windows; lengthen it", key="slide"
                )
            )

    def _time(self, node: Node | None, key: str, *, zero: bool = False) -> int | None:
        found = None if node is None else node.get(key)
        if found is None or found.text is None:
            return None
        milliseconds = parse_duration_ms(found.text)
        if milliseconds is None or (milliseconds == 0 and not zero):
            least = "" if zero else " above 0"
            message = f"{key} `{found.text}` is no duration{least}; expected {ACCEPTED}"
            self._mistakes.add(found.diagnostic_at("E37", message))
            return None
        return milliseconds
