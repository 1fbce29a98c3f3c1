"""The stored states of one service as its newest epoch has them, read without its definition."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import polars as pl

from arroyo_dagster.dataflow.definition.definition import Dataflow, StateDef, StateForm, ValueKind
from arroyo_dagster.dataflow.definition.names import column_attribute, mangled, state_accessor
from arroyo_dagster.dataflow.definition.types import Column, ScalarType
from arroyo_dagster.dataflow.definition.windows import WindowDef, WindowKind
from arroyo_dagster.dataflow.storage.columns import WINDOW_END, WINDOW_START
from arroyo_dagster.dataflow.storage.engine_tables import DROPPED, read_schemas
from arroyo_dagster.dataflow.storage.state_tables import FLUSHED
from arroyo_dagster.dataflow.views.snapshots import FLUSH, STATES, SnapshotReader, Where
from arroyo_dagster.dataflow.views.view import OwnerJob, service_paths
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import OperatorId, TableName
from arroyo_dagster.state.storage.store import ObjectStore

_ANY_WINDOW = WindowDef(kind=WindowKind.TUMBLING, duration_ms=1, slide_ms=1)


@dataclass(frozen=True, slots=True)
class StoredService:
    """The states of one service at its newest ready epoch.

    Attributes:
        head: the epoch.
        schemas: the stored schemas by state, as JSON texts.
        dropped: those of states that were dropped from the definition.
    """

    name: str
    store: ObjectStore
    head: Checkpoint
    schemas: Mapping[str, str]
    dropped: Mapping[str, str]

    def definition(self, state: str, *, dropped: bool) -> StateDef:
        """Return a definition with which stored rows can be read."""
        schema = json.loads((self.dropped if dropped else self.schemas)[state])
        columns = tuple(
            Column(name=name, type=ScalarType(kind), attribute=column_attribute(name))
            for name, kind in schema.get("columns") or ()
        )
        scalar = schema.get("scalar")
        return StateDef(
            name=state,
            owner=self.name,
            form=StateForm.TYPED,
            key_type=ScalarType(schema["key"]),
            value_kind=ValueKind(schema["kind"]),
            scalar_type=None if scalar is None else ScalarType(scalar),
            columns=columns,
            accessor=state_accessor(state),
            table=mangled(state),
            window=_ANY_WINDOW if schema.get("windowed") else None,
            api_version="0.6.0",
            path="",
            line=0,
        )

    def places(self, state: str, *, dropped: bool) -> Iterator[Where]:
        """Yield the tables that exist of a state: of its keys, and of its window closed last."""
        for operator, name in ((STATES, state), (FLUSH, f"{state}{FLUSHED}")):
            found = self.head.operator(DROPPED if dropped else operator)
            if found is not None and name in found.tables:
                yield Where(OperatorId(found.operator), TableName(name))

    def frames(self, state: str, *, dropped: bool) -> Iterator[pl.DataFrame]:
        """Yield the rows of each table of a state: `_key` and its columns, or `value`."""
        definition = self.definition(state, dropped=dropped)
        for where in self.places(state, dropped=dropped):
            live = not where.table.endswith(FLUSHED)
            reader = SnapshotReader(self.store, definition, live=live, where=where)
            yield reader.at(self.head).drop(WINDOW_START, WINDOW_END, strict=False)

    def rows(self, state: str, *, dropped: bool) -> int:
        """Return the number of rows of a state, those of the window that closed last included."""
        return sum(frame.height for frame in self.frames(state, dropped=dropped))


def read_stored(store: ObjectStore, dataflow: Dataflow, service: str) -> StoredService | None:
    """Read what is stored of a service; None = it has no epoch yet.

    Raises:
        CheckpointError: its newest epoch cannot be read (E51).
    """
    head = OwnerJob(store, service_paths(dataflow, service)).newest()
    if head is None:
        return None
    schemas, dropped = (read_schemas(store, head.operator(name)) for name in (STATES, DROPPED))
    return StoredService(service, store, head, schemas, dropped)
