"""Lost and cut metadata is told from what a cleanup has deleted, and from what others have left."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import pytest

from arroyo_dagster.errors import ProtocolError
from arroyo_dagster.state import (
    Epoch,
    JobId,
    JobPaths,
    OperatorId,
    PipelineId,
    StatePath,
    WorkerGeneration,
)
from arroyo_dagster.state.planning.restore.lost_metadata import (
    EpochObjects,
    NamedTables,
    check_own,
    cut_checkpoint,
    cut_metadata,
    identity_mismatch,
    is_of_another_job,
    lost_epochs,
    lost_metadata,
)
from tests.formats import RunProgress
from tests.unit.state.planning.values import checkpoint, operator, pairs

LEGACY = JobPaths(JobId("job"))
PROTOCOL = JobPaths(JobId("job"), PipelineId("pl"))
SOURCE, JOIN = OperatorId("source"), OperatorId("join")


@dataclass
class Ids:
    job: str = "job"
    pipeline: str | None = "pl"
    epoch: int = 7
    worker_generation: int = 2
    operator: str = "join"
    subtask: object = None


# ---- ids -----------------------------------------------------------------------------------------

DIRECTORY = "checkpoints/checkpoint-0000007"


@pytest.mark.parametrize(
    ("path", "compared"),
    [
        (
            f"pl/job/generations/2/{DIRECTORY}/checkpoint-manifest.pb",
            {"epoch", "worker_generation"},
        ),
        (f"pl/job/generations/2/{DIRECTORY}/committed.json", {"epoch", "worker_generation"}),
        ("pl/job/epochs/epoch-0000007.record", {"epoch"}),
        ("pl/job/generations/2/generation-manifest.json", {"worker_generation"}),
        ("pl/job/current-generation.json", set()),
    ],
)
def test_ids_are_those_of_the_path_in_the_protocol_layout(path: str, compared: set[str]) -> None:
    assert identity_mismatch(PROTOCOL, path, Ids()) is None
    for name, other in {"epoch": 8, "worker_generation": 3, "operator": "x"}.items():
        mismatch = identity_mismatch(PROTOCOL, path, Ids(**{name: other}))
        assert (mismatch is not None) is (name in compared), name
    assert identity_mismatch(PROTOCOL, path, Ids(job="other")) is not None
    assert identity_mismatch(PROTOCOL, path, Ids(pipeline="other")) is not None
    assert "epoch 9, expected 7" in str(identity_mismatch(PROTOCOL, path, Ids(epoch=9), epoch=7))


def test_ids_are_those_of_the_path_in_the_legacy_layout() -> None:
    for name in ("join", "a/b", "SessionWindow<4s>"):
        path = f"job/{DIRECTORY}/operator-{name}/metadata"
        assert identity_mismatch(LEGACY, path, Ids(operator=name)) is None
        for other in (Ids(), Ids(operator=name, epoch=6), Ids(operator=name, subtask=1)):
            assert (identity_mismatch(LEGACY, path, other) is None) is (
                other.operator == name and other.epoch == 7 and other.subtask is None
            )
    assert identity_mismatch(LEGACY, f"job/{DIRECTORY}/metadata", Ids(operator="x")) is None
    assert identity_mismatch(LEGACY, f"job/{DIRECTORY}/metadata", Ids(epoch=1)) is not None


def test_an_object_without_ids_is_not_one_of_another_job() -> None:
    assert not is_of_another_job(LEGACY, object())
    assert not is_of_another_job(LEGACY, Ids(job=""))
    assert not is_of_another_job(LEGACY, Ids(pipeline=None))
    assert is_of_another_job(LEGACY, Ids(job="other"))
    assert is_of_another_job(PROTOCOL, Ids(pipeline="other"))
    assert not is_of_another_job(PROTOCOL, Ids())


# ---- cut metadata --------------------------------------------------------------------------------


TABLE = "operator-join/table-right-000"


def cut(
    *names: str,
    paths: JobPaths = LEGACY,
    unchecked: Collection[str] = (),
    directory: int | None = None,
    managed: bool = False,
) -> list[tuple[str, str]]:
    """What lacks a name, by path, and the operator that it should name."""
    generation = None if paths is LEGACY else WorkerGeneration(2)
    tables = {SOURCE: ["s"], JOIN: ["left", "left-001"]}
    number = None if directory is None else Epoch(directory)
    place = paths.checkpoint(number or Epoch(7), generation)
    named = NamedTables(
        epoch=Epoch(7),
        worker_generation=generation,
        tables=tables,
        unchecked=unchecked,
        directory=number,
        managed=managed,
    )
    objects = [place / name for name in names]
    lost = list(cut_metadata(paths, named, objects))
    if directory is None and (managed or not unchecked):  # the same of a checkpoint
        progress = RunProgress(offsets="{}", dropped=tuple(unchecked)) if managed else None
        whole = checkpoint(
            *(operator(name, configs={t: pairs(t) for t in tables[name]}) for name in tables),
            epoch=7,
            worker_generation=generation,
            progress=progress,
        )
        assert list(cut_checkpoint(paths, whole, objects)) == lost
    assert all(one.epoch == 7 and any(name in one.reason for name in names) for one in lost)
    return [(one.path.removeprefix(f"{place}/"), one.operator or "") for one in lost]


def test_an_epoch_names_each_operator_and_table_in_its_directory() -> None:
    named = (
        *("operator-source/table-s-000", "operator-source/metadata", "operator-join/metadata"),
        *("operator-join/table-left-000", "operator-join/table-left-001-000"),
        *(
            "operator-join/table-left-003-0123456789abcdef",
            "operator-join/table-left-000-compacted",
        ),
        *("operator-join/table-left-000-0123456789abcdef-removed",),
        *("operator-join/table-left-000-0123456789abcdef-l2-compacted",),
    )
    assert cut(*named) == []
    assert cut(*named, TABLE, "operator-join/table-right-001") == [("operator-join/metadata", "")]
    assert cut(TABLE, paths=PROTOCOL) == [("checkpoint-manifest.pb", "")]
    for name in ("operator-key/metadata", "operator-key/table-k-000"):
        assert cut(*named, name) == [("metadata", "key")]
    for more in ((), (TABLE,)):  # one object lacks both names
        both = cut("operator-key/table-k-000", *more, paths=PROTOCOL)
        assert both == [("checkpoint-manifest.pb", "key")]


@pytest.mark.parametrize(
    "name",
    [
        "operator-join/table-right-000-ext-0123456789abcdef0123456789abcdef",  # ours
        "operator-join/table-right-000-ext-1234567890123456",
        "operator-join/table-right-000.tmp",
        "operator-join/table-right-000-my-backup",
        "operator-join/backup/table-right-000",
        "operator-join/notes",
        "operator-key-0.metadata",
        "table-right-000",
    ],
)
def test_names_that_no_writer_gives_do_not_count(name: str) -> None:
    assert cut(name) == []
    assert cut(name, TABLE) == cut(TABLE)


def test_names_of_arroyo_do_not_count_in_a_managed_job() -> None:
    file = "operator-key/table-k-000-0123456789abcdef"
    for more in ((), (file,)):
        lost = cut("operator-key/table-k-000", *more, paths=PROTOCOL, managed=True)
        assert lost == [("checkpoint-manifest.pb", "key") for _ in more]
    assert cut(file, managed=True) == []  # an attempt of another run may have left it
    assert cut("operator-Join/table-left-000") == []  # as a disk that ignores case keeps it


def test_what_was_dropped_on_purpose_is_not_missed() -> None:
    file = "operator-key/table-k-000-0123456789abcdef"
    assert cut(file, paths=PROTOCOL, managed=True, unchecked=["key"]) == []
    assert cut("operator-key/table-k-000", TABLE, unchecked=["key"]) == cut(TABLE) != []
    assert cut(TABLE, unchecked=["join/right"]) == cut(TABLE, unchecked=["join"]) == []
    assert cut(TABLE, unchecked=["source/right"]) == cut(TABLE)


def test_a_run_without_state_writes_into_other_directories() -> None:
    lost = cut("operator-key/metadata", TABLE, directory=1)
    assert [operator for _, operator in lost] == [""]


# ---- lost metadata -------------------------------------------------------------------------------


def epoch(
    number: int, *missing: str, directories: Collection[int] = (), min_epoch: int = 0
) -> EpochObjects:
    paths = {name: LEGACY.operator_metadata(OperatorId(name), Epoch(number)) for name in "ab"}
    return EpochObjects(
        epoch=Epoch(number),
        objects=paths,
        missing=missing,
        min_epoch=Epoch(min_epoch),
        directories=lambda: frozenset(map(Epoch, directories)),
    )


def lost(*epochs: EpochObjects, whole_from: int = 9, kept: Collection[int] = ()) -> list[int]:
    pinned = [Epoch(one) for one in kept]
    found = list(lost_metadata(epochs, whole_from=Epoch(whole_from), kept=pinned))
    assert all(f"{one.epoch:07}/operator-" in one.path and one.reason for one in found)
    return [one.epoch for one in found]


def test_a_cleanup_begins_with_the_oldest_epochs() -> None:
    assert lost(epoch(9), epoch(8), epoch(7, "a"), epoch(6, "a", "b")) == []
    assert lost(epoch(9), epoch(8, "a"), epoch(7)) == [8]
    assert lost(epoch(9), epoch(8, "a"), epoch(7, "b")) == [8]
    assert lost(epoch(9), epoch(8, "a"), epoch(7, "a")) == []
    assert lost(epoch(9), epoch(8, "a", "b"), epoch(7)) == [8, 8]


def test_the_newest_epochs_are_whole_whatever_is_older() -> None:
    assert lost(epoch(9, "a")) == [9]
    assert lost(epoch(9), epoch(8, "a"), whole_from=8) == [8]
    assert lost(epoch(9), epoch(8, "a"), whole_from=9) == []


def test_a_pinned_epoch_is_older_than_what_has_expired() -> None:
    assert lost(epoch(9), epoch(8, "a"), epoch(3), kept=[3]) == []
    assert lost(epoch(9), epoch(8, "a"), epoch(4), epoch(3), kept=[3]) == [8]


@pytest.mark.parametrize(
    ("epochs", "min_epoch", "whole_from", "kept", "expected"),
    [
        ([epoch(9), epoch(7)], 6, 5, (), [8]),  # consecutive since min_epoch
        ([epoch(9), epoch(7)], 8, 5, (), []),  # a run without state began at 9
        ([epoch(9, directories=[8, 9]), epoch(7)], 8, 5, (), [8]),  # has files of 8
        ([epoch(9, directories=[7, 8, 9]), epoch(6)], 8, 5, (), [8]),  # older than `min_epoch`
        ([epoch(9, directories=[1, 8]), epoch(7)], 8, 5, (), []),  # counts from 1
        ([epoch(9), epoch(5)], 7, 5, (), [8]),
        ([epoch(9), epoch(7)], 0, 5, (), []),
        ([epoch(9), epoch(7)], 1, 5, (), [8]),
        ([epoch(9, directories=[8, 9]), epoch(7)], 0, 5, (), [8]),
        ([epoch(9), epoch(3)], 2, 5, [3], []),  # the others have expired
        ([epoch(9), epoch(8), epoch(7), epoch(3)], 2, 5, [3], []),
        ([epoch(9), epoch(7), epoch(6), epoch(3)], 2, 5, [3], [8]),
        ([epoch(9, directories=[7, 8, 9])], 2, 8, (), [8]),  # no cleanup has reached 8
        ([epoch(9, directories=[7, 8, 9])], 2, 9, (), []),
        ([epoch(9, directories=[7, 8, 9])], 7, 5, (), [8]),
        ([epoch(9, directories=[8, 9])], 8, 5, (), []),
        ([], 0, 0, (), []),
        # A run without state began at 9, whose min_epoch is 8. Those of the run before stay.
        ([epoch(9), epoch(8, min_epoch=4), epoch(6)], 8, 5, (), [7]),
        ([epoch(9), epoch(8, min_epoch=6), epoch(6)], 8, 5, (), [7]),
        ([epoch(9), epoch(8, min_epoch=7), epoch(6)], 8, 5, (), []),  # 6 is of a run before
        ([epoch(9), epoch(8, min_epoch=4), epoch(6, "a")], 8, 5, (), []),  # a cleanup is at 6
        ([epoch(9), epoch(8, min_epoch=4), epoch(6)], 8, 5, [6], []),
    ],
)
def test_an_epoch_that_was_complete_is_missed(
    epochs: list[EpochObjects],
    min_epoch: int,
    whole_from: int,
    kept: Collection[int],
    expected: list[int],
) -> None:
    newest = [replace(one, min_epoch=Epoch(min_epoch)) for one in epochs[:1]]
    missed = lost_epochs(
        [*newest, *epochs[1:]], Epoch(min_epoch), Epoch(whole_from), [Epoch(one) for one in kept]
    )
    assert list(missed) == expected


@pytest.mark.parametrize(
    ("record", "found"),
    [
        ("0000007-0000000001-edit.json", 0),
        ("0000008-0000000001-edit.json", 1),  # of another epoch
        ("0000007-0000000001-compaction.json", 1),  # it unlists only what it merged
    ],
)
def test_only_an_edit_of_the_epoch_explains_what_is_not_listed(record: str, found: int) -> None:
    named = NamedTables(epoch=Epoch(7), worker_generation=None, tables={SOURCE: ["s"]})
    objects = [LEGACY.changes / record, LEGACY.checkpoint(Epoch(7), None) / TABLE]
    assert len(list(cut_metadata(LEGACY, named, objects))) == found


def test_metadata_that_names_objects_of_another_job_is_refused() -> None:
    own, other = LEGACY.root / "a", StatePath("copied/a")
    check_own(LEGACY, "epoch 7", [own], next_step="rebuild it")
    check_own(LEGACY, "epoch 7", [other], next_step="rebuild it", below=StatePath("copied"))
    with pytest.raises(ProtocolError, match="epoch 7 names objects of another job") as refused:
        check_own(LEGACY, "epoch 7", [own, other], next_step="rebuild it", epoch=7)
    assert refused.value.facts == {"job": LEGACY.root, "found": other, "epoch": 7}
    assert refused.value.next_step == "rebuild it"
