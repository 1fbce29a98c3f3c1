"""`sdf test` and `sdf show functions|states`: test packages on their own."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from arroyo_dagster.cli.common import EXIT_FINDINGS, json_option
from arroyo_dagster.cli.lazy import LazyGroup
from arroyo_dagster.cli.rendering import print_json
from arroyo_dagster.cli.sdf.files import allow_functions
from arroyo_dagster.cli.sdf.group import sdf, show
from arroyo_dagster.dataflow.definition.definition import FunctionDef, Package
from arroyo_dagster.dataflow.definition.loading import load_package
from arroyo_dagster.dataflow.definition.scope import scope_of
from arroyo_dagster.dataflow.runtime.converters import Converter
from arroyo_dagster.dataflow.testing.package_tests import TestOutcome, run_tests
from arroyo_dagster.dataflow.testing.runner import MISSING, Trial
from arroyo_dagster.dataflow.topics.bindings import parse_function
from arroyo_dagster.errors import InputError

PACKAGE_HERE = "sdf-package.yaml"


class _FileOrCommand(LazyGroup):
    """A group that treats an unknown subcommand as a package to test."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = ["section", *args]
        return super().parse_args(ctx, args)


@sdf.group(cls=_FileOrCommand)
def test() -> None:
    """Test a package: `sdf test [FILE]` runs the `tests` section of its YAML.

    SDF itself ignores that section; it is an extension of this project.
    """


def _bind_option(command: Any) -> Any:
    return click.option(
        "--bind",
        "functions",
        multiple=True,
        metavar="NAME=MODULE:FUNCTION",
        help="The Python function for a function whose body in the YAML is not Python.",
    )(command)


@test.command("section", hidden=True)
@click.argument("file", type=click.Path(), default=PACKAGE_HERE)
@click.option("--only", multiple=True, metavar="NAME", help="Run only tests of this name.")
@_bind_option
@json_option
def test_section(file: str, only: Sequence[str], functions: Sequence[str], as_json: bool) -> None:
    """Run the `tests` section of a package.

    Exit codes: 0 all passed; 1 the tests could not be run; 2 wrong command line; 3 some failed.

    \b
    Example:
      arroyo-state sdf test sdf-package.yaml
    """
    package, packages = load_package(file)
    allow_functions(file)
    bound = dict(parse_function(text) for text in functions)
    outcomes = run_tests(package, lambda: Trial(package, functions=bound, packages=packages), only)
    if not outcomes:
        raise InputError(
            "the package has no test of this name" if only else "the package has no tests",
            package=package.id,
            next_step="add a section `tests`: a list of name, function, value and expect",
        )
    _print_outcomes(outcomes, as_json)
    if not all(one.passed for one in outcomes):
        click.get_current_context().exit(EXIT_FINDINGS)


def _print_outcomes(outcomes: Sequence[TestOutcome], as_json: bool) -> None:
    failed = [one for one in outcomes if not one.passed]
    if as_json:
        tests = [
            {"name": one.name, "function": one.function, "passed": one.passed}
            | ({"problem": one.problem} if one.problem else {})
            for one in outcomes
        ]
        print_json({"passed": len(outcomes) - len(failed), "failed": len(failed), "tests": tests})
        return
    for one in outcomes:
        click.echo(f"{'passed' if one.passed else 'FAILED'}  {one.function}: {one.name}")
        if one.problem:
            click.echo(f"        {one.problem}")
    click.echo(f"{len(outcomes) - len(failed)} passed, {len(failed)} failed")


@test.command("function")
@click.argument("name")
@click.option("-f", "--file", type=click.Path(), default=PACKAGE_HERE, show_default=True)
@click.option(
    "-v",
    "--value",
    "--input",
    help="The record, in the format that dev.converter of the package names.",
)
@click.option("--value-file", type=click.Path(), help="A file that holds the record.")
@click.option("-k", "--key", help="The record's key.")
@click.option("--key-file", type=click.Path(), help="A file that holds the key.")
@click.option("-s", "--state-key", help="The key whose row or cell the accessors return.")
@click.option(
    "--state",
    "seeds",
    multiple=True,
    metavar="STATE:KEY=VALUE",
    help="Fill a state first. VALUE is JSON; for a row, a JSON object.",
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["v", "kv"]),
    default="v",
    show_default=True,
    help="Print values only, or keys and values.",
)
@_bind_option
@json_option
def test_function(
    name: str,
    file: str,
    value: str | None,
    value_file: str | None,
    key: str | None,
    key_file: str | None,
    state_key: str | None,
    seeds: Sequence[str],
    output: str,
    functions: Sequence[str],
    as_json: bool,
) -> None:
    """Call a function of a package once, and print its results, one per line.

    The resulting states are printed to stderr.

    \b
    Example:
      arroyo-state sdf test function count -f sdf-package.yaml -v '"hello"'
    """
    package, packages = load_package(file)
    allow_functions(file)
    bound = dict(parse_function(text) for text in functions)
    trial = Trial(package, functions=bound, packages=packages)
    for seed in seeds:
        trial.add(*_seed(seed))
    function = trial.function(name)
    record = _given(value, value_file, "value")
    result = trial.call(
        name,
        MISSING if record is None else _decoded(package, packages, function, record),
        key=_given(key, key_file, "key"),
        state_key=MISSING if state_key is None else state_key,
    )
    held = {state: rows for state, rows in trial.states.items() if rows}
    if as_json:
        print_json({"result": result, "states": held})
        return
    for line in _lines(package, function, result, output, key):
        click.echo(line)
    for state, rows in held.items():
        for row_key, row in rows.items():
            click.echo(f"{state} {row_key}: {json.dumps(row, ensure_ascii=False)}", err=True)


def _seed(text: str) -> tuple[str, str, Any]:
    state, _, rest = text.partition(":")
    key, equals, value = rest.partition("=")
    try:
        if state and equals:
            return state, key, json.loads(value)
    except ValueError:
        pass
    raise InputError(
        "a state is filled with STATE:KEY=VALUE, the value as JSON",
        given=text,
        next_step="example: `--state hits:/home='{\"hits\": 2}'`",
    )


def _given(text: str | None, file: str | None, what: str) -> str | None:
    if text is not None and file is not None:
        raise click.UsageError(f"--{what} and --{what}-file exclude each other")
    if file is None:
        return text
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the {what} cannot be read ({error})", path=file) from error


def _converter(package: Package) -> str:
    dev = package.kept.get("dev")
    found = None if dev is None else dev.value.get("converter")
    return "raw" if found == "raw" else "json"


def _decoded(
    package: Package, packages: dict[str, Package], function: FunctionDef, text: str
) -> Any:
    if _converter(package) == "raw":
        inputs = [one for one in function.inputs if not one.is_key]
        kind = inputs[0].type if inputs else None
        return Converter(name="raw", type=kind, types=scope_of(package, packages)).reader()(
            text.encode()
        )
    try:
        return json.loads(text)
    except ValueError as error:
        raise InputError(
            f"the value is not valid JSON ({error})",
            given=text[:200],
            next_step="quote text as in JSON, or set `dev: {converter: raw}` in the package",
        ) from error


def _lines(
    package: Package, function: FunctionDef, result: Any, output: str, key: str | None
) -> list[str]:
    if function.operator == "update-state" or (
        result is None and function.operator == "filter-map"
    ):
        return []
    results = result if function.operator == "flat-map" else [result]
    raw = _converter(package) == "raw"
    lines = []
    for one in results:
        if output == "kv" and not (isinstance(one, dict) and one.keys() == {"key", "value"}):
            one = {"key": key, "value": one}
        lines.append(one if raw and isinstance(one, str) else json.dumps(one, ensure_ascii=False))
    return lines


@show.command("functions")
@click.argument("file", type=click.Path(), default=PACKAGE_HERE)
def print_functions(file: str) -> None:
    """List the functions of a package, one per line.

    \b
    Example:
      arroyo-state sdf show functions sdf-package.yaml
    """
    package, _ = load_package(file)
    for name in sorted(package.functions):
        click.echo(name)


@show.command("states")
@click.argument("file", type=click.Path(), default=PACKAGE_HERE)
def print_states(file: str) -> None:
    """List the states of a package, one per line.

    \b
    Example:
      arroyo-state sdf show states sdf-package.yaml
    """
    package, _ = load_package(file)
    for name in sorted(package.states):
        click.echo(name)
