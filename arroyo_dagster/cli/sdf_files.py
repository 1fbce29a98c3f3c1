"""Definitions as the subcommands of `sdf` are given them: a file, and how strictly it is read."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from arroyo_dagster.dataflow.definition import loading
from arroyo_dagster.dataflow.definition.definition import Dataflow, Package
from arroyo_dagster.user_modules import open_folders

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
    """A dataflow, and the packages it imports. No code is loaded.

    Raises:
        InputError: it is a package.
    """
    return loading.load_dataflow(file, legacy=legacy, extended=extended, dev=not prod)


def allow_functions(file: str) -> None:
    """Let functions that are named be imported from the definition's folder, then from the working
    directory: for what runs them, and nothing else."""
    folder = file if os.path.isdir(file) else os.path.dirname(file)
    open_folders(folder or ".", os.getcwd())
