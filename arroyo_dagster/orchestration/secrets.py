"""Secrets by name: Dagster shows and stores the configuration of resources.

A resource's fields appear on its page, in every launchpad, and in the snapshot of every job. So
they hold names of environment variables, and a value is resolved where a store is opened.
"""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import dagster as dg
from pydantic import PrivateAttr

from arroyo_dagster.errors import InputError
from arroyo_dagster.redaction import holds_secret, secrets_in_url, without_secrets

_ENV = "env"
_INT_VARIABLE = type(dg.EnvVar.int("ANY"))
_TEMPLATE = re.compile(
    r"\s*\{\{\s*env(?:\.(?P<name>[A-Za-z_]\w*)|\(\s*(?P<quote>['\"])(?P<called>\w+)(?P=quote)\s*\))"
    r"\s*\}\}\s*"
)
# Options of clients are named more freely than settings of Spark.
_SECRET_OPTION = re.compile(
    r"secret|passw|pwd|token|credential|key|\bsas|signature|bearer|authorization|jaas"
    r"|connection[._-]?string",
    re.IGNORECASE,
)
_NO_SECRET = re.compile(
    r"(?:file|path|dir|host|expiration|provider|class|type|enabled|algorithm|version|[._-]id"
    r"|^skip_signature)$",
    re.IGNORECASE,
)
_NOT_SECRET = frozenset({"", "true", "false", "none", "null", "anon", "auto"})


class NamedSecrets(dg.ConfigurableResource):  # type: ignore[type-arg]
    """A resource that is refused if one of its fields holds a secret instead of its name."""

    plain_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields that hold no secrets, whatever their content."""

    _in_use: bool = PrivateAttr(default=False)

    def get_resource_definition(self) -> Any:
        """Return what Dagster shows and stores.

        Raises:
            InputError: as `check_fields`.
        """
        if not self._in_use:
            self.check_fields()
        return super().get_resource_definition()

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """Note that the fields hold the values of variables now, which nothing stores.

        Dagster makes a definition again of a resource that is in use within another one.
        """
        self._in_use = True

    def check_fields(self) -> None:
        """Refuse secrets in the fields.

        Raises:
            InputError: a field holds a secret; the message does not repeat its value.
        """
        refuse_secrets(type(self).__name__, self._given())

    @classmethod
    def configure_at_launch(cls, **fields: Any) -> Any:
        """Configure at launch, as in Dagster; values given here must not be secrets either."""
        refuse_secrets(cls.__name__, _searched(cls, fields))
        return super().configure_at_launch(**fields)

    def _given(self) -> dict[str, Any]:
        return _searched(
            type(self), {name: getattr(self, name) for name in type(self).model_fields}
        )


def _searched(cls: type[NamedSecrets], fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in cls.plain_fields}


def typed_fields(cls: type[NamedSecrets], run_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a user typed into a launchpad for resources with the fields of `cls`."""
    resources = [resource for resource in (run_config.get("resources") or {}).values() if resource]
    configs = [resource.get("config") for resource in resources if isinstance(resource, Mapping)]
    values = {
        name: value for item in configs if isinstance(item, Mapping) for name, value in item.items()
    }
    return _searched(cls, {name: values[name] for name in values.keys() & cls.model_fields.keys()})


# ---- what may not be in a field ------------------------------------------------------------------


def refuse_secrets(what: str, fields: Mapping[str, Any]) -> None:
    """Refuse fields that hold secrets instead of names of variables.

    Raises:
        InputError: names every such field, and no value.
    """
    clear = list(_clear(fields))
    if not clear:
        return
    variables = sorted({name for _, value in clear for name in _variables_with(value)})
    variable = variables[0] if len(variables) == 1 else "NAME"
    raise InputError(
        f"{what}: {', '.join((name for name, _ in clear))} must name an environment variable: a "
        "value would be readable on the resource's page, in launchpads and in the database of "
        "runs",
        next_step=f"set it to dg.EnvVar({variable!r}), in YAML {{env: {variable}}}; or leave it "
        "out, and the client finds credentials in its own variables, profiles or roles",
    )


def _clear(fields: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, str]]:
    for name, value in fields.items():
        yield from _clear_value(str(name), value, f"{within}{name}")


def _clear_value(name: str, value: Any, shown: str) -> Iterator[tuple[str, str]]:
    if variable_of(value) is not None:
        return
    if isinstance(value, Mapping):
        yield from _clear(value, f"{shown}.")
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _clear_value(name, item, shown)
    elif isinstance(value, str) and _is_secret(name, value):
        yield shown, value
    elif isinstance(value, int | float) and value not in (0, 1) and _is_named_as_secret(name):
        yield shown, str(value)


def _is_secret(name: str, value: str) -> bool:
    if value.strip().lower() in _NOT_SECRET:
        return False
    if secrets_in_url(value) or re.search(r"[?#;].*=", value) or without_secrets(value) != value:
        return True
    if _NO_SECRET.search(name):
        return False
    # Names of settings have dots, and words of many kinds in them.
    by_name = "." not in name and _SECRET_OPTION.search(name) is not None
    return by_name or holds_secret(name, value)


def _is_named_as_secret(name: str) -> bool:
    """Whether even a number may be a secret there; names of settings count bits and sizes."""
    return "." not in name and holds_secret(name, "x") and not _NO_SECRET.search(name)


def _variables_with(value: str) -> list[str]:
    return [name for name, content in os.environ.items() if content == value]


# ---- names of variables --------------------------------------------------------------------------


def variable_of(value: object) -> str | None:
    """Return the name of the variable that stands for a value: an `EnvVar`, or `{env: NAME}`."""
    if isinstance(value, dg.EnvVar | _INT_VARIABLE):
        return str(value.env_var_name)
    if isinstance(value, Mapping) and value.keys() == {_ENV} and isinstance(value[_ENV], str):
        return str(value[_ENV])
    return None


def as_variable(value: Any) -> Any:
    """Return `{env: NAME}` as an `EnvVar`, for a resource's text field; return others unchanged."""
    variable = variable_of(value)
    return value if variable is None else dg.EnvVar(variable)


def resolve_variables(what: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with the values of the variables they name, for the client of a store.

    Args:
        what: the field, for errors.

    Raises:
        InputError: a variable is not set in this process.
    """
    return {name: _resolve_value(f"{what}.{name}", value) for name, value in options.items()}


def _resolve_value(what: str, value: Any) -> Any:
    variable = variable_of(value)
    if variable is None:
        if isinstance(value, Mapping):
            return resolve_variables(what, value)
        return [_resolve_value(what, item) for item in value] if isinstance(value, list) else value
    if variable not in os.environ:
        raise InputError(
            f"the environment variable {variable}, which {what} names, is not set",
            next_step="set it in the environment of Dagster's code servers and runs",
        )
    return os.environ[variable]


def named_in_template(value: Any) -> Any:
    """Return options from YAML before templates are rendered: `{{ env.NAME }}` becomes `{env:
    NAME}`.

    Rendered, it would be the value, which cannot be told from a value in the YAML.
    """
    if isinstance(value, Mapping):
        return {name: named_in_template(item) for name, item in value.items()}
    if isinstance(value, list):
        return [named_in_template(item) for item in value]
    match = _TEMPLATE.fullmatch(value) if isinstance(value, str) else None
    return value if match is None else {_ENV: match["name"] or match["called"]}
