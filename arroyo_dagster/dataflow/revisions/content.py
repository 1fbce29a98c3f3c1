"""The tables of an epoch, taken out and put in to make the content of the next one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from arroyo_dagster.dataflow.storage.engine_tables import SCHEMAS_CONFIG
from arroyo_dagster.dataflow.views.snapshots import STATES
from arroyo_dagster.state.codec.bincode.codec import codec_for
from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.ids import OperatorId, TableName
from arroyo_dagster.state.model.tables import GlobalKeyedFiles, TableConfig, TableFiles
from arroyo_dagster.state.operations.restore.revision import RevisionWriter


@dataclass(frozen=True, slots=True)
class RevisedTable:
    """A table of an epoch: its configuration and its files."""

    config: TableConfig
    files: TableFiles


class RevisedTables:
    """The operators of an epoch, by table."""

    def __init__(self, base: Checkpoint) -> None:
        self._base = base
        self._tables = {
            one.operator: {
                name: RevisedTable(one.configs[name], files) for name, files in one.tables.items()
            }
            for one in base.operators
        }

    def take(self, operator: OperatorId, table: str) -> RevisedTable | None:
        """Remove a table, and return it."""
        return self._tables.get(operator, {}).pop(TableName(table), None)

    def put(self, operator: OperatorId, table: RevisedTable) -> None:
        """Add a table, or replace it."""
        self._tables.setdefault(operator, {})[table.config.table] = table

    def done(self) -> tuple[OperatorCheckpoint, ...]:
        """Return the operators; without tables, only those that the epoch has already."""
        known = {one.operator: one for one in self._base.operators}
        for name in self._tables.keys() - known.keys():
            # An operator that is new here expires its rows by the watermark of the states.
            known[name] = replace(known[STATES], operator=name)
        return tuple(
            replace(
                known[name],
                tables={table: one.files for table, one in sorted(tables.items())},
                configs={table: one.config for table, one in sorted(tables.items())},
            )
            for name, tables in self._tables.items()
        )

    def drop(self, operator: OperatorId) -> None:
        """Remove an operator with all its tables: the next run starts it anew."""
        self._tables.pop(operator, None)

    def put_pairs(
        self,
        operator: OperatorId,
        config: TableConfig,
        pairs: Mapping[str, str],
        writer: RevisionWriter,
    ) -> None:
        """Replace a table of texts, written as one file; without pairs, remove it."""
        self.take(operator, config.table)
        if not pairs:
            return
        text = codec_for(str)
        encoded = {text.encode(key): text.encode(value) for key, value in pairs.items()}
        path = writer.put_pairs(operator, config.table, encoded)
        self.put(operator, RevisedTable(config, GlobalKeyedFiles(files=(path,))))

    def put_schemas(
        self, operator: OperatorId, schemas: Mapping[str, str], writer: RevisionWriter
    ) -> None:
        """Replace the stored schemas of an operator."""
        self.put_pairs(operator, SCHEMAS_CONFIG, schemas, writer)
