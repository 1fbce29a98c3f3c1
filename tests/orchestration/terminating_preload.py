"""What the processes of terminated runs are forked from: all of it imported, the jobs built."""

from arroyo_dagster.state.operations.compaction import job as compaction
from arroyo_dagster.state.operations.gc import execute as collecting
from arroyo_dagster.state.operations.verify import job as verify
from tests.orchestration.terminating import arroyo_compaction, arroyo_gc

assert collecting
assert compaction
assert verify
arroyo_compaction()
arroyo_gc()
