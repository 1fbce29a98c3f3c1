"""Load the user functions of steps: inline Python, an import path, or a bound function.

Source: sdf-states.md 8.1 and 8.2; errors E25 to E27, E42.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from arroyo_dagster.dataflow.definition.bodies import ARITIES, inspect_body
from arroyo_dagster.dataflow.definition.definition import Dataflow, FunctionDef, Package, StepDef
from arroyo_dagster.dataflow.definition.names import mangled
from arroyo_dagster.dataflow.definition.types import CompositeType, NamedType, same_name
from arroyo_dagster.dataflow.errors import OperatorError, UnboundOperatorError
from arroyo_dagster.dataflow.runtime.columnar import COLUMNAR, SQL, SqlBody, form_of
from arroyo_dagster.dataflow.runtime.reasons import keep_source
from arroyo_dagster.user_modules import INLINE, import_named

FunctionBody = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionPlan:
    """The origin of a step's function. Can be pickled.

    Attributes:
        name: the name of the function, for errors and metrics.
        operator: the operator of the step.
        source: Python code to compile, or a query; None = use `target`.
        target: `module:function`, or the callable itself, which is sent to Spark's workers.
        gives_pair: whether its signature in the YAML declares a key-value result.
        states: the states that it may access; None = all in scope.
        path: the YAML path of the step.
        language: `python` or `sql`.
        form: the form of a columnar body, as in `form_of`; "" = a call per record, or unknown
            before it is loaded.
    """

    name: str
    operator: str
    source: str | None = None
    target: str | FunctionBody | None = None
    gives_pair: bool = False
    states: tuple[str, ...] | None = None
    path: str
    language: str = "python"
    form: str = ""


@dataclass(frozen=True, slots=True)
class Function:
    """A loaded function.

    Attributes:
        takes_key: whether its first argument is the record's key.
        gives_pair: whether it returns `(key, value)`.
        form: the form of its columns, as in `form_of`; "" = it is called per record.
    """

    plan: FunctionPlan
    body: FunctionBody
    takes_key: bool
    gives_pair: bool
    form: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The functions that steps can use: bound ones, and those of imported packages."""

    dataflow: Dataflow
    functions: Mapping[str, FunctionBody | str] = field(default_factory=dict)
    packages: Mapping[str, Package] = field(default_factory=dict)

    def plan(self, service: str, step: StepDef) -> FunctionPlan:
        """Find the function of a step.

        In this order: inline Python or `module:function` in the dataflow, a bound function, inline
        Python in the package.

        Raises:
            UnboundOperatorError: there is none (E26).
        """
        make: dict[str, Any] = {"name": step.name, "operator": step.operator, "path": step.path}
        if step.source is not None and step.language in ("python", "sql"):
            return FunctionPlan(source=step.source, language=step.language, **make)
        if step.source is None and step.target and ":" in step.target:
            return FunctionPlan(target=step.target, **make)
        packaged = packaged_function(self.dataflow, self.packages, step)
        make["gives_pair"] = _is_pair(packaged)
        make["states"] = None if packaged is None else packaged.states
        for name in (step.name, None if packaged is None else packaged.name):
            if (bound := self._bound(name)) is not None:
                return FunctionPlan(target=bound, **make)
        if packaged is not None and packaged.source is not None:
            language = inspect_body(packaged.source, packaged.language, packaged.operator)
            if language.language in ("python", "sql"):
                return FunctionPlan(source=packaged.source, language=language.language, **make)
        raise UnboundOperatorError(
            f"service `{service}`: the body of {step.operator} `{step.name}` is "
            + ("not Python" if step.source else "not in the dataflow")
            + ", and no Python function is bound to it",
            number="E26",
            path=step.path,
            function=step.name,
            next_step=f"bind one: `--bind {step.name.replace('_', '-')}=module:function`",
        )

    def _bound(self, name: str | None) -> FunctionBody | str | None:
        if name is None:
            return None
        bodies = {same_name(key): body for key, body in self.functions.items()}
        return bodies.get(same_name(name))


def packaged_function(
    dataflow: Dataflow, packages: Mapping[str, Package], step: StepDef
) -> FunctionDef | None:
    """Return the function of an imported package that a step uses; None = it uses none."""
    for imported in dataflow.imports:
        package = packages.get(imported.package)
        for function in imported.functions if package else ():
            if (function.alias or function.name) == step.target:
                assert package is not None
                return package.functions.get(function.name)
    return None


def unbound_steps(
    dataflow: Dataflow,
    packages: Mapping[str, Package],
    functions: Mapping[str, FunctionBody | str],
) -> list[tuple[str, StepDef]]:
    """Return every step, with its service, whose function has no Python body and is not bound."""
    library = Library(dataflow=dataflow, functions=functions, packages=packages)
    unbound = []
    for service in dataflow.services.values():
        for step in service.steps:
            try:
                library.plan(service.name, step)
            except UnboundOperatorError:
                unbound.append((service.name, step))
    return unbound


def unbound_error(functions: Mapping[str, str], also: str = "") -> UnboundOperatorError:
    """Return the error for functions that are not Python, and bound to no Python function (E26).

    Args:
        functions: the place of each by its name.
        also: an addition to what to do next.
    """
    count = f"{len(functions)} function" + (" is" if len(functions) == 1 else "s are")
    return UnboundOperatorError(
        f"{count} not Python, and bound to no Python function: {', '.join(functions.values())}",
        number="E26",
        next_step="bind each: "
        + " ".join(f"--bind {name}=MODULE:FUNCTION" for name in functions)
        + also,
    )


def stub(service: str, step: StepDef, packaged: FunctionDef | None) -> str:
    """Return a Python function to fill in for a step without a Python body."""
    inputs = step.inputs or (() if packaged is None else packaged.inputs)
    named = [mangled(parameter.name) for parameter in inputs if parameter.name]
    generic = ("record", "time")[: min(ARITIES[step.operator])]
    arguments = ", ".join(named if len(named) in ARITIES[step.operator] else generic)
    return (
        f"def {mangled(step.name)}({arguments}):\n"
        f'    """{step.operator} of service {service}, line {step.line}."""\n'
        "    raise NotImplementedError\n"
    )


def _is_pair(function: FunctionDef | None) -> bool:
    if function is None or function.output is None:
        return False
    declared = function.output.type
    if isinstance(declared, CompositeType):
        return declared.kind == "key-value"
    return isinstance(declared, NamedType) and declared.name == "key-value"


def load(plan: FunctionPlan, scope: Mapping[str, Any]) -> Function:
    """Compile or import a function.

    Args:
        plan: the origin of the function.
        scope: the global names of inline code, besides Python's built-ins.

    Raises:
        OperatorError: it cannot be imported, is not a function, or does not fit its step (E27).
    """
    if plan.source is not None and plan.language == "sql":
        return Function(plan, SqlBody(plan.source), takes_key=False, gives_pair=False, form=SQL)
    body = _compiled(plan, scope) if plan.source is not None else _imported(plan)
    parameters = _parameters(plan, body)
    pair = plan.gives_pair or _annotated_pair(body)
    takes_key = len(parameters) > min(ARITIES[plan.operator])
    form = form_of(body, parameters[-1]) if parameters else ""
    if form and plan.operator not in COLUMNAR:
        raise _misfit(plan, f"it takes a frame; {plan.operator} has no columnar form")
    if form and (takes_key or pair):
        raise _misfit(plan, "it takes a frame, and so neither takes a key nor returns pairs")
    return Function(plan, body, takes_key, pair, form)


def _compiled(plan: FunctionPlan, scope: Mapping[str, Any]) -> FunctionBody:
    assert plan.source is not None
    inspected = inspect_body(plan.source, "python", plan.operator)
    if inspected.errors or inspected.name is None:
        raise _misfit(plan, "; ".join(message for _, message in inspected.errors))
    names: dict[str, Any] = {**scope, "__name__": f"{INLINE}{plan.name}"}
    file = f"<{plan.path}>"
    keep_source(file, plan.source)
    try:
        exec(compile(plan.source, file, "exec", dont_inherit=True), names)
    except Exception as error:
        raise _misfit(plan, f"it cannot be loaded: {type(error).__name__}: {error}") from error
    body: FunctionBody = names[inspected.name]
    return body


def _imported(plan: FunctionPlan) -> FunctionBody:
    if callable(plan.target):
        return plan.target
    module, _, name = str(plan.target).partition(":")
    try:
        value: Any = import_named(module)
        for part in name.split("."):
            value = getattr(value, part)
    except Exception as error:
        message = f"{plan.target} cannot be imported: {type(error).__name__}: {error}"
        raise _misfit(plan, message) from error
    if not callable(value):
        raise _misfit(plan, f"{plan.target} is no function")
    return typing.cast(FunctionBody, value)


def _parameters(plan: FunctionPlan, body: FunctionBody) -> list[str]:
    """Return the names of the parameters that a step gives."""
    expected = " or ".join(str(count) for count in ARITIES[plan.operator])
    if inspect.iscoroutinefunction(body) or inspect.isasyncgenfunction(body):
        raise _misfit(plan, "it is async; expected a plain `def`")
    if plan.operator != "flat-map" and inspect.isgeneratorfunction(body):
        raise _misfit(plan, "it is a generator; return instead")
    try:
        parameters = inspect.signature(body).parameters.values()
    except (TypeError, ValueError) as error:
        raise _misfit(plan, f"its arguments are not known ({error})") from error
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [parameter for parameter in parameters if parameter.default is inspect.Parameter.empty]
    if any(parameter.kind not in positional for parameter in needed):
        raise _misfit(plan, f"it takes `*` arguments; expected {expected} positional arguments")
    if len(needed) not in ARITIES[plan.operator]:
        raise _misfit(plan, f"it takes {len(needed)} arguments; expected {expected}")
    return [parameter.name for parameter in needed]


def _annotated_pair(body: FunctionBody) -> bool:
    annotation = getattr(body, "__annotations__", {}).get("return")
    if isinstance(annotation, str):
        return annotation.startswith(("tuple[", "Tuple[", "typing.Tuple["))
    return annotation is tuple or typing.get_origin(annotation) is tuple


def _misfit(plan: FunctionPlan, reason: str) -> OperatorError:
    return OperatorError(
        f"function `{plan.name}` cannot serve {plan.operator}: {reason}",
        number="E27",
        path=plan.path,
        next_step="correct the function, or bind another",
    )
