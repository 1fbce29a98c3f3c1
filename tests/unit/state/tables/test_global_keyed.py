"""Global keyed tables: views, files, removals, merging, migration."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from arroyo_dagster.errors import FormatError, InputError, StorageError
from arroyo_dagster.state import (
    GLOBAL_KEY_VALUE_SCHEMA,
    Epoch,
    GlobalKeyedTable,
    GlobalKeyedView,
    MemoryStore,
    ObjectStore,
    StatePath,
    TableConfig,
    VersionInfo,
    codec_for,
    global_table_config,
    global_table_config_with_version,
    range_for_server,
)
from arroyo_dagster.state.tables.global_keyed import decode_global_keyed_file
from arroyo_dagster.state.tables.messages import CommitData, KeyedData, TableChange
from arroyo_dagster.state.tables.table import EpochFiles
from tests.faulty_stores import once_before
from tests.formats import encode_pairs, encode_rows

CONFIG = global_table_config("g", key=str, value=int)
_NUMBERS = itertools.count()


def name_file(suffix: str) -> StatePath:
    return StatePath(f"f-{next(_NUMBERS):05}{suffix}")


FILES = EpochFiles(epoch=Epoch(1), keys=range_for_server(0, 1), name_file=name_file)


class Subtask:
    """A view and what it sends, written at will."""

    def __init__(
        self, store: ObjectStore, config: TableConfig = CONFIG, key: Any = str, value: Any = int
    ) -> None:
        self.table = GlobalKeyedTable(config, store)
        self.checkpointer = self.table.checkpoint(FILES)
        self.view: GlobalKeyedView[Any, Any] = GlobalKeyedView(self.table, key, value, self.take)
        self.files: list[StatePath] = []

    def take(self, message: TableChange) -> None:
        assert isinstance(message.data, KeyedData | CommitData)
        self.checkpointer.apply(message.data)

    def write(self) -> tuple[StatePath, ...]:
        report, _ = self.checkpointer.finish(None, ())
        self.checkpointer = self.table.checkpoint(FILES)
        self.files.extend(report.paths)
        return report.paths


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


# ---- the view ------------------------------------------------------------------------------------


def test_a_key_or_value_that_does_not_encode_changes_nothing(store: MemoryStore) -> None:
    subtask = Subtask(store)
    subtask.view.insert("a", 1)
    subtask.write()
    for pairs in ([(1, 2)], [("a", "text")], [("a", 5), ("b", 2**70)], [("a", 5), (None, 1)]):
        with pytest.raises(InputError):
            subtask.view.insert_many(pairs)
    with pytest.raises(InputError):
        subtask.view.remove_many(["a", 7])
    assert subtask.view.get_all() == {"a": 1}
    assert subtask.write() == ()


def test_what_the_manager_refuses_does_not_stay_in_memory(store: MemoryStore) -> None:
    subtask = Subtask(store)
    subtask.view.insert("a", 1)

    def refuse(message: TableChange) -> None:
        raise InputError("stopped")

    subtask.view._send = refuse
    for change in (
        lambda: subtask.view.insert("a", 2),
        lambda: subtask.view.remove("a"),
        lambda: subtask.view.take("a"),
    ):
        with pytest.raises(InputError):
            change()
        assert subtask.view.get_all() == {"a": 1}


def test_keys_that_python_cannot_hash_are_looked_up_but_not_listed(store: MemoryStore) -> None:
    config = global_table_config("g", key=list[int], value=int)
    view = Subtask(store, config, list[int]).view
    view.insert([1, 2], 3)
    assert view.get([1, 2]) == 3
    with pytest.raises(InputError, match="cannot be the keys of a dict"):
        view.get_all()


def test_a_store_that_fails_once_hides_no_entry(store: MemoryStore) -> None:
    def fail() -> None:
        raise StorageError("once")

    writer = Subtask(store)
    writer.view.insert("a", 1)
    writer.write()
    writer.view.insert("b", 2)
    writer.write()
    reader = Subtask(once_before(store, lambda verb, path: verb == "read", fail)).view
    reader.follow(writer.files)
    with pytest.raises(StorageError):
        reader.get("a")
    assert reader.get_all() == {"a": 1, "b": 2}


# ---- files ---------------------------------------------------------------------------------------


def test_commit_data_needs_a_table_that_commits_and_comes_once(store: MemoryStore) -> None:
    with pytest.raises(InputError, match="two phases"):
        Subtask(store).view.set_commit_data(b"x")
    config = global_table_config("p", two_phase_commit=True, key=str, value=str)
    subtask = Subtask(store, config, str, str)
    subtask.view.set_commit_data(b"")
    with pytest.raises(InputError, match="twice"):
        subtask.view.set_commit_data(b"y")
    report, size = subtask.checkpointer.finish(None, ())
    assert (report.commit_data, report.paths, size) == (b"", (), 0)


@pytest.mark.parametrize("columns", [("key",), ("key", "other"), ("k", "value")])
def test_a_file_with_other_columns_is_refused(columns: tuple[str, ...]) -> None:
    data = encode_rows(pa.table({name: pa.array([b"x"]) for name in columns}))
    with pytest.raises(FormatError, match="key and value"):
        decode_global_keyed_file(data, StatePath("p"))


# ---- versions ------------------------------------------------------------------------------------


@dataclass
class First:
    name: str


@dataclass
class Second:
    VERSION: ClassVar[int] = 1
    PREVIOUS: ClassVar[type[Any]] = First
    first: str
    last: str

    @classmethod
    def migrate(cls, previous: First) -> Second:
        first, _, last = previous.name.partition(" ")
        return cls(first, last)


@dataclass
class Third:
    VERSION: ClassVar[int] = 2
    PREVIOUS: ClassVar[type[Any]] = Second
    last: str
    length: int

    @classmethod
    def migrate(cls, previous: Second) -> Third:
        return cls(previous.last, len(previous.first))


def put_version(store: ObjectStore, version: int, name: str, value: Any) -> StatePath:
    path = StatePath(f"v{version}-{name}")
    pairs = ([codec_for(str).encode(name)], [codec_for(type(value)).encode(value)])
    store.put(path, encode_pairs(*pairs, GLOBAL_KEY_VALUE_SCHEMA, version=version))
    return path


def versioned(store: ObjectStore, value: Any, version: int) -> Subtask:
    config = global_table_config_with_version("g", "", version, key=str, value=value)
    return Subtask(store, config, str, value)


def test_values_of_every_older_version_are_migrated_step_by_step(store: MemoryStore) -> None:
    files = [
        put_version(store, 0, "old", First("Ada Lovelace")),
        put_version(store, 1, "mid", Second("Alan", "Turing")),
        put_version(store, 2, "new", Third("Hopper", 5)),
    ]
    view = versioned(store, Third, 2).view
    view.follow(files)
    assert view.get_all() == {
        "old": Third("Lovelace", 3),
        "mid": Third("Turing", 4),
        "new": Third("Hopper", 5),
    }
    assert view.version_info() == VersionInfo(2, (0, 1, 2))
    assert versioned(store, Third, 2).view.version_info() == VersionInfo(2, ())


def test_a_version_that_nobody_can_migrate_stops_the_restore(store: MemoryStore) -> None:
    newer = put_version(store, 3, "k", First("x"))
    view = versioned(store, Third, 2).view
    view.follow([newer])
    with pytest.raises(InputError, match="state version 3"):
        view.get("k")
    view = versioned(store, int, 1).view
    view.follow([put_version(store, 0, "k", First("x"))])
    with pytest.raises(InputError, match="no migration"):
        view.get("k")
