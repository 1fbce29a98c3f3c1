"""Default options from a file: `arroyo-state.toml`, or `config.toml` of the user.

Precedence: option, environment, file, default. A file contains neither secrets nor confirmations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import click

from arroyo_dagster.cli.lazy import LazyGroup
from arroyo_dagster.errors import InputError
from arroyo_dagster.redaction import holds_secret
from arroyo_dagster.state.storage.read_only import READ_ONLY, config_files, read_toml

ALLOWED_EVERYWHERE = ("url", "arroyo-api", "arroyo-db", "private")
"""Options at the top of a file. They apply to every command that has them."""

SPARK = "spark"
"""The table with the settings that `--spark` uses; it switches nothing on."""

_TOP = (*ALLOWED_EVERYWHERE, READ_ONLY)
"""The keys at the top of a file."""

CONFIRMATIONS = frozenset({"yes", "now"})
"""Options that start a change. Only a command line may contain them."""


def find_config() -> Path | None:
    """Return the file with the default options: of the working directory, else of the user."""
    return next(iter(config_files()), None)


def read_config(path: Path, root: LazyGroup) -> dict[str, Any]:
    """Read a file of default options, and check all its keys that need no command to be loaded.

    Raises:
        InputError: not a TOML file, or a key that is unknown, a secret or a confirmation.
    """
    config = read_toml(path)
    for names, value in _leaves(config, ()):
        if _spelling(names[-1]) in CONFIRMATIONS:
            _refuse(path, names, "confirms a change: give it on the command line", ())
        for text in value if isinstance(value, list) else [value]:
            if holds_secret(names[-1], str(text)):
                _refuse(path, names, "is a secret: set it in the environment", ())
    _check_commands(path, config, root, ())
    return config


def default_map(
    path: Path, config: Mapping[str, Any], command: click.Command, names: tuple[str, ...]
) -> dict[str, Any]:
    """Return the defaults of one command, by the names of its parameters.

    Args:
        names: the words of the command, for example `("gc", "run")`.

    Raises:
        InputError: a key is not an option of the command, or its value cannot be used.
    """
    options = {
        _spelling(option.opts[0]): option
        for option in command.params
        if isinstance(option, click.Option) and not option.hidden
    }
    section: Any = config
    for name in names:
        section = section.get(name, {})
    values = {_spelling(key): value for key, value in section.items()}
    for key in values:
        if key not in options:
            _refuse(path, (*names, key), f"is no option of `{' '.join(names)}`", options)
    everywhere = {_spelling(key): value for key, value in config.items()}
    if SPARK in config and SPARK in options:
        values[SPARK] = [*_spark_pairs(path, config), *values.get(SPARK, [])]
    shared = {key: everywhere[key] for key in ALLOWED_EVERYWHERE if key in everywhere}
    defaults = {key: value for key, value in {**shared, **values}.items() if key in options}
    return {
        str(options[key].name): _value(
            path, (*names, key) if key in values else (key,), options[key], value
        )
        for key, value in defaults.items()
    }


def read_defaults(
    root: LazyGroup, command: click.Command, names: tuple[str, ...]
) -> dict[str, Any]:
    """Return the defaults of one command from the file that applies; errors as `default_map`."""
    path = find_config()
    return {} if path is None else default_map(path, read_config(path, root), command, names)


def check_config(path: Path, root: LazyGroup) -> int:
    """Check a file completely, options of every command included; return the number of its keys.

    Raises:
        InputError: as `read_config` and `default_map`.
    """
    config = read_config(path, root)
    if SPARK in config:
        _spark_pairs(path, config)
    for names, command in _commands(root, ()):
        default_map(path, config, command, names)
    return sum(1 for _ in _leaves(config, ()))


def _spark_pairs(path: Path, config: Mapping[str, Any]) -> list[str]:
    from arroyo_dagster.cli.spark import spark_pairs

    table = {".".join(names): value for names, value in _leaves(config[SPARK], ())}
    try:
        return spark_pairs(table)
    except ValueError as error:
        _refuse(path, (SPARK,), f"cannot be used: {error}", ())


def _commands(
    group: LazyGroup, names: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, LazyGroup):
            yield from _commands(command, (*names, name))
        elif command is not None:
            yield (*names, name), command


def _value(path: Path, names: tuple[str, ...], option: click.Option, value: Any) -> Any:
    if isinstance(value, dict) or isinstance(value, list) != option.multiple:
        _refuse(path, names, "has a value of the wrong kind", ())
    try:
        with click.Context(click.Command(names[-1])) as context:
            option.type_cast_value(context, value)
    except click.BadParameter as error:
        _refuse(path, names, f"cannot be used: {error.message}", ())
    return value


def _check_commands(
    path: Path, section: Mapping[str, Any], group: LazyGroup, names: tuple[str, ...]
) -> None:
    commands = group.list_commands(click.Context(group))
    for key, value in section.items():
        if isinstance(value, dict):
            if key == SPARK and not names:
                continue
            if key not in commands:
                _refuse(path, (*names, key), "is no command", commands)
            below = group.get_group(key)
            if below is not None:
                _check_commands(path, value, below, (*names, key))
        elif names or _spelling(key) not in _TOP:
            reason = "is a command, so it is a section" if key in commands else "is unknown here"
            _refuse(path, (*names, key), reason, _TOP if not names else commands)


def _leaves(
    section: Mapping[str, Any], names: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*names, key))
        else:
            yield (*names, key), value


def _spelling(name: str) -> str:
    return name.lstrip("-").replace("_", "-")


def _refuse(path: Path, names: tuple[str, ...], why: str, known: Any) -> NoReturn:
    """Raise an InputError that names the file and the key, and never a value."""
    raise InputError(
        f"the key {'.'.join(names)} {why}",
        path=str(path),
        next_step=f"use one of {', '.join(sorted(known))}" if known else "change this key",
    )
