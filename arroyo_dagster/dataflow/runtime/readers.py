"""Complete states for user code: those of other services, and its own as last published.

Source: sdf-states.md 1.9, 3.2, 4.1, 8.3.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from arroyo_dagster.dataflow.definition.definition import StateDef, ValueKind
from arroyo_dagster.dataflow.views.frames import Frame
from arroyo_dagster.dataflow.views.lookup import Pairs
from arroyo_dagster.dataflow.views.snapshots import SnapshotReader
from arroyo_dagster.dataflow.views.sql import Tables
from arroyo_dagster.dataflow.views.view import OwnerJob, StateView
from arroyo_dagster.errors import NotFoundError
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import Epoch
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.storage.store import ObjectStore


class Readers:
    """Snapshots of the states that one service sees. A state is read at its first use.

    Args:
        store: the object store of the states.
        paths: the jobs of the states' owners, by name.
        states: the states as the service sees them: owned ones and references.
    """

    def __init__(
        self, store: ObjectStore, paths: Mapping[str, JobPaths], states: Mapping[str, StateDef]
    ) -> None:
        self._states = dict(states)
        self._owners = {owner: OwnerJob(store, where) for owner, where in paths.items()}
        self._readers = {name: SnapshotReader(store, state) for name, state in states.items()}
        self._epochs: dict[str, Epoch | None] = {}
        self._now_ms = 0
        self._views: dict[str, StateView] = {}
        self._wholes: dict[str, Frame | Pairs] = {}
        self._tables: Tables | None = None

    def pin(self, epochs: Mapping[str, Epoch | None], now_ms: int) -> None:
        """Set the epoch of each owner to read, and the time at which TTLs are checked."""
        if epochs != self._epochs or now_ms != self._now_ms:
            self._epochs, self._now_ms = dict(epochs), now_ms
            self._views.clear()
            self._wholes.clear()
            self._tables = None

    @property
    def epochs(self) -> Mapping[str, Epoch | None]:
        """The pinned epoch of each owner; None if it has none yet."""
        return self._epochs

    def tables_in(self, words: Collection[str], *, without: Collection[str] = ()) -> Tables:
        """Return the arrow-row states that a query may name as tables, and read no others.

        Args:
            words: the words of the query in lower case.
            without: states to leave out.
        """
        tables = []
        for name, state in self._states.items():
            if state.value_kind is not ValueKind.ROW or name in without:
                continue
            spelled = (alias.replace("-", "_").lower() for alias in (state.table, *state.aliases))
            if any({*alias.split("_")} <= {*words} or alias in words for alias in spelled):
                tables.append(self._view(name).table())
        return Tables(tables)

    def tables(self) -> Tables:
        """Return every arrow-row state as a table for `sql`."""
        if self._tables is None:
            rows = [
                name for name, state in self._states.items() if state.value_kind is ValueKind.ROW
            ]
            others = {state.table for name, state in self._states.items() if name not in rows}
            self._tables = Tables(
                [self._view(name).table() for name in rows], primitives=frozenset(others)
            )
        return self._tables

    def whole(self, name: str) -> Frame | Pairs:
        """Return a state as a whole: a frame, or all pairs of key and value.

        The same object for all records of an epoch, so that its look-up by key is made once.
        """
        contents = self._wholes.get(name)
        if contents is None:
            view = self._view(name)
            is_row = self._states[name].value_kind is ValueKind.ROW
            contents = self._wholes[name] = view.whole(self.tables() if is_row else Tables(()))
        return contents

    def _view(self, name: str) -> StateView:
        view = self._views.get(name)
        if view is None:
            state = self._states[name]
            head = self._head(state.owner)
            frame = self._readers[name].at(head)
            now_ms = self._now_ms
            view = StateView(state, head.epoch if head else None, frame, lambda: now_ms)
            self._views[name] = view
        return view

    def _head(self, owner: str) -> Checkpoint | None:
        epoch = self._epochs.get(owner)
        if epoch is None:
            return None
        try:
            return self._owners[owner].load(epoch)
        except NotFoundError:
            return self._owners[owner].newest()  # deleted by gc since this epoch began
