"""Findings of `verify` about the values of an epoch, table by table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import OperatorId, StatePath, TableName
from arroyo_dagster.state.model.tables import GlobalKeyedFiles
from arroyo_dagster.state.operations.engines import HERE, ItemRunner, Threads
from arroyo_dagster.state.operations.verify.keys import (
    KeyedEpoch,
    find_shared_keys,
    keyed_epochs,
)
from arroyo_dagster.state.operations.verify.rows import CheckDepth
from arroyo_dagster.state.planning.engines import WorkAmount
from arroyo_dagster.state.planning.verify.files import FileFacts, ListedFile
from arroyo_dagster.state.planning.verify.findings import KEEP_AND_REPORT, Finding, error
from arroyo_dagster.state.planning.verify.restore import shared_key_findings, unknown_table_findings
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.known.catalogue import Catalogue


def value_findings(
    store: ObjectStore,
    checkpoint: Checkpoint,
    listed: Mapping[StatePath, ListedFile],
    files: Mapping[StatePath, FileFacts],
    look: CheckDepth,
    items: ItemRunner = HERE,
) -> Iterator[Finding]:
    """Report unknown tables, keys that several subtasks wrote, and commit data that does not
    decode.

    Args:
        files: the facts of the files that exist.
        items: reads the keys of the files; in this process, or on Spark.

    Raises:
        StorageError: the store failed.
    """
    if look.level < 3:
        return
    unknown: dict[tuple[OperatorId, TableName], str] = {}
    for path, file in listed.items():
        facts = files.get(path)
        if facts is not None and facts.rows is not None and facts.rows.unknown:
            unknown.setdefault((file.operator, file.config.table), facts.rows.unknown)
    yield from unknown_table_findings(unknown)
    epochs = list(_keyed_epochs(checkpoint, files))
    weights = [sum(files[path].size_bytes for path in epoch.paths) for epoch in epochs]
    count = sum(len(list(epoch.paths)) for epoch in epochs)
    choice = items.choose("compare keys", WorkAmount(files=count, size_bytes=sum(weights)))
    find = partial(find_shared_keys, store)
    # One at a time: the keys of an epoch are in memory.
    shared = items.run(choice, find, epochs, weights, threads=Threads(count=1))
    several = [keys for keys in shared if keys is not None]
    yield from shared_key_findings(several, managed=checkpoint.progress is not None)
    if checkpoint.progress is None:
        yield from _commit_data(checkpoint, look.catalogue)


def _keyed_epochs(
    checkpoint: Checkpoint, files: Mapping[StatePath, FileFacts]
) -> Iterator[KeyedEpoch]:
    for operator in checkpoint.operators:
        for name, tables in operator.tables.items():
            config = operator.configs.get(name)
            if config is not None and isinstance(tables, GlobalKeyedFiles):
                readable = [path for path in tables.files if path in files and files[path].rows]
                yield from keyed_epochs(operator.operator, config, readable)


def _commit_data(checkpoint: Checkpoint, catalogue: Catalogue) -> Iterator[Finding]:
    for operator in checkpoint.operators:
        for name, by_subtask in operator.commit_data().items():
            config = operator.configs.get(name)
            if config is None:
                continue  # reported as an error of the configuration
            typed = any(table.commit for table in catalogue.find(operator.operator, config))
            for subtask, data in by_subtask.items():
                if not data or not typed:
                    continue
                if catalogue.decode_commit_data(operator.operator, config, data) is None:
                    dotted = f"{operator.operator}.{name}"
                    evidence = f"the commit data of subtask {subtask} of {dotted} does not decode"
                    yield error("commit-undecodable", checkpoint.ref, evidence, KEEP_AND_REPORT)
