"""Load the definitions that the `sdf` subcommands take: a file, and how strictly it is read."""

from __future__ import annotations

import functools
import os
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from arroyo_dagster.cli.settings import WholeNumber
from arroyo_dagster.dataflow.definition.definition import Dataflow, Package
from arroyo_dagster.dataflow.definition.diagnostics import InvalidDefinition
from arroyo_dagster.dataflow.runtime.checks import check_bodies, check_package_bodies
from arroyo_dagster.dataflow.runtime.functions import unbound_error, unbound_steps
from arroyo_dagster.dataflow.runtime.service import DEAD_LETTER, FAIL, SKIP
from arroyo_dagster.dataflow.topics.bindings import (
    BindingsText,
    parse_binding,
    parse_function,
    read_bindings,
)
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.keys import MOST_SUBTASKS
from arroyo_dagster.user_modules import open_folders

if TYPE_CHECKING:
    from arroyo_dagster.dataflow.testing.dataflow_tests import DataflowTest
    from arroyo_dagster.dataflow.testing.package_tests import PackageTest

_F = TypeVar("_F", bound=Callable[..., Any])
_ACCEPTED = ("legacy", "extended")
_D = TypeVar("_D", bound=Dataflow | Package)


def loading_options(command: _F) -> _F:
    """Add `--accept` and `--prod`, for every subcommand that reads a file.

    The command gets `reading`: the arguments `legacy`, `extended` and `dev` of `loading`.
    """

    @functools.wraps(command)
    def call(*args: Any, accept: Collection[str], prod: bool, **options: Any) -> Any:
        reading = {**{name: name in accept for name in _ACCEPTED}, "dev": not prod}
        return command(*args, reading=reading, **options)

    prod = click.option("--prod", is_flag=True, help="Ignore the `dev` section.")
    also = click.option(
        "--accept",
        multiple=True,
        type=click.Choice(_ACCEPTED),
        help="legacy: apiVersions before 0.5.0. extended: scalar values that SDF's own engine "
        "refuses. May be repeated.",
    )
    return also(prod(typing.cast(_F, call)))


def binding_options(*roles: str) -> Callable[[_F], _F]:
    """Add `--bindings`, `--bind`, `--env`, and an option for each role of topics: source, sink.

    The command gets `bound`: the bindings of flags, and those of the file that no flag gives.
    Sources of the file are left out where the command has no option for them.
    """
    listed = ", ".join([*(f"{role}s" for role in roles), "functions and env"])
    left_out = {0: ", no topics", 1: "; its sources are not read"}.get(len(roles), "")
    places = {"source": "come from", "sink": "go"}

    def add(command: _F) -> _F:
        @functools.wraps(command)
        def call(
            *args: Any,
            functions: Sequence[str],
            env: Sequence[str],
            bindings: str | None,
            **options: Any,
        ) -> Any:
            topics = {role: options.pop(f"{role}s") for role in roles}
            bound = _bindings(topics, functions, env, bindings)
            if "source" not in roles:
                bound = replace(bound, sources={})
            return command(*args, bound=bound, **options)

        bind = click.option(
            "--bind",
            "functions",
            multiple=True,
            metavar="NAME=MODULE:FUNCTION",
            help="The Python function for a function whose body is in another language.",
        )
        variables = click.option(
            "-e",
            "--env",
            multiple=True,
            metavar="NAME=VALUE",
            help="Environment variables of functions.",
        )
        file = click.option(
            "--bindings", metavar="FILE", help=f"Read {listed} from this YAML file{left_out}."
        )
        with_options = file(bind(variables(typing.cast(_F, call))))
        for role in reversed(roles):
            with_options = click.option(
                f"--{role}",
                f"{role}s",
                multiple=True,
                metavar="TOPIC=KIND:PATH",
                help=f"Where a topic's records {places[role]}.",
            )(with_options)
        return with_options

    return add


keep_epochs_option = click.option(
    "--keep-epochs",
    type=WholeNumber(2),
    default=10,
    show_default=True,
    help="How many epochs of each service to keep.",
)
parallelism_option = click.option(
    "--parallelism",
    type=WholeNumber(1, MOST_SUBTASKS),
    default=1,
    show_default=True,
    help="Number of subtasks of each operator. It may change between runs.",
)


def error_options(default: str) -> Callable[[_F], _F]:
    """Add `--on-error` and `--max-errors`, for every subcommand that processes records."""

    def add(command: _F) -> _F:
        limit = click.option(
            "--max-errors",
            type=WholeNumber(0),
            metavar="N",
            help="Stop without publishing the epoch when more than N records of a run of a service "
            "fail. Default with skip: when a step fails on each of the first 10, or of 1,000 that "
            "reach it.",
        )
        choice = click.option(
            "--on-error",
            type=click.Choice([SKIP, DEAD_LETTER, FAIL]),
            default=default,
            show_default=True,
            help="What to do with a record whose function fails: skip it, keep it for `sdf replay` "
            "in the topic dead-letters of the service, or end the run.",
        )
        return choice(limit(command))

    return add


def _bindings(
    topics: Mapping[str, Sequence[str]],
    functions: Sequence[str],
    env: Sequence[str],
    file: str | None,
) -> BindingsText:
    bound = {
        role: [parse_binding(text, role) for text in topics.get(role, ())]
        for role in ("source", "sink")
    }
    for role, bindings in bound.items():
        names = [binding.topic for binding in bindings]
        for topic in names:
            if names.count(topic) > 1:
                raise InputError(f"topic bound twice: two {role}s of one topic", topic=topic)
    flags = BindingsText(
        sources={binding.topic: binding for binding in bound["source"]},
        sinks={binding.topic: binding for binding in bound["sink"]},
        functions=dict(parse_function(text) for text in functions),
        env=dict(_variable(text) for text in env),
    )
    return flags if file is None else flags.over(read_bindings(file))


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise InputError("a variable or setting is not in the form NAME=VALUE")
    return name, value


def check_functions(file: str, document: _D, packages: Mapping[str, Package]) -> _D:
    """Check the functions of a definition, and return it with the warnings. No code is loaded.

    Raises:
        InvalidDefinition: a function uses names, members or tables that do not exist.
    """
    if isinstance(document, Dataflow):
        findings = check_bodies(document, packages, folders=_folders(file))
    else:
        findings = check_package_bodies(document, packages)
    warnings = (*document.warnings, *findings.warnings)
    if findings.errors:
        kind = "dataflow" if isinstance(document, Dataflow) else "package"
        raise InvalidDefinition(kind, findings.errors, file=file, warnings=warnings)
    return replace(document, warnings=warnings)


def check_tests(
    file: str,
    document: Dataflow | Package,
    packages: Mapping[str, Package],
    only: Sequence[str] = (),
) -> list[PackageTest | DataflowTest]:
    """Check the section `tests`, and return the tests in it. Arguments as in `find_tests`.

    Raises:
        InvalidDefinition: the section has errors.
    """
    # Only here: most commands that load a file run no test.
    from arroyo_dagster.dataflow.testing.suite import find_tests

    try:
        return find_tests(document, packages, only=only)
    except InvalidDefinition as error:
        raise error.with_file(file) from None


def check_bound(
    dataflow: Dataflow, packages: Mapping[str, Package], functions: Mapping[str, str]
) -> None:
    """Check that all functions without a Python body are bound.

    Raises:
        UnboundOperatorError: E26, all that are not.
    """
    unbound = unbound_steps(dataflow, packages, functions)
    if not unbound:
        return
    places: dict[str, str] = {}
    for _, step in unbound:
        name, place = (
            step.name.replace("_", "-"),
            f"{step.operator} `{step.name}` (line {step.line})",
        )
        places[name] = f"{places[name]}, {place}" if name in places else place
    raise unbound_error(places, "; `sdf check --stubs` prints functions to fill in")


def _folders(file: str) -> tuple[str, str]:
    folder = file if os.path.isdir(file) else os.path.dirname(file)
    return folder or ".", os.getcwd()


def allow_functions(file: str) -> None:
    """Allow imports of named functions from the definition's folder, then from the working
    directory. Call it only in commands that run them.
    """
    open_folders(*_folders(file))
