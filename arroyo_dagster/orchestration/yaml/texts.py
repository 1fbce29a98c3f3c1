"""Texts of a certain form: cron, time zone, daily window, URL. Each is checked by the JSON schema
as far as it can be, and by a validator.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import dagster as dg
from pydantic import AfterValidator, BeforeValidator, Field

from arroyo_dagster.errors import InputError
from arroyo_dagster.orchestration.compaction.daily_window import DailyWindow
from arroyo_dagster.orchestration.secrets import named_in_template

_BETWEEN = r"^\s*([01]?[0-9]|2[0-3]):[0-5][0-9]\s*-\s*([01]?[0-9]|2[0-3]):[0-5][0-9]\s*$"
_CHECKPOINT_URL = (
    r"^([^:]+|/.*|file:/.*|memory://.*|[sS]3[aA]?://.*|[sS]3[aA]?::https?://.*|[rR]2://.*"
    r"|[gG][sS]://.*|abfss?://.*|https://.*)$"
)
_HTTP_URL = r"^https?://.*$"


@dataclass(frozen=True)
class _Form:
    """The form of a text, in the JSON schema."""

    schema: Callable[[], dict[str, Any]]

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        return {**handler(core_schema), **self.schema()}


def texts_of_form(pattern: str, expected: str) -> tuple[AfterValidator, _Form]:
    """Return what restricts a text to a form, in both ways.

    Args:
        expected: with its article, for example `a name: use letters`.
    """

    def check(text: str) -> str:
        if not re.search(pattern, text):
            raise ValueError(f"not {expected}")
        return text

    return AfterValidator(check), _Form(lambda: expect({"pattern": pattern}, expected))


def expect(schema: dict[str, Any], expected: str) -> dict[str, Any]:
    """Return a schema whose error is what was expected: a pattern, or 600 names, say it badly."""
    return {"if": schema, "else": {"const": expected}}


def _check_zone(name: str) -> str:
    import zoneinfo

    try:
        zoneinfo.ZoneInfo(name)
    except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError) as error:
        raise ValueError(_ZONE) from error
    return name


def _zones() -> dict[str, Any]:
    import zoneinfo

    return expect({"enum": sorted(zoneinfo.available_timezones())}, _ZONE)


def _check_window(between: str) -> str:
    try:
        DailyWindow.parse(between, "UTC")
    except InputError as error:
        raise ValueError(error.message) from error
    return between


_ZONE = "the name of a time zone, for example Europe/Berlin"

_DURATION = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([smhd])\s*$")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def _seconds(duration: Any) -> Any:
    if not isinstance(duration, str):
        return duration
    match = _DURATION.match(duration)
    if match is None:
        raise ValueError("not a duration, such as 90s, 15m, 2h or 7d")
    return float(match[1]) * _SECONDS[match[2]]


Duration = Annotated[
    float,
    BeforeValidator(_seconds),
    _Form(
        lambda: {
            "type": "string",
            **expect({"pattern": _DURATION.pattern}, "a duration, such as 90s, 15m, 2h or 7d"),
        }
    ),
    Field(examples=["15m", "7d"]),
]
"""A number with s, m, h or d; in Python also a number of seconds."""

TimeZone = Annotated[
    str, AfterValidator(_check_zone), _Form(_zones), Field(examples=["Europe/Berlin"])
]
"""A name of the tz database."""

Window = Annotated[
    str,
    AfterValidator(_check_window),
    _Form(lambda: expect({"pattern": _BETWEEN}, "a time of day, as HH:MM-HH:MM")),
    Field(examples=["02:00-04:00", "23:00-01:30"]),
]
"""HH:MM-HH:MM; one that ends before it begins passes midnight."""

Url = Annotated[
    str,
    *texts_of_form(
        _CHECKPOINT_URL,
        "a checkpoint URL: begin it with s3://, r2://, gs://, abfss://, https:// or /",
    ),
]
"""A checkpoint URL, or a path."""

HttpUrl = Annotated[
    str, *texts_of_form(_HTTP_URL, "the URL of a server: begin it with http:// or https://")
]
"""The URL of a REST API, or of a site."""

Name = Annotated[str, *texts_of_form(r"^[A-Za-z0-9_.-]+$", "a name: use letters, digits, _ . -")]
"""A name that may stand in names of Dagster."""


ExportName = Annotated[
    str, *texts_of_form(r"^[A-Za-z0-9_]+$", "a name: use letters, digits and underscores")
]
"""A name that may stand in keys of assets."""


def _resolve_options(context: dg.ResolutionContext, options: Any) -> Any:
    return context.resolve_value(named_in_template(options))


Options = Annotated[
    dict[str, Any],
    dg.Resolver(_resolve_options, model_field_type=dict[str, Any], inject_before_resolve=False),
]
"""Options of a client. For secrets, name environment variables: `{env: NAME}`."""

Secret = Annotated[
    Any,
    dg.Resolver(
        _resolve_options,
        model_field_type=str | dict[str, str] | None,
        inject_before_resolve=False,
    ),
]
"""A text that may hold a secret. If it does, name an environment variable: `{env: NAME}`."""
