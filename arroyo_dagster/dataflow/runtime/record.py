"""Records: objects with their members as attributes.

Every step gets `Record`s, whether its record comes from a topic or from the step before.

Source: sdf-states.md 2.2, L6.
"""

from __future__ import annotations

import copyreg
from typing import TYPE_CHECKING, Any

from arroyo_dagster.dataflow.errors import did_you_mean

_last_change = object()


def last_change() -> object:
    """Return an object that another one replaces whenever a `Record` changes, in any thread."""
    return _last_change


def _changing() -> None:
    global _last_change
    _last_change = object()


class Record(dict[str, Any]):
    """An object in a record: its members are attributes, with `_` for `-`, and items by name.

    Members take precedence, and a record has no methods: `record.values` is a member, or an error.
    Items, too, are found by the name with `_`.
    `record["values"]`, `"values" in record`, `len(record)`, iteration over the names and
    `{**record}` work as of a dict; `plain` returns a dict of dicts, for `json.dumps` and the like.
    """

    __slots__ = ()

    if TYPE_CHECKING:

        def __getattribute__(self, name: str) -> Any: ...

    else:
        # A function in C, without a frame of Python: three times as fast. Names that are not
        # members reach `__missing__`.
        __getattribute__ = dict.__getitem__

    def __missing__(self, name: str) -> Any:
        if not isinstance(name, str):
            raise KeyError(name)
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        return dict.__getitem__(self, _member(self, name))

    def __setattr__(self, name: str, value: Any) -> None:
        _changing()
        member = name if name in self else _find(self, name)
        dict.__setitem__(self, name if member is None else member, as_record(value))

    def __delattr__(self, name: str) -> None:
        del self[name if name in self else _member(self, name)]

    def __setitem__(self, name: str, value: Any) -> None:
        _changing()
        dict.__setitem__(self, name, as_record(value))

    def __delitem__(self, name: str) -> None:
        _changing()
        dict.__delitem__(self, name)

    def __ior__(self, other: Any) -> Record:  # type: ignore[override,misc]
        pairs = {**other} if isinstance(other, dict) else dict(other)
        for name, value in pairs.items():
            self[name] = value
        return self

    def __dir__(self) -> list[str]:
        return [name.replace("-", "_") for name in self]

    def __reduce__(self) -> tuple[Any, ...]:
        return _reduced(self)


class NoMember(AttributeError, KeyError):
    """A record has no such member: an error of an attribute and of an item."""

    __str__ = Exception.__str__


def _reduced(record: Record) -> tuple[Any, ...]:
    # The default would call `items`, which may be a member.
    return Record, ({**record},)


copyreg.pickle(Record, _reduced)  # spares pickle the look-up of attributes, which are members


def _find(record: Record, name: str) -> str | None:
    return next((member for member in record if member.replace("-", "_") == name), None)


def _member(record: Record, name: str) -> str:
    member = _find(record, name)
    if member is not None:
        return member
    message = f"the record has no member `{name}`; there are {', '.join(record) or 'none'}"
    if hasattr(dict, name):
        message += "; a record has no methods: for a dict, use `{**record}`, or `sdf.plain(record)`"
    else:
        message += did_you_mean(name, [member.replace("-", "_") for member in record])
    raise NoMember(message)


def as_record(value: Any) -> Any:
    """Return a value with its dicts, at any depth of dicts and lists, as `Record`s."""
    kind = type(value)
    if kind is Record:
        for name, item in dict.items(value):
            if type(item) in _HOLDING:
                dict.__setitem__(value, name, as_record(item))
        return value
    if isinstance(value, dict):
        return Record({name: as_record(item) for name, item in value.items()})
    return [as_record(item) for item in value] if isinstance(value, list) else value


def plain(value: Any) -> Any:
    """Return a value with its `Record`s, at any depth of dicts, lists and tuples, as dicts."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in {**value}.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


_HOLDING = {dict, list, Record}
