"""Readers of the records that are stored beside a job when this package changes it.

`codec.derived.encode` writes them.
"""

from __future__ import annotations

from arroyo_dagster.errors import FormatError
from arroyo_dagster.state.codec.derived import decoder
from arroyo_dagster.state.model.changes import ChangeRecord
from arroyo_dagster.state.model.compaction import CompactionRecord
from arroyo_dagster.state.model.json_fields import KEEP
from arroyo_dagster.state.model.maintenance_window import WindowRecord

decode_compaction_record = decoder(CompactionRecord)
decode_window_record = decoder(WindowRecord)
_decode_change = decoder(ChangeRecord)


def decode_change_record(data: bytes, path: str) -> ChangeRecord:
    """Decode the record of a change, which its name describes.

    Raises:
        FormatError: it does not decode, or has the name of another change.
    """
    record: ChangeRecord = _decode_change(data, path)
    if path.rpartition("/")[2] != record.name:
        raise FormatError(
            f"the record is that of another change, {record.name}", path=path, next_step=KEEP
        )
    return record
