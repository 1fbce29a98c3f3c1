"""Protobuf metadata, both ways."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from arroyo_dagster.errors import FormatError, InputError
from arroyo_dagster.state import Epoch, JobId
from arroyo_dagster.state.codec.metadata import (
    decode_legacy_checkpoint,
    decode_manifest,
    encode_legacy_checkpoint,
    encode_operator,
)
from tests.compat.arroyo import DATA
from tests.formats import LegacyCheckpoint, decode_operator, encode_manifest
from tests.formats import state_pb2 as pb

MARK = "unknown-42"


def stranger(level: str) -> bytes:
    """A field of a later release, which says at which level it was put."""
    text = f"{MARK}:{level}".encode()
    number = 7000  # length-delimited
    tag = number << 3 | 2
    encoded = bytearray()
    while tag:
        encoded.append(tag & 127 | (128 if tag > 127 else 0))
        tag >>= 7
    return bytes(encoded) + bytes([len(text)]) + text


def objects(ending: str, archives: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    for archive in archives:
        with tarfile.open(DATA / f"arroyo-{archive}.tar.gz") as file:
            for member in file:
                if member.isfile() and Path(member.name).name == ending:
                    content = file.extractfile(member)
                    assert content is not None
                    yield member.name, content.read()


def test_every_manifest_of_a_real_arroyo_decodes_equal_once_it_is_encoded_again() -> None:
    seen = 0
    for name, data in objects("checkpoint-manifest.pb", ("leader",)):
        manifest = decode_manifest(data, name)
        again = encode_manifest(manifest)
        assert decode_manifest(again, name) == manifest
        assert as_fields(pb.CheckpointManifest, again) == as_fields(pb.CheckpointManifest, data)
        seen += 1
    assert seen > 20


def test_every_metadata_object_of_a_real_arroyo_decodes_equal_once_it_is_encoded_again() -> None:
    seen = {"operator": 0, "checkpoint": 0}
    for name, data in objects("metadata", ("legacy", "flights")):
        if Path(name).parent.name.startswith("operator-"):
            operator = decode_operator(data, name)
            again = encode_operator(operator)
            assert decode_operator(again, name) == operator
            kind: Any = pb.OperatorCheckpointMetadata
            seen["operator"] += 1
        else:
            checkpoint = decode_legacy_checkpoint(data, name)
            again = encode_legacy_checkpoint(checkpoint)
            assert decode_legacy_checkpoint(again, name) == checkpoint
            kind = pb.CheckpointMetadata
            seen["checkpoint"] += 1
        assert as_fields(kind, again) == as_fields(kind, data)
    assert min(seen.values()) > 20


def as_fields(kind: type[Any], data: bytes) -> Any:
    """A message with the maps and inner messages of Arroyo's bytes fields taken apart."""
    message = kind()
    message.ParseFromString(data)
    return str(_ordered(message))


_TABLE_DATA = {
    pb.GLOBAL_KEY_VALUE: pb.GlobalKeyedTableTaskCheckpointMetadata,
    pb.EXPIRING_KEYED_TIME_TABLE: pb.ExpiringKeyedTimeTableCheckpointMetadata,
}


def _ordered(message: Message) -> Any:
    if isinstance(message, pb.TableCheckpointMetadata):
        # The order of map entries, and whether a default value is spelt out, differ by encoder.
        return message.table_type, _ordered(
            _TABLE_DATA[message.table_type].FromString(message.data)
        )
    return sorted((field.name, _value(value)) for field, value in message.ListFields())


def _value(value: Any) -> Any:
    if isinstance(value, Message):
        return _ordered(value)
    if hasattr(value, "items"):
        return sorted((key, _value(inner)) for key, inner in value.items())
    if isinstance(value, bytes | str | int | float | bool):
        return value
    return [_value(inner) for inner in value]


def with_strangers() -> bytes:
    """A manifest in which every message of every level holds a field nobody knows."""
    schema = pb.ArroyoSchema(arrow_schema="{}", has_keys=True, key_indices=[0])
    expiring = pb.ExpiringKeyedTimeTableConfig(table_name="t", retention_micros=5)
    expiring.schema.ParseFromString(schema.SerializeToString() + stranger("schema"))
    time_file = pb.ParquetTimeFile(epoch=1, file="a/b")
    time_file.MergeFromString(stranger("time file"))
    types = pb.StoredTypes(key='"string"', value='"i64"')
    types.MergeFromString(stranger("types"))
    g_config = pb.TableConfig(
        table_type=pb.GLOBAL_KEY_VALUE,
        config=pb.GlobalKeyedTableConfig(table_name="g").SerializeToString()
        + stranger("global config"),
        types=types,
    )
    g_config.MergeFromString(stranger("config of g"))
    t_config = pb.TableConfig(
        table_type=pb.EXPIRING_KEYED_TIME_TABLE,
        config=expiring.SerializeToString() + stranger("expiring config"),
    )
    t_config.MergeFromString(stranger("config of t"))
    g_files = pb.TableCheckpointMetadata(
        table_type=pb.GLOBAL_KEY_VALUE,
        data=pb.GlobalKeyedTableTaskCheckpointMetadata(files=["x/y"]).SerializeToString()
        + stranger("global files"),
    )
    g_files.MergeFromString(stranger("table g"))
    t_files = pb.TableCheckpointMetadata(
        table_type=pb.EXPIRING_KEYED_TIME_TABLE,
        data=pb.ExpiringKeyedTimeTableCheckpointMetadata(files=[time_file]).SerializeToString()
        + stranger("expiring files"),
    )
    t_files.MergeFromString(stranger("table t"))
    g_report = pb.TableSubtaskCheckpointMetadata(
        subtask_index=3,
        table_type=pb.GLOBAL_KEY_VALUE,
        data=pb.GlobalKeyedTableSubtaskCheckpointMetadata(
            subtask_index=3, file="x/y"
        ).SerializeToString()
        + stranger("global report"),
    )
    g_report.MergeFromString(stranger("report of g"))
    t_report = pb.TableSubtaskCheckpointMetadata(
        subtask_index=3,
        table_type=pb.EXPIRING_KEYED_TIME_TABLE,
        data=pb.ExpiringKeyedTimeSubtaskCheckpointMetadata(
            subtask_index=3, files=[time_file]
        ).SerializeToString()
        + stranger("expiring report"),
    )
    t_report.MergeFromString(stranger("report of t"))
    subtask = pb.SubtaskCheckpointMetadata(
        subtask_index=3,
        table_metadata={"g": g_report, "t": t_report},
        table_configs={"g": g_config, "t": t_config},
    )
    subtask.MergeFromString(stranger("subtask"))
    inner = pb.OperatorMetadata(job_id="j", operator_id="o", epoch=1, parallelism=4)
    inner.MergeFromString(stranger("inner operator"))
    operator = pb.OperatorCheckpointMetadata(
        operator_metadata=inner,
        table_checkpoint_metadata={"g": g_files, "t": t_files},
        table_configs={"g": g_config, "t": t_config},
        subtask=subtask,
    )
    operator.MergeFromString(stranger("operator"))
    progress = pb.RunProgress(query_id="q")
    progress.MergeFromString(stranger("progress"))
    manifest = pb.CheckpointManifest(
        pipeline_id="p", job_id="j", epoch=1, operators=[operator], progress=progress
    )
    manifest.MergeFromString(stranger("manifest"))
    return manifest.SerializeToString()


def test_fields_nobody_knows_survive_at_every_level() -> None:
    data = with_strangers()
    once = encode_manifest(decode_manifest(data, "m"))
    twice = encode_manifest(decode_manifest(once, "m"))
    assert once.count(MARK.encode()) == data.count(MARK.encode()) == 27
    assert once == twice
    assert len(once) == len(data)


def test_fields_nobody_knows_survive_in_the_legacy_layout_too() -> None:
    progress = pb.RunProgress(query_id="q")
    progress.MergeFromString(stranger("progress"))
    head = pb.CheckpointMetadata(job_id="j", epoch=3, operator_ids=["o"], progress=progress)
    head.MergeFromString(stranger("checkpoint"))
    data = head.SerializeToString(deterministic=True)
    assert encode_legacy_checkpoint(decode_legacy_checkpoint(data, "m")) == data
    operator = pb.CheckpointManifest.FromString(with_strangers()).operators[0]
    whole = operator.SerializeToString(deterministic=True)
    again = encode_operator(decode_operator(whole, "m"))
    assert again.count(MARK.encode()) == whole.count(MARK.encode()) == 25
    assert len(again) == len(whole)


@pytest.mark.parametrize("epoch", [-1, 2**32])
def test_an_epoch_that_does_not_fit_is_refused_before_anything_is_written(epoch: int) -> None:
    head = LegacyCheckpoint(
        job=JobId("j"),
        epoch=Epoch(epoch),
        min_epoch=Epoch(0),
        start_time_micros=1,
        finish_time_micros=2,
        operators=(),
    )
    with pytest.raises(InputError, match="does not fit") as caught:
        encode_legacy_checkpoint(head)
    assert caught.value.facts["epoch"] == epoch


@pytest.mark.parametrize("kind", [0, 3, 77])
def test_an_unknown_kind_of_table_is_named(kind: int) -> None:
    operator = pb.OperatorCheckpointMetadata(
        operator_metadata=pb.OperatorMetadata(operator_id="o"),
        table_checkpoint_metadata={
            "strange": pb.TableCheckpointMetadata(table_type=pb.TableEnum.ValueType(kind))
        },
    )
    with pytest.raises(FormatError, match=f"table type {kind}") as caught:
        decode_operator(operator.SerializeToString(), "some/path")
    assert caught.value.facts["table"] == "strange"
    assert caught.value.facts["path"] == "some/path"


@pytest.mark.parametrize(
    "file", ["/etc/passwd", "a/../../b", "", "a//b", "a\\b", "./a", "a/", "a" * 1025]
)
def test_a_reference_that_leads_out_of_the_checkpoint_url_is_refused(file: str) -> None:
    files = pb.GlobalKeyedTableTaskCheckpointMetadata(files=[file]).SerializeToString()
    operator = pb.OperatorCheckpointMetadata(
        operator_metadata=pb.OperatorMetadata(operator_id="o"),
        table_checkpoint_metadata={
            "g": pb.TableCheckpointMetadata(table_type=pb.GLOBAL_KEY_VALUE, data=files)
        },
    )
    with pytest.raises(FormatError, match="not a path below the checkpoint URL"):
        decode_operator(operator.SerializeToString(), "some/path")
