"""Config of Dagster, derived from the settings of an operation."""

import enum
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import dagster as dg
from pydantic import Field, create_model

from arroyo_dagster.errors import InputError
from arroyo_dagster.orchestration.failures import failure_of
from arroyo_dagster.state.model.settings import (
    SettingField,
    find_setting,
    setting_fields,
    settings_from,
)

_T = TypeVar("_T")
_CONTAINERS: Mapping[Any, Any] = {tuple: list, Mapping: dict}
"""What Dagster's config has instead of these types."""


def settings_config(settings: type[Any]) -> Any:
    """Return a class of config with a field for each field of settings."""
    fields = {
        field.config: (_type(field), setting_field(settings, field.name))
        for field in setting_fields(settings)
    }
    return create_model(f"{settings.__name__}Config", __base__=LaunchpadConfig, **fields)  # type: ignore[call-overload]


def setting_field(settings: type[Any], name: str, *, alone: bool = False, **changes: Any) -> Any:
    """Return the field of a config, or of a component, for one field of settings.

    Args:
        alone: the config has no other field of these settings: the help names their defaults.
        changes: arguments of `pydantic.Field` that differ from those that are derived.
    """
    field, fields = find_setting(settings, name), list(setting_fields(settings))
    setting = field.setting
    names = {entry.name: entry.given_default if alone else entry.config for entry in fields}
    make: Any = _CONTAINERS.get(field.kind)
    derived: dict[str, Any] = {
        "default": field.given_default if make is None else make(field.default),
        "description": setting.help.format(**names, duration="number of days"),
    }
    bounds = {"ge": setting.minimum, "le": setting.maximum, "gt": setting.above}
    derived |= {name: bound for name, bound in bounds.items() if bound is not None}
    if setting.fractions:
        derived["allow_inf_nan"] = False
    return Field(**derived | changes)


def configured(settings: type[_T], config: dg.Config) -> _T:
    """Return the settings that a config holds; those that it has no field for by default.

    Raises:
        dagster.Failure: a value that its field cannot have.
    """
    values = {
        field.name: getattr(config, field.config)
        for field in setting_fields(settings)
        if hasattr(config, field.config)
    }
    try:
        return settings_from(settings, values)
    except InputError as error:
        raise failure_of(error) from error


def _type(field: SettingField) -> Any:
    kind: Any = field.kind
    if issubclass(field.kind, enum.Enum):  # a launchpad lists what is allowed
        kind = Literal[tuple(str(member.value) for member in field.kind)]
    kind = {tuple: list[str], Mapping: dict[str, str]}.get(kind, kind)
    kind = float if field.setting.fractions else kind
    return kind | None if field.default is None else kind


# ---- launchpad -----------------------------------------------------------------------------------
# Config of runs, as a launchpad shows it: Dagster shows descriptions and enums, but no bounds.

_BOUNDS = {"ge": "At least {}.", "gt": "More than {}.", "le": "At most {}.", "lt": "Less than {}."}


class LaunchpadConfig(dg.Config):
    """Config whose descriptions end with the bounds of the fields."""

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Add the bounds to the descriptions."""
        super().__pydantic_init_subclass__(**options)
        for field in cls.model_fields.values():
            bounds = " ".join(
                text.format(getattr(bound, name))
                for bound in field.metadata
                for name, text in _BOUNDS.items()
                if hasattr(bound, name)
            )
            if bounds and field.description and not field.description.endswith(bounds):
                field.description = f"{field.description} {bounds}"
