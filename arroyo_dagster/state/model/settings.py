"""Settings for users: help, unit, bounds and names, defined once beside each field.

The command line derives its options from them and Dagster its config; see `cli/settings.py` and
`orchestration/settings.py`.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.json_fields import MAX_I64, MAX_TIME_MICROS

_T = TypeVar("_T")
_NANOS_PER_SECOND = 10**9

MAX_SECONDS = MAX_I64 // _NANOS_PER_SECOND
"""The longest duration of a setting: 292 years. A clock counts nanoseconds in 63 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How users specify the value of a field.

    Attributes:
        help: what the setting does; `{field}` stands for the name of another field, `{duration}`
            for what a duration is.
        option, config: its name on the command line and in Dagster, if not the field's.
        scale: how many units of the field one unit of the setting is.
        fractions: whether the setting may have fractions of its unit.
        duration: whether the command line takes a duration such as 3d, of a field in microseconds.
        minimum, maximum: the least and the greatest value, included.
        above: a value that it must exceed.
        metavar: what stands for the value in the help of the command line.
        off: the help of a flag on the command line that turns the field off.
    """

    help: str
    option: str | None = None
    config: str | None = None
    scale: int = 1
    fractions: bool = False
    duration: bool = False
    minimum: int | None = None
    maximum: int | None = None
    above: int | None = None
    metavar: str | None = None
    off: str | None = None


@dataclass(frozen=True, slots=True)
class SettingField:
    """A field that users may set: its name, its type without None, its default."""

    name: str
    kind: type[Any]
    default: Any
    setting: Setting

    @property
    def option(self) -> str:
        """The name on the command line."""
        return "--" + (self.setting.option or self.name.replace("_", "-"))

    @property
    def config(self) -> str:
        """The name in Dagster's config."""
        return self.setting.config or self.name

    @property
    def given_default(self) -> Any:
        """The default in the unit of the setting, enums by value."""
        return self.in_units(self.default)

    @property
    def maximum(self) -> int | None:
        """The greatest value in the unit of the setting, included; None = it is no number.

        Without a limit of its own: the value fits into 63 bits, and as seconds into a clock.
        """
        if not (self.kind is int or self.kind is float):
            return None
        if self.setting.maximum is not None:
            return self.setting.maximum
        if self.setting.duration:
            return MAX_SECONDS * 1_000_000 // self.setting.scale
        scale = max(self.setting.scale, _NANOS_PER_SECOND if self.setting.fractions else 1)
        return MAX_I64 // scale

    def in_units(self, value: Any) -> Any:
        """Convert a value of the field into the unit of the setting, an enum into its value."""
        if isinstance(value, enum.Enum):
            return value.value
        scale = self.setting.scale
        if value is None or scale == 1:
            return value
        return value / scale if self.setting.fractions else value // scale

    def value(self, given: Any) -> Any:
        """Convert a user's value into the field's value.

        Raises:
            InputError: there is no such choice, or a number out of bounds.
        """
        if given is None:
            return None
        if self.maximum is not None and not isinstance(given, dt.timedelta):
            self._check(given)
        if self.kind in (tuple, Mapping):
            return tuple(given) if self.kind is tuple else dict(given)
        if isinstance(given, dt.timedelta):
            return given // dt.timedelta(microseconds=1)
        if issubclass(self.kind, enum.Enum):
            choices = [str(choice.value) for choice in self.kind]
            if given not in choices:
                raise InputError(
                    f"there is no {self.name} {given!r}",
                    next_step=f"choose one of {', '.join(choices)}",
                )
            return self.kind(given)
        if self.setting.scale == 1:
            return given
        scaled = int(given * self.setting.scale)
        return scaled if self.setting.above is None else max(self.setting.above + 1, scaled)

    def _check(self, given: Any) -> None:
        assert self.maximum is not None
        if not (isinstance(given, int | float) and given <= self.maximum):  # nor is NaN
            raise InputError(
                f"{self.config} is out of bounds: {given!r:.40}",
                expected=f"a number of at most {self.maximum}",
            )


def setting_fields(settings: type[Any]) -> Iterator[SettingField]:
    """Yield the fields that users may set, including those of nested settings at their position."""
    hints = typing.get_type_hints(settings, include_extras=True)
    for field in dataclasses.fields(settings):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from setting_fields(typing.cast(type[Any], hint))
        for annotation in getattr(hint, "__metadata__", ()):
            if isinstance(annotation, Setting):
                yield SettingField(field.name, _kind(hint.__origin__), _default(field), annotation)


def find_setting(settings: type[Any], name: str) -> SettingField:
    """Return the field of this name that people may set."""
    return next(field for field in setting_fields(settings) if field.name == name)


def settings_from(settings: type[_T], given: Mapping[str, Any]) -> _T:
    """Build settings from a user's values, by field name; other fields have their defaults.

    Raises:
        InputError: a value that its field cannot have.
    """
    fields = {field.name: field for field in setting_fields(settings)}
    values: dict[str, Any] = {}
    hints = typing.get_type_hints(settings)
    for field in dataclasses.fields(typing.cast(Any, settings)):
        if dataclasses.is_dataclass(hints[field.name]):
            values[field.name] = settings_from(hints[field.name], given)
        elif field.name in fields and field.name in given:
            values[field.name] = fields[field.name].value(given[field.name])
    return settings(**values)


def _default(field: dataclasses.Field[Any]) -> Any:
    factory: Any = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def _kind(hint: Any) -> type[Any]:
    """Return a type without None and parameters."""
    if isinstance(hint, types.UnionType):
        (hint,) = (arg for arg in hint.__args__ if arg is not type(None))
    return typing.cast(type[Any], typing.get_origin(hint) or hint)


def check_time(micros: int) -> None:
    """Refuse a time that a person gives, in microseconds since 1970, if nanoseconds cannot hold it.

    Raises:
        InputError: it lies before 1970 or after 2262-04-11.
    """
    if not 0 <= micros <= MAX_TIME_MICROS:
        raise InputError(
            "the time lies before 1970" if micros < 0 else "the time lies after 2262-04-11",
            micros=micros,
            expected="a time that nanoseconds since 1970 can hold",
        )
