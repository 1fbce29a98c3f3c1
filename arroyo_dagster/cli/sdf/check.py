"""`sdf check` and `sdf schema`: check definitions. They write nothing."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from arroyo_dagster.cli.common import EXIT_FINDINGS, json_option
from arroyo_dagster.cli.rendering import print_json, print_table
from arroyo_dagster.cli.sdf.files import check_functions, check_tests, loading_options
from arroyo_dagster.cli.sdf.group import sdf
from arroyo_dagster.dataflow.definition.definition import Dataflow, Package, StateDef
from arroyo_dagster.dataflow.definition.diagnostics import Diagnostic, InvalidDefinition
from arroyo_dagster.dataflow.definition.durations import format_duration
from arroyo_dagster.dataflow.definition.grammar import ROOTS, schema_text
from arroyo_dagster.dataflow.definition.loading import PACKAGE_FILE, load_with_packages
from arroyo_dagster.dataflow.runtime.functions import packaged_function, stub, unbound_steps
from arroyo_dagster.errors import NotFoundError


@sdf.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(), metavar="FILE...")
@loading_options
@click.option(
    "--stubs",
    is_flag=True,
    help="Print a Python function to fill in for each function without a Python body.",
)
@click.option("--strict", is_flag=True, help="Exit with 3 also if there is only a warning.")
@json_option
def check(
    files: Sequence[str],
    reading: Mapping[str, bool],
    stubs: bool,
    strict: bool,
    as_json: bool,
) -> None:
    """Check definitions of dataflows and packages; print each error with path, line and number.

    FILE is a file, the folder of a package, a folder in which all dataflow.yaml and
    sdf-package.yaml are checked, or a pattern as `flows/*.yaml`.

    Exit codes: 0 no error; 1 the check could not be carried out; 2 wrong command line; 3 at least
    one error, or a warning with --strict.

    \b
    Example:
      arroyo-state sdf check dataflow.yaml
    """
    paths = list(dict.fromkeys(path for text in files for path in _paths(text)))
    documents: list[dict[str, Any]] = []
    accepted = True
    for file in paths:
        try:
            document, packages = load_with_packages(file, **reading)
            check_tests(file, document, packages)
            document = check_functions(file, document, packages)
        except InvalidDefinition as error:
            accepted = False
            documents.append(_invalid_json(file, error))
            if not as_json:
                click.echo(str(error))
            continue
        accepted = accepted and not (strict and document.warnings)
        documents.append(_document_json(file, document))
        if stubs and isinstance(document, Dataflow):
            _print_stubs(document, packages)
        elif not (as_json or stubs):
            _print_document(file, document)
    if as_json:
        print_json(documents[0] if len(files) == len(documents) == 1 else {"files": documents})
    elif len(paths) > 1:
        wrong = sum(not entry["valid"] for entry in documents)
        click.echo(f"{len(paths)} files, {wrong} with errors", err=stubs)
    if not accepted:
        click.get_current_context().exit(EXIT_FINDINGS)


def _paths(text: str) -> list[str]:
    """Return the definitions that an argument names.

    Raises:
        NotFoundError: a folder or a pattern without any.
    """
    path = Path(text)
    if path.is_dir() and not (path / PACKAGE_FILE).is_file():
        names = ("dataflow.yaml", PACKAGE_FILE)
        files = sorted(str(file) for name in names for file in path.rglob(name))
    elif not path.exists() and glob.has_magic(text):
        files = sorted(glob.glob(text, recursive=True))
    else:
        return [text]
    if not files:
        raise NotFoundError("there is no definition", path=text)
    return files


def _print_stubs(dataflow: Dataflow, packages: Mapping[str, Package]) -> None:
    unbound = unbound_steps(dataflow, packages, {})
    texts = dict.fromkeys(
        stub(service, step, packaged_function(dataflow, packages, step))
        for service, step in unbound
    )
    names = dict.fromkeys(step.name.replace("_", "-") for _, step in unbound)
    if texts:
        click.echo("# Bind them:")
        for name in names:
            click.echo(f"#   --bind {name}=MODULE:{name.replace('-', '_')}")
        click.echo("from arroyo_dagster.sdf import key, sql, state, window  # as needed\n\n")
        click.echo("\n\n".join(texts), nl=False)


@sdf.command()
@click.argument("kind", type=click.Choice(list(ROOTS)), default="dataflow")
def schema(kind: str) -> None:
    """Print the JSON Schema of a kind of file, for editors.

    \b
    Example:
      arroyo-state sdf schema dataflow
    """
    click.echo(schema_text(kind), nl=False)


def _invalid_json(file: str, error: InvalidDefinition) -> dict[str, Any]:
    return {
        "file": error.facts.get("file", file),  # of a package that the file imports, perhaps
        "valid": False,
        "mistakes": [_diagnostic_json(diagnostic) for diagnostic in error.diagnostics],
        "warnings": [_diagnostic_json(warning) for warning in error.warnings],
    }


def _states(document: Dataflow | Package) -> Iterator[tuple[str, StateDef]]:
    """Return every state with the service that declares it, or the package."""
    if isinstance(document, Dataflow):
        for service in document.services.values():
            yield from ((service.name, state) for state in service.states.values())
    else:
        yield from ((document.name, state) for state in document.states.values())


def _print_document(file: str, document: Dataflow | Package) -> None:
    states = list(_states(document))
    if states:
        columns = ["in", "state", "line", "form", "owner", "key", "value", "ttl", "table"]
        print_table(columns, [_cells(service, state) for service, state in states])
    for warning in document.warnings:
        click.echo(f"warning {warning.number} {warning.place}{warning.message}")
    kind = "dataflow" if isinstance(document, Dataflow) else "package"
    count = len(document.warnings)
    click.echo(
        f"{file}: {kind} {document.namespace}/{document.name}@{document.version}, {len(states)} "
        f"states, no errors, {count} warning{('' if count == 1 else 's')}"
    )


def _format_value_kind(state: StateDef) -> str | None:
    if state.scalar_type is not None:
        return state.scalar_type.value
    return None if state.value_kind is None else state.value_kind.value


def _cells(service: str, state: StateDef) -> list[object]:
    columns = ", ".join(f"{column.name} {column.type.value}" for column in state.columns)
    return [
        service,
        state.name,
        state.line,
        state.form.value,
        state.owner,
        None if state.key_type is None else state.key_type.value,
        f"({columns})" if columns else _format_value_kind(state),
        None if state.ttl_ms is None else format_duration(state.ttl_ms),
        state.table,
    ]


def _document_json(file: str, document: Dataflow | Package) -> dict[str, Any]:
    return {
        "file": file,
        "valid": True,
        "kind": "dataflow" if isinstance(document, Dataflow) else "package",
        "name": document.name,
        "namespace": document.namespace,
        "version": document.version,
        "states": [_state_json(service, state) for service, state in _states(document)],
        "mistakes": [],
        "warnings": [_diagnostic_json(warning) for warning in document.warnings],
    }


def _state_json(service: str, state: StateDef) -> dict[str, Any]:
    return {
        "in": service,
        "name": state.name,
        "owner": state.owner,
        "form": state.form.value,
        "from": None if state.ref is None else str(state.ref),
        **state.schema,
        "ttl_ms": state.ttl_ms,
        "table": state.table,
        "accessor": state.accessor,
        "extended": sorted(state.extended),
        "schema_hash": state.schema_hash,
        "path": state.path,
        "line": state.line,
    }


def _diagnostic_json(one: Diagnostic) -> dict[str, Any]:
    return {
        "number": one.number,
        "kind": one.kind,
        "path": one.path,
        "line": one.line,
        "column": one.column,
        "message": one.message,
    }
