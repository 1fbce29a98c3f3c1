"""The YAML files of surgery: overrides of an evolve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.storage.local_documents import read_document


def read_yaml(file: Path, what: str) -> Any:
    """Return the content of a YAML file, as plain values.

    Args:
        what: what the file holds, for messages: "the overrides".

    Raises:
        InputError: it cannot be read, or is no YAML; names the line.
    """
    # Only here, as most calls read no YAML.
    from arroyo_dagster.dataflow.definition.diagnostics import Diagnostics
    from arroyo_dagster.dataflow.definition.yaml_tree import read_tree

    diagnostics = Diagnostics()
    try:
        tree = read_tree(read_document(file).decode(), diagnostics)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{what} cannot be read ({error})", path=str(file)) from error
    if tree is None or diagnostics.found:
        first = diagnostics.found[0]
        raise InputError(f"no YAML: {first.place}{first.message}", path=str(file))
    return tree.plain()
