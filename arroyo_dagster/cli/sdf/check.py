"""`sdf check` and `sdf schema`: check definitions of SDF states. They write nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from arroyo_dagster.cli.common import EXIT_FINDINGS, json_option
from arroyo_dagster.cli.rendering import print_json, print_table
from arroyo_dagster.cli.sdf.files import check_functions
from arroyo_dagster.cli.sdf.group import sdf
from arroyo_dagster.dataflow.definition.definition import Dataflow, Package, StateDef
from arroyo_dagster.dataflow.definition.diagnostics import Diagnostic, InvalidDefinition
from arroyo_dagster.dataflow.definition.durations import format_duration
from arroyo_dagster.dataflow.definition.json_schema import ROOTS, schema_text
from arroyo_dagster.dataflow.definition.loading import load_with_packages


@sdf.command()
@click.argument("file", type=click.Path())
@click.option("--legacy", is_flag=True, help="Accept apiVersions before 0.5.0.")
@click.option(
    "--extended", is_flag=True, help="Accept scalar values that SDF's own engine refuses."
)
@click.option("--prod", is_flag=True, help="Ignore the `dev` section.")
@json_option
def check(file: str, legacy: bool, extended: bool, prod: bool, as_json: bool) -> None:
    """Check a dataflow.yaml or sdf-package.yaml; print each error with path, line and number.

    Exit codes: 0 no error; 1 the check could not be carried out; 2 wrong command line; 3 at least
    one error.

    \b
    Example:
      arroyo-state sdf check dataflow.yaml
    """
    try:
        document, packages = load_with_packages(
            file, legacy=legacy, extended=extended, dev=not prod
        )
        if isinstance(document, Dataflow):
            document = check_functions(file, document, packages)
    except InvalidDefinition as error:
        _print_diagnostics(file, error, as_json)
        click.get_current_context().exit(EXIT_FINDINGS)
    if as_json:
        print_json(_document_json(file, document))
    else:
        _print_document(file, document)


@sdf.command()
@click.argument("kind", type=click.Choice(list(ROOTS)), default="dataflow")
def schema(kind: str) -> None:
    """Print the JSON Schema of a kind of file, for editors.

    \b
    Example:
      arroyo-state sdf schema dataflow
    """
    click.echo(schema_text(kind), nl=False)


def _print_diagnostics(file: str, error: InvalidDefinition, as_json: bool) -> None:
    if not as_json:
        click.echo(str(error))
        return
    diagnostics = [_diagnostic_json(one) for one in error.diagnostics]
    warnings = [_diagnostic_json(one) for one in error.warnings]
    where = error.facts.get("file", file)  # of a package that the file imports, perhaps
    print_json({"file": where, "valid": False, "mistakes": diagnostics, "warnings": warnings})


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
    for one in document.warnings:
        click.echo(f"warning {one.number} {one.place}{one.message}")
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
        "warnings": [_diagnostic_json(one) for one in document.warnings],
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
