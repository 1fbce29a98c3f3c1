"""`--spark` and the options that say which Spark, the same on every command that has it."""

from __future__ import annotations

import functools
import importlib.util
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from arroyo_dagster.cli.settings import setting_option
from arroyo_dagster.optional_packages import missing_package
from arroyo_dagster.spark.settings import SparkChoice, SparkSettings
from arroyo_dagster.spark.thresholds import SparkThresholds
from arroyo_dagster.state.model.settings import SettingField, setting_fields, settings_from

_F = TypeVar("_F", bound=Callable[..., Any])
_PREFIX = "spark_"
_SESSION = "arroyo_dagster.spark_session"
_THRESHOLDS = [field.name for field in setting_fields(SparkThresholds)]


def spark_options(text: str, *, always: bool = False) -> Callable[[_F], _F]:
    """Add `--spark` and its settings; the command gets them as `spark`: None without `--spark`.

    They are refused before anything is read: if Spark is not installed, or `--spark` is missing.

    Args:
        text: the help of `--spark`.
        always: whether the command uses Spark for any amount of work.
    """
    fields = [
        field
        for field in setting_fields(SparkSettings)
        if not (always and field.name in _THRESHOLDS)
    ]

    def add(command: _F) -> _F:
        @functools.wraps(command)
        def call(*args: Any, spark: bool, **given: Any) -> Any:
            values = {field.name: given.pop(_PREFIX + field.name) for field in fields}
            return command(*args, spark=_settings(spark, fields, values), **given)

        decorated = typing.cast(_F, call)
        for field in reversed(fields):
            name = field.option.removeprefix("--").removeprefix("spark-").replace("-", "_")
            option = setting_option(
                SparkSettings,
                field.name,
                only_for="With --spark",
                prefix=_PREFIX,
                envvar=f"ARROYO_SPARK_{name.upper()}",
                show_envvar=True,
            )
            decorated = option(decorated)
        return click.option("--spark", is_flag=True, callback=_check_spark, help=text)(decorated)

    return add


def check_spark() -> None:
    """Check that Spark is installed.

    Raises:
        InputError: it is not; names the command that installs it.
    """
    if importlib.util.find_spec("pyspark") is None:
        raise missing_package("pyspark")


def _check_spark(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
    if value and not ctx.resilient_parsing:
        check_spark()
    return value


def _settings(
    spark: bool, fields: Sequence[SettingField], values: Mapping[str, Any]
) -> SparkSettings | None:
    if spark:
        return settings_from(SparkSettings, values)
    source = click.get_current_context().get_parameter_source
    typed = [f.option for f in fields if source(_PREFIX + f.name) is ParameterSource.COMMANDLINE]
    if typed:
        raise click.UsageError(f"{', '.join(typed)}: only with --spark")
    return None


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

    found: Callable[[], Any] = click.get_current_context().meta.setdefault(_SESSION, session)
    return found
