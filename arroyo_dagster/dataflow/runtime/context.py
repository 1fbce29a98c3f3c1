"""What user code finds around it: `sql`, `key`, `window`, `env` and the states, while it runs.

Inline bodies have these names, and one accessor a state, in scope. Functions in modules import them
from `arroyo_dagster.sdf`.

Source: sdf-states.md 3.4 and 8.2; error E43.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from arroyo_dagster.dataflow.definition.names import mangled
from arroyo_dagster.dataflow.definition.windows import GLOBAL_WINDOW, Window
from arroyo_dagster.dataflow.errors import access_error, unknown_name

if TYPE_CHECKING:
    from arroyo_dagster.dataflow.views.frames import Frame
    from arroyo_dagster.dataflow.views.sql import Tables

Accessor = Callable[[], Any]


class Invocation:
    """One place in which user code runs, and where it stands: the record's key and window.

    Args:
        accessors: by the state's name, as user code calls it.
        tables: gives the tables that `sql` sees; asked at each call.
        env: the job's environment.

    Attributes:
        key: of the current record; None outside a partition.
        text: the same as states have it.
        serial: of the current record: handles of an earlier one are of no use.
        window: the global one outside of windows.
        running: whether a function is being called right now.
    """

    def __init__(
        self,
        accessors: Mapping[str, Accessor],
        tables: Callable[[], Tables],
        env: Mapping[str, str],
    ) -> None:
        self.accessors = dict(accessors)
        self._tables = tables
        self.env = dict(env)
        self.key: str | int | bool | None = None
        self.text = ""
        self.serial = 0
        self.window = GLOBAL_WINDOW
        self.running = False

    @contextmanager
    def entered(self) -> Iterator[Invocation]:
        """While this lasts, user code sees this place."""
        token = _CURRENT.set(self)
        self.running = True
        try:
            yield self
        finally:
            self.running = False
            self.serial += 1  # whatever handles are kept are of no use from here on
            _CURRENT.reset(token)

    def sql(self, text: str, params: Mapping[str, Any] | None) -> Frame:
        """Answer a query over the tables in scope."""
        from arroyo_dagster.dataflow.views.frames import query

        return query(self._tables(), text, params)

    def state(self, name: str) -> Any:
        """What the accessor of a state gives; its name as in the YAML or with underscores."""
        found = self.accessors.get(mangled(name))
        if found is None:
            raise unknown_name("state", name, sorted(self.accessors))
        return found()


_CURRENT: ContextVar[Invocation | None] = ContextVar("sdf_invocation", default=None)


def current() -> Invocation:
    """The place in which the calling function runs.

    Raises:
        StateAccessError: no operator is running (E43).
    """
    found = _CURRENT.get()
    if found is None:
        raise access_error(
            "E43",
            "a state or a context function was used outside an invocation; both exist only while "
            "an operator calls your function",
        )
    return found


def sql(text: str, params: Mapping[str, Any] | None = None) -> Frame:
    """Query the tables in scope: the arrow-row states that the service owns or refers to.

    Args:
        text: a query in Polars' SQL; `:name` stands for a parameter.
        params: a value for each parameter: text, numbers, bools, None.

    Raises:
        SqlError: unknown table or column, a syntax error, or a statement that writes (E46).
    """
    return current().sql(text, params)


def key() -> str | int | bool | None:
    """The key of the current record, as the states of the service declare it; None outside."""
    return current().key


def window() -> Window:
    """Start and end of the current window in epoch milliseconds; all of time outside of one."""
    return current().window


def state(name: str) -> Any:
    """What the accessor of a state gives: a cell, a row, a frame, or a list of pairs."""
    return current().state(name)


class _Env(Mapping[str, str]):
    """The environment of the job whose function is running."""

    def __getitem__(self, name: str) -> str:
        return current().env[name]

    def __iter__(self) -> Iterator[str]:
        return iter(current().env)

    def __len__(self) -> int:
        return len(current().env)


env: Mapping[str, str] = _Env()

CONTEXT = {"sql": sql, "key": key, "window": window, "env": env, "state": state}
"""What inline code has in scope beside its accessors."""
