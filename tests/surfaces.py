"""The settings that users have: options of the command line, fields of Dagster's config.

`python -m tests.surfaces` writes them to `compat/data/surfaces.json`: to add new ones. A setting
of a release is never taken out of that file.
"""

from __future__ import annotations

import datetime as dt
import enum
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import dagster as dg

from arroyo_dagster.cli import main
from arroyo_dagster.orchestration import component
from arroyo_dagster.orchestration.surgery import forked_state

OURS = "arroyo_dagster.orchestration"
PATH = Path(__file__).parent / "compat" / "data" / "surfaces.json"


def options() -> dict[str, dict[str, Any]]:
    """The options of every command, by the command's words."""
    return {
        name: {option: facts for one in command.params for option, facts in _option(one)}
        for name, command in _commands(main, "arroyo-state")
    }


def _commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for below in command.list_commands(context):
            one = command.get_command(context, below)
            assert one is not None
            yield from _commands(one, f"{name} {below}")


def _option(parameter: click.Parameter) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(parameter, click.Option):
        facts = {
            "default": None if parameter.required else _plain(parameter.to_info_dict()["default"]),
            "required": parameter.required,
            "flag": parameter.is_flag,
            "multiple": parameter.multiple,
            "envvar": parameter.envvar,
        }
        for name in (*parameter.opts, *parameter.secondary_opts):
            yield name, {fact: value for fact, value in facts.items() if value not in (None, False)}


def configs() -> dict[str, dict[str, Any]]:
    """The fields of every class of config and of every component, by the class's name."""
    return {
        one.__name__: {name: _field(field) for name, field in one.model_fields.items()}
        for one in sorted(_classes(), key=lambda one: one.__name__)
    }


def _classes() -> set[Any]:
    assert component  # it has imported every other module with a class of config
    assert forked_state
    found: set[Any] = set()
    waiting: list[Any] = [dg.Config, dg.Model]
    while waiting:
        below = waiting.pop().__subclasses__()
        waiting += below
        found |= {one for one in below if one.__module__.startswith(OURS)}
    return {one for one in found if one.__module__ != f"{OURS}.settings"}  # base classes only


def _field(field: Any) -> dict[str, Any]:
    if field.is_required():
        return {"required": True}
    return {"default": _plain(field.get_default(call_default_factory=True))}


def _plain(value: Any) -> Any:
    if isinstance(value, dt.timedelta):
        return value // dt.timedelta(microseconds=1)
    if isinstance(value, enum.Enum):
        return value.value
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value if isinstance(value, str | int | float | dict | None) else None


def surfaces() -> dict[str, Any]:
    """All of them, as JSON has them."""
    found = {"options": options(), "configs": configs()}
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


if __name__ == "__main__":
    PATH.write_text(json.dumps(surfaces(), indent=1, sort_keys=True) + "\n")
