"""Private columns: which values a deployment shows to nobody, and what is shown in their place.

Values are replaced where they are read for people, before a filter, an order, a join or SQL sees
them. What programs read, such as user code and maintenance, is not changed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.tables import KEY_HASH_COLUMN

PRIVATE = "(private)"
"""What stands for a private value."""

UNKNOWN_BYTES = "(private: bytes of unknown type)"
"""What stands for bytes of which nothing else is known: they may contain a private value."""

_ANY_NUMBER = "**"
_REPEATED = re.compile(r"_\d+\Z")
_SALT_BYTES = 16

Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PrivateColumns:
    """The columns and fields that a deployment names as private.

    A column or field is private if its full name `pipeline.job.operator.table.column.field` ends
    with a pattern, and with it everything below. The operator may be left out. `*` stands for any
    characters of one part, `**` for any number of parts. Case, `-` or `_`, and leading `_` do not
    matter.

    Attributes:
        patterns: for example `email`, `orders.email`, `orders.*` or `billing.**.iban`.
        salt: the key of the digests that stand for private keys. Equal keys have equal digests
            under one salt only.
    """

    patterns: tuple[str, ...] = ()
    salt: bytes = field(default_factory=partial(os.urandom, _SALT_BYTES), repr=False, compare=False)

    @classmethod
    def of(cls, patterns: Iterable[str]) -> PrivateColumns:
        """Check patterns, and return the columns that they name.

        Raises:
            InputError: a pattern has an empty part.
        """
        columns = tuple(dict.fromkeys(pattern.strip() for pattern in patterns))
        for pattern in columns:
            if not all(part.strip() for part in pattern.split(".")):
                raise InputError(
                    f"the private column {pattern!r} has an empty part",
                    next_step="name it as column, table.column or job.operator.table.column; "
                    "`*` stands for any part",
                )
        return cls(columns)

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def table(self, paths: JobPaths, operator: str, table: str) -> TableMask:
        """Return what is private of one table of a job."""
        before = (*_parts(paths.pipeline or ""), *_parts(paths.job))
        tables = [table, table.rpartition(".")[0]] if "." in table else [table]  # `name.flushed`
        prefixes = [
            (*before, *between, *_parts(name))
            for name in tables
            for between in (_parts(operator), ())
        ]
        return TableMask(
            patterns=tuple(_parts(pattern) for pattern in self.patterns),
            prefixes=tuple(prefixes),
            salt=self.salt,
        )


NOTHING_PRIVATE = PrivateColumns()


@dataclass(frozen=True, slots=True)
class TableMask:
    """What is private of one table.

    Attributes:
        patterns: in parts.
        prefixes: the full names of the table, in parts.
        salt: as of `PrivateColumns`.
    """

    patterns: tuple[Names, ...]
    prefixes: tuple[Names, ...]
    salt: bytes = field(repr=False)
    _hidden: dict[Names, bool] = field(default_factory=dict, repr=False, compare=False)
    _masked: set[Names] = field(default_factory=set, repr=False, compare=False)

    def __bool__(self) -> bool:
        return bool(self.patterns)

    @property
    def masked(self) -> tuple[str, ...]:
        """The columns and fields of which values were masked so far."""
        return tuple(sorted(".".join(path) for path in self._masked))

    def hides(self, path: Sequence[str]) -> bool:
        """Return whether a column or field is private, itself or as part of one that is.

        Args:
            path: the column, and the fields that lead to the value.
        """
        return any(self._named(tuple(path[: end + 1])) for end in range(len(path)))

    def hides_leaf(self, path: Sequence[str]) -> bool:
        """Return whether a value without fields is private, itself or a part of it.

        A pattern may lead into a text, as `payload.email` does if `payload` holds JSON.
        """
        return self.hides(path) or any(
            self._ends(parts[:end], path)
            for parts in self.patterns
            for end in range(1, len(parts))
            if set(parts[end - 1]) != {"*"}
        )

    def digest(self, value: object) -> str:
        """Return what stands for a private key: equal for equal values, under one salt."""
        data = json.dumps(value, sort_keys=True, default=repr).encode()
        from hashlib import blake2b

        return f"private:{blake2b(data, key=self.salt, digest_size=8).hexdigest()}"

    def plain(self, value: Any, path: Sequence[str], *, is_key: bool = False) -> Any:
        """Mask a plain value, as JSON has it, with all of its fields.

        Args:
            path: the column, and the fields that lead to the value.
            is_key: put digests in place of private values, by which rows can be matched.
        """
        if not self.patterns or value is None:
            return value
        if self.hides(path):
            return self._stand_in(value, path, is_key)
        if isinstance(value, Mapping):
            return {
                name: self.plain(item, (*path, name), is_key=is_key) for name, item in value.items()
            }
        if isinstance(value, list):
            return [self.plain(item, path, is_key=is_key) for item in value]
        return self._stand_in(value, path, is_key) if self.hides_leaf(path) else value

    def _stand_in(self, value: Any, path: Sequence[str], is_key: bool) -> str:
        self._masked.add(tuple(path))
        return self.digest(value) if is_key else PRIVATE

    def row(self, row: Mapping[str, Any], keys: Iterable[str] = ()) -> dict[str, Any]:
        """Mask a row of plain values.

        Args:
            keys: the columns of its key. A hash of a private key is masked, too: it has no salt.
        """
        keyed = frozenset(keys)
        masked = {
            name: self.plain(value, (name,), is_key=name in keyed) for name, value in row.items()
        }
        if KEY_HASH_COLUMN in masked and any(masked[name] != row[name] for name in keyed & {*row}):
            masked[KEY_HASH_COLUMN] = PRIVATE
        return masked

    def _named(self, path: Names) -> bool:
        if path not in self._hidden:
            self._hidden[path] = any(self._ends(parts, path) for parts in self.patterns)
        return self._hidden[path]

    def _ends(self, pattern: Names, path: Sequence[str]) -> bool:
        """Return whether the full name of a column ends with a pattern."""
        forms = [_parts(".".join(path)), _parts(".".join(_REPEATED.sub("", name) for name in path))]
        return any(
            _ends_with((*prefix, *names), pattern)
            for prefix in self.prefixes
            for names in dict.fromkeys(forms)
        )


def _parts(name: str) -> Names:
    """Return the parts of a name or pattern, in the form in which they are compared."""
    parts = (part.strip().casefold().replace("-", "_") for part in name.split(".") if part)
    return tuple(part.lstrip("_") or part for part in parts)


def _ends_with(name: Names, pattern: Names) -> bool:
    if not pattern:
        return True
    if pattern[-1] == _ANY_NUMBER:
        return any(_ends_with(name[:end], pattern[:-1]) for end in range(len(name) + 1))
    if not name or not fnmatchcase(name[-1], pattern[-1]):
        return False
    return _ends_with(name[:-1], pattern[:-1])
