"""Options of the command line, derived from the settings of an operation."""

from __future__ import annotations

import datetime as dt
import enum
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import click

from arroyo_dagster.state.model.json_fields import MAX_I64
from arroyo_dagster.state.model.settings import (
    MAX_SECONDS,
    SettingField,
    find_setting,
    setting_fields,
)

_F = TypeVar("_F", bound=Callable[..., Any])
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|m|h|d|w)[a-z]*\s*")
_LONGEST_NUMBER = 40
_UNITS = {
    "w": dt.timedelta(weeks=1),
    "d": dt.timedelta(days=1),
    "h": dt.timedelta(hours=1),
    "m": dt.timedelta(minutes=1),
    "s": dt.timedelta(seconds=1),
}


class Duration(click.ParamType):  # type: ignore[type-arg] # generic in some releases only
    """A duration such as `3d`, `12 hours` or `90m`."""

    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> dt.timedelta:
        """Convert a text; a duration is returned unchanged."""
        if isinstance(value, dt.timedelta):
            return value
        match = _DURATION.fullmatch(str(value).lower())
        if match is None:
            self.fail(f"{value!r:.40} is not a duration; write it as 3d, 12h or 90m", param, ctx)
        seconds = float(match[1]) * _UNITS[match[2]].total_seconds()
        if seconds > MAX_SECONDS:
            self.fail(f"{value!r:.40} is longer than {MAX_SECONDS // 86_400} days", param, ctx)
        return dt.timedelta(seconds=seconds)


class WholeNumber(click.IntRange):
    """A whole number in a range. Without a maximum it has at most 63 bits."""

    largest: float = MAX_I64

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert a text; it must be a whole number within the bounds."""
        _check_length(self, value, param, ctx)
        number = super().convert(value, param, ctx)
        if number > self.largest:
            self.fail(f"{number} is larger than {self.largest}.", param, ctx)
        return number


class FiniteRange(click.FloatRange):
    """A number in a range; infinity and NaN are none. Without a maximum it is what a clock can
    count in seconds."""

    largest: float = MAX_SECONDS

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert a text; it must be a number within the bounds."""
        _check_length(self, value, param, ctx)
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a number.", param, ctx)
        if number > self.largest:
            self.fail(f"{number:g} is larger than {self.largest}.", param, ctx)
        return number


def _check_length(
    kind: click.ParamType,  # type: ignore[type-arg] # generic in some releases only
    value: object,
    param: click.Parameter | None,
    ctx: click.Context | None,
) -> None:
    """Refuse what is too long for a number: Python converts no more than 4,300 digits."""
    if isinstance(value, str) and len(value) > _LONGEST_NUMBER:
        kind.fail(f"'{value[:_LONGEST_NUMBER]}…' is not a number in bounds.", param, ctx)


def format_duration(duration: dt.timedelta) -> str:
    """Format a duration as `Duration` reads it, in its largest whole unit."""
    unit = next(name for name, length in _UNITS.items() if name != "w" and not duration % length)
    return f"{duration // _UNITS[unit]}{unit}"


class NamedSetting(click.ParamType):  # type: ignore[type-arg] # generic in some releases only
    """One field of settings, as NAME=VALUE; for settings with too many fields for options.

    Args:
        settings: the classes of the fields; a name is in one of them only.
        without: names of fields that cannot be set.
    """

    name = "name=value"

    def __init__(self, *settings: type[Any], without: Collection[str] = ()) -> None:
        self._fields = {
            field.config: field
            for kind in settings
            for field in setting_fields(kind)
            if field.name not in without
        }

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, Any]:
        """Return the name of the field and its value in the unit of the setting."""
        if isinstance(value, tuple):
            return value
        name, _, text = str(value).partition("=")
        field = self._fields.get(name.strip().replace("-", "_"))
        if field is None:
            names = "; ".join(_with_default(field) for field in self._fields.values())
            self.fail(f"there is no {name!r}. The names and their defaults: {names}")
        try:
            return field.name, setting_type(field).convert(text.strip(), param, ctx)
        except click.BadParameter as error:
            self.fail(f"{field.config}: {error.message:.200} {field.setting.help}", param, ctx)


def _with_default(field: SettingField) -> str:
    default = field.given_default
    is_number = isinstance(default, int | float) and not isinstance(default, bool)
    return f"{field.config}={default:g}" if is_number else f"{field.config}={default}"


def named_settings(
    kind: NamedSetting,
    what: str,
    example: str,
    *,
    option: str = "limit",
    only_for: str | None = None,
) -> Callable[[_F], _F]:
    """Add `--limit NAME=VALUE`, which may be repeated; a command gets the pairs as `limits`.

    Args:
        kind: the settings of which it changes one.
        what: what that is, for people.
        option: another name than `limit`; the command gets the pairs under its plural.
        only_for: as `settings_options` says.
    """
    text = f"Change {what}, for example {example}. May be repeated. A wrong name prints all."
    return click.option(
        f"--{option}",
        f"{option}s",
        multiple=True,
        type=kind,
        metavar="NAME=VALUE",
        help=text if only_for is None else f"{only_for}: {text[0].lower()}{text[1:]}",
    )


def settings_options(
    settings: type[Any], *, only_for: str | None = None, without: Collection[str] = ()
) -> Callable[[_F], _F]:
    """Add an option for each field of settings; a command gets values by the fields' names.

    Args:
        only_for: what the options are for, where a command has others; their help begins with it.
        without: the names of fields that have no option of their own.
    """
    fields = [field for field in setting_fields(settings) if field.name not in without]

    def add(command: _F) -> _F:
        for field in reversed(fields):
            command = setting_option(settings, field.name, only_for=only_for, without=without)(
                command
            )
        return command

    return add


def setting_option(
    settings: type[Any],
    name: str,
    *,
    only_for: str | None = None,
    without: Collection[str] = (),
    alone: bool = False,
    prefix: str = "",
    **changes: Any,
) -> Callable[[_F], _F]:
    """Add the option for one field of settings.

    Args:
        prefix: of the name under which the command gets the value.
        only_for, without: as `settings_options` says.
        alone: the command has no other option of these settings: the help names their defaults.
        changes: arguments of `click.option` that differ from those that are derived.
    """
    field = find_setting(settings, name)
    fields = setting_fields(settings)
    names = {
        setting.name: setting.given_default
        if alone
        else (f"--set {setting.config}" if setting.name in without else setting.option)
        for setting in fields
    }
    derived = _flag(field) if field.kind is bool else _value(field)
    help_text = field.setting.off or field.setting.help
    text = help_text.format(**names, duration="duration, for example 7d")
    derived["help"] = text if only_for is None else f"{only_for}: {text[0].lower()}{text[1:]}"
    return click.option(field.option, f"{prefix}{field.name}", **derived | changes)


def _flag(field: SettingField) -> dict[str, Any]:
    if field.setting.off is None:
        return {"is_flag": True}
    return {"flag_value": False, "default": True}


def _value(field: SettingField) -> dict[str, Any]:
    setting, default = field.setting, field.given_default
    if field.kind in (tuple, Mapping):
        return {"type": setting_type(field), "multiple": True, "metavar": setting.metavar}
    show_default: bool | str = default is not None
    if setting.duration and default is not None:
        default = dt.timedelta(microseconds=field.default)
        show_default = format_duration(default)
    return {
        "type": setting_type(field),
        "default": default,
        "show_default": show_default,
        "metavar": setting.metavar,
    }


class NamedValue(click.ParamType):  # type: ignore[type-arg] # generic in some releases only
    """NAME=VALUE."""

    name = "name=value"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        """Return the name and the value."""
        if isinstance(value, tuple):
            return value
        name, equals, text = str(value).partition("=")
        if not (name and equals):
            self.fail("expected NAME=VALUE", param, ctx)  # the value may be a secret
        return name, text


def setting_type(field: SettingField) -> Any:
    """Return the type of click for the value of a field, in the unit of the setting."""
    setting = field.setting
    if field.kind is Mapping:
        return NamedValue()
    if field.kind in (str, tuple):
        return click.STRING
    if field.kind is bool:
        return click.BOOL
    least = setting.minimum if setting.above is None else setting.above
    if setting.duration:
        return Duration()
    if issubclass(field.kind, enum.Enum):
        return click.Choice([str(member.value) for member in field.kind])
    largest = field.maximum
    assert largest is not None
    is_open = setting.above is not None
    if setting.fractions:
        kind: FiniteRange | WholeNumber = FiniteRange(least, setting.maximum, min_open=is_open)
    else:
        kind = WholeNumber(least, setting.maximum, min_open=is_open)
    kind.largest = largest
    return kind
