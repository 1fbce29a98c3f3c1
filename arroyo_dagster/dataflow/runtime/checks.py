"""Check the Python bodies of a definition before they run: names, members of states, SQL.

Bodies are compiled and analyzed, never run. Reported is only what fails whenever it is reached.

Source: sdf-states.md 3.2 to 3.4, 4.1; errors E26, E27, E44, E46.
"""

from __future__ import annotations

import ast
import builtins
import dis
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

from arroyo_dagster.dataflow.definition.bodies import ARITIES, inspect_body
from arroyo_dagster.dataflow.definition.definition import (
    Dataflow,
    Package,
    ServiceDef,
    StateDef,
    StateForm,
    StepDef,
    ValueKind,
)
from arroyo_dagster.dataflow.definition.diagnostics import Diagnostic
from arroyo_dagster.dataflow.definition.grammar import TRANSFORMS
from arroyo_dagster.dataflow.definition.names import ROW_METHODS, mangled
from arroyo_dagster.dataflow.definition.packages import visible_states
from arroyo_dagster.dataflow.errors import SqlError, did_you_mean
from arroyo_dagster.dataflow.runtime.context import CONTEXT
from arroyo_dagster.dataflow.runtime.functions import packaged_function
from arroyo_dagster.dataflow.runtime.handles import Cell
from arroyo_dagster.dataflow.views.frames import Frame, Pairs
from arroyo_dagster.dataflow.views.snapshots import empty_frame
from arroyo_dagster.dataflow.views.sql import Tables
from arroyo_dagster.dataflow.views.view import StateView
from arroyo_dagster.state.operations.query.sql_text import sql_tokens
from arroyo_dagster.user_modules import defines, parse_python

_ALWAYS = {*dir(builtins), "__name__", "__builtins__", "__annotations__", "__doc__", "__file__"}
_PARAMETERS: tuple[Any, ...] = (None, 1, "")


@dataclass(frozen=True, slots=True)
class BodyFindings:
    """What was found in the bodies of a definition: errors, and warnings."""

    errors: tuple[Diagnostic, ...] = ()
    warnings: tuple[Diagnostic, ...] = ()


def check_bodies(
    dataflow: Dataflow, packages: Mapping[str, Package], *, folders: Sequence[str] = ()
) -> BodyFindings:
    """Check the functions of all steps of a dataflow.

    A module that is not installed here is a warning: it may be where the dataflow runs.

    Args:
        dataflow: the definition.
        packages: the packages that it imports, by id.
        folders: where named modules are searched besides the installed ones.
    """
    imported = {
        function.alias or function.name for item in dataflow.imports for function in item.functions
    }
    errors: list[Diagnostic] = []
    warnings: list[Diagnostic] = []
    for service in dataflow.services.values():
        check = _bodies_of(service)
        for step in service.steps:
            packaged = packaged_function(dataflow, packages, step)
            if step.source is not None:
                if step.language == "python":
                    errors += check.body(step)
            elif packaged is not None and packaged.source is not None:
                body = inspect_body(packaged.source, packaged.language, packaged.operator)
                if body.language == "python":
                    errors += check.body(replace(step, source=packaged.source))
            elif step.target is not None and ":" in step.target:
                lookup = _named_function(step, folders)
                (warnings if lookup.missing else errors).extend(lookup.diagnostics)
            elif step.target not in imported:
                warnings.append(
                    _at(
                        step,
                        "E26",
                        f"function `{step.target}` is neither in the dataflow nor imported; a run "
                        f"needs `--bind {step.target}=module:function`",
                    )
                )
    return BodyFindings(tuple(sorted(errors)), tuple(sorted(warnings)))


def check_package_bodies(package: Package, packages: Mapping[str, Package]) -> BodyFindings:
    """Check the inline Python functions of a package on its own.

    Accessors are those of the states that a function lists, tables those of all states of the
    package. A transform may run before or after assign-key, and so may use what a state has in
    either place.

    Args:
        package: the definition.
        packages: the packages that it imports, by id.
    """
    errors: list[Diagnostic] = []
    states = visible_states(package, packages)
    loaded = all(item.package in packages for item in package.imports if item.states)
    for function in package.functions.values() if loaded else ():
        if function.source is None or function.operator not in ARITIES:
            continue
        body = inspect_body(function.source, function.language, function.operator)
        if body.language != "python":
            continue
        step = StepDef(
            operator=function.operator,
            name=function.name,
            source=function.source,
            path=f"functions.{function.name}.run",
            line=function.line,
        )
        keyed: tuple[bool, ...] = (True,) if function.operator == "update-state" else (False,)
        keyed = (True, False) if function.operator in TRANSFORMS else keyed
        listed = [states[name] for name in function.states if name in states]
        check = _Bodies(listed, {step.path: keyed}, tables_of=tuple(states.values()))
        errors += check.body(step)
    return BodyFindings(tuple(sorted(errors)))


def _at(step: StepDef, number: str, message: str) -> Diagnostic:
    return Diagnostic(line=step.line, column=1, path=step.path, number=number, message=message)


@dataclass(frozen=True, slots=True)
class _NamedFunction:
    """What was found out about `module:function`. `missing`: the module is not installed here."""

    missing: bool = False
    diagnostics: tuple[Diagnostic, ...] = ()


def _named_function(step: StepDef, folders: Sequence[str]) -> _NamedFunction:
    module, _, name = (step.target or "").partition(":")
    found = defines(module, name.partition(".")[0], folders)
    if found:
        return _NamedFunction()
    text = f"there is no module `{module}` here" if found is None else f"`{module}` has no `{name}`"
    diagnostic = _at(step, "E27", f"function `{step.target}`: {text}")
    return _NamedFunction(found is None, (diagnostic,))


def _bodies_of(service: ServiceDef) -> _Bodies:
    windowed = service.windowed
    partition = service.partition if windowed is None else windowed.partition
    keyed: dict[str, tuple[bool, ...]] = {}
    if partition is not None:
        steps = [*partition.transforms, *filter(None, [partition.update_state])]
        keyed = {step.path: (True,) for step in steps}
    states = tuple(service.states.values())
    return _Bodies(states, keyed, tables_of=states)


class _Bodies:
    """Checks inline bodies that share their scope.

    Args:
        states: those whose accessors are in scope.
        keyed: by the path of a step, whether its accessors give the entry of the record's key
            (True), or the whole state; both if either may be. Absent = the whole state.
        tables_of: the states that queries may read.
    """

    def __init__(
        self,
        states: Sequence[StateDef],
        keyed: Mapping[str, tuple[bool, ...]],
        *,
        tables_of: Sequence[StateDef],
    ) -> None:
        self._states = {
            name: state for state in states for name in (state.accessor, mangled(state.name))
        }
        self._keyed = keyed
        rows = [state for state in tables_of if state.value_kind is ValueKind.ROW]
        views = [StateView(s, None, empty_frame(s, live=False), lambda: 0) for s in rows]
        self._tables = Tables([view.table() for view in views])
        self._knows_all = all(
            state.value_kind is not None or state.form is StateForm.SYSTEM for state in tables_of
        )

    def body(self, step: StepDef) -> Iterator[Diagnostic]:
        """Check one body."""
        source = step.source or ""
        try:
            tree = parse_python(source)
            code = compile(source, f"<{step.path}>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            return  # reported where it was read
        local = _module_names(tree)
        accessors = {name: state for name, state in self._states.items() if name not in local}
        yield from self._names(step, code, local)
        handles = _handles(tree, accessors)
        batches = step.operator == "update-state" and _takes_batches(tree)
        for node, state in handles.attributes:
            typed = state.form is StateForm.TYPED
            keyed = [typed and flag for flag in self._keyed.get(step.path, (False,))]
            forms = dict(_members(state, keyed=is_keyed, batches=batches) for is_keyed in keyed)
            yield from _attribute_errors(step, node, state, forms)
        if self._knows_all and "sql" not in local | handles.assigned:
            for line, text in handles.queries:
                yield from self._query(step, line, text)

    def _names(self, step: StepDef, code: CodeType, local: set[str]) -> Iterator[Diagnostic]:
        names = {*local, *CONTEXT, *self._states}
        parameters = {*_parameters(code)}
        for name, line in sorted(_globals(code).items(), key=lambda item: item[1]):
            if name in names or name in _ALWAYS:
                continue
            states = ", ".join(sorted({s.accessor for s in self._states.values()})) or "none"
            hint = did_you_mean(name, names | parameters)
            if name in sys.stdlib_module_names:
                hint = f"; to use the module, write `import {name}` before the `def`"
            yield _at(
                step,
                "E44",
                f"name `{name}` in line {line} of the body is not defined; the states in scope "
                f"are {states}{hint}",
            )

    def _query(self, step: StepDef, line: int, text: str) -> Iterator[Diagnostic]:
        names = {token.text[1:] for token in sql_tokens(text) if token.kind == "parameter"}
        for value in _PARAMETERS if names else _PARAMETERS[:1]:
            try:
                self._tables.sql(text, dict.fromkeys(names, value))
                return
            except SqlError as error:
                reason = error
        yield _at(step, "E46", f"the query in line {line} of the body: {reason.message}")


def _attribute_errors(
    step: StepDef, node: ast.Attribute, state: StateDef, forms: Mapping[str, set[str] | None]
) -> Iterator[Diagnostic]:
    if None in forms.values() or node.attr.startswith("_"):
        return
    members = {name for names in forms.values() for name in names or () if not name.startswith("_")}
    if node.attr in members:
        return
    hint = did_you_mean(node.attr, members) or f"; it has {', '.join(sorted(members))}"
    yield _at(
        step,
        "E44",
        f"`{node.attr}` in line {node.lineno} of the body is not found in {' or '.join(forms)} of "
        f"state `{state.name}`{hint}",
    )


# ---- what code refers to -------------------------------------------------------------------------


def _takes_batches(tree: ast.Module) -> bool:
    """Return whether the annotation of the record says that the function takes whole batches."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.args.args:
            annotation = node.args.args[-1].annotation
            text = "" if annotation is None else ast.unparse(annotation).strip("'\"")
            return text.rpartition(".")[2] in ("DataFrame", "Table")
    return False


def _module_names(tree: ast.Module) -> set[str]:
    """Return the names that the module part of a body defines: its function and its imports."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name.partition(".")[0]) for alias in node.names}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
    return names


def _parameters(code: CodeType) -> Iterator[str]:
    """Yield the names of the arguments of the functions that a body defines."""
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from part.co_varnames[: part.co_argcount]


def _globals(code: CodeType) -> dict[str, int]:
    """Return the global names that code reads and never writes, with the first line of each."""
    lines: dict[str, int] = {}
    written: set[str] = set()
    waiting = [code]
    while waiting:
        part = waiting.pop()
        waiting += [constant for constant in part.co_consts if isinstance(constant, CodeType)]
        for instruction in dis.get_instructions(part):
            line = instruction.positions.lineno if instruction.positions else None
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                lines[instruction.argval] = min(line or 1, lines.get(instruction.argval, line or 1))
            elif instruction.opname in ("STORE_GLOBAL", "STORE_NAME"):
                written.add(instruction.argval)
    return {name: line for name, line in lines.items() if name not in written}


@dataclass(frozen=True, slots=True)
class _Handles:
    """What a body does with states.

    Attributes:
        attributes: attributes of what an accessor returned, with the state.
        queries: the line and the text of each `sql` with a constant text.
        assigned: every name that the body assigns.
    """

    attributes: tuple[tuple[ast.Attribute, StateDef], ...]
    queries: tuple[tuple[int, str], ...]
    assigned: frozenset[str]


def _handles(tree: ast.Module, accessors: Mapping[str, StateDef]) -> _Handles:
    assigned = [
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del)
    ]
    assigned += [node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)]
    free = {name: state for name, state in accessors.items() if name not in assigned}

    def state_of(node: ast.expr) -> StateDef | None:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
            return free.get(node.func.id)
        return None

    bound: dict[str, StateDef] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            (target,) = node.targets
            state = state_of(node.value)
            # A name that is assigned once holds the handle wherever it is read.
            if state and isinstance(target, ast.Name) and assigned.count(target.id) == 1:
                bound[target.id] = state
    attributes: list[tuple[ast.Attribute, StateDef]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            value = node.value
            state = bound.get(value.id) if isinstance(value, ast.Name) else state_of(value)
            if state is not None:
                attributes.append((node, state))
    return _Handles(tuple(attributes), tuple(_queries(ast.walk(tree))), frozenset(assigned))


def _queries(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
            continue
        text = node.args[0]
        if node.func.id == "sql" and isinstance(text, ast.Constant) and isinstance(text.value, str):
            yield node.lineno, text.value


def _members(state: StateDef, *, keyed: bool, batches: bool) -> tuple[str, set[str] | None]:
    """Return what an accessor returns, and the attributes of that; None = unknown."""
    if keyed and batches:
        return "the rows of a batch", {"rows", "update", "delete"}
    if state.value_kind is ValueKind.ROW:
        if not keyed:
            return "a frame", {*dir(Frame)}
        names = {column.attribute for column in state.columns} | ROW_METHODS
        return "a row", names | ({"value"} if len(state.columns) == 1 else set())
    if state.value_kind is ValueKind.SCALAR:
        return ("a cell", {*dir(Cell)}) if keyed else ("the pairs of key and value", {*dir(Pairs)})
    return "", None
