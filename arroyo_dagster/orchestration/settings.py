"""Config of Dagster, derived from the settings of an operation."""

import enum
from typing import Any, Literal, TypeVar

import dagster as dg
from pydantic import Field, create_model

from arroyo_dagster.errors import InputError
from arroyo_dagster.orchestration.launchpad import LaunchpadConfig
from arroyo_dagster.state.model.settings import SettingField, setting_fields, settings_from

_T = TypeVar("_T")


def settings_config(settings: type[Any]) -> Any:
    """Return a class of config with a field for each field of settings."""
    fields = list(setting_fields(settings))
    names = {field.name: field.config for field in fields}
    config = {field.config: (_type(field), _field(field, names)) for field in fields}
    return create_model(f"{settings.__name__}Config", __base__=LaunchpadConfig, **config)  # type: ignore[call-overload]


def configured(settings: type[_T], config: dg.Config) -> _T:
    """Return the settings that a config holds.

    Raises:
        dagster.Failure: a value that its field cannot have.
    """
    given = {field.name: getattr(config, field.config) for field in setting_fields(settings)}
    try:
        return settings_from(settings, given)
    except InputError as error:
        text = f"{error.message}. Next: {error.next_step}"
        raise dg.Failure(text, allow_retries=False) from error


def _type(field: SettingField) -> Any:
    kind: Any = field.kind
    if issubclass(field.kind, enum.Enum):
        kind = Literal[tuple(str(one.value) for one in field.kind)]
    kind = float if field.setting.fractions else kind
    return kind | None if field.default is None else kind


def _field(field: SettingField, names: dict[str, str]) -> Any:
    least = field.setting.minimum
    bounds: dict[str, Any] = {} if least is None else {"gt" if least == 0 else "ge": least}
    text = field.setting.help.format(**names)
    return Field(default=field.given_default, description=text, **bounds)
