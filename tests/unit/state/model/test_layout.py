"""Object paths, as both layouts of Arroyo have them."""

from __future__ import annotations

import tarfile
from pathlib import Path

from arroyo_dagster.state import (
    Epoch,
    JobId,
    JobPaths,
    Layout,
    OperatorId,
    PipelineId,
    TableName,
    WorkerGeneration,
)
from arroyo_dagster.state.model.layout import parse_epoch_record, parse_manifest_path
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
