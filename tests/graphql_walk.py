"""Ask Dagster's GraphQL for everything that a person can see, without the webserver."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import graphql
from dagster._core.remote_origin import InProcessCodeLocationOrigin
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import InProcessWorkspaceLoadTarget
from dagster_graphql.schema import create_schema

LOCATION = "canaries"
REPOSITORY = {"repositoryName": "__repository__", "repositoryLocationName": LOCATION}
_DEPTH = 12
_ROUNDS = 4


@contextmanager
def served(instance: dg.DagsterInstance, definitions: Path) -> Iterator[Any]:
    """A request context over one code location, loaded in this process."""
    target = LoadableTargetOrigin(
        executable_path=sys.executable, python_file=str(definitions), attribute="defs"
    )
    origin = InProcessCodeLocationOrigin(loadable_target_origin=target, location_name=LOCATION)
    with WorkspaceProcessContext(instance, InProcessWorkspaceLoadTarget([origin])) as process:
        yield process.create_request_context()


def answers(
    context: Any, arguments: Mapping[str, Any], only: Collection[str] | None = None
) -> Iterator[tuple[str, str]]:
    """Ask every field of the query type, and in each every type below it once.

    Args:
        only: these fields of the query type; None: all.
        arguments: the value of each required argument, by its name; a field with another is not
            asked. The value of an optional one is given as `field.argument`.

    Yields:
        The field, and its answer as JSON, errors included.
    """
    schema = create_schema().graphql_schema
    assert schema.query_type is not None
    failing: set[tuple[str, str]] = set()
    for name in schema.query_type.fields:
        if only is not None and name not in only:
            continue
        root = _query(schema, name, arguments, failing)
        if root is not None:
            yield name, _asked(schema, context, root, failing)


def _asked(
    schema: graphql.GraphQLSchema, context: Any, root: _Node, failing: set[tuple[str, str]]
) -> str:
    async def ask() -> graphql.ExecutionResult:
        document = graphql.parse(f"{{ {root.text()} }}")
        found = graphql.execute(schema, document, context_value=context)
        return await found if inspect.isawaitable(found) else found  # type: ignore[return-value]

    told: list[Any] = []
    for _ in range(_ROUNDS):
        context.loaders.clear()
        answer = asyncio.run(ask())
        errors = answer.errors or []
        told += [answer.data, [f"{one} {one.original_error!r}" for one in errors]]
        # A field that fails takes all around it along: ask again without it.
        paths = [[part for part in one.path or () if isinstance(part, str)] for one in errors]
        dropped = {one for path in paths for one in root.drop(path)}
        failing |= dropped
        if not dropped:
            break
    return json.dumps(told, ensure_ascii=False, default=str)


def _query(
    schema: graphql.GraphQLSchema,
    name: str,
    arguments: Mapping[str, Any],
    failing: set[tuple[str, str]],
) -> _Node | None:
    """The field with all below it: each type once, where it is nearest."""
    assert schema.query_type is not None
    seen: set[str] = set()
    top = _called(name, schema.query_type.fields[name], arguments)
    if top is None:
        return None
    root = _Node(top, graphql.get_named_type(schema.query_type.fields[name].type))
    queue = deque([(root, 0)])
    while queue:
        node, depth = queue.popleft()
        for kind in _kinds(schema, node.kind):
            if kind.name in seen or depth > _DEPTH:
                continue
            seen.add(kind.name)
            for inner, field in kind.fields.items():
                called = _called(inner, field, arguments)
                if called is None or (kind.name, inner) in failing:
                    continue
                child = _Node(called, graphql.get_named_type(field.type))
                node.children.setdefault(kind.name, []).append(child)
                queue.append((child, depth + 1))
    return root


class _Node:
    def __init__(self, called: str, kind: Any) -> None:
        self.called = called
        self.name = called.partition("(")[0]
        self.kind = kind
        self.children: dict[str, list[_Node]] = {}

    def drop(self, path: list[str]) -> set[tuple[str, str]]:
        """Leave out the field at `path`, which begins with this one; its type and name."""
        dropped: set[tuple[str, str]] = set()
        for kind, children in self.children.items():
            for child in [one for one in children if [one.name] == path[1:2]]:
                if len(path) == 2:
                    children.remove(child)
                    dropped.add((kind, child.name))
                else:
                    dropped |= child.drop(path[1:])
        return dropped

    def text(self) -> str:
        if graphql.is_leaf_type(self.kind):
            return self.called
        inner = " ".join(
            f"... on {kind} {{ {' '.join(child.text() for child in children)} }}"
            for kind, children in self.children.items()
            if children
        )
        return f"{self.called} {{ __typename {inner} }}"


def _kinds(schema: graphql.GraphQLSchema, kind: Any) -> list[graphql.GraphQLObjectType]:
    if graphql.is_object_type(kind):
        return [kind]
    if graphql.is_abstract_type(kind):
        return list(schema.get_possible_types(kind))
    return []


def _called(name: str, field: Any, arguments: Mapping[str, Any]) -> str | None:
    given = {}
    for argument, kind in field.args.items():
        if f"{name}.{argument}" in arguments:
            given[argument] = arguments[f"{name}.{argument}"]
        elif graphql.is_required_argument(kind):
            if argument not in arguments:
                return None
            given[argument] = arguments[argument]
    if not given:
        return name
    return f"{name}({', '.join(f'{key}: {_literal(value)}' for key, value in given.items())})"


class Word(str):
    """A value of an enumeration."""


def _literal(value: Any) -> str:
    if isinstance(value, Word):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_literal(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return json.dumps(value)
