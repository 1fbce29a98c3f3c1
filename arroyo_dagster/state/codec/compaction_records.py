"""JSON form of the records by which a compaction hands merged files to a job's writer."""

from __future__ import annotations

from typing import Any

from arroyo_dagster.state.codec.records import (
    encode_json,
    known_fields,
    read_back,
    writable_version,
)
from arroyo_dagster.state.model.compaction import (
    CompactionRecord,
    Merged,
    MergedPairs,
    MergedRows,
)
from arroyo_dagster.state.model.ids import Epoch, JobId, OperatorId, PipelineId, TableName
from arroyo_dagster.state.model.json_fields import Fields
from arroyo_dagster.state.model.tables import TimeFile


@read_back
def encode_compaction_record(record: CompactionRecord) -> bytes:
    return encode_json(
        {
            "version": writable_version(record.version),
            "pipeline_id": record.pipeline,
            "job_id": record.job,
            "epoch": record.epoch,
            "token": record.token,
            "created_at_micros": record.created_at_micros,
            "merged": [_merged_to_json(merged) for merged in record.merged],
        }
    )


def decode_compaction_record(data: bytes, path: str) -> CompactionRecord:
    """Decode such a record. Raises FormatError: invalid, or of a later release."""
    with known_fields(data, path) as fields:
        return CompactionRecord(
            version=fields.number("version"),
            pipeline=PipelineId(fields.text("pipeline_id")),
            job=JobId(fields.text("job_id")),
            epoch=Epoch(fields.number("epoch")),
            token=fields.number("token"),
            created_at_micros=fields.number("created_at_micros"),
            merged=tuple(_merged_from_json(one) for one in fields.objects("merged")),
        )


def _merged_to_json(merged: Merged) -> dict[str, Any]:
    head = {"operator": merged.operator, "table": merged.table}
    if isinstance(merged, MergedPairs):
        return {**head, "inputs": list(merged.inputs), "outputs": list(merged.outputs)}
    rows = {"inputs": merged.inputs, "outputs": merged.outputs}
    return {**head, "rows": {name: [_to_json(f) for f in files] for name, files in rows.items()}}


def _to_json(file: TimeFile) -> dict[str, Any]:
    return {
        "epoch": file.epoch,
        "path": file.path,
        "min_routing_key": file.min_routing_key,
        "max_routing_key": file.max_routing_key,
        "max_timestamp_micros": file.max_timestamp_micros,
        "compaction_generation": file.compaction_generation,
    }


def _merged_from_json(fields: Fields) -> Merged:
    operator = OperatorId(fields.text("operator"))
    table = TableName(fields.text("table"))
    rows = fields.optional_object("rows")
    if rows is None:
        return MergedPairs(
            operator=operator,
            table=table,
            inputs=fields.refs("inputs"),
            outputs=fields.refs("outputs"),
        )
    return MergedRows(
        operator=operator,
        table=table,
        inputs=tuple(_time_file(one) for one in rows.objects("inputs")),
        outputs=tuple(_time_file(one) for one in rows.objects("outputs")),
    )


def _time_file(fields: Fields) -> TimeFile:
    return TimeFile(
        epoch=Epoch(fields.number("epoch")),
        path=fields.ref("path"),
        min_routing_key=fields.number("min_routing_key"),
        max_routing_key=fields.number("max_routing_key"),
        max_timestamp_micros=fields.number("max_timestamp_micros"),
        compaction_generation=fields.number("compaction_generation"),
    )
