"""Say why a user's function failed, and what to do: its error, the line and the expression of it.

Source: sdf-states.md 9; errors E43, E44.
"""

from __future__ import annotations

import linecache
from itertools import islice
from types import TracebackType
from typing import Any

from arroyo_dagster.dataflow.views.frames import Frame, Pairs
from arroyo_dagster.errors import ArroyoStateError
from arroyo_dagster.user_modules import INLINE

_OWN = __name__.partition(".")[0] + "."
_WRITES = frozenset({"update", "delete", "increment", "set", "decrement"})
"""What only handles of the owner have."""

_NEXT = {
    "E28": "return text, an int or a bool as the key",
    "E41": "write a value that fits, or declare a wider type and run with --migrate",
    "E42": "return what the operator expects",
    "E43": "change the state in update-state of its owner; write a topic that the owner reads",
    "E44": "use a name that exists; `sdf check` finds constant names",
    "E46": "use tables and columns that exist; `sdf sql` tries a query",
}
"""What to do about an error with a number that has no next step of its own."""

_MOST_EXPRESSION = 100


def keep_source(path: str, source: str) -> None:
    """Keep the text of an inline body, so that errors can show its lines."""
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)


def reason_of(error: BaseException, *, in_topic: bool = False) -> str:
    """Return why a function failed, in one line.

    Args:
        error: the error.
        in_topic: whether a topic or a sink failed, which runs no code of the user.
    """
    where = None if in_topic else _position(error.__traceback__)
    return _described(error) + (f"; {where}" if where else "")


def next_step_of(error: BaseException, *, in_topic: bool = False) -> str:
    """Return what to do about the failure. Arguments as in `reason_of`."""
    own = error.next_step if isinstance(error, ArroyoStateError) else None
    number = _described(error).partition(":")[0]
    otherwise = "the type of the topic" if in_topic else "the function"
    return own or _NEXT.get(number, f"correct {otherwise} or the record")


def _described(error: BaseException) -> str:
    if isinstance(error, ArroyoStateError):
        number = error.facts.get("number")
        return f"{number}: {error.message}" if number else error.message
    if isinstance(error, AttributeError):
        if str(error).startswith("'Row("):
            return f"E44: {error}"  # Python's message for an unknown column of a row
        if error.name in _WRITES and isinstance(error.obj, list | Pairs | Frame):
            return (
                f"E43: `{error.name}` of a state that is read as a whole: only update-state of the "
                "service that owns it changes it"
            )
    if isinstance(error, SystemExit):
        return f"the function ended the process with SystemExit({error.code!r})"
    return f"{type(error).__name__}: {error}"


def _position(trace: TracebackType | None) -> str | None:
    """Return the innermost line of the user's code; None = none of it was running."""
    innermost = None
    while trace is not None:
        if not str(trace.tb_frame.f_globals.get("__name__", "")).startswith(_OWN):
            innermost = trace
        trace = trace.tb_next
    if innermost is None:
        return None
    code, line = innermost.tb_frame.f_code, innermost.tb_lineno
    if str(innermost.tb_frame.f_globals.get("__name__", "")).startswith(INLINE):
        place = f"in line {line} of the body"
    else:
        place = f"in {code.co_filename.rpartition('/')[2]} line {line}"
    expression = _expression(innermost)
    return f"{place}: `{expression}`" if expression else place


def _expression(trace: TracebackType) -> str | None:
    """Return the text of the expression that failed; None if its source is not known."""
    code: Any = trace.tb_frame.f_code
    positions = next(islice(code.co_positions(), trace.tb_lasti // 2, None), None)
    text = linecache.getline(code.co_filename, trace.tb_lineno)
    if not text or positions is None:
        return None
    first, last, start, end = positions
    if None not in positions and first == last == trace.tb_lineno:
        text = text.encode()[start:end].decode(errors="replace")
    text = text.strip()
    return text if len(text) <= _MOST_EXPRESSION else f"{text[: _MOST_EXPRESSION - 3]}..."
