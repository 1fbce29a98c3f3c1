"""Readers of the records that are stored beside a job when this package changes it.

`codec.derived.encode` writes them.
"""

from __future__ import annotations

from arroyo_dagster.state.codec.derived import decoder
from arroyo_dagster.state.model.changes import ChangeRecord
from arroyo_dagster.state.model.compaction import CompactionRecord
from arroyo_dagster.state.model.maintenance_window import WindowRecord

decode_compaction_record = decoder(CompactionRecord)
decode_change_record = decoder(ChangeRecord)
decode_window_record = decoder(WindowRecord)
