"""`--spark [KEY=VALUE …]`: whether a command uses Spark, and which; the same wherever it is.

Precedence: option, environment (`ARROYO_SPARK_MASTER` and so on), the table `[spark]` of the file
with the default options, Spark's own configuration.
"""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from arroyo_dagster.cli.settings import setting_type
from arroyo_dagster.optional_packages import check_spark
from arroyo_dagster.spark.settings import SparkChoice, SparkSettings
from arroyo_dagster.spark.thresholds import SparkThresholds
from arroyo_dagster.state.model.settings import SettingField, setting_fields, settings_from

_F = TypeVar("_F", bound=Callable[..., Any])
_SESSION = "arroyo_dagster.spark_session"
_CONF = "spark."
_ENVIRONMENT = "ARROYO_SPARK_"
_SWITCH = ""
"""The value of `--spark` alone."""

_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def spark_options(text: str, *, always: bool = False) -> Callable[[_F], _F]:
    """Add `--spark`; the command gets its settings as `spark`: None without `--spark`.

    They are refused before anything is read: if Spark is not installed, or for an unknown key.

    Args:
        text: the help of `--spark`.
        always: whether the command uses Spark for any amount of work.
    """
    fields = _fields(always)
    keys = ", ".join(key for key in fields if key != "conf")
    return click.option(
        "--spark",
        multiple=True,
        metavar="[KEY=VALUE …]",
        callback=functools.partial(_settings, fields),
        help=f"{text} Keys: {keys}, and spark.NAME for settings of Spark. Defaults: the variables "
        f"{_ENVIRONMENT}MASTER and so on, the table [spark] of the configuration file.",
    )


def split_spark(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with one `--spark=KEY=VALUE` for each setting.

    `--spark` takes the words behind it that have a `=`, and may stand alone.
    """
    arguments: list[str] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        if word == "--":
            return [*arguments, word, *waiting]
        arguments.append(f"{word}={_SWITCH}" if word == "--spark" else word)
        while word == "--spark" and waiting and _is_pair(waiting[0]):
            arguments.append(f"--spark={waiting.pop(0)}")
    return arguments


def _is_pair(word: str) -> bool:
    return "=" in word and not word.startswith("-")


def spark_pairs(table: Mapping[str, Any]) -> list[str]:
    """Return the table `[spark]` of a file with default options as `--spark` takes it.

    Raises:
        ValueError: a key is unknown, or its value cannot be used.
    """
    pairs = [f"{key}={_plain(value)}" for key, value in table.items()]
    try:
        with click.Context(click.Command("spark")):
            _parse(_fields(always=False), pairs)
    except click.BadParameter as error:
        raise ValueError(error.message) from error
    return pairs


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _fields(always: bool) -> dict[str, SettingField]:
    """Return the fields by key, without those that the command does not need."""
    unused = {field.name for field in setting_fields(SparkThresholds)} if always else set()
    return {
        field.option.removeprefix("--").removeprefix("spark-"): field
        for field in setting_fields(SparkSettings)
        if field.name not in unused
    }


def _settings(
    fields: Mapping[str, SettingField], ctx: click.Context, option: click.Parameter, pairs: Any
) -> SparkSettings | None:
    assert option.name is not None
    typed = ctx.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
    if not typed or ctx.resilient_parsing:
        return None
    check_spark()
    pairs_of_file: Sequence[str] = (ctx.default_map or {}).get("spark", ())
    of_file = [
        pair for pair in pairs_of_file if pair.partition("=")[0] in fields or pair.startswith(_CONF)
    ]
    typed_pairs = (pair for pair in pairs if pair != _SWITCH)
    values = _parse(fields, [*of_file, *_of_environment(fields), *typed_pairs])
    return settings_from(SparkSettings, values)


def _of_environment(fields: Mapping[str, SettingField]) -> Iterable[str]:
    for key in fields:
        text = os.environ.get(_ENVIRONMENT + key.replace("-", "_").upper())
        if text and key == "conf":
            yield from shlex.split(text)
        elif text:
            yield f"{key}={','.join(text.split()) if key == 'packages' else text}"


def _parse(fields: Mapping[str, SettingField], pairs: Iterable[str]) -> dict[str, Any]:
    """Return the values by the names of the fields, in the units of people; the last one counts."""
    values: dict[str, Any] = {}
    conf: dict[str, str] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if equals and key.startswith(_CONF):
            conf[key] = text
        elif equals and key in fields and key != "conf":
            values[fields[key].name] = _value(key, fields[key], text)
        else:  # the value may be a secret
            names = ", ".join(f"{key}=…" for key in fields if key != "conf")
            raise click.BadParameter(
                f"--spark: unknown {key!r:.40}; it takes {names}, spark.NAME=…"
            )
    return {**values, "conf": conf}


def _value(key: str, field: SettingField, text: str) -> Any:
    if field.kind is tuple:
        return tuple(part for part in text.split(",") if part)
    if field.kind is bool:
        if text.lower() not in _FLAGS:
            raise click.BadParameter(f"{key}: expected true or false")
        return _FLAGS[text.lower()]
    try:
        return setting_type(field).convert(text, None, None)
    except click.BadParameter as error:
        raise click.BadParameter(f"{key}: {error.message}") from error


def print_choice(choice: SparkChoice) -> None:
    """Print which Spark a command uses, and why."""
    click.echo(f"Spark: {choice}", err=True)


def session_of(settings: SparkSettings) -> Callable[[], Any]:
    """Return the function of this command that returns the session.

    Its first call starts the session and prints which Spark it is, for all jobs of the command.
    """

    @functools.cache
    def session() -> Any:
        from arroyo_dagster.spark.session import open_session

        opened = open_session(settings)
        print_choice(opened.choice)
        return opened.session

    shared: Callable[[], Any] = click.get_current_context().meta.setdefault(_SESSION, session)
    return shared
