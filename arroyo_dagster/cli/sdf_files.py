"""Definitions as the subcommands of `sdf` are given them: a file, and how strictly it is read."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from arroyo_dagster.state.sdf import loading
from arroyo_dagster.state.sdf.definition import Dataflow, Package

_F = TypeVar("_F", bound=Callable[..., Any])


def loading_options(command: _F) -> _F:
    """Add `--legacy`, `--extended` and `--prod`, as every subcommand that reads a file has them."""
    prod = click.option("--prod", is_flag=True, help="Leave the `dev` section out of account.")
    extended = click.option(
        "--extended", is_flag=True, help="Take scalar values SDF's own engine refuses."
    )
    legacy = click.option("--legacy", is_flag=True, help="Take apiVersions before 0.5.0 too.")
    return legacy(extended(prod(command)))


def load_dataflow(
    file: str, *, legacy: bool, extended: bool, prod: bool
) -> tuple[Dataflow, dict[str, Package]]:
    """A dataflow, and the packages it imports; functions beside it can be imported.

    Raises:
        InputError: it is a package.
    """
    found = loading.load_dataflow(file, legacy=legacy, extended=extended, dev=not prod)
    import_from(file)
    return found


def import_from(file: str) -> None:
    """Let functions be imported from the definition's folder, and from the working directory."""
    folder = Path(file) if os.path.isdir(file) else Path(file).parent
    for path in (str(folder.resolve()), os.getcwd()):
        if path not in sys.path:
            sys.path.insert(0, path)
