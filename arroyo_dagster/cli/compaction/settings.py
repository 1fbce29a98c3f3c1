"""Options of the command line, derived from the settings of an operation."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, TypeVar

import click

from arroyo_dagster.state.model.settings import SettingField, setting_fields

_F = TypeVar("_F", bound=Callable[..., Any])


def settings_options(settings: type[Any]) -> Callable[[_F], _F]:
    """Add an option for each field of settings; a command gets values by the fields' names."""
    fields = list(setting_fields(settings))
    names = {field.name: field.option for field in fields}

    def add(command: _F) -> _F:
        for field in reversed(fields):
            command = _option(field, names)(command)
        return command

    return add


def _option(field: SettingField, names: dict[str, str]) -> Callable[[_F], _F]:
    setting = field.setting
    if setting.off is not None:
        off = setting.off.format(**names)
        return click.option(field.option, field.name, flag_value=False, default=True, help=off)
    default = field.given_default
    return click.option(
        field.option,
        field.name,
        type=_type(field),
        default=default,
        show_default=default is not None,
        help=setting.help.format(**names),
    )


def _type(field: SettingField) -> click.ParamType[Any]:
    least = field.setting.minimum
    if issubclass(field.kind, enum.Enum):
        return click.Choice([str(one.value) for one in field.kind])
    if field.setting.fractions:
        return click.FloatRange(least, min_open=least == 0)
    return click.IntRange(least)
