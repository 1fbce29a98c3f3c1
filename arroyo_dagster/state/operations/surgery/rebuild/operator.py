"""The metadata of one operator, written anew from its data files and an older epoch; the epoch as
it would be, and refusals that both layouts share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from arroyo_dagster.errors import FormatError, InputError, ProtocolError
from arroyo_dagster.state.model.changes import ChangeKind, JobHead, is_change_of
from arroyo_dagster.state.model.checkpoints import Checkpoint, OperatorCheckpoint
from arroyo_dagster.state.model.ids import Epoch, OperatorId, StatePath, TableName, WorkerGeneration
from arroyo_dagster.state.model.layout import JobPaths, is_compacted, written_epoch
from arroyo_dagster.state.model.surgery.rebuild import RebuiltTable
from arroyo_dagster.state.model.tables import (
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    GlobalKeyedFiles,
    TableConfig,
    TableFiles,
    TimeFile,
)
from arroyo_dagster.state.operations.catalog.footers import read_stored_file
from arroyo_dagster.state.operations.gc.pins import read_pins
from arroyo_dagster.state.storage.store import ObjectInfo, ObjectStore, read_optional
from arroyo_dagster.state.storage.wrappers import Extended

_T = TypeVar("_T")


def cannot_rebuild(paths: JobPaths, epoch: Epoch, reason: str) -> ProtocolError:
    """Return the error of metadata that cannot be known."""
    return ProtocolError(
        f"the metadata of epoch {epoch} cannot be rebuilt: {reason}",
        job=paths.root,
        epoch=epoch,
        next_step="nothing was changed; restore it from a copy, or let the job start from an "
        "older epoch",
    )


@dataclass(frozen=True, slots=True)
class LostEpoch:
    """An epoch of which metadata is lost: its number, its times, and which run wrote it.

    Attributes:
        worker_generation: None in the legacy layout.
    """

    epoch: Epoch
    start_time_micros: int
    finish_time_micros: int
    worker_generation: WorkerGeneration | None = None


@dataclass(slots=True)
class LostOperator:
    """An operator whose metadata is missing or damaged at an epoch.

    Attributes:
        older: the readable epochs before, newest first; at least one.
        there: the operators of the epoch that can be read.
        listing: every object of the job.
        tables, doubts: what `rebuilt` found.
        unlisted: files that the lost metadata may have listed.
    """

    paths: JobPaths
    name: OperatorId
    lost: LostEpoch
    older: Sequence[Checkpoint]
    there: Sequence[OperatorCheckpoint]
    listing: Mapping[StatePath, ObjectInfo]
    tables: list[RebuiltTable] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    unlisted: list[StatePath] = field(default_factory=list)

    @property
    def epoch(self) -> Epoch:
        return self.lost.epoch

    def rebuilt(self, store: ObjectStore, named: Epoch | None) -> OperatorCheckpoint:
        """Return the metadata as it would be.

        Args:
            named: the newest ready epoch that the job's controller names.

        Raises:
            ProtocolError: it cannot be known.
            FormatError: a data file is broken.
        """
        source, name = self.older[0], self.name
        was = source.operator(name)
        if was is None:
            raise self._unknown(f"epoch {source.epoch} has no operator {name}")
        self._check_same_run()
        configs = self._configs(was)
        files = self._files(was, configs)
        tables: dict[TableName, TableFiles] = {}
        for table, config in configs.items():
            rebuilt = self._table(store, was, config, files[table])
            if rebuilt.paths:
                tables[table] = rebuilt
        if was.needs_commit:
            self._doubt_commit(named)
        self._doubt_watermark(was)
        return replace(
            was,
            epoch=self.epoch,
            start_time_micros=self.lost.start_time_micros,
            finish_time_micros=self.lost.finish_time_micros,
            tables=tables,
            configs={table: configs[table] for table in tables},
        )

    def _doubt_watermark(self, was: OperatorCheckpoint) -> None:
        if was.min_watermark_micros is None:
            self.doubts.append(f"{self.name}: it has no watermark, as at epoch {was.epoch}")
            return
        self.doubts.append(
            f"{self.name}: the watermark is that of epoch {was.epoch}: a restore also loads rows "
            "that expired since, and windows that closed since are emitted again; "
            "`arroyo-state edit watermark` sets another"
        )

    def _doubt_commit(self, named: Epoch | None) -> None:
        name = self.name
        if named is None or named < self.epoch:
            who = "no commit marker says" if self.lost.worker_generation else "no source says"
            raise self._unknown(
                f"{name} commits in two phases: its commit data is lost, and {who} that the commit "
                "was finished"
                + ("" if self.lost.worker_generation else " (--arroyo-api or --arroyo-db does)")
            )
        evidence = f"Arroyo names epoch {named} as ready"
        if self.lost.worker_generation is not None:
            evidence = "the epoch has its commit marker"
        self.doubts.append(
            f"{name}: its commit data is lost; {evidence}, so the commit is finished"
        )

    def _check_same_run(self) -> None:
        """Check that nothing shows a restart or an attempt between the two epochs.

        In the protocol layout each run has files of its own, and an epoch names its parent.
        """
        source, name = self.older[0], self.name
        if self.lost.worker_generation is not None:
            if source.worker_generation != self.lost.worker_generation:
                self.doubts.append(
                    f"{name}: the epoch is of worker generation {self.lost.worker_generation}, and "
                    f"its parallelism that of epoch {source.epoch}, of generation "
                    f"{source.worker_generation}"
                )
            return
        for state in self.there:
            then = source.operator(state.operator)
            if then is None or then.parallelism != state.parallelism:
                raise self._unknown(
                    f"{state.operator} had another parallelism at epoch {source.epoch}, so that of "
                    f"{name} is not known"
                )
        listed = [
            files
            for state in self.there
            for files in state.tables.values()
            if isinstance(files, GlobalKeyedFiles)
        ]
        for path in (path for files in listed for path in files.paths):
            if written_epoch(path) != self.epoch:
                raise self._unknown(f"{path} lies in another epoch, as after a start without state")
        if not listed:
            self.doubts.append("nothing shows whether the job was started without state meanwhile")
        for epoch in range(source.epoch + 1, self.epoch):
            between = f"{self.paths.operator(name, Epoch(epoch))}/"
            if any(path.startswith(between) for path in self.listing):
                raise self._unknown(
                    f"files of {name} lie in epoch {epoch}, whose metadata cannot be read: rebuild "
                    "that epoch first, unless it was never complete"
                )

    def _configs(self, was: OperatorCheckpoint) -> dict[TableName, TableConfig]:
        """Return the tables that the operator has had, as the nearest epoch describes each."""
        configs = dict(was.configs)
        for checkpoint in self.older[1:]:
            operator = checkpoint.operator(self.name)
            for table, config in ({} if operator is None else operator.configs).items():
                configs.setdefault(table, config)
        return configs

    def _files(
        self, was: OperatorCheckpoint, configs: dict[TableName, TableConfig]
    ) -> dict[TableName, list[StatePath]]:
        """Return the files that subtasks wrote in the epoch, by table, in their order."""
        name = self.name
        generation = self.lost.worker_generation
        directory = self.paths.operator(name, self.epoch, generation)
        paths = {path for path in self.listing if path.startswith(f"{directory}/")}
        paths.discard(self.paths.operator_metadata(name, self.epoch, generation))
        files = {}
        for table in configs:
            named = [
                self.paths.subtask_file(name, table, subtask, self.epoch, generation)
                for subtask in range(was.parallelism)
            ]
            files[table] = [path for path in named if path in paths]
            paths.difference_update(named)
        for path in sorted(paths):
            if not is_compacted(path):
                raise self._unknown(f"no table and subtask of {name} is known for {path}")
            self.unlisted.append(path)
            self.doubts.append(
                f"{path}: Arroyo has compacted the epoch; its inputs are listed instead"
            )
        before = [
            f"{self.paths.operator(name, old.epoch, old.worker_generation)}/" for old in self.older
        ]
        listed = set(was.paths)
        compacted = [
            path
            for path in self.listing
            if path.startswith(tuple(before)) and is_compacted(path) and path not in listed
        ]
        self.unlisted += compacted
        if any(path.startswith(before[0]) for path in compacted):
            self.doubts.append(
                f"{name}: Arroyo has compacted epoch {was.epoch}; its inputs are listed, "
                "which hold the same rows"
            )
        return files

    def _table(
        self,
        store: ObjectStore,
        was: OperatorCheckpoint,
        config: TableConfig,
        added: list[StatePath],
    ) -> TableFiles:
        where = f"{was.operator}.{config.table}"
        old = was.tables.get(config.table)
        self._doubt_old_files(where, added)
        if not isinstance(config.config, ExpiringTimeKeyConfig):
            if old is not None and len(added) != was.parallelism:
                raise self._unknown(
                    f"{where} has {len(added)} of {was.parallelism} files in the epoch, and every "
                    "subtask writes one"
                )
            self._note(config.table, (), added)
            return GlobalKeyedFiles(files=tuple(added))
        kept = old.files if isinstance(old, ExpiringTimeKeyFiles) else ()
        gone = [file.path for file in kept if file.path not in self.listing]
        if gone:
            raise self._unknown(f"{where}: {gone[0]} is gone, which epoch {was.epoch} lists")
        if len(added) < was.parallelism:
            self.doubts.append(
                f"{where}: {was.parallelism - len(added)} of {was.parallelism} subtasks have no "
                "file in the epoch, as if they wrote no row; a lost file would look the same"
            )
        self._note(config.table, tuple(file.path for file in kept), added)
        return ExpiringTimeKeyFiles(
            files=(*kept, *(self._time_file(store, path) for path in added))
        )

    def _note(
        self,
        table: TableName,
        carried: tuple[StatePath, ...],
        added: list[StatePath],
    ) -> None:
        if carried or added:
            self.tables.append(
                RebuiltTable(operator=self.name, table=table, carried=carried, added=tuple(added))
            )

    def _doubt_old_files(self, where: str, added: list[StatePath]) -> None:
        for path in added:
            written = self.listing[path].modified_micros
            if written is not None and written < self.lost.start_time_micros:
                self.doubts.append(
                    f"{where}: {path} is older than the start of the epoch: an attempt that failed "
                    "may have left it, and its rows may be there twice"
                )

    def _time_file(self, store: ObjectStore, path: StatePath) -> TimeFile:
        stored = read_stored_file(store, path)
        if stored is None or stored.problem is not None:
            raise FormatError(
                f"a data file of the epoch is broken: {stored.problem if stored else 'missing'}",
                job=self.paths.root,
                path=path,
                next_step="nothing was changed; restore the file, or go back to an older epoch",
            )
        least, most, newest = (
            stored.min_routing_key,
            stored.max_routing_key,
            stored.max_timestamp_micros,
        )
        if least is None or most is None or newest is None:
            raise self._unknown(f"{path} has no statistics")
        return TimeFile(
            epoch=self.epoch,
            path=path,
            min_routing_key=least,
            max_routing_key=most,
            max_timestamp_micros=max(0, newest),
        )

    def _unknown(self, reason: str) -> ProtocolError:
        return cannot_rebuild(self.paths, self.epoch, reason)


# ---- an epoch as its rebuilt metadata would describe it, and refusals ----------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuiltEpoch:
    """An epoch as it would be; attributes as of `RebuildPlan`."""

    checkpoint: Checkpoint
    before: Mapping[StatePath, bytes | None]
    after: Mapping[StatePath, bytes]
    source: Mapping[OperatorId, Epoch]
    tables: tuple[RebuiltTable, ...]
    doubts: tuple[str, ...]
    unlisted: tuple[StatePath, ...]
    head: JobHead

    def over(self, store: ObjectStore) -> ObjectStore:
        """Return the store with the rebuilt objects, which cannot be written through it.

        It looks the same before they are written and afterwards.
        """
        return Extended(store, self.after)


def read_whole(
    store: ObjectStore,
    path: StatePath,
    decode: Callable[[bytes, str], _T],
    is_damaged: Callable[[_T], bool],
    before: dict[StatePath, bytes | None],
) -> _T | None:
    """Read an object; None if it is missing or damaged: then `before` gets its bytes, or None."""
    data = read_optional(store, path)
    if data is not None:
        with contextlib.suppress(FormatError):
            value = decode(data, path)
            if not is_damaged(value):
                return value
    before[path] = data
    return None


def managed_job(paths: JobPaths) -> InputError:
    """Return the error of a job that this package writes."""
    return InputError(
        "this is a managed job",
        job=paths.root,
        next_step="go back to an older epoch with `arroyo-state rollback`",
    )


def nothing_lost(paths: JobPaths, epoch: Epoch) -> InputError:
    """Return the error of an epoch whose metadata can be read."""
    return InputError(
        "no metadata of the epoch is missing or damaged",
        job=paths.root,
        epoch=epoch,
        next_step="check it with `arroyo-state verify`, or name another one: `rebuild JOB EPOCH`",
    )


def check_not_rewritten(store: ObjectStore, paths: JobPaths, epoch: Epoch) -> None:
    """Refuse an epoch that was edited or compacted in place: its lists are not Arroyo's.

    Raises:
        ProtocolError: a record of such a change exists.
    """
    listed = [info.path for info in store.list_dir(paths.changes).objects]
    pinned = [paths.changes / name for name in read_pins(store, paths).changes]
    in_place = (ChangeKind.COMPACTION, ChangeKind.EDIT)
    for path in (*listed, *pinned):
        if any(is_change_of(paths, path, kind, epoch) for kind in in_place):
            raise ProtocolError(
                "the epoch was edited or compacted in place, so that its lists cannot be known "
                "from names",
                job=paths.root,
                epoch=epoch,
                path=path,
                next_step="the record beside it has the original metadata; nothing was changed",
            )
