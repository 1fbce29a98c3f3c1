"""Advance the tables of one subtask to a later epoch of its job."""

from __future__ import annotations

from collections.abc import Mapping

from arroyo_dagster.state.model.checkpoints import (
    ExpiringTimeKeyReport,
    OperatorCheckpoint,
    SubtaskCheckpoint,
    TableReport,
)
from arroyo_dagster.state.model.ids import Epoch, StatePath, TableName
from arroyo_dagster.state.model.tables import ExpiringTimeKeyFiles, TimeFile
from arroyo_dagster.state.tables.expiring_time_key import ExpiringTimeKeyTable
from arroyo_dagster.state.tables.global_keyed import GlobalKeyedTable
from arroyo_dagster.state.tables.loaded import LoadedState
from arroyo_dagster.state.tables.messages import Compaction
from arroyo_dagster.state.tables.open_views import OpenViews
from arroyo_dagster.state.tables.table import TaskInfo
from arroyo_dagster.state.tables.time_views import ExpiringTimeKeyView, UncachedKeyValueView


class Following:
    """Advances the views of a subtask with its job.

    Args:
        reports: the subtask's checkpoints, by epoch.
        time_files: by expiring table, the files that the subtask carries over; kept up to date.
    """

    def __init__(
        self,
        views: OpenViews,
        loaded: LoadedState,
        task: TaskInfo,
        reports: Mapping[Epoch, SubtaskCheckpoint],
        time_files: dict[TableName, tuple[TimeFile, ...]],
    ) -> None:
        self._views = views
        self._loaded = loaded
        self._task = task
        self._reports = reports
        self._time_files = time_files

    def follow(self, published: OperatorCheckpoint) -> bool:
        """Advance as `TableManager.follow`."""
        if published.epoch < self._loaded.epoch or not self._confirmed_by(published):
            return False
        for name in self._views.tables:
            files = published.tables.get(name)
            if isinstance(self._views.tables[name], GlobalKeyedTable):
                self._follow_global(name, files.paths if files else ())
            else:
                listed = files.files if isinstance(files, ExpiringTimeKeyFiles) else ()
                self._follow_expiring(name, listed, published.min_watermark_micros)
        self._loaded.epoch = self._loaded.followed = published.epoch
        self._loaded.watermark_micros = published.min_watermark_micros
        self._loaded.restored = published
        return True

    def _confirmed_by(self, published: OperatorCheckpoint) -> bool:
        """Whether the published epoch is the one that this manager wrote last.

        Names are unique to an attempt: if the files are listed, the attempt won.
        """
        if self._loaded.followed == self._loaded.epoch:
            return True
        for name, report in self._reports[self._loaded.epoch].tables.items():
            files = published.tables.get(name)
            fresh = set(report.paths) & _written_in(report, self._loaded.epoch)
            if not fresh - self._loaded.merged[name] <= set(files.paths if files else ()):
                return False
        return True

    def _follow_global(self, name: TableName, listed: tuple[StatePath, ...]) -> None:
        view = self._views.global_views.get(name)
        read_files, merged = self._loaded.read_files[name], self._loaded.merged[name]
        if view is not None and not read_files - merged <= set(listed):
            # A file that should be in memory is no longer listed: its merge was not announced.
            view.reload(listed)
        elif view is not None:
            # From the first unknown file on, including own ones: if two subtasks wrote one key, the
            # later file in the list wins here as it does at a restore.
            fresh = (
                i for i, path in enumerate(listed) if path not in self._loaded.read_files[name]
            )
            view.follow(listed[next(fresh, len(listed)) :])
        self._loaded.read_files[name] = set(listed)
        self._loaded.merged[name].clear()

    def _follow_expiring(
        self, name: TableName, listed: tuple[TimeFile, ...], watermark_micros: int | None
    ) -> None:
        table = self._views.tables[name]
        assert isinstance(table, ExpiringTimeKeyTable)
        keys = self._task.key_range
        mine = [f for f in listed if keys.intersects(f.min_routing_key, f.max_routing_key)]
        fresh = [file for file in mine if file.path not in self._loaded.read_files[name]]
        view, cutoff = self._views.time_views.get(name), table.cutoff_micros(watermark_micros)
        keyed = self._views.keyed_views.get(name)
        if isinstance(view, UncachedKeyValueView):
            view.go_on_from(mine, cutoff)
        elif isinstance(view, ExpiringTimeKeyView):
            if any(file.compaction_generation for file in fresh):
                view.forget()  # some of its rows are in memory: read everything again
                fresh = mine
            view.replay(table.read(fresh, keys, cutoff_micros=cutoff))
            view.evict(cutoff)
        elif keyed is not None:
            if any(file.compaction_generation for file in fresh):
                keyed.forget()
                fresh = mine
            keyed.replay(table.stream(fresh, keys))
        self._time_files[name] = tuple(mine)
        self._loaded.read_files[name] = {file.path for file in listed}
        self._loaded.merged[name].clear()

    def load_compacted(self, message: Compaction) -> None:
        """Record merges as `TableManager.load_compacted`."""
        for name, merged in message.tables.items():
            read_files = self._loaded.read_files.get(name)
            view = self._views.global_views.get(name)
            inputs = set(message.inputs[name])
            # Rows in memory need not be read again. Inputs not read yet may be deleted before the
            # table is next used; then the table is read again.
            if (
                read_files is not None
                and inputs <= read_files
                and not (view and view.is_behind(inputs))
            ):
                read_files.update(merged.paths)
                self._loaded.merged[name].update(inputs)


def _written_in(report: TableReport, epoch: Epoch) -> set[StatePath]:
    if isinstance(report, ExpiringTimeKeyReport):
        return {file.path for file in report.files if file.epoch == epoch}
    return set(report.paths)
