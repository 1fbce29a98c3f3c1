"""The context of user code while it runs: `sql`, `key`, `window`, `env` and the states.

Inline bodies have these names, and one accessor per state, in scope. Functions in modules import
them from `arroyo_dagster.sdf`.

Source: sdf-states.md 3.4 and 8.2; error E43.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from arroyo_dagster.dataflow.definition.names import mangled
from arroyo_dagster.dataflow.definition.windows import GLOBAL_WINDOW, Window
from arroyo_dagster.dataflow.errors import StepFailed, access_error, unknown_name
from arroyo_dagster.user_modules import begin_step, running_step

if TYPE_CHECKING:
    from arroyo_dagster.dataflow.views.frames import Frame
    from arroyo_dagster.dataflow.views.sql import Tables

_LOG = logging.getLogger("arroyo_dagster.sdf")
_MOST_MESSAGE = 1000
Accessor = Callable[[], Any]


class Invocation:
    """The context of one operator's user code, with the key and the window of the current record.

    Args:
        accessors: by the name of the state in user code.
        tables: returns the tables that `sql` sees; called for each query.
        env: the job's environment.
        tables_in: returns the tables that a query as a body sees, by the words in it.

    Attributes:
        key: the key of the current record; None outside of a partition.
        text: the same key as text, as states store it.
        serial: the number of the current record; handles of earlier numbers are invalid.
        window: the window of the current record; the global window outside of windows.
        running: whether the operator is calling functions.
        service: the service whose operator it is; None in a test of a package.
        log: keeps a message of a step.
    """

    def __init__(
        self,
        accessors: Mapping[str, Accessor],
        tables: Callable[[], Tables],
        env: Mapping[str, str],
        tables_in: Callable[[Collection[str]], Tables] | None = None,
    ) -> None:
        self.accessors = dict(accessors)
        self._tables = tables
        self.tables = tables_in or (lambda words: tables())
        self.env = dict(env)
        self.key: str | int | bool | None = None
        self.text = ""
        self.serial = 0
        self.window = GLOBAL_WINDOW
        self.running = False
        self.service: str | None = None
        self.log: Callable[[str, str], None] = lambda step, text: None

    @contextmanager
    def entered(self) -> Iterator[Invocation]:
        """Make this the context of user code within the block."""
        token = _CURRENT.set(self)
        self.running = True
        try:
            yield self
        except SystemExit as error:
            from arroyo_dagster.dataflow.runtime.reasons import reason_of

            raise StepFailed(
                reason_of(error),
                service=self.service,
                step=running_step() or None,
                next_step="let the function raise an error of its own for a record that it cannot "
                "process; nothing of the epoch was published",
            ) from error
        finally:
            begin_step()
            self.running = False
            self.serial += 1  # invalidates all handles that user code still holds
            _CURRENT.reset(token)

    def sql(self, text: str, params: Mapping[str, Any] | None) -> Frame:
        """Execute a query over the tables in scope."""
        from arroyo_dagster.dataflow.views.frames import query

        return query(self._tables(), text, params)

    def state(self, name: str) -> Any:
        """Call the accessor of a state, by its name in the YAML or with underscores."""
        accessor = self.accessors.get(mangled(name))
        if accessor is None:
            raise unknown_name("state", name, sorted(self.accessors))
        return accessor()


@contextmanager
def collected_later() -> Iterator[None]:
    """Disable Python's cyclic garbage collector within the block.

    The records of a batch and the entries of states are many small objects without cycles, which
    the collector would traverse again and again: that took a quarter of the time of a record.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_CURRENT: ContextVar[Invocation | None] = ContextVar("sdf_invocation", default=None)


def current() -> Invocation:
    """Return the context in which the calling function runs.

    Raises:
        StateAccessError: no operator is running (E43).
    """
    invocation = _CURRENT.get()
    if invocation is None:
        raise access_error(
            "E43",
            "a state or a context function was used outside an invocation; both exist only while "
            "an operator calls your function",
        )
    return invocation


def sql(text: str, params: Mapping[str, Any] | None = None) -> Frame:
    """Query the tables in scope: the arrow-row states that the service owns or refers to.

    Args:
        text: a query in Polars' SQL; `:name` is a parameter.
        params: a value for each parameter: text, a number, a bool or None.

    Raises:
        SqlError: unknown table or column, a syntax error, or a statement that writes (E46).
    """
    return current().sql(text, params)


def log_message(text: str) -> None:
    """Keep a message with the state of the service, for `arroyo-state sdf log`.

    Each subtask keeps the last 20 messages of each step, published with their epoch.

    Args:
        text: the message; what is behind 1,000 characters is cut.
    """
    place, step = current(), running_step().replace("`", "")
    _LOG.info("service %s: %s: %s", place.service, step, text)
    place.log(step, str(text)[:_MOST_MESSAGE])


def key() -> str | int | bool | None:
    """Return the current record's key in the states' key type; None outside of a partition."""
    return current().key


def window() -> Window:
    """Return the current window, in epoch milliseconds; outside of windows, all of time."""
    return current().window


def state(name: str) -> Any:
    """Return a state as its accessor does: a cell, a row, a frame, or pairs of key and value."""
    return current().state(name)


class _Env(Mapping[str, str]):
    """The environment of the job that is calling the function."""

    def __getitem__(self, name: str) -> str:
        return current().env[name]

    def __iter__(self) -> Iterator[str]:
        return iter(current().env)

    def __len__(self) -> int:
        return len(current().env)


env: Mapping[str, str] = _Env()

CONTEXT = {"sql": sql, "key": key, "window": window, "env": env, "state": state}
"""The names that inline code has in scope besides its accessors."""
