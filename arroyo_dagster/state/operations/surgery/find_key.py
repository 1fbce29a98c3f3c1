"""Find the rows of a key in everything that a job stores: kept epochs, unlisted files, quarantine.

Reads only; nothing is rewritten.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from arroyo_dagster.errors import FormatError, InputError, NotFoundError, StorageError
from arroyo_dagster.state.metadata.backend import ParquetBackend
from arroyo_dagster.state.model.checkpoints import Checkpoint
from arroyo_dagster.state.model.ids import Epoch, OperatorId, StatePath, TableName
from arroyo_dagster.state.model.keys import MAX_ROUTING_KEY
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.progress import OnProgress, no_progress
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyConfig,
    GlobalKeyedFiles,
    TableConfig,
    TimeFile,
)
from arroyo_dagster.state.operations.catalog.metadata_only import metadata_only_epochs
from arroyo_dagster.state.operations.gc.inventory import write_remains
from arroyo_dagster.state.operations.gc.quarantine import list_quarantines
from arroyo_dagster.state.operations.progress import counter
from arroyo_dagster.state.operations.surgery.managed.entries import internal
from arroyo_dagster.state.operations.surgery.managed.rows import (
    KeyTest,
    count_pairs,
    managed_key_condition,
    pairs_condition,
)
from arroyo_dagster.state.operations.surgery.rows import count_rows, key_condition
from arroyo_dagster.state.planning.compaction.rewrite import TableKey
from arroyo_dagster.state.storage.concurrency import concurrently
from arroyo_dagster.state.storage.local_disk import local_disk
from arroyo_dagster.state.storage.store import ObjectStore
from arroyo_dagster.state.tables.merge.conditions import KeyRows

UNLISTED, QUARANTINE = "unlisted", "quarantine"
_DATA = re.compile(r"/operator-(.+)/table-(.+?)-\d{3,}(?:-[^/]*)?\Z", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRowsFound:
    """A file with rows of the key.

    Attributes:
        epochs: the epochs that list it; none for a file that is unlisted, or in quarantine.
        place: `epochs`, `unlisted` or `quarantine`.
        rows: the stored rows of the key, older row generations included.
    """

    operator: OperatorId
    table: TableName
    path: StatePath
    place: str
    epochs: tuple[Epoch, ...]
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySearch:
    """The result of a search for a key.

    Attributes:
        found: the files with rows of it, by operator, table and path.
        files: the number of files that were searched.
        epochs: the epochs that were searched.
        unknown: what was not searched, and why.
        remains: what interrupted writes have left of files of tables, by stored name; not searched.
        versions: whether the store keeps older versions of objects, which were not searched; None
            = it cannot be asked.
    """

    found: tuple[KeyRowsFound, ...]
    files: int
    epochs: tuple[Epoch, ...]
    unknown: tuple[str, ...]
    remains: tuple[str, ...] = ()
    versions: bool | None = False


def find_key(
    store: ObjectStore,
    paths: JobPaths,
    values: Sequence[str],
    on_progress: OnProgress = no_progress,
) -> KeySearch:
    """Find the stored rows of a key in every table whose key has that form.

    Args:
        values: the values of the key columns as texts, in their order.
        on_progress: called with how many files were searched.

    Raises:
        NotFoundError: the job has no epoch.
        InputError: no table has a key of the given form.
    """
    search = _KeyFinder(store, paths, values)
    search.read_epochs()
    search.read_others()
    return search.result(on_progress)


@dataclass(slots=True)
class _KeyFinder:
    store: ObjectStore
    paths: JobPaths
    values: Sequence[str]
    configs: dict[TableKey, TableConfig] = field(default_factory=dict)
    managed: bool = False
    globals: set[TableKey] = field(default_factory=set)
    listed: dict[StatePath, tuple[TableKey, set[Epoch]]] = field(default_factory=dict)
    others: dict[StatePath, tuple[TableKey, str]] = field(default_factory=dict)
    epochs: list[Epoch] = field(default_factory=list)
    unknown: dict[str, None] = field(default_factory=dict)
    remains: tuple[str, ...] = ()
    versions: bool | None = False

    def read_epochs(self) -> None:
        backend = ParquetBackend(self.store, self.paths)
        numbers = backend.epochs()
        if not numbers:
            raise NotFoundError("the job has no checkpoint", job=self.paths.root)
        held = metadata_only_epochs(self.store, self.paths)
        for epoch in (number for number in numbers if number not in held):
            try:
                self._add(backend.load(epoch))
            except (FormatError, NotFoundError) as error:
                self.unknown[f"epoch {epoch} cannot be read: {error.message}"] = None

    def _add(self, checkpoint: Checkpoint) -> None:
        self.epochs.append(checkpoint.epoch)
        self.managed = checkpoint.progress is not None
        for operator in checkpoint.operators:
            for name, files in operator.tables.items():
                config, key = operator.configs.get(name), (operator.operator, name)
                if isinstance(files, GlobalKeyedFiles) and not self._has_keys(config):
                    self.globals.add(key)
                elif config is not None:
                    self.configs[key] = config
                    for path in files.paths:
                        self.listed.setdefault(path, (key, set()))[1].add(checkpoint.epoch)
        if any(
            name not in operator.configs
            for operator in checkpoint.operators
            for name in operator.tables
        ):
            self.unknown["a table without a configuration was not searched"] = None

    def _has_keys(self, config: TableConfig | None) -> bool:
        """Return whether a global keyed table holds keys of users: only in managed jobs."""
        return self.managed and config is not None and internal(config) is None

    def read_others(self) -> None:
        """Add the files that no epoch lists, and those in quarantine."""
        managed = f"{self.paths.maintenance}/"
        for info in self.store.list(self.paths.root):
            if info.path in self.listed or info.path.startswith(managed):
                continue
            key = _table_of(info.path)
            if key is not None and key not in self.globals:
                self.others[info.path] = key, UNLISTED
        for _, objects in list_quarantines(self.store, self.paths):
            for moved in objects:
                key = _table_of(moved.path)
                if key is not None and key not in self.globals:
                    self.others[moved.copy] = key, QUARANTINE
        names = (file.name for file in write_remains(self.store, self.paths))
        self.remains = tuple(name for name in names if _table_of(name.rpartition("#")[0]))
        for name in self.remains:
            self.unknown[f"remains of an interrupted write may hold the key: {name}"] = None
        self.versions, reason = keeps_versions(self.store)
        if self.versions is not False:
            self.unknown[f"{reason}: they may hold the key"] = None

    def result(self, on_progress: OnProgress) -> KeySearch:
        targets = [*((path, key) for path, (key, _) in self.listed.items())]
        targets += [(path, key) for path, (key, _) in self.others.items()]
        conditions = {key: self._condition(config) for key, config in self.configs.items()}
        if all(isinstance(condition, str) for condition in conditions.values()):
            raise InputError(
                f"no table of the job has a key of {len(self.values)} such values",
                job=self.paths.root,
                next_step="give one value for each column of a key, in this order",
            )
        for (operator, name), condition in conditions.items():
            if isinstance(condition, str):
                self.unknown[f"{operator}.{name} was not searched: {condition}"] = None
        left = "values" if self.managed else "global keyed tables"
        self.unknown[f"{left}, and columns that are no key, were not searched"] = None
        count = counter(on_progress, "searched files", len(targets))

        def search(one: tuple[StatePath, TableKey]) -> int | None:
            path, key = one
            condition = conditions.get(key)
            try:
                if condition is None or isinstance(condition, str):
                    return None if condition is None else 0
                config = self.configs[key].config
                if isinstance(config, ExpiringTimeKeyConfig) and isinstance(condition, KeyRows):
                    return count_rows(self.store, config, any_file(path), condition)[1]
                assert not isinstance(condition, KeyRows)
                return count_pairs(self.store, path, condition)[1]
            except (FormatError, NotFoundError):
                return None
            finally:
                count()

        hits = []
        for (path, key), rows in zip(targets, concurrently(search, targets), strict=True):
            if rows is None:
                self.unknown[f"{path} cannot be read as a file of its table"] = None
            elif rows:
                hits.append(self._found(path, key, rows))
        return KeySearch(
            found=tuple(sorted(hits, key=lambda hit: (hit.operator, hit.table, hit.path))),
            files=len(targets),
            epochs=tuple(self.epochs),
            unknown=tuple(self.unknown),
            remains=self.remains,
            versions=self.versions,
        )

    def _condition(self, config: TableConfig) -> KeyRows | KeyTest | str:
        expiring = config.config
        if not isinstance(expiring, ExpiringTimeKeyConfig):
            return pairs_condition(config, self.values)
        if self.managed:
            return managed_key_condition(expiring, self.values)
        return key_condition(expiring, self.values)

    def _found(self, path: StatePath, key: TableKey, rows: int) -> KeyRowsFound:
        epochs = self.listed[path][1] if path in self.listed else ()
        return KeyRowsFound(
            operator=key[0],
            table=key[1],
            path=path,
            place="epochs" if path in self.listed else self.others[path][1],
            epochs=tuple(sorted(epochs)),
            rows=rows,
        )


def _table_of(path: str) -> TableKey | None:
    match = _DATA.search(path)
    return None if match is None else (OperatorId(match[1]), TableName(match[2]))


def any_file(path: StatePath) -> TimeFile:
    """Return an entry for a file whose statistics are not known: no range excludes it."""
    return TimeFile(
        epoch=Epoch(0),
        path=path,
        min_routing_key=0,
        max_routing_key=MAX_ROUTING_KEY,
        max_timestamp_micros=0,
    )


# ---- whether a store keeps older versions of objects that are replaced or deleted ----------------


def keeps_versions(store: ObjectStore) -> tuple[bool | None, str]:
    """Return whether a store keeps older versions, and a sentence about it.

    None: the store cannot be asked, for example because the credentials have no right to.
    """
    if local_disk(store) is not None:
        return False, "local disk keeps no versions"
    ask = getattr(store, "keeps_versions", None)
    inner: object = store
    while ask is None and (inner := getattr(inner, "inner", None)) is not None:
        ask = getattr(inner, "keeps_versions", None)
    try:
        answer = None if ask is None else ask()
        reason = "this store is not asked"
    except StorageError as error:
        answer, reason = None, error.message
    if answer is None:
        return None, f"whether the bucket keeps versions is not known ({reason})"
    kept = "the bucket keeps versions of replaced and deleted objects, which were not searched"
    return answer, kept if answer else "the store keeps no versions"
