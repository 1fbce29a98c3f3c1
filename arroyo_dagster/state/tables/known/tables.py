"""Description of a known table: its owner, and the types of its keys and values."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from arroyo_dagster.state.model.tables import TableConfig, TableKind
from arroyo_dagster.state.model.types import Type, describe


@dataclass(frozen=True, slots=True)
class LaterType:
    """A type in a module of this package that is loaded when the type is needed."""

    module: str
    name: str

    def load(self) -> Any:
        """Return the type."""
        return getattr(import_module(f"{__package__}.{self.module}"), self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTable:
    """A table that an operator or connector registers, and how to decode it.

    Attributes:
        owner: the operator or connector that keeps it, such as `Kafka source`.
        holds: the meaning of one entry, or row; for people.
        table: the name of the table; None = any.
        description: the exact description that the owner gives it; None = any.
        operator: a pattern of operator ids, such as `source_orders_*`; None = any.
        state_version: the version of its values; None = any.
        key, value: Python types, descriptions of types, or a `LaterType`, as bincode; None for both
            = the owner writes no entries, or the table holds rows, which need no types.
        commit: the type of a subtask's data for the second phase of a commit; None = no such data.
        releases: the releases of Arroyo that write this form, if not all.
    """

    owner: str
    holds: str
    table: str | None = None
    description: str | None = None
    operator: str | None = None
    kind: TableKind = TableKind.GLOBAL_KEYED
    state_version: int | None = None
    key: Any = None
    value: Any = None
    commit: Any = None
    releases: str = ""

    def __post_init__(self) -> None:
        # Types that cannot be described are refused here, not when the table is first read.
        for part in (self.key, self.value, self.commit):
            if not isinstance(part, LaterType):
                describe(part)

    @property
    def key_type(self) -> Type:
        """The encoding of keys."""
        return _described(self.key)

    @property
    def value_type(self) -> Type:
        """The encoding of values."""
        return _described(self.value)

    @property
    def commit_type(self) -> Type:
        """The encoding of a subtask's data for the second phase of a commit."""
        return _described(self.commit)

    @property
    def has_entries(self) -> bool:
        """Whether the owner ever writes entries."""
        return self.kind is TableKind.GLOBAL_KEYED and (self.key, self.value) != (None, None)

    def is_of(self, operator: str, config: TableConfig) -> bool:
        """Whether this describes a table of an operator; the state version is not compared."""
        return (
            self.kind is config.kind
            and self.table in (None, config.table)
            and self.description in (None, config.config.description)
            and (self.operator is None or fnmatch.fnmatchcase(operator, self.operator))
        )

    def has_version(self, version: int) -> bool:
        """Whether values of a state version have this form."""
        return self.state_version in (None, version)


def _described(part: Any) -> Type:
    return describe(part.load() if isinstance(part, LaterType) else part)
