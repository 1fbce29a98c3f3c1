"""Object paths, as both layouts of Arroyo have them."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from arroyo_dagster.errors import InputError
from arroyo_dagster.state.model.ids import (
    Epoch,
    JobId,
    OperatorId,
    PipelineId,
    StatePath,
    TableName,
    WorkerGeneration,
    checked_name,
)
from arroyo_dagster.state.model.layout import (
    JobPaths,
    Layout,
    parse_checkpoint_dir,
    parse_epoch_record,
    parse_manifest_path,
)
from tests.compat.arroyo import DATA

MAINTENANCE = JobPaths(JobId("job"), PipelineId("pipe"))
LEGACY = JobPaths(JobId("job"))
E, G, O = Epoch(12), WorkerGeneration(3), OperatorId("op_1")


def test_protocol_paths_are_those_of_the_specification() -> None:
    at = "pipe/job/generations/3/checkpoints/checkpoint-0000012"
    assert MAINTENANCE.layout is Layout.PROTOCOL
    assert MAINTENANCE.current_generation == "pipe/job/current-generation.json"
    assert MAINTENANCE.generation_manifest(G) == "pipe/job/generations/3/generation-manifest.json"
    assert MAINTENANCE.manifest(G, E) == f"{at}/checkpoint-manifest.pb"
    assert MAINTENANCE.committed(G, E) == f"{at}/committed.json"
    assert MAINTENANCE.epoch_record(E) == "pipe/job/epochs/epoch-0000012.record"
    assert MAINTENANCE.data_file(O, TableName("t"), 7, E, G, attempt="x") == (
        f"{at}/operator-op_1/table-t-007-x"
    )
    assert MAINTENANCE.subtask_metadata(O, 7, E, G) == f"{at}/operator-op_1-7.metadata"
    assert MAINTENANCE.operator_metadata(O, E, G) == f"{at}/operator-op_1/metadata"
    assert MAINTENANCE.stop_request == "pipe/job/_arroyo_dagster/stop-request.json"


def test_legacy_paths_are_those_of_the_specification() -> None:
    at = "job/checkpoints/checkpoint-0000012"
    assert LEGACY.layout is Layout.LEGACY
    assert LEGACY.legacy_metadata(E) == f"{at}/metadata"
    assert LEGACY.operator_metadata(O, E) == f"{at}/operator-op_1/metadata"
    assert LEGACY.subtask_metadata(O, 0, E) == f"{at}/operator-op_1-0.metadata"
    assert LEGACY.data_file(O, TableName("t"), 0, E, None, attempt="x") == (
        f"{at}/operator-op_1/table-t-000-x"
    )


def test_numbers_are_padded_but_never_cut() -> None:
    assert MAINTENANCE.epoch_record(Epoch(123_456_789)).name == "epoch-123456789.record"
    assert parse_epoch_record("epoch-123456789.record") == 123_456_789
    assert parse_checkpoint_dir("checkpoint-12345678") == 12_345_678


@pytest.mark.parametrize(
    "name", ["epoch-1.record", "epoch-0000001.record.bak", "Epoch-0000001.record", "epoch-.record"]
)
def test_other_names_are_no_epoch_records(name: str) -> None:
    assert parse_epoch_record(name) is None


@pytest.mark.parametrize("name", ["checkpoint-1", "checkpoint-00000x1", "xcheckpoint-0000001", ""])
def test_other_names_are_no_checkpoint_directories(name: str) -> None:
    assert parse_checkpoint_dir(name) is None


def test_the_path_of_a_manifest_says_whose_it_is() -> None:
    address = parse_manifest_path(MAINTENANCE.manifest(G, E))
    assert address is not None
    assert (address.paths, address.worker_generation, address.epoch) == (MAINTENANCE, G, E)


@pytest.mark.parametrize(
    "path",
    [
        "pipe/job/generations/3/checkpoints/checkpoint-0000012/committed.json",
        "pipe/job/generations/x/checkpoints/checkpoint-0000012/checkpoint-manifest.pb",
        "pipe/job/generations/3/checkpoints/checkpoint-12/checkpoint-manifest.pb",
        "job/generations/3/checkpoints/checkpoint-0000012/checkpoint-manifest.pb",
        "a/pipe/job/generations/3/checkpoints/checkpoint-0000012/checkpoint-manifest.pb",
        "checkpoint-manifest.pb",
    ],
)
def test_other_paths_are_no_manifests(path: str) -> None:
    assert parse_manifest_path(path) is None


def test_every_manifest_and_record_of_a_real_arroyo_lies_where_the_layout_says() -> None:
    seen = 0
    with tarfile.open(DATA / "arroyo-leader.tar.gz") as file:
        for member in file.getmembers():
            path = member.name.removeprefix("./")
            name = Path(path).name
            if name == "checkpoint-manifest.pb":
                address = parse_manifest_path(path)
                assert address is not None
                assert address.paths.manifest(address.worker_generation, address.epoch) == path
            elif name.endswith(".record"):
                pipeline, job, *_ = path.split("/")
                epoch = parse_epoch_record(name)
                assert epoch is not None
                assert JobPaths(JobId(job), PipelineId(pipeline)).epoch_record(epoch) == path
            else:
                continue
            seen += 1
    assert seen > 40


@pytest.mark.parametrize(
    "text", ["", "/a", "a/", "a//b", ".", "..", "a/../b", "./a", "a\\b", "ä" * 513]
)
def test_a_path_that_could_lead_elsewhere_is_no_state_path(text: str) -> None:
    with pytest.raises(InputError, match="not a path below"):
        StatePath(text)


def test_paths_are_put_together_and_taken_apart() -> None:
    path = StatePath("a") / "b/c"
    assert (path, path.name, path.parent) == ("a/b/c", "c", "a/b")
    assert StatePath("a").parent is None
    with pytest.raises(InputError):
        path / ".."


@pytest.mark.parametrize("name", ["", ".a", "-a", "a/b", "a b", "ä", "a" * 129, "..", "a\n"])
def test_a_name_that_is_not_safe_in_a_path_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="not a name"):
        checked_name(name, "job")


@pytest.mark.parametrize("name", ["a", "A-1.b_c", "0", "a" * 128])
def test_a_plain_name_is_taken(name: str) -> None:
    assert checked_name(name, "job") == name
