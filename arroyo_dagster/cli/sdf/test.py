"""`sdf test`: test dataflows, and packages on their own."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from arroyo_dagster.cli.common import EXIT_FINDINGS, json_option
from arroyo_dagster.cli.lazy import LazyGroup
from arroyo_dagster.cli.rendering import print_json
from arroyo_dagster.cli.sdf.files import (
    allow_functions,
    binding_options,
    check_bound,
    check_functions,
    check_tests,
    loading_options,
)
from arroyo_dagster.cli.sdf.group import sdf
from arroyo_dagster.dataflow.definition.definition import Dataflow, FunctionDef, Package
from arroyo_dagster.dataflow.definition.loading import load_package, load_with_packages
from arroyo_dagster.dataflow.definition.types import scope_of
from arroyo_dagster.dataflow.runtime.converters import Converter
from arroyo_dagster.dataflow.testing.runner import MISSING, Trial
from arroyo_dagster.dataflow.testing.section import TestOutcome
from arroyo_dagster.dataflow.testing.suite import run_tests
from arroyo_dagster.dataflow.topics.bindings import BindingsText, parse_function
from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.json_fields import parse_json
from arroyo_dagster.state.storage.local_documents import read_document, read_stream

PACKAGE_HERE, DATAFLOW_HERE = "sdf-package.yaml", "dataflow.yaml"


class _FileOrCommand(LazyGroup):
    """A group that treats an unknown subcommand as a definition to test."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = ["section", *args]
        return super().parse_args(ctx, args)


@sdf.group(cls=_FileOrCommand)
def test() -> None:
    """Test a dataflow or a package: `sdf test [FILE]` runs the section `tests` of its YAML.

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
@click.argument("file", type=click.Path(), required=False)
@click.option("--only", multiple=True, metavar="NAME", help="Run only tests of this name.")
@binding_options()
@loading_options
@json_option
def test_section(
    file: str | None,
    only: Sequence[str],
    bound: BindingsText,
    reading: Mapping[str, bool],
    as_json: bool,
) -> None:
    """Run the section `tests` of a dataflow or a package, each test in memory, without any state.

    FILE is a definition, or the folder of a package. Default: sdf-package.yaml, or dataflow.yaml
    if there is none.

    Exit codes: 0 all passed; 1 the tests could not be run; 2 wrong command line; 3 some failed.

    \b
    Example:
      arroyo-state sdf test dataflow.yaml
    """
    path = file or (PACKAGE_HERE if Path(PACKAGE_HERE).is_file() else DATAFLOW_HERE)
    document, packages = load_with_packages(path, **reading)
    tests = check_tests(path, document, packages, only)
    if not tests:
        raise InputError(
            f"there is no test of the name {', '.join(only)}" if only else "there are no tests",
            file=path,
            next_step="add a section `tests`: see `sdf generate` for an example",
        )
    if isinstance(document, Dataflow):
        document = check_functions(path, document, packages)
        check_bound(document, packages, bound.functions)
    allow_functions(path)
    outcomes = run_tests(document, packages, tests, functions=bound.functions, env=bound.env)
    _print_outcomes(path, outcomes, as_json)
    if not all(outcome.passed for outcome in outcomes):
        click.get_current_context().exit(EXIT_FINDINGS)


def _print_outcomes(file: str, outcomes: Sequence[TestOutcome], as_json: bool) -> None:
    failed = [outcome for outcome in outcomes if not outcome.passed]
    if as_json:
        tests = [
            {"name": test.name, "function": test.function, "line": test.line, "passed": test.passed}
            | ({"problem": test.problem} if test.problem else {})
            for test in outcomes
        ]
        print_json({"passed": len(outcomes) - len(failed), "failed": len(failed), "tests": tests})
        return
    for outcome in outcomes:
        called = f"{outcome.function}: " if outcome.function else ""
        click.echo(f"{'passed' if outcome.passed else 'FAILED'}  {called}{outcome.name}")
        for difference in outcome.differences:
            click.echo(f"        {file}:{difference.line}: {difference.what}")
            for line in difference.lines:
                click.echo(f"          {line}")
    click.echo(f"{len(outcomes) - len(failed)} passed, {len(failed)} failed")
    if failed:
        click.echo("- was expected, + was found", err=True)


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
    states = {state: rows for state, rows in trial.states.items() if rows}
    if as_json:
        print_json({"result": result, "states": states})
        return
    for line in _lines(package, function, result, output, key):
        click.echo(line)
    for state, rows in states.items():
        for row_key, row in rows.items():
            click.echo(f"{state} {row_key}: {json.dumps(row, ensure_ascii=False)}", err=True)


def _seed(text: str) -> tuple[str, str, Any]:
    state, _, rest = text.partition(":")
    key, equals, value = rest.partition("=")
    try:
        if state and equals:
            return state, key, parse_json(value)
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
        data = read_stream(sys.stdin.buffer, "stdin") if file == "-" else read_document(file)
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the {what} cannot be read ({error})", path=file) from error


def _converter(package: Package) -> str:
    dev = package.kept.get("dev")
    converter = None if dev is None else dev.value.get("converter")
    return "raw" if converter == "raw" else "json"


def _decoded(
    package: Package, packages: dict[str, Package], function: FunctionDef, text: str
) -> Any:
    if _converter(package) == "raw":
        inputs = [field for field in function.inputs if not field.is_key]
        kind = inputs[0].type if inputs else None
        return Converter(name="raw", type=kind, types=scope_of(package, packages)).reader()(
            text.encode()
        )
    try:
        return parse_json(text)
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
