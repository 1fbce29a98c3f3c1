"""Readers of the records that are stored beside a job when this package changes it.

`codec.derived.encode` writes them.
"""

from __future__ import annotations

from arroyo_dagster.state.codec.derived import decoder
from arroyo_dagster.state.model.compaction import CompactionRecord
from arroyo_dagster.state.model.maintenance_window import WindowRecord
from arroyo_dagster.state.model.rewrite import RewriteRecord
from arroyo_dagster.state.model.surgery.plans import EditRecord
from arroyo_dagster.state.model.surgery.rebuild import RebuildRecord

decode_compaction_record = decoder(CompactionRecord)
decode_rewrite_record = decoder(RewriteRecord)
decode_edit_record = decoder(EditRecord)
decode_rebuild_record = decoder(RebuildRecord)
decode_window_record = decoder(WindowRecord)
