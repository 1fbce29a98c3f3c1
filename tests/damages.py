"""Ways to damage a job, each with the findings it must give: severity, code and object."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa

from arroyo_dagster.state import (
    GLOBAL_KEY_VALUE_SCHEMA,
    Checkpoint,
    Epoch,
    JobPaths,
    Layout,
    MemoryStore,
    ObjectStore,
    OperatorCheckpoint,
    OperatorId,
    ParquetBackend,
    PipelineId,
    StatePath,
    TableConfig,
    TableName,
    WorkerGeneration,
)
from tests.formats import (
    CompactionRecord,
    ExpiringTimeKeyConfig,
    ExpiringTimeKeyFiles,
    GlobalKeyedFiles,
    MergedPairs,
    TimeFile,
    decode_file,
    encode,
    encode_pairs,
    encode_rows,
    metadata,
    read_facts,
    records,
)

Expected = set[tuple[str, str, str]]
"""Severity, code, object."""


def _varint(data: bytes, start: int) -> tuple[int, int]:
    """The number that begins at a byte, and where it ends."""
    value, end = 0, start
    while True:
        value |= (data[end] & 127) << 7 * (end - start)
        end += 1
        if data[end - 1] < 128:
            return value, end


def field_ends(data: bytes) -> list[int]:
    """Where the fields of a protobuf message end, but the last: what is cut there decodes."""
    ends = [0]
    while (end := ends[-1]) < len(data):
        tag, end = _varint(data, end)
        size, end = _varint(data, end)
        ends.append(end + (size if tag & 7 == 2 else 0))
    return ends[:-1]


def copy_job(store: ObjectStore, paths: JobPaths) -> MemoryStore:
    """The objects of one job in memory."""
    twin = MemoryStore()
    for info in store.list(paths.root):
        if info.addressable:
            twin.put(info.path, store.read(info.path))
    return twin


@dataclass(slots=True)
class Scene:
    """A job to be damaged, and what there is in its newest epoch to damage."""

    store: MemoryStore
    paths: JobPaths

    @property
    def backend(self) -> ParquetBackend:
        return ParquetBackend(self.store, self.paths)

    @property
    def newest(self) -> Checkpoint:
        return self.backend.load()

    @property
    def managed(self) -> bool:
        return self.newest.progress is not None

    @property
    def legacy(self) -> bool:
        return self.paths.layout is Layout.LEGACY

    # ---- picking ---------------------------------------------------------------------------------

    def timed(self, *, new: bool = False) -> tuple[OperatorId, TableName, TimeFile]:
        """The largest data file of a keyed expiring table; `new`: written in the newest epoch."""
        newest = self.newest
        found = [
            (read_facts(self.store.read(file.path), file.path).rows, operator.operator, name, file)
            for operator in newest.operators
            for name, files in operator.tables.items()
            if isinstance(files, ExpiringTimeKeyFiles)
            and keyed(operator.configs[name])
            and operator.min_watermark_micros is not None
            for file in files.files
            if (file.epoch == newest.epoch) is new and not file.compaction_generation
        ]
        _, operator, name, file = max(found, key=lambda one: (one[0], one[3].path))
        return operator, name, file

    def pairs(self, *, alone: bool = False) -> tuple[OperatorId, TableName, StatePath]:
        """A data file of a global keyed table that has rows, written last.

        Args:
            alone: no other subtask writes its keys, as all do in a single-file sink.
        """
        newest = self.newest
        return [
            (operator.operator, name, path)
            for operator in newest.operators
            for name, files in operator.tables.items()
            if isinstance(files, GlobalKeyedFiles) and not (alone and "sink" in operator.operator)
            for path in files.files
            if read_facts(self.store.read(path), path).rows and "value" in self.columns(path)
        ][-1]

    def columns(self, path: StatePath) -> list[str]:
        names: list[str] = read_facts(self.store.read(path), path).schema.names
        return names

    # ---- changing --------------------------------------------------------------------------------

    def edit(self, path: StatePath, change: Callable[[bytes], bytes]) -> None:
        self.store.put(path, change(self.store.read(path)))

    def remove(self, path: StatePath) -> None:
        assert self.store.head(path) is not None, path
        self.store.delete_many([path])

    def edit_operator(
        self, name: OperatorId, change: Callable[[OperatorCheckpoint], OperatorCheckpoint]
    ) -> None:
        """Change what the newest epoch says of an operator."""
        newest = self.newest
        if self.legacy:
            path = self.paths.operator_metadata(name, newest.epoch)
            found = metadata.decode_operator(self.store.read(path), path)
            self.store.put(path, metadata.encode_operator(change(found)))
            return
        manifest = metadata.decode_manifest(self.store.read(newest.ref), newest.ref)
        operators = tuple(change(o) if o.operator == name else o for o in manifest.operators)
        changed = metadata.encode_manifest(replace(manifest, operators=operators))
        self.store.put(newest.ref, changed)

    def edit_files(
        self, name: OperatorId, table: TableName, change: Callable[[Any], Iterable[Any]]
    ) -> None:
        """Change the list of files of a table."""

        def changed(operator: OperatorCheckpoint) -> OperatorCheckpoint:
            files = replace(operator.tables[table], files=tuple(change(operator.tables[table])))
            return replace(operator, tables={**operator.tables, table: files})

        self.edit_operator(name, changed)

    def edit_entry(self, changes: Callable[[TimeFile], dict[str, Any]]) -> TimeFile:
        """Change what the newest epoch says of one file of an expiring table."""
        operator, table, wanted = self.timed()
        self.edit_files(
            operator,
            table,
            lambda files: (
                replace(file, **changes(file)) if file == wanted else file for file in files.files
            ),
        )
        return wanted

    def edit_rows(self, path: StatePath, change: Callable[[pa.Table], pa.Table]) -> None:
        rows, _ = decode_file(self.store.read(path), path)
        self.store.put(path, encode_rows(change(rows)))


def keyed(config: TableConfig) -> bool:
    return isinstance(config.config, ExpiringTimeKeyConfig) and bool(
        config.config.schema.hashed_indices
    )


def errors(code: str, *objects: str) -> Expected:
    return {("error", code, one) for one in objects}


def warnings(code: str, *objects: str) -> Expected:
    return {("warning", code, one) for one in objects}


def notes(code: str, *objects: str) -> Expected:
    return {("note", code, one) for one in objects}


# ---- one object ----------------------------------------------------------------------------------

Damage = Callable[[Scene], Expected]
Pick = Callable[[Scene], StatePath]


def _changed(
    name: str,
    pick: Pick,
    code: str,
    change: Callable[[bytes], bytes] | None = None,
    told: Callable[..., Expected] = errors,
    of_managed: Callable[..., Expected] | None = None,
) -> Damage:
    """Change the bytes of one object, or remove it.

    Args:
        told: what is found of it; `of_managed`: if the job is a managed one.
    """

    def damage(scene: Scene) -> Expected:
        path = pick(scene)
        found = of_managed if of_managed is not None and scene.managed else told
        if change is None:
            scene.remove(path)
        else:
            scene.edit(path, change)
        return found(code, path)

    damage.__name__ = name
    return damage


def _replaced(name: str, pick: Pick, other: Pick, code: str = "metadata-of-another") -> Damage:
    """Put the bytes of another object in the place of one."""

    def damage(scene: Scene) -> Expected:
        path = pick(scene)
        scene.store.put(path, scene.store.read(other(scene)))
        return errors(code, path)

    damage.__name__ = name
    return damage


def _entry(
    name: str, member: str, more: int, code: str, told: Callable[..., Expected] = errors
) -> Damage:
    """Change what the newest epoch says of one file of an expiring table."""

    def damage(scene: Scene) -> Expected:
        file = scene.edit_entry(lambda file: {member: getattr(file, member) + more})
        return told(code, file.path)

    damage.__name__ = name
    return damage


def _timed(scene: Scene) -> StatePath:
    return scene.timed()[2].path


def _pairs(scene: Scene) -> StatePath:
    return scene.pairs()[2]


def _half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _without(count: int) -> Callable[[bytes], bytes]:
    """Cut off so many bytes."""
    return lambda data: data[:-count]


# ---- data files ----------------------------------------------------------------------------------


def flipped(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 0xFF
    return bytes(changed)


def column_nullable(scene: Scene) -> Expected:
    _, _, file = scene.timed()

    def change(rows: pa.Table) -> pa.Table:
        at = rows.num_columns - 2
        field = rows.schema.field(at).with_nullable(True)
        return rows.cast(rows.schema.set(at, field))

    scene.edit_rows(file.path, change)
    return errors("columns-differ", file.path)


# ---- values --------------------------------------------------------------------------------------


def set_value(rows: pa.Table, at: int, row: int, value: Any) -> pa.Table:
    column = rows.column(at).to_pylist()
    column[row] = value
    field = rows.schema.field(at)
    return rows.set_column(at, field, pa.array(column, field.type))


def key_hash_changed(scene: Scene) -> Expected:
    _, _, file = scene.timed()
    scene.edit_rows(file.path, lambda rows: set_value(rows, rows.num_columns - 2, 0, 12345))
    return errors("routing-key-wrong", file.path)


def operation_unknown(scene: Scene) -> Expected:
    _, _, file = scene.timed()
    scene.edit_rows(file.path, lambda rows: set_value(rows, rows.num_columns - 1, 0, b"\x09"))
    return errors("operation-unknown", file.path)


def value_broken(scene: Scene) -> Expected:
    _, _, path = scene.pairs(alone=not scene.managed)
    rows, version = decode_file(scene.store.read(path), path)
    # A marker of a 128-bit number where a smaller one belongs.
    values = [b"\xfe" * (len(value) + 1) for value in rows.column("value").to_pylist()]
    keys = rows.column("key").to_pylist()
    scene.store.put(path, encode_pairs(keys, values, GLOBAL_KEY_VALUE_SCHEMA, version=version))
    return errors("value-undecodable", path)


# ---- lists ---------------------------------------------------------------------------------------


def listed_twice(scene: Scene) -> Expected:
    operator, table, file = scene.timed()
    scene.edit_files(operator, table, lambda files: (*files.files, file))
    return errors("file-listed-twice", file.path)


def listed_by_another_name(scene: Scene) -> Expected:
    operator, table, path = scene.pairs()
    other = StatePath(f"{path}-elsewhere")
    scene.edit_files(
        operator, table, lambda files: (other if one == path else one for one in files.files)
    )
    return errors("file-missing", other)


def listed_outside_of_the_job(scene: Scene) -> Expected:
    operator, table, file = scene.timed(new=True)
    other = StatePath("somebody/else/table-x-000")
    scene.store.put(other, scene.store.read(file.path))
    scene.edit_files(
        operator,
        table,
        lambda files: (replace(one, path=other) if one == file else one for one in files.files),
    )
    return warnings("file-elsewhere", other)


def dropped_from_the_list(scene: Scene) -> Expected:
    operator, table, file = scene.timed()
    scene.edit_files(operator, table, lambda files: (one for one in files.files if one != file))
    return (warnings if scene.managed else errors)("file-lost", file.path)


def pairs_dropped_from_the_list(scene: Scene) -> Expected:
    """The last that was carried on: the epoch's own file moves into its place."""
    newest, before = scene.newest, scene.backend.load(Epoch(scene.newest.epoch - 1))
    operator, table, files = next(
        (one.operator, name, files)
        for one in newest.operators
        for name, files in one.tables.items()
        if isinstance(files, GlobalKeyedFiles) and set(files.files) - set(before.paths)
    )
    path = next(path for path in reversed(files.files) if path in set(before.paths))
    scene.edit_files(operator, table, lambda files: (one for one in files.files if one != path))
    return errors("file-lost", path)


def table_without_configuration(scene: Scene) -> Expected:
    operator, table, _ = scene.pairs()

    def change(found: OperatorCheckpoint) -> OperatorCheckpoint:
        return replace(found, configs={n: c for n, c in found.configs.items() if n != table})

    scene.edit_operator(operator, change)
    return errors("table-configuration", scene.newest.ref)


def schema_broken(scene: Scene) -> Expected:
    operator, table, _ = scene.timed()

    def change(found: OperatorCheckpoint) -> OperatorCheckpoint:
        config = found.configs[table].config
        assert isinstance(config, ExpiringTimeKeyConfig)
        schema = replace(config.schema, arrow_schema=config.schema.arrow_schema[:-5])
        changed = replace(found.configs[table], config=replace(config, schema=schema))
        return replace(found, configs={**found.configs, table: changed})

    scene.edit_operator(operator, change)
    return errors("table-configuration", scene.newest.ref)


def operator_gone_from_the_epoch(scene: Scene) -> Expected:
    newest = scene.newest
    name = newest.operators[0].operator
    if scene.legacy:
        head = metadata.decode_legacy_checkpoint(scene.store.read(newest.ref), newest.ref)
        rest = tuple(one for one in head.operators if one != name)
        scene.store.put(
            newest.ref, metadata.encode_legacy_checkpoint(replace(head, operators=rest))
        )
    else:
        manifest = metadata.decode_manifest(scene.store.read(newest.ref), newest.ref)
        others = tuple(one for one in manifest.operators if one.operator != name)
        scene.store.put(newest.ref, metadata.encode_manifest(replace(manifest, operators=others)))
    return errors("operator-vanished", newest.ref)


def _footer_flipped(data: bytes) -> bytes:
    length = int.from_bytes(data[-8:-4], "little")
    return flipped(data, len(data) - 8 - length)


def _page_flipped(data: bytes) -> bytes:
    return flipped(data, data.index(b"\x28\xb5\x2f\xfd"))


ANY: tuple[Damage, ...] = (
    _changed("file_gone", _timed, "file-missing"),
    _changed("pairs_file_gone", _pairs, "file-missing"),
    _changed("file_emptied", _timed, "file-empty", lambda _: b""),
    _changed("footer_flipped", _timed, "file-broken", _footer_flipped),
    _changed("footer_length_flipped", _pairs, "file-broken", lambda data: flipped(data, -6)),
    _changed("file_cut_short", _timed, "file-broken", lambda data: data[: len(data) * 2 // 3]),
    _changed("page_flipped", _timed, "file-broken", _page_flipped),
    _replaced("file_of_another_table", _timed, _pairs, "columns-differ"),
    column_nullable,
    _entry("low_key_too_high", "min_routing_key", 1, "routing-keys-outside"),
    _entry("high_key_too_low", "max_routing_key", -1, "routing-keys-outside"),
    _entry("high_key_too_high", "max_routing_key", 1, "bounds-too-wide", notes),
    _entry("time_too_early", "max_timestamp_micros", -1, "timestamps-outside"),
    _entry("time_too_late", "max_timestamp_micros", 1, "bounds-too-wide", notes),
    key_hash_changed,
    operation_unknown,
    value_broken,
    listed_twice,
    listed_by_another_name,
    listed_outside_of_the_job,
    dropped_from_the_list,
    table_without_configuration,
    schema_broken,
    operator_gone_from_the_epoch,
)


# ---- the protocol layout -------------------------------------------------------------------------


def _record_path(scene: Scene, before: int = 0) -> StatePath:
    return scene.paths.epoch_record(Epoch(scene.newest.epoch - before))


def _edit_record(scene: Scene, **changes: Any) -> StatePath:
    path = _record_path(scene)
    record = records.decode_epoch_record(scene.store.read(path), path)
    scene.store.put(path, encode(replace(record, **changes)))
    return path


def _edit_manifest(scene: Scene, **changes: Any) -> StatePath:
    ref = scene.newest.ref
    manifest = metadata.decode_manifest(scene.store.read(ref), ref)
    scene.store.put(ref, metadata.encode_manifest(replace(manifest, **changes)))
    return ref


def _parent(scene: Scene) -> StatePath:
    ref = scene.newest.parent_ref
    assert ref is not None
    return ref


def _generation_manifest(scene: Scene) -> StatePath:
    generation = scene.newest.worker_generation
    assert generation is not None
    return scene.paths.generation_manifest(generation)


def record_pointing_elsewhere(scene: Scene) -> Expected:
    newest = scene.newest
    assert newest.worker_generation is not None
    other = scene.paths.manifest(WorkerGeneration(newest.worker_generation + 7), newest.epoch)
    return errors("leads-elsewhere", _edit_record(scene, checkpoint_ref=other))


def record_pointing_out_of_the_job(scene: Scene) -> Expected:
    other = JobPaths(scene.paths.job, PipelineId("other"))
    ref = other.manifest(WorkerGeneration(1), scene.newest.epoch)
    return errors("leads-elsewhere", _edit_record(scene, checkpoint_ref=ref))


def record_gone(scene: Scene) -> Expected:
    newest = scene.newest
    scene.remove(_record_path(scene))
    return warnings("epoch-unclaimed", newest.ref)


def parents_differ(scene: Scene) -> Expected:
    return errors("parents-differ", _edit_manifest(scene, parent_ref=None))


def parent_out_of_the_job(scene: Scene) -> Expected:
    other = JobPaths(scene.paths.job, PipelineId("other"))
    ref = other.manifest(WorkerGeneration(1), Epoch(scene.newest.epoch - 1))
    newest = scene.newest.ref
    _edit_record(scene, parent_ref=ref)
    manifest = metadata.decode_manifest(scene.store.read(newest), newest)
    scene.store.put(newest, metadata.encode_manifest(replace(manifest, parent_ref=ref)))
    return errors("leads-elsewhere", newest)


def fence_stale(scene: Scene) -> Expected:
    path = scene.paths.current_generation
    fence = records.decode_current_generation(scene.store.read(path), path)
    older = WorkerGeneration(fence.worker_generation - 1)
    stale = replace(
        fence,
        worker_generation=older,
        generation_manifest_ref=scene.paths.generation_manifest(older),
    )
    scene.store.put(path, encode(stale))
    return errors("fence-stale", path)


def generation_manifest_of_another(scene: Scene) -> Expected:
    path = _generation_manifest(scene)
    found = records.decode_generation_manifest(scene.store.read(path), path)
    other = replace(found, worker_generation=WorkerGeneration(found.worker_generation + 3))
    scene.store.put(path, encode(other))
    return errors("metadata-of-another", path)


def hint_stale(scene: Scene) -> Expected:
    path = _generation_manifest(scene)
    found = records.decode_generation_manifest(scene.store.read(path), path)
    stale = replace(found, latest_ref=_parent(scene))
    scene.store.put(path, encode(stale))
    return (notes if scene.managed else errors)("hint-stale", path)


def _ref(scene: Scene) -> StatePath:
    return scene.newest.ref


def _older_ref(scene: Scene) -> StatePath:
    return scene.backend.load(Epoch(scene.newest.epoch - 2)).ref


def _fence(scene: Scene) -> StatePath:
    return scene.paths.current_generation


_parent_record = partial(_record_path, before=1)
_older_record = partial(_record_path, before=2)

PROTOCOL: tuple[Damage, ...] = (
    _changed("manifest_truncated", _ref, "metadata-unreadable", _half),
    _changed("manifest_gone", _ref, "manifest-missing"),
    _replaced("manifest_of_the_epoch_before", _ref, _parent),
    _changed("record_broken", _record_path, "metadata-unreadable", _without(20)),
    record_pointing_elsewhere,
    record_pointing_out_of_the_job,
    _replaced("record_of_the_epoch_before", _record_path, _parent_record),
    record_gone,
    parents_differ,
    parent_out_of_the_job,
    _changed("parent_manifest_gone", _parent, "manifest-missing"),
    _changed("parent_manifest_truncated", _parent, "metadata-unreadable", _half),
    _changed("parent_record_gone", _parent_record, "record-missing"),
    _changed("older_record_gone", _older_record, "record-missing", told=warnings),
    _changed("older_manifest_gone", _older_ref, "manifest-missing", told=warnings),
    fence_stale,
    _changed("fence_broken", _fence, "metadata-unreadable", _without(9)),
    _changed("fence_gone", _fence, "fence-missing", told=warnings),
    # A start of ours finds the records by any older generation, and follows them.
    _changed(
        "generation_manifest_gone",
        _generation_manifest,
        "generation-manifest-missing",
        of_managed=notes,
    ),
    _changed(
        "generation_manifest_broken", _generation_manifest, "metadata-unreadable", lambda _: b"{}"
    ),
    generation_manifest_of_another,
    hint_stale,
)


# ---- commits -------------------------------------------------------------------------------------


def _marker(scene: Scene, before: int = 0) -> StatePath:
    epoch = Epoch(scene.newest.epoch - before)
    generation = scene.backend.load(epoch).worker_generation
    assert generation is not None
    return scene.paths.committed(generation, epoch)


_parent_marker = partial(_marker, before=1)

COMMITS: tuple[Damage, ...] = (
    _changed("marker_gone", _marker, "commit-pending", told=warnings),
    _changed("parent_marker_gone", _parent_marker, "commit-missing"),
    _changed("older_marker_gone", partial(_marker, before=2), "commit-missing", told=warnings),
    _replaced("marker_of_another", _marker, _parent_marker),
    _changed("marker_broken", _marker, "metadata-unreadable", lambda data: data[:9]),
)


def commit_flag_wrong(scene: Scene) -> Expected:
    return errors("commit-flag", _edit_manifest(scene, needs_commit=False))


# ---- the legacy layout ---------------------------------------------------------------------------


def _operator_path(scene: Scene, before: int = 0) -> StatePath:
    newest = scene.newest
    name = newest.operators[-1].operator
    return scene.paths.operator_metadata(name, Epoch(newest.epoch - before))


def _head_path(scene: Scene, before: int = 0) -> StatePath:
    return scene.paths.legacy_metadata(Epoch(scene.newest.epoch - before))


_older_head = partial(_head_path, before=3)
_older_operator = partial(_operator_path, before=3)
_UNREADABLE = ("metadata-unreadable", _without(1))

LEGACY: tuple[Damage, ...] = (
    _changed("head_truncated", _head_path, *_UNREADABLE),
    _replaced("head_of_the_epoch_before", _head_path, partial(_head_path, before=1)),
    _changed("head_gone", _head_path, "epoch-unfinished", told=notes),
    _changed("operator_metadata_gone", _operator_path, "operator-metadata-missing"),
    _changed("operator_metadata_truncated", _operator_path, *_UNREADABLE),
    _replaced(
        "operator_metadata_of_the_epoch_before", _operator_path, partial(_operator_path, before=1)
    ),
    _changed("older_operator_metadata_gone", _older_operator, "cleanup-trap", of_managed=warnings),
    _changed(
        "older_operator_metadata_broken",
        _older_operator,
        "cleanup-trap",
        _without(1),
        of_managed=warnings,
    ),
    _changed("older_head_gone", _older_head, "epoch-missing", told=warnings),
    _changed("older_head_broken", _older_head, *_UNREADABLE, told=warnings),
)


# ---- ours ----------------------------------------------------------------------------------------


def _record_of(
    scene: Scene, merged: tuple[OperatorId, TableName, StatePath], outputs: tuple[StatePath, ...]
) -> CompactionRecord:
    operator, table, path = merged
    assert scene.paths.pipeline is not None
    one = MergedPairs(operator=operator, table=table, inputs=(path,), outputs=outputs)
    return CompactionRecord(
        pipeline=scene.paths.pipeline,
        job=scene.paths.job,
        epoch=scene.newest.epoch,
        token=1,
        created_at_micros=0,
        merged=(one,),
    )


def compaction_outputs_gone(scene: Scene) -> Expected:
    gone = scene.paths.root / "gone-compacted"
    path = scene.paths.compaction_record(scene.newest.epoch, "x")
    scene.backend.write_compaction_record(_record_of(scene, scene.pairs(), (gone,)), path)
    return warnings("compaction-outputs-gone", path)


def compaction_record_broken(scene: Scene) -> Expected:
    path = scene.paths.compactions / "0000001-x.json"
    scene.store.put(path, b"{")
    unreadable = warnings("compaction-unreadable", path)
    return unreadable | {("error", "record-unreadable", path)}


def compaction_taken_over_in_part(scene: Scene) -> Expected:
    operator, table, path = scene.pairs()
    output = StatePath(f"{path}-compacted")
    scene.store.put(output, scene.store.read(path))
    scene.edit_files(operator, table, lambda files: (*files.files, output))
    record = _record_of(scene, (operator, table, path), (output,))
    path_of_record = scene.paths.compaction_record(scene.newest.epoch, "x")
    scene.backend.write_compaction_record(record, path_of_record)
    return errors("file-doubled", path)


def key_written_twice(scene: Scene) -> Expected:
    operator, table, path = scene.pairs()
    subtask = int(path.name.split("-")[2])
    other = StatePath(path.replace(f"-{subtask:03}-", f"-{subtask + 7:03}-"))
    assert other != path
    assert path.parent is not None
    scene.store.put(other, scene.store.read(path))
    scene.edit_files(operator, table, lambda files: (*files.files, other))
    return warnings("key-written-twice", path.parent)


OURS = (
    pairs_dropped_from_the_list,
    compaction_outputs_gone,
    compaction_record_broken,
    compaction_taken_over_in_part,
    key_written_twice,
)
