"""Object paths, as both layouts of Arroyo have them."""

from __future__ import annotations

import tarfile
from pathlib import Path

from arroyo_dagster.state import JobId, JobPaths, PipelineId
from arroyo_dagster.state.model.layout import parse_epoch_record, parse_manifest_path
from tests.compat.arroyo import DATA


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
