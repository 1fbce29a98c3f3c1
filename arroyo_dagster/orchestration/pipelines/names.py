"""Free text as parts of asset keys, and names that Dagster can tell apart.

Dagster makes the names of inputs and outputs from keys: only letters, digits, `_`, `-` and `.` may
stand in them, and 1.12 refuses dots in dependencies. So a part of a key consists of letters,
digits, `_` and `-` only: `orders hourly` becomes `orders--20hourly`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from arroyo_dagster.errors import InputError

Key = tuple[str, ...]
"""The parts of a key; each as `key_part` or `with_id` returns it."""

# A dash stays between ordinary characters: `--` begins an escape, and `---` never occurs.
_ESCAPED = re.compile(r"-(?![A-Za-z0-9_])|[^A-Za-z0-9_-]")
_SECOND = "---"
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9]+")


def key_part(name: str) -> str:
    """Return a name as part of an asset key; different names give different parts.

    Letters, digits and `_` stay, and `-` before one of them. Any other character becomes `--` and
    two hexadecimal digits, or `--u` and four, or `--U` and six.

    Raises:
        InputError: the name is empty.
    """
    if not name:
        raise InputError("an empty name cannot be part of an asset key")
    return _ESCAPED.sub(lambda match: _escape(ord(match[0])), name)


def _escape(code: int) -> str:
    if code < 0x100:
        return f"--{code:02x}"
    return f"--u{code:04x}" if code < 0x10000 else f"--U{code:06x}"


def with_id(part: str, identity: str) -> str:
    """Return the part for a second thing of the same name; `key_part` never returns it.

    Args:
        part: as `key_part` returns it.
        identity: tells the two apart, for example the id of a job.
    """
    return f"{part}{_SECOND}{key_part(identity)}"


def is_key_of(part: str, name: str | None) -> bool:
    """Return whether a part is that of a name, or of a second thing of this name."""
    return bool(name) and part.partition(_SECOND)[0] == key_part(name or "")


def layers(keys: Iterable[Key]) -> list[list[Key]]:
    """Split keys into the fewest lists in which Dagster can tell all keys apart; in their order.

    Dagster makes `__` or `_` of the border of two parts, and `_` of `-`: `a-b` and `a_b` are one
    name to it, and `a/b` and `a_b` are one name of an input.
    """
    layers: list[list[Key]] = []
    counts: dict[str, int] = {}
    for key in keys:
        name = _plain(key)
        layer = counts.get(name, 0)
        counts[name] = layer + 1
        if layer == len(layers):
            layers.append([])
        layers[layer].append(key)
    return layers


def group_names(keys: Iterable[Key], taken: Collection[str] = ()) -> dict[Key, str]:
    """Return a group name of Dagster for each key: letters, digits and `_`; no two are equal.

    Where two would be equal, the later ones of the sorted keys end in `_2`, `_3`…

    Args:
        taken: further names that no key gets.
    """
    names: dict[Key, str] = {}
    used = set(taken)
    for key in sorted(keys):
        base = name = _plain(key)
        number = 1
        while name in used:
            number += 1
            name = f"{base}_{number}"
        used.add(name)
        names[key] = name
    return names


def _plain(key: Key) -> str:
    return _NOT_IN_NAMES.sub("_", "_".join(key))
