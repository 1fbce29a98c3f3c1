"""Dagster's storage on SQLite in less time: what it makes anew for each query is kept.

It makes an engine for each connection, so that SQLAlchemy compiles each statement again, and reads
all migration scripts for each run, which has a database of its own: a third of what a test costs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from alembic.config import Config
from alembic.script import ScriptDirectory
from dagster._core.storage.event_log.sqlite import sqlite_event_log
from dagster._core.storage.runs.sqlite import sqlite_run_storage
from dagster._core.storage.schedules.sqlite import sqlite_schedule_storage
from sqlalchemy import event

ENGINES = 64
"""Each run has one; what is older is made again."""


@contextlib.contextmanager
def kept_engines() -> Iterator[None]:
    """While it lasts, engines and migration scripts are kept."""
    with contextlib.ExitStack() as stack:
        for module in (sqlite_event_log, sqlite_run_storage, sqlite_schedule_storage):
            make = _keeping(module.create_engine)
            stack.enter_context(mock.patch.object(module, "create_engine", make))
        scripts = _keeping_scripts(ScriptDirectory.from_config)
        stack.enter_context(mock.patch.object(ScriptDirectory, "from_config", scripts))
        yield


def _keeping(create_engine: Callable[..., Any]) -> Callable[..., Any]:
    @functools.lru_cache(maxsize=ENGINES)
    def made(url: str, poolclass: Any, arguments: tuple[tuple[str, Any], ...]) -> Any:
        found = create_engine(url, poolclass=poolclass, connect_args=dict(arguments))
        event.listen(found, "connect", _without_waiting)
        return found

    def engine(url: str, *, poolclass: Any, connect_args: dict[str, Any] | None = None) -> Any:
        return made(url, poolclass, tuple((connect_args or {}).items()))

    return engine


def _without_waiting(connection: Any, _: Any) -> None:
    """Nothing has to outlive a power cut: no commit waits for the disk."""
    connection.execute("PRAGMA synchronous=OFF")


def _keeping_scripts(from_config: Callable[[Config], Any]) -> Callable[[Config], Any]:
    kept: dict[tuple[Any, ...], Any] = {}

    def scripts(config: Config) -> Any:
        key = (config.config_file_name, config.get_main_option("script_location"))
        if key not in kept:
            kept[key] = from_config(config)
        return kept[key]

    return scripts
