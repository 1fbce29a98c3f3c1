"""Immutable views of states at one epoch: lookup by key, frames and SQL.

    views = Views(store, dataflow)
    view = views.view("count-words.count-per-word")
    view.get("apple")                       # {"count": 3}, or None
    view.sql("select _key, count from count_per_word order by count desc limit 3")
    views.refresh()                         # True if an owner had a newer epoch

A reader sees only what the builder has published. Neither waits for the other.

Source: sdf-states.md 1.9, 2.8, 2.10, 4.1; error E51.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import polars as pl

from arroyo_dagster.dataflow.definition.definition import Dataflow, StateDef, StateForm, ValueKind
from arroyo_dagster.dataflow.errors import CheckpointError
from arroyo_dagster.dataflow.storage.columns import KEY, UPDATED_AT, WINDOW_END, WINDOW_START
from arroyo_dagster.dataflow.storage.state_tables import VALUE
from arroyo_dagster.dataflow.views.frames import Frame, KeyLookup, Pairs
from arroyo_dagster.dataflow.views.snapshots import SnapshotReader, Where
from arroyo_dagster.dataflow.views.sql import StateTable, Tables
from arroyo_dagster.errors import FormatError, InputError, NotFoundError
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.checkpoints import Checkpoint, CheckpointState
from arroyo_dagster.state.model.clock import Clock, wall_clock_ms
from arroyo_dagster.state.model.ids import Epoch, JobId
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.planning.privacy import (
    NOTHING_PRIVATE,
    PRIVATE,
    PrivateColumns,
    TableMask,
)
from arroyo_dagster.state.storage.store import ObjectStore


def service_paths(dataflow: Dataflow, service: str) -> JobPaths:
    """Return the paths of a service's job."""
    return JobPaths(JobId(service), dataflow.pipeline)


class OwnerJob:
    """The job of a service, for readers of its states."""

    def __init__(self, store: ObjectStore, paths: JobPaths) -> None:
        self._store, self._paths = store, paths
        self._backend = ParquetBackend(store, paths)
        self._newest: Checkpoint | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return (OwnerJob, (self._store, self._paths))

    def newest(self) -> Checkpoint | None:
        """Return the newest ready epoch; None = there is none yet.

        Raises:
            CheckpointError: there are epochs, and the newest cannot be read (E51).
        """
        epochs = self._epochs()
        while True:
            try:
                for epoch in reversed(epochs):
                    newest = self._newest
                    if newest is not None and newest.epoch >= epoch:
                        return newest
                    checkpoint = self.load(epoch)
                    if checkpoint.state is CheckpointState.READY:
                        self._newest = checkpoint
                        return checkpoint
                return None
            except NotFoundError as error:
                before, epochs = epochs, self._epochs()
                if epochs == before:  # else gc deleted an epoch while it was read
                    raise unreadable(error, self._backend, epochs[-1]) from error

    def load(self, epoch: Epoch) -> Checkpoint:
        """Load one epoch.

        Raises:
            NotFoundError: it does not exist, or no longer exists.
            CheckpointError: it cannot be read (E51).
        """
        if self._newest is not None and self._newest.epoch == epoch:
            return self._newest
        try:
            return self._backend.load(epoch)
        except FormatError as error:
            raise unreadable(error, self._backend, epoch) from error

    def _epochs(self) -> list[Epoch]:
        try:
            return self._backend.epochs()
        except NotFoundError:
            return []


def unreadable(
    error: FormatError | NotFoundError, backend: ParquetBackend, epoch: Epoch
) -> CheckpointError:
    """Return the error for an owner's checkpoint that cannot be read (E51)."""
    return CheckpointError(
        f"the state cannot be read: {error.message}",
        number="E51",
        job=backend.paths.root,
        epoch=epoch,
        path=error.facts.get("path"),
        url=backend.store.url,
        next_step="check it with `arroyo-state verify`; nothing was deleted",
    )


@dataclass(frozen=True)
class StateView:
    """One state at one epoch. It is immutable, except that rows disappear when their TTL expires.

    Attributes:
        state: the definition of the state.
        epoch: the epoch of the owner; None = the owner has no epoch yet, and the view no rows.
        stored: the stored rows, expired ones included.
        clock: the clock that expires rows, in epoch milliseconds.
        star_includes_updated_at: whether `select *` includes `_updated_at`.
    """

    state: StateDef
    epoch: Epoch | None
    stored: pl.DataFrame = field(repr=False)
    clock: Clock = field(default=wall_clock_ms, repr=False)
    star_includes_updated_at: bool = False
    _until: list[Any] = field(default_factory=list, repr=False, compare=False)

    def get(self, key: str | int | bool) -> Any:
        """Return the value of a key: a dict of an arrow-row's columns, or a scalar; None = no row.

        Takes the same time at any number of keys.
        """
        index = self._lookup.find(key)
        if index is None:
            return None
        row = self.stored.row(index, named=True)
        if self._ttl_ms is not None and self._hidden(row[UPDATED_AT]):
            return None
        if self.state.value_kind is not ValueKind.ROW:
            return row[VALUE]
        return {column.name: row[column.name] for column in self.state.columns}

    def frame(self) -> pl.DataFrame:
        """Return the rows: `_key`, the columns and `_updated_at`; if primitive, `_key`, `value`."""
        hidden = [WINDOW_START, WINDOW_END]
        if self.state.value_kind is not ValueKind.ROW:
            hidden.append(UPDATED_AT)
        return self._unexpired().drop(hidden, strict=False)

    def pairs(self) -> Pairs:
        """Return every key and value of a primitive state, sorted by key."""
        return Pairs(self.frame())

    def whole(self, tables: Tables) -> Frame | Pairs:
        """Return the state as user code reads it: a frame, or pairs of a primitive state.

        Args:
            tables: the tables that queries of the frame see.
        """
        if self.state.value_kind is not ValueKind.ROW:
            return self.pairs()
        table = self.table()
        return Frame(table.plain, tables, table.name)

    def sql(self, text: str, params: Mapping[str, Any] | None = None) -> pl.DataFrame:
        """Query the state, by its name with underscores, or with dashes in back-ticks.

        A primitive state has the columns `_key` and `value`. Errors as in `sdf.sql`.
        """
        return self.tables().sql(text, params)

    def windows(self) -> list[tuple[int, int]]:
        """Return the start and end of the windows of all rows, in epoch milliseconds, by end.

        Empty without windows.
        """
        if WINDOW_START not in self.stored.columns:
            return []
        windows = self.stored.select(WINDOW_START, WINDOW_END).unique().sort(WINDOW_END)
        return list(windows.rows())

    def table(self) -> StateTable:
        """Return the state as a table for SQL."""
        if not self._until or self._until[0] is None or self.clock() >= self._until[0]:
            self._refresh_table()
        table: StateTable = self._until[1]
        return table

    def tables(self) -> Tables:
        """Return the state as the only table in scope."""
        table = self.table()
        if len(self._until) < 3:
            self._until.append(Tables([table], self.star_includes_updated_at))
        tables: Tables = self._until[2]
        return tables

    def _refresh_table(self) -> None:
        aliases = (*self.state.aliases, _literal_name(self.state))
        table = StateTable(self.state.table, self.frame(), tuple(dict.fromkeys(aliases)))
        self._until[:] = [self._next_expiry(), table]

    def oldest_ms(self) -> int | None:
        """Return the earliest update time of the rows; None = there are none, or no times."""
        if UPDATED_AT not in self.stored.columns:
            return None
        return self._unexpired()[UPDATED_AT].cast(pl.Int64).min()  # type: ignore[return-value]

    def _next_expiry(self) -> float:
        """Return the time at which the next row expires, in epoch milliseconds."""
        ttl, oldest = self._ttl_ms, None
        if ttl is not None:
            oldest = self.oldest_ms()
        return float("inf") if ttl is None or oldest is None else float(oldest) + ttl

    def _unexpired(self) -> pl.DataFrame:
        ttl = self._ttl_ms
        if ttl is None:
            return self.stored
        return self.stored.filter(pl.col(UPDATED_AT).cast(pl.Int64) > self.clock() - ttl)

    def _hidden(self, updated_at: Any) -> bool:
        ttl = self._ttl_ms
        return ttl is not None and self.clock() - round(updated_at.timestamp() * 1000) >= ttl

    @property
    def _ttl_ms(self) -> int | None:
        # A state that was stored as pairs has no update times: its owner refuses a ttl.
        return self.state.ttl_ms if UPDATED_AT in self.stored.columns else None

    @cached_property
    def _lookup(self) -> KeyLookup:
        return KeyLookup(self.stored)


def _literal_name(state: StateDef) -> str:
    """Return the name of the state in its owner's YAML."""
    return state.ref.state if state.ref is not None else state.name


class Views:
    """Views of the states of a dataflow, each owner at one epoch.

    Args:
        store: the object store of the states.
        dataflow: the definition.
        clock: the clock that expires rows, in epoch milliseconds.
        star_includes_updated_at: whether `select *` includes `_updated_at`, which SDF omits.
        private: the columns that are masked in every view. User code needs views without.

    Raises:
        CheckpointError: see `refresh`.
    """

    def __init__(
        self,
        store: ObjectStore,
        dataflow: Dataflow,
        *,
        clock: Clock = wall_clock_ms,
        star_includes_updated_at: bool = False,
        private: PrivateColumns = NOTHING_PRIVATE,
    ) -> None:
        self._store = store
        self._dataflow = dataflow
        self._clock = clock
        self._star = star_includes_updated_at
        self._private = private
        owned = [state for state in dataflow.states if state.form is StateForm.TYPED]
        self.states = {f"{state.owner}.{state.name}": state for state in owned}
        owners = sorted({state.owner for state in owned})
        self._owners = {owner: OwnerJob(store, service_paths(dataflow, owner)) for owner in owners}
        self._readers: dict[tuple[str, bool], SnapshotReader] = {}
        self._views: dict[tuple[str, bool], StateView] = {}
        self._heads: dict[str, Checkpoint | None] = {}
        self.refresh()

    def refresh(self) -> bool:
        """Move to the owners' newest epochs, and return whether one was newer.

        Until the next `refresh`, all states of one owner are read at the same epoch.

        Raises:
            CheckpointError: the newest epoch of an owner cannot be read (E51).
        """
        heads = {owner: job.newest() for owner, job in self._owners.items()}
        changed = {key: head.epoch if head else None for key, head in heads.items()} != self.epochs
        self._heads = heads
        if changed:
            self._views.clear()
        return changed

    @property
    def epochs(self) -> dict[str, Epoch | None]:
        """The epoch of every owner; None = none yet."""
        return {owner: head.epoch if head else None for owner, head in self._heads.items()}

    def head(self, owner: str) -> Checkpoint | None:
        """Return the epoch at which an owner's states are read; None = it has no epoch yet, or owns
        no state.
        """
        return self._heads.get(owner)

    def state(self, state: str) -> StateDef:
        """Return the definition of a state, by its name as in `view`. Errors as in `view`."""
        return self.states[self._named(state)]

    def view(self, state: str, *, live: bool = False) -> StateView:
        """Return the view of a state.

        Args:
            state: `service.state`, or the name of the state if it is unique.
            live: for a windowed state, read the open windows, not the one that closed last.

        Raises:
            InputError: there is no such state, or more than one.
            CheckpointError: a file of it cannot be read (E51).
        """
        name = self._named(state)
        state_view = self._views.get((name, live))
        if state_view is None:
            state_view = self._views[name, live] = self._load(name, live)
        return state_view

    def sql(self, text: str, params: Mapping[str, Any] | None = None) -> pl.DataFrame:
        """Query the arrow-row states of the dataflow. Errors as in `sdf.sql`."""
        return self.tables().sql(text, params)

    def tables(self) -> Tables:
        """Return every arrow-row state as a table for SQL."""
        rows = {
            name: state for name, state in self.states.items() if state.value_kind is ValueKind.ROW
        }
        others = {state.table for name, state in self.states.items() if name not in rows}
        return Tables([self.view(name).table() for name in rows], self._star, frozenset(others))

    def _named(self, wanted: str) -> str:
        if wanted in self.states:
            return wanted
        names = [name for name, state in self.states.items() if wanted in (state.name, state.table)]
        if len(names) != 1:
            raise InputError(
                f"no state is named `{wanted}`"
                if not names
                else f"{len(names)} states are named `{wanted}`",
                number="E47",
                states=sorted(self.states),
                next_step="name it as service.state",
            )
        return names[0]

    def _load(self, name: str, live: bool) -> StateView:
        state = self.states[name]
        reader = self._readers.get((name, live))
        if reader is None:
            reader = self._readers[name, live] = SnapshotReader(self._store, state, live=live)
        head = self._heads[state.owner]
        try:
            frame = reader.at(head)
        except (FormatError, NotFoundError) as error:
            assert head is not None
            backend = ParquetBackend(self._store, service_paths(self._dataflow, state.owner))
            raise unreadable(error, backend, head.epoch) from error
        frame = mask_frame(frame, mask_of(self._private, self._dataflow, state))
        return StateView(state, head.epoch if head else None, frame, self._clock, self._star)


def view(store: ObjectStore, dataflow: Dataflow, state: str) -> StateView:
    """Return the view of one state at its owner's newest ready epoch; see `Views`."""
    return Views(store, dataflow).view(state)


__all__ = ["Frame", "OwnerJob", "StateView", "Views", "service_paths", "view"]


# ---- masks the private columns of a state before a view, SQL or a sample sees it -----------------

_ENGINE = frozenset({WINDOW_START, WINDOW_END, UPDATED_AT})
"""Columns of the engine, without which rows could not expire."""


def mask_of(private: PrivateColumns, dataflow: Dataflow, state: StateDef) -> TableMask:
    """Return what is private of a state."""
    paths = JobPaths(JobId(state.owner), dataflow.pipeline)
    where = Where.of(state, live=True)
    return private.table(paths, where.operator, where.table)


def private_columns(frame: pl.DataFrame, mask: TableMask) -> list[str]:
    """Return the private columns of a frame of `SnapshotReader`."""
    return [name for name in frame.columns if name not in _ENGINE and mask.hides_leaf((name,))]


def mask_frame(frame: pl.DataFrame, mask: TableMask) -> pl.DataFrame:
    """Mask the private columns of a frame of `SnapshotReader`.

    Texts become `(private)`, private keys digests, other values null: columns keep their types.
    Rows stay sorted by window and key.
    """
    private = private_columns(frame, mask)
    texts = {name: PRIVATE if frame.schema[name] == pl.String else None for name in private}
    frame = frame.with_columns(
        pl.lit(text, frame.schema[name]).alias(name) for name, text in texts.items() if name != KEY
    )
    if KEY not in private:
        return frame
    digests = pl.Series(KEY, [mask.digest(key) for key in frame[KEY]], pl.String)
    names = [name for name in (WINDOW_START, WINDOW_END, KEY) if name in frame.columns]
    return frame.with_columns(digests).sort(names)
